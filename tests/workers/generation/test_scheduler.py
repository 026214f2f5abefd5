"""The pure scheduler: order, budget, preemption, ageing, and random schedules with checks at each step."""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.workers.generation.config import SchedulerConfig
from penstock.workers.generation.pages import PagePool
from penstock.workers.generation.prefix_cache import PrefixCache
from penstock.workers.generation.scheduler import Scheduler, Sequence
from tests.workers.generation.schedules import Schedule, run_schedule

CRITICAL, HIGH, NORMAL, LOW = range(4)


def scheduler(num_pages: int = 100, page_size: int = 4, **options: Any) -> Scheduler:
    """A scheduler over so many usable pages, without a prefix cache."""
    return Scheduler(SchedulerConfig(**options), PagePool(num_pages + 1, page_size, None))


def request(name: str, length: int, priority: int = NORMAL) -> Sequence:
    """A request with a prompt of this length."""
    return Sequence(name, list(range(1, length + 1)), length, priority=priority)


def names(chunks: Any) -> list[str]:
    """Requests of a plan, in its order."""
    return [chunk.sequence.request_id for chunk in chunks]


def step(planner: Scheduler) -> list[str]:
    """One step in which each chunk that samples gets a token."""
    plan = planner.plan()
    planner.record(plan.chunks, {chunk.sequence.request_id: 7 for chunk in plan.chunks if chunk.samples})
    return names(plan.chunks)


def test_random_schedules_keep_every_rule():
    """No page leaks or is used twice, no budget is exceeded, each read place has the right tokens, and all end."""
    for seed in range(40):
        schedule = run_schedule(seed)
        assert schedule.alive == {}, seed
        assert schedule.scheduler.pages.num_used == 0, seed


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1_000, 2_000, 250))
def test_a_thousand_random_schedules_keep_every_rule(start):
    """As above, a thousand times; requests have drafts, and some have the prompt of another one."""
    preemptions = hits = drafted = 0
    for seed in range(start, start + 250):
        schedule = run_schedule(seed)
        assert schedule.alive == {}, seed
        assert schedule.scheduler.pages.num_used == 0, seed
        preemptions += schedule.scheduler.num_preemptions
        hits += schedule.scheduler.pages.prefixes.hits if schedule.scheduler.pages.prefixes else 0
        drafted += schedule.drafted
    assert preemptions > 100
    assert hits > 100
    assert drafted > 100


def test_a_page_that_is_used_twice_is_found():
    """The check of the schedules fails for a pool that gives a page to two requests."""
    schedule = Schedule(random.Random(0), scheduler(num_pages=100, max_num_seqs=2, max_num_batched_tokens=512))
    schedule.add("one")
    schedule.add("two")
    schedule.step()
    first, second = schedule.scheduler.running
    second.pages[0] = first.pages[0]
    with pytest.raises(AssertionError):
        schedule.check_pages()


def test_nobody_starves_beside_a_flood_of_urgent_requests():
    """A low request ends although critical ones never cease to come, and more of them than seats."""
    planner = scheduler(max_num_seqs=2, max_num_batched_tokens=8, ageing_steps=10)
    low = request("low", 6, LOW)
    planner.add(low)
    for turn in range(200):
        for each in range(2):
            planner.add(request(f"critical-{turn}-{each}", 2, CRITICAL))
        step(planner)
        for sequence in [one for one in planner.running if len(one.tokens) - one.num_prompt >= 4]:
            planner.remove(sequence)
            if sequence is low:
                return
    pytest.fail("The low request has not ended")


def test_decoding_rows_come_before_a_long_prompt():
    """A prompt that is longer than the budget is computed in chunks, beside every decoding request."""
    planner = scheduler(max_num_seqs=4, max_num_batched_tokens=10)
    for name in ("a", "b"):
        planner.add(request(name, 3))
    step(planner)
    planner.add(request("long", 30))
    for done in (8, 16, 24):
        plan = planner.plan()
        assert names(plan.chunks) == ["a", "b", "long"]
        assert plan.num_tokens == 10
        planner.record(plan.chunks, {"a": 7, "b": 7})
        assert plan.chunks[2].sequence.num_computed == done


def test_priority_then_arrival_orders_admission():
    """ES-004: the more urgent first, and among equals first come, first served."""
    planner = scheduler(max_num_seqs=1, max_num_batched_tokens=8)
    for name, priority in (
        ("n1", NORMAL),
        ("l1", LOW),
        ("c1", CRITICAL),
        ("n2", NORMAL),
        ("h1", HIGH),
        ("c2", CRITICAL),
    ):
        planner.add(request(name, 2, priority))
    served = []
    while planner.has_work:
        served += step(planner)
        planner.remove(planner.running[0])
    assert served == ["c1", "c2", "h1", "n1", "n2", "l1"]


