"""Events that are encoded once for many jobs: for each job the event that it would have by itself."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from celery import Celery
from celery.utils.time import utcoffset
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from penstock.registry.broker.base import State
from penstock.registry.envelope import Failure, JobHeader, Options
from penstock.registry.tensors import Tensor
from penstock.workers.celery_bridge import events
from penstock.workers.celery_bridge.events import CeleryEventSender
from penstock.workers.celery_bridge.presentation import shown_arguments, shown_id, shown_name
from penstock.workers.observe.listener import Ended, Failed

LOCAL = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_:-"
CONTENTS = (
    (Tensor("x", "float32", (1, 384)),),
    (Tensor("x", "float32", (2, 384)),),
    (Tensor('"q"', "string", (1,)), Tensor("\\u0000", "int64", ())),
)
HOSTS = ("cpu0@test", 'a "host" \\u0000', "\xe9\u2028</script>")
HEADER = st.builds(
    lambda local, model, tenant, priority, content, lane, is_copy: JobHeader(
        f"{model}.{local}",
        tenant,
        model,
        priority,
        tuple(list(CONTENTS[content])) if is_copy else CONTENTS[content],
        options=Options(lane=lane),
    ),
    local=st.one_of(
        st.text("abc0", min_size=1, max_size=3),
        st.text(LOCAL, min_size=1, max_size=128).filter(lambda text: text[0] not in "_:-"),
        st.just(LOCAL),
    ),
    model=st.sampled_from(["mlp", "a.b-c_d"]),
    tenant=st.sampled_from(["acme", "other"]),
    priority=st.sampled_from(["high", "low"]),
    content=st.sampled_from([0, 0, 0, 1, 2]),
    lane=st.sampled_from([False, False, True]),
    is_copy=st.booleans(),
)
CALL = st.tuples(
    st.sampled_from(["received", "started", "completed", "finished", "retried"]),
    st.lists(HEADER, min_size=1, max_size=6),
    st.floats(0.0, 2e9),
)


class Kept(CeleryEventSender):
    """Keeps the messages that it would send."""

    def __init__(self, hostname: str) -> None:
        super().__init__(Celery(set_as_current=False), hostname, interval_s=1, is_wanted=lambda: True)
        self._sends = True
        self.messages: list[bytes] = []

    def _publish(self, events: bytes) -> None:
        self.messages.append(events)

    def sent(self) -> list[dict[str, Any]]:
        """The events of a flush, in order."""
        self._flush()
        return [event for message in self.messages for event in json.loads(message)]


def expected(call: str, job: JobHeader, at: float, host: str, clock: int) -> dict[str, Any] | None:
    """The event of one job; None: there is none."""
    common = {"uuid": shown_id(job), "timestamp": at, "clock": clock, "hostname": host, "pid": os.getpid()}
    common["utcoffset"] = utcoffset()
    if call == "received":
        described = {"name": shown_name(job.model), "args": "()", "kwargs": shown_arguments(job)}
        return None if job.options.lane else {"type": "task-received", **common, **described}
    if call == "started":
        return {"type": "task-started", **common}
    if call == "retried":
        texts = {"exception": "ModelError('no')", "traceback": ""}
        return {"type": "task-retried", **common, **texts}
    return {"type": "task-succeeded", **common, "result": 'version "1"', "runtime": 0.25}


@settings(max_examples=80, derandomize=True)
@given(calls=st.lists(CALL, min_size=1, max_size=5), host=st.sampled_from(HOSTS))
def test_each_job_of_a_call_has_the_event_that_it_would_have_alone(
    calls: list[tuple[str, list[JobHeader], float]], host: str
):
    """Of several models, tenants and descriptions, with all characters of ids; jobs of tasks under the task's id.

    Events of one call have one time, and may have any order.
    """
    sender = Kept(host)
    for call, jobs, at in calls:
        if call == "finished":
            sender.finished([Ended(job, State.COMPLETED, 0.25, None, '"1"') for job in jobs], at)
        elif call == "retried":
            sender.retried([Failed(job, Failure("ModelError", "no")) for job in jobs], at)
        elif call == "completed":
            sender.completed(jobs, 0.25, '"1"', at)
        else:
            getattr(sender, call)(jobs, at)
    found = sender.sent()
    clock = found[0]["clock"] if found else 0
    wanted = [expected(call, job, at, host, clock) for call, jobs, at in calls for job in jobs]
    assert sorted(found, key=json.dumps) == sorted((event for event in wanted if event is not None), key=json.dumps)


def test_completed_jobs_have_the_events_and_totals_of_finished_ones():
    """They are the same jobs, told in another call."""
    jobs = [JobHeader(f"mlp.{number}", "acme", "mlp", "high", CONTENTS[0]) for number in range(50)]
    together, alone = Kept("h"), Kept("h")
    together.completed(jobs, 0.25, "1", 1000.0)
    alone.finished([Ended(job, State.COMPLETED, 0.25, None, "1") for job in jobs], 1000.0)
    assert together.sent() == alone.sent()
    assert together.totals == alone.totals == {"penstock.infer.mlp": 50}


@pytest.mark.parametrize("change", [{"tenant": "other"}, {"priority": "low"}, {"model": "a"}, {"content": CONTENTS[1]}])
def test_jobs_in_other_words_are_described_apart(change: dict[str, Any]):
    """Each of them has its own description, whatever the neighbour's is."""
    job = JobHeader("mlp.1", "acme", "mlp", "high", CONTENTS[0])
    jobs = [job, structs.replace(job, **change), job]
    sender = Kept("h")
    sender.received(jobs, 1000.0)
    found = [(event["name"], event["kwargs"]) for event in sender.sent()]
    assert sorted(found) == sorted((shown_name(each.model), shown_arguments(each)) for each in jobs)


