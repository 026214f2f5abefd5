"""What makes an engine faster is asked of the gate: one record each, and the plain form where it says no."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.safety.orchestrator import GateDecision, SafetyOrchestrator, Subject
from penstock.workers.generation import joined_linears
from penstock.workers.generation.acceleration_gate import POLICY, AccelerationGate
from penstock.workers.generation.attention import COMPILED_NAME
from penstock.workers.generation.config import Config
from penstock.workers.generation.decode_graphs import CaptureRefused, DecodeGraphs, bucket_of
from penstock.workers.generation.engine import Engine
from penstock.workers.generation.joined_linears import JoinedLinear
from penstock.workers.generation.model import load_decoder, wrap_decoder
from penstock.workers.runtime import prepacked
from penstock.workers.runtime.prepacked import PrepackedLinear, can_prepack
from tests.servers import leave_out
from tests.workers.generation.architectures import decoder
from tests.workers.generation.engines import GREEDY, open_engine, prompts_of, token_ids, write_model
from tests.workers.generation.gates import open_gate
from tests.workers.generation.replayed_device import ReplayedDevice, Tape, attend, provide

PROMPTS = prompts_of(3, 17, 40)
ALL = ["joined-linears", "packed-linears", "attention-kernel", "compiled-decoding", "cuda-graphs"]
OPTIONS: dict[str, Any] = {
    "kv_cache_mb": 4,
    "num_speculative_tokens": 0,
    "joined_linears": "on",
    "packed_linears": "on",
    "compile_decoding": True,
}


@pytest.fixture(scope="module", autouse=True)
def _has_operators():
    if not can_prepack(decoder("Llama")):
        leave_out("this build of torch has no operators for packed weights")


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """The texts of an engine without anything that makes it faster."""
    return token_ids(open_engine(decoder("Llama"), kv_cache_mb=4).generate(PROMPTS, GREEDY))


def fast_engine(gate: AccelerationGate, **options: Any) -> Engine:
    """An engine with all of them, as far as the gate accepts them. After `provide`."""
    loaded = wrap_decoder(decoder("Llama"), None, None, ReplayedDevice())
    return Engine(loaded, Config.from_options({**OPTIONS, **options}), gate=gate)


def in_use(engine: Engine) -> list[str]:
    """What makes this engine faster, by what its parts are."""
    layers = [*engine.decoder.model.modules()]
    graphs: Any = engine.forwards.graphs
    found = [
        any(isinstance(one, JoinedLinear) for one in layers),
        any(isinstance(one, PrepackedLinear) for one in layers),
        engine.decoder.kernel is not None,
        graphs is not None and graphs._compiled is not None and graphs._compiled.is_on,
        graphs is not None,
    ]
    # The attention into which the compiler does not look takes longer.
    assert (engine.decoder.model.config._attn_implementation == COMPILED_NAME) == found[3]
    return [name for name, is_used in zip(ALL, found, strict=True) if is_used]


def test_each_acceleration_has_one_record_with_its_evidence(plain):
    """Figures that were measured, in the order of the load; the texts are those of the plain engine."""
    gate, decisions = open_gate()
    with provide():
        engine = fast_engine(gate)
        assert in_use(engine) == ALL
        assert token_ids(engine.generate(PROMPTS, GREEDY)) == plain
    assert decisions.actions == [(name, "enabled") for name in ALL]
    joined, packed, kernel, compiled, graphs = decisions
    assert {one.subject for one in decisions} == {Subject("writer", "1", "ab" * 32)}
    for one in (joined, compiled, graphs):
        assert one.evidence["logits_difference"] < 1e-3
        assert one.evidence["token_agreement"] == 1
    assert [one.evidence["rows"] for one in (joined, compiled, graphs)] == [24, 1, 2]
    assert kernel.evidence["logits_difference"] < 1e-4
    # The others are joined.
    shapes = {"64x64", "64x96", "97x64"}
    assert {name for name in packed.evidence if name.endswith(".difference")} == {f"{one}.difference" for one in shapes}
    assert all(value < 1e-4 for name, value in packed.evidence.items() if name.endswith(".difference"))
    assert [one.criterion for one in decisions] == [
        "joined_linears is on",
        "packed_linears is on",
        "attention is auto",
        "compile_decoding is True",
        "cuda_graphs is True",
    ]


@pytest.mark.parametrize("refused", [*([name] for name in ALL), ALL], ids=lambda names: "+".join(names)[:20])
def test_a_refusal_leaves_the_plain_form(refused: list[str], plain, caplog):
    """Of this one; graphs need the kernel, and the compiled model needs graphs. The texts are the same, and a warning
    tells of an option that asks for it in vain."""
    gate, decisions = open_gate(*refused)
    with provide():
        engine = fast_engine(gate)
        needs = {"attention-kernel": {"compiled-decoding", "cuda-graphs"}, "cuda-graphs": {"compiled-decoding"}}
        off = set(refused).union(*(needs.get(name, set()) for name in refused))
        assert in_use(engine) == [name for name in ALL if name not in off]
        assert token_ids(engine.generate(PROMPTS, GREEDY)) == plain
    assert all([one.action for one in decisions.of(name)] == ["refused"] for name in refused if decisions.of(name))
    assert all("this test is against it" in decisions.of(name)[0].reason for name in refused if decisions.of(name))
    warned = [vars(each)["acceleration"] for each in caplog.records]
    assert warned == [name for name in ALL if name in refused and name != "attention-kernel" and decisions.of(name)]


def test_a_compiled_model_without_its_graphs_is_recorded_as_off():
    """It was accepted before the graphs were refused."""
    gate, decisions = open_gate("cuda-graphs")
    with provide():
        fast_engine(gate)
    assert [one.action for one in decisions.of("compiled-decoding")] == ["enabled", "disabled"]


def test_a_decision_that_cannot_be_recorded_switches_nothing_on(plain, caplog):
    """Like a full disk of the audit log."""

    def fail(_: GateDecision) -> None:
        raise OSError("no space left")

    gate = AccelerationGate(SafetyOrchestrator(fail), Subject("writer", "1"))
    with provide():
        engine = fast_engine(gate)
        assert in_use(engine) == []
        assert token_ids(engine.generate(PROMPTS, GREEDY)) == plain
    assert {each.message for each in caplog.records} == {"a decision could not be recorded"}


# Evidence that says no


class Unreplayed(Tape):
    """A graph that shows the logits of its capture again and again."""

    def replay(self) -> None:
        """Does nothing."""


class Uncapturable(Tape):
    """A graph of a model that reads a value on the host."""

    def __enter__(self) -> Tape:
        raise RuntimeError("operation not permitted when stream is capturing")


def other_logits(model: Any) -> Callable[..., Any]:
    """A compiler that is wrong."""

    def forward(**inputs: Any) -> Any:
        output = model(**inputs)
        output.logits = output.logits.flip(-1)
        return output

    return forward


def no_compiler(model: Any) -> Callable[..., Any]:
    """One that is missing."""

    def forward(**_: Any) -> Any:
        raise RuntimeError("no C compiler\nwith a long trace")

    return forward


def unknown_python(_: Any) -> Any:
    """One that does not know this Python."""
    raise RuntimeError("torch.compile is not supported")


def zeros(*arguments: Any) -> torch.Tensor:
    """A kernel that is wrong."""
    return attend(*arguments) * 0


def broken_kernel(*_: Any) -> torch.Tensor:
    """One that cannot be started."""
    raise ValueError("no such kernel image")


@pytest.mark.parametrize(
    ("name", "parts", "reason"),
    [
        ("attention-kernel", {"kernel": zeros}, "its logits over pages differ by"),
        ("attention-kernel", {"kernel": broken_kernel}, "ValueError in a forward over pages"),
        ("compiled-decoding", {"compiled": other_logits}, "a row of logits differs by"),
        ("compiled-decoding", {"compiled": no_compiler}, "RuntimeError: no C compiler"),
        ("compiled-decoding", {"compiled": unknown_python}, "RuntimeError: torch.compile is not supported"),
        ("cuda-graphs", {"graph": Unreplayed}, "a row of logits differs by"),
        ("cuda-graphs", {"graph": Uncapturable}, "operation not permitted when stream is capturing"),
    ],
)
def test_a_wrong_form_is_refused_by_its_evidence(name: str, parts: dict[str, Any], reason: str, plain):
    """The trial of the load finds it, and the model is served without it."""
    gate, decisions = open_gate()
    with provide(**parts):
        engine = fast_engine(gate)
        assert name not in in_use(engine)
        assert token_ids(engine.generate(PROMPTS, GREEDY)) == plain
    (decision,) = decisions.of(name)
    assert decision.action == "refused"
    assert reason in decision.reason
    assert "\n" not in decision.reason


def test_wrong_joined_layers_are_refused(monkeypatch, plain):
    """The logits before and after differ."""
    right = joined_linears._Joined.output
    monkeypatch.setattr(joined_linears._Joined, "output", lambda *given: right(*given) * 1.5)
    gate, decisions = open_gate()
    engine = open_engine(decoder("Llama"), gate=gate, kv_cache_mb=4, joined_linears="on")
    assert (engine.joined_linears, in_use(engine)) == (0, [])
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == plain
    (decision,) = decisions.of("joined-linears")
    assert decision.action == "refused"
    assert decision.evidence["logits_difference"] > 0.01


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_wrong_packed_layers_are_refused(mode: str, monkeypatch, plain):
    """However fast they are."""
    right = prepacked._multiply
    monkeypatch.setattr(prepacked, "_multiply", lambda *given, **named: right(*given, **named) * 1.001)
    gate, decisions = open_gate()
    engine = open_engine(decoder("Llama"), gate=gate, kv_cache_mb=4, packed_linears=mode)
    assert in_use(engine) == []
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == plain
    (decision,) = decisions.of("packed-linears")
    assert decision.action == "refused"
    assert decision.reason.count("outputs differ by 0.001 of the largest, expected at most 0.0001") == 5


# Options and later failures


def test_what_an_option_keeps_off_is_recorded(plain):
    """As a policy, without a verdict. What cannot be had here is no decision."""
    off = {"joined_linears": "off", "packed_linears": "off", "cuda_graphs": False, "compile_decoding": False}
    gate, decisions = open_gate()
    with provide():
        assert in_use(fast_engine(gate, **off)) == ["attention-kernel"]
        assert in_use(fast_engine(gate, **off, attention="sdpa")) == []
    assert decisions.actions == [
        ("joined-linears", "disabled"),
        ("packed-linears", "disabled"),
        ("attention-kernel", "enabled"),
        ("cuda-graphs", "disabled"),
        ("joined-linears", "disabled"),
        ("packed-linears", "disabled"),
        ("attention-kernel", "disabled"),
    ]
    assert {one.criterion for one in decisions if one.action == "disabled"} == {POLICY}
    assert decisions[-1].reason == "attention is sdpa"
    gate, decisions = open_gate()
    Engine.from_model(decoder("Llama"), kv_cache_mb=4, gate=gate)
    assert [name for name, _ in decisions.actions] == ["packed-linears"]


def test_a_packed_layer_that_fails_is_recorded_as_off():
    """Once, with the reason."""
    gate, decisions = open_gate()
    engine = open_engine(decoder("Llama"), gate=gate, kv_cache_mb=4, packed_linears="on")
    layer: Any = next(one for one in engine.decoder.model.modules() if isinstance(one, PrepackedLinear))
    layer.packed.weight = torch.zeros(3, 3)
    engine.generate(PROMPTS, GREEDY)
    assert decisions.actions[-1] == ("packed-linears", "disabled")
    assert len(decisions.of("packed-linears")) == 2
    assert decisions[-1].reason


@pytest.mark.parametrize(("seats", "buckets"), [(1, 1), (8, 4), (12, 5)])
def test_no_graph_is_captured_after_the_load(seats: int, buckets: int, plain):
    """ES-031: the load captures a graph of each bucket of rows, so that no step waits for one."""
    gate, _ = open_gate()
    with provide():
        engine = fast_engine(gate, max_num_seqs=seats, compile_decoding=False, num_speculative_tokens=0)
        graphs: Any = engine.forwards.graphs
        assert graphs.num_captured == buckets
        for number in range(1, len(PROMPTS) + 1):
            assert token_ids(engine.generate(PROMPTS[:number], GREEDY)) == plain[:number]
        assert graphs.num_captured == buckets
    assert in_use(engine)[-1] == "cuda-graphs"


def _captures(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Graphs of more rows than one cannot be captured."""
    capture = DecodeGraphs._captured

    def captured(graphs: DecodeGraphs, plan: Any) -> Any:
        if plan.rows > 1:
            raise error
        return capture(graphs, plan)

    monkeypatch.setattr(DecodeGraphs, "_captured", captured)


