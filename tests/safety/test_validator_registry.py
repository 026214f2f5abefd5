"""Custom validators take the place of built-in ones, and give it back; sync and async ones are awaited anywhere."""

from __future__ import annotations

import asyncio
import importlib
import threading
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from penstock.registry.errors import ConfigurationError
from penstock.registry.package.signature import TensorSpec
from penstock.registry.tensors import Array
from penstock.safety.validator_registry import (
    ENTRY_POINTS,
    ValidatorRegistry,
    compare_outputs,
    compare_outputs_async,
)
from penstock.safety.validators import (
    BUILT_IN,
    WORKLOADS,
    Comparison,
    EmbeddingValidator,
    ExactValidator,
    Figure,
    TensorValidator,
    Validator,
    Verdict,
)
from tests.installed import install

ONES = np.ones((3, 2), np.float32)


class Lenient:
    """Passes everything."""

    def compare(self, candidate: Array, expected: Array) -> Comparison:
        return Comparison(len(expected), {"nothing": Figure.largest(0.0, 1.0)})


class Asking:
    """Asks something that takes a while, such as a service."""

    threads: list[str]

    def __init__(self) -> None:
        self.threads = []

    async def compare(self, candidate: Array, expected: Array) -> Comparison:
        await asyncio.sleep(0)
        self.threads.append(threading.current_thread().name)
        return Comparison(len(expected), {"sum": Figure.largest(abs(float((candidate - expected).sum())), 0.1)})


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_custom_validator_overrides_and_unregister_restores(workload: str):
    """AR-070: the very object that was there before judges again."""
    registry, custom = ValidatorRegistry(), Lenient()
    before = registry.validator_for(workload)
    assert before is BUILT_IN[workload]
    registry.register(custom, workload=workload)
    assert registry.validator_for(workload) is custom
    assert registry.unregister(workload=workload) is custom
    assert registry.validator_for(workload) is before


def test_the_validator_of_a_model_comes_before_that_of_its_workload():
    """A model's own judges all its outputs, and no other model's. Its removal leaves that of the workload."""
    registry, of_model, of_workload = ValidatorRegistry(), Lenient(), Lenient()
    registry.register(of_workload, workload="embedding")
    registry.register(of_model, model="minilm")
    assert registry.validator_for("embedding", "minilm") is registry.validator_for("classifier", "minilm") is of_model
    assert registry.validator_for("embedding", "other") is of_workload
    registry.unregister(model="minilm")
    assert registry.validator_for("embedding", "minilm") is of_workload


def test_registries_do_not_mix():
    """A validator that one part of a program registers changes no other part."""
    registry = ValidatorRegistry()
    registry.register(Lenient(), workload="encoder")
    assert ValidatorRegistry().validator_for("encoder") is BUILT_IN["encoder"]


def test_bad_registrations_change_nothing():
    """Each error says what was expected, and the built-in validator stays."""
    registry = ValidatorRegistry()
    expected = "embedding, classifier, reranker, generation, encoder, exact"
    for workload in ("embeddings", ""):
        with pytest.raises(ConfigurationError, match=rf"no workload '{workload}'\. Expected one of: {expected}"):
            registry.register(Lenient(), workload=workload)
    with pytest.raises(ConfigurationError, match="no workload 'x'"):
        registry.validator_for("x")
    for names in ({}, {"workload": "encoder", "model": "mlp"}):
        with pytest.raises(ConfigurationError, match="Expected exactly one of them"):
            registry.register(Lenient(), **names)
    with pytest.raises(ConfigurationError, match="Expected an object with a method compare"):
        registry.register("cosine", workload="encoder")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="encoder has no custom validator"):
        registry.unregister(workload="encoder")
    registry.register(Lenient(), workload="encoder")
    with pytest.raises(ConfigurationError, match="encoder has a custom validator already"):
        registry.register(Lenient(), workload="encoder")
    assert registry.validator_for("embedding") is BUILT_IN["embedding"]


def test_defaults_give_way_to_custom_validators_only():
    """A gate for one precision has limits of its own; a custom validator of the workload or model still comes first."""
    outputs = (
        TensorSpec(name="vector", dtype="float32", shape=("batch", 4)),
        TensorSpec(name="label", dtype="int64", shape=("batch",)),
    )
    expected: dict[str, Array] = {"vector": np.eye(4, dtype=np.float32), "label": np.arange(4)}
    registry, custom = ValidatorRegistry(), Lenient()
    assert registry.validators_for("m", outputs, expected) == {
        "vector": EmbeddingValidator(),
        "label": ExactValidator(0.99),
    }
    strict: dict[str, Validator] = {"vector": TensorValidator(0, 0), "label": ExactValidator()}
    assert registry.validators_for("m", outputs, expected, defaults=strict) == strict
    registry.register(custom, workload="embedding")
    assert registry.validators_for("m", outputs, expected, defaults=strict)["vector"] is custom


