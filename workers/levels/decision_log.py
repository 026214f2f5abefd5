"""Decisions about each model's steps -> a log on this machine, one JSON line a decision, that can be replayed.

    InferenceOptimizer -> append(key, decision) -> <home>/decisions/<model>.jsonl
    a restart -> earlier(key): the last decision on each step about the same content on the same kind of machine
    a death   -> note_death(model, content_hash, form): `earlier` refuses a form that ran when several processes died
    a replay  -> replayed(key, run): the state that one process reached

The lines hold names, hashes, figures and reasons, never inputs or outputs. Only the owner can read them. A file that
has grown too large is rotated: one older file is kept.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from penstock.registry.queues import parse_name
from penstock.workers.levels.progression import THRESHOLDS, Decision, LevelState, replay
from penstock.workers.process.device import granted_threads
from penstock.workers.runtime.cpu import cpu_label

__all__ = ["DecisionKey", "DecisionLog", "environment"]

_MAX_FILE_BYTES: Final = 1 << 20
_FRAMEWORKS: Final = ("torch", "transformers", "onnxruntime")
_ACTIONS: Final = ("enabled", "disabled", "refused")
_DIED: Final = "died"
"""The action of a line that holds no decision: a process died while the form ran."""
_MAX_DEATHS: Final = 3
_DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class DecisionKey:
    """The subject of a decision. `environment`: where the decision holds; see the function of that name."""

    model: str
    version: str
    content_hash: str
    environment: str


class DecisionLog:
    """The logs as one process uses them. Appends are whole lines, so several processes may share a home.

    clock: unix seconds. max_bytes: a larger file is rotated before the next line.
    """

    def __init__(self, home: Path, clock: Callable[[], float] = time.time, max_bytes: int = _MAX_FILE_BYTES) -> None:
        self._folder = home / "decisions"
        self._clock = clock
        self._max_bytes = max_bytes
        self.run: Final = secrets.token_hex(8)
        """The mark of this process's lines."""

    def append(self, key: DecisionKey, decision: Decision) -> dict[str, object]:
        """Writes a decision and returns its record. Raises OSError."""
        record = {
            "time": round(self._clock(), 3),
            "run": self.run,
            **asdict(key),
            "level": decision.level,
            **asdict(decision),
        }
        self._write(key.model, record)
        return record

    def note_death(self, model: str, content_hash: str, step: str) -> None:
        """Writes that a process died while this form ran jobs. Raises OSError, InvalidInput."""
        death = {"time": round(self._clock(), 3), "run": self.run, "model": model, "content_hash": content_hash}
        self._write(model, {**death, "step": step, "action": _DIED})

    def _write(self, model: str, record: Mapping[str, object]) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self._file(model)
        if file.exists() and file.stat().st_size > self._max_bytes:
            file.replace(_rotated(file))
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                # A process that died while it wrote left half a line, which must not damage this one.
                line = b"\n" + line
            if os.write(descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)

    def earlier(self, key: DecisionKey) -> dict[str, Decision]:
        """The last decision on each step about this content in this environment, by any process.

        The first refusal after an enabled step is ignored: at the start of a worker on a busy machine every form is
        slow. The second refusal in a row counts.

        A form that ran while several processes died within a day counts as measured and refused. Jobs that kill a
        process do so in any form, but they run alone the next time. A form that kills processes would do so with batch
        after batch.
        """
        about = {"content_hash": key.content_hash, "environment": key.environment}
        earlier: dict[str, Decision] = {}
        doubted: set[str] = set()
        for decision in self._decisions(key.model, about):
            step, known = decision.step, earlier.get(decision.step)
            is_first_doubt = known is not None and (known.action, decision.action) == ("enabled", "refused")
            if is_first_doubt and step not in doubted:
                doubted.add(step)
                continue
            doubted.discard(step)
            earlier[step] = decision
        for step, deaths in self._deaths(key).items():
            if deaths >= _MAX_DEATHS:
                reason = f"{deaths} processes died within a day while it ran"
                earlier[step] = Decision(step, "refused", "it killed its process", reason, None, {"deaths": deaths})
        return earlier

    def _deaths(self, key: DecisionKey) -> Counter[str]:
        """How many processes died within the last day, by the form that ran this content."""
        since = self._clock() - _DAY_S
        return Counter(
            record["step"]
            for record in self._records(key.model)
            if (record.get("action"), record.get("content_hash")) == (_DIED, key.content_hash)
            and isinstance(record.get("step"), str)
            and record["step"] in THRESHOLDS
            and isinstance(record.get("time"), int | float)
            and record["time"] > since
        )

    def replayed(self, key: DecisionKey, run: str) -> LevelState:
        """The state that the process with the mark `run` reached with its last decision about this content."""
        return replay(self._decisions(key.model, {"run": run, "content_hash": key.content_hash}))

    def _decisions(self, model: str, about: Mapping[str, str]) -> Iterator[Decision]:
        for record in self._records(model):
            if all(record.get(name) == value for name, value in about.items()):
                decision = _decision_of(record)
                if decision is not None:
                    yield decision

    def _records(self, model: str) -> Iterator[dict[str, Any]]:
        file = self._file(model)
        for line in [line for part in (_rotated(file), file) for line in _lines(part)]:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue  # a line that a dying process cut short, or that another program wrote
            if isinstance(record, dict):
                yield record

    def _file(self, model: str) -> Path:
        return self._folder / f"{parse_name('model', model)}.jsonl"


def _rotated(file: Path) -> Path:
    """The older file, to which a file that has grown too large is renamed."""
    return file.with_suffix(".jsonl.old")


def _lines(file: Path) -> list[bytes]:
    try:
        return [line for line in file.read_bytes().splitlines() if line]
    except OSError:
        return []


@cache
def environment(device: str, compilation: str) -> str:
    """The frameworks, the hardware and the settings under which a measurement holds.

    compilation: those of its settings that decide how a form is made and judged.
    """
    return "; ".join([*(f"{name} {_version(name)}" for name in _FRAMEWORKS), _hardware(device), compilation])


def _hardware(device: str) -> str:
    torch = sys.modules.get("torch")
    if device.startswith("cuda") and torch is not None:
        return str(torch.cuda.get_device_name(device))
    return f"{cpu_label()}, {granted_threads(device, os.environ)} threads"


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"


def _decision_of(record: Mapping[str, Any]) -> Decision | None:
    """None for a line that this program does not write."""
    step: Any = record.get("step")
    action: Any = record.get("action")
    gain, evidence = record.get("gain"), record.get("evidence")
    if not isinstance(step, str) or step not in THRESHOLDS or action not in _ACTIONS or not isinstance(evidence, dict):
        return None
    if gain is not None and not isinstance(gain, int | float):
        return None
    figures = {str(name): float(value) for name, value in evidence.items() if isinstance(value, int | float)}
    made = record.get("made")
    facts = made if isinstance(made, dict) else {}
    judged = record.get("validators")
    validators = {str(name): str(each) for name, each in judged.items()} if isinstance(judged, dict) else {}
    criterion, reason, replaces = (str(record.get(name, "")) for name in ("criterion", "reason", "replaces"))
    return Decision(step, action, criterion, reason, gain, figures, facts, validators, replaces)
