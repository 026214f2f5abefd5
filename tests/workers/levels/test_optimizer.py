"""A form is used after its trial passed, and only then; every decision is on record.

The model is a small one in NumPy. Its forms differ from it by as much as a test wants. The real forms of real models
are in test_optimizer_models.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.registry.broker.breakers import BreakerEnd
from penstock.registry.settings_sections import InferenceConfig
from penstock.registry.tensors import Array
from penstock.safety.golden_archive import GoldenArchive
from penstock.safety.sealing import DataKeys
from penstock.safety.validator_registry import ValidatorRegistry
from penstock.safety.validators import Comparison, Figure
from penstock.workers.levels.decision_log import DecisionKey, DecisionLog
from penstock.workers.levels.optimizer import InferenceOptimizer
from penstock.workers.levels.profiler import Profiler
from penstock.workers.levels.progression import Decision, LevelState, StepReadiness
from penstock.workers.observe.cost import CostEstimator, CostLedger
from penstock.workers.observe.metrics import BatchStats, InferenceMetrics
from penstock.workers.runtime.base import Prepared
from penstock.workers.runtime.compilable import CompilationRefused
from tests.servers import wait_until
from tests.workers.levels.fake_model import WIDTH, Clock, Form, Rotation, served

TOLERANCE = 1e-5
ROWS = 32
EMBEDDING_OFF_BY = 0.01
"""Turns a unit vector to a cosine of 0.9998 or better, and fails the tolerance a thousand times over."""


def off_by(error: float) -> Callable[[Array], Array]:
    """Adds to the first number of each row, in which the jobs here have 0: there the tolerance is atol alone."""
    return lambda rows: rows + error * np.eye(1, WIDTH)


def turned(rows: Array) -> Array:
    """Rows that point in other directions than their embeddings."""
    return rows[:, ::-1].copy()


@dataclass
class OptimizerHarness:
    """An optimizer, stepped in this thread, with one model attached."""

    home: Path
    runtime: Rotation
    clock: Clock
    config: InferenceConfig
    records: list[Mapping[str, object]] = field(default_factory=list)
    jobs: int = 0
    validators: ValidatorRegistry | None = None
    archive: GoldenArchive | None = None
    breakers: BreakerEnd | None = None
    audit: Callable[[Mapping[str, object]], None] | None = None
    """Gets what `records` gets."""
    content_hash: str = "ab" * 32

    def __post_init__(self) -> None:
        self.metrics = InferenceMetrics((1.0,), CostLedger(CostEstimator(hourly_rate=3.6)))
        self.optimizer = InferenceOptimizer(
            self.config,
            home=self.home,
            device="cpu",
            audit=self._audit,
            metrics=self.metrics,
            compiler=None,
            clock=self.clock,
            validators=self.validators,
            archive=self.archive,
            breakers=self.breakers,
        )
        self.profiler: Profiler = self.optimizer.attach("rotation", self.runtime, self.content_hash, ROWS)

    def _audit(self, facts: Mapping[str, object]) -> None:
        self.records.append(facts)
        if self.audit is not None:
            self.audit(facts)

    def serve(self, batches: int) -> list[Mapping[str, Array]]:
        """Serves this many batches of traffic; returns the outputs of each job."""
        answers: list[Mapping[str, Array]] = []
        for _ in range(batches):
            numbers = np.random.default_rng(self.jobs).standard_normal((ROWS, 1, WIDTH)).astype(np.float32)
            numbers[:, :, 0] = 0
            jobs = [{"x": rows} for rows in numbers]
            answers += served(self.runtime, self.clock, jobs, self.profiler.observe, self.jobs)
            self.jobs += ROWS
        return answers

    def settle(self) -> None:
        """Ticks until the optimizer has nothing left to do."""
        while self.optimizer.tick():
            pass

    @property
    def entry(self) -> dict[str, Any]:
        """The report's entry of the version."""
        (entry,) = self.optimizer.report()["rotation"]
        assert json.loads(json.dumps(entry)) == entry
        return entry

    def step(self, name: str) -> dict[str, Any]:
        """The report's line of a step."""
        (line,) = [line for line in self.entry["steps"] if line["step"] == name]
        return dict(line)

    def decided(self, *actions: str) -> list[tuple[object, object]]:
        """(step, action) of the audit's records."""
        return [(r["step"], r["action"]) for r in self.records if not actions or r["action"] in actions]


MakeHarness = Callable[..., OptimizerHarness]


