"""The report on an attached version: the state of each step, and a decision as one line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.workers.levels.attached import AttachedVersion
from penstock.workers.levels.progression import BATCHING, COMPILED, Decision, LevelState, replay
from penstock.workers.levels.report import described, version_entry
from tests.workers.levels.test_attached import attached, serve

ENABLED = Decision(COMPILED, "enabled", "requested", "", 1.5, {"form_s": 0.5}, {"backend": "inductor"})
REFUSED = Decision(COMPILED, "refused", "requested", "gain 0.90, expected at least 1.1", 0.9, {"form_s": 2.0})
NOT_BUILT = Decision(COMPILED, "refused", "requested", "not installed")
DISABLED = Decision(COMPILED, "disabled", "a batch", "RuntimeError: it broke")


def step(version: AttachedVersion, name: str = COMPILED) -> dict[str, Any]:
    """The report's entry of a step."""
    steps: Any = version_entry(version)["steps"]
    (entry,) = [entry for entry in steps if entry["step"] == name]
    return dict(entry)


def test_an_entry_is_plain_data():
    """Operators read it as JSON: names, figures and steps in the order of their levels."""
    version = attached()
    serve(version, 2)
    entry = version_entry(version)
    assert json.loads(json.dumps(entry)) == entry
    figures: Any = entry["profile"]
    assert (figures["forwards"], figures["rows"], figures["rows_per_s"]) == (2, 8, 4.0)
    assert entry["goldens"] == {"jobs": 8, "bytes": 8 * 32}
    assert (entry["version"], entry["content_hash"], entry["level"], entry["form"]) == ("1", "ab" * 32, 0, "eager")
    steps: Any = entry["steps"]
    assert [each["step"] for each in steps] == [COMPILED, BATCHING, "bf16", "int8"]


def test_without_goldens_there_is_no_count_of_them():
    """In `hashes_only` no inputs are kept, whatever was served."""
    version = attached(has_goldens=False)
    serve(version, 2)
    assert version_entry(version)["goldens"] is None


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, "waiting"),
        ({"level_state": replay([ENABLED])}, "on"),
        ({"level_state": replay([REFUSED])}, "refused"),
        ({"level_state": replay([ENABLED, DISABLED])}, "disabled"),
        ({"level_state": replay([REFUSED]), "requested": frozenset({COMPILED})}, "waiting"),
        ({"earlier": {COMPILED: REFUSED}}, "refused"),
        ({"earlier": {COMPILED: NOT_BUILT}}, "waiting"),
        ({"earlier": {COMPILED: ENABLED}}, "waiting"),
        ({"level_state": replay([Decision("bf16", "enabled", gain=2.0)])}, "not tried"),
    ],
    ids=["no decision", "on", "refused", "disabled", "requested", "measured", "not built", "accepted", "higher form"],
)
def test_the_state_of_a_step(fields: dict[str, Any], state: str):
    """A step waits while it may still be tried, also after a decision that does not forbid it."""
    assert step(attached(**fields))["state"] == state


def test_a_step_beyond_the_setting_is_not_allowed():
    """Its measurement is shown all the same, so that an operator learns what a higher level would gain."""
    version = attached(measured={COMPILED: ENABLED})
    version.max_level = 1
    entry = step(version)
    assert (entry["state"], entry["gain"], entry["criterion"]) == ("not allowed", 1.5, "max_level 1 < 2")


def test_the_newest_measurement_is_shown():
    """This process's decision comes before its trials without use, and those before earlier processes."""
    version = attached(earlier={COMPILED: Decision(COMPILED, "enabled", gain=3.0)})
    assert step(version)["gain"] == 3.0
    version.measured[COMPILED] = Decision(COMPILED, "enabled", gain=2.0)
    assert step(version)["gain"] == 2.0
    version.level_state = LevelState().apply(ENABLED)
    entry = step(version)
    assert (entry["gain"], entry["evidence"], entry["made"]) == (1.5, {"form_s": 0.5}, {"backend": "inductor"})
    assert entry["criterion"] == "requested"


def test_a_waiting_step_says_what_it_waits_for():
    """Not by which criterion it was tried before; the former reason stays visible."""
    entry = step(attached(earlier={COMPILED: NOT_BUILT}))
    assert (entry["criterion"], entry["reason"], entry["gain"]) == ("forwards 0 < 20", "not installed", None)


@pytest.mark.parametrize(
    ("decision", "line"),
    [
        (ENABLED, "compiled enabled, 1.50 times as fast as the form in use"),
        (
            REFUSED,
            "compiled refused, 0.90 times as fast as the form in use: gain 0.90, expected at least 1.1",
        ),
        (NOT_BUILT, "compiled refused: not installed"),
        (Decision(BATCHING, "enabled"), "batching enabled"),
    ],
)
def test_a_decision_is_one_line(decision: Decision, line: str):
    """The gain and the reason stand in it where there are any."""
    assert described(decision) == line
