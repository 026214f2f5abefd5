"""Names that processes share: priorities, names, job ids and the keys of Redis."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid

import pytest

from penstock.registry import queues
from penstock.registry.errors import InvalidInput
from penstock.registry.queues import (
    DerivedIds,
    Priority,
    active_key,
    crashes_key,
    dead_key,
    events_key,
    flow_key,
    followers_key,
    idempotency_key,
    is_derived,
    is_job_id,
    is_reply_key,
    job_time_ms,
    lane_key,
    new_job_id,
    overdue_key,
    parse_name,
    parse_priority,
    paused_key,
    record_key,
    reply_key,
    slot_of,
    spec_key,
    specs_key,
    split_job_id,
    stream_key,
    stream_keys,
)
from tests.servers import ROOT

JOB = "minilm.00000000-9c40-7000-8000-000000000000"
FORKING = """
import os
from penstock.registry.queues import new_job_id

print(new_job_id("minilm"), flush=True)
child = os.fork()
if child:
    os.waitpid(child, 0)
print(new_job_id("minilm"), flush=True)
"""


def test_priorities_are_names_in_the_order_of_claims():
    """The four names lead to the four priorities, the most urgent first."""
    names = ["critical", "high", "normal", "low"]
    assert [parse_priority(name) for name in names] == sorted(Priority)
    assert [priority.label for priority in sorted(Priority)] == names
    for wrong in ("urgent", "", "HIGH", ["high"]):
        with pytest.raises(InvalidInput, match="Expected one of: critical, high, normal, low"):
            parse_priority(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a", "minilm", "all-minilm_l6.v2", "0", "a" * 64])
def test_valid_names_are_returned(name: str):
    """A name has 1 to 64 lower-case letters, digits, dots, underscores and hyphens."""
    assert parse_name("model", name) == name


@pytest.mark.parametrize("name", ["", "a" * 65, "Mini", "-a", ".a", "a b", "a\n", "{a}", "a/b", "ä", None, 7])
def test_other_names_are_refused_in_one_line(name: object):
    """The message says which kind of name is bad and what is expected."""
    with pytest.raises(InvalidInput, match=r"^Bad tenant name .*Expected 1 to 64 characters") as refused:
        parse_name("tenant", name)
    assert "\n" not in str(refused.value)


def test_job_ids_are_uuids_of_version_7():
    """The ids of a process are distinct, name their model, and follow RFC 9562; a draw serves many of them."""
    ids = [new_job_id("minilm") for _ in range(1000)]
    assert len(set(ids)) == 1000
    for slot, local in map(split_job_id, ids):
        parsed = uuid.UUID(local)
        assert (slot, parsed.version, parsed.variant) == ("minilm", 7, uuid.RFC_4122)


def test_job_ids_tell_their_own_time(monkeypatch: pytest.MonkeyPatch):
    """Several of one millisecond, of the next ones, and after the clock went back."""
    milliseconds = [1_000, 1_000, 1_001, 1_001, 2**40, 1_001, 1_000]
    moments = iter([each * 1_000_000 + 999_999 for each in milliseconds])
    monkeypatch.setattr(time, "time_ns", lambda: next(moments))
    assert [job_time_ms(new_job_id("minilm")) for _ in milliseconds] == milliseconds


def test_a_forked_child_makes_other_ids():
    """A child process does not use the random numbers that its parent has drawn."""
    run = subprocess.run([sys.executable, "-c", FORKING], cwd=ROOT, capture_output=True, text=True, check=True)
    first, *after = (line.rpartition("-")[2] for line in run.stdout.split())
    assert len(after) == 2
    assert len({first, *after}) == 3


def test_the_time_of_an_id_is_that_of_its_making():
    """The first 48 bits are Unix milliseconds; a task id of Celery has no time."""
    assert job_time_ms(JOB) == 40_000
    assert job_time_ms("minilm.4d7d9c1e-8f9c-4b6e-9a3e-0123456789ab") is None
    assert job_time_ms("minilm.task:1") is None


@pytest.mark.parametrize(
    "job_id",
    [
        *("", "minilm", "minilm.", ".x", "Mini.x", "minilm.a b", "minilm.{x}", "a.b\n", None),
        # Their records would be the keys that belong to the job before the colon.
        *(f"{JOB}:events", f"{JOB}:overdue", "minilm.task:1:events"),
    ],
)
def test_other_job_ids_are_refused(job_id: str):
    """An id without a valid model or a valid local part is refused before it becomes a key."""
    with pytest.raises(InvalidInput, match=r"Expected <model>\.<uuid>"):
        split_job_id(job_id)


def test_a_job_belongs_to_the_slot_of_its_id():
    """The model of an id may have dots; an id of another model is none of this slot."""
    assert slot_of("all.minilm.v2.task-1") == "all.minilm.v2"
    assert is_job_id(JOB, "minilm")
    for job_id, slot in ((JOB, "mini"), (JOB, "mlp"), ("minilm.", "minilm"), ("minilm.{x}", "minilm")):
        assert not is_job_id(job_id, slot)


def test_all_keys_of_a_slot_have_its_hash_tag():
    """A node of a Redis Cluster holds all keys of one script; no two keys are equal."""
    entry = b"1-0"
    keys = [*stream_keys("m"), dead_key("m"), spec_key("m"), specs_key("m"), active_key("m"), flow_key("m")]
    keys += [crashes_key("m", Priority.LOW, entry), record_key("m.x"), events_key("m.x"), paused_key("m")]
    keys += [idempotency_key("m", "digest"), reply_key("m", "client"), lane_key("m")]
    keys += [overdue_key("m.x"), followers_key("m.x")]
    assert {key[key.index("{") : key.index("}") + 1] for key in keys} == {"{m}"}
    assert len(set(keys)) == len(keys)
    assert stream_keys("m")[Priority.HIGH] == stream_key("m", Priority.HIGH) == "infer.{m}.high"


def test_derived_keys_are_those_of_the_scripts():
    """The scripts in Lua append these words to the key of a stream and of a record."""
    assert crashes_key("m", Priority.LOW, b"1-0") == f"{stream_key('m', Priority.LOW)}:crashes:1-0"
    assert events_key("m.x") == f"{record_key('m.x')}:events"
    assert record_key("m.x") == queues.local_record_key("m", "x")


def test_replies_go_to_streams_of_replies_only():
    """A worker writes a reply to a client's stream or to the lane of this slot, and to no other key."""
    assert is_reply_key(reply_key("m", "client"), "m")
    assert is_reply_key(lane_key("m"), "m")
    for key in (
        spec_key("m"),
        record_key("m.x"),
        reply_key("n", "client"),
        lane_key("n"),
        stream_key("m", Priority.LOW),
    ):
        assert not is_reply_key(key, "m")


def test_derived_ids_follow_from_name_and_number():
    """Any process gives the same ids. They are UUIDs of version 8 with the given time; no two sets share one."""
    made_ms = 1_700_000_000_123
    ids = [DerivedIds("minilm", "batch_1", made_ms).of(number) for number in range(1000)]
    assert ids == [DerivedIds("minilm", "batch_1", made_ms).of(number) for number in range(1000)]
    others = [DerivedIds(*names, made_ms) for names in (("minilm", "batch_2"), ("mlp", "batch_1"))]
    # A name that ends with a digit is no other number of a shorter one.
    others += [DerivedIds("minilm", "batch_1" + text, made_ms) for text in ("0", "1")]
    found = {job_id.rpartition(".")[2] for job_id in ids} | {each.of(1).rpartition(".")[2] for each in others}
    assert len(found) == 1000 + len(others)
    for job_id in ids:
        slot, local = split_job_id(job_id)
        assert (slot, uuid.UUID(local).version, uuid.UUID(local).variant) == ("minilm", 8, uuid.RFC_4122)
        assert job_time_ms(job_id) == made_ms
        assert is_derived(job_id)
    assert not is_derived(new_job_id("minilm"))
    assert not is_derived("minilm.8")
