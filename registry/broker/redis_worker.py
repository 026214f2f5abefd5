"""The workers' end of Redis Streams: claim, commit, keep leases.

Commits and claims share one round trip on a connection of the worker's thread. A blocking claim has a connection of
its own, so that the worker can wait for it and for other events at the same time.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Self

import redis
from redis.exceptions import NoScriptError, ResponseError

from penstock.registry.broker import foreign_keys, meters
from penstock.registry.broker import redis_scripts as scripts
from penstock.registry.broker.base import (
    ALL_BANDS,
    Claim,
    Commit,
    CommitStatus,
    Delivery,
    Emission,
    Held,
    Position,
    Quarantined,
    Renewal,
    StreamEntry,
)
from penstock.registry.broker.broker_url import BrokerAddress, parse_broker_url
from penstock.registry.broker.limits import CALL_BYTES, DEAD_LETTERS_BYTES
from penstock.registry.broker.redis_connection import (
    REPAIRS,
    DirectConnection,
    is_no_group,
    log_quarantined,
    open_redis,
)
from penstock.registry.broker.redis_packing import packed_together
from penstock.registry.broker.redis_specs import RedisSpecs
from penstock.registry.errors import BrokerUnavailable, PenstockError
from penstock.registry.queues import (
    GROUP,
    MODELS_KEY,
    WORKERS_KEY,
    experiment_key,
    paused_key,
    stream_keys,
    worker_key,
)

__all__ = ["RedisWorker"]

logger = logging.getLogger("penstock.registry")

_JOBS_PER_CALL: Final = 256
"""Jobs of one call to a script that works through a list, so that no call holds the server for long."""


class RedisWorker(RedisSpecs):
    """WorkerEnd on one Redis. Thread-safe, except that one thread owns exchange, arm, fileno, collect and disarm."""

    def __init__(
        self,
        client: redis.Redis,
        address: BrokerAddress,
        *,
        timeout_s: float = 5.0,
        result_ttl_ms: int = 3_600_000,
        dead_letters_bytes: int = DEAD_LETTERS_BYTES,
    ) -> None:
        super().__init__(client, address, timeout_s=timeout_s, result_ttl_ms=result_ttl_ms)
        self._dead_letters_bytes = dead_letters_bytes
        self._paused: frozenset[str] = frozenset()
        self._last_report = b""
        self._exchanging: DirectConnection | None = None
        self._armed: _ArmedClaim | None = None

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        timeout_s: float = 5.0,
        result_ttl_ms: int = 3_600_000,
        dead_letters_bytes: int = DEAD_LETTERS_BYTES,
    ) -> Self:
        """From redis://, rediss:// or unix://. Connects later. Raises ConfigurationError for other URLs."""
        return cls(
            open_redis(url, timeout_s),
            parse_broker_url(url),
            timeout_s=timeout_s,
            result_ttl_ms=result_ttl_ms,
            dead_letters_bytes=dead_letters_bytes,
        )

    def prepare(self, slots: Sequence[str]) -> None:
        """See WorkerEnd.prepare."""
        for slot in slots:
            for key in stream_keys(slot):
                try:
                    self._run(["XGROUP", "CREATE", key, GROUP, "0", "MKSTREAM"])
                except ResponseError as error:
                    if not str(error).startswith("BUSYGROUP"):
                        raise

    def exchange(
        self,
        consumer: str,
        commits: Sequence[Commit],
        claims: Sequence[Claim],
        result_ttl_ms: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[list[CommitStatus], list[Delivery]]:
        """See WorkerEnd.exchange."""
        by_slot: defaultdict[str, list[int]] = defaultdict(list)
        for index, commit in enumerate(commits):
            by_slot[commit.slot].append(index)
        sizes = [len(commit.sealed) for commit in commits]
        chunks = [(slot, chunk) for slot, indices in by_slot.items() for chunk in _chunks(indices, sizes)]
        calls = [
            scripts.commit(consumer, slot, [commits[index] for index in indices], result_ttl_ms)
            for slot, indices in chunks
        ]
        calls += [scripts.claim(consumer, claim) for claim in claims]
        begun = time.monotonic()
        answers = self._run_all(calls, meanwhile)
        if any(isinstance(answer, ResponseError) for answer in answers):
            self._repeat_refused(calls, answers, [*by_slot, *(claim.slot for claim in claims)])
        statuses: list[CommitStatus] = [CommitStatus.FENCED] * len(commits)
        for (_, indices), answer in zip(chunks, answers, strict=False):
            for index, status in zip(indices, scripts.statuses(answer), strict=True):
                statuses[index] = status
        self._charge_tokens(commits, statuses)
        deliveries: list[Delivery] = []
        for claim, answer in zip(claims, answers[len(chunks) :], strict=True):
            now_ms, is_paused, found = scripts.claimed(claim.slot, answer)
            if is_paused != (claim.slot in self._paused):
                self._paused ^= {claim.slot}
            self._note_clock(now_ms, begun)
            deliveries += found
        return statuses, deliveries

    def _charge_tokens(self, commits: Sequence[Commit], statuses: Sequence[CommitStatus]) -> None:
        """Charges the tokens of committed texts on the limits of their accounts, which are on a node of their own."""
        charges = [
            [meters.token_charge(commit.account, commit.prompt_tokens + commit.generated_tokens)]
            for commit, status in zip(commits, statuses, strict=True)
            if commit.account and status is CommitStatus.COMMITTED
        ]
        if not charges:
            return
        try:
            self._run(meters.spend(charges))
        except PenstockError as error:
            # The jobs are committed and in the usage. A minute of a limit is not worth another try of the commit.
            logger.warning("tokens were not charged: %s", error)

    def arm(
        self, consumer: str, slots: Sequence[str], count: int, block_ms: int, bands: Mapping[str, int] = ALL_BANDS
    ) -> None:
        """See WorkerEnd.arm."""
        # A blocking read does not see pauses, so it must not name the queues of a paused slot.
        active = [slot for slot in slots if slot not in self._paused]
        armed = self._armed
        if armed is None:
            with self._translated():
                armed = self._armed = _ArmedClaim(self._redis)
        try:
            with self._translated():
                if active:
                    armed.send(consumer, active, count, block_ms, bands)
        except BrokerUnavailable:
            self.drop_armed()
            raise

    def fileno(self) -> int:
        """See WorkerEnd.fileno. -1 before the first `arm` and after a lost connection."""
        return -1 if self._armed is None else self._armed.fileno

    def collect(self) -> list[Delivery]:
        """See WorkerEnd.collect."""
        armed = self._armed
        if armed is None:
            return []
        try:
            with self._translated():
                try:
                    return armed.receive() if armed.is_outstanding else []
                except ResponseError as error:
                    if not _is_repairable(error):
                        raise
        except BrokerUnavailable:
            self.drop_armed()
            raise
        # Quarantines foreign keys, and makes what is missing.
        self.prepare(armed.slots)
        return []

    def disarm(self) -> list[Delivery]:
        """See WorkerEnd.disarm."""
        if self._armed is None or not self._armed.is_outstanding:
            return []
        self.unblock()
        return self.collect()

    def unblock(self) -> None:
        """See WorkerEnd.unblock."""
        armed = self._armed
        if armed is not None and armed.is_outstanding:
            # If the claim was answered a moment ago, UNBLOCK does nothing, and the answer is on the way.
            self._run(["CLIENT", "UNBLOCK", armed.client_id])

    def drop_armed(self) -> None:
        """See WorkerEnd.drop_armed. The next `arm` makes another connection."""
        if self._armed is not None:
            self._armed.close()
            self._armed = None

    def paused(self, slots: Sequence[str]) -> frozenset[str]:
        """See WorkerEnd.paused."""
        # GET refuses a key of another type, which is no pause.
        self._paused = frozenset(slot for slot in slots if self._run(["GET", paused_key(slot)]) is not None)
        return self._paused

    def renew(self, consumer: str, held: Sequence[Held]) -> Renewal:
        """See WorkerEnd.renew."""
        lost: set[Held] = set()
        cancelled: set[str] = set()
        for slot, jobs in _by_slot(held):
            renewal = scripts.renewed(jobs, self._run(scripts.renew(consumer, slot, jobs)))
            lost |= renewal.lost
            cancelled |= renewal.cancelled
        return Renewal(frozenset(lost), frozenset(cancelled))

    def take_over(self, consumer: str, slot: str, lease_ms: int, count: int) -> list[Delivery]:
        """See WorkerEnd.take_over."""
        return self._taken_over(slot, lambda: self._stamped_take_over(consumer, slot, lease_ms, count))

    def _taken_over(self, slot: str, call: Callable[[], scripts.Call]) -> list[Delivery]:
        with self._translated():
            # Not repeated: a delayed call must not look like a new one.
            command = call()
            answer = _tolerating_repairable(lambda: self._once(command))
            if foreign_keys.is_foreign(answer):
                self._quarantine(command, answer)
        if isinstance(answer, ResponseError):
            self.prepare([slot])
            return []
        return scripts.taken_over(slot, answer)

    def _stamped_take_over(self, consumer: str, slot: str, lease_ms: int, count: int) -> scripts.Call:
        return scripts.take_over(consumer, slot, lease_ms, count, self.now_ms())

    def release(self, consumer: str, held: Sequence[Held], *, version: str = "") -> None:
        """See WorkerEnd.release."""
        for slot, jobs in _by_slot(held):
            self._run(scripts.release(consumer, slot, jobs, version))

    def adopt(self, consumer: str, slot: str, versions: Sequence[str], count: int) -> list[Delivery]:
        """See WorkerEnd.adopt."""
        return self._taken_over(slot, lambda: scripts.adopt(consumer, slot, versions, count))

    def suspect(self, slot: str, jobs: Sequence[Held], incident: str, ttl_ms: int) -> None:
        """See WorkerEnd.suspect."""
        for start in range(0, len(jobs), _JOBS_PER_CALL):
            self._run(scripts.suspect(slot, jobs[start : start + _JOBS_PER_CALL], incident, ttl_ms))

    def job_events(self, job_id: str) -> list[StreamEntry]:
        """See WorkerEnd.job_events."""
        return scripts.parse_job_events(job_id, self._run(scripts.job_events(job_id)))

    def emit(self, consumer: str, emissions: Sequence[Emission], ttl_ms: int, *, max_bytes: int) -> list[Position]:
        """See WorkerEnd.emit."""
        if len(emissions) == 1:
            # A lone token must not wait for the sorting of one job.
            return scripts.positions(self._run(scripts.emit(consumer, emissions, ttl_ms, max_bytes)))
        found: dict[str, Position] = {}
        by_slot: defaultdict[str, list[Emission]] = defaultdict(list)
        for emission in emissions:
            by_slot[emission.held.slot].append(emission)
        for of_slot in by_slot.values():
            for start in range(0, len(of_slot), _JOBS_PER_CALL):
                part = of_slot[start : start + _JOBS_PER_CALL]
                positions = scripts.positions(self._run(scripts.emit(consumer, part, ttl_ms, max_bytes)))
                found.update(zip((each.held.job_id for each in part), positions, strict=True))
        return [found[emission.held.job_id] for emission in emissions]

    def dead_letter(
        self, consumer: str, delivery: Delivery, reason: str, *, job_id: str = "", sealed: bytes = b""
    ) -> bool:
        """See WorkerEnd.dead_letter."""
        ttl_ms, most_bytes = self._result_ttl_ms, self._dead_letters_bytes
        return bool(self._run(scripts.dead_letter(consumer, delivery, reason, job_id, sealed, ttl_ms, most_bytes)))

    def announce(self, slot: str, spec: bytes, versions: Mapping[str, bytes], *, replaces: bool) -> None:
        """See WorkerEnd.announce."""
        self._run(scripts.announce(slot, spec, versions, replaces=replaces))
        self._run(["SADD", MODELS_KEY, slot])

    def report(self, worker: str, report: bytes, ttl_ms: int) -> bool:
        """See WorkerEnd.report."""
        # GET also refuses a key of another type.
        if report:
            known = self._run(["SET", worker_key(worker), report, "PX", ttl_ms, "GET"])
            self._run(["ZADD", WORKERS_KEY, self.now_ms(), worker])
        else:
            known = self._run(["GET", worker_key(worker)])
            self._run(["DEL", worker_key(worker)])
            self._run(["ZREM", WORKERS_KEY, worker])
        # The new report: the answer to a first SET was lost, and the command was repeated.
        has_last = known is not None and known in (self._last_report, report)
        self._last_report = report
        return has_last

    def report_keys(self, slot: str, report: bytes, ttl_ms: int, *, is_live: bool = True) -> None:
        """See WorkerEnd.report_keys."""
        self._run(scripts.report_keys(slot, report, ttl_ms, is_live=is_live))

    def observe(self, slot: str, experiment: str, field: str, figures: bytes, ttl_ms: int) -> None:
        """See WorkerEnd.observe."""
        key = experiment_key(slot, experiment)
        self._run(["HSET", key, field, figures])
        self._run(["PEXPIRE", key, ttl_ms])

    def quarantine(self, slots: Sequence[str]) -> None:
        """See WorkerEnd.quarantine."""
        for call in foreign_keys.sweep(slots):
            self._quarantined += log_quarantined(self._run(call))

    def take_quarantined(self) -> list[Quarantined]:
        """See WorkerEnd.take_quarantined."""
        return [self._quarantined.popleft() for _ in range(len(self._quarantined))]

    def close(self) -> None:
        """See Broker.close."""
        self.drop_armed()
        if self._exchanging is not None:
            self._exchanging.close()
        super().close()

    def forget_connections(self) -> None:
        """After a fork: drop the parent's connections without closing its sockets."""
        self._armed = self._exchanging = None
        super().forget_connections()

    def _repeat_refused(self, calls: Sequence[scripts.Call], answers: list[Any], slots: Sequence[str]) -> None:
        """Repeats the calls that met a foreign key or a missing group, once these are mended. Fills in `answers`."""
        for _ in range(REPAIRS):
            refused = [index for index, answer in enumerate(answers) if isinstance(answer, ResponseError)]
            with self._translated():
                for index in refused:
                    if foreign_keys.is_foreign(answers[index]):
                        self._quarantine(calls[index], answers[index])
            # If the broker was emptied, the jobs of these commits are no longer ours.
            self.prepare(slots)
            for index, answer in zip(refused, self._run_all([calls[index] for index in refused]), strict=True):
                answers[index] = answer
            if not any(isinstance(answer, ResponseError) for answer in answers):
                return
        with self._translated():
            raise next(answer for answer in answers if isinstance(answer, ResponseError))

    def _run_all(self, calls: Sequence[scripts.Call], meanwhile: Callable[[], None] | None = None) -> list[Any]:
        """Several calls in one round trip, not repeated: the worker repeats the whole step.

        The error of a missing consumer group or of a foreign key stands in its call's place; other errors are raised.
        """
        try:
            with self._translated():
                if self._exchanging is None:
                    self._exchanging = DirectConnection(self._redis)
                answers = self._exchanging.ask(calls, meanwhile)
                if any(isinstance(answer, NoScriptError) for answer in answers):
                    self._load()
                    missing = [index for index, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
                    for index, answer in zip(
                        missing, self._exchanging.ask([calls[index] for index in missing]), strict=True
                    ):
                        answers[index] = answer
                for answer in answers:
                    if isinstance(answer, ResponseError) and not _is_repairable(answer):
                        raise answer
                return answers
        except BrokerUnavailable:
            if self._exchanging is not None:
                self._exchanging.close()
                self._exchanging = None
            raise


class _ArmedClaim(DirectConnection):
    """A connection on which at most one blocking XREADGROUP is outstanding."""

    def __init__(self, client: redis.Redis) -> None:
        super().__init__(client)
        self.slots: Sequence[str] = ()
        self.is_outstanding = False
        (answer,) = self.ask([["CLIENT", "ID"]])
        if isinstance(answer, ResponseError):
            self.close()
            raise answer
        self.client_id: int = answer

    @property
    def fileno(self) -> int:
        return self._connection._sock.fileno() if self._connection._sock else -1

    def send(self, consumer: str, slots: Sequence[str], count: int, block_ms: int, bands: Mapping[str, int]) -> None:
        self.slots = tuple(slots)
        self.is_outstanding = True
        # Redis runs the second command when the blocking one has ended: it reads the versions at that moment.
        commands = (scripts.armed(consumer, slots, count, block_ms, bands), scripts.actives(slots))
        self._connection.send_packed_command(list(packed_together(commands)), check_health=False)

    def receive(self) -> list[Delivery]:
        self.is_outstanding = False
        entries, actives = self._answer(), self._answer()
        for answer in (entries, actives):
            if isinstance(answer, ResponseError):
                raise answer
        return scripts.armed_deliveries(self.slots, entries, actives)


def _chunks(indices: list[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """The commits of one slot, cut so that no call holds the server for long; a commit is never cut."""
    start = nbytes = 0
    for at, index in enumerate(indices):
        nbytes += sizes[index]
        if at > start and (nbytes > CALL_BYTES or at - start == _JOBS_PER_CALL):
            yield indices[start:at]
            start, nbytes = at, sizes[index]
    yield indices[start:]


def _by_slot(held: Sequence[Held]) -> Iterable[tuple[str, list[Held]]]:
    found: defaultdict[str, list[Held]] = defaultdict(list)
    for job in held:
        found[job.slot].append(job)
    for slot, jobs in found.items():
        for start in range(0, len(jobs), _JOBS_PER_CALL):
            yield slot, jobs[start : start + _JOBS_PER_CALL]


def _is_repairable(error: ResponseError) -> bool:
    """Whether the consumer group is missing, or a key is foreign."""
    return is_no_group(error) or foreign_keys.is_foreign(error)


def _tolerating_repairable(step: Callable[[], Any]) -> Any:
    """The answer of the step, or its error, if that is repairable."""
    try:
        return step()
    except ResponseError as error:
        if not _is_repairable(error):
            raise
        return error
