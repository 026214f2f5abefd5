"""Redis Streams as the broker: both ends over redis-py, one Lua script per step that must not be torn.

Commands time out; what goes wrong with the connection becomes BrokerUnavailable. Every call here may be repeated
when its answer was lost: publishing goes by job id, commits are fenced, the rest reads or extends.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import redis
from hiredis import pack_command
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, NoScriptError, OutOfMemoryError, ReadOnlyError, ResponseError
from redis.retry import Retry

from penstock.registry.broker import redis_scripts as scripts
from penstock.registry.broker.base import (
    CancelOutcome,
    Claim,
    Commit,
    CommitStatus,
    DeadLetter,
    Delivery,
    Depth,
    Event,
    Held,
    JobRecord,
    Limits,
    Publication,
    Receipt,
    Renewal,
    Replay,
    StreamEntry,
    Waiting,
    Withdrawal,
)
from penstock.registry.errors import BrokerUnavailable, ConfigurationError
from penstock.registry.queues import (
    GROUP,
    MODELS_KEY,
    WORKERS_KEY,
    Priority,
    flow_key,
    paused_key,
    record_key,
    specs_key,
    stream_keys,
    worker_key,
)

__all__ = ["RedisStreams"]

RETRY_PAUSE_S = 0.05
LOST_CONNECTION = (redis.ConnectionError, redis.TimeoutError, OSError)
_PASSING = frozenset(
    {
        "MISCONF",
        "NOREPLICAS",
        "MASTERDOWN",
        "CLUSTERDOWN",
        "TRYAGAIN",
        "LOADING",
        "BUSY",
        "NOPERM",
        "NOAUTH",
        "READONLY",
    }
)
"""First words of errors that say more about the server's present state than about our command."""
_BY_CLASS = {OutOfMemoryError: "OOM", ReadOnlyError: "READONLY", NoPermissionError: "NOPERM"}
_IN_SCRIPT = re.compile(r"@user_script: ?\d+: -([A-Z]+) ")
_SLOT_BY_SLOT = 256
"""Jobs per call of the scripts that work through a list, so that no call holds the server for long."""


def connection_options(timeout_s: float) -> dict[str, Any]:
    """What both clients of Redis are made with: we retry, not the library, so that `timeout_s` is a promise."""
    return {
        "protocol": 2,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "decode_responses": False,
        # One per thread that asks; the library's own limit of a hundred would look like a broker that is away.
        "max_connections": 2**31,
    }


