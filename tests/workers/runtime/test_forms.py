"""A form that fails costs no job its answer, and is not asked again."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from penstock.registry.broker.breakers import BreakerLimits
from penstock.registry.errors import OutOfMemory
from penstock.registry.tensors import Array
from penstock.safety.breaker import MemoryBreakers
from penstock.safety.fallback import FallbackChain
from penstock.workers.levels.shared_breakers import SharedBreakers
from penstock.workers.runtime.base import DeviceLost, Prepared
from penstock.workers.runtime.forms import EAGER, Forms
from penstock.workers.runtime.tracebacks import WITHHELD

BATCH = Prepared(2, np.ones((2, 3), np.float32))
Answer = Callable[[Prepared], dict[str, Array]]


def answers(value: float) -> Answer:
    return lambda prepared: {"y": np.full((prepared.rows, 3), value, np.float32)}


def raises(error: BaseException) -> Answer:
    def forward(prepared: Prepared) -> dict[str, Array]:
        raise error

    return forward


@pytest.fixture
def fallbacks() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def forms(fallbacks: list[tuple[str, str]]) -> Forms:
    """A reference that answers 1."""
    forms = Forms(answers(1), ("y",))
    forms.on_fallback = lambda name, reason: fallbacks.append((name, reason))
    return forms


def value_of(forms: Forms) -> float:
    return float(forms.run(BATCH)["y"][0, 0])


def test_reference_answers_until_another_form_is_used(forms: Forms):
    """A form answers from the next batch on, and the reference again after a reset."""
    assert (forms.name, value_of(forms)) == (EAGER, 1)
    forms.use("compiled", answers(2))
    assert (forms.name, value_of(forms)) == ("compiled", 2)
    forms.reset("told to")
    assert (forms.name, value_of(forms)) == (EAGER, 1)


@pytest.mark.parametrize(
    ("failing", "reason"),
    [
        (raises(ValueError("no kernel")), "ValueError: no kernel"),
        (answers(np.nan), "output y contains NaN or infinity"),
        (answers(-np.inf), "output y contains NaN or infinity"),
    ],
)
def test_failing_form_is_given_up_and_its_batch_answered(
    forms: Forms, fallbacks: list[tuple[str, str]], failing: Answer, reason: str
):
    """The very batch on which a form fails gets the reference's answer, and is the last that the form sees."""
    forms.use("compiled", failing)
    assert value_of(forms) == 1
    assert forms.name == EAGER
    assert fallbacks == [("compiled", reason)]
    assert value_of(forms) == 1
    assert len(fallbacks) == 1


def test_what_the_reference_does_too_is_not_held_against_a_form(fallbacks: list[tuple[str, str]]):
    """A bad input fails in every form: its error is the model's own, and the form stays."""
    error = ValueError("a negative row")
    forms = Forms(raises(error), ("y",))
    forms.on_fallback = lambda name, reason: fallbacks.append((name, reason))
    forms.use("compiled", raises(RuntimeError("the same, in other words")))
    with pytest.raises(ValueError, match="a negative row") as raised:
        forms.run(BATCH)
    assert raised.value.__context__ is None
    assert (forms.name, fallbacks) == ("compiled", [])


def test_nan_that_the_model_itself_answers_is_passed_on(fallbacks: list[tuple[str, str]]):
    """The executor fails the job whose answer is NaN; the form computed what the model computes."""
    forms = Forms(answers(np.nan), ("y",))
    forms.on_fallback = lambda name, reason: fallbacks.append((name, reason))
    forms.use("compiled", answers(np.nan))
    assert np.isnan(value_of(forms))
    assert (forms.name, fallbacks) == ("compiled", [])


def test_output_that_may_be_nan_is_not_looked_at(fallbacks: list[tuple[str, str]]):
    """Where the package allows NaN, a form may answer it."""
    forms = Forms(answers(1))
    forms.use("compiled", answers(np.nan))
    assert np.isnan(value_of(forms))
    assert forms.name == "compiled"


@pytest.mark.parametrize("error", [OutOfMemory("too large"), MemoryError(), DeviceLost("gone")])
def test_errors_of_the_device_pass_through(forms: Forms, fallbacks: list[tuple[str, str]], error: Exception):
    """A batch that does not fit is halved by the executor, in whatever form."""
    forms.use("compiled", raises(error))
    with pytest.raises(type(error)):
        forms.run(BATCH)
    assert (forms.name, fallbacks) == ("compiled", [])