@pytest.fixture
def make_harness(tmp_path: Path) -> MakeHarness:
    def make(
        forms: Mapping[str, Form],
        *,
        max_level: int = 2,
        noise: float = 0.0,
        config: Mapping[str, object] | None = None,
        package: Mapping[str, object] | None = None,
    ) -> OptimizerHarness:
        clock = Clock()
        settings = InferenceConfig.model_validate({"max_level": max_level, **(config or {})})
        return OptimizerHarness(tmp_path, Rotation(clock, forms, noise=noise, **(package or {})), clock, settings)

    return make


GOOD = Form(off_by(0.5 * TOLERANCE))
REDUCED = Form(off_by(EMBEDDING_OFF_BY), cost_s=0.25)


def test_level_0_changes_nothing_but_numbers(make_harness: MakeHarness):
    """Batches are counted and goldens kept. There is no form, no decision and no file (AR-052, CF-004)."""
    harness = make_harness({"compiled": GOOD, "bf16": REDUCED}, max_level=0)
    harness.serve(100)
    assert not harness.optimizer.tick()
    assert (harness.entry["level"], harness.entry["form"], harness.records) == (0, "eager", [])
    assert harness.entry["profile"]["forwards"] == 100
    assert harness.entry["goldens"]["jobs"] == 64
    assert {line["state"] for line in harness.entry["steps"]} == {"not allowed"}
    assert list(harness.home.iterdir()) == []


def test_goldens_appear_with_no_extra_model_call(make_harness: MakeHarness):
    """Goldens are served jobs: the model ran once for each batch (AR-061)."""
    harness = make_harness({"compiled": GOOD}, max_level=0)
    answers = harness.serve(2)
    harness.settle()
    goldens = harness.profiler.goldens
    assert goldens is not None
    assert harness.runtime.calls == 2
    for golden in goldens.goldens():
        np.testing.assert_array_equal(golden.outputs["y"], answers[int(golden.job_id.partition(".")[2], 16)]["y"])


@pytest.mark.parametrize(("error", "form"), [(0.5, "compiled"), (2.0, "eager")])
def test_candidate_serves_within_the_tolerance_only(make_harness: MakeHarness, error: float, form: str):
    """Half the tolerance is accepted; twice is refused, and the original keeps serving (CF-016, AR-055)."""
    harness = make_harness({"compiled": Form(off_by(error * TOLERANCE))})
    before = harness.serve(61)[0]
    harness.settle()
    assert harness.runtime.forms.name == harness.entry["form"] == form
    harness.jobs = 0
    after = harness.serve(1)[0]
    shift = float(after["y"][0, 0] - before["y"][0, 0])
    assert shift == pytest.approx(0.5 * TOLERANCE if form == "compiled" else 0.0, rel=1e-3)
    assert harness.step("compiled")["evidence"]["y.max_error_ratio"] == pytest.approx(error, rel=1e-3)


def test_nothing_is_swapped_before_the_verdict(make_harness: MakeHarness):
    """While a form is built the reference answers (AR-055)."""
    harness = make_harness({"compiled": GOOD})
    seen: list[str] = []

    def serve_meanwhile() -> None:
        harness.serve(1)
        seen.append(harness.runtime.forms.name)

    harness.runtime.while_building = serve_meanwhile
    harness.serve(61)
    harness.settle()
    assert seen == ["eager"]
    assert harness.runtime.forms.name == "compiled"


def test_short_traffic_never_compiles(make_harness: MakeHarness):
    """A minute of forwards comes first, so tests and demos do not compile by surprise."""
    harness = make_harness({"compiled": GOOD})
    harness.serve(59)
    harness.settle()
    assert harness.decided() == [("batching", "enabled")]
    assert harness.step("compiled")["criterion"] == "forward_s 59 < 60"
    harness.serve(1)
    harness.settle()
    assert harness.decided() == [("batching", "enabled"), ("compiled", "enabled")]


def test_every_level_is_a_decision_with_its_evidence(make_harness: MakeHarness):
    """Batching, a compiled form and a reduced one: one record each, with criterion, figures and gain (AR-012)."""
    harness = make_harness({"compiled": GOOD, "bf16": REDUCED}, max_level=3)
    harness.serve(20)
    harness.settle()
    assert harness.decided() == [("batching", "enabled"), ("bf16", "enabled")]
    batching, reduced = harness.records
    assert (batching["level"], batching["criterion"]) == (2, "golden_rows 64 >= 16")
    assert batching["evidence"] == {"rows": 32.0, "y.min_cosine": pytest.approx(1), "y.neighbour_overlap": 1.0} | {
        "jobs_alone": 32.0
    }
    assert (batching["validators"], reduced["validators"]) == ({"y": "EmbeddingValidator"},) * 2
    assert (reduced["level"], reduced["gain"]) == (3, 4.0)
    assert reduced["criterion"] == "forwards 20 >= 20, golden_rows 64 >= 16, forward_s 20 >= 2"
    figures = reduced["evidence"]
    assert isinstance(figures, dict)
    assert 0.999 <= figures["y.min_cosine"] < 1
    assert {name: reduced[name] for name in ("model", "version", "content_hash")} == {
        "model": "rotation",
        "version": "1",
        "content_hash": "ab" * 32,
    }
    assert harness.entry["level"] == 3


