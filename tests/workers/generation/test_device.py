"""The device of an engine: a worker gives its own, and what a GPU must show where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.registry.errors import ConfigurationError, MissingRequirement
from penstock.registry.package import load_package
from penstock.workers.generation.served import GenerateRuntime
from tests.servers import leave_out
from tests.workers.generation.architectures import decoder
from tests.workers.generation.engines import GREEDY, open_engine, prompts_of, token_ids
from tests.workers.generation.packages import write_writer


def test_package_is_loaded_onto_the_device_of_its_worker(tmp_path: Path):
    """A worker that is pinned to a GPU gives its name, and a GPU that is not there is told."""
    runtime = GenerateRuntime(load_package(write_writer(tmp_path)))
    with pytest.raises(MissingRequirement, match=r"Device 'cuda:99' cannot be used"):
        runtime.load("cuda:99", 1)
    runtime.close()


def test_package_for_a_gpu_is_refused_by_a_worker_without(tmp_path: Path):
    """Its pages are a share of the memory of a GPU."""
    runtime = GenerateRuntime(load_package(write_writer(tmp_path, kv_cache_mb=None, hbm_utilization=0.8)))
    with pytest.raises(
        ConfigurationError, match=r"writer/1: hbm_utilization: found 0\.8 on a CPU, expected kv_cache_mb"
    ):
        runtime.load("cpu", 1)
    runtime.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GPT-OSS", "Llama 4 with chunks"])
@pytest.mark.parametrize("attention", ["sdpa", "triton"])
def test_gpu_writes_what_the_cpu_does(name, attention):
    """Greedy tokens in fp32, with gathered pages and with the kernel."""
    if not torch.cuda.is_available():
        leave_out("needs a CUDA device")
    prompts = prompts_of(3, 17, 40)
    expected = token_ids(open_engine(decoder(name), kv_cache_mb=4).generate(prompts, GREEDY))
    engine = open_engine(decoder(name), kv_cache_mb=4, device="cuda:0", attention=attention)
    assert token_ids(engine.generate(prompts, GREEDY)) == expected


@pytest.mark.gpu
def test_gpu_replays_graphs():
    """One graph for each bucket of rows, and the same tokens."""
    if not torch.cuda.is_available():
        leave_out("needs a CUDA device")
    prompts = prompts_of(3, 17, 40)
    expected = token_ids(open_engine(decoder("Llama"), kv_cache_mb=4).generate(prompts, GREEDY))
    engine = open_engine(decoder("Llama"), kv_cache_mb=4, device="cuda:0", cuda_graphs=True, num_speculative_tokens=0)
    assert token_ids(engine.generate(prompts, GREEDY)) == expected
    assert engine.forwards.graphs is not None
    assert engine.forwards.graphs.num_captured >= 1
