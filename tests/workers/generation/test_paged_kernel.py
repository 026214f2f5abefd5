"""Our kernel for decoding rows: what it computes, in triton's interpreter; that it compiles for GPUs; when it is used.

No test here runs it on a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.registry.errors import ConfigurationError
from penstock.workers.generation.attention_choice import choose_kernel, why_no_kernel
from penstock.workers.runtime.torch_device import TorchDevice
from tests.servers import ROOT, require_module
from tests.workers.generation.architectures import decoder
from tests.workers.generation.engines import open_engine
from tests.workers.generation.interpreted import CASES, REPLAYED, TEXTS

MOST_SHARED_BYTES = 100_000
"""A block has 163 kB of shared memory with compute capability 8.0, and 227 kB with 9.0; less with 8.6 and 8.9."""


def output_of(module: str, home: Path, *arguments: str, **environment: str) -> Any:
    """What a program of this folder prints, with an empty cache of compiled kernels."""
    require_module("triton")
    command = [sys.executable, "-m", f"tests.workers.generation.{module}", *arguments]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(home), "OMP_NUM_THREADS": "1", **environment}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout)


def interpreted(part: str, home: Path) -> Any:
    """A part of the program, which runs in a process of its own: the interpreter is chosen at import."""
    return output_of("interpreted", home, part, TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The error of each case."""
    return interpreted("errors", tmp_path_factory.mktemp("triton"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_kernel_computes_what_gathered_pages_do(errors, case):
    """Rows of nine lengths in random pages: the largest difference is rounding."""
    assert errors[case] <= CASES[case].tolerance


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_engine_writes_the_same_with_the_kernel(tmp_path, name):
    """Greedy tokens of a whole engine, with windows, caps, sinks and chunks; every decoding row went through it."""
    gathered, by_kernel, calls = interpreted(name, tmp_path)
    assert by_kernel == gathered
    assert calls > 0


@pytest.mark.slow
def test_batch_of_an_earlier_step_computes_a_later_one(tmp_path):
    """After one copy of the plan, as a CUDA graph does: other rows, positions and pages, and padding rows."""
    replayed = interpreted("replayed", tmp_path)
    assert len(replayed) == 3 * len(REPLAYED)
    for name, (is_like, rows, difference) in replayed.items():
        assert (is_like, rows) == (True, 8), name
        assert difference <= 1e-5, name


@pytest.mark.parametrize(
    ("programs", "expected"), [(1, 16), (8, 16), (32, 16), (33, 8), (64, 8), (200, 2), (256, 2), (257, 1), (4_096, 1)]
)
def test_keys_of_few_rows_are_shared_out(programs, expected):
    """A power of two, so that the merged parts are one block."""
    from penstock.workers.generation.paged_kernel import splits_of

    assert splits_of(programs) == expected


@pytest.mark.slow
def test_kernel_compiles_for_gpus(tmp_path):
    """Machine code for compute capabilities 8.0 and 9.0, without spare shared memory that a GPU has not."""
    found = output_of("compiled", tmp_path, TRITON_INTERPRET="0")
    assert len(found) == 12
    assert max(found.values()) <= MOST_SHARED_BYTES


@pytest.mark.parametrize(
    ("capability", "has_triton", "is_interpreted", "expected"),
    [
        ((9, 0), True, False, ""),
        ((8, 0), True, False, ""),
        ((7, 5), True, False, "the GPU has compute capability 7.5, the kernel needs 8.0"),
        ((9, 0), False, False, "triton is not installed"),
        (None, True, False, "the kernel needs a GPU"),
        (None, True, True, ""),
        (None, False, True, "triton is not installed"),
    ],
)
def test_kernel_needs_a_gpu_and_triton(capability, has_triton, is_interpreted, expected):
    """Each reason is told."""
    assert why_no_kernel(capability, has_triton=has_triton, is_interpreted=is_interpreted) == expected


def test_cpu_gathers_pages(monkeypatch):
    """By itself, also where the interpreter is on; and the kernel is refused there by name."""
    device = TorchDevice("cpu", 1)
    assert choose_kernel("auto", device) is None
    assert choose_kernel("sdpa", device) is None
    with pytest.raises(ConfigurationError, match="attention: found triton, expected auto or sdpa here: "):
        open_engine(decoder("Llama"), kv_cache_mb=4, attention="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_kernel("auto", device) is None