def test_lower_form_is_not_built_when_a_higher_one_serves(make_harness: MakeHarness):
    """A compiled fp32 form would lose against the bf16 form in use."""
    harness = make_harness({"compiled": GOOD, "bf16": REDUCED}, max_level=3)
    harness.serve(20)
    harness.settle()
    harness.serve(400)
    harness.settle()
    assert [step for step, _ in harness.decided()] == ["batching", "bf16"]


def test_slow_builds_are_left_out_where_they_cannot_win(make_harness: MakeHarness):
    """Where bf16 is much faster, nothing is exported and `levels` says why. A measurement tries these forms too."""
    forms = {"compiled": GOOD, "bf16": REDUCED, "onnx": Form(off_by(0), 0.9), "int8": Form(turned, 0.1)}
    harness = make_harness(forms, max_level=3)
    harness.serve(1000)
    harness.settle()
    assert [step for step, _ in harness.decided()] == ["batching", "bf16"]
    assert {name: harness.step(name)["state"] for name in forms} == {
        "compiled": "not tried",
        "bf16": "on",
        "onnx": "not tried",
        "int8": "not tried",
    }
    assert harness.step("onnx")["criterion"].startswith("bf16 is 4.0 times as fast as the eager model; onnx was at")
    answer = harness.optimizer.ask("rotation", "measure")
    harness.settle()
    assert "onnx refused, 0.28 times as fast as the form in use" in answer.result(0)
    assert harness.step("onnx")["gain"] == pytest.approx(0.278, abs=1e-3)
    assert "min_cosine" in harness.step("int8")["reason"]


@pytest.mark.parametrize(("own", "setting", "level"), [(None, 4, 3), (None, 2, 2), (1, 4, 1), (3, 2, 2), (0, 4, 0)])
def test_level_4_reads_as_3_and_the_package_may_ask_for_less(
    make_harness: MakeHarness, own: int | None, setting: int, level: int
):
    """The lower of setting and package holds (CF-004)."""
    harness = make_harness({"bf16": REDUCED}, max_level=setting, package={"max_level": own})
    assert harness.entry["max_level"] == level


def test_embedding_that_points_elsewhere_is_refused(make_harness: MakeHarness):
    """A form of another precision is judged by the use of the output (AR-056)."""
    harness = make_harness({"int8": Form(turned, cost_s=0.1)}, max_level=3)
    harness.serve(61)
    harness.settle()
    assert harness.decided("refused") == [("int8", "refused")]
    assert "min_cosine" in harness.step("int8")["reason"]
    assert (harness.runtime.forms.name, harness.step("int8")["state"]) == ("eager", "refused")


@pytest.mark.parametrize(("cost_s", "action"), [(0.95, "refused"), (0.9, "enabled")])
def test_form_must_be_faster_by_a_margin(make_harness: MakeHarness, cost_s: float, action: str):
    """A twentieth is noise, and a second copy of the weights is not free."""
    harness = make_harness({"compiled": Form(off_by(0), cost_s=cost_s)})
    harness.serve(61)
    harness.settle()
    assert harness.decided()[-1] == ("compiled", action)
    assert harness.step("compiled")["gain"] == pytest.approx(1 / cost_s, rel=1e-3)


@pytest.mark.parametrize("failure", [CompilationRefused("six graph breaks"), RuntimeError("no compiler")])
def test_form_that_cannot_be_built_is_refused_with_the_reason(make_harness: MakeHarness, failure: Exception):
    """After any error of a framework, the model keeps its form."""
    harness = make_harness({"compiled": Form(off_by(0), fails=failure)})
    harness.serve(61)
    harness.settle()
    assert str(failure) in harness.step("compiled")["reason"]
    assert harness.runtime.forms.name == "eager"
    harness.serve(100)
    assert not harness.optimizer.tick()


