"""`penstock rollout` and `penstock ab` as an operator meets them: refusals, and reports without a worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.compose.experiments.comparison import parse_arms
from penstock.registry.errors import InvalidInput
from tests.compose.commands.conftest import there as there
from tests.compose.conftest import penstock

ARMS = ("ab", "start", "{slot}", "--arms", "1=0.9,2=0.1")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("rollout", "start", "{slot}", "--to", "1"), "has no version in production. There are: 1 (draft"),
        (("rollout", "start", "{slot}", "--to", "1", "--steps", "1,x"), "Bad --steps '1,x'. Expected percentages"),
        (("rollout", "start", "{slot}", "--to", "1", "--steps", "50,10"), "Expected ascending percentages"),
        (("rollout", "start", "{slot}", "--to", "1", "--max-mean-ratio", "-1"), "max_mean_ratio is -1"),
        (("rollout", "start", "nowhere", "--to", "1"), "Unknown model 'nowhere'"),
        (("rollout", "report", "{slot}"), "has had no rollout. Expected `penstock rollout start"),
        (("rollout", "stop", "{slot}"), "No rollout of {slot} is under way"),
        (("rollout", "pause", "{slot}"), "No rollout of {slot} is under way"),
        (("rollout", "resume", "{slot}"), "has had no rollout"),
        (("ab", "start", "{slot}", "--arms", "1=0.9,2=0.1"), "Unknown version '2'"),
        (("ab", "start", "{slot}", "--arms", "1=0.9;2"), "Bad arm"),
        (("ab", "start", "{slot}", "--arms", "1=0.5,1=0.5"), "is there twice"),
        ((*ARMS, "--smallest-effect", "latency_ms"), "Bad smallest effect 'latency_ms'. Expected METRIC=VALUE"),
        ((*ARMS, "--smallest-effect", "latency_ms=fast"), "Bad smallest effect 'latency_ms=fast'"),
        (
            (*ARMS, "--smallest-effect", "latency=2"),
            "Unknown metric 'latency'. Expected one of: latency_ms, error_rate",
        ),
        ((*ARMS, "--smallest-effect", "latency_ms=0"), "The smallest effect of latency_ms is 0.0, expected a number"),
        ((*ARMS, "--smallest-effect", "quality=nan"), "The smallest effect of quality is nan, expected a number"),
        ((*ARMS, "--smallest-effect", "error_rate=5"), "expected a share of jobs below 1"),
        ((*ARMS, *("--smallest-effect", "quality=1") * 2), "The smallest effect of 'quality' is there twice"),
        ((*ARMS, "--power", "1"), "power is 1.0, expected a number between 0 and 1"),
        (("ab", "report", "{slot}"), "has had no A/B experiment"),
        (("ab", "stop", "{slot}"), "No A/B experiment of {slot} is under way"),
    ],
)
def test_refusal_is_one_line_that_says_what_is_expected(
    arguments: tuple[str, ...], expected: str, there: dict[str, str], slot: str, tmp_path: Path
):
    """Exit status 1, and the registry is as it was."""
    shown = penstock(tmp_path, *(each.format(slot=slot) for each in arguments), **there)
    assert shown.exit_code == 1, shown.output
    assert expected.format(slot=slot) in shown.output
    assert "Traceback" not in shown.output
    history = penstock(tmp_path, "models", "history", slot, "--json", **there)
    assert [each["action"] for each in json.loads(history.stdout)] == ["register"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("rollout", "start", "m", "--to", "1", "--detach", "--metrics-port", "0"),
            "Expected it with `rollout resume`",
        ),
        (("ab", "start", "m", "--arms", "1=0.9,2=0.1", "--min-samples", "1"), "1 is not in the range x>=2"),
    ],
)
def test_options_of_no_use_are_refused(arguments: tuple[str, ...], expected: str, tmp_path: Path):
    """Before anything is read: a process that does not drive has no metrics, and one sample no variance."""
    shown = penstock(tmp_path, *arguments)
    assert (shown.exit_code, expected in shown.output) == (2, True), shown.output


@pytest.mark.parametrize("text", ["", "1", "1=", "=0.5", "1=two", "1=1.5", "1=-0.1", "1=nan"])
def test_bad_arms_are_refused(text: str):
    """An arm is a version, a sign and a weight from 0 to 1."""
    with pytest.raises(InvalidInput, match="Expected VERSION=WEIGHT"):
        parse_arms(text)


def test_arms_keep_their_order():
    """The order is part of the assignment: a label may contain the sign."""
    assert list(parse_arms("2=0.1, 1=0.9").items()) == [("2", 0.1), ("1", 0.9)]
    assert parse_arms("a=b=1") == {"a=b": 1.0}
