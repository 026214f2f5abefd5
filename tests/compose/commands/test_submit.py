"""`penstock submit`: inputs, outputs and usage errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from penstock import JobEvent, ModelError
from penstock.compose.commands.submit import print_events
from tests.compose.conftest import penstock


def test_submit_and_wait(home):
    """With --wait the result of the job is printed, with the version that computed it."""
    shown = penstock(home, "submit", "double", "-i", "x=[[1, 2, 3, 4]]", "--wait", "--json")
    assert shown.exit_code == 0
    answer = json.loads(shown.output)
    assert answer["job_id"].startswith("double.")
    assert (answer["version"], len(answer["content_hash"])) == ("1", 64)
    assert answer["outputs"] == {"y": [[2, 4, 6, 8]]}
    again = json.loads(penstock(home, "submit", "double", "-i", "x=[[1, 2, 3, 4]]", "--wait", "--json").output)
    assert again == {**answer, "job_id": again["job_id"], "is_cached": True}


def test_submit_reads_inputs_from_stdin(home):
    """All inputs can be one JSON object on stdin."""
    shown = penstock(home, "submit", "double", "--inputs", "-", "--wait", stdin='{"x": [[0, 0, 0, 1]]}')
    assert "y float32 (1, 4)\n[[0. 0. 0. 2.]]" in shown.output


def test_submit_prints_the_id(home):
    """Without --wait only the id is printed."""
    shown = penstock(home, "submit", "double", "-i", "x=[[1, 2, 3, 4]]", "--priority", "high")
    assert shown.output.startswith("double.")
    assert shown.output.count("\n") == 1


def test_events_are_printed_until_the_end(home):
    """With --stream each event is one line, the first line is the id; with --json each line is one object."""
    shown = penstock(home, "submit", "double", "-i", "x=[[1, 2, 3, 5]]", "--stream")
    assert shown.exit_code == 0, shown.output
    job_id, *events = shown.output.splitlines()
    assert job_id.startswith("double.")
    assert events[0].split() == ["1", "queued"]
    assert events[-1].split(maxsplit=2)[1:] == ["completed", "y float32 (1, 4) [[ 2., 4., 6., 10.]]"]
    shown = penstock(home, "submit", "double", "-i", "x=[[1, 2, 3, 6]]", "--stream", "--json")
    lines = [json.loads(line) for line in shown.output.splitlines()]
    assert [line["type"] for line in lines][:: len(lines) - 1] == ["queued", "completed"]
    assert lines[-1]["outputs"] == {"y": [[2, 4, 6, 12]]}
    assert len({line["job_id"] for line in lines}) == 1


class StreamedJob:
    """A handle whose job emits these events; it notes what was printed before each of them."""

    id = "m.1"

    def __init__(self, events: Sequence[JobEvent], printed: Callable[[], str]) -> None:
        self._events = events
        self._printed = printed
        self.before: list[str] = []

    def stream(self) -> Iterator[JobEvent]:
        for event in self._events:
            self.before.append(self._printed())
            yield event


def test_an_event_is_printed_before_the_next_one_is_awaited(capsys):
    """Nothing is collected: when the stream waits for an event, all earlier ones are on the screen."""
    events = [JobEvent(1, "queued"), JobEvent(3, "chunk", {"value": np.array([1])}), JobEvent(4, "progress", 0.5)]
    job = StreamedJob([*events, JobEvent(5, "failed", ModelError("broken"))], lambda: capsys.readouterr().out)
    assert print_events(cast(Any, job), "json") == 1
    queued, chunk, progress = map(json.loads, job.before[1:])
    assert queued == {"job_id": "m.1", "seq": 1, "type": "queued"}
    assert chunk == {"job_id": "m.1", "seq": 3, "type": "chunk", "outputs": {"value": [1]}}
    assert progress["fraction"] == 0.5
    last = json.loads(capsys.readouterr().out)
    assert last["error"] == {"type": "ModelError", "message": "broken"}


def test_malformed_options_are_usage_errors(home):
    """Options with a wrong format are usage errors."""
    assert "Expected NAME=VALUE" in penstock(home, "submit", "double", "-i", "x").stderr
    assert "not a JSON object" in penstock(home, "submit", "double", "--inputs", "-", stdin="[1]").stderr
    assert penstock(home, "submit", "double", "-i", "x=1", "--priority", "urgent").exit_code == 2