class RedisStreams:
    """A broker on one Redis. Thread-safe, except for exchange, arm, fileno, collect and disarm: one thread's own.

    Attributes:
        clock_offset_ms: the broker's clock minus this machine's monotonic one, as of the last claim or look at the
            queues; who sets the wall clock changes nothing here.
    """

    def __init__(
        self,
        client: redis.Redis,
        *,
        timeout_s: float = 5.0,
        result_ttl_ms: int = 3_600_000,
        dead_letters_bytes: int = scripts.DEAD_LETTERS_BYTES,
    ) -> None:
        self.timeout_s = timeout_s
        # Until the broker has said what time it is, the wall clock is the best guess.
        self.clock_offset_ms = (time.time() - time.monotonic()) * 1000
        self._redis = client
        self._pool = client.connection_pool
        self._result_ttl_ms = result_ttl_ms
        self._dead_letters_bytes = dead_letters_bytes
        self._armed: _ArmedClaim | None = None
        self._paused: frozenset[str] = frozenset()
        self._line: _Line | None = None

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        timeout_s: float = 5.0,
        result_ttl_ms: int = 3_600_000,
        dead_letters_bytes: int = scripts.DEAD_LETTERS_BYTES,
    ) -> RedisStreams:
        """From redis://, rediss:// or unix://. Raises ConfigurationError for another scheme; connects later."""
        try:
            client = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **connection_options(timeout_s))
        except ValueError:
            raise ConfigurationError(
                "The broker's URL is not usable. Expected redis://host:port/db, rediss://... or unix:///path?db=0"
            ) from None
        return cls(client, timeout_s=timeout_s, result_ttl_ms=result_ttl_ms, dead_letters_bytes=dead_letters_bytes)

    # Producers' end

    def publish(self, slot: str, jobs: Sequence[Publication], limits: Limits) -> list[Receipt]:
        """See ProducerEnd.publish."""
        return scripts.receipts(slot, jobs, self._run(scripts.publish(slot, jobs, limits)))

    def job_records(self, job_ids: Sequence[str]) -> list[JobRecord | None]:
        """See ProducerEnd.standings."""
        if not job_ids:
            return []
        records = self._run(["MGET", *map(record_key, job_ids)])
        return [None if record is None else scripts.parse_record(record) for record in records]

    def job_record(self, job_id: str, *, subscribe: bool = False) -> JobRecord | None:
        """See ProducerEnd.standing."""
        return scripts.stood(self._run(scripts.job_record(job_id, subscribe=subscribe)))

    def cancel(self, job_id: str, tenant: str, sealed: bytes) -> CancelOutcome:
        """See ProducerEnd.cancel."""
        return scripts.cancelled(self._run(scripts.cancel(job_id, tenant, sealed, self._result_ttl_ms)))

    def read(self, cursors: Mapping[str, str], block_ms: int, count: int = 256) -> list[StreamEntry]:
        """See ProducerEnd.read."""
        return scripts.entries(self._run(scripts.read(cursors, block_ms, count, self.timeout_s)))

    def trim(self, key: str, before: str) -> None:
        """See ProducerEnd.trim."""
        self._run(scripts.trim(key, before))

    def nudge(self, key: str) -> None:
        """See ProducerEnd.nudge."""
        for command in scripts.nudge(key):
            self._run(command)

    def spec(self, slot: str, version: str = "") -> bytes | None:
        """See ProducerEnd.spec."""
        found: bytes | None = self._run(scripts.spec(slot, version))
        return found

    # Workers' end

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
        self, consumer: str, commits: Sequence[Commit], claims: Sequence[Claim], result_ttl_ms: int
    ) -> tuple[list[CommitStatus], list[Delivery]]:
        """See WorkerEnd.exchange."""
        by_slot: defaultdict[str, list[int]] = defaultdict(list)
        for index, commit in enumerate(commits):
            by_slot[commit.slot].append(index)
        chunks = [
            (slot, indices[start : start + _SLOT_BY_SLOT])
            for slot, indices in by_slot.items()
            for start in range(0, len(indices), _SLOT_BY_SLOT)
        ]
        calls = [
            scripts.commit(consumer, slot, [commits[index] for index in indices], result_ttl_ms)
            for slot, indices in chunks
        ]
        calls += [scripts.claim(consumer, wish) for wish in claims]
        begun = time.monotonic()
        answers = self._run_all(calls)
        if refused := [index for index, answer in enumerate(answers) if isinstance(answer, ResponseError)]:
            # Somebody emptied the broker: what was to be committed is no longer ours.
            self.prepare([*by_slot, *(wish.slot for wish in claims)])
            for index, answer in zip(refused, self._run_all([calls[index] for index in refused]), strict=True):
                answers[index] = answer
        statuses: list[CommitStatus] = [CommitStatus.FENCED] * len(commits)
        for (_, indices), answer in zip(chunks, answers, strict=False):
            for index, verdict in zip(indices, scripts.statuses(answer), strict=True):
                statuses[index] = verdict
        deliveries: list[Delivery] = []
        for wish, answer in zip(claims, answers[len(chunks) :], strict=True):
            now_ms, is_paused, found = scripts.claimed(wish.slot, answer)
            if is_paused != (wish.slot in self._paused):
                self._paused ^= {wish.slot}
            self._note_clock(now_ms, begun)
            deliveries += found
        return statuses, deliveries

    def arm(self, consumer: str, slots: Sequence[str], count: int, block_ms: int) -> None:
        """See WorkerEnd.arm."""
        # A blocking read knows nothing of pauses: it must not name the queues of a paused slot.
        active = [slot for slot in slots if slot not in self._paused]
        with self._armed_line() as armed:
            if active:
                armed.send(consumer, active, count, block_ms)

    def fileno(self) -> int:
        """See WorkerEnd.fileno. -1 before the first arm and after a lost connection."""
        return -1 if self._armed is None else self._armed.fileno

    def collect(self) -> list[Delivery]:
        """See WorkerEnd.collect."""
        with self._armed_line() as armed:
            try:
                return armed.receive() if armed.is_outstanding else []
            except ResponseError as error:
                if not _is_no_group(error):
                    raise
        self.prepare(armed.slots)
        return []

    def disarm(self) -> list[Delivery]:
        """See WorkerEnd.disarm."""
        if self._armed is None or not self._armed.is_outstanding:
            return []
        # A claim that was served a moment ago has nothing left to unblock, and its answer is on the way.
        self._run(["CLIENT", "UNBLOCK", self._armed.client_id])
        return self.collect()

    def drop_armed(self) -> None:
        """Forget the armed connection after an error on it; the next arm makes another."""
        if self._armed is not None:
            self._armed.close()
            self._armed = None

    def paused(self, slots: Sequence[str]) -> frozenset[str]:
        """See WorkerEnd.paused."""
        self._paused = frozenset(slot for slot in slots if self._run(["EXISTS", paused_key(slot)]))
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
        with _translated():
            # No repeat: a call that was held up must not be taken for a fresh one.
            answer = _tolerating_no_group(lambda: self._once(call()))
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
        for start in range(0, len(jobs), _SLOT_BY_SLOT):
            self._run(scripts.suspect(slot, jobs[start : start + _SLOT_BY_SLOT], incident, ttl_ms))

    def emit(self, consumer: str, held: Held, events: Sequence[Event], ttl_ms: int, *, after: int) -> int:
        """See WorkerEnd.emit."""
        return int(self._run(scripts.emit(consumer, held, events, ttl_ms, after)))

    def bury(self, consumer: str, delivery: Delivery, reason: str, *, job_id: str = "", sealed: bytes = b"") -> bool:
        """See WorkerEnd.bury."""
        call = scripts.bury(consumer, delivery, reason, job_id, sealed, self._result_ttl_ms, self._dead_letters_bytes)
        return bool(self._run(call))

    def put_spec(self, slot: str, spec: bytes, version: str = "") -> None:
        """See WorkerEnd.put_spec."""
        self._run(["HSET", specs_key(slot), version, spec] if version else scripts.announce(slot, spec))
        self._run(["SADD", MODELS_KEY, slot])

    def actives(self, slots: Sequence[str]) -> dict[str, bytes]:
        """See WorkerEnd.actives."""
        found = self._run(scripts.actives(slots))
        return {slot: record or b"" for slot, record in zip(slots, found, strict=True)}

    def report(self, worker: str, report: bytes, ttl_ms: int) -> None:
        """See WorkerEnd.report."""
        if report:
            self._run(["SET", worker_key(worker), report, "PX", ttl_ms])
            self._run(["ZADD", WORKERS_KEY, self.now_ms(), worker])
        else:
            self._run(["DEL", worker_key(worker)])
            self._run(["ZREM", WORKERS_KEY, worker])

    def now_ms(self) -> float:
        """See WorkerEnd.now_ms; without asking."""
        return time.monotonic() * 1000 + self.clock_offset_ms

    def _note_clock(self, broker_ms: float, begun: float) -> None:
        """Takes in what the broker's clock said at some moment between `begun` and now, and not more than that.

        A process that was stopped before it read the answer would take the broker for behind by as long.
        """
        earliest, latest = broker_ms - time.monotonic() * 1000, broker_ms - begun * 1000
        self.clock_offset_ms = min(max(self.clock_offset_ms, earliest), latest)

    # Operators

    def models(self) -> list[str]:
        """See Broker.models."""
        return sorted(name.decode() for name in self._run(["SMEMBERS", MODELS_KEY]))

    def depths(self, slot: str) -> list[Depth]:
        """See Broker.depths."""
        begun = time.monotonic()
        answer = self._run(scripts.depths(slot))
        self._note_clock(answer[0], begun)
        return scripts.measured(slot, answer)

    def drained(self, slot: str) -> int:
        """See Broker.drained."""
        return int(self._run(["HGET", flow_key(slot), "done"]) or 0)

    def workers(self) -> list[bytes]:
        """See Broker.workers."""
        names = [name.decode() for name in self._run(["ZRANGE", WORKERS_KEY, 0, -1])]
        if not names:
            return []
        reports = self._run(["MGET", *map(worker_key, names)])
        gone = [name for name, report in zip(names, reports, strict=True) if report is None]
        if gone:
            self._run(["ZREM", WORKERS_KEY, *gone])
        return [report for report in reports if report is not None]

    def activate(self, slot: str, epoch: int, record: bytes, version: str, spec: bytes) -> bool:
        """See Broker.activate."""
        is_active = bool(self._run(scripts.activate(slot, epoch, record, version, spec)))
        self._run(["SADD", MODELS_KEY, slot])
        return is_active

    def pause(self, slot: str) -> None:
        """See Broker.pause."""
        self._run(["SET", paused_key(slot), int(self.now_ms())])

    def resume(self, slot: str) -> None:
        """See Broker.resume."""
        self._run(["DEL", paused_key(slot)])

    def waiting(self, slot: str, priority: Priority, after: bytes, count: int, head_bytes: int) -> list[Waiting]:
        """See Broker.waiting."""
        return scripts.waited(self._run(scripts.waiting(slot, priority, after, count, head_bytes)))

    def withdraw(self, slot: str, priority: Priority, jobs: Sequence[Withdrawal], result_ttl_ms: int) -> int:
        """See Broker.withdraw."""
        return scripts.withdrawn(self._run(scripts.withdraw(slot, priority, jobs, result_ttl_ms))) if jobs else 0

    def replay(
        self, slot: str, entry: str, job: Publication, job_ttl_ms: int, *, keeps_acceptance: bool = False
    ) -> Replay:
        """See Broker.replay."""
        return scripts.replayed(self._run(scripts.replay(slot, entry, job, job_ttl_ms, keeps_acceptance)))

    def purge_dead(self, slot: str, entries: Sequence[str]) -> int:
        """See Broker.purge_dead."""
        parts = [entries[start : start + _SLOT_BY_SLOT] for start in range(0, len(entries), _SLOT_BY_SLOT)]
        return sum(self._run(scripts.purge_dead(slot, part)) for part in parts)

    def dead_letters(self, slot: str, after: str = "", count: int = 100) -> list[DeadLetter]:
        """See Broker.dead_letters."""
        return scripts.letters(slot, self._run(scripts.dead_letters(slot, after, count)))

    def dead_letter(self, slot: str, entry: str) -> DeadLetter | None:
        """See Broker.dead_letter."""
        return scripts.letter(slot, self._run(scripts.dead_letter(slot, entry)))

    def close(self) -> None:
        """See Broker.close."""
        self.drop_armed()
        if self._line is not None:
            self._line.close()
        self._redis.close()

    def forget_connections(self) -> None:
        """After a fork: drop what the parent opened without saying goodbye on its sockets."""
        self._armed = self._line = None
        self._redis.connection_pool.reset()

    # Connections

    @contextlib.contextmanager
    def _armed_line(self) -> Iterator[_ArmedClaim]:
        with _translated():
            if self._armed is None:
                self._armed = _ArmedClaim(self._redis)
        try:
            with _translated():
                yield self._armed
        except BrokerUnavailable:
            self.drop_armed()
            raise

    def _run(self, command: scripts.Call) -> Any:
        """One command, repeated on a new connection while the time-out lasts."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                return self._once(command)
            except ResponseError as error:
                raise refusal(error) or error from error
            except LOST_CONNECTION as error:
                if deadline - time.monotonic() <= RETRY_PAUSE_S:
                    raise unanswered(error, self.timeout_s) from error
                time.sleep(RETRY_PAUSE_S)

    def _once(self, command: scripts.Call) -> Any:
        try:
            return self._ask(command)
        except NoScriptError:
            self._load()
            return self._ask(command)

    def _ask(self, command: scripts.Call) -> Any:
        """One command on a pooled connection, without the layers that redis-py puts around each."""
        connection: Any = self._pool.get_connection()
        try:
            connection.send_packed_command([pack_command(tuple(command))], check_health=False)
            return connection.read_response()
        except ResponseError:
            raise
        except BaseException:
            # Interrupted, too: the answer is still to come, and must not be taken for that of the next command.
            connection.disconnect()
            raise
        finally:
            self._pool.release(connection)

    def _run_all(self, calls: Sequence[scripts.Call]) -> list[Any]:
        """Several calls in one round trip on the worker's own line; it repeats the step itself, so no retry here.

        The error of a missing consumer group stands in its call's place; others are raised.
        """
        try:
            with _translated():
                if self._line is None:
                    self._line = _Line(self._redis)
                answers = self._line.ask(calls)
                if any(isinstance(answer, NoScriptError) for answer in answers):
                    self._load()
                    missing = [index for index, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
                    for index, answer in zip(missing, self._line.ask([calls[index] for index in missing]), strict=True):
                        answers[index] = answer
                for answer in answers:
                    if isinstance(answer, ResponseError) and not _is_no_group(answer):
                        raise answer
                return answers
        except BrokerUnavailable:
            if self._line is not None:
                self._line.close()
                self._line = None
            raise

    def _load(self) -> None:
        for source in scripts.SOURCES.values():
            self._ask(["SCRIPT", "LOAD", source])


class _Line:
    """A connection that one thread has to itself: no pool, and no answer is looked at twice."""

    def __init__(self, client: redis.Redis) -> None:
        # Not from the pool, which counts what it makes for ever: after a hundred lost lines it would give no more.
        pool: Any = client.connection_pool
        connection: Any = pool.connection_class(**pool.connection_kwargs)
        connection.connect()
        self._connection = connection

    def ask(self, calls: Sequence[scripts.Call]) -> list[Any]:
        """The answers to several commands sent at once; an error of Redis stands in its command's place."""
        connection = self._connection
        connection.send_packed_command([pack_command(tuple(call)) for call in calls], check_health=False)
        return [self._answer() for _ in calls]

    def _answer(self) -> Any:
        try:
            return self._connection.read_response()
        except ResponseError as error:
            return error

    def close(self) -> None:
        with contextlib.suppress(redis.RedisError, OSError):
            self._connection.disconnect()


