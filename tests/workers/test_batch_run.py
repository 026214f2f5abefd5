"""One batch on its way: the model and the form that run it, its signs of progress, and the size to avoid."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from penstock.registry.broker.base import Held
from penstock.registry.envelope import Failure
from penstock.registry.package.spec_sections import Precision
from penstock.registry.tensors import Array
from penstock.workers.batching.forward_size import ForwardSize
from penstock.workers.process.crash_journal import FormInUse, NullJournal
from penstock.workers.runtime.base import Prepared
from penstock.workers.runtime.compilable import ModelCompiler
from penstock.workers.runtime.forms import Forms, Forward
from penstock.workers.versions.tuner import AnsweredJob
from tests.workers.doubles import Doubler, job_of, ready_version, run_of, spec_of, version_of

FAILED = Failure("ModelError", "ValueError: no")


class TunableDoubler(Doubler):
    """A doubler with another form, which triples."""

    precision: Precision = "auto"

    def __init__(self) -> None:
        self.forms = Forms(lambda prepared: {"y": prepared.payload * 2})
        self.forms.use("tripling", lambda prepared: {"y": prepared.payload * 3})

    def candidates(self, compiler: ModelCompiler | None) -> Mapping[str, Callable[[], Forward]]:
        return {}

    def run(self, prepared: Prepared) -> dict[str, Array]:
        return self.forms.run(prepared)


class Touches(NullJournal):
    """Remembers each sign of progress."""

    def __init__(self) -> None:
        self.seats: list[tuple[int, float]] = []

    def touch(self, seat: int, now: float) -> None:
        self.seats.append((seat, now))


def one_row() -> Prepared:
    return Prepared(1, np.ones((1, 1), np.float32))


@pytest.mark.parametrize(("is_as_built", "answer"), [(False, 3.0), (True, 2.0)])
def test_a_run_of_the_model_as_built_uses_no_other_form(is_as_built: bool, answer: float):
    """Another form answers other batches, and only then is named in the journal."""
    runtime = TunableDoubler()
    version = version_of(runtime, spec_of(), 16)
    run = run_of(version, job_of(1), is_as_built=is_as_built)
    assert float(run.forward(one_row())["y"][0, 0]) == answer
    form = None if is_as_built else FormInUse("double", Doubler.content_hash, "tripling")
    assert run.form_in_use == form
    runtime.forms.reset("it triples")
    assert run.form_in_use is None


def test_a_run_keeps_its_model_when_the_version_is_unloaded():
    """The content and the generation of its answers are those of its beginning."""
    runtime = TunableDoubler()
    version = version_of(runtime, spec_of(), 16)
    run = run_of(version, job_of(1))
    generation, content = version.generation, version.content_hash
    runtime.forms.reset("it triples")
    version.queue.cap_batches(ForwardSize(0, 8), 0.0)
    version.unload()
    assert version.content_hash == ""
    assert (run.generation, run.model.content_hash, run.max_rows) == (generation, content, 16)
    assert float(run.forward(one_row())["y"][0, 0]) == 2.0


def test_a_run_lists_its_jobs_as_the_broker_knows_them():
    """In the order of the batch."""
    first, second = job_of(1, 2), job_of(3)
    run = run_of(ready_version(), first, second)
    assert run.jobs == [first, second]
    delivery = second.delivery
    assert run.held[1] == Held("double", delivery.priority, delivery.entry_id, second.header.id)


def test_progress_is_noted_in_the_journal_of_its_seat():
    """The time limit counts anew from there, also for a watcher outside of the process."""
    run = run_of(ready_version(timeout_s=5), job_of(1))
    run.journal = journal = Touches()
    run.clock, run.seat, run.alive_at = lambda: 42.0, 3, 1.0
    run.touch()
    assert (run.alive_at, journal.seats, run.limit_s) == (42.0, [(3, 42.0)], 5.0)


def test_an_observer_sees_the_answered_jobs_only():
    """A failed job says nothing about the outputs of a form; its rows and time belong to the batch."""
    jobs = [job_of(1), job_of(2), job_of(3)]
    run = run_of(ready_version(), *jobs)
    outputs = {"y": np.ones((1, 1), np.float32)}
    run.answers, run.tokens, run.started, run.ended = [outputs, FAILED, outputs], 7, 10.0, 12.5
    observed = run.observation
    assert (observed.rows, observed.tokens, observed.seconds) == (3, 7, 2.5)
    answered = [AnsweredJob(job.header.id, job.inputs, outputs) for job in (jobs[0], jobs[2])]
    assert list(observed.answered(lambda _: True)) == answered
    assert list(observed.answered(lambda job_id: job_id == jobs[2].header.id)) == answered[1:]


@pytest.mark.parametrize(
    ("misfits", "fits", "too_large"),
    [
        ([], [(0, 16)], None),
        ([(0, 16), (0, 8)], [(0, 4)], (0, 8)),
        ([(0, 16), (0, 8), (0, 1)], [(0, 4)], (0, 8)),
        ([(0, 1)], [], None),
        ([(0, 4)], [(0, 8), (0, 2)], None),
        ([(800, 4), (400, 2)], [(500, 16)], (800, 4)),
        ([(800, 1)], [], None),
    ],
    ids=["all fitted", "the smallest of two", "one row", "only one row", "a larger one fitted", "tokens", "a long row"],
)
def test_the_size_to_avoid_is_the_smallest_misfit_above_everything_that_fitted(
    misfits: Sequence[tuple[int, int]], fits: Sequence[tuple[int, int]], too_large: tuple[int, int] | None
):
    """A forward of one row cannot be halved, and a misfit below a fit is the fault of its job."""
    run = run_of(ready_version(), job_of(1))
    for tokens, rows in misfits:
        run.did_not_fit(rows, tokens)
    for tokens, rows in fits:
        run.did_fit(Prepared(rows, None, tokens, tokens))
    assert run.too_large == (ForwardSize(*too_large) if too_large else None)


@pytest.mark.parametrize(
    ("seats", "is_alone", "crashes", "is_last"),
    [
        (0, False, 0, True),
        (4, False, 0, False),
        (4, False, 1, False),
        (4, True, 1, True),
        (4, False, 2, True),
    ],
)
def test_job_of_an_engine_has_another_forward_until_it_ran_alone(
    seats: int, is_alone: bool, crashes: int, is_last: bool
):
    """The jobs of an engine share its steps: one that hangs must not fail the others. The last crash is the last."""
    version = ready_version(1)
    version.policy = replace(version.policy, seats=seats, max_crashes=3)
    assert run_of(version, job_of(1, crashes=crashes), is_as_built=is_alone).is_last is is_last
