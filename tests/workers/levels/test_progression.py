"""When a step is tried, and the state that decisions lead to (AR-036, CF-004)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.levels.progression import THRESHOLDS, Decision, Evidence, is_form, readiness, replay

PLENTY = Evidence(forwards=10**6, texts=10**6, golden_rows=10**6, forward_s=1e6)
SHORTFALLS = [
    # step, what the evidence lacks, and the criterion that says so
    ("tokenizer-cache", {"texts": 31}, "texts 31 < 32"),
    ("tokenizer-pool", {"texts": 255}, "texts 255 < 256"),
    ("tokenizer-pool", {"golden_rows": 15}, "golden_rows 15 < 16"),
    ("batching", {"golden_rows": 15}, "golden_rows 15 < 16"),
    ("compiled", {"forwards": 19}, "forwards 19 < 20"),
    ("compiled", {"golden_rows": 15}, "golden_rows 15 < 16"),
    ("compiled", {"forward_s": 59.9}, "forward_s 59.9 < 60"),
    ("prepacked", {"forwards": 19}, "forwards 19 < 20"),
    ("prepacked", {"golden_rows": 15}, "golden_rows 15 < 16"),
    ("prepacked", {"forward_s": 1.9}, "forward_s 1.9 < 2"),
    ("bf16", {"forwards": 19}, "forwards 19 < 20"),
    ("bf16", {"golden_rows": 15}, "golden_rows 15 < 16"),
    ("bf16", {"forward_s": 1.9}, "forward_s 1.9 < 2"),
    ("compiled-bf16", {"forward_s": 59.9}, "forward_s 59.9 < 60"),
    ("onnx", {"forward_s": 59.9}, "forward_s 59.9 < 60"),
    ("int8", {"golden_rows": 0}, "golden_rows 0 < 16"),
]
LEVELS = {
    0: set(),
    1: {"tokenizer-cache", "tokenizer-pool"},
    2: {"tokenizer-cache", "tokenizer-pool", "batching", "prepacked", "compiled", "onnx"},
    3: set(THRESHOLDS),
}


@pytest.mark.parametrize(("step", "lacking", "criterion"), SHORTFALLS)
def test_step_waits_for_what_is_lacking(step: str, lacking: dict[str, Any], criterion: str):
    """Each criterion holds by itself: with plenty of all other evidence the step waits and names the criterion."""
    waits = readiness(step, replace(PLENTY, **lacking), 3)
    assert (waits.is_ready, waits.criterion) == (False, criterion)


@pytest.mark.parametrize("step", THRESHOLDS)
def test_step_is_tried_exactly_at_its_thresholds(step: str):
    """The numbers of the table are sufficient, and they are named in the criterion."""
    row = THRESHOLDS[step]
    exactly = Evidence(row.min_forwards, row.min_texts, row.min_golden_rows, row.min_forward_s)
    found = readiness(step, exactly, 3)
    assert found.is_ready
    assert found.criterion.count(">=") == sum(
        bool(least)
        for least in (
            row.min_forwards,
            row.min_texts,
            row.min_golden_rows,
            row.min_forward_s,
        )
    )


@pytest.mark.parametrize(("max_level", "allowed"), LEVELS.items())
def test_max_level_bounds_the_steps(max_level: int, allowed: set[str]):
    """0: only profiling; 1: the tokenizer; 2: batching and forms of one precision; 3: other precisions too (CF-004)."""
    assert {step for step in THRESHOLDS if readiness(step, PLENTY, max_level).is_ready} == allowed


@pytest.mark.parametrize("waiver", ["is_requested", "was_accepted"])
def test_requested_or_accepted_step_need_not_run_for_a_minute(waiver: str):
    """The forward time is waived, the goldens never: without them no form can be compared."""
    young = Evidence(
        forwards=1,
        golden_rows=16,
        is_requested=waiver == "is_requested",
        was_accepted=waiver == "was_accepted",
    )
    found = readiness("compiled", young, 3)
    assert found.is_ready
    assert found.criterion.startswith("requested" if waiver == "is_requested" else "accepted before")
    assert not readiness("compiled", replace(young, golden_rows=15), 3).is_ready
    assert not readiness("compiled", young, 1).is_ready


def test_each_long_build_asks_for_another_minute():
    """For any number of candidates, builds take a bounded share of the time of the model's forwards."""
    evidence = replace(PLENTY, forward_s=119.0, long_builds=1)
    assert readiness("onnx", evidence, 3).criterion == "forward_s 119 < 120"
    assert readiness("onnx", replace(evidence, forward_s=120.0), 3).is_ready
    for quick in ("bf16", "prepacked"):
        assert readiness(quick, replace(evidence, forward_s=2.0), 3).is_ready