def test_graphs_that_more_rows_refuse_are_recorded_as_off(monkeypatch, plain):
    """The load finds it."""
    _captures(monkeypatch, CaptureRefused("it copies to the device"))
    gate, decisions = open_gate()
    with provide():
        engine = fast_engine(gate, compile_decoding=False)
        assert engine.forwards.graphs is None
        assert token_ids(engine.generate(PROMPTS, GREEDY)) == plain
    assert [one.action for one in decisions.of("cuda-graphs")] == ["enabled", "disabled"]
    assert decisions[-1].reason == "it copies to the device"


def test_graphs_without_memory_at_the_load_are_captured_later(monkeypatch, caplog, plain):
    """Or refused then, which is recorded."""
    gate, decisions = open_gate()
    with provide():
        with monkeypatch.context() as patch:
            _captures(patch, torch.OutOfMemoryError("CUDA out of memory"))
            engine = fast_engine(gate, compile_decoding=False)
        graphs: Any = engine.forwards.graphs
        assert graphs.num_captured == 1
        assert "no memory for all CUDA graphs at the load" in caplog.text
        with monkeypatch.context() as patch:
            _captures(patch, CaptureRefused("it copies to the device"))
            assert token_ids(engine.generate(PROMPTS, GREEDY)) == plain
    assert engine.forwards.graphs is None
    assert [one.action for one in decisions.of("cuda-graphs")] == ["enabled", "disabled"]


