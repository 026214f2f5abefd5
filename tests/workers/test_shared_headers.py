"""A claim that is opened as a whole gives what its jobs give one by one: the same jobs and the same dead letters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.registry.broker.base import Delivery
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.envelope import JobHeader, Keyring, RequestContext, open_result
from penstock.registry.queues import Priority
from penstock.workers.intake import Intake
from penstock.workers.job import ClaimedJob
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.shared_headers import SharedHeaders
from tests.workers.claims_of_jobs import KEYRINGS, KINDS, MISHAPS, UNSIGNED, Sealer, delivery_of
from tests.workers.doubles import counted
from tests.workers.test_intake import Steps

TTL_MS = 60_000


class Letters(MemoryBroker):
    """Keeps what is said of each dead letter."""

    def __init__(self, keyring: Keyring) -> None:
        super().__init__(lambda: 5.0)
        self._keyring = keyring
        self.letters: list[tuple[Delivery, str, str, RequestContext | None]] = []

    def dead_letter(
        self, consumer: str, delivery: Delivery, reason: str, *, job_id: str = "", sealed: bytes = b""
    ) -> bool:
        context = open_result(sealed, self._keyring)[0].context if sealed else None
        self.letters.append((delivery, reason, job_id, context))
        return True


class Reader(Intake):
    """An intake that counts the jobs that it opened one by one."""

    def __init__(self, keyring: Keyring) -> None:
        self.broker, self.steps, self.counts = Letters(keyring), Steps(), InferenceMetrics((1.0,))
        self.opened_alone = 0
        super().__init__(
            self.broker,
            "worker-1:boot",
            keyring,
            worker="worker-1",
            job_ttl_ms=TTL_MS,
            max_crashes=3,
            version_of=lambda _model: "7",
            listener=self.steps,
            metrics=self.counts,
        )

    def open(self, delivery: Delivery, now: float, broker_now: float) -> ClaimedJob | None:
        self.opened_alone += 1
        return super().open(delivery, now, broker_now)

    def facts(self) -> dict[str, Any]:
        """What became of the deliveries that are no jobs."""
        while self.has_deferred:
            self.dead_letter_next()
        return {
            "letters": sorted(self.broker.letters, key=lambda letter: letter[0].entry_id),
            "steps": self.steps.steps,
            "quarantined": counted(self.counts, "penstock_quarantined"),
            "dead": counted(self.counts, "penstock_dead_lettered"),
        }


def facts_of(job: ClaimedJob) -> dict[str, Any]:
    """All that a worker may see of an opened job."""
    inputs = job.inputs
    return {
        "delivery": id(job.delivery),
        "header": job.header,
        "types": [type(getattr(job.header, name)) for name in JobHeader.__struct_fields__],
        "body": bytes(job.body),
        "inputs": [
            # A NaN differs from itself.
            (name, str(values.dtype), values.shape, [*map(repr, values.ravel().tolist())], values.flags.writeable)
            for name, values in inputs.items()
        ],
        "times": (job.rows, job.claimed, job.queue_ms, job.expires_ms),
        "state": (job.digest, job.tries, job.takes_room, job.is_cancelled, job.is_lost, job.is_suspect),
        "ways": (job.route, job.held),
    }


def assert_equal_to_one_by_one(deliveries: Sequence[Delivery], keyring: Keyring, now: float, broker_now: float) -> int:
    """Open a claim as a whole, and each of its jobs by an intake of its own; returns how many needed no decoding."""
    reader = Reader(keyring)
    opened = reader.open_all(deliveries, now, broker_now)
    alone = [Reader(keyring) for _ in deliveries]
    expected = [
        job
        for each, delivery in zip(alone, deliveries, strict=True)
        if (job := each.open(delivery, now, broker_now)) is not None
    ]
    assert [facts_of(job) for job in opened] == [facts_of(job) for job in expected]
    facts = [each.facts() for each in alone]
    assert reader.facts() == {
        "letters": sorted((letter for each in facts for letter in each["letters"]), key=lambda each: each[0].entry_id),
        "steps": [step for each in facts for step in each["steps"]],
        "quarantined": sum(each["quarantined"] for each in facts),
        "dead": sum(each["dead"] for each in facts),
    }
    return len(deliveries) - reader.opened_alone


CHANGES: list[dict[str, Any]] = [
    *({} for _ in range(4)),
    {"slot": "triple"},
    {"priority": Priority.HIGH},
    {"crashes": 1},
    {"crashes": 3},
    {"crashes": 3, "exceeded_s": 2.0},
    {"exceeded_s": 2.0},
    {"accepted_first_ms": 3000},
    {"attempt": 2},
    {"active": b"1 record"},
]
"""Of a delivery, beside its bytes."""
DELIVERED = st.tuples(
    st.sampled_from(sorted(KINDS)),
    st.one_of(st.just("none"), st.sampled_from(sorted(MISHAPS))),
    st.integers(0, 1000),
    st.sampled_from(range(len(CHANGES))),
)


def _often(names: Collection[str]) -> Iterator[Any]:
    """All keyrings: those of these names in `make test`, the others in `make test-all`."""
    for name, keyring in KEYRINGS.items():
        yield pytest.param(keyring, id=name, marks=[] if name in names else pytest.mark.slow)


@pytest.mark.parametrize("keyring", KEYRINGS.values(), ids=KEYRINGS)
@settings(max_examples=80, derandomize=True)
@given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3),
    delivered=st.lists(DELIVERED, min_size=2, max_size=10),
    broker_now=st.floats(3000.0, 70_000.0),
)
def test_a_claim_of_good_and_bad_jobs_is_opened_as_one_by_one(
    kinds: list[str], delivered: list[tuple[str, str, int, int]], broker_now: float, keyring: Keyring
):
    """Good jobs of some kinds, so that their headers are known, and then others of the same and of other kinds."""
    sealer = Sealer(keyring)
    deliveries = [delivery_of(sealer.job(KINDS[kind]), KINDS[kind], number) for number, kind in enumerate(kinds)]
    for kind, mishap, at, change in delivered:
        kind = kinds[at % len(kinds)] if at % 3 else kind
        sealed = MISHAPS[mishap](sealer, KINDS[kind], at)
        deliveries.append(delivery_of(sealed, KINDS[kind], len(deliveries), **CHANGES[change]))
    assert_equal_to_one_by_one(deliveries, keyring, 77.0, broker_now)


@pytest.mark.parametrize("keyring", [*_often({"unsigned", "signed and sealed"})])
@pytest.mark.parametrize("mishap", sorted(MISHAPS))
@settings(max_examples=8, derandomize=True)
@given(kind=st.sampled_from(sorted(KINDS)), at=st.integers(0, 1000))
@example(kind="plain", at=0)
@example(kind="texts", at=0)
@example(kind="texts", at=5)
def test_each_mishap_among_known_headers_is_told_as_one_by_one(mishap: str, kind: str, at: int, keyring: Keyring):
    """Good jobs before and behind it are opened; so is a second bad one, if the first of its like is a job."""
    sealer, its, bad = Sealer(keyring), KINDS[kind], MISHAPS[mishap]
    sealed = [*(sealer.job(its) for _ in range(2)), *(bad(sealer, its, at) for _ in range(3)), sealer.job(its)]
    deliveries = [delivery_of(each, its, number) for number, each in enumerate(sealed)]
    assert_equal_to_one_by_one(deliveries, keyring, 77.0, 6500.0)


@pytest.mark.parametrize("keyring", KEYRINGS.values(), ids=KEYRINGS)
@pytest.mark.parametrize("name", ["plain", "texts"])
def test_a_job_that_is_cut_anywhere_is_told_as_one_by_one(name: str, keyring: Keyring):
    """At each place of its bytes, behind a job with the same header."""
    sealer, kind = Sealer(keyring), KINDS[name]
    known, whole = sealer.job(kind), sealer.job(kind)
    cuts = [known, *(whole[:size] for size in range(len(whole) + 1))]
    # Fewer at a time than the dead letters that an intake defers.
    for start in range(1, len(cuts), 10):
        deliveries = [delivery_of(each, kind, number) for number, each in enumerate([known, *cuts[start : start + 10]])]
        assert_equal_to_one_by_one(deliveries, keyring, 77.0, 6500.0)


SHARED = set(KINDS) - {"an idempotency key", "a trace", "short ids"}
"""The kinds whose headers repeat."""


@pytest.mark.parametrize("keyring", KEYRINGS.values(), ids=KEYRINGS)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_of_alike_headers_one_is_decoded(kind: str, keyring: Keyring):
    """Of twenty jobs, also when those of another kind come in between and in a later claim."""
    sealer, others = Sealer(keyring), Sealer(keyring)
    deliveries = []
    for number in range(20):
        deliveries.append(delivery_of(sealer.job(KINDS[kind]), KINDS[kind], number))
        deliveries.append(delivery_of(others.job(KINDS["a trace"]), KINDS["a trace"], number))
    assert assert_equal_to_one_by_one(deliveries, keyring, 77.0, 6500.0) == (19 if kind in SHARED else 0)


@pytest.mark.parametrize("field", ["tenant", "reply", "deadline_ms"])
def test_the_number_of_known_headers_is_bounded(field: str):
    """A header for each job does not fill the memory, and every job is opened."""
    reader, sealer = Reader(UNSIGNED), Sealer(UNSIGNED)
    values: dict[str, Any] = {"tenant": "t{}", "reply": "{{double}}:reply:c{}", "deadline_ms": None}
    most = 0
    for number in range(1, 2600):
        value = values[field].format(number) if values[field] else number
        kind = KINDS["plain"].__class__(header={field: value})
        assert len(reader.open_all([delivery_of(sealer.job(kind), kind, number)], 77.0, 6500.0)) == 1
        most = max(most, len(reader._headers))
    assert 1 < most <= 1024


def test_a_long_header_is_not_kept():
    """What is kept is bounded in bytes, too."""
    headers, reader, sealer = SharedHeaders(UNSIGNED, TTL_MS), Reader(UNSIGNED), Sealer(UNSIGNED)
    for tenant, known in (("t" * 700, 1), ("t" * 1000, 1)):
        kind = KINDS["plain"].__class__(header={"tenant": tenant})
        job = reader.open(delivery_of(sealer.job(kind), kind, 1), 77.0, 6500.0)
        assert job is not None
        headers.learn(job)
        assert len(headers) == known
