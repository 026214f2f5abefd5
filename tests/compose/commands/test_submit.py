"""`penstock submit`: inputs, outputs and usage errors."""

from __future__ import annotations

import json

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


def test_malformed_options_are_usage_errors(home):
    """Options with a wrong format are usage errors."""
    assert "Expected NAME=VALUE" in penstock(home, "submit", "double", "-i", "x").stderr
    assert "not a JSON object" in penstock(home, "submit", "double", "--inputs", "-", stdin="[1]").stderr
    assert penstock(home, "submit", "double", "-i", "x=1", "--priority", "urgent").exit_code == 2
