"""Versions swapped under saturating load, three workers: what fails, who answers after a cut-over, how long it pauses.

256 jobs in flight, all the time --> 3 workers --> results, each with its version and its time in the queue
promote 2, roll back, promote 2, ...  -- prepare, decide, cut over --^
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from penstock.compose.deploy import Deployer, Rollout
from penstock.registry.catalog.stages import ModelStage
from penstock.registry.settings import Settings
from penstock.safety.operator_key import OperatorKey
from tests.benchmarks.harness import Harness
from tests.benchmarks.report import Progress, Row, verdict
from tests.benchmarks.scale import Scale
from tests.flow.hot_swap import SwapLoad, SwapReport, check, release, write_multiplier

__all__ = ["measure"]

_MODEL: Final = "swapped"
_WORKERS: Final = 3
_IN_FLIGHT: Final = 256
_FORWARD_S: Final = 0.1
_BATCH: Final = 16
_BETWEEN_S: Final = 0.5
"""Of load before and after each cut-over."""


def measure(scale: Scale, say: Progress) -> list[Row]:
    """Failed jobs, answers by another version than stood at their claim, and the longest time without an answer."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        root, key_file = Path(folder) / "models", Path(folder) / "operator.pem"
        settings = {
            "PENSTOCK_REGISTRY_URL": f"sqlite:///{folder}/registry.db",
            "PENSTOCK_OPERATOR_KEY_FILE": str(key_file),
            "PENSTOCK_OPERATOR_PUBLIC_KEYS": OperatorKey.generate(key_file).public_text,
            "PENSTOCK_INFERENCE_REPO_ROOT": str(root),
            # Of jobs: the load's are not signed. Decisions are.
            "PENSTOCK_SIGNING_KEYS": "",
        }
        for version in (1, 2):
            write_multiplier(root, _MODEL, version, forward_s=_FORWARD_S, max_batch_size=_BATCH)
        with Harness(settings) as harness:
            return [_row(*_swapped(harness, root, scale.swaps, say))]


def _swapped(harness: Harness, root: Path, swaps: int, say: Progress) -> tuple[SwapLoad, SwapReport, int]:
    """The load, what it saw, and the number of cut-overs under it."""
    server = harness.redis()
    environ = {**harness.settings, "PENSTOCK_REDIS_URL": server.url, "PENSTOCK_CELERY_URL": server.celery_url}
    with Deployer.connect(Settings.load(environ=environ), on_progress=say) as deployer:
        for version in (1, 2):
            deployer.register(root / _MODEL / str(version))
        rollouts = [release(deployer, _MODEL, 1)]
        harness.workers(_WORKERS, server, _MODEL, models_root=root)
        with SwapLoad(server.url, _MODEL, in_flight=_IN_FLIGHT) as load:
            rollouts += _cut_overs(deployer, swaps)
    return load, check(server.url, load, rollouts), len(rollouts) - 1


def _cut_overs(deployer: Deployer, swaps: int) -> Iterator[Rollout]:
    """Each swap is a promotion and the way back."""
    for _ in range(swaps):
        time.sleep(_BETWEEN_S)
        deployer.promote(_MODEL, "2", ModelStage.STAGING)
        yield deployer.promote(_MODEL, "2")
        time.sleep(_BETWEEN_S)
        yield deployer.rollback(_MODEL)
    time.sleep(_BETWEEN_S)


def _row(load: SwapLoad, seen: SwapReport, cut_overs: int) -> Row:
    if seen.mislabelled:
        raise ValueError(f"Wrong answers: {len(seen.mislabelled)} results name another version than computed them")
    if not all(seen.versions.values()):
        raise ValueError(f"Nothing was swapped under load: answers by version {seen.versions}")
    failed, stale, batches = len(load.failures), len(seen.stale), seen.pause_s / _FORWARD_S
    return Row(
        f"hot swap under saturating load, {_WORKERS} workers, {cut_overs} cut-overs: "
        "failed jobs / answers by the old version in batches claimed after the cut-over / longest pause",
        f"{failed} / {stale} of {seen.answers:,} / {batches:.1f} batch times of {_FORWARD_S * 1000:.0f} ms",
        "0 / 0 / <= 2 batch times",
        "",
        verdict(required=not failed and not stale and batches <= 2),
        {"failed": failed, "stale": stale, "jobs": seen.answers, "pause_batches": batches},
    )