def test_form_that_fails_on_two_threads_is_reported_once(fallbacks: list[tuple[str, str]]):
    """Two batches may meet the same bad form at the same time."""
    both_inside = threading.Barrier(2, timeout=180)

    def failing(prepared: Prepared) -> dict[str, Array]:
        both_inside.wait()
        raise ValueError("no kernel")

    forms = Forms(answers(1), ("y",))
    forms.on_fallback = lambda name, reason: fallbacks.append((name, reason))
    forms.use("compiled", failing)
    threads = [threading.Thread(target=forms.run, args=(BATCH,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert fallbacks == [("compiled", "ValueError: no kernel")]


def test_late_failure_of_a_replaced_form_leaves_its_successor_alone(forms: Forms, fallbacks: list[tuple[str, str]]):
    """A form that fails after it was replaced is gone already: the new one keeps serving."""

    def replaced_meanwhile(prepared: Prepared) -> dict[str, Array]:
        forms.use("bf16", answers(3))
        raise ValueError("no kernel")

    forms.use("compiled", replaced_meanwhile)
    assert value_of(forms) == 1
    assert (forms.name, value_of(forms), fallbacks) == ("bf16", 3, [])


class Interrupting(BaseException):
    """No Exception, and without a text."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


def test_a_form_may_raise_anything(forms: Forms, fallbacks: list[tuple[str, str]]):
    """Also what is no Exception: the reference answers, and the reason names the class."""
    forms.use("compiled", raises(Interrupting()))
    assert value_of(forms) == 1
    assert fallbacks == [("compiled", "Interrupting: (its message cannot be read)")]


def test_the_reason_of_a_failed_form_may_have_to_be_told_without_its_text(
    forms: Forms, fallbacks: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
):
    """The text may repeat an input: in a privacy mode neither the log nor the audit log has it."""
    forms.withholds_texts = True
    forms.use("compiled", raises(ValueError("4711")))
    assert value_of(forms) == 1
    assert fallbacks == [("compiled", f"ValueError: {WITHHELD}")]
    assert not any("4711" in str(vars(record)) for record in caplog.records)


def test_a_form_whose_breaker_is_open_does_not_run(forms: Forms, fallbacks: list[tuple[str, str]]):
    """The reference answers from the next batch on, and the form again once it is admitted; nothing is dropped."""
    is_open = False
    forms.admits = lambda name: not (is_open and name == "compiled")
    forms.use("compiled", answers(2))
    admitted = forms.generation
    assert (forms.name, value_of(forms)) == ("compiled", 2)
    assert forms.generation == admitted
    is_open = True
    assert (value_of(forms), forms.name) == (1, EAGER)
    suspended = forms.generation
    assert suspended != admitted
    assert (value_of(forms), forms.generation) == (1, suspended)
    is_open = False
    assert (value_of(forms), forms.name) == (2, "compiled")
    assert forms.generation not in (admitted, suspended)
    assert fallbacks == []


def test_a_form_that_is_put_in_use_while_its_breaker_is_open_waits(forms: Forms):
    """Another form of the same model is not concerned, and a reset drops the one that waits."""
    forms.admits = lambda name: name != "int8"
    forms.use("int8", answers(3))
    assert (forms.name, value_of(forms)) == (EAGER, 1)
    forms.use("compiled", answers(2))
    assert (forms.name, value_of(forms)) == ("compiled", 2)
    forms.use("int8", answers(3))
    forms.reset("told to")
    forms.admits = lambda name: True
    assert (forms.name, value_of(forms)) == (EAGER, 1)


def _guarded(breakers: SharedBreakers) -> Forms:
    """The forms of version 2 of minilm, with their shared breakers."""
    forms = Forms(answers(1), ("y",))
    forms.admits = lambda form: breakers.admits(f"minilm/2:{form}")
    forms.on_fallback = lambda form, reason: breakers.failed(f"minilm/2:{form}", reason)
    return forms


def test_a_tripped_breaker_stops_a_form_on_every_worker():
    """One worker's failure opens the shared breaker: the others run their reference from their next reading on."""
    now_s, name = 1000.0, "minilm/2:compiled"
    store, limits = MemoryBreakers(lambda: int(now_s * 1000)), BreakerLimits(failures=1)
    workers = [SharedBreakers(store, lambda: ["minilm"], limits=limits, clock=lambda: now_s) for _ in range(2)]
    models = []
    for breakers, form in zip(workers, (raises(RuntimeError("x")), answers(2)), strict=True):
        forms = _guarded(breakers)
        assert breakers.turn()
        forms.use("compiled", form)
        models.append(forms)
    assert [value_of(forms) for forms in models] == [1, 2]
    assert workers[0].turn()
    assert workers[0].record(name).reason == "RuntimeError: x"
    assert workers[1].turn()
    assert [value_of(forms) for forms in models] == [1, 1]


@pytest.mark.parametrize(
    ("failing", "reason"),
    [
        (raises(ValueError("no kernel")), "ValueError: no kernel"),
        (answers(np.nan), "output y contains NaN or infinity"),
    ],
)
def test_a_form_without_a_fallback_fails_its_jobs(
    forms: Forms, fallbacks: list[tuple[str, str]], failing: Answer, reason: str
):
    """`fallback_runtime: none`: the error, or the NaN that the executor refuses, goes on; the form stays (AR-023)."""
    failures: list[tuple[str, str]] = []
    forms.chain = FallbackChain(("micro-batched", "plain"))
    forms.on_failure = lambda name, told: failures.append((name, told))
    forms.use("compiled", failing)
    if "NaN" in reason:
        assert np.isnan(value_of(forms))
    else:
        with pytest.raises(ValueError, match="no kernel"):
            forms.run(BATCH)
    assert (forms.name, fallbacks, failures) == ("compiled", [], [("compiled", reason)])
