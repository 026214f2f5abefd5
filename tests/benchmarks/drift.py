"""Drift: how soon a shift is found, and how often a steady series alarms, for Gaussian data and for real cosines.

    MiniLM in fp32, and in dynamic int8, over the docstrings of this Python -> a cosine for each -> DriftMonitor

Values are drawn from the pairs with replacement, so that the series is steady: in their own order the docstrings change
from module to module, and a change of the inputs is a drift to every chart.

    python -m tests.benchmarks.drift FILE    writes the cosines that tests/safety/test_drift.py uses
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Final

import numpy as np
import numpy.typing as npt

from penstock.compose.docstrings import collect
from penstock.registry.package import find, load_package
from penstock.safety.drift import DriftLimits, DriftMonitor, Reference
from penstock.workers.runtime.forms import Forward
from penstock.workers.runtime.open import open_runtime
from penstock.workers.runtime.transformers import EncoderRuntime
from tests.benchmarks import mlp
from tests.benchmarks.report import Progress, Row, verdict
from tests.benchmarks.scale import Scale

__all__ = ["cosines", "measure"]

_SEED: Final = 15
_STEADY: Final = 100_000
_BATCH: Final = 32
_REFERENCE: Final = 500
_TEXTS_PER_S: Final = 1500
_FEWEST_TEXTS: Final = 640
_MOST_DELAY: Final = 50
_SHIFTS: Final = 1000

Values = npt.NDArray[np.float64]


def measure(scale: Scale, say: Progress) -> list[Row]:
    """See the module."""
    texts = max(_FEWEST_TEXTS, int(_TEXTS_PER_S * scale.encoder_s))
    real = cosines(texts, say)
    gaussian = np.random.default_rng(_SEED).standard_normal(_STEADY)
    rows = []
    for name, values in (("Gaussian data", gaussian), (f"{len(real):,} real cosines, MiniLM fp32 and int8", real)):
        for detector, limits in (("EWMA", DriftLimits()), ("EWMA and ADWIN", DriftLimits(adwin_delta=0.002))):
            say(f"drift: {detector} on {name}")
            rows += [
                _false_alarms(name, detector, values, limits, scale.rounds),
                _delays(name, detector, values, limits),
            ]
    centred = (real - real.mean()) / real.std()
    shape = f"mean {real.mean():.4f}, deviation {real.std():.4f}, skewness {(centred**3).mean():.2f}"
    rows.append(Row("drift: the cosines", f"{shape}, kurtosis {(centred**4).mean():.1f}; seed {_SEED}"))
    return rows


def cosines(count: int, say: Progress) -> Values:
    """Between the embeddings of MiniLM in fp32 and in dynamic int8, of so many docstrings."""
    texts = np.array([passage.text for passage in collect(count)], object)
    runtime = open_runtime(load_package(find(mlp.MODELS, "minilm").path, (mlp.MODELS,)))
    if not isinstance(runtime, EncoderRuntime):
        raise ValueError("The package minilm is no encoder")
    runtime.load("cpu", 1)
    try:
        say(f"drift: {len(texts):,} docstrings in fp32 and in int8")
        forward = runtime.candidates(None)["int8"]()
        ours, expected = _embedded(runtime, forward, texts), _embedded(runtime, runtime.run, texts)
    finally:
        runtime.close()
    products = (ours * expected).sum(axis=1)
    found: Values = products / np.linalg.norm(ours, axis=1) / np.linalg.norm(expected, axis=1)
    return found


def _embedded(runtime: EncoderRuntime, forward: Forward, texts: npt.NDArray[np.object_]) -> Values:
    order = np.argsort([len(text) for text in texts], kind="stable")
    found = np.zeros((len(texts), 384))
    for start in range(0, len(order), _BATCH):
        some = order[start : start + _BATCH]
        found[some] = forward(runtime.prepare([{"text": texts[some]}]))["embedding"]
    return found


def _false_alarms(name: str, detector: str, values: Values, limits: DriftLimits, rounds: int) -> Row:
    """The most alarms in 100,000 values of any round; each round has a reference window of its own."""
    alarms = [_alarms(values, limits, np.random.default_rng([_SEED, number])) for number in range(rounds)]
    return Row(
        f"drift, {detector}: false alarms in {_STEADY:,} steady values, {name}",
        ", ".join(map(str, alarms)),
        "<= 1 in each",
        ok=verdict(required=max(alarms) <= 1) if detector == "EWMA" else None,
        figures={"most": max(alarms)},
    )


def _alarms(values: Values, limits: DriftLimits, rng: np.random.Generator) -> int:
    monitor, alarms = _monitor(values, limits, rng), 0
    for value in rng.choice(values, _STEADY).tolist():
        if monitor.observe(value) is not None:
            alarms += 1
            monitor.reset()
    return alarms


def _delays(name: str, detector: str, values: Values, limits: DriftLimits) -> Row:
    """Values until a shift to the worse by two deviations of the raw series is found, after 200 steady ones."""
    shift, delays, by = 2 * values.std(), [], Counter[str]()
    for number in range(_SHIFTS):
        rng = np.random.default_rng([_SEED, 1, number])
        monitor = _monitor(values, limits, rng)
        for value in rng.choice(values, 200).tolist():
            monitor.observe(value)
        monitor.alert = None
        later = rng.choice(values - shift, 10 * _MOST_DELAY).tolist()
        alerts = [(at, found) for at, value in enumerate(later, 1) if (found := monitor.observe(value)) is not None]
        delays.append(alerts[0][0] if alerts else len(later) + 1)
        by.update(found.detector for _, found in alerts)
    median, late, most = np.median(delays), np.percentile(delays, 99), max(delays)
    found_by = ", ".join(f"{which} {count:,}" for which, count in by.items())
    return Row(
        f"drift, {detector}: values until a shift of 2 deviations is found, {name}",
        f"median {median:.0f}, 99 % {late:.0f}, most of {_SHIFTS:,}: {most} (found by {found_by})",
        f"<= {_MOST_DELAY}",
        ok=verdict(required=most <= _MOST_DELAY) if detector == "EWMA" else None,
        figures={"median": float(median), "most": float(most)},
    )


def _monitor(values: Values, limits: DriftLimits, rng: np.random.Generator) -> DriftMonitor:
    window = rng.choice(values, _REFERENCE, replace=False)
    return DriftMonitor("cosine", "lower", limits, Reference(window.tolist()))


if __name__ == "__main__":
    np.save(sys.argv[1], cosines(6000, print).astype(np.float32))
