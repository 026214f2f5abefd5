"""The device of a worker: `pin` chooses one, and locks it against a second worker. Imports no framework.

    PENSTOCK_INFERENCE_DEVICE, the GPUs that nvidia-smi lists, CUDA_VISIBLE_DEVICES
        -> pin -> a lock under <home>/locks, CUDA_VISIBLE_DEVICES set to that one GPU -> Pin
                  held by processes that a dead worker left behind -> orphans.py ends them

CUDA reads its environment once, so call `pin` before the first import of a framework. The kernel frees the lock when
the process ends in any way; forks of the process do not hold it (workers/children.py).
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Final

from penstock.registry.errors import ConfigurationError
from penstock.registry.settings_sections import METRICS_PORT
from penstock.workers import children
from penstock.workers.process.orphans import end_orphans, write_record

__all__ = [
    "Gpu",
    "Pin",
    "granted_threads",
    "parse_listing",
    "pin",
    "requested_gpus",
    "select_visible",
    "visible_gpus",
]

_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_ALLOCATOR: Final = "PYTORCH_ALLOC_CONF"
"""Read by torch from 2.9 on."""
_MAX_CPU_WORKERS: Final = 1_024
_QUERY_TIMEOUT_S: Final = 30.0
_TURN_S: Final = 20.0
_LOOK_AGAIN_S: Final = 0.02
_CPU_LIMIT: Final = Path("/sys/fs/cgroup/cpu.max")
_GPU_LINE: Final = re.compile(r"GPU \d+: (.*?) *\(UUID: (GPU-[^)]+)\)")
_SLICE_LINE: Final = re.compile(r"\s+(MIG \S+) .*\(UUID: (MIG-[^)]+)\)")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine, or a MIG slice of one: its position in nvidia-smi's list, and its permanent id.

    name: as CUDA has it, such as `NVIDIA H200`, or `NVIDIA H200 MIG 3g.71gb` for a slice.
    """

    index: int
    uuid: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Pin:
    """The device of this process. `device` is its name for frameworks: `cpu`, or `cuda:0`, the only visible GPU.

    `index` numbers the workers of a machine, for their names and metrics ports. `lock` is the descriptor of the lock.
    `gpu_name` is empty on a CPU; see Gpu.
    """

    device: str
    index: int
    lock: int
    gpu_name: str = ""

    @property
    def name(self) -> str:
        """`gpu0` or `cpu0`: the worker's name before the host."""
        return f"{'cpu' if self.device == 'cpu' else 'gpu'}{self.index}"


def pin(
    device: str,
    index: int | None,
    home: Path,
    environ: MutableMapping[str, str],
    *,
    supervisor: int | None = None,
) -> Pin:
    """Lock a device for this process. `device` is auto, cpu, cuda or cuda:N, where N counts the visible GPUs.

    auto and cuda take the first GPU without a worker; auto takes the CPU where no GPU can be used. `index` is the
    supervisor's number for this worker, None without a supervisor; `supervisor` is the supervisor's process id. Hides
    the other GPUs in `environ`, and asks torch's allocator for growing segments, unless it has other orders. Raises
    ConfigurationError for a device that does not exist or is in use.
    """
    locks = _folder(home)
    wants_cpu = device == "cpu" or (device == "auto" and not _torch_uses_gpus())
    gpus = [] if wants_cpu else visible_gpus(environ)
    if wants_cpu or (device == "auto" and not gpus):
        environ[_VISIBLE] = ""
        return _pin_cpu(index, locks, supervisor)
    for gpu in requested_gpus(device, gpus):
        lock = _lock(locks / f"{gpu.uuid}.lock", supervisor)
        if lock is not None:
            environ[_VISIBLE] = gpu.uuid
            environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
            # Batches of all sizes: torch's segments that cannot grow leave memory in pieces that fit none of them.
            environ.setdefault(_ALLOCATOR, "expandable_segments:True")
            return Pin("cuda:0", gpu.index if index is None else index, lock, gpu.name)
    taken = ", ".join(f"gpu{gpu.index}" for gpu in requested_gpus(device, gpus))
    raise ConfigurationError(f"Another worker runs on {taken} already. Expected one worker per GPU")


