"""The audit log gives the state of every experiment: what operators do, and what was refused."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.safety.audit_chain import AuditEntry
from penstock.safety.experiment_replay import replayed_experiments
from penstock.safety.rollout import ROLLOUT_DECISION

SHARES = {"1": 0.75, "2": 0.25}


def entry(result: str, *, experiment: str = "ab-1", operation: str = ROLLOUT_DECISION, **details: Any) -> AuditEntry:
    return AuditEntry(1, 7.0, operation, "mlp", "", result, {"experiment": experiment, **details})


@pytest.mark.parametrize(
    ("results", "status", "shares"),
    [
        (["pause"], "paused", SHARES),
        (["pause", "resume"], "running", SHARES),
        (["hold"], "running", SHARES),
        (["stop"], "stopped", {}),
        (["refused"], "stopped", {}),
        (["pause", "what nobody knows"], "paused", SHARES),
    ],
)
def test_the_last_entry_says_the_state(results: list[str], status: str, shares: dict[str, float]):
    """Shares stay until an entry changes them, and end with the experiment."""
    states = replayed_experiments([entry("begin", shares=SHARES), *map(entry, results)])
    assert {key: (state.status, state.shares) for key, state in states.items()} == {("mlp", "ab-1"): (status, shares)}


def test_experiments_do_not_mix():
    """Nor do entries of other operations."""
    entries = [
        entry("begin", shares=SHARES),
        entry("begin", experiment="rollout-2", shares={"1": 1.0}),
        entry("stop", operation="optimization_state"),
        entry("roll_back", experiment="rollout-2", reason="FAIL"),
    ]
    states = replayed_experiments(entries)
    assert states["mlp", "ab-1"].shares == SHARES
    assert (states["mlp", "rollout-2"].status, states["mlp", "rollout-2"].reason) == ("stopped", "FAIL")
