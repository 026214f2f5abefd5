"""json_tensors: the inputs and outputs of `penstock submit` as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.compose.jobs.json_tensors import codec_of, read, written
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.errors import InvalidInput, UnknownModel
from penstock.registry.package import load_package
from tests.packages import write_double

OUTPUTS = {"y": np.array([[0.5, 1.0]], np.float32), "label": np.array(["größer"], object)}


def test_lists_are_passed_on_unchanged():
    """Nested lists and text go to the client, which checks them against the model."""
    inputs: dict[str, object] = {"x": [[1, 2]], "text": ["a"], "wrong": 7}
    assert read(inputs) == inputs


def test_sampling_fields_are_passed_on_unchanged():
    """They are an object, but no tensor, unless they have a dtype."""
    assert read({"sampling_params": {"max_tokens": 5}}) == {"sampling_params": {"max_tokens": 5}}
    document = {"dtype": "string", "shape": [1], "data": ['{"max_tokens": 5}']}
    assert list(np.asarray(read({"sampling_params": document})["sampling_params"])) == ['{"max_tokens": 5}']


def test_outputs_in_base64_are_inputs_again():
    """Arrays written with base64 are read with the same dtype, shape and bytes, also NaN."""
    outputs = {**OUTPUTS, "n": np.array([[np.nan, np.inf]], np.float16)}
    document = json.loads(json.dumps(written(outputs, "base64"), allow_nan=False))
    found = read(document)
    assert found.keys() == outputs.keys()
    for name, values in outputs.items():
        array = found[name]
        assert isinstance(array, np.ndarray)
        assert array.dtype == values.dtype
        np.testing.assert_array_equal(array, values)


def test_numbers_that_json_lacks_are_written_with_base64():
    """Each line of `penstock submit --json` is a JSON document; the finite outputs stay readable."""
    outputs = {"n": np.array([[np.nan]], np.float32), "y": np.array([[0.5]], np.float32)}
    document = json.loads(json.dumps(written(outputs, "json"), allow_nan=False))
    assert document["y"] == [[0.5]]
    np.testing.assert_array_equal(read(document)["n"], outputs["n"])


def test_json_outputs_are_nested_lists():
    """The codec `json` has neither dtype nor shape, so that people can read the values."""
    assert json.loads(json.dumps(written(OUTPUTS, "json"))) == {"y": [[0.5, 1.0]], "label": ["größer"]}


@pytest.mark.parametrize("value", [{}, {"dtype": "float32"}, {"dtype": "float32", "shape": [2], "base64": "AAAA"}])
def test_bad_tensors_are_refused_by_name(value: object):
    """The error names the input whose object is no tensor."""
    with pytest.raises(InvalidInput, match=r"^weights: "):
        read({"x": [[1]], "weights": value})


def test_the_codec_is_that_of_the_package(models_root: Path):
    """The active version and a named version have codecs of their own; an unknown model has none."""
    folder = write_double(models_root)
    spec = load_package(folder).spec
    broker = MemoryBroker()
    broker.put_spec("double", spec.to_json())
    binary = json.loads(spec.to_json()) | {"version": "2", "codecs": {"default": "base64"}}
    broker.put_spec("double", json.dumps(binary).encode(), "2")
    assert codec_of(broker, models_root, "double", "") == "json"
    assert codec_of(broker, models_root, "double", "2") == "base64"
    with pytest.raises(UnknownModel):
        codec_of(broker, models_root, "absent", "")