def test_model_that_does_not_repeat_itself_keeps_its_form(make_harness: MakeHarness):
    """A model with other outputs each time cannot be compared with a candidate."""
    harness = make_harness({"compiled": GOOD}, noise=1.0)
    harness.serve(61)
    harness.settle()
    assert harness.step("compiled")["reason"].startswith("the model does not repeat its answers")


def test_nothing_is_proved_where_nothing_repeats(make_harness: MakeHarness):
    """Without goldens there is no trial."""
    harness = make_harness({"compiled": GOOD}, package={"deterministic": False})
    harness.serve(61)
    harness.settle()
    assert (harness.entry["goldens"], harness.step("compiled")["criterion"]) == (None, "golden_rows 0 < 16")


@pytest.mark.parametrize("section", ["privacy", "cache"])
def test_hashes_only_keeps_no_inputs(make_harness: MakeHarness, section: str):
    """In that mode nothing but digests of inputs is kept, so there are no goldens; the stricter setting holds."""
    key = "mode" if section == "privacy" else "privacy_mode"
    harness = make_harness({"compiled": GOOD}, config={section: {key: "hashes_only"}})
    harness.serve(61)
    harness.settle()
    assert harness.profiler.goldens is None
    assert harness.runtime.forms.name == "eager"


def test_form_that_fails_at_serving_is_disabled_once_and_for_all(make_harness: MakeHarness):
    """Its batch is answered, one record says why, and it is not tried again in this process (AR-029)."""
    fails = False

    def change(rows: Array) -> Array:
        if fails:
            raise RuntimeError("a kernel is gone")
        return rows

    harness = make_harness({"compiled": Form(change)})
    harness.serve(61)
    harness.settle()
    assert harness.runtime.forms.name == "compiled"
    fails = True
    assert len(harness.serve(1)) == ROWS
    harness.serve(200)
    harness.settle()
    assert harness.decided("disabled") == [("compiled", "disabled")]
    assert harness.records[-1]["reason"] == "RuntimeError: a kernel is gone"
    assert (harness.entry["form"], harness.entry["level"], harness.step("compiled")["state"]) == (
        "eager",
        2,
        "disabled",
    )


def test_how_a_form_was_compiled_goes_with_its_decision(make_harness: MakeHarness):
    """Backend and figures of the compiler are in the audit's record and the levels, also after a restart (CF-013)."""
    made = {"backend": "inductor", "graph_breaks": 0, "graphs": 1, "compile_s": 12.5, "was_warm": False}
    forms = {"compiled": replace(GOOD, made=made)}
    harness = make_harness(forms)
    harness.serve(61)
    harness.settle()
    assert harness.records[-1]["made"] == made
    assert harness.step("compiled")["made"] == made
    assert harness.step("batching")["made"] == {}
    assert make_harness(forms).step("compiled")["made"] == made


def state_of(harness: OptimizerHarness) -> LevelState:
    (attached,) = harness.optimizer._attached.values()
    return attached.level_state


def decision_key_of(harness: OptimizerHarness) -> DecisionKey:
    (attached,) = harness.optimizer._attached.values()
    return attached.key


