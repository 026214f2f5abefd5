"""Versions swapped under saturating load, three workers: what fails, who answers after a flip, how long it pauses.

256 jobs outstanding, all the time --> 3 workers --> results, each with its version and its time in the queue
promote 2, roll back, promote 2, ...  -- prepare, decide, flip --^      forwards note when they began and ended
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple
from uuid import UUID

import numpy as np

from compose.deploy import Deployer
from producers import AsyncClient
from registry.broker.redis_streams import RedisStreams
from registry.deployment import Deployment
from registry.envelope import open_result
from registry.errors import PenstockError
from registry.settings import Settings
from registry.stages import ModelStage
from safety.keys import OperatorKey
from tests.benchmarks.report import Progress, Row, verdict
from tests.benchmarks.scale import Scale
from tests.benchmarks.stand import Stand
from tests.packages import write_package

__all__ = ["Answer", "Flip", "answered_by_old", "measure"]

_MODEL: Final = "swapped"
_WORKERS: Final = 3
_OUTSTANDING: Final = 256
_FORWARD_S: Final = 0.05
_BATCH: Final = 16
_LOOK_S: Final = 0.001
_AT_MOST_LATE_MS: Final = 100.0
"""A flip is seen that much later than it happened, at most; so early may a job have the next version."""
_SETTLE_S: Final = 0.4
_TIMEOUT_S: Final = 60.0
_CHUNK: Final = 512


class Flip(NamedTuple):
    """From this moment on, milliseconds since 1970, every claim is for that version."""

    at_ms: float
    version: str


class Answer(NamedTuple):
    """A job that was answered; `claimed_ms`: no earlier than when it was claimed, milliseconds since 1970."""

    version: str
    claimed_ms: float


class Load(NamedTuple):
    """What the load saw: ids of the jobs with the version that their outputs show, and how many failed."""

    shown: dict[str, str]
    failures: list[str]


def measure(scale: Scale, say: Progress) -> list[Row]:
    """Failed jobs, answers by the old version in batches claimed after a flip, and the longest pause of a worker."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        key_file = Path(folder) / "operator.pem"
        settings = {
            "PENSTOCK_REGISTRY_URL": f"sqlite:///{folder}/registry.db",
            "PENSTOCK_OPERATOR_KEY_FILE": str(key_file),
            "PENSTOCK_OPERATOR_PUBLIC_KEYS": OperatorKey.generate(key_file).public_text,
            "PENSTOCK_INFERENCE_REPO_ROOT": str(Path(folder) / "models"),
        }
        ledger = Path(folder) / "forwards"
        for version in ("1", "2"):
            _write_scaler(Path(folder) / "models", ledger, version)
        with Stand(settings) as stand:
            load, flips, answers = _swap(stand, Path(folder) / "models", scale.swaps, say)
        pause_s, forwards = _longest_pause(ledger)
    return [_row(load, flips, answers, pause_s, forwards)]


def _swap(stand: Stand, root: Path, swaps: int, say: Progress) -> tuple[Load, list[Flip], list[Answer]]:
    server = stand.redis()
    settings = Settings.load(
        environ={**stand.settings, "PENSTOCK_REDIS_URL": server.url, "PENSTOCK_CELERY_URL": server.celery_url}
    )
    broker = RedisStreams.from_url(server.url)
    with Deployer.connect(settings, tell=say) as deployer:
        for version in ("1", "2"):
            deployer.register(root / _MODEL / version)
            deployer.promote(_MODEL, version, ModelStage.STAGING)
        deployer.promote(_MODEL, "1")
        stand.workers(_WORKERS, server, _MODEL, models_root=root)
        with _watched_flips(server.url) as flips:
            load = asyncio.run(_loaded(settings, lambda: _swap_often(deployer, swaps)))
    answers = _answers(broker, settings, load)
    broker.close()
    return load, flips, answers


def _swap_often(deployer: Deployer, swaps: int) -> None:
    """Each swap is a promotion and the way back."""
    for number in range(swaps):
        time.sleep(_SETTLE_S)
        if number:
            deployer.promote(_MODEL, "2", ModelStage.STAGING)
        deployer.promote(_MODEL, "2")
        time.sleep(_SETTLE_S)
        deployer.rollback(_MODEL)
    time.sleep(_SETTLE_S)


async def _loaded(settings: Settings, work: Callable[[], None]) -> Load:
    """Runs `work` in a thread while so many jobs are outstanding all the time; then waits for the last of them."""
    load = Load({}, [])
    is_over = False
    row = np.ones((1, 4), np.float32)

    async def caller(client: AsyncClient) -> None:
        while not is_over:
            try:
                job = await client.submit(_MODEL, {"x": row})
                load.shown[job.id] = f"{(await job.result(timeout=_TIMEOUT_S))['y'][0, 0]:g}"
            except PenstockError as error:
                load.failures.append(f"{type(error).__name__}: {error}")

    async with AsyncClient.from_env(settings=settings) as client:
        callers = [asyncio.create_task(caller(client)) for _ in range(_OUTSTANDING)]
        try:
            await asyncio.to_thread(work)
        finally:
            is_over = True
            await asyncio.gather(*callers)
    return load