class _ArmedClaim(_Line):
    """The line on which one blocking XREADGROUP is outstanding."""

    def __init__(self, client: redis.Redis) -> None:
        super().__init__(client)
        self.slots: Sequence[str] = ()
        self.is_outstanding = False
        self.client_id: int = self.ask([["CLIENT", "ID"]])[0]

    @property
    def fileno(self) -> int:
        return self._connection._sock.fileno() if self._connection._sock else -1

    def send(self, consumer: str, slots: Sequence[str], count: int, block_ms: int) -> None:
        self.slots = tuple(slots)
        self.is_outstanding = True
        # Redis runs what follows a blocking command when that has ended: the versions are those of the claim.
        commands = (scripts.armed(consumer, slots, count, block_ms), scripts.actives(slots))
        self._connection.send_packed_command([pack_command(tuple(each)) for each in commands], check_health=False)

    def receive(self) -> list[Delivery]:
        self.is_outstanding = False
        entries, actives = self._answer(), self._answer()
        for answer in (entries, actives):
            if isinstance(answer, ResponseError):
                raise answer
        return scripts.armed_deliveries(self.slots, entries, actives)


def _by_slot(held: Sequence[Held]) -> Iterable[tuple[str, list[Held]]]:
    found: defaultdict[str, list[Held]] = defaultdict(list)
    for job in held:
        found[job.slot].append(job)
    for slot, jobs in found.items():
        for start in range(0, len(jobs), _SLOT_BY_SLOT):
            yield slot, jobs[start : start + _SLOT_BY_SLOT]