def test_log_replays_to_the_same_state(make_harness: MakeHarness):
    """Each enable and disable is exactly one record; the file alone tells where the process stood (AR-029)."""
    fails = False

    def change(rows: Array) -> Array:
        return rows * np.nan if fails else rows

    forms = {"compiled": GOOD, "bf16": Form(change, 0.6), "onnx": Form(off_by(0), 0.45), "int8": Form(turned, 0.1)}
    harness = make_harness(forms, max_level=3)
    harness.serve(400)
    harness.settle()
    fails = True
    harness.serve(400)
    harness.settle()
    live = state_of(harness)
    (attached,) = harness.optimizer._attached.values()
    assert harness.optimizer.log.replayed(attached.key, harness.optimizer.log.run) == live
    assert (live.form, "int8" in live.settled) == ("onnx", True)
    lines = (harness.home / "decisions" / "rotation.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == harness.records
    enabled = [step for step, _ in harness.decided("enabled")]
    assert len(enabled) == len(set(enabled))


def test_log_is_private_and_holds_no_payload(make_harness: MakeHarness):
    """Only its owner reads it, and it has figures and names only."""
    harness = make_harness({"bf16": REDUCED}, max_level=3)
    harness.serve(20)
    harness.settle()
    folder = harness.home / "decisions"
    assert oct(folder.stat().st_mode & 0o777) == "0o700"
    assert oct((folder / "rotation.jsonl").stat().st_mode & 0o777) == "0o600"
    assert all(not isinstance(value, list) for record in harness.records for value in record.values())


def test_restart_takes_up_what_was_accepted(make_harness: MakeHarness):
    """The same content on the same kind of machine needs no further minute of forwards (warm start)."""
    harness = make_harness({"compiled": GOOD})
    harness.serve(61)
    harness.settle()
    again = make_harness({"compiled": GOOD})
    again.serve(1)
    again.settle()
    assert again.runtime.forms.name == "compiled"
    assert str(again.records[-1]["criterion"]).startswith("accepted before")


def test_precisions_are_decided_apart(make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch):
    """A form that was accepted at one endpoint proves nothing at an endpoint of another precision."""
    harness = make_harness({"compiled": GOOD})
    harness.serve(61)
    harness.settle()
    monkeypatch.setattr(Rotation, "precision", "bf16")
    other = make_harness({"compiled": GOOD})
    other.serve(1)
    other.settle()
    assert other.runtime.forms.name == "eager"
    assert other.step("compiled")["criterion"] == "forwards 1 < 20"


def test_restart_does_not_try_what_was_measured_and_refused(make_harness: MakeHarness):
    """A measured refusal of the same content stays. A form that could not be built is tried again."""
    forms = {"int8": Form(turned, 0.1), "onnx": Form(off_by(0), fails=RuntimeError("not installed"))}
    harness = make_harness(forms, max_level=3)
    harness.serve(200)
    harness.settle()
    assert len(harness.decided("refused")) == 2
    again = make_harness(forms, max_level=3)
    again.serve(200)
    again.settle()
    assert again.decided("refused") == [("onnx", "refused")]
    assert (again.step("int8")["state"], again.step("int8")["evidence"]["rows"]) == ("refused", 64)


def test_form_that_kills_its_process_is_left_off(make_harness: MakeHarness):
    """One death may be due to a job, three within a day are due to the form. An operator may request it again."""
    harness = make_harness({"compiled": GOOD})
    harness.serve(61)
    harness.settle()
    for deaths in (1, 2, 3):
        harness.optimizer.log.note_death("rotation", "ab" * 32, "compiled")
        again = make_harness({"compiled": GOOD})
        again.serve(61)
        again.settle()
        assert again.runtime.forms.name == ("compiled" if deaths < 3 else "eager")
    assert "3 processes died within a day" in again.step("compiled")["reason"]
    again.optimizer.ask("rotation", "compile")
    again.settle()
    assert again.runtime.forms.name == "compiled"


@pytest.mark.parametrize("other", ["time", "content", "model"])
def test_other_deaths_keep_no_form_away(make_harness: MakeHarness, other: str):
    """Deaths of the day before, of other content or of other models do not count."""
    harness = make_harness({"compiled": GOOD})
    yesterday = time.time() - (86_500 if other == "time" else 0)
    log = DecisionLog(harness.home, lambda: yesterday)
    for _ in range(5):
        log.note_death("x" if other == "model" else "rotation", ("cd" if other == "content" else "ab") * 32, "compiled")
    again = make_harness({"compiled": GOOD})
    again.serve(61)
    again.settle()
    assert again.runtime.forms.name == "compiled"


def test_damaged_lines_of_the_log_are_passed_over(make_harness: MakeHarness):
    """A process that died in the middle of a line costs that line only."""
    harness = make_harness({"compiled": GOOD})
    harness.serve(61)
    harness.settle()
    file = harness.home / "decisions" / "rotation.jsonl"
    died = b'{"action": "died", "content_hash": "%s", "step": "compiled", "time": "now"}' % (b"ab" * 32)
    strange = [
        *[died] * 3,
        died.replace(b'"compiled"', b'["compiled"]').replace(b'"now"', b"9e9"),
        b'{"half',
        b"[]",
        b"\xff\xfe",
        b'{"step": "none", "action": "enabled", "evidence": {}}',
    ]
    file.write_bytes(b"\n".join([*strange, file.read_bytes(), b'{"ti']))
    again = make_harness({"compiled": GOOD})
    again.serve(1)
    again.settle()
    assert again.runtime.forms.name == "compiled"


def test_version_that_is_detached_meanwhile_is_left_alone(make_harness: MakeHarness):
    """The result of a trial is discarded when its version was unloaded meanwhile."""
    harness = make_harness({"compiled": GOOD})
    harness.runtime.while_building = lambda: harness.optimizer.detach("rotation")
    harness.serve(61)
    harness.settle()
    assert harness.decided() == [("batching", "enabled")]
    assert harness.runtime.forms.name == "eager"
    assert harness.optimizer.report() == {}


def test_nothing_is_turned_on_that_cannot_be_recorded(make_harness: MakeHarness):
    """Without its record a change of the model would be untraceable, so it does not happen."""
    harness = make_harness({"compiled": GOOD})
    (harness.home / "decisions").write_text("a file where the folder should be")
    harness.serve(61)
    harness.settle()
    assert (harness.runtime.forms.name, harness.records) == ("eager", [])
    assert harness.step("compiled")["reason"] == "it could not be recorded"


def test_log_tells_what_the_audit_did_not_take(make_harness: MakeHarness):
    """A step that was written to one of the two records only is off, and the log replays to that (AR-029)."""
    harness = make_harness({"compiled": GOOD})

    def is_full(_: Mapping[str, object]) -> None:
        raise OSError("no space left on device")

    harness.optimizer._recorder._audit = is_full
    harness.serve(61)
    harness.settle()
    live = state_of(harness)
    (attached,) = harness.optimizer._attached.values()
    assert harness.optimizer.log.replayed(attached.key, harness.optimizer.log.run) == live
    assert (live.level, harness.runtime.forms.name) == (0, "eager")


def test_line_that_was_cut_short_costs_no_other(make_harness: MakeHarness):
    """After a half-written line of a process that died, the next record starts a new line."""
    harness = make_harness({"compiled": GOOD})
    folder = harness.home / "decisions"
    folder.mkdir()
    (folder / "rotation.jsonl").write_bytes(b'{"step": ["compiled"]}\n' + b"[" * 100_000 + b'\n{"time": 1.0, "ru')
    harness.serve(61)
    harness.settle()
    again = make_harness({"compiled": GOOD})
    again.serve(1)
    again.settle()
    assert again.runtime.forms.name == "compiled"


def test_rotated_log_is_still_read(make_harness: MakeHarness):
    """Decisions stay known after the file has grown too large."""
    harness = make_harness({"compiled": GOOD})
    harness.serve(61)
    harness.settle()
    full = DecisionLog(harness.home, max_bytes=0)
    full.append(decision_key_of(harness), Decision("tokenizer-cache", "enabled"))
    assert (harness.home / "decisions" / "rotation.jsonl.old").exists()
    later = make_harness({"compiled": GOOD})
    later.serve(1)
    later.settle()
    assert later.runtime.forms.name == "compiled"


def test_one_slow_start_does_not_keep_a_form_away(make_harness: MakeHarness):
    """On a busy machine no form measures faster. One such start is passed over, two are believed."""
    harness = make_harness({"compiled": GOOD})
    harness.serve(61)
    harness.settle()
    for starts_before in range(2):
        busy = make_harness({"compiled": Form(GOOD.change, cost_s=1.0)})
        busy.serve(1)
        busy.settle()
        assert busy.decided("refused") == [("compiled", "refused")]
        again = make_harness({"compiled": GOOD}, max_level=1)
        (attached,) = again.optimizer._attached.values()
        assert attached.earlier["compiled"].action == ("refused" if starts_before else "enabled")


def test_other_tolerance_asks_for_another_verdict(make_harness: MakeHarness):
    """A form that a limit refused is tried again after the operator has changed the limit."""
    forms = {"compiled": Form(off_by(2 * TOLERANCE))}
    harness = make_harness(forms)
    harness.serve(61)
    harness.settle()
    assert harness.decided("refused") == [("compiled", "refused")]
    again = make_harness(forms, config={"compilation": {"tolerance": 1e-4}})
    again.serve(61)
    again.settle()
    assert again.runtime.forms.name == "compiled"


def test_step_that_raises_ends_neither_the_thread_nor_an_answer(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
):
    """After a failure with one model, operators are answered and other steps are tried."""
    harness = make_harness({"bf16": REDUCED}, max_level=3)

    def broken(_step: str, _evidence: object, _max_level: int) -> StepReadiness:
        raise MemoryError

    harness.serve(20)
    monkeypatch.setattr("penstock.workers.levels.attached.readiness", broken)
    harness.optimizer.start()
    answer = harness.optimizer.ask("rotation", "optimise")
    assert answer.result(180) == "rotation/1: it failed: MemoryError"
    monkeypatch.undo()
    wait_until(lambda: harness.runtime.forms.name == "bf16", 10, "the form to be used")
    harness.optimizer.stop()


def test_operator_has_a_form_compiled_now(make_harness: MakeHarness):
    """A requested form needs no minute of forwards. The answer has the result."""
    harness = make_harness({"compiled": GOOD})
    harness.serve(1)
    answer = harness.optimizer.ask("rotation", "compile")
    harness.settle()
    assert answer.result(0) == "rotation/1: compiled enabled, 2.00 times as fast as the form in use"
    assert harness.step("compiled")["criterion"].startswith("requested")
    assert (harness.entry["answers"], harness.runtime.forms.name) == (1, "compiled")


def test_operator_is_told_what_a_form_waits_for(make_harness: MakeHarness):
    """A request waives neither goldens nor max_level, and a model that is not loaded is named."""
    harness = make_harness({"compiled": GOOD, "bf16": REDUCED})
    early = harness.optimizer.ask("rotation", "optimise")
    absent = harness.optimizer.ask("other", "compile")
    harness.settle()
    assert early.result(0).splitlines() == [
        "rotation/1: compiled waits: forwards 0 < 1",
        "rotation/1: bf16 waits: max_level 2 < 3",
    ]
    assert absent.result(0) == "other is not loaded here"


def test_higher_levels_can_be_measured_without_being_used(make_harness: MakeHarness):
    """So an operator learns what a higher max_level would gain."""
    harness = make_harness({"bf16": REDUCED, "int8": Form(turned, 0.1)}, max_level=2)
    harness.serve(1)
    answer = harness.optimizer.ask("rotation", "measure")
    harness.settle()
    assert "bf16 would be enabled, 4.00 times as fast" in answer.result(0)
    assert (harness.step("bf16")["state"], harness.step("bf16")["gain"]) == ("not allowed", 4.0)
    assert (harness.runtime.forms.name, harness.decided()) == ("eager", [("batching", "enabled")])


def test_metrics_tell_level_and_verdicts(make_harness: MakeHarness):
    """The gauge follows the level, the counter has each verdict of the gate."""
    harness = make_harness({"bf16": Form(REDUCED.change, 0.5), "int8": Form(turned, 0.1)}, max_level=3)
    harness.serve(200)
    harness.settle()
    found = {family.name: family.samples for family in harness.metrics.collect()}
    assert [sample.value for sample in found["penstock_level"]] == [3.0]
    verdicts = {sample.labels["verdict"]: sample.value for sample in found["penstock_gate_verdicts"]}
    assert verdicts == {"accepted": 2.0, "refused": 1.0}
    harness.optimizer.detach("rotation")
    found = {family.name: family.samples for family in harness.metrics.collect()}
    assert [sample.value for sample in found["penstock_level"]] == [0.0]


def test_thread_does_what_ticks_do(make_harness: MakeHarness):
    """The thread ticks after `start` and ends after `stop`."""
    harness = make_harness({"bf16": REDUCED}, max_level=3)
    harness.serve(20)
    harness.optimizer.start()
    wait_until(lambda: harness.runtime.forms.name == "bf16", 10, "the form to be used")
    harness.optimizer.stop()
    wait_until(lambda: not harness.optimizer._thread.is_alive(), 10, "the thread to end")
    assert harness.optimizer.ask("rotation", "compile").cancelled()


def test_golden_batches_are_no_larger_than_served_ones(make_harness: MakeHarness):
    """A form is compared and timed on batches of the served size."""
    harness = make_harness({"compiled": GOOD})
    harness.serve(61)
    calls = harness.runtime.calls
    harness.settle()
    # Two batches of 32: the reference and the form once each for the verdict, then 9 or 3 rounds of both.
    assert (harness.runtime.calls - calls) % 2 == 0
    assert harness.step("compiled")["evidence"]["in_use_s"] == 2.0


class Leaking(Rotation):
    """The rows of a batch depend on each other: their mean is removed, as by a layer that normalises over the batch."""

    def _reference(self, prepared: Prepared) -> dict[str, Array]:
        return self._answered(prepared, lambda rows: rows - 0.2 * rows.mean(axis=0), 1.0)


def test_rows_that_depend_on_each_other_end_batching(tmp_path: Path):
    """AR-012, AR-029: the gate can say no. The record has the figures, and batches have one row from then on, also
    after a restart."""

    def harness() -> OptimizerHarness:
        clock = Clock()
        return OptimizerHarness(tmp_path, Leaking(clock, {}), clock, InferenceConfig(max_level=2))

    first = harness()
    first.serve(1)
    assert first.profiler.row_limit == 0
    first.settle()
    assert first.decided() == [("batching", "refused")]
    assert "max_delta" in str(first.records[0]["reason"])
    assert (first.profiler.row_limit, first.step("batching")["state"]) == (1, "refused")
    again = harness()
    assert again.profiler.row_limit == 1
    again.serve(4)
    assert not again.optimizer.tick()


def test_batching_that_cannot_be_judged_goes_on(make_harness: MakeHarness):
    """A model that gives other outputs each time is no proof against its batches."""
    harness = make_harness({}, noise=1.0)
    harness.serve(2)
    harness.settle()
    assert harness.step("batching")["reason"].startswith("the model does not repeat its answers")
    assert harness.profiler.row_limit == 0


def test_custom_validators_judge_forms_of_another_precision(tmp_path: Path):
    """AR-070: a validator that is registered for the model takes the place of the built-in one, and its name is on
    record."""

    class Suspicious:
        def compare(self, candidate: Array, expected: Array) -> Comparison:
            return Comparison(len(expected), {"doubt": Figure.largest(float(np.abs(candidate - expected).max()), 0.0)})

    validators, clock = ValidatorRegistry(), Clock()
    validators.register(Suspicious(), model="rotation")
    runtime = Rotation(clock, {"bf16": REDUCED})
    harness = OptimizerHarness(tmp_path, runtime, clock, InferenceConfig(max_level=3), validators=validators)
    harness.serve(20)
    harness.settle()
    assert harness.decided() == [("batching", "enabled"), ("bf16", "refused")]
    assert harness.records[-1]["validators"] == {"y": "Suspicious"}
    assert str(harness.records[-1]["reason"]).startswith("y: doubt 0.0")


def test_goldens_outlive_the_process(tmp_path: Path):
    """A restarted worker has the samples of the same content before its first job, and none of other content."""
    archive = GoldenArchive(f"sqlite:///{tmp_path}/registry.db", DataKeys([b"k" * 32]))

    def harness(content_hash: str = "ab" * 32) -> OptimizerHarness:
        clock = Clock()
        runtime = Rotation(clock, {"compiled": GOOD})
        config = InferenceConfig(max_level=2)
        return OptimizerHarness(tmp_path, runtime, clock, config, archive=archive, content_hash=content_hash)

    first = harness()
    first.settle()
    first.serve(2)
    first.clock.now += 60
    first.settle()
    again, other = harness(), harness("cd" * 32)
    for each in (again, other):
        each.settle()
        assert each.profiler.goldens is not None
    stores = [each.profiler.goldens for each in (first, again, other)]
    kept = [store.goldens() for store in stores if store is not None]
    assert [len(each) for each in kept] == [64, 64, 0]
    assert {golden.digest for golden in kept[0]} == {golden.digest for golden in kept[1]}


def test_an_archive_that_cannot_be_reached_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Samples stay in memory, one warning a minute, and forms are judged as before."""
    (tmp_path / "registry.db").write_text("no database")
    clock = Clock()
    archive = GoldenArchive(f"sqlite:///{tmp_path}/registry.db", None)
    harness = OptimizerHarness(
        tmp_path, Rotation(clock, {"compiled": GOOD}), clock, InferenceConfig(max_level=2), archive=archive
    )
    harness.serve(61)
    harness.settle()
    assert harness.runtime.forms.name == "compiled"
    assert [record.message for record in caplog.records].count("reference samples could not be stored or read") <= 3


def _cost_by_form(harness: OptimizerHarness) -> dict[str, float]:
    """What 1,000 jobs cost since the last change of form: one batch of 100 jobs that takes 2 s, at 0.001 a second."""
    none = [0.0] * 100
    stats = BatchStats("rotation", "1", "queue", 100, 100, none, none, 2.0, 0.0, none)
    harness.metrics.batch(stats)
    (family,) = [each for each in harness.metrics.collect() if each.name == "penstock_cost_per_1000_requests"]
    return {sample.labels["form"]: sample.value for sample in family.samples}


def test_costs_follow_the_gains_that_the_gate_measured(make_harness: MakeHarness):
    """AR-097: the baseline is the price of the same jobs as built, by the product of the gains of the forms in use."""
    harness = make_harness({"prepacked": GOOD, "bf16": REDUCED}, max_level=3)
    assert _cost_by_form(harness) == {"baseline": pytest.approx(0.02)}
    harness.serve(61)
    harness.settle()
    gains = [harness.step(name)["gain"] for name in ("prepacked", "bf16")]
    assert (harness.entry["form"], gains) == ("bf16", [2.0, 2.0])
    assert _cost_by_form(harness) == {"baseline": pytest.approx(0.08), "optimized": pytest.approx(0.02)}
    harness.runtime.forms.on_fallback("bf16", "it raised")
    assert harness.entry["form"] == "eager"
    assert _cost_by_form(harness) == {"baseline": pytest.approx(0.02)}
