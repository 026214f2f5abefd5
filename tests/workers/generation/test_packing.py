"""Packed linear layers of a decoder: when they are used, that they write the same, and that they can be off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation.load_records import LoadRecords
from penstock.workers.generation.packing import Packing, least_rows
from penstock.workers.runtime import prepacked
from penstock.workers.runtime.prepacked import PrepackedLinear, can_prepack, packable
from tests.servers import leave_out
from tests.workers.generation.architectures import decoder, reference
from tests.workers.generation.engines import GREEDY, open_engine, prompts_of, token_ids
from tests.workers.generation.gates import open_gate


@pytest.mark.parametrize(
    ("dense", "packed", "expected"),
    [
        ([2, 2, 2, 2], [1, 1, 1, 1], 1),
        ([1, 2, 2, 2], [1, 1, 1, 1], 4),
        ([2, 1, 2, 2], [1, 1, 1, 1], 16),
        ([1, 1, 1, 2], [1, 1, 1, 1], 64),
        ([2, 2, 2, 1], [1, 1, 1, 1], None),
        ([1.02] * 4, [1, 1, 1, 1], None),
    ],
)
def test_packed_weights_are_used_where_all_larger_calls_gain(dense, packed, expected):
    """From the least number of rows on, from which every tried number was faster by 3 percent."""
    assert least_rows(dense, packed) == expected


def _packed_layers(model):
    return [layer for layer in model.modules() if isinstance(layer, PrepackedLinear)]


def test_packed_layers_write_the_same():
    """Greedy tokens are those of `model.generate` with all layers packed, also for single rows."""
    model = decoder("Llama")
    if not can_prepack(model):
        leave_out("this build of torch has no operators for packed weights")
    prompts = prompts_of(3, 17, 40)
    expected = [reference(model, prompt, 16) for prompt in prompts]
    engine = open_engine(model, packed_linears="on", kv_cache_mb=4)
    assert engine.packing.packed == engine.packing.layers == len(_packed_layers(model)) == 3 * 7 + 1
    assert {layer.least_rows for layer in _packed_layers(model)} == {1}
    assert token_ids(engine.generate(prompts, GREEDY)) == expected


def test_the_trial_leaves_each_layer_packed_or_as_it_was():
    """Whichever is faster here; off changes nothing."""
    model = decoder("Llama")
    kept = Packing(model, "auto", LoadRecords(None), open_gate()[0])
    while kept.pack_next():
        pass
    assert kept.packed == len(_packed_layers(model))
    assert all(layer.least_rows in (1, 4, 16, 64) for layer in _packed_layers(model))
    plain = decoder("Llama")
    off = Packing(plain, "off", LoadRecords(None), open_gate()[0])
    assert (off.packed, off.layers, off.nbytes, off.pack_next()) == (0, 0, 0, False)
    assert _packed_layers(plain) == []


def _decided(folder: Path, rows: int | None) -> int:
    """Writes another outcome into the records of a first load. Returns how many there are."""
    paths = [path for path in folder.iterdir() if path.name.startswith("packing-")]
    for path in paths:
        record = json.loads(path.read_text())
        problem = "" if rows else "too slow"
        record["found"] = {**record["found"], "least_rows": rows, "gain": 1.5, "problem": problem}
        path.write_text(json.dumps(record))
    return len(paths)


@pytest.mark.parametrize("rows", [1, 16, None])
def test_a_later_load_does_what_the_first_has_measured(rows, tmp_path):
    """It packs one weight of each shape, which the probe proves, and one weight more before each step."""
    if not can_prepack(decoder("Llama")):
        leave_out("this build of torch has no operators for packed weights")
    Packing(decoder("Llama"), "auto", LoadRecords(tmp_path), open_gate()[0])
    shapes = len({tuple(one.weight.shape) for one in packable(decoder("Llama"))})
    assert _decided(tmp_path, rows) == shapes
    model = decoder("Llama")
    (prompt,) = prompts_of(9)
    expected = reference(model, prompt, 40)
    engine = open_engine(model, packed_linears="auto", kv_cache_mb=4, cache_dir=tmp_path)
    layers = engine.packing.layers
    assert (engine.packing.packed, engine.packing.waiting) == ((0, 0) if rows is None else (shapes, layers - shapes))
    engine.add_request("text", prompt, SamplingParams(temperature=0, max_tokens=40))
    for steps in range(1, 4):
        engine.step()
        assert engine.packing.packed == len(_packed_layers(model)) == (0 if rows is None else shapes + steps)
    written = [engine.step() for _ in range(50)]
    assert list(next(one for step in written for one in step if one.finished).outputs[0].token_ids) == expected
    assert engine.packing.packed == (0 if rows is None else layers)
    assert {layer.least_rows for layer in _packed_layers(model)} == ({rows} if rows else set())


@pytest.mark.parametrize("damage", [{"least_rows": 2}, {"gain": "fast"}, {"problem": None}, {"more": 1}])
def test_a_record_that_no_load_has_written_is_as_none(damage: dict[str, Any], tmp_path: Path):
    """The shapes are tried again, and recorded again."""
    if not can_prepack(decoder("Llama")):
        leave_out("this build of torch has no operators for packed weights")
    Packing(decoder("Llama"), "auto", LoadRecords(tmp_path), open_gate()[0])
    paths = [path for path in tmp_path.iterdir() if path.name.startswith("packing-")]
    written = [json.loads(path.read_text()) for path in paths]
    for path, record in zip(paths, written, strict=True):
        path.write_text(json.dumps({**record, "found": {**record["found"], **damage}}))
    gate, decisions = open_gate()
    Packing(decoder("Llama"), "auto", LoadRecords(tmp_path), gate)
    assert [name for name, _ in decisions.actions] == ["packed-linears"]
    for path, record in zip(paths, written, strict=True):
        assert json.loads(path.read_text())["found"].keys() == record["found"].keys()
        assert json.loads(path.read_text())["found"]["problem"] is not None
        assert json.loads(path.read_text())["found"]["gain"] != "fast"


def test_packed_layer_that_fails_ends_no_text(caplog):
    """The step is computed again with dense weights, and so are the later ones; the log names the error."""
    model = decoder("Llama")
    if not can_prepack(model):
        leave_out("this build of torch has no operators for packed weights")
    prompts = prompts_of(3, 17, 40)
    expected = [reference(model, prompt, 16) for prompt in prompts]
    engine = open_engine(model, packed_linears="on", kv_cache_mb=4)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, GREEDY)
    written = [engine.step() for _ in range(5)]
    _packed_layers(model)[9].packed.weight = torch.zeros(3, 3)
    while engine.has_unfinished_requests:
        written.append(engine.step())
    ended = {one.request_id: list(one.outputs[0].token_ids) for step in written for one in step if one.finished}
    assert [ended[str(number)] for number in range(len(prompts))] == expected
    assert (engine.packing.packed, engine.packing.nbytes, engine.packing.waiting) == (0, 0, 0)
    assert _packed_layers(model) == []
    (record,) = [each for each in caplog.records if each.message == "packed layers failed and are dense again"]
    assert vars(record)["layers"] == 3 * 7 + 1
    assert vars(record)["reason"]


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_packed_layers_that_fail_at_load_are_dense(mode, monkeypatch):
    """Whether the trial or the probe finds it; the model is served."""
    model = decoder("Llama")
    if not can_prepack(model):
        leave_out("this build of torch has no operators for packed weights")

    def fails(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("could not create a primitive")

    (prompt,) = prompts_of(9)
    expected = reference(model, prompt, 16)
    with monkeypatch.context() as broken:
        broken.setattr(prepacked, "_multiply", fails)
        engine = open_engine(model, packed_linears=mode, kv_cache_mb=4)
    assert _packed_layers(model) == []
    assert token_ids(engine.generate([prompt], GREEDY)) == [expected]
