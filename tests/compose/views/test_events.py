"""Events of a job as lines."""

from __future__ import annotations

import numpy as np
import pytest

from penstock import JobEvent, ModelError
from penstock.compose.views.events import as_json, as_text


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (JobEvent(1, "queued"), "    1  queued"),
        (JobEvent(3, "chunk", {"value": np.array([7], np.int64)}), "    3  chunk      value int64 (1,) [7]"),
        (JobEvent(9, "reset", "redelivered"), "    9  reset      redelivered"),
        (JobEvent(9, "failed", ModelError("bad\nline\x1b[2J")), r"    9  failed     ModelError: bad\nline\x1b[2J"),
    ],
    ids=lambda value: value.type if isinstance(value, JobEvent) else "",
)
def test_an_event_is_one_line(event, line):
    """Each kind of data is shown, and text of a model cannot move the cursor or begin a line."""
    assert as_text(event) == line


def test_large_outputs_are_abridged():
    """An embedding fits on a line."""
    line = as_text(JobEvent(3, "completed", {"embedding": np.zeros((4, 384), np.float32)}))
    assert "..." in line
    assert "\n" not in line
    assert len(line) < 300


def test_json_has_the_data_of_each_type():
    """A program finds outputs, fraction, reason or error under their names; outputs follow the codec."""
    outputs = {"y": np.array([1.5, 2.5], np.float32)}
    assert as_json("j", JobEvent(5, "completed", outputs), "json")["outputs"] == {"y": [1.5, 2.5]}
    assert as_json("j", JobEvent(5, "completed", outputs), "base64")["outputs"]["y"]["shape"] == [2]
    assert as_json("j", JobEvent(6, "reset", "trimmed"), "json")["reason"] == "trimmed"
    assert as_json("j", JobEvent(1, "queued"), "json") == {"job_id": "j", "seq": 1, "type": "queued"}