@contextmanager
def _watched_flips(url: str) -> Iterator[list[Flip]]:
    """The flips inside the block, each noted as soon as it is seen; the first is what answered before."""
    flips: list[Flip] = []
    is_over = threading.Event()
    broker = RedisStreams.from_url(url)

    def watch() -> None:
        seen = b""
        while not is_over.wait(_LOOK_S):
            active = broker.actives([_MODEL])[_MODEL]
            if active != seen:
                seen = active
                flips.append(Flip(time.time() * 1000, Deployment.open(active, _MODEL).version))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield flips
    finally:
        is_over.set()
        thread.join()
        broker.close()


def _answers(broker: RedisStreams, settings: Settings, load: Load) -> list[Answer]:
    """The answered jobs, as their records say. Raises ValueError where outputs are not those of the version named."""
    ids = list(load.shown)
    answers = []
    for start in range(0, len(ids), _CHUNK):
        part = ids[start : start + _CHUNK]
        for job_id, standing in zip(part, broker.standings(part), strict=True):
            if standing is None:
                raise ValueError("Wrong answers: a result is gone")
            header, _ = open_result(standing.result, settings.keyring)
            if header.version != load.shown[job_id]:
                raise ValueError(f"Wrong answers: version {header.version} is named, {load.shown[job_id]} answered")
            # The id is made before the job is accepted, from where its time in the queue counts.
            made_ms = UUID(job_id.partition(".")[2]).int >> 80
            answers.append(Answer(header.version, made_ms + header.timings.queue_ms))
    return answers


def answered_by_old(flips: Sequence[Flip], answers: Sequence[Answer]) -> tuple[int, int]:
    """Of the jobs that were claimed after the first flip, how many there are, and how many the version answered that
    the latest flip before their claim had withdrawn."""
    starts = np.array([flip.at_ms for flip in flips])
    judged = old = 0
    for answer in answers:
        latest = int(np.searchsorted(starts, answer.claimed_ms, side="left")) - 1
        if latest < 1:
            continue
        judged += 1
        following = flips[latest + 1] if latest + 1 < len(flips) else None
        is_early = following is not None and answer.claimed_ms > following.at_ms - _AT_MOST_LATE_MS
        old += answer.version != flips[latest].version and not is_early
    return judged, old


def _longest_pause(ledger: Path) -> tuple[float, int]:
    """The longest time between two forwards of one worker, and how many forwards there were."""
    spans = defaultdict(list)
    for line in ledger.read_text().splitlines():
        forward = json.loads(line)
        if forward["rows"] > 2:  # not a warm-up
            spans[forward["pid"]].append((forward["began"], forward["ended"]))
    pauses = [began - ended for of_one in spans.values() for (_, ended), (began, _) in pairwise(sorted(of_one))]
    return max(pauses), sum(map(len, spans.values()))


def _row(load: Load, flips: Sequence[Flip], answers: Sequence[Answer], pause_s: float, forwards: int) -> Row:
    judged, old = answered_by_old(flips, answers)
    batches = pause_s / _FORWARD_S
    if len({flip.version for flip in flips}) < 2 or not judged:
        raise ValueError("Nothing was swapped under load")
    return Row(
        f"hot swap under saturating load, {_WORKERS} workers, {len(flips) - 1} flips: failed jobs / answers by the old "
        "version in batches claimed after the flip / longest pause",
        f"{len(load.failures)} of {len(answers) + len(load.failures):,} / {old} of {judged:,} / {batches:.1f} batch "
        f"times of {_FORWARD_S * 1000:.0f} ms between {forwards:,} forwards",
        "0 / 0 / <= 2 batch times",
        "",
        verdict(required=not load.failures and not old and batches <= 2),
        {"failed": len(load.failures), "jobs": len(answers), "old": old, "judged": judged, "pause_batches": batches},
    )


def _write_scaler(root: Path, ledger: Path, version: str) -> None:
    """Answers x times its version after a while, and notes when each forward began and ended."""
    write_package(
        root,
        _MODEL,
        f"""
        import json
        import os
        import time

        def build():
            # One write to a file opened for appending is one line, whichever process writes.
            ledger = os.open({str(ledger)!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

            def forward(inputs):
                began = time.monotonic()
                time.sleep({_FORWARD_S!r})
                note = {{"pid": os.getpid(), "rows": len(inputs["x"]), "began": began, "ended": time.monotonic()}}
                os.write(ledger, (json.dumps(note) + "\\n").encode())
                return {{"y": inputs["x"] * {version}}}

            return forward
        """,
        version=version,
        max_batch_size=_BATCH,
    )
