"""Committed jobs -> pairs in the shadow queue, on a thread of its own: no job waits for its pair.

    lease thread  follow --> the orders of the served models, as of the last report
    I/O thread    offer: a committed batch --> the sampled jobs, or nothing --> shadow-mirror: seal, append

While no model of the worker has a shadow, a batch costs one test of a flag. Pairs that cannot be kept up with are
dropped and counted: the memory that waits is bounded, and an error of the broker loses the pairs of one call.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple, Protocol

from penstock.registry.broker.base import State
from penstock.registry.broker.redis_shadow import RedisShadow
from penstock.registry.envelope import Failure, Keyring, PairHeader
from penstock.registry.errors import Corrupt, InvalidInput, PenstockError
from penstock.registry.shadow import MAX_PAIR_BYTES, ShadowOrder, ShadowPair, sampler
from penstock.registry.signed import Verifier
from penstock.registry.tensors import encode
from penstock.workers.batch_run import BatchRun, Outputs
from penstock.workers.completer import Settlement
from penstock.workers.job import ClaimedJob
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.results import EncodedOutputs

__all__ = ["Mirror", "NullMirror", "ShadowMirror"]

_MOST_WAITING_BYTES: Final = 32 * 1024 * 1024
_JOB_BYTES: Final = 1024
"""The memory of a job that waits, besides its inputs and outputs."""
_LINGER_S: Final = 0.25
"""Pairs of so long share a call: a wake-up for each batch would cost more than the pairs."""
_TURN_PAIRS: Final = 16
"""Pairs that are sealed in a row: some hundred would keep the interpreter's lock from the drain for milliseconds."""
_FULL_S: Final = 1.0
"""After a full queue has refused a pair, none is offered for so long: to seal pairs costs more than to drop them."""
_CALL_PAIRS: Final = 128
_CALL_BYTES: Final = 1 << 20

logger = logging.getLogger("penstock.server")


class Mirror(Protocol):
    """The mirror of a worker's committed jobs."""

    @property
    def is_active(self) -> bool:
        """Whether a model of this worker has a shadow: only then is `offer` called."""

    def offer(self, settlement: Settlement) -> None:
        """These jobs are committed. On the I/O thread; never waits and never raises."""

    def follow(self, models: Sequence[str], now_ms: float) -> None:
        """Read the orders of these models. On the lease thread; never raises. now_ms: the broker's clock."""

    def close(self) -> None:
        """Append what waits, for a moment, and end."""


class NullMirror:
    """For a worker without a shadow queue: one in memory, or in the simulator."""

    is_active: Final = False

    def offer(self, settlement: Settlement) -> None:
        """Does nothing."""

    def follow(self, models: Sequence[str], now_ms: float) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class _Shadow(NamedTuple):
    """An order that this worker follows."""

    record: bytes
    order: ShadowOrder
    is_sampled: Callable[[str], bool]


class _Answered(NamedTuple):
    """The sampled jobs of one batch, with what they were answered."""

    order: ShadowOrder
    run: BatchRun
    jobs: Sequence[tuple[ClaimedJob, Outputs | EncodedOutputs]]
    nbytes: int
    """The memory that they keep."""


class _Sealed(NamedTuple):
    order: ShadowOrder
    pair: bytes