def test_entry_points_are_registered_by_workload_and_by_model():
    """AR-070: an installed distribution brings validators; a class is called, an object is taken as it is."""
    registry = ValidatorRegistry()
    found = [
        EntryPoint("embedding", f"{__name__}:Lenient", ENTRY_POINTS),
        EntryPoint("model:prices", f"{__name__}:LENIENT", ENTRY_POINTS),
    ]
    assert registry.load_entry_points(found) == ["embedding", "model:prices"]
    assert isinstance(registry.validator_for("embedding"), Lenient)
    assert registry.validator_for("classifier", "prices") is LENIENT
    assert ValidatorRegistry().load_entry_points() == []


def test_validators_of_an_installed_distribution_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """AR-070: by the metadata that pip has written, without a word in our settings; gone with the distribution."""
    source = """
    from penstock.safety.validators import Comparison, Figure


    class Strict:
        def compare(self, candidate, expected):
            return Comparison(len(expected), {"sum": Figure.largest(float(abs(candidate - expected).sum()), 0.0)})


    STRICT = Strict()
    """
    install(tmp_path, "its_validators", source, {ENTRY_POINTS: {"embedding": "Strict", "model:prices": "STRICT"}})
    monkeypatch.syspath_prepend(tmp_path)
    registry = ValidatorRegistry()
    assert registry.load_entry_points() == ["embedding", "model:prices"]
    assert registry.validator_for("classifier", "prices") is importlib.import_module("its_validators").STRICT
    found = registry.validator_for("embedding")
    assert compare_outputs(found, ONES, ONES).verdict is Verdict.PASS
    assert compare_outputs(found, ONES + 1, ONES).verdict is Verdict.FAIL
    monkeypatch.undo()
    importlib.invalidate_caches()
    assert ValidatorRegistry().load_entry_points() == []


@pytest.mark.parametrize(
    ("name", "value"), [("embedding", "nowhere:x"), ("embedding", f"{__name__}:ONES"), ("odd", f"{__name__}:Lenient")]
)
def test_an_entry_point_that_cannot_be_used_is_named(name: str, value: str):
    """A worker does not start with a validator that it cannot load: its model would be judged by another one."""
    with pytest.raises(ConfigurationError, match=r"Expected"):
        ValidatorRegistry().load_entry_points([EntryPoint(name, value, ENTRY_POINTS)])


LENIENT = Lenient()


def test_sync_and_async_validators_give_the_same():
    """AR-071: the caller does not see which kind it is."""
    asking = Asking()
    assert compare_outputs(asking, ONES, ONES).verdict is Verdict.PASS
    assert compare_outputs(asking, ONES + 1, ONES).reason == "sum 6, expected at most 0.1"
    assert compare_outputs(LENIENT, ONES, ONES).verdict is Verdict.PASS
    assert asking.threads == [threading.current_thread().name] * 2


def test_an_async_validator_is_awaited_where_a_loop_runs_already():
    """AR-071: in the loop itself by the async call, on a thread of its own by the sync one."""
    asking = Asking()

    async def both() -> tuple[Comparison, Comparison]:
        return compare_outputs(asking, ONES, ONES), await compare_outputs_async(asking, ONES, ONES)

    one, other = asyncio.run(both())
    assert one == other == Comparison(3, {"sum": Figure.largest(0.0, 0.1)})
    assert asking.threads == ["validator", threading.current_thread().name]


@pytest.mark.parametrize("kind", ["sync", "async", "in a loop"])
def test_a_validator_that_raises_has_refused(kind: str):
    """A bug of a custom validator is a FAIL with the class of its error, and no crash; its text stays here."""

    class Broken:
        def compare(self, candidate: Array, expected: Array) -> Comparison:
            raise ValueError("a secret of the input")

    class BrokenLater:
        async def compare(self, candidate: Array, expected: Array) -> Comparison:
            raise ValueError("a secret of the input")

    async def inside() -> Comparison:
        return compare_outputs(BrokenLater(), ONES, ONES)

    calls = {
        "sync": lambda: compare_outputs(Broken(), ONES, ONES),
        "async": lambda: compare_outputs(BrokenLater(), ONES, ONES),
        "in a loop": lambda: asyncio.run(inside()),
    }
    found = calls[kind]()
    assert (found.verdict, found.reason) == (Verdict.FAIL, "the validator raised ValueError (3 of 3 rows)")
    assert asyncio.run(compare_outputs_async(Broken(), ONES, ONES)) == found


def test_another_answer_than_a_comparison_is_a_refusal():
    """`True` is no evidence."""

    class Yes:
        def compare(self, candidate: Array, expected: Array) -> bool:
            return True

    found = compare_outputs(Yes(), ONES, ONES)  # type: ignore[arg-type]
    assert found.reason == "the validator returned a bool, expected a Comparison (3 of 3 rows)"
