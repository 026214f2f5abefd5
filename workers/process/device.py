"""One worker, one device: which one, and the lock that keeps a second worker off it. No framework is imported.

    PENSTOCK_INFERENCE_DEVICE, the GPUs that nvidia-smi names, CUDA_VISIBLE_DEVICES
        -> pin -> a lock under <home>/locks, CUDA_VISIBLE_DEVICES narrowed to that one GPU -> Pin

CUDA reads its environment once: `pin` comes before the first import of a framework. The lock goes with the process,
however that ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Final

from penstock.registry.errors import ConfigurationError

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
_MAX_CPU_WORKERS: Final = 1_024
_QUERY_TIMEOUT_S: Final = 30.0
_CPU_LIMIT: Final = Path("/sys/fs/cgroup/cpu.max")
_GPU_LINE: Final = re.compile(r"GPU \d+: .*\(UUID: (GPU-[^)]+)\)")
_SLICE_LINE: Final = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine, or a MIG slice of one: its place in nvidia-smi's list, and the id that stays with it."""

    index: int
    uuid: str


@dataclass(frozen=True, slots=True)
class Pin:
    """The device this process owns. `device` is what frameworks call it here: `cpu`, or `cuda:0`, the only one seen.

    `index` numbers the workers of a machine and decides name and metrics port; `lock` is open while the pin holds.
    """

    device: str
    index: int
    lock: int

    @property
    def name(self) -> str:
        """`gpu0` or `cpu0`: the worker's name before the host."""
        return f"{'cpu' if self.device == 'cpu' else 'gpu'}{self.index}"


def pin(device: str, index: int | None, home: Path, environ: MutableMapping[str, str]) -> Pin:
    """Take a device for this process: `device` is auto, cpu, cuda or cuda:N, N counting the visible GPUs.

    auto and cuda take the first GPU that no worker has, and auto the CPU where no GPU can be used. `index` is the
    supervisor's number for this worker, None without a supervisor. Narrows `environ` to the device.
    Raises ConfigurationError for a device that is not there or is taken.
    """
    locks = _folder(home)
    wants_cpu = device == "cpu" or (device == "auto" and not _torch_uses_gpus())
    gpus = [] if wants_cpu else visible_gpus(environ)
    if wants_cpu or (device == "auto" and not gpus):
        environ[_VISIBLE] = ""
        return _pin_cpu(index, locks)
    for gpu in requested_gpus(device, gpus):
        lock = _lock(locks / f"{gpu.uuid}.lock")
        if lock is not None:
            environ[_VISIBLE] = gpu.uuid
            environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
            return Pin("cuda:0", gpu.index if index is None else index, lock)
    taken = ", ".join(f"gpu{gpu.index}" for gpu in requested_gpus(device, gpus))
    raise ConfigurationError(f"Another worker runs on {taken} already. Expected one worker per GPU")


def visible_gpus(environ: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves of those that nvidia-smi names; none without nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        answer = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        # nvidia-smi without a driver, as in an image built for GPUs that runs elsewhere.
        return []
    return select_visible(parse_listing(answer.stdout), environ.get(_VISIBLE))


def parse_listing(text: str) -> list[Gpu]:
    """The GPUs in the output of `nvidia-smi -L`; one that is cut into MIG slices is listed as its slices."""
    uuids: list[str] = []
    for line in text.splitlines():
        if gpu := _GPU_LINE.match(line):
            uuids.append(gpu[1])
        elif part := _SLICE_LINE.match(line):
            if uuids and uuids[-1].startswith("GPU-"):
                uuids.pop()
            uuids.append(part[1])
    return [Gpu(index, uuid) for index, uuid in enumerate(uuids)]


def select_visible(gpus: Sequence[Gpu], visible: str | None) -> list[Gpu]:
    """Those that a CUDA_VISIBLE_DEVICES of `visible` leaves (None: unset). Its entries are numbers or beginnings of
    ids; as in CUDA, the first one that names no GPU ends the list.

    >>> select_visible([Gpu(0, "GPU-a"), Gpu(1, "GPU-b"), Gpu(2, "GPU-c")], "2,GPU-a,7,1")
    [Gpu(index=2, uuid='GPU-c'), Gpu(index=0, uuid='GPU-a')]
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


def granted_threads(device: str, environ: Mapping[str, str]) -> int:
    """CPU threads for one forward: OMP_NUM_THREADS, else the cores this process may use; one beside a GPU.

    Frameworks count the cores of the machine, and more threads than granted cores wait for each other.
    """
    if (asked := environ.get("OMP_NUM_THREADS", "")).isdecimal() and int(asked) > 0:
        return int(asked)
    if device != "cpu":
        return 1
    cores = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    return cores if quota is None else max(1, min(cores, round(quota)))


def _cpu_quota() -> float | None:
    """Cores' worth of time that this process's control group may use; None without a limit."""
    try:
        quota, _, period = _CPU_LIMIT.read_text("ascii").partition(" ")
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _torch_uses_gpus() -> bool:
    """Whether torch is installed in a build for GPUs; its metadata says so without loading it."""
    try:
        return not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def _pin_cpu(index: int | None, locks: Path) -> Pin:
    for candidate in count() if index is None else (index,):
        lock = _lock(locks / f"cpu-{candidate}.lock")
        if lock is not None:
            return Pin("cpu", candidate, lock)
        if candidate >= _MAX_CPU_WORKERS:
            break
    raise ConfigurationError(f"Another worker is cpu{candidate} already. Expected a free PENSTOCK_WORKER_INDEX")


def _folder(home: Path) -> Path:
    folder = home / "locks"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"Locks cannot be kept under PENSTOCK_HOME: {error.strerror}") from None
    return folder


def _lock(path: Path) -> int | None:
    """The open lock, or None when another process holds it."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigurationError(f"Locks cannot be kept under PENSTOCK_HOME: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
