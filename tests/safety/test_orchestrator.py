"""One gate before anything serves: it names every reason, and its figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from penstock.registry.tensors import Array
from penstock.safety.audit_chain import AuditEntry
from penstock.safety.orchestrator import (
    GateDecision,
    GateEvidence,
    OptimizationState,
    SafetyOrchestrator,
    StateKey,
    Subject,
    joined,
    judge,
    replayed,
)
from penstock.safety.validators import EmbeddingValidator, ExactValidator, TensorValidator

TOLERANCE = 1e-5
STRICT = {"y": TensorValidator(TOLERANCE, TOLERANCE)}


def batches(error: float = 0.0) -> Sequence[dict[str, Array]]:
    """Two batches of zeros, each number off by `error`: there the tolerance is `atol` alone."""
    return [{"y": np.full((rows, 3), error, np.float64)} for rows in (4, 2)]


@pytest.mark.parametrize(("error", "accepted"), [(0.0, True), (0.5, True), (-0.5, True), (2.0, False), (-2.0, False)])
def test_half_the_tolerance_passes_and_twice_does_not(error: float, accepted: bool):
    """An injected error of 0.5 x tolerance is accepted, 2 x refused (CF-016)."""
    verdict = judge(batches(error * TOLERANCE), batches(), STRICT)
    assert verdict.accepted is accepted
    assert verdict.figures["y.max_error_ratio"] == pytest.approx(abs(error))
    assert verdict.figures["rows"] == 6


def test_every_reason_is_named():
    """An operator sees at once all that is wrong."""
    golden = [{"y": np.zeros((2, 3)), "v": np.eye(2, 3), "label": np.arange(2)}]
    candidate = [{"y": np.ones((2, 3)), "v": np.ones((2, 3)), "label": np.arange(2)}]
    verdict = judge(candidate, golden, {**STRICT, "v": EmbeddingValidator(), "label": ExactValidator()})
    assert [reason.partition(" ")[0] for reason in verdict.reasons] == ["y:", "v:"]
    assert verdict.figures["label.agreement"] == 1


def test_missing_output_and_wrong_shape_are_refused():
    """A candidate that answers less than the model does never serves, in whichever batch it does so."""
    golden = batches()
    assert judge([golden[0], {}], golden, STRICT).reasons == ("y: missing",)
    narrow = [golden[0], {"y": golden[1]["y"][:, :2]}]
    assert judge(narrow, golden, STRICT).reasons == ("y: shape (2, 2), expected (2, 3)",)


def test_too_few_golden_rows_prove_nothing():
    """Equal outputs of too few rows are refused, and so are none at all."""
    assert judge(batches(), batches(), STRICT, min_rows=6).accepted
    assert judge(batches(), batches(), STRICT, min_rows=7).reasons == ("6 golden rows, expected at least 7",)
    assert judge([], [], STRICT).reasons == ("0 golden rows, expected at least 1",)


def test_nan_anywhere_is_refused():
    """One NaN in one row of one batch."""
    candidate = batches()
    candidate[1]["y"][1, 2] = np.nan
    assert judge(candidate, batches(), STRICT).reasons == ("y: NaN or infinity, expected finite numbers (1 of 6 rows)",)


def test_rows_of_different_widths_are_judged_together():
    """Batches of sequences of different lengths are one run."""
    golden = [{"y": np.ones((1, 2))}, {"y": np.ones((1, 3))}]
    assert joined(golden)["y"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert judge(golden, golden, STRICT).accepted


def test_without_validators_nothing_is_proved():
    """A candidate whose outputs are not compared is refused."""
    assert judge(batches(), batches(), {}).reasons == (
        "no output has a validator, expected one for at least one output",
    )


def test_another_number_of_batches_is_refused():
    """A run that is cut short is no proof."""
    assert judge(batches()[:1], batches(), STRICT).reasons == ("y: 1 batches, expected 2",)


# The gate

MLP = Subject("mlp", "2", "ab" * 32)


class Recorder:
    """What the gate recorded, in order."""

    def __init__(self) -> None:
        self.decisions: list[GateDecision] = []

    def __call__(self, decision: GateDecision) -> None:
        self.decisions.append(decision)


def test_every_decision_is_recorded_once_with_its_evidence():
    """AR-013, AR-029: accepted, refused and disabled are one record each, which is what the caller gets."""
    recorder = Recorder()
    gate = SafetyOrchestrator(recorder)
    good = GateEvidence((), judge(batches(), batches(), STRICT), {"form_s": 0.5}, 2.0, 1.1, {"backend": "x"})
    accepted = gate.gate_optimization("compiled", MLP, good, level=2, criterion="20 forwards")
    refused = gate.gate_optimization("int8", MLP, GateEvidence(judgement=judge(batches(1.0), batches(), STRICT)))
    disabled = gate.disable_optimization("compiled", MLP, "NaN", level=2, criterion="it failed at serving")
    assert recorder.decisions == [accepted, refused, disabled]
    assert [one.action for one in recorder.decisions] == ["enabled", "refused", "disabled"]
    assert [one.accepted for one in recorder.decisions] == [True, False, False]
    assert accepted.evidence == {"rows": 6.0, "y.max_error": 0.0, "y.max_error_ratio": 0.0, "form_s": 0.5}
    assert (accepted.validators, accepted.gain, accepted.made) == ({"y": "TensorValidator"}, 2.0, {"backend": "x"})
    assert (accepted.verdict, refused.verdict) == ("PASS", "FAIL")
    assert refused.reason == "y: max_error_ratio 1e+05, expected at most 1"


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        (GateEvidence(), "no evidence, expected at least one figure"),
        (GateEvidence(figures={"seconds": np.inf}), "no evidence, expected at least one figure"),
        (GateEvidence(("no compiler",)), "no compiler"),
        (GateEvidence(gain=1.05, min_gain=1.1), "gain 1.05, expected at least 1.1"),
        (GateEvidence(gain=np.nan, min_gain=1.1), "gain nan, expected at least 1.1"),
        (GateEvidence(("late",), gain=1.0, min_gain=1.1), "late; gain 1.00, expected at least 1.1"),
    ],
)
def test_the_gate_says_no_with_the_reason(evidence: GateEvidence, reason: str):
    """A problem, too small a gain, and no evidence at all: none is switched on."""
    decision = SafetyOrchestrator(Recorder()).gate_optimization("compiled", MLP, evidence)
    assert (decision.action, decision.reason) == ("refused", reason)


def test_a_decision_that_cannot_be_recorded_is_none():
    """The caller gets the recorder's error in place of a decision."""

    def is_full(_: GateDecision) -> None:
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        SafetyOrchestrator(is_full).gate_optimization("compiled", MLP, GateEvidence(gain=2.0))


