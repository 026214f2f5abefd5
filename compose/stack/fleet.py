"""The worker programs of this machine: one process per device, which sees only that device.

visible GPUs --> Device --> Program (celery -A penstock.workers.app worker -n gpu0@host)
                              `-- JournalProbe: reads its crash journal, while it runs and after its death
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.compose.stack.supervisor import Program, SupervisorTimeouts
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.errors import BrokerUnavailable, ConfigurationError
from penstock.registry.package import discover, load_package
from penstock.registry.settings import Settings
from penstock.workers.levels.decision_log import DecisionLog
from penstock.workers.process.crash_journal import hung, journal_path, report_crashes
from penstock.workers.process.device import requested_gpus, visible_gpus
from penstock.workers.process.stall import StallDetector

__all__ = ["Device", "JournalProbe", "choose", "worker_program", "worker_timeouts"]

_MARGIN_S: Final = 5.0
_REPORT_TIMEOUT_S: Final = 5.0
_LONGEST_GAP_S: Final = 1.0
"""A longer time between two checks of the journal means that the supervisor itself stood still."""
_RECOVERY_S: Final = 1.0
"""After that, the worker gets this long to end its forward: it may have stood still, too."""
_log = logging.getLogger("penstock.supervisor")


@dataclass(frozen=True, slots=True)
class Device:
    """The device of one worker. `visible` is its CUDA_VISIBLE_DEVICES, empty for the CPU."""

    kind: str
    index: int
    visible: str = ""

    @property
    def name(self) -> str:
        """The worker's name before the host: `gpu0`, `cpu0`."""
        return f"{self.kind}{self.index}"


def choose(settings: Settings, environ: Mapping[str, str]) -> list[Device]:
    """The devices that `settings.inference.device` names, among those that are visible in `environ`.

    auto: every GPU, or the CPU of a machine without a GPU; cuda: every GPU; cuda:N: the N-th of them; cpu.
    Raises ConfigurationError for a device that does not exist.
    """
    requested = settings.inference.device
    gpus = [] if requested == "cpu" else visible_gpus(environ)
    if requested == "cpu" or (requested == "auto" and not gpus):
        return [Device("cpu", settings.worker.index or 0)]
    return [Device("gpu", gpu.index, gpu.uuid) for gpu in requested_gpus(requested, gpus)]


def worker_program(
    device: Device, settings: Settings, environ: Mapping[str, str], output: Path | None, *, log_level: str = "warning"
) -> Program:
    """The worker of one device. Its environment makes only that device visible and passes these settings on.

    log_level: of all loggers, by Celery's option; those of Penstock write at least at level INFO.
    """
    own = {
        "CUDA_VISIBLE_DEVICES": device.visible,
        "PENSTOCK_INFERENCE_DEVICE": "cpu" if device.kind == "cpu" else "cuda:0",
        "PENSTOCK_INFERENCE_REPO_ROOT": str(settings.inference.repo_root.resolve()),
        "PENSTOCK_HOME": str(settings.home),
        "PENSTOCK_WORKER_INDEX": str(device.index),
        "PENSTOCK_WORKER_MODELS": ",".join(settings.worker.models),
    }
    if settings.worker.metrics_port is not None:
        own["PENSTOCK_METRICS_PORT"] = str(settings.worker.metrics_port)
    arguments = [sys.executable, "-m", "penstock.workers", "-n", f"{device.name}@%h", f"--loglevel={log_level}"]
    probe = JournalProbe(settings, environ.get("PENSTOCK_REDIS_URL") or settings.redis_url or "")
    return Program(device.name, arguments, {**environ, **own}, beats=True, output=output, probe=probe)


def _longest_silence_s(settings: Settings) -> float:
    """The longest limit of a forward, by the settings and the packages, and a second. Raises ConfigurationError."""
    limits = [settings.inference.timeout_seconds]
    root = settings.inference.repo_root
    for found in discover(root) if root.is_dir() else ():
        try:
            limits.append(float(load_package(found.path, settings.trusted_roots).spec.timeout_s or 0))
        except ConfigurationError:
            # The worker reports the problem of this package.
            continue
    return max(limits) + 1.0


class JournalProbe:
    """Reads a worker's crash journal: when a forward hangs, the worker is killed; after its death, the jobs that ran
    are reported to the broker."""

    def __init__(self, settings: Settings, url: str) -> None:
        self._settings = settings
        self._home = settings.home
        self._url = url
        self._ttl_ms = int(settings.inference.queue.job_ttl_s * 1000)
        self._stall = StallDetector(_LONGEST_GAP_S, recovery_s=_RECOVERY_S)

    def kill_reason(self, pid: int, now: float) -> str | None:
        """See LivenessProbe.kill_reason."""
        return None if self._stall.turn(now) else hung(journal_path(self._home, pid), now)

    def silence_s(self) -> float:
        """See LivenessProbe.silence_s. Reads the packages again; 0 while their folder cannot be read."""
        try:
            return _longest_silence_s(self._settings)
        except (ConfigurationError, OSError):
            return 0.0

    def on_exit(self) -> None:
        """See LivenessProbe.on_exit. If the broker is away, the next worker on this machine reports the death."""
        threading.Thread(target=self._report, name="crash report", daemon=True).start()

    def _report(self) -> None:
        broker = RedisStreams.from_url(self._url, timeout_s=_REPORT_TIMEOUT_S)
        try:
            report_crashes(self._home, broker, self._ttl_ms, DecisionLog(self._home).note_death)
        except (BrokerUnavailable, OSError) as error:
            _log.warning("the death of a worker is not reported yet: %s", error)
        finally:
            broker.close()


def worker_timeouts(settings: Settings) -> SupervisorTimeouts:
    """The time-outs for workers: a forward may take its limit or that of its package, a drain its grace period."""
    return SupervisorTimeouts(
        silence_s=_longest_silence_s(settings),
        warm_s=settings.inference.queue.drain_grace_s + _MARGIN_S,
    )
