"""The CPU threads of a torch device: those of its forwards, and of no other code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from penstock.workers.runtime.torch_device import TorchDevice, keeping_threads


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """Numbers that the other tests of this process do not see."""
    with keeping_threads():
        yield


def on_new_thread(work: Callable[[], int]) -> int:
    """What the work returns."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(180)


def threads_of(device: TorchDevice) -> int:
    """The threads of a forward on the device."""
    with device.inference():
        return torch.get_num_threads()


def test_forward_has_the_threads_of_its_device():
    """Each device of a process has its own, whichever was made last, and on any thread."""
    few, many = TorchDevice("cpu", 3), TorchDevice("cpu", 5)
    assert [threads_of(each) for each in (few, many, few)] == [3, 5, 3]
    assert [on_new_thread(partial(threads_of, each)) for each in (few, many, few)] == [3, 5, 3]


def test_device_without_a_number_leaves_the_threads_of_its_caller():
    """The caller of an engine may have chosen them after it was built."""
    device = TorchDevice("cpu")
    torch.set_num_threads(3)
    assert threads_of(device) == 3


def test_number_that_a_thread_sets_at_its_first_use_of_torch_stays():
    """Another thread that sets its own number later does not change it."""
    few, is_set, goes_on = TorchDevice("cpu", 3), threading.Event(), threading.Event()

    def forward() -> int:
        with few.inference():
            is_set.set()
            goes_on.wait(180)
            return torch.get_num_threads()

    torch.set_num_threads(5)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(forward)
        assert is_set.wait(180)
        torch.set_num_threads(4)
        goes_on.set()
        assert found.result(180) == 3


def test_threads_are_kept_for_the_caller_and_for_new_threads():
    """The body may load models with other numbers."""
    torch.set_num_threads(5)
    with keeping_threads():
        TorchDevice("cpu", 3)
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 5
    assert on_new_thread(torch.get_num_threads) == 5