class ShadowMirror:
    """Mirrors to the shadow queues of one Redis.

    verify: checks the operators' signatures on orders; None: no signatures are required. linger_s: how long pairs wait
    for others of the same call. most_bytes: the memory of answers that wait. clock: monotonic seconds.
    """

    def __init__(
        self,
        end: RedisShadow,
        keyring: Keyring,
        metrics: InferenceMetrics,
        *,
        verify: Verifier | None,
        linger_s: float = _LINGER_S,
        most_bytes: int = _MOST_WAITING_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._end = end
        self._keyring = keyring
        self._metrics = metrics
        self._verify = verify
        self._linger_s = linger_s
        self._most_bytes = most_bytes
        self._clock = clock
        self._shadows: dict[str, _Shadow] = {}
        """By model. It is replaced as a whole, because two threads read it."""
        self._refused: dict[str, bytes] = {}
        """By model, the record that was refused last: it is logged once."""
        self._is_away = False
        self._waiting: SimpleQueue[_Answered | None] = SimpleQueue()
        self._waiting_bytes = 0
        self._over: set[str] = set()
        """Shadows that their canary has ended. Their orders are there until an operator stops them."""
        self._full_until: dict[str, float] = {}
        """By shadow, in monotonic seconds."""
        self._dropped: dict[str, int] = {}
        """By model, jobs that were dropped here and are not counted in the broker yet."""
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_active(self) -> bool:
        """See Mirror."""
        return bool(self._shadows)

    # The I/O thread

    def offer(self, settlement: Settlement) -> None:
        """See Mirror. Only forwards are mirrored: a cached answer was mirrored when its forward ran, if at all.

        A job that named a version is left out: the candidate would not answer it.
        """
        try:
            self._offer(settlement)
        except Exception:  # whatever is wrong with the mirror, the drain goes on
            logger.exception("the mirror failed")

    def _offer(self, settlement: Settlement) -> None:
        for run, _, _ in settlement.completed:
            if (shadow := self._shadow_of(run)) is not None:
                items, is_sampled = run.batch.items, shadow.is_sampled
                chosen = [n for n, item in enumerate(items) if is_sampled(item.job.header.id)]
                self._keep(shadow, run, [(items[n].job, answer) for n in chosen if _is_told(answer := run.answers[n])])
        for run, outcomes in groupby(
            (outcome for outcome, state in settlement.outcomes if state is State.COMPLETED and outcome.how == "ran"),
            key=attrgetter("run"),
        ):
            if run is not None and (shadow := self._shadow_of(run)) is not None:
                sampled = [
                    (outcome.job, outcome.answer)
                    for outcome in outcomes
                    if not outcome.job.header.version and shadow.is_sampled(outcome.job.header.id)
                ]
                self._keep(shadow, run, [each for each in sampled if _is_told(each[1])])

    def _shadow_of(self, run: BatchRun) -> _Shadow | None:
        """The shadow of the version that answered; None where the candidate itself did, or the shadow has ended."""
        shadow = self._shadows.get(run.version.name)
        if shadow is None or shadow.order.id in self._over:
            return None
        if shadow.order.candidate == run.version.label:
            in_use = run.form_in_use
            if shadow.order.form == (in_use.form if in_use is not None else ""):
                return None
        return shadow

    def _keep(
        self, shadow: _Shadow, run: BatchRun, jobs: Sequence[tuple[ClaimedJob, Outputs | EncodedOutputs | Failure]]
    ) -> None:
        told = [(job, answer) for job, answer in jobs if not isinstance(answer, Failure)]
        if not told:
            return
        if self._clock() < self._full_until.get(shadow.order.id, 0.0):
            with self._lock:
                self._drop(shadow.order.model, run.version.label, "full", len(told))
                is_first = self._dropped[shadow.order.model] == len(told)
            if is_first:
                # The thread tells the broker of the drops.
                self._waiting.put(_Answered(shadow.order, run, (), 0))
            return
        # An answer is a view of the outputs of the whole batch: they stay in memory with it.
        nbytes = run.output_bytes + sum([len(job.delivery.sealed) + _JOB_BYTES for job, _ in told])
        with self._lock:
            if self._waiting_bytes + nbytes > self._most_bytes or self._is_closing.is_set():
                self._drop(shadow.order.model, run.version.label, "behind", len(told))
                return
            self._waiting_bytes += nbytes
        self._waiting.put(_Answered(shadow.order, run, told, nbytes))
        self._start()

    def _drop(self, model: str, version: str, reason: str, count: int) -> None:
        """Under the lock."""
        self._dropped[model] = self._dropped.get(model, 0) + count
        self._metrics.shadow_pairs(model, version, reason, count)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shadow-mirror", daemon=True)
            self._thread.start()

    # The lease thread

    def follow(self, models: Sequence[str], now_ms: float) -> None:
        """See Mirror. While the broker does not answer, the orders of before hold until their time is over."""
        try:
            records = self._end.orders(models)
        except PenstockError as error:
            if not self._is_away:
                logger.warning("the orders of shadows cannot be read: %s", error)
            self._is_away = True
            records = {model: shadow.record for model, shadow in self._shadows.items()}
        else:
            self._is_away = False
        shadows = {
            model: shadow
            for model, record in records.items()
            if record and (shadow := self._opened(model, record)) is not None and not shadow.order.is_over(now_ms)
        }
        if shadows.keys() != self._shadows.keys() or shadows != self._shadows:
            self._log_changes(shadows)
            self._shadows = shadows
            self._over &= {shadow.order.id for shadow in shadows.values()}

    def _opened(self, model: str, record: bytes) -> _Shadow | None:
        known = self._shadows.get(model)
        if known is not None and known.record == record:
            return known
        try:
            order = ShadowOrder.open(record, model, self._verify)
        except Corrupt as error:
            if self._refused.get(model) != record:
                logger.error("the order of a shadow is refused: %s", error, extra={"model": model})
                self._refused[model] = record
            return None
        return _Shadow(record, order, sampler(order))

    def _log_changes(self, shadows: dict[str, _Shadow]) -> None:
        for model in shadows.keys() | self._shadows.keys():
            now, before = shadows.get(model), self._shadows.get(model)
            if now != before:
                facts = {"model": model, "candidate": now.order.candidate if now else ""}
                logger.info("answered jobs are mirrored" if now else "the shadow has ended", extra=facts)

    # The thread of the mirror

    def _run(self) -> None:
        is_over = False
        while not is_over:
            taken = [self._waiting.get()]
            self._is_closing.wait(self._linger_s)
            with suppress(Empty):
                while True:
                    taken.append(self._waiting.get_nowait())
            is_over = None in taken
            self.send([answered for answered in taken if answered is not None])

    def send(self, taken: Sequence[_Answered]) -> None:
        """Seal and append these. Called on the thread of the mirror, which must outlive every error."""
        try:
            pairs: dict[str, list[bytes]] = {answered.order.id: [] for answered in taken}
            for order, pair in self._sealed(taken):
                pairs[order.id].append(pair)
            for order in {answered.order.id: answered.order for answered in taken}.values():
                for call in _calls(pairs[order.id]) or [[]]:
                    self._append(order, call)
        except Exception:
            logger.exception("the mirror failed")
        finally:
            with self._lock:
                self._waiting_bytes -= sum(answered.nbytes for answered in taken)

    def _sealed(self, taken: Sequence[_Answered]) -> list[_Sealed]:
        sealed: list[_Sealed] = []
        for answered in taken:
            order, version = answered.order, answered.run.version.label
            for job, answer in answered.jobs:
                if len(sealed) % _TURN_PAIRS == _TURN_PAIRS - 1:
                    time.sleep(0)
                pair = self._pair_of(answered, job, answer)
                if pair is None or len(pair) > MAX_PAIR_BYTES:
                    with self._lock:
                        self._drop(order.model, version, "large" if pair else "unsendable", 1)
                else:
                    sealed.append(_Sealed(order, pair))
        return sealed

    def _pair_of(self, answered: _Answered, job: ClaimedJob, answer: Outputs | EncodedOutputs) -> bytes | None:
        run = answered.run
        try:
            content, body = (
                (answer.content, answer.body) if isinstance(answer, EncodedOutputs) else encode(answer, may_view=True)
            )
        except InvalidInput:
            return None
        header = PairHeader(
            id=job.header.id,
            tenant=job.header.tenant,
            model=answered.order.model,
            shadow=answered.order.id,
            version=run.version.label,
            content_hash=run.model.content_hash,
            inputs=job.header.content,
            outputs=content,
            input_bytes=len(job.body),
            compute_ms=(run.ended - run.started) * 1e3,
            batch_rows=run.batch.rows,
        )
        return ShadowPair(header, job.body, body).seal(self._keyring)

    def _append(self, order: ShadowOrder, pairs: Sequence[bytes]) -> None:
        with self._lock:
            dropped = self._dropped.pop(order.model, 0)
        try:
            mirrored = self._end.mirror(order, pairs, dropped=dropped)
        except PenstockError as error:
            logger.debug("pairs were dropped: %s", error)
            with self._lock:
                self._dropped[order.model] = self._dropped.get(order.model, 0) + dropped
                self._drop(order.model, "", "failed", len(pairs))
            return
        if mirrored is None:
            self._over.add(order.id)
            self._metrics.shadow_pairs(order.model, "", "over", len(pairs))
            return
        self._metrics.shadow_pairs(order.model, "", "mirrored", mirrored.appended)
        self._metrics.shadow_pairs(order.model, "", "full", mirrored.dropped)
        if mirrored.dropped:
            self._full_until[order.id] = self._clock() + _FULL_S
        elif pairs:
            self._full_until.pop(order.id, None)

    def close(self, timeout_s: float = 2.0) -> None:
        """See Mirror."""
        with self._lock:
            self._is_closing.set()
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(timeout_s)
        self._end.close()


def _is_told(answer: object) -> bool:
    """Whether the client got outputs."""
    return not isinstance(answer, Failure)


def _calls(pairs: Iterable[bytes]) -> list[list[bytes]]:
    """The pairs of each call: at most _CALL_PAIRS, and no further one beyond _CALL_BYTES."""
    calls: list[list[bytes]] = []
    size = 0
    for pair in pairs:
        if not calls or len(calls[-1]) == _CALL_PAIRS or size + len(pair) > _CALL_BYTES:
            calls.append([])
            size = 0
        calls[-1].append(pair)
        size += len(pair)
    return calls
