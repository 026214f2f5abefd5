"""Which texts the cache has, and what the subscribers of a job see of a found one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from penstock.registry.admission import JobBuilder, SubmitOptions
from penstock.registry.broker.base import State
from penstock.registry.envelope import Options, open_event, open_result
from penstock.registry.errors import BrokerUnavailable
from penstock.registry.event_body import chunk_part, decode_parts
from penstock.registry.generation_inputs import with_options
from penstock.registry.package import find, load_package
from penstock.registry.queues import events_key
from penstock.registry.tensors import decode, encode
from penstock.workers.cache.texts import CachedTexts, is_whole, may_share_text
from penstock.workers.generation.chunks import beginning, chunk_of
from penstock.workers.job import ClaimedJob
from penstock.workers.results import EncodedOutputs, JobOutcome
from penstock.workers.streaming import Outbox
from tests.servers import wait_until
from tests.workers.generation.packages import write_relay
from tests.workers.generation.text_servers import Reply, TextServer, event, usage
from tests.workers.streaming.jobs import MAX_BYTES, UNSIGNED, Broker, writer_of
from tests.workers.test_drain import ROOMY, DrainHarness, StartDrain, connect, start

__all__ = ["connect", "start"]

PATIENCE_S = 180.0
NOW_MS = 1234.5
CONTENT_HASH = "d" * 64


def text_of(
    *texts: str, tokens: Sequence[int] = (5, 6), logprobs: str = "", reasons: Sequence[str] = ("stop",)
) -> EncodedOutputs:
    """The cached answer of a job with these texts."""
    values = {
        "text": np.array(texts, object),
        "token_ids": np.array([tokens] * len(texts), np.int64),
        "finish_reason": np.array(reasons, object),
        "logprobs": np.array([logprobs] * len(texts), object),
    }
    content, body = encode(values)
    return EncodedOutputs(content, body, CONTENT_HASH, 0)


class Sender:
    """Cached texts of a worker, and the broker to which they go."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.broker = Broker()
        writer = writer_of(self.broker, lambda: 100.0)
        self.texts = CachedTexts(writer, UNSIGNED, self.broker.job_events, max_bytes=max_bytes, now_ms=lambda: NOW_MS)

    def outcomes(self, *answers: EncodedOutputs, **sampling: Any) -> list[JobOutcome]:
        """A running job for each of these answers."""
        jobs = self.broker.running(len(answers))
        for job in jobs:
            job.decoded = {"sampling_params": np.array([json.dumps({"temperature": 0, **sampling})], object)}
        return [JobOutcome(job, answer, "cached", None) for job, answer in zip(jobs, answers, strict=True)]

    def seen(self, job: ClaimedJob) -> tuple[list[bytes], list[dict[str, Any]]]:
        """(the kinds of the entries in the job's event stream, the values of its chunks)."""
        entries = self.broker.read({events_key(job.header.id): "0"}, 0, 10_000)
        kinds, chunks = [entry.fields[1] for entry in entries], list[dict[str, Any]]()
        for entry in entries:
            if entry.fields[1] == b"events":
                parts = decode_parts(open_event(entry.fields[3], UNSIGNED)[1])
                chunks += [
                    {name: array.tolist() for name, array in part.values(content).items()} for part, content in parts
                ]
        return kinds, chunks


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 0.0, "max_tokens": 3}, True),
        ({"seed": 0}, True),
        ({"seed": 7, "temperature": 0.9, "n": 2}, True),
        ({}, False),
        ({"temperature": 0.1}, False),
        ({"seed": None}, False),
        (None, False),
        ([0], False),
        ("no JSON", False),
    ],
)
def test_a_text_is_shared_where_an_equal_request_has_an_equal_one(sampling: Any, expected: bool):
    """It is greedy, or it names a seed; a text that is no JSON fails in the forward, and is not judged here."""
    (job,) = Broker().running()
    job.decoded = {} if sampling is None else {"sampling_params": np.array([_json(sampling)], object)}
    assert may_share_text(job) == expected
    job.header = structs.replace(job.header, options=Options(outputs=("text",)))
    assert not may_share_text(job)


def _json(sampling: Any) -> str:
    return sampling if isinstance(sampling, str) else json.dumps(sampling)


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        (["stop"], True),
        (["length", "stop"], True),
        (["tool_calls"], True),
        (["timeout"], False),
        (["abort"], False),
        (["stop", "timeout"], False),
        (["content_filter"], False),
    ],
)
def test_only_texts_that_ended_themselves_are_kept(reasons: Sequence[str], expected: bool):
    """All texts of the job."""
    assert is_whole(text_of(*["a"] * len(reasons), reasons=reasons)) == expected


