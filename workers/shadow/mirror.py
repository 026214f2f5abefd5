"""Committed jobs -> pairs in the shadow queue, on a thread of its own: no job waits for its pair.

    lease thread  follow --> the orders of the served models, as of the last report
    I/O thread    offer: a committed batch --> the bytes of its sampled jobs, or nothing --> shadow-mirror: pairs, seal,
                                                                                             append

While no model of the worker has a shadow, a batch costs one test of a flag. Pairs that cannot be kept up with are
dropped and counted: the memory that waits is bounded, and an error of the broker loses the pairs of one call.

What waits keeps its own bytes, and neither its batch nor the other jobs of that: the memory of these is warm, and the
next jobs get it. All else that a pair needs is done on the mirror's thread: there it is done for many pairs in a row.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple, Protocol

from penstock.registry.broker.base import State
from penstock.registry.broker.redis_shadow import RedisShadow
from penstock.registry.envelope import Failure, JobHeader, Keyring, PairHeader
from penstock.registry.errors import Corrupt, InvalidInput, PenstockError
from penstock.registry.shadow import MAX_PAIR_BYTES, Sample, ShadowOrder, ShadowPair
from penstock.registry.signed import Verifier
from penstock.registry.tensors import Tensor, encode
from penstock.workers.batch_run import BatchRun, Outputs
from penstock.workers.completer import Settlement
from penstock.workers.job import ClaimedJob
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.results import EncodedOutputs

__all__ = ["Mirror", "NullMirror", "ShadowMirror"]

_MOST_WAITING_BYTES: Final = 32 * 1024 * 1024
_PAIR_BYTES: Final = 1024
"""The memory of a pair that waits, besides its inputs and outputs."""
_LINGER_S: Final = 0.25
"""Pairs of so long share a call, if they are few: a wake-up for each batch would cost more than the pairs."""
_FULL_S: Final = 1.0
"""After a full queue has refused a pair, none is offered for so long: to seal pairs costs more than to drop them."""
_CALL_PAIRS: Final = 32
"""Pairs that are sealed in a row and appended by one call. The drain waits for the interpreter's lock while they are
sealed, and jobs wait for the broker while it appends them: some hundred would take milliseconds."""
_WAKE_PAIRS: Final = 2 * _CALL_PAIRS
"""So many pairs do not wait for others."""
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
    sample: Sample


class _Sampled(NamedTuple):
    """One answered job of the sample."""

    header: JobHeader
    inputs: bytes | memoryview
    """Encoded, as the outputs are; see registry/tensors.py."""
    content: tuple[Tensor, ...]
    """Describes the outputs."""
    outputs: bytes | memoryview


class _Answered(NamedTuple):
    """The sampled jobs of one batch."""

    order: ShadowOrder
    version: str
    """The version that answered."""
    content_hash: str
    compute_ms: float
    batch_rows: int
    jobs: Sequence[_Sampled]
    nbytes: int
    """The memory that they keep."""

    def pair(self, job: _Sampled, keyring: Keyring) -> ShadowPair:
        """The pair of one of the jobs."""
        header, order = job.header, self.order
        return ShadowPair(
            PairHeader(
                id=header.id,
                tenant=header.tenant,
                model=order.model,
                shadow=order.id,
                version=self.version,
                content_hash=self.content_hash,
                inputs=header.content,
                outputs=job.content,
                input_bytes=len(job.inputs),
                compute_ms=self.compute_ms,
                batch_rows=self.batch_rows,
                key=keyring.signing_id,
                is_sealed=keyring.seals,
            ),
            job.inputs,
            job.outputs,
        )


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
        self._waiting: deque[_Answered] = deque()
        self._waiting_bytes = self._waiting_pairs = 0
        self._over: set[str] = set()
        """Shadows that their canary has ended. Their orders are there until an operator stops them."""
        self._full_until: dict[str, float] = {}
        """By shadow, in monotonic seconds."""
        self._dropped: dict[str, int] = {}
        """By model, jobs that were dropped here and are not counted in the broker yet."""
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_asleep = False
        """Whether the thread waits without a limit of time."""
        self._is_closing = False
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
                items, answers = run.batch.items, run.answers
                if chosen := shadow.sample.places([item.job.header.id for item in items]):
                    self._keep(shadow, run, [(items[place].job, answers[place]) for place in chosen])
        if not settlement.outcomes:
            return
        for run, outcomes in groupby(
            (outcome for outcome, state in settlement.outcomes if state is State.COMPLETED and outcome.how == "ran"),
            key=attrgetter("run"),
        ):
            if run is not None and (shadow := self._shadow_of(run)) is not None:
                sampled = [
                    (outcome.job, outcome.answer)
                    for outcome in outcomes
                    if not outcome.job.header.version and outcome.job.header.id in shadow.sample
                ]
                self._keep(shadow, run, sampled)

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
        order, version = shadow.order, run.version.label
        if self._full_until and self._clock() < self._full_until.get(order.id, 0.0):
            with self._lock:
                self._drop(order.model, version, "full", len(told))
                is_first = self._dropped[order.model] == len(told)
            if is_first:
                # The thread tells the broker of the drops.
                self._put(_Answered(order, version, "", 0.0, 0, (), 0))
            return
        sampled, nbytes = _sampled(run, told)
        with self._lock:
            if len(sampled) < len(told):
                self._drop(order.model, version, "unsendable", len(told) - len(sampled))
            if self._waiting_bytes + nbytes > self._most_bytes or self._is_closing:
                self._drop(order.model, version, "behind", len(sampled))
                return
            self._waiting_bytes += nbytes
            self._waiting_pairs += len(sampled)
        compute_ms = (run.ended - run.started) * 1e3
        self._put(_Answered(order, version, run.model.content_hash, compute_ms, run.batch.rows, sampled, nbytes))

    def _put(self, answered: _Answered) -> None:
        self._waiting.append(answered)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shadow-mirror", daemon=True)
            self._thread.start()
        if (self._is_asleep or self._waiting_pairs >= _WAKE_PAIRS) and not self._wake.is_set():
            self._wake.set()

    def _drop(self, model: str, version: str, reason: str, count: int) -> None:
        """Under the lock."""
        self._dropped[model] = self._dropped.get(model, 0) + count
        self._metrics.shadow_pairs(model, version, reason, count)

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
        return _Shadow(record, order, Sample(order))

    def _log_changes(self, shadows: dict[str, _Shadow]) -> None:
        for model in shadows.keys() | self._shadows.keys():
            now, before = shadows.get(model), self._shadows.get(model)
            if now != before:
                facts = {"model": model, "candidate": now.order.candidate if now else ""}
                logger.info("answered jobs are mirrored" if now else "the shadow has ended", extra=facts)

    # The thread of the mirror

    def _run(self) -> None:
        has_sent = False
        while not self._is_closing or self._waiting:
            if not has_sent:
                self._is_asleep = True
                # After the flag, so that `_put` sees it, or is seen here.
                if not self._waiting and not self._is_closing:
                    self._wake.wait()
                self._is_asleep = False
            self._wake.clear()
            if not self._is_closing:
                self._wake.wait(self._linger_s)
            taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
            self.send(taken)
            has_sent = bool(taken)

    def send(self, taken: Sequence[_Answered]) -> None:
        """Seal and append these. Called on the thread of the mirror, which must outlive every error."""
        with self._lock:
            self._waiting_pairs -= sum([len(answered.jobs) for answered in taken])
        try:
            for order in {answered.order.id: answered.order for answered in taken}.values():
                self._send_to(order, [answered for answered in taken if answered.order.id == order.id])
        except Exception:
            logger.exception("the mirror failed")
        finally:
            with self._lock:
                self._waiting_bytes -= sum([answered.nbytes for answered in taken])

    def _send_to(self, order: ShadowOrder, taken: Sequence[_Answered]) -> None:
        """The pairs of one shadow, call by call. Without pairs, the broker learns of the drops."""
        call: list[bytes] = []
        size = 0
        for answered in taken:
            for job in answered.jobs:
                sealed = answered.pair(job, self._keyring).seal(self._keyring)
                if len(sealed) > MAX_PAIR_BYTES:
                    with self._lock:
                        self._drop(order.model, answered.version, "large", 1)
                    continue
                if call and (len(call) == _CALL_PAIRS or size + len(sealed) > _CALL_BYTES):
                    self._append(order, call)
                    call, size = [], 0
                call.append(sealed)
                size += len(sealed)
        self._append(order, call)

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
            self._is_closing = True
        if self._thread is not None:
            self._wake.set()
            self._thread.join(timeout_s)
        self._end.close()


def _sampled(run: BatchRun, told: Sequence[tuple[ClaimedJob, Outputs | EncodedOutputs]]) -> tuple[list[_Sampled], int]:
    """(jobs, bytes that they keep from being freed). A job whose outputs cannot travel is left out."""
    jobs: list[_Sampled] = []
    nbytes = 0
    for job, answer in told:
        if isinstance(answer, EncodedOutputs):
            content, body = answer.content, answer.body
        else:
            try:
                content, body = encode(answer, may_view=True)
            except InvalidInput:
                continue
        jobs.append(_Sampled(job.header, job.body, content, body))
        # A view of an answer keeps the outputs of the whole batch.
        nbytes += len(job.body) + (run.output_bytes if isinstance(body, memoryview) else len(body)) + _PAIR_BYTES
    return jobs, nbytes
