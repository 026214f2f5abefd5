"""The log of decisions: what is read back, for which content and machine. For its use see test_optimizer.py."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.registry.errors import InvalidInput
from penstock.safety.orchestrator import Action
from penstock.workers.levels.decision_log import DecisionKey, DecisionLog, environment
from penstock.workers.levels.progression import Decision

KEY = DecisionKey("rotation", "1", "ab" * 32, "a machine")
NOW = 1_000_000.0
DAY_S = 86_400.0


@pytest.fixture
def log(tmp_path: Path) -> DecisionLog:
    """The log of one process, at a fixed time."""
    return DecisionLog(tmp_path, lambda: NOW)


def decided(action: Action, step: str = "compiled", gain: float | None = None) -> Decision:
    """A decision on a step."""
    return Decision(step, action, "forwards 20 >= 20", "" if action == "enabled" else "too slow", gain, {"rows": 3.0})


def file_of(home: Path) -> Path:
    """The file of the model's decisions."""
    return home / "decisions" / "rotation.jsonl"


def test_a_decision_is_read_back_as_it_was_written(log: DecisionLog, tmp_path: Path):
    """Its record also names the time, the process, the subject and the level."""
    decision = replace(decided("enabled", gain=1.5), made={"backend": "inductor", "graphs": 1})
    record = log.append(KEY, decision)
    assert json.loads(file_of(tmp_path).read_bytes()) == record
    assert {"time": NOW, "run": log.run, "content_hash": "ab" * 32, "level": 2}.items() <= record.items()
    assert DecisionLog(tmp_path).earlier(KEY) == {"compiled": decision}


@pytest.mark.parametrize(
    ("other", "is_known"),
    [
        (replace(KEY, version="2"), True),
        (replace(KEY, content_hash="cd" * 32), False),
        (replace(KEY, environment="another machine"), False),
        (replace(KEY, model="other"), False),
    ],
    ids=["label", "content", "environment", "model"],
)
def test_a_decision_holds_for_its_content_and_environment(log: DecisionLog, other: DecisionKey, is_known: bool):
    """The label of a version does not matter: the same content behaves the same under another label."""
    log.append(KEY, decided("enabled"))
    assert bool(log.earlier(other)) is is_known


@pytest.mark.parametrize(
    ("actions", "last"),
    [
        (["refused"], "refused"),
        (["refused", "enabled"], "enabled"),
        (["enabled", "refused"], "enabled"),
        (["enabled", "refused", "refused"], "refused"),
        (["enabled", "refused", "enabled", "refused"], "enabled"),
        (["enabled", "disabled"], "disabled"),
    ],
)
def test_the_first_refusal_after_an_enabled_step_is_ignored(log: DecisionLog, actions: list[Action], last: Action):
    """The second one in a row counts. A step that failed while it served is disabled at once."""
    for action in actions:
        log.append(KEY, decided(action))
        log.append(KEY, decided("enabled", "bf16"))
    found = {step: decision.action for step, decision in log.earlier(KEY).items()}
    assert found == {"compiled": last, "bf16": "enabled"}


@pytest.mark.parametrize(
    ("ages_s", "action"),
    [([0, 1], "enabled"), ([0, 1, 2], "refused"), ([0, 1, DAY_S], "enabled"), ([0, 1, DAY_S - 1], "refused")],
)
def test_three_deaths_within_a_day_refuse_a_form(tmp_path: Path, ages_s: list[float], action: str):
    """The refusal says so and counts as measured; an older death does not count."""
    log = DecisionLog(tmp_path, lambda: NOW)
    log.append(KEY, decided("enabled"))
    for age_s in ages_s:
        died_at = NOW - age_s
        DecisionLog(tmp_path, [died_at].pop).note_death("rotation", KEY.content_hash, "compiled")
    found = log.earlier(KEY)["compiled"]
    assert found.action == action
    if action == "refused":
        assert found.reason == "3 processes died within a day while it ran"
        assert found.evidence == {"deaths": 3}


def test_deaths_count_in_every_environment(log: DecisionLog):
    """A process that died could not say more than the model, the content and the form."""
    for _ in range(3):
        log.note_death("rotation", KEY.content_hash, "compiled")
    assert log.earlier(replace(KEY, environment="another machine"))["compiled"].action == "refused"
    assert log.earlier(replace(KEY, content_hash="cd" * 32)) == {}


def test_a_replay_follows_one_process_only(log: DecisionLog, tmp_path: Path):
    """Two processes of one home share the file; each has a mark of its own."""
    other = DecisionLog(tmp_path)
    log.append(KEY, decided("enabled", gain=2.0))
    other.append(KEY, decided("enabled", "bf16", gain=3.0))
    log.append(KEY, decided("disabled"))
    assert log.run != other.run
    states = [log.replayed(KEY, each.run) for each in (log, other)]
    assert [(state.form, state.form_gain, state.level) for state in states] == [("eager", 1.0, 0), ("bf16", 3.0, 3)]


@pytest.mark.parametrize(
    "fields",
    [
        {"step": "unknown"},
        {"step": None},
        {"action": "adored"},
        {"action": ["enabled"]},
        {"evidence": None},
        {"gain": "much"},
    ],
)
def test_a_foreign_line_is_no_decision(log: DecisionLog, tmp_path: Path, fields: dict[str, Any]):
    """Another program may write into the file: such a line changes nothing."""
    log.append(KEY, decided("enabled"))
    record = json.loads(file_of(tmp_path).read_bytes())
    with file_of(tmp_path).open("a") as file:
        file.write(json.dumps(record | {"action": "disabled"} | fields) + "\n[1]\nnull\n" + "[" * 100_000 + "\n")
    assert log.earlier(KEY) == {"compiled": decided("enabled")}


def test_one_older_file_is_kept(tmp_path: Path):
    """A file beyond the bound is renamed before the next line, and replaces the one that was renamed before."""
    log = DecisionLog(tmp_path, max_bytes=0)
    for step in ("compiled", "bf16", "int8"):
        log.append(KEY, decided("enabled", step))
    assert set(log.earlier(KEY)) == {"bf16", "int8"}
    assert sorted(path.name for path in file_of(tmp_path).parent.iterdir()) == ["rotation.jsonl", "rotation.jsonl.old"]


def test_a_file_that_cannot_be_trusted_is_an_error(log: DecisionLog, tmp_path: Path):
    """A link would lead the line elsewhere, and a model's name must not become another path."""
    file_of(tmp_path).parent.mkdir()
    os.symlink(tmp_path / "elsewhere", file_of(tmp_path))
    with pytest.raises(OSError, match="symbolic link"):
        log.append(KEY, decided("enabled"))
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(InvalidInput):
        log.append(replace(KEY, model="../rotation"), decided("enabled"))
    with pytest.raises(InvalidInput):
        log.note_death("../rotation", KEY.content_hash, "compiled")


def test_the_environment_names_frameworks_hardware_and_settings():
    """Another tolerance is another environment, so that forms are judged again."""
    named = environment("cpu", "tolerance 1e-05")
    frameworks = [part.split()[0] for part in named.split("; ")[:3]]
    assert frameworks == ["torch", "transformers", "onnxruntime"]
    assert "threads" in named
    assert named.endswith("; tolerance 1e-05")
    assert environment("cpu", "tolerance 1e-05") == named != environment("cpu", "tolerance 1e-06")
