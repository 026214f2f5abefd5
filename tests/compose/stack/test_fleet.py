"""The devices that get a worker, and the environment of each worker."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from penstock.compose.stack.fleet import Device, JournalProbe, choose, worker_program, worker_timeouts
from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Settings
from tests.packages import write_package

LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-aaaaaaaa-0000-0000-0000-000000000000)
GPU 1: NVIDIA H200 (UUID: GPU-bbbbbbbb-0000-0000-0000-000000000000)
"""


def settings(tmp_path: Path, **environ: str) -> Settings:
    return Settings.load(environ={"PENSTOCK_HOME": str(tmp_path), **environ}, cwd=tmp_path)


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a machine whose nvidia-smi lists two GPUs."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTING}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return dict(os.environ)


def test_every_gpu_gets_a_worker(tmp_path, two_gpus):
    """auto: one worker per visible GPU, each under its own number."""
    assert choose(settings(tmp_path), two_gpus) == [
        Device("gpu", 0, "GPU-aaaaaaaa-0000-0000-0000-000000000000"),
        Device("gpu", 1, "GPU-bbbbbbbb-0000-0000-0000-000000000000"),
    ]


def test_hidden_gpus_get_none(tmp_path, two_gpus):
    """CUDA_VISIBLE_DEVICES limits the GPUs; when it hides all, the CPU is left."""
    visible = choose(settings(tmp_path), {**two_gpus, "CUDA_VISIBLE_DEVICES": "1"})
    assert [device.name for device in visible] == ["gpu1"]
    assert choose(settings(tmp_path), {**two_gpus, "CUDA_VISIBLE_DEVICES": ""}) == [Device("cpu", 0)]


def test_one_gpu_can_be_chosen(tmp_path, two_gpus):
    """cuda:N counts the visible GPUs; cpu chooses the CPU of a machine with GPUs."""
    only = choose(settings(tmp_path, PENSTOCK_INFERENCE_DEVICE="cuda:1"), two_gpus)
    assert [device.name for device in only] == ["gpu1"]
    assert choose(settings(tmp_path, PENSTOCK_INFERENCE_DEVICE="cpu"), two_gpus) == [Device("cpu", 0)]


def test_a_device_that_does_not_exist_is_refused(tmp_path, two_gpus):
    """The error lists the devices that exist."""
    with pytest.raises(ConfigurationError, match=r"Device cuda:2 is not there\. Expected .*: cuda:0, cuda:1"):
        choose(settings(tmp_path, PENSTOCK_INFERENCE_DEVICE="cuda:2"), two_gpus)
    with pytest.raises(ConfigurationError, match=r"Device cuda is not there\. Expected .*: none"):
        choose(settings(tmp_path, PENSTOCK_INFERENCE_DEVICE="cuda"), {**two_gpus, "CUDA_VISIBLE_DEVICES": "-1"})


def test_a_gpu_worker_sees_its_gpu_only(tmp_path):
    """One process per GPU: environment and name of the child have its GPU."""
    program = worker_program(Device("gpu", 1, "GPU-bbbb"), settings(tmp_path), {"CUDA_VISIBLE_DEVICES": "0,1"}, None)
    assert program.environ["CUDA_VISIBLE_DEVICES"] == "GPU-bbbb"
    assert program.environ["PENSTOCK_INFERENCE_DEVICE"] == "cuda:0"
    assert program.environ["PENSTOCK_WORKER_INDEX"] == "1"
    assert list(program.arguments) == [sys.executable, "-m", "penstock.workers", "-n", "gpu1@%h", "--loglevel=warning"]
    assert program.beats


def test_a_cpu_worker_sees_no_gpu(tmp_path):
    """The CPU worker hides the GPUs, and has the number of the settings."""
    chosen = choose(settings(tmp_path, PENSTOCK_INFERENCE_DEVICE="cpu", PENSTOCK_WORKER_INDEX="2"), {})
    program = worker_program(chosen[0], settings(tmp_path), {}, None)
    assert program.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert program.environ["PENSTOCK_INFERENCE_DEVICE"] == "cpu"
    assert list(program.arguments[3:5]) == ["-n", "cpu2@%h"]


def test_workers_read_the_settings_of_their_supervisor(tmp_path):
    """The child's own Settings.load finds the values of the command line, also from another folder."""
    (tmp_path / "own-models").mkdir()
    decided = settings(
        tmp_path, PENSTOCK_INFERENCE_REPO_ROOT=str(tmp_path / "own-models"), PENSTOCK_WORKER_MODELS="a,b"
    )
    program = worker_program(Device("cpu", 0), decided, {"PENSTOCK_METRICS_PORT": "0"}, None)
    child = Settings.load(environ=program.environ, cwd=tmp_path)
    assert child.inference.repo_root == tmp_path / "own-models"
    assert child.worker.models == ("a", "b")
    assert child.home == tmp_path


def test_timeouts_follow_the_settings(tmp_path):
    """The silence limit follows the limit of a forward; the warm time follows the grace period of a drain."""
    given = settings(tmp_path, PENSTOCK_INFERENCE_TIMEOUT_SECONDS="7", PENSTOCK_INFERENCE_QUEUE_DRAIN_GRACE_S="3")
    timeouts = worker_timeouts(given)
    assert (timeouts.silence_s, timeouts.warm_s) == (8, 8)


def test_the_silence_limit_follows_packages_that_are_added(tmp_path):
    """The probe of a worker reads the packages again; a folder that cannot be read has no limit."""
    root = tmp_path / "packages"
    root.mkdir()
    given = settings(tmp_path, PENSTOCK_INFERENCE_TIMEOUT_SECONDS="7", PENSTOCK_INFERENCE_REPO_ROOT=str(root))
    probe = JournalProbe(given, "")
    assert probe.silence_s() == 8
    package = write_package(root, "slow", "def build(): ...")
    with (package / "model.yaml").open("a") as spec:
        spec.write("timeout_s: 20\n")
    assert probe.silence_s() == 21
    unreadable = settings(tmp_path, PENSTOCK_INFERENCE_REPO_ROOT=str(tmp_path / ("x" * 300)))
    assert JournalProbe(unreadable, "").silence_s() == 0
