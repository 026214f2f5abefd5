"""The three acts: facts of real runs, as plain data.

refused    MiniLM in int8 without calibration: the canary compares it with what was served
promoted   a classifier in a faster form: the canary on 1,500 pairs, then the gate with its measured gain
broken     an input on which that form fails: the fallback answers, the breaker trips, and holds it off
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.compose import docstrings
from penstock.compose.safety_demo.models import EMBEDDING, TOPICS
from penstock.compose.safety_demo.stage import CommandRun, Stage, Traffic
from penstock.registry.package import load_package
from penstock.registry.tensors import Array
from penstock.workers.runtime.forms import EAGER
from penstock.workers.runtime.loading import LoadOptions
from penstock.workers.runtime.pytorch import PyTorchRuntime

__all__ = ["Reference", "broken", "embedded", "promoted", "refused"]

_FORM_1: Final = "int8"
_FORM_2: Final = "onnx"
_PATIENCE_S: Final = "300"
"""Of a canary. On a busy machine the build of its candidate takes minutes."""
_TEXTS: Final = 2_000
_VECTORS: Final = 512
_NOISE: Final = 0.02
_POISON: Final = 1e4
"""Times a usual embedding: a client that forgot to normalise."""
_POISON_AT_S: Final = 6.0
_AFTER_S: Final = 16.0
_LOOK_S: Final = 0.2
_TRIP_S: Final = 30.0
_RTOL, _ATOL = 1e-3, 1e-5


class Reference:
    """The classifier as its author built it, in this process: what the answers must be. root: the models root."""

    def __init__(self, root: Path) -> None:
        self._runtime = PyTorchRuntime(load_package(root / TOPICS / "1"), LoadOptions())
        self._runtime.load("cpu", 1)

    def topics(self, x: Array) -> Array:
        """(rows, 384) -> (rows, 16)."""
        answers: Array = self._runtime.forms.reference(self._runtime.prepare([{"x": x}]))["topics"]
        return answers


def refused(stage: Stage) -> dict[str, Any]:
    """Act 1. Every job is answered by MiniLM in fp32 meanwhile."""
    texts = [str(passage) for passage in docstrings.collect(_TEXTS)]

    def check(_: int, answer: Mapping[str, Array]) -> str:
        length = float(np.linalg.norm(answer["embedding"]))
        return "" if abs(length - 1) < 1e-3 else f"an embedding of length {length:.4g}"

    def inputs(number: int) -> dict[str, Any]:
        again = "" if number < len(texts) else f" ({number})"
        return {"text": [texts[number % len(texts)] + again]}

    with Traffic(stage, EMBEDDING, inputs, check, burst=8, pause_s=0.4) as traffic:
        ran = stage.run("canary", "run", EMBEDDING, "--candidate", "1", "--form", _FORM_1, "--timeout", _PATIENCE_S)
    series = [point["embedding.min_cosine"] for point in stage.series(EMBEDDING) if "embedding.min_cosine" in point]
    return {**_ran(ran), "canary": ran.data, "cosines": series, "served": traffic.facts}


def promoted(stage: Stage, vectors: Array, reference: Reference) -> dict[str, Any]:
    """Act 2. The form is put to use only if the canary passes and the gate measures a gain."""
    with _topics(stage, vectors, reference, burst=25, pause_s=0.05) as traffic:
        ran = stage.run("canary", "run", TOPICS, "--candidate", "1", "--form", _FORM_2, "--timeout", _PATIENCE_S)
    passed = ran.data["verdict"] in ("PASS", "MARGINAL")
    tried = stage.run("models", "levels", TOPICS, "--now", "optimise") if passed else None
    changes = [point["topics.max_delta"] for point in stage.series(TOPICS) if "topics.max_delta" in point]
    entry: dict[str, Any] = tried.data[0] if tried else {"form": EAGER, "steps": []}
    step: dict[str, Any] = next((each for each in entry["steps"] if each["step"] == _FORM_2), {})
    evidence = step.get("evidence", {})
    why_not = "the canary did not pass" if not passed else step.get("reason", "the form was not tried")
    is_promoted = entry["form"] == _FORM_2
    return {
        **_ran(ran),
        "promotion": _ran(tried) if tried else None,
        "canary": ran.data,
        "changes": changes,
        "is_promoted": is_promoted,
        "form": entry["form"],
        "gain": step.get("gain"),
        "in_use_ms": _ms(evidence.get("in_use_s")),
        "form_ms": _ms(evidence.get("form_s")),
        "why_not": "" if is_promoted else why_not,
        "served": traffic.facts,
    }


def broken(stage: Stage, vectors: Array, reference: Reference, *, form: str) -> dict[str, Any]:
    """Act 3. One poisoned job among others; then the operator asks for the form again, at once."""
    forms: list[tuple[float, str]] = []
    with (
        _topics(stage, vectors, reference, burst=4, pause_s=0.05, tells_levels=True) as traffic,
        _watched(stage, traffic, forms),
    ):
        _wait_until(lambda: traffic.now_s >= _POISON_AT_S)
        poison = vectors[:1] * np.float32(_POISON)
        expected = reference.topics(poison)
        poisoned_at = traffic.now_s
        with stage.client() as client:
            job = client.submit(TOPICS, {"x": poison})
            answer, level = job.result(timeout=60)["topics"], job.info(timeout=60).level
        is_right = bool(np.allclose(answer, expected, _RTOL, _ATOL))
        _wait_until(lambda: not stage.breaker(TOPICS, form)[0].is_closed)
        opened_at = traffic.now_s
        record, now_ms = stage.breaker(TOPICS, form)
        again = stage.run("models", "levels", TOPICS, "--now", "optimise")
        _wait_until(lambda: traffic.now_s >= poisoned_at + _AFTER_S)
        last, last_ms = stage.breaker(TOPICS, form)
        ended_at = traffic.now_s
    return {
        "form": form,
        "served": traffic.facts,
        "latencies": [[each.at_s, each.latency_ms, each.level] for each in traffic.answered],
        "levels": dict(Counter(each.level for each in traffic.answered)),
        "forms": [[round(at, 2), name] for at, name in forms],
        "poison": {
            "at_s": round(poisoned_at, 2),
            "is_right": is_right,
            "answer_is_finite": _is_finite(answer),
            "level": level,
        },
        "breaker": {
            "circuit": record.circuit,
            "reason": record.reason,
            "seen_open_at_s": round(opened_at, 2),
            "pause_s": round((record.retry_ms - record.opened_ms) / 1000, 1),
            "left_s": round((record.retry_ms - now_ms) / 1000, 1),
        },
        "asked_again": {**_ran(again), "answer": _about(form, again.data[0]["answer"])},
        "at_the_end": {
            "at_s": round(ended_at, 2),
            "circuit": last.circuit,
            "left_s": round((last.retry_ms - last_ms) / 1000, 1),
            "times_opened": last.epoch,
        },
    }


@contextmanager
def _topics(
    stage: Stage, vectors: Array, reference: Reference, *, burst: int, pause_s: float, tells_levels: bool = False
) -> Iterator[Traffic]:
    """Traffic of embeddings, none of which is equal to another one: a cached answer is no forward."""
    random = np.random.default_rng(15)
    noise = random.normal(scale=_NOISE, size=(8 * _VECTORS, vectors.shape[1])).astype(np.float32)

    def row(number: int) -> Array:
        shifted = vectors[number % len(vectors)] + noise[number % len(noise)] * (1 + number // len(noise))
        unit: Array = (shifted / np.linalg.norm(shifted))[None].astype(np.float32)
        return unit

    def check(number: int, answer: Mapping[str, Array]) -> str:
        expected, ours = reference.topics(row(number)), answer["topics"]
        if np.allclose(ours, expected, _RTOL, _ATOL):
            return ""
        return f"an answer that differs by {float(np.abs(ours - expected).max()):.3g}"

    traffic = Traffic(stage, TOPICS, lambda number: {"x": row(number)}, check, burst=burst, pause_s=pause_s)
    traffic.tells_levels = tells_levels
    with traffic:
        yield traffic


def embedded(stage: Stage) -> Array:
    """(_VECTORS, 384): MiniLM embeddings of docstrings, by the stack itself."""
    with stage.client() as client:
        rows = client.map(EMBEDDING, [str(passage) for passage in docstrings.collect(_VECTORS)])
    vectors: Array = np.stack(rows).astype(np.float32)
    return vectors


@contextmanager
def _watched(stage: Stage, traffic: Traffic, forms: list[tuple[float, str]]) -> Iterator[None]:
    """Notes the form in use, as the worker reports it."""
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(_LOOK_S):
            forms.append((traffic.now_s, stage.form(TOPICS)))

    thread = threading.Thread(target=look, name="demo-forms")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _wait_until(condition: Any) -> None:
    """Returns when the condition holds. Raises TimeoutError: the facts would not be those of the act."""
    until = time.monotonic() + _TRIP_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("The demo waited in vain for the next step of an act")
        time.sleep(0.05)


def _ran(command: CommandRun) -> dict[str, Any]:
    return {"command": command.text, "exit_code": command.exit_code, "seconds": command.seconds}


def _about(form: str, answer: str) -> str:
    """The part of a worker's answer that is about this form."""
    return next((part for part in answer.split("; ") if part.startswith(form)), answer)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _is_finite(values: Array) -> bool:
    return bool(np.isfinite(values).all())