def test_a_critical_request_takes_the_seat_of_a_low_one():
    """It runs in its first step though all seats are full and memory is not short; the victim keeps its place."""
    planner = scheduler(max_num_seqs=2, max_num_batched_tokens=16)
    for name in ("low-1", "low-2", "low-3"):
        planner.add(request(name, 3, LOW))
    assert step(planner) == ["low-1", "low-2"]
    planner.add(request("critical", 3, CRITICAL))
    plan = planner.plan()
    assert names(plan.chunks) == ["low-1", "critical"]
    assert names_of(plan.preempted) == ["low-2"]
    assert [sequence.request_id for sequence in planner.waiting] == ["low-2", "low-3"]


def names_of(sequences: Any) -> list[str]:
    """Their ids."""
    return [sequence.request_id for sequence in sequences]


def test_an_equal_request_takes_no_seat():
    """Among equals the one that runs goes on."""
    planner = scheduler(max_num_seqs=1, max_num_batched_tokens=16)
    planner.add(request("first", 3, LOW))
    step(planner)
    planner.add(request("second", 3, LOW))
    assert step(planner) == ["first"]


def test_nobody_is_displaced_in_vain():
    """Where even all less urgent pages would not let a request in, they are left to those that have them."""
    planner = scheduler(num_pages=10, max_num_seqs=4, max_num_batched_tokens=64)
    planner.add(request("high", 20, HIGH))
    planner.add(request("low", 8, LOW))
    step(planner)
    planner.add(request("critical-ish", 30, NORMAL))
    assert step(planner) == ["high", "low"]
    assert planner.num_preemptions == 0


@pytest.mark.parametrize("is_shared", [True, False])
def test_pages_that_it_shares_with_a_victim_are_no_gain(is_shared: bool):
    """A common beginning in the prefix cache: the newcomer counts on these pages already, and needs others."""
    pool = PagePool(13, 4, PrefixCache(4, 12))
    planner = Scheduler(SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=64), pool)
    system = list(range(100, 124))
    planner.add(Sequence("other", list(range(12)), 12, priority=CRITICAL))
    planner.add(Sequence("low", [*system, 1], 25, priority=LOW))
    step(planner)
    begin = system if is_shared else [7] * 24
    planner.add(Sequence("critical", begin + [2] * 15, 39, priority=CRITICAL))
    assert step(planner) == ["other", "low"]
    assert planner.num_preemptions == 0


def test_the_last_in_order_gives_way_when_pages_are_short():
    """The victim is not in the plan, and its pages go to the request before it."""
    planner = scheduler(num_pages=4, page_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    planner.add(request("first", 7))
    planner.add(request("second", 7))
    assert step(planner) == ["first", "second"]
    assert step(planner) == ["first", "second"]
    planner.add(request("third", 1))
    plan = planner.plan()
    assert names(plan.chunks) == ["first"]
    assert names_of(plan.preempted) == ["second"]
    assert planner.pages.num_available == 1


def test_nobody_is_admitted_in_a_step_that_preempted():
    """Pages are short then: a request that fits into what is left would be the next victim."""
    planner = scheduler(num_pages=4, page_size=4, max_num_seqs=2, max_num_batched_tokens=64)
    planner.add(request("first", 7))
    planner.add(between := request("between", 1))
    planner.remove(between)
    planner.add(request("last", 7))
    step(planner)
    step(planner)
    planner.waiting.push(between)
    plan = planner.plan()
    assert (names(plan.chunks), names_of(plan.preempted)) == (["first"], ["last"])
    planner.record(plan.chunks, {"first": 7})
    assert step(planner) == ["first", "between"]


def test_a_small_request_waits_behind_a_large_one():
    """Otherwise small ones would keep the pages from it for ever."""
    planner = scheduler(num_pages=10, max_num_seqs=4, max_num_batched_tokens=64)
    planner.add(request("running", 20))
    step(planner)
    planner.add(request("large", 24))
    planner.add(request("small", 2))
    assert step(planner) == ["running"]


def test_unchecked_pages_are_reported_when_they_come_back():
    """A prompt that is aborted in its middle may have left values that are no numbers."""
    planner = scheduler(max_num_seqs=1, max_num_batched_tokens=8)
    planner.add(sequence := request("aborted", 20))
    step(planner)
    pages = set(sequence.pages)
    planner.remove(sequence)
    assert set(planner.take_unverified_pages()) == pages
    assert planner.take_unverified_pages() == []


def test_a_finished_request_leaves_checked_pages():
    """After finite logits nothing is cleared."""
    planner = scheduler(max_num_seqs=1, max_num_batched_tokens=8)
    planner.add(sequence := request("finished", 8))
    step(planner)
    planner.remove(sequence)
    assert planner.take_unverified_pages() == []


def test_prefix_pages_are_published_with_finite_logits_only():
    """Pages of a prompt whose logits were not finite are found by nobody."""
    pages = PagePool(20, 4, PrefixCache(4, 20))
    planner = Scheduler(SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=32), pages)
    planner.add(sequence := request("spoilt", 9))
    planner.record(planner.plan().chunks, {})
    planner.remove(sequence)
    assert len(pages.prefixes or ()) == 0
    planner.add(request("sound", 9))
    step(planner)
    assert len(pages.prefixes or ()) == 2


