"""The device of a worker: the choice, and the lock against a second worker."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.registry.errors import ConfigurationError
from penstock.workers.process.device import Gpu, granted_threads, parse_listing, pin, select_visible
from tests.servers import ROOT

TWO_GPUS = """\
GPU 0: NVIDIA H200 (UUID: GPU-aaaa1111-0000-0000-0000-000000000000)
GPU 1: NVIDIA H200 (UUID: GPU-bbbb2222-0000-0000-0000-000000000000)
"""
SLICED = """\
GPU 0: NVIDIA H200 (UUID: GPU-aaaa1111-0000-0000-0000-000000000000)
  MIG 3g.71gb     Device  0: (UUID: MIG-cccc3333-0000-0000-0000-000000000000)
  MIG 3g.71gb     Device  1: (UUID: MIG-dddd4444-0000-0000-0000-000000000000)
GPU 1: NVIDIA H200 (UUID: GPU-bbbb2222-0000-0000-0000-000000000000)
"""


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs, according to nvidia-smi and torch's metadata."""
    programs = tmp_path / "bin"
    programs.mkdir()
    program = programs / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{TWO_GPUS}END\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.13.0+cu130")


def test_the_first_worker_takes_the_first_gpu_and_sees_no_other(tmp_path: Path, gpus: None):
    """auto takes a free GPU, makes it the only visible one, and names the worker after it."""
    environ: dict[str, str] = {}
    taken = pin("auto", None, tmp_path, environ)
    assert (taken.device, taken.index, taken.name) == ("cuda:0", 0, "gpu0")
    assert taken.gpu_name == "NVIDIA H200"
    assert environ["CUDA_VISIBLE_DEVICES"] == "GPU-aaaa1111-0000-0000-0000-000000000000"
    assert environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_the_next_worker_takes_the_next_gpu_and_a_third_is_refused(tmp_path: Path, gpus: None):
    """Two workers never share a GPU. The error of the third one lists the GPUs in use."""
    assert pin("auto", None, tmp_path, {}).index == 0
    assert pin("auto", None, tmp_path, {}).index == 1
    with pytest.raises(ConfigurationError, match="Another worker runs on gpu0, gpu1 already"):
        pin("auto", None, tmp_path, {})


def test_a_requested_gpu_is_refused_while_another_worker_has_it(tmp_path: Path, gpus: None):
    """The lock has the GPU's id, so that two numbers for one GPU are recognised."""
    assert pin("cuda:1", None, tmp_path, {}).index == 1
    with pytest.raises(ConfigurationError, match="Another worker runs on gpu1 already"):
        pin("cuda:0", None, tmp_path, {"CUDA_VISIBLE_DEVICES": "GPU-bbbb"})


def test_the_refusal_of_a_missing_gpu_lists_the_visible_ones(tmp_path: Path, gpus: None):
    """The error lists the possible values."""
    with pytest.raises(ConfigurationError, match=r"Device cuda:2 is not there.*cuda:0, cuda:1"):
        pin("cuda:2", None, tmp_path, {})
    with pytest.raises(ConfigurationError, match="a visible GPU: none"):
        pin("cuda", None, tmp_path, {"CUDA_VISIBLE_DEVICES": ""})


def test_cpu_hides_the_gpus(tmp_path: Path, gpus: None):
    """A CPU worker cannot see the GPUs of its machine, and so takes none of their memory."""
    environ = {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert pin("cpu", None, tmp_path, environ).device == "cpu"
    assert environ["CUDA_VISIBLE_DEVICES"] == ""


def test_auto_is_the_cpu_where_torch_was_built_for_it(tmp_path: Path, gpus: None, monkeypatch: pytest.MonkeyPatch):
    """A GPU that the installed framework cannot use is not taken."""
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.13.0+cpu")
    assert pin("auto", None, tmp_path, {}).name == "cpu0"


def test_the_supervisors_number_names_the_worker(tmp_path: Path, gpus: None):
    """A child that sees a single GPU keeps the number from its supervisor."""
    assert pin("cuda:0", 5, tmp_path, {"CUDA_VISIBLE_DEVICES": "1"}).name == "gpu5"
    assert pin("cpu", 3, tmp_path, {}).name == "cpu3"
    with pytest.raises(ConfigurationError, match="Another worker is cpu3 already"):
        pin("cpu", 3, tmp_path, {})


def test_a_worker_of_another_process_keeps_its_number_until_it_dies(tmp_path: Path):
    """A CPU worker takes the first free number. The number of a killed worker is free at once."""
    code = (
        "import pathlib, sys; from penstock.workers.process.device import pin; "
        "print(pin('cpu', None, pathlib.Path(sys.argv[1]), {}).name, flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "cpu0\n"
        assert pin("cpu", None, tmp_path, {}).name == "cpu1"
        other.kill()
        other.wait()
    assert pin("cpu", None, tmp_path, {}).name == "cpu0"


def test_a_machine_without_nvidia_smi_or_driver_has_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """auto takes the CPU when nvidia-smi fails, as in an image built for GPUs on a machine without one."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.13.0")
    assert pin("auto", None, tmp_path, {}).name == "cpu0"
    program.unlink()
    assert pin("auto", None, tmp_path, {}).name == "cpu1"


def test_a_gpu_cut_into_slices_counts_as_its_slices():
    """Each MIG slice is a device of its own. The GPU that holds the slices is not a device."""
    assert [gpu.uuid[:8] for gpu in parse_listing(SLICED)] == ["MIG-cccc", "MIG-dddd", "GPU-bbbb"]
    assert [gpu.index for gpu in parse_listing(SLICED)] == [0, 1, 2]
    assert [gpu.name for gpu in parse_listing(SLICED)] == [
        *["NVIDIA H200 MIG 3g.71gb", "NVIDIA H200 MIG 3g.71gb", "NVIDIA H200"],
    ]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, [0, 1, 2]), ("", []), ("-1", []), ("1", [1]), ("2,0", [2, 0]), ("GPU-b", [1]), ("0,9,1", [0])],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(visible: str | None, expected: list[int]):
    """The entries are numbers or beginnings of ids, in the given order, up to the first that matches no GPU."""
    gpus = [Gpu(0, "GPU-a"), Gpu(1, "GPU-b"), Gpu(2, "GPU-c")]
    assert [gpu.index for gpu in select_visible(gpus, visible)] == expected


@pytest.mark.parametrize(
    ("name", "environ", "quota", "expected"),
    [
        ("cpu", {"OMP_NUM_THREADS": "3"}, "max 100000", 3),
        ("cuda:0", {}, "max 100000", 1),
        ("cpu", {}, "150000 100000", 2),
        ("cpu", {}, "10000 100000", 1),
        ("cpu", {}, "max 100000", 4),
        ("cpu", {"OMP_NUM_THREADS": "many"}, "", 4),
    ],
)
def test_a_forward_gets_the_cores_that_were_granted(
    name: str, environ: Mapping[str, str], quota: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """OMP_NUM_THREADS wins; otherwise one on a GPU, and on a CPU the cores of this process within its quota."""
    limit = tmp_path / "cpu.max"
    limit.write_text(quota)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert granted_threads(name, environ, limit) == expected


def test_locks_lie_in_the_home_and_a_home_without_room_for_them_is_refused(tmp_path: Path):
    """The error names the variable to change, not the path."""
    pin("cpu", None, tmp_path, {})
    assert (tmp_path / "locks" / "cpu-0.lock").exists()
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigurationError, match="PENSTOCK_HOME") as refusal:
        pin("cpu", None, blocked, {})
    assert str(tmp_path) not in str(refusal.value)
