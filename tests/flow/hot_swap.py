"""Jobs without a pause over versions that are swapped meanwhile, and what they saw: the journey's and the benchmark's.

SwapLoad: AsyncClient on a thread of its own -- jobs, one after the other --> Answer
promote, roll back --> Rollout                                                `--> SwapReport: stale, mixed, pause
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from penstock import AsyncClient
from penstock.compose.deploy import Deployer, Rollout
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.envelope import Keyring, ResultHeader, open_result
from penstock.registry.queues import job_time_ms
from tests.packages import write_package

__all__ = ["Answer", "SwapLoad", "SwapReport", "check", "release", "write_multiplier"]

_ASKED_AT_ONCE = 500


def write_multiplier(root: Path, model: str, version: int, *, forward_s: float, max_batch_size: int = 8) -> Path:
    """A package that answers version * x after `forward_s` seconds a batch, so that a value says who computed it."""
    return write_package(
        root,
        model,
        f"""
        import time

        def build():
            def forward(inputs):
                time.sleep({forward_s!r})
                return {{"y": inputs["x"] * {version}}}

            return forward
        """,
        version=str(version),
        max_batch_size=max_batch_size,
    )


def release(deployer: Deployer, model: str, version: int) -> Rollout:
    """Takes a draft through staging to production."""
    deployer.promote(model, str(version), "staging")
    return deployer.promote(model, str(version))


class Answer(NamedTuple):
    """One job: when it was published and answered, in unix seconds, and which version computed it by its value."""

    job_id: str
    published: float
    answered: float
    factor: int


class SwapLoad:
    """Keeps `in_flight` jobs of a model in flight while the `with` block lasts, then waits for the last ones.

    Jobs differ from each other, so that none shares another's forward.
    """

    def __init__(self, url: str, model: str, *, in_flight: int) -> None:
        self._url = url
        self._model = model
        self._in_flight = in_flight
        self._numbers = itertools.count(1)
        self._is_over = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load", daemon=True)
        self.answers: list[Answer] = []
        self.failures: list[str] = []

    def __enter__(self) -> SwapLoad:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join(60)

    async def _run(self) -> None:
        async with AsyncClient(self._url) as client:
            await asyncio.gather(*(self._one_after_the_other(client) for _ in range(self._in_flight)))

    async def _one_after_the_other(self, client: AsyncClient) -> None:
        while not self._is_over:
            number, published = next(self._numbers), time.time()
            try:
                job = await client.submit(self._model, {"x": [[number, 0, 0, 0]]})
                value = float((await job.result(180))["y"][0, 0])
            except Exception as error:
                # Every error is one that must not happen.
                self.failures.append(f"{type(error).__name__}: {error}")
                continue
            self.answers.append(Answer(job.id, published, time.time(), round(value / number)))


class SwapReport(NamedTuple):
    """What the jobs saw. stale: answered by a version that did not stand while they were under way. mislabelled: the
    header names another version, or content, than the one that computed the value. pause_s: the longest time without
    an answer."""

    answers: int
    versions: dict[int, int]
    stale: list[Answer]
    mislabelled: list[Answer]
    pause_s: float


def check(url: str, load: SwapLoad, rollouts: Sequence[Rollout]) -> SwapReport:
    """Compares every answer with the record of its job, and with the decisions that stood while it was under way."""
    answers = sorted(load.answers, key=lambda answer: answer.answered)
    contents = {rollout.transition.version: rollout.transition.content_hash for rollout in rollouts}
    stale, mislabelled = [], []
    for answer, header in zip(answers, _headers(url, [answer.job_id for answer in answers]), strict=True):
        if (header.version, header.content_hash) != (str(answer.factor), contents[header.version]):
            mislabelled.append(answer)
        if answer.factor not in _allowed(answer, rollouts):
            stale.append(answer)
    versions = {factor: sum(answer.factor == factor for answer in answers) for factor in map(int, contents)}
    gaps = (after.answered - before.answered for before, after in itertools.pairwise(answers))
    return SwapReport(len(answers), versions, stale, mislabelled, max(gaps, default=0.0))


def _allowed(answer: Answer, rollouts: Sequence[Rollout]) -> set[int]:
    """The versions that stood at some moment between the job's submission and its answer."""
    # A worker knows the moment of its claim when the reply has come: on a busy machine, too late to say what stood.
    submitted = (job_time_ms(answer.job_id) or 0) / 1000
    cut_overs = [(each.activated_at or 0.0, each.seconds, int(each.transition.version)) for each in rollouts]
    stood = [version for activated, _, version in cut_overs if activated < submitted]
    came = [
        version
        for activated, took_s, version in cut_overs
        if activated >= submitted and activated - took_s < answer.answered
    ]
    return {*stood[-1:], *came}


def _headers(url: str, job_ids: Sequence[str]) -> Iterator[ResultHeader]:
    with _broker(url) as broker:
        for first in range(0, len(job_ids), _ASKED_AT_ONCE):
            for job_record in broker.job_records(job_ids[first : first + _ASKED_AT_ONCE]):
                assert job_record is not None
                yield open_result(job_record.result, Keyring.parse(None))[0]


@contextmanager
def _broker(url: str) -> Iterator[RedisStreams]:
    with closing(RedisStreams.from_url(url)) as broker:
        yield broker
