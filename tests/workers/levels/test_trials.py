"""Trials of steps: which of them may be used, and why the others are refused. For their use see test_optimizer.py."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from penstock.registry.errors import ConfigurationError
from penstock.safety.golden_store import GoldenStore
from penstock.safety.orchestrator import GateEvidence
from penstock.workers.levels.attached import AttachedVersion
from penstock.workers.levels.decision_log import DecisionKey
from penstock.workers.levels.profiler import Profiler
from penstock.workers.levels.progression import BATCHING, COMPILED, TOKENIZER_CACHE, TOKENIZER_POOL, Decision
from penstock.workers.levels.trials import Trial, Trials
from penstock.workers.observe.metrics import InferenceMetrics
from tests.workers.levels.fake_model import WIDTH, Clock, Form, Rotation, served

ROWS = 8
TOLERANCE = 1e-5
SAME = Form(lambda rows: rows)
TURNED = Form(lambda rows: rows[:, ::-1].copy())


class Stage:
    """A model with these forms, some served jobs of it, and its trials on a simulated clock."""

    def __init__(self, forms: Mapping[str, Form], *, jobs: int = 16, noise: float = 0.0) -> None:
        self.clock = Clock()
        self.runtime = Rotation(self.clock, forms, noise=noise)
        self.trials = Trials(TOLERANCE, InferenceMetrics((1.0,)), None, self.clock)
        profiler = Profiler(self.runtime, GoldenStore())
        key = DecisionKey("rotation", "1", self.runtime.content_hash, "a machine")
        self.version = AttachedVersion(key, self.runtime, profiler, tuple(forms), 3, ROWS, {})
        rng = np.random.default_rng(5)
        for first in range(0, jobs, ROWS):
            batch = [{"x": rng.standard_normal((1, WIDTH)).astype(np.float32)} for _ in range(ROWS)]
            served(self.runtime, self.clock, batch, profiler.observe, first)

    def run(self, step: str) -> Trial:
        """Try a step; whatever it finds, the model keeps its form."""
        trial = self.trials.run(self.version, step)
        assert self.runtime.forms.name == "eager"
        return trial


def test_an_equal_and_faster_form_passes():
    """The trial has the gain, the figures, and the forward that was judged."""
    stage = Stage({COMPILED: SAME})
    trial = stage.run(COMPILED)
    assert (trial.reason, trial.evidence.gain) == ("", 2.0)
    assert trial.forward is not None
    assert (trial.evidence.measured["in_use_s"], trial.evidence.measured["form_s"]) == (2.0, 1.0)
    prepared = stage.runtime.prepare([{"x": np.ones((1, WIDTH), np.float32)}])
    np.testing.assert_array_equal(trial.forward(prepared)["y"], stage.runtime.forms.reference(prepared)["y"])


def test_a_form_is_timed_against_the_form_in_use():
    """Not against the eager model: a form that is slower than the one in use must not replace it."""
    stage = Stage({COMPILED: SAME})
    in_use = stage.runtime.candidates(None)[COMPILED]()
    stage.runtime.forms.use("other", in_use)
    trial = stage.trials.run(stage.version, COMPILED)
    assert (trial.evidence.gain, trial.forward) == (1.0, None)
    assert trial.reason == "gain 1.00, expected at least 1.1"


@pytest.mark.parametrize("step", [COMPILED, "bf16", "int8"])
def test_other_outputs_are_refused(step: str):
    """Each precision has its own limits; rows that point elsewhere fail them all, and the form is not timed."""
    stage = Stage({step: TURNED})
    trial = stage.run(step)
    assert trial.reason
    assert (trial.evidence.gain, trial.forward) == (None, None)
    assert trial.evidence.measured
    assert trial.is_refuted
    assert "form_s" not in trial.evidence.measured


def test_a_small_error_passes_in_another_precision_only():
    """The tolerance is for forms of the same precision; the others are judged by the use of the output."""
    off = Form(lambda rows: rows + 100 * TOLERANCE * np.eye(1, WIDTH))
    stage = Stage({COMPILED: off, "bf16": off})
    assert [bool(stage.run(step).reason) for step in (COMPILED, "bf16")] == [True, False]


def test_a_model_that_does_not_repeat_its_answers_has_no_trial():
    """Its outputs cannot be compared with those of any form, so that no form is built: that takes minutes."""
    stage = Stage({COMPILED: Form(SAME.change, fails=RuntimeError("built"))}, noise=1.0)
    assert stage.run(COMPILED).reason.startswith("the model does not repeat its answers: ")


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        (ConfigurationError("not installed"), "not installed"),
        (RuntimeError("inside a framework"), "RuntimeError"),
    ],
)
def test_a_form_that_cannot_be_built_is_refused(fails: Exception, reason: str):
    """A framework may raise anything: the reason names the error, and nothing is raised."""
    trial = Stage({COMPILED: Form(SAME.change, fails=fails)}).run(COMPILED)
    assert reason in trial.reason
    assert (trial.evidence.gain, trial.forward) == (None, None)


def test_without_golden_jobs_there_is_nothing_to_compare():
    """Also a trace needs served jobs."""
    stage = Stage({COMPILED: SAME}, jobs=0)
    assert stage.run(COMPILED).reason == "no golden job fits into a batch"
    assert stage.trials.trace(stage.version, is_cuda=False) == "it cannot be traced: no golden job fits into a batch"


def test_a_tokenizer_step_needs_a_tokenizer():
    """The cache is compared with the tokenizer, and a pool of threads is measured."""
    stage = Stage({})
    assert stage.run(TOKENIZER_CACHE).reason == "nothing is loaded"
    assert stage.run(TOKENIZER_POOL).reason == "nothing is loaded"


def test_batching_is_compared_with_single_jobs():
    """Each golden job runs alone, too. One job for each forward proves nothing."""
    stage = Stage({})
    calls = stage.runtime.calls
    trial = stage.run(BATCHING)
    assert (trial.reason, trial.forward) == ("", None)
    # Two batches of eight, twice, and sixteen jobs alone.
    assert stage.runtime.calls - calls == 2 + 2 + 16
    assert trial.evidence.measured["jobs_alone"] == 16
    stage.version.max_rows = 1
    assert stage.run(BATCHING).reason == "no two golden jobs share a batch"


def test_a_trial_becomes_a_decision():
    """A trial with a reason is a refusal; all that is known goes with it."""
    made = {"backend": "inductor"}
    passed = Trial(GateEvidence((), None, {"form_s": 1.0}, 1.5, 1.1, made)).decision(COMPILED, "requested")
    assert passed == Decision(COMPILED, "enabled", "requested", "", 1.5, {"form_s": 1.0}, made)
    failed = Trial(GateEvidence(("too slow",), gain=0.5)).decision(COMPILED, "requested")
    assert (failed.action, failed.reason, failed.gain) == ("refused", "too slow", 0.5)


def test_how_a_form_was_made_goes_with_its_trial():
    """The builder says it, and the trial returns it unchanged, also when the form is refused."""
    made = {"backend": "inductor", "graphs": 1}
    for form in (SAME, TURNED):
        assert Stage({COMPILED: Form(form.change, made=made)}).run(COMPILED).evidence.made == made
