"""The proxy of one model object: nothing but its calls is different from the model (AR-011)."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

from penstock.registry.errors import InvalidInput
from penstock.workers.frameworks.inference_proxy import InferenceProxy


class Model:
    """A callable with state."""

    def __init__(self) -> None:
        self.scale = 3
        self.layers = ["a", "b"]

    def __call__(self, x: int, *, offset: int = 0) -> int:
        return x * self.scale + offset

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> str:
        return self.layers[index]

    def named(self, name: str) -> tuple[str, int]:
        return name, self.scale


@pytest.fixture
def model() -> Model:
    return Model()


def test_calls_reach_the_model_and_are_counted(model: Model):
    """Positional and named arguments pass unchanged; each call counts one."""
    proxy = InferenceProxy(model)
    assert proxy.call_count == 0
    assert [proxy(2), proxy(2, offset=1)] == [6, 7]
    assert proxy.call_count == 2
    model(1)
    assert proxy.call_count == 2


def test_attributes_are_read_from_set_on_and_deleted_from_the_model(model: Model):
    """No attribute of the proxy hides one of the model, or is hidden by one."""
    proxy = InferenceProxy(model)
    assert (proxy.scale, proxy.named("n")) == (3, ("n", 3))
    proxy.scale = 5
    assert (model.scale, proxy(1)) == (5, 5)
    proxy.extra = "new"
    assert model.extra == "new"  # type: ignore[attr-defined]
    del proxy.extra
    assert not hasattr(model, "extra")
    with pytest.raises(AttributeError, match="absent"):
        _ = proxy.absent
    assert {"scale", "named", "call_count"} <= set(dir(proxy))


def test_proxy_passes_for_its_model(model: Model):
    """`isinstance`, length, items and truth are the model's; the model is at hand as `__wrapped__`."""
    proxy = InferenceProxy(model)
    assert isinstance(proxy, Model)
    assert isinstance(InferenceProxy(torch.nn.ReLU()), torch.nn.Module)
    assert (len(proxy), proxy[0], list(proxy)) == (2, "a", ["a", "b"])
    assert bool(proxy)
    assert not InferenceProxy(torch.nn.Sequential())
    assert proxy.__wrapped__ is model
    assert repr(proxy) == f"InferenceProxy({model!r})"
    assert weakref.ref(proxy)() is proxy


def test_model_itself_is_unchanged(model: Model):
    """No attribute is added, no class is patched, and other instances know nothing."""
    state, kind = dict(vars(model)), dict(vars(Model))
    proxy = InferenceProxy(model)
    proxy(1)
    assert vars(model) == state
    assert dict(vars(Model)) == kind
    assert type(model) is Model


def test_observers_see_arguments_and_results(model: Model):
    """`before` sees what goes in, `after` what comes out and how long it took."""
    seen: list[Any] = []
    proxy = InferenceProxy(
        model,
        before=lambda args, kwargs: seen.append((args, dict(kwargs))),
        after=lambda result, seconds: seen.append((result, seconds >= 0)),
    )
    assert proxy(2, offset=1) == 7
    assert seen == [((2,), {"offset": 1}), (7, True)]


def test_what_the_model_raises_passes_through():
    """The call counts, `after` is not called, and the model's exception reaches the caller."""
    problem, told = ZeroDivisionError("no"), []

    def fails(x: int) -> int:
        raise problem

    proxy = InferenceProxy(fails, after=lambda result, seconds: told.append(result))
    with pytest.raises(ZeroDivisionError) as raised:
        proxy(1)
    assert raised.value is problem
    assert (proxy.call_count, told) == (1, [])


def test_what_an_observer_raises_reaches_the_caller(model: Model):
    """Nothing is swallowed; what `before` raises keeps the call from the model."""

    def refuses(args: tuple[Any, ...], kwargs: Any) -> None:
        raise PermissionError("not now")

    with pytest.raises(PermissionError, match="not now"):
        InferenceProxy(model, before=refuses)(1)


def pickled(proxy: Any) -> Any:
    """What another process would get."""
    return pickle.loads(pickle.dumps(proxy))  # noqa: S301 - its own bytes


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickled])
def test_copies_are_proxies_of_their_own(model: Model, copied: Callable[[Any], Any]):
    """A copy wraps a copy of the model and has counted nothing yet."""
    proxy = InferenceProxy(model)
    proxy(1)
    other = copied(proxy)
    assert type(other) is InferenceProxy
    assert other.__wrapped__ is not model
    assert (other.call_count, other(2)) == (0, 6)
    other.scale = 1
    assert (other(2), proxy(2), proxy.call_count) == (2, 6, 2)


@pytest.fixture
def busy_threads() -> Iterator[None]:
    """Threads take turns as often as the interpreter can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("busy_threads")
def test_calls_of_many_threads_are_all_counted(model: Model):
    """None is lost, however they interleave."""
    proxy = InferenceProxy(model)
    start = threading.Barrier(8)

    def call() -> None:
        start.wait()
        for _ in range(2_000):
            proxy(1)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert proxy.call_count == 16_000


def test_object_that_cannot_be_called_is_refused():
    """The error names the type and the method that is expected."""
    with pytest.raises(InvalidInput, match=r"^A list cannot be proxied\. Expected an object with __call__\(\)$"):
        InferenceProxy([1])


def test_a_call_adds_two_calls_of_its_own():
    """Those of the proxy and of its lock: 2 us at most, which the benchmark measures and a busy machine cannot show."""

    def model(x: int) -> int:
        return x

    proxy = InferenceProxy(model)
    called: list[str] = []

    def note(frame: FrameType, event: str, function: Any) -> None:
        if event in ("call", "c_call"):
            called.append(function.__name__ if event == "c_call" else frame.f_code.co_name)

    # A finalizer would be a call, too.
    gc.disable()
    sys.setprofile(note)
    try:
        proxy(1)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert called == ["__call__", "__exit__", "model", "setprofile"]
