"""SubmitRun: chunks, receipts, pauses and errors of a `submit_many`, without a broker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from penstock.producers.job_state import HandleCore, JobState, ResultPolicy
from penstock.producers.submission import ItemIndex, SubmitRun, chunks, with_keys
from penstock.registry.broker.base import Publication, Receipt
from penstock.registry.envelope import Keyring
from penstock.registry.errors import BrokerUnavailable, IdempotencyConflict, InvalidInput, QueueFull, UnknownJob
from penstock.registry.queues import Priority

POLICY = ResultPolicy(Keyring.parse(None), ttl_s=60)


def _jobs(count: int, size: int = 10) -> list[Publication]:
    return [Publication(f"m.{number}", Priority.NORMAL, bytes(size), "acme") for number in range(count)]


def _handle(job_id: str, tenant: str, *, awaits_reply: bool = False) -> HandleCore:
    return HandleCore(None, JobState(job_id, tenant, POLICY, awaits_reply=awaits_reply))


def _run(count: int, **how: Any) -> SubmitRun[HandleCore]:
    def track(jobs: Sequence[Publication]) -> list[HandleCore]:
        return [_handle(job.job_id, job.tenant, awaits_reply=True) for job in jobs]

    return SubmitRun("m", _jobs(count), track, _handle, **how)


def _receipts(jobs: Sequence[Publication], **others: Receipt) -> list[Receipt]:
    return [others.get(job.job_id.replace(".", ""), Receipt("accepted", job.job_id)) for job in jobs]


def _ids(handles: Iterable[Any]) -> list[str]:
    return [handle.id for handle in handles]


def test_a_chunk_is_bounded_in_jobs_and_bytes():
    """At most 256 jobs and about 1 MiB go into one call; a larger job has a call of its own."""
    assert [len(chunk) for chunk in chunks(_jobs(600))] == [256, 256, 88]
    assert [len(chunk) for chunk in chunks(_jobs(5, size=600 * 1024))] == [1] * 5
    assert [len(chunk) for chunk in chunks(_jobs(4, size=500 * 1024))] == [2, 2]
    assert list(chunks([])) == []


def test_handles_come_in_the_order_of_the_items():
    """Chunk after chunk is accepted without a pause, and no item changes its place."""
    run = _run(300)
    sizes = []
    while jobs := run.next_chunk():
        sizes.append(len(jobs))
        assert run.settle(_receipts(jobs), now=0) == 0
    assert sizes == [256, 44]
    assert _ids(run.handles) == [f"m.{number}" for number in range(300)]


def test_refused_jobs_are_published_again_in_their_places():
    """The pause is the broker's, at most a second. The next call carries only the refused jobs."""
    run = _run(3)
    pause_s = run.settle(_receipts(run.next_chunk(), m1=Receipt("full", "m.1", 0.25)), now=0)
    assert pause_s == 0.25
    assert _ids(run.handles) == ["m.0", "m.2"]
    again = run.next_chunk()
    assert [job.job_id for job in again] == ["m.1"]
    assert run.settle([Receipt("full", "m.1", 30.0)], now=0) == 1.0
    assert run.settle(_receipts(run.next_chunk()), now=0) == 0
    assert not run.next_chunk()
    assert _ids(run.handles) == ["m.0", "m.1", "m.2"]


def test_an_answer_with_too_few_receipts_is_no_answer():
    """No job is taken for accepted without its receipt."""
    run = _run(3)
    jobs = run.next_chunk()
    with pytest.raises(ValueError, match="shorter"):
        run.settle(_receipts(jobs[:2]), now=0)


def test_a_pause_beyond_the_deadline_raises():
    """QueueFull carries the handles of the accepted jobs."""
    run = _run(2, deadline=10)
    receipts = _receipts(run.next_chunk(), m1=Receipt("full", "m.1", 1.0))
    with pytest.raises(QueueFull) as full:
        run.settle(receipts, now=9.5)
    assert _ids(full.value.accepted) == ["m.0"]