def entry(number: int, name: str, result: str, operation: str = "optimization_state", **details: object) -> AuditEntry:
    facts = {"run": "r", "content_hash": "ab", "level": 2, "reason": "", **details}
    return AuditEntry(number, float(number), operation, "mlp", name, result, facts)


def test_the_log_alone_gives_every_state():
    """AR-029: the last entry counts, a form ends the one before it, and processes do not mix."""
    log = [
        entry(1, "batching", "enabled"),
        entry(2, "compiled", "PASS", "gate_decision"),
        entry(3, "compiled", "enabled"),
        entry(4, "bf16", "enabled", level=3, replaces="compiled"),
        entry(5, "int8", "refused", level=3, reason="y: min_cosine 0.98"),
        entry(6, "bf16", "disabled", level=3, reason="NaN"),
        entry(7, "compiled", "enabled", run="other"),
        entry(8, "x", "register", "registry_change"),
        entry(9, "y", "paused"),
    ]
    states = replayed(log)
    key = StateKey("r", "mlp", "ab", "compiled")
    assert states == {
        key._replace(optimization="batching"): OptimizationState("enabled", 2, 1.0),
        key: OptimizationState("disabled", 3, 4.0, "bf16 replaces it"),
        key._replace(optimization="bf16"): OptimizationState("disabled", 3, 6.0, "NaN"),
        key._replace(optimization="int8"): OptimizationState("refused", 3, 5.0, "y: min_cosine 0.98"),
        key._replace(run="other"): OptimizationState("enabled", 2, 7.0),
    }
    assert [name.optimization for name, state in states.items() if state.is_on] == ["batching", "compiled"]