def test_drafts_take_what_is_left_over():
    """Of the budget and of the pages: no running request loses its token of the step, or a page, to a guess."""
    planner = scheduler(num_pages=6, page_size=4, max_num_seqs=3, max_num_batched_tokens=5)
    for name in ("a", "b"):
        planner.add(request(name, 2))
    step(planner)
    plan = planner.plan({"a": [1, 2, 3, 4], "b": [5, 6]})
    assert [(chunk.sequence.request_id, chunk.tokens) for chunk in plan.chunks] == [("a", [7, 1, 2, 3]), ("b", [7])]
    planner.record(plan.chunks, {"a": 8, "b": 8}, {"a": [1, 2]})
    assert [one.tokens for one in planner.running] == [[1, 2, 7, 1, 2, 8], [1, 2, 7, 8]]
    assert [one.num_computed for one in planner.running] == [5, 3]
    tight = scheduler(num_pages=2, page_size=4, max_num_seqs=2, max_num_batched_tokens=64)
    for name in ("a", "b"):
        tight.add(request(name, 2))
    step(tight)
    assert [chunk.drafts for chunk in tight.plan({"a": [1, 2, 3], "b": [5]}).chunks] == [(), (5,)]


def test_rejected_drafts_are_published_nowhere():
    """A page that a draft has filled is no page of the text: the prefix cache does not know it."""
    pages = PagePool(20, 4, PrefixCache(4, 20))
    planner = Scheduler(SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=32), pages)
    planner.add(sequence := request("guessed", 5))
    step(planner)
    plan = planner.plan({"guessed": [9, 9]})
    planner.record(plan.chunks, {"guessed": 8}, {"guessed": []})
    assert len(pages.prefixes or ()) == 1
    assert sequence.num_written == 8
    plan = planner.plan({"guessed": [6]})
    planner.record(plan.chunks, {"guessed": 3}, {"guessed": [6]})
    assert sequence.tokens == [1, 2, 3, 4, 5, 7, 8, 6, 3]
    assert pages.prefixes is not None
    assert [entry.key.tokens for entry in pages.prefixes.match(sequence.tokens, "")] == [(1, 2, 3, 4), (5, 7, 8, 6)]


def test_rejected_drafts_leave_pages_to_be_cleared():
    """Their values are vouched for by nobody: they may be no numbers."""
    planner = scheduler(max_num_seqs=1, max_num_batched_tokens=8)
    planner.add(sequence := request("guessed", 3))
    step(planner)
    planner.record(planner.plan({"guessed": [9, 9]}).chunks, {"guessed": 8})
    pages = set(sequence.pages)
    planner.remove(sequence)
    assert set(planner.take_unverified_pages()) == pages


def test_texts_of_one_prompt_share_its_full_pages():
    """Without a prefix cache; the pages stay with the second text when the first one ends."""
    planner = scheduler(max_num_seqs=2, max_num_batched_tokens=64)
    planner.add(first := request("first", 10))
    step(planner)
    second = Sequence("second", list(first.tokens[:10]), 10, donor=first)
    planner.add(second)
    plan = planner.plan()
    assert [(chunk.start, chunk.num_tokens) for chunk in plan.chunks] == [(10, 1), (8, 2)]
    assert second.pages[:2] == first.pages[:2]
    planner.record(plan.chunks, {"first": 7, "second": 7})
    planner.remove(first)
    assert [planner.pages.users(page) for page in second.pages] == [1, 1, 1]


def test_a_long_prompt_takes_small_parts_of_the_steps_of_others():
    """Alone it gets the budget, and so does a prompt that is not long."""
    planner = scheduler(max_num_seqs=4, max_num_batched_tokens=100, max_long_prefill_tokens=8)
    planner.add(request("long", 80))
    assert planner.plan().num_tokens == 80
    planner = scheduler(max_num_seqs=4, max_num_batched_tokens=100, max_long_prefill_tokens=8)
    planner.add(request("stream", 3))
    step(planner)
    planner.add(request("long", 80))
    planner.add(request("short", 32))
    plan = planner.plan()
    assert [chunk.num_tokens for chunk in plan.chunks] == [1, 8, 32]
    planner.record(plan.chunks, {"stream": 7, "short": 7})
    assert [chunk.num_tokens for chunk in planner.plan().chunks] == [1, 1, 8]
