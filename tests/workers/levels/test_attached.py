"""A version as the optimizer knows it: which steps may be tried, and on what evidence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from penstock.safety.golden_store import GoldenStore
from penstock.safety.orchestrator import Action
from penstock.workers.levels.attached import AttachedVersion
from penstock.workers.levels.decision_log import DecisionKey
from penstock.workers.levels.profiler import Profiler
from penstock.workers.levels.progression import BATCHING, COMPILED, Decision
from tests.workers.levels.fake_model import WIDTH, Clock, Rotation, served

NOTHING: Mapping[str, Decision] = {}


def attached(
    *, earlier: Mapping[str, Decision] = NOTHING, max_rows: int = 8, has_goldens: bool = True, **fields: Any
) -> AttachedVersion:
    """A version of the model `rotation`, just attached."""
    runtime = Rotation(Clock(), {})
    profiler = Profiler(runtime, GoldenStore() if has_goldens else None)
    return AttachedVersion(
        DecisionKey("rotation", "1", runtime.content_hash, "a machine"),
        runtime,
        profiler,
        ("bf16", COMPILED, BATCHING, "int8"),
        3,
        max_rows,
        earlier,
        **fields,
    )


def serve(version: AttachedVersion, batches: int, rows: int = 4) -> None:
    """Batches of jobs of one row, each of which takes a second."""
    runtime = version.runtime
    assert isinstance(runtime, Rotation)
    for number in range(batches):
        jobs = [{"x": np.full((1, WIDTH), number * rows + row + 1, np.float32)} for row in range(rows)]
        served(runtime, runtime._clock, jobs, version.profiler.observe, number * rows)


def decision(action: Action, step: str = COMPILED, **evidence: float) -> Decision:
    """A decision on a step."""
    return Decision(step, action, evidence=evidence)


def test_steps_are_shown_by_level():
    """Steps of one level keep the order in which they are tried."""
    assert attached().steps_by_level == [COMPILED, BATCHING, "bf16", "int8"]


@pytest.mark.parametrize(
    ("earlier", "is_allowed"),
    [
        (decision("enabled"), True),
        (decision("disabled", form_s=2.0), True),
        (decision("refused"), True),
        (decision("refused", form_s=2.0), False),
    ],
    ids=["enabled", "disabled", "not built", "measured"],
)
def test_an_earlier_process_forbids_only_forms_that_it_measured(earlier: Decision, is_allowed: bool):
    """A form that could not be built may be built today; an operator may have any form tried again."""
    version = attached(earlier={COMPILED: earlier})
    assert version.may_try(COMPILED) is is_allowed
    version.requested = frozenset({COMPILED})
    assert version.may_try(COMPILED)


@pytest.mark.parametrize("action", ["refused", "disabled"])
def test_a_settled_step_is_tried_again_on_request_only(action: Action):
    """One decision of this process is enough; other steps are not affected."""
    version = attached()
    version.level_state = version.level_state.apply(decision(action))
    assert (version.may_try(COMPILED), version.may_try("bf16")) == (False, True)
    version.requested = frozenset({COMPILED})
    assert version.may_try(COMPILED)


def test_an_enabled_step_is_never_tried():
    """Not even on request: it is in use."""
    version = attached(requested=frozenset({COMPILED}))
    version.level_state = version.level_state.apply(decision("enabled"))
    assert not version.may_try(COMPILED)


def test_traffic_is_the_evidence():
    """Forwards, golden rows and seconds come from the observed batches."""
    version = attached()
    assert version.readiness("bf16").criterion == "forwards 0 < 20"
    serve(version, 20)
    found = version.readiness("bf16")
    assert (found.is_ready, found.criterion) == (True, "forwards 20 >= 20, golden_rows 64 >= 16, forward_s 20 >= 2")
    assert version.readiness(COMPILED).criterion == "forward_s 20 < 60"


def test_without_goldens_no_form_is_ready():
    """There is nothing to compare a form with, whatever was requested."""
    version = attached(has_goldens=False, requested=frozenset({"bf16"}))
    serve(version, 30)
    assert version.readiness("bf16").criterion == "golden_rows 0 < 16"


def test_requests_and_accepted_forms_need_no_minute_of_forwards():
    """One forward and the golden jobs are enough; the criterion names the origin."""
    version = attached(requested=frozenset({"int8"}), earlier={COMPILED: decision("enabled")})
    serve(version, 4)
    found = [version.readiness(step) for step in ("int8", COMPILED, "bf16")]
    assert [each.is_ready for each in found] == [True, True, False]
    assert [each.criterion.split(",")[0] for each in found[:2]] == ["requested", "accepted before"]


def test_each_long_build_makes_the_next_one_wait_longer():
    """A minute of forwards for the first, another one for the next."""
    version = attached()
    serve(version, 60)
    assert version.readiness(COMPILED).is_ready
    version.long_builds = 1
    assert version.readiness(COMPILED).criterion == "forward_s 60 < 120"


def test_batching_is_judged_on_golden_jobs():
    """It waits for them like a form; after a refusal the version forms no more batches."""
    version = attached()
    assert version.readiness(BATCHING).criterion == "golden_rows 0 < 16"
    serve(version, 4)
    assert version.readiness(BATCHING).criterion == "golden_rows 16 >= 16"
    version.end_batching()
    assert (version.max_rows, version.profiler.row_limit) == (1, 1)