def test_an_answer_without_ends_is_not_kept():
    """Of a job that asked for other outputs."""
    content, body = encode({"text": np.array(["a"], object)})
    assert not is_whole(EncodedOutputs(content, body, CONTENT_HASH, 0))


def test_each_job_gets_one_chunk_with_the_whole_text():
    """Text, tokens and log probabilities; all jobs in one call of the broker."""
    sender = Sender()
    logprobs = json.dumps([{"5": -0.5}, {"6": -0.25}])
    first, second, empty = sender.outcomes(text_of("größe", logprobs=logprobs), text_of("b"), text_of("", tokens=()))
    sender.texts.write([first, second, empty])
    begun = {"content_hash": CONTENT_HASH, "begun_ms": 1234}
    chunk = {"text": "größe", "token_ids": [5, 6], "logprobs": logprobs, **begun}
    assert sender.seen(first.job) == ([b"started", b"events"], [chunk])
    assert sender.seen(second.job)[1] == [{"text": "b", "token_ids": [5, 6], **begun}]
    assert sender.seen(empty.job) == ([], [])
    assert len(sender.broker.calls) == 1


def begun_by_another(sender: Sender, job: ClaimedJob, text: str, tokens: Sequence[int], content_hash: str) -> None:
    """Another run of the job has sent this beginning of a text."""
    chunk = {**chunk_of(text, tokens, json.dumps([{str(token): -0.5} for token in tokens]))}
    outbox = Outbox(job, "earlier", UNSIGNED, MAX_BYTES)
    outbox.add(chunk_part({**chunk, **beginning(content_hash, 7)}, None, MAX_BYTES))
    outbox.begin()
    sender.broker.emit("w", [outbox.emission()], 60_000, max_bytes=MAX_BYTES)


@pytest.mark.parametrize(("sent", "tokens"), [("grö", [5]), ("größe", [5, 6]), ("", [5])], ids=str)
def test_a_text_that_another_worker_has_begun_is_continued(sent: str, tokens: list[int]):
    """A client of a stream has the beginning: no reset, and nothing twice."""
    sender = Sender()
    logprobs = json.dumps([{"5": -0.5}, {"6": -0.25}])
    (outcome,) = sender.outcomes(text_of("größe", logprobs=logprobs), logprobs=0)
    begun_by_another(sender, outcome.job, sent, tokens, CONTENT_HASH)
    sender.texts.write([outcome])
    kinds, chunks = sender.seen(outcome.job)
    rest = len(tokens) < 2
    assert kinds == [b"started", b"events"] + ([b"resumed", b"events"] if rest else [])
    assert "".join(chunk["text"] for chunk in chunks) == "größe"
    assert [token for chunk in chunks for token in chunk["token_ids"]] == [5, 6]
    if rest:
        assert json.loads(chunks[1]["logprobs"]) == [{"6": -0.25}]
        assert chunks[1].keys() == {"text", "token_ids", "logprobs"}


@pytest.mark.parametrize(
    ("sent", "tokens", "content_hash"),
    [("grau", [5], CONTENT_HASH), ("grö", [9], CONTENT_HASH), ("größer", [5, 6, 7], CONTENT_HASH), ("grö", [5], "e")],
    ids=["other text", "other tokens", "longer", "other content"],
)
def test_another_text_that_was_begun_is_void(sent: str, tokens: list[int], content_hash: str):
    sender = Sender()
    (outcome,) = sender.outcomes(text_of("größe"))
    begun_by_another(sender, outcome.job, sent, tokens, content_hash)
    sender.texts.write([outcome])
    kinds, chunks = sender.seen(outcome.job)
    assert kinds == [b"started", b"events", b"reset", b"events"]
    assert (chunks[1]["text"], chunks[1]["token_ids"]) == ("größe", [5, 6])


@pytest.mark.parametrize("sampling", [{"n": 2}, {"best_of": 2}], ids=str)
def test_several_candidates_have_no_chunks(sampling: dict[str, Any]):
    """As in a job that writes them: their texts come at the end."""
    sender = Sender()
    texts = ["a", "b"][: sampling.get("n", 1)]
    outcomes = sender.outcomes(text_of(*texts), temperature=0.9, seed=1, **sampling)
    sender.texts.write(outcomes)
    assert sender.broker.calls == []


