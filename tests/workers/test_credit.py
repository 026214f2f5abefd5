"""The credit in bytes: shares of the models, and what a worker may take over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.registry.broker.base import Delivery
from penstock.registry.envelope import MAX_JOB_BYTES
from penstock.registry.queues import Priority
from penstock.workers.credit import ByteCredit, TakeOverRoom

MODELS = ("a", "b", "c")


@given(st.integers(6, 10_000), st.dictionaries(st.sampled_from(MODELS), st.integers(0, 20_000)))
def test_grants_of_one_round_trip_stay_within_the_credit_and_starve_no_model(most_bytes: int, held: dict[str, int]):
    """Together with what is held beyond the shares they fill the credit; a model below its share gets at least that."""
    credit, share = ByteCredit(most_bytes, MODELS, held), most_bytes // (2 * len(MODELS))
    rooms = {model: credit.room(model) for model in MODELS}
    grants = {model: credit.grant(model, others) for others, model in zip((2, 1, 0), MODELS, strict=True)}
    frees = [grants[model] - max(0, share - held.get(model, 0)) for model in MODELS]
    assert max(frees) - min(frees) <= 1, "equal parts"
    assert all(0 <= grants[model] <= rooms[model] for model in MODELS)
    assert all(grants[model] >= share - held.get(model, 0) for model in MODELS)
    over = sum(max(0, held.get(model, 0) - share) for model in MODELS)
    filled = sum(max(share, held.get(model, 0) + grants[model]) for model in MODELS)
    assert filled <= max(most_bytes, over + share * len(MODELS))


def test_one_call_takes_over_what_surely_fits():
    """Sizes are known afterwards: each job counts as the largest, and any room is room for one."""
    assert TakeOverRoom(100, 3 * MAX_JOB_BYTES + 1).jobs_at_once == 3
    assert TakeOverRoom(2, 3 * MAX_JOB_BYTES).jobs_at_once == 2
    assert TakeOverRoom(100, 100 * MAX_JOB_BYTES).jobs_at_once == 8
    assert TakeOverRoom(100, 1).jobs_at_once == 1
    assert [TakeOverRoom(100, nbytes).jobs_at_once for nbytes in (0, -5)] == [0, 0]
    assert TakeOverRoom(0, 1000).jobs_at_once == 0


def test_taken_jobs_leave_less_room():
    """By their number, and by their bytes."""
    found = [Delivery("m", Priority.NORMAL, b"1-0", bytes(size)) for size in (10, 20)]
    assert TakeOverRoom(8, 100).without(found) == TakeOverRoom(6, 70)