def _is_no_group(error: object) -> bool:
    # Redis 7 tells a blocked reader of a deleted stream in its own words.
    return isinstance(error, ResponseError) and ("NOGROUP" in str(error) or str(error).startswith("UNBLOCKED"))


def _tolerating_no_group(step: Callable[[], Any]) -> Any:
    """The step's answer, or its error when that says that the consumer group is missing."""
    try:
        return step()
    except ResponseError as error:
        if not _is_no_group(error):
            raise
        return error


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """A lost connection, or a server that refuses to work at present, becomes BrokerUnavailable."""
    try:
        yield
    except ResponseError as error:
        raise refusal(error) or error from error
    except LOST_CONNECTION as error:
        raise BrokerUnavailable(f"The broker does not answer: {_why(error)}") from error


def refusal(error: ResponseError) -> BrokerUnavailable | None:
    """BrokerUnavailable, when the server says that it cannot work at present; None for an error of the command."""
    word = _first_word(error)
    if word == "OOM":
        return BrokerUnavailable("The broker refuses to write: it is out of memory")
    if word in _PASSING:
        return BrokerUnavailable(f"The broker refuses to work: {word}")
    return None


def _first_word(error: ResponseError) -> str:
    """OOM, READONLY and the like. redis-py takes it off some errors and makes a class of it; Redis 6.2 puts the
    script's name and line before what a command in it was told."""
    for kind, word in _BY_CLASS.items():
        if isinstance(error, kind):
            return word
    if "The user executing the script can't" in str(error):
        return "NOPERM"
    told = _IN_SCRIPT.search(str(error))
    return told[1] if told else str(error).partition(" ")[0]


def unanswered(error: BaseException, timeout_s: float) -> BrokerUnavailable:
    """What to tell a user about a lost connection: no addresses, no credentials."""
    return BrokerUnavailable(f"The broker did not answer within {timeout_s:g} s: {_why(error)}")


def _why(error: BaseException) -> str:
    return "timed out" if isinstance(error, TimeoutError | redis.TimeoutError) else "no connection"