IN_VAIN = [
    # the step, the form in use and what it gains over the eager model, and why no trial is worthwhile
    ("compiled", "bf16", 1.2, "bf16 is in use, of a higher level"),
    ("prepacked", "bf16", 1.2, "bf16 is in use, of a higher level"),
    ("onnx", "bf16", 1.2, ""),
    ("onnx", "prepacked", 1.3, ""),
    ("onnx", "bf16", 3.3, "bf16 is 3.3 times as fast as the eager model; onnx was at most 2 times"),
    ("int8", "bf16", 4.0, "bf16 is 4.0 times as fast as the eager model; int8 was at most 4 times"),
    ("int8", "bf16", 3.3, ""),
    ("onnx", "compiled", 1.5, ""),
    ("compiled-bf16", "bf16", 30.0, ""),
    ("onnx", "eager", 1.0, ""),
    ("onnx", "onnx", 30.0, ""),
    ("batching", "bf16", 30.0, ""),
]


@pytest.mark.parametrize(("step", "form", "gain", "reason"), IN_VAIN)
def test_form_that_cannot_win_is_not_tried(step: str, form: str, gain: float, reason: str):
    """A form with a long build that never was as fast as the form in use is built on request only."""
    evidence = replace(PLENTY, form=form, form_gain=gain)
    found = readiness(step, evidence, 3)
    assert (found.is_ready, found.is_in_vain) == (not reason, bool(reason))
    assert not reason or found.criterion.startswith(reason)
    assert readiness(step, replace(evidence, is_requested=True), 3).is_ready
    assert readiness(step, replace(evidence, was_accepted=True), 3).is_ready is (step not in ("compiled", "prepacked"))


def test_gains_of_forms_that_replace_each_other_multiply():
    """Each gain was measured against the form in use. After a fall-back to the eager model the gain is 1."""
    faster = replay([Decision("bf16", "enabled", gain=3.0), Decision("compiled-bf16", "enabled", gain=1.5)])
    assert faster.form_gain == 4.5
    assert faster.apply(Decision("batching", "enabled")).form_gain == 4.5
    assert faster.apply(Decision("onnx", "refused", gain=0.5)).form_gain == 4.5
    assert faster.apply(Decision("compiled-bf16", "disabled")).form_gain == 1.0


def test_enabled_form_replaces_the_one_in_use():
    """One form is in use at a time; other steps stay enabled."""
    level_state = replay([Decision(step, "enabled") for step in ("batching", "compiled", "bf16")])
    assert (level_state.enabled, level_state.form, level_state.level) == (frozenset({"batching", "bf16"}), "bf16", 3)


def test_disabled_form_leaves_the_reference():
    """A disabled form is no longer in use, and the other steps stay enabled."""
    steps = [Decision("batching", "enabled"), Decision("bf16", "enabled"), Decision("bf16", "disabled", reason="NaN")]
    level_state = replay(steps)
    assert (level_state.enabled, level_state.form, level_state.level) == (frozenset({"batching"}), "eager", 2)
    assert level_state.settled["bf16"].reason == "NaN"


def test_refused_form_leaves_the_one_in_use():
    """A candidate that fails its trial changes only its own decision."""
    level_state = replay([Decision("bf16", "enabled"), Decision("int8", "refused", reason="cosine")])
    assert (level_state.enabled, level_state.form) == (frozenset({"bf16"}), "bf16")
    assert set(level_state.settled) == {"bf16", "int8"}


DECISIONS = st.builds(
    Decision, st.sampled_from(sorted(THRESHOLDS)), st.sampled_from(["enabled", "disabled", "refused"])
)


@given(st.lists(DECISIONS, max_size=30), st.integers(0, 30))
def test_state_is_always_consistent(decisions: list[Decision], cut: int):
    """At most one form is on and it is the one in use; a log that is replayed in two parts gives the same."""
    level_state = replay(decisions)
    forms = {step for step in level_state.enabled if is_form(step)}
    assert forms == ({level_state.form} if level_state.form != "eager" else set())
    resumed = replay(decisions[:cut])
    for decision in decisions[cut:]:
        resumed = resumed.apply(decision)
    assert resumed == level_state
    assert level_state.level == max((THRESHOLDS[step].level for step in level_state.enabled), default=0)