def test_a_text_that_is_too_large_for_an_event_comes_at_the_end():
    """The broker keeps fewer bytes of events."""
    sender = Sender(max_bytes=1000)
    large, small = sender.outcomes(text_of("x" * 1000), text_of("x"))
    sender.texts.write([large, small])
    assert sender.seen(large.job) == ([], [])
    assert len(sender.seen(small.job)[1]) == 1


def test_chunks_are_written_once_when_the_broker_was_away():
    """No subscriber sees a reset, also where only the broker's answer was lost."""
    sender = Sender()
    outcomes = sender.outcomes(text_of("a"), text_of("b"))
    sender.broker.errors = [BrokerUnavailable("away")]
    with pytest.raises(BrokerUnavailable):
        sender.texts.write(outcomes)
    assert sender.seen(outcomes[0].job) == ([], [])
    emit = sender.broker.emit
    sender.broker.emit = _losing_an_answer(emit)  # type: ignore[method-assign]  # an answer that does not arrive
    with pytest.raises(BrokerUnavailable):
        sender.texts.write(outcomes)
    sender.broker.emit = emit  # type: ignore[method-assign]  # as it was
    sender.texts.write(outcomes)
    for outcome, text in zip(outcomes, "ab", strict=True):
        kinds, chunks = sender.seen(outcome.job)
        assert kinds == [b"started", b"events"]
        assert [chunk["text"] for chunk in chunks] == [text]


def _losing_an_answer(emit: Any) -> Any:
    def lose(*arguments: Any, **named: Any) -> None:
        emit(*arguments, **named)
        raise BrokerUnavailable("no answer")

    return lose


def test_events_that_are_refused_concern_their_job_only(caplog: pytest.LogCaptureFixture):
    """Its result has the text as well."""
    sender = Sender()
    bad, good = sender.outcomes(text_of("a"), text_of("b"))
    sender.broker.poisoned = bad.job.header.id
    sender.texts.write([bad, good])
    assert [chunk["text"] for chunk in sender.seen(good.job)[1]] == ["b"]
    assert "the chunk of a cached text was not written" in caplog.text
    assert not bad.job.is_lost


def test_a_job_of_another_worker_gets_no_chunk():
    """Its lease was lost: this worker commits nothing either."""
    sender = Sender()
    (outcome,) = sender.outcomes(text_of("a"))
    sender.broker.release("w", [outcome.job.held])
    sender.texts.write([outcome])
    assert sender.seen(outcome.job) == ([], [])
    assert outcome.job.is_lost


def test_a_found_text_outlasts_an_outage_of_the_broker(start: StartDrain, models_root: Path):
    """The job is kept until its chunk is written, and ends once; the server is not asked again."""
    events = [event("hel"), event("lo", "stop"), usage(), "[DONE]"]
    with TextServer(lambda _: Reply(events)) as server:
        write_relay(models_root, "relay", has_cache=True, runtime_url=server.url)
        harness = start()
        first = _publish(harness, models_root)
        wait_until(lambda: harness.state(first) is State.COMPLETED, PATIENCE_S, "the text is written")
        broker = harness.drain.parts.broker
        emit, failures = broker.emit, [BrokerUnavailable("away")] * 3

        def fail_at_first(*arguments: Any, **named: Any) -> Any:
            if failures:
                raise failures.pop()
            return emit(*arguments, **named)

        broker.emit = fail_at_first  # type: ignore[method-assign]  # the broker is away for three calls
        second = _publish(harness, models_root)
        wait_until(lambda: harness.state(second) is State.COMPLETED, PATIENCE_S, "the text is found")
        assert len(server.asked) == 1
        assert failures == []
    entries = harness.broker.read({events_key(second): "0"}, 0, 10_000)
    assert [entry.fields[1] for entry in entries] == [b"started", b"events", b"C"]
    job_record = harness.broker.job_record(second)
    assert job_record is not None
    header, body = open_result(job_record.result, UNSIGNED)
    assert header.is_cached
    assert decode(header.content, body)["text"].tolist() == ["hello"]


def _publish(harness: DrainHarness, models_root: Path) -> str:
    """The id of a greedy job, which was accepted."""
    spec = load_package(find(models_root, "relay").path).spec
    inputs = with_options({"prompt": "a"}, {"temperature": 0})
    job = JobBuilder(tenant="acme", keyring=UNSIGNED, max_bytes=1 << 20).build(spec, inputs, SubmitOptions())
    assert {receipt.outcome for receipt in harness.broker.publish("relay", [job], ROOMY)} == {"accepted"}
    return job.job_id