def test_a_known_key_gives_the_handle_of_its_first_job():
    """The handle that stands in the place of the item awaits no reply: the reply goes to the first job's client."""
    run = _run(2)
    run.settle(_receipts(run.next_chunk(), m1=Receipt("known", "m.7")), now=0)
    assert _ids(run.handles) == ["m.0", "m.7"]
    assert [handle._state.awaits_reply for handle in run.handles] == [True, False]


def test_a_job_that_exists_awaits_no_reply():
    """Another process has published it: the handle that stands in the place of the item reads its record."""
    run = _run(2)
    run.settle(_receipts(run.next_chunk(), m1=Receipt("exists", "m.1")), now=0)
    assert _ids(run.handles) == ["m.0", "m.1"]
    assert [handle._state.awaits_reply for handle in run.handles] == [True, False]
    assert not run.next_chunk()


def test_a_repeated_call_is_known_under_its_own_id():
    """The broker accepted the job before its answer was lost: the handle goes on waiting for the reply."""
    run = _run(1)
    run.next_chunk()
    run.settle([Receipt("known", "m.0")], now=0)
    assert run.handles[0]._state.awaits_reply


def test_a_conflict_names_its_item_and_carries_the_accepted_jobs():
    """The index counts the items of the whole call. The other jobs of the call stay accepted."""
    run = _run(3, index_of=ItemIndex(100))
    receipts = _receipts(run.next_chunk(), m1=Receipt("conflict", "m.1"))
    with pytest.raises(IdempotencyConflict, match=r"^Item 101: The idempotency key belongs to") as conflict:
        run.settle(receipts, now=0)
    assert _ids(conflict.value.accepted) == ["m.0", "m.2"]


def test_a_call_without_an_answer_leaves_its_jobs_in_doubt():
    """BrokerUnavailable carries the accepted jobs and those of the call, and goes on."""
    run = _run(300)
    run.settle(_receipts(run.next_chunk()), now=0)
    run.next_chunk()
    with pytest.raises(BrokerUnavailable) as away, run:
        raise BrokerUnavailable("away")
    assert _ids(away.value.accepted) == [f"m.{number}" for number in range(256)]
    assert _ids(away.value.in_doubt) == [f"m.{number}" for number in range(256, 300)]
    with pytest.raises(UnknownJob):
        away.value.in_doubt[0]._state.accept(None)  # type: ignore[attr-defined]  # a handle


def test_each_item_has_its_key():
    """Keys may come from any iterable, and None leaves an item without one."""
    assert list(with_keys("ab", None)) == [("a", None), ("b", None)]
    assert list(with_keys("ab", ["k", None])) == [("a", "k"), ("b", None)]
    assert list(with_keys(iter("ab"), (f"k{number}" for number in range(2)))) == [("a", "k0"), ("b", "k1")]


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (["k"], "1 idempotency keys for 2 items. Expected one key for each item"),
        (iter(["k"]), "No idempotency key for item 1. Expected one key for each item"),
        (iter("klm"), "More idempotency keys than items. Expected one key for each item"),
        ("kl", "idempotency_keys is a str. Expected one key for each item"),
        (7, "idempotency_keys is a int. Expected one key for each item"),
    ],
    ids=["too few", "too few of an iterator", "too many", "text", "number"],
)
def test_keys_that_do_not_fit_the_items_are_refused(keys: Any, text: str):
    """One key for each item, or no keys at all: a shorter list would drop items."""
    with pytest.raises(InvalidInput) as refused:
        list(with_keys(["a", "b"], keys))
    assert str(refused.value) == text


def test_refused_items_count_in_the_index_of_a_job():
    """The jobs of items 3, 5 and 8 are at the positions 0, 1 and 2."""
    index_of = ItemIndex(3, {7: None, 4: None, 6: None}.keys())
    assert [index_of(position) for position in range(3)] == [3, 5, 8]
    assert ItemIndex(3, {3: None}.keys())(0) == 4