def test_a_compiled_model_that_errs_for_more_rows_is_off_for_all(plain):
    """Graphs that had it are captured again with the model as it is."""

    def wrong_for_many(model: Any) -> Callable[..., Any]:
        wrong = other_logits(model)
        return lambda **inputs: (wrong if inputs["input_ids"].shape[1] > 2 else model)(**inputs)

    gate, decisions = open_gate()
    with provide(compiled=wrong_for_many):
        engine = fast_engine(gate)
        graphs: Any = engine.forwards.graphs
        assert in_use(engine) == [name for name in ALL if name != "compiled-decoding"]
        kept = graphs.num_captured
        assert kept == len({bucket_of(rows) for rows in range(1, engine.config.scheduler.max_num_seqs + 1)})
        assert token_ids(engine.generate(PROMPTS, GREEDY)) == plain
        assert graphs.num_captured == kept
    assert [one.action for one in decisions.of("compiled-decoding")] == ["enabled", "disabled"]
    assert decisions.of("cuda-graphs")[-1].accepted


# An engine alone, and later loads


def test_an_engine_alone_logs_its_decisions(caplog):
    """Without a worker there is no audit log; the model's class stands for its name."""
    with caplog.at_level(logging.INFO, "penstock.runtime"):
        engine = Engine.from_model(decoder("Llama"), kv_cache_mb=4, joined_linears="on", packed_linears="off")
    assert engine.joined_linears == 6
    lines = [vars(each) for each in caplog.records if each.message == "acceleration decision"]
    assert [(one["model"], one["acceleration"], one["action"]) for one in lines] == [
        ("LlamaForCausalLM", "joined-linears", "enabled"),
        ("LlamaForCausalLM", "packed-linears", "disabled"),
    ]
    assert lines[0]["evidence"]["token_agreement"] == 1


def test_a_later_load_has_the_evidence_of_the_first(tmp_path: Path):
    """It measures nothing again, and its decisions are records all the same, whatever they are."""
    folder = write_model(tmp_path / "model")

    def evidence(*refused: str) -> list[tuple[str, dict[str, float]]]:
        gate, decisions = open_gate(*refused)
        loaded = load_decoder(folder, "fp32", None)
        options = {"kv_cache_mb": 4, "joined_linears": "on", "cache_dir": tmp_path / "records"}
        Engine(loaded, Config.from_options(options), gate=gate)
        assert [one.optimization for one in decisions] == ["joined-linears", "packed-linears"]
        return [(one.optimization, dict(one.evidence)) for one in decisions]

    first = evidence()
    assert first[0][1].keys() == {"logits_difference", "token_agreement", "rows"}
    assert {name.partition(".")[2] for name in first[1][1]} >= {"gain", "difference"}
    assert evidence() == first
    assert evidence("packed-linears") == first