def test_a_claim_without_jobs_has_no_events():
    """All deliveries of a claim may have been dead letters."""
    sender = Kept("h")
    sender.received([], 1000.0)
    assert sender.sent() == []


@pytest.mark.parametrize("count", [5_999, 6_000, 6_001, 13_000])
def test_many_jobs_are_sent_in_several_messages_and_none_twice(count: int):
    """A message has some thousands of events; one that cannot be sent costs what is behind it, too, and is counted."""
    jobs = [JobHeader(f"mlp.{number}", "acme", "mlp", "high", CONTENTS[0]) for number in range(count)]
    sender = Kept("h")
    for start in range(0, count, 64):
        sender.started(jobs[start : start + 64], 1000.0)
    sent = sender.sent()
    assert [event["uuid"] for event in sent] == [job.id for job in jobs]
    assert len(sender.messages) == -(-count // 6_016)
    assert sender.dropped == 0


def test_events_that_cannot_be_sent_are_counted_one_by_one():
    """Each job of a call counts, though they travel as one part of a message."""

    class Away(Kept):
        def _publish(self, events: bytes) -> None:
            raise OSError("away")

    sender = Away("h")
    sender.started([JobHeader(f"mlp.{number}", "acme", "mlp", "high", CONTENTS[0]) for number in range(7)], 1000.0)
    sender.finished([Ended(JobHeader("mlp.a", "acme", "mlp", "high", ()), State.EXPIRED, 0.0, None, "")], 1000.0)
    sender._flush()
    assert sender.dropped == 8


def test_events_follow_the_offset_of_the_clock(monkeypatch: pytest.MonkeyPatch):
    """What all events have in common is kept from flush to flush, but not beyond the end of summer time."""
    sender = Kept("h")
    job = JobHeader("mlp.1", "acme", "mlp", "high", CONTENTS[0])
    for offset in (-1, -1, -2):
        monkeypatch.setattr(events, "utcoffset", lambda offset=offset: offset)
        sender.messages.clear()
        sender.received([job], 1000.0)
        sender.completed([job], 0.25, "1", 1000.0)
        assert {event["utcoffset"] for event in sender.sent()} == {offset}