def visible_gpus(environ: Mapping[str, str]) -> list[Gpu]:
    """The GPUs of nvidia-smi's list that CUDA_VISIBLE_DEVICES permits; none without nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        answer = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        # nvidia-smi without a driver: an image built for GPUs runs on a machine without one.
        return []
    return select_visible(parse_listing(answer.stdout), environ.get(_VISIBLE))


def parse_listing(text: str) -> list[Gpu]:
    """The GPUs in the output of `nvidia-smi -L`; one that is cut into MIG slices is listed as its slices."""
    found: list[tuple[str, str]] = []
    whole = ""
    for line in text.splitlines():
        if gpu := _GPU_LINE.match(line):
            whole = gpu[1]
            found.append((gpu[2], whole))
        elif part := _SLICE_LINE.match(line):
            if found and found[-1][0].startswith("GPU-"):
                found.pop()
            found.append((part[2], f"{whole} {part[1]}"))
    return [Gpu(index, uuid, name) for index, (uuid, name) in enumerate(found)]


def select_visible(gpus: Sequence[Gpu], visible: str | None) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES=`visible` permits (None: unset). Its entries are numbers or the beginnings of
    ids. As in CUDA, the first entry that matches no GPU ends the list.

    >>> [gpu.index for gpu in select_visible([Gpu(0, "GPU-a"), Gpu(1, "GPU-b"), Gpu(2, "GPU-c")], "2,GPU-a,7,1")]
    [2, 0]
    """
    if visible is None:
        return list(gpus)
    chosen = []
    for entry in map(str.strip, visible.split(",")):
        gpu = next((gpu for gpu in gpus if entry and (entry == str(gpu.index) or gpu.uuid.startswith(entry))), None)
        if gpu is None:
            break
        chosen.append(gpu)
    return chosen


def requested_gpus(device: str, gpus: Sequence[Gpu]) -> Sequence[Gpu]:
    """Those of the visible GPUs that `device` asks for: the N-th for cuda:N, all for auto and cuda.

    Raises ConfigurationError when there is no such GPU.
    """
    _, _, number = device.partition(":")
    if not gpus or (number and int(number) >= len(gpus)):
        available = ", ".join(f"cuda:{position}" for position in range(len(gpus))) or "none"
        raise ConfigurationError(f"Device {device} is not there. Expected cpu, auto or a visible GPU: {available}")
    return [gpus[int(number)]] if number else gpus


def granted_threads(device: str, environ: Mapping[str, str], cpu_limit: Path = _CPU_LIMIT) -> int:
    """CPU threads for one forward: OMP_NUM_THREADS if set, one on a GPU, otherwise the cores of this process.

    `cpu_limit` is the control group's file. Frameworks count the cores of the machine; with more threads than cores
    that this process may use, the threads wait for each other.
    """
    if (asked := environ.get("OMP_NUM_THREADS", "")).isdecimal() and int(asked) > 0:
        return int(asked)
    if device != "cpu":
        return 1
    cores = len(os.sched_getaffinity(0))
    quota = _cpu_quota(cpu_limit)
    return cores if quota is None else max(1, min(cores, round(quota)))


def _cpu_quota(cpu_limit: Path) -> float | None:
    """The CPU time that this process's control group may use, in cores; None without a limit."""
    try:
        quota, _, period = cpu_limit.read_text("ascii").partition(" ")
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _torch_uses_gpus() -> bool:
    """Whether the installed torch is a build for GPUs, by its metadata: an import would read CUDA's environment."""
    try:
        return not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def _pin_cpu(index: int | None, locks: Path, supervisor: int | None) -> Pin:
    for candidate in count() if index is None else (index,):
        lock = _lock(locks / f"cpu-{candidate}.lock", supervisor)
        if lock is not None:
            return Pin("cpu", candidate, lock)
        if candidate >= _MAX_CPU_WORKERS:
            break
    raise ConfigurationError(
        f"Another worker is cpu{candidate} already. Expected a number of its own: `penstock worker --index "
        f"{candidate + 1}`, or PENSTOCK_WORKER_INDEX. The metrics port is {METRICS_PORT} + that number, or "
        "PENSTOCK_METRICS_PORT"
    )


def _folder(home: Path) -> Path:
    folder = home / "locks"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"Locks cannot be kept under PENSTOCK_HOME: {error.strerror}") from None
    return folder


def _lock(path: Path, supervisor: int | None) -> int | None:
    """The descriptor of the lock, or None when another worker holds the lock. Orphans that hold it are ended."""
    try:
        with _turn(path.parent) as is_ours:
            lock = _locked(path)
            if lock is None and is_ours and end_orphans(path):
                lock = _locked(path)
            if lock is not None:
                write_record(lock, supervisor)
                children.own(lock)
            return lock
    except OSError as error:
        raise ConfigurationError(f"Locks cannot be kept under PENSTOCK_HOME: {error.strerror}") from None


@contextmanager
def _turn(locks: Path) -> Iterator[bool]:
    """Inside the block no other start takes a lock or reads a record; False when another start takes too long."""
    turn = os.open(locks / "starts", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        give_up_at = time.monotonic() + _TURN_S
        while not (is_ours := _locks(turn)) and time.monotonic() < give_up_at:
            time.sleep(_LOOK_AGAIN_S)
        yield is_ours
    finally:
        os.close(turn)


def _locked(path: Path) -> int | None:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if _locks(lock):
        return lock
    os.close(lock)
    return None


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
