"""Inputs made from declarations: the declaration accepts them, and the lines to paste are a program."""

from __future__ import annotations

import ast
import json
import shlex
from typing import Any

import numpy as np
import pytest

from penstock.compose.samples import first_call, first_request, random_jobs
from penstock.registry.generation_inputs import checked
from penstock.registry.package import ModelSpec

DECLARATIONS: dict[str, list[dict[str, Any]]] = {
    "text": [{"name": "text", "dtype": "string", "shape": ["batch"]}],
    "wide": [{"name": "x", "dtype": "float32", "shape": ["batch", 384]}],
    "ranges": [
        {"name": "low", "dtype": "int64", "shape": ["batch"], "min": 200},
        {"name": "high", "dtype": "int8", "shape": ["batch"], "max": -7},
        {"name": "narrow", "dtype": "float32", "shape": ["batch"], "min": 0.25, "max": 0.5},
    ],
    "edges": [
        {"name": "last", "dtype": "uint8", "shape": ["batch"], "min": 250},
        {"name": "first", "dtype": "int8", "shape": ["batch"], "max": -120},
        {"name": "below", "dtype": "float32", "shape": ["batch"], "min": -5, "max": -1},
        {"name": "vast", "dtype": "float32", "shape": ["batch"], "min": -3e38, "max": 3e38},
    ],
    "flags": [{"name": "flag", "dtype": "bool", "shape": ["batch", 2]}],
    "same-length": [
        {"name": "ids", "dtype": "int32", "shape": ["batch", "length"]},
        {"name": "mask", "dtype": "int32", "shape": ["batch", "length"], "min": 0, "max": 1},
    ],
    "optional": [
        {"name": "x", "dtype": "float16", "shape": ["batch", 20], "min": 3},
        {"name": "y", "dtype": "string", "shape": ["batch"], "optional": True},
    ],
    "many-texts": [{"name": "texts", "dtype": "string", "shape": ["batch", 9]}],
}


def spec_of(inputs: list[dict[str, Any]], **more: Any) -> ModelSpec:
    outputs = [{"name": "y", "dtype": "float32", "shape": ["batch"]}]
    declared = {"name": "m", "version": "1", "format": "python", "entrypoint": "model:build"}
    return ModelSpec.model_validate({**declared, "inputs": inputs, "outputs": outputs, **more})


def submitted(lines: list[str]) -> Any:
    """The inputs that a program submits, evaluated; the program is parsed as a whole."""
    tree = ast.parse("\n".join(lines))
    (call,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "submit"
    )
    assert ("np" in {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}) == (
        "import numpy as np" in lines
    )
    return eval(ast.unparse(call.args[1]), {"np": np})  # noqa: S307  # our own source


@pytest.mark.parametrize("inputs", DECLARATIONS.values(), ids=DECLARATIONS)
def test_the_lines_to_paste_submit_what_the_declaration_accepts(inputs):
    """For every kind of input the program of `penstock up` parses, and its inputs pass the check of the client."""
    spec = spec_of(inputs)
    lines = first_call(spec)
    assert "client = Client.from_env()" in lines
    checked = spec.signature.check(submitted(lines))
    assert spec.signature.rows(checked) == 1


@pytest.mark.parametrize("inputs", DECLARATIONS.values(), ids=DECLARATIONS)
def test_the_line_of_curl_sends_what_the_declaration_accepts(inputs):
    """A shell splits it into the words that are meant, and the inputs pass the check of the gateway."""
    spec = spec_of(inputs)
    program, url, *options = shlex.split(first_request(spec, "http://127.0.0.1:8000").as_curl)
    assert (program, url) == ("curl", "http://127.0.0.1:8000/v1/models/m:predict")
    assert options[:-1] == ["-H", "Content-Type: application/json", "-d"]
    checked = spec.signature.check(json.loads(options[-1])["inputs"])
    assert spec.signature.rows(checked) == 1


def test_a_model_that_streams_is_called_as_a_stream():
    """The program prints each event, and ends with the empty line that closes a loop at a prompt."""
    spec = spec_of([{"name": "count", "dtype": "int64", "shape": [1]}], streams=True, batching={"max_batch_size": 1})
    lines = first_call(spec)
    assert lines[-3:] == [
        'for event in client.submit("m", {"count": [0]}).stream():',
        "    print(event.type, event.data)",
        "",
    ]


def test_a_model_that_generates_text_gets_a_prompt():
    """All its inputs are optional, and a job without a prompt would be refused."""
    fields = {"name": "writer", "version": "1", "format": "generate", "source": {}}
    spec = ModelSpec.model_validate({**fields, "generate": {"max_model_len": 256}})
    assert submitted(first_call(spec)) == {"prompt": ["a sentence"]}
    body = json.loads(first_request(spec, "http://127.0.0.1:8000").body)
    assert body == {"inputs": {"prompt": ["a sentence"]}}
    for inputs in (body["inputs"], *random_jobs(spec, 5, np.random.default_rng(0))):
        assert spec.signature.check(checked(spec, inputs)).keys() == {"prompt"}


def test_a_short_limit_of_text_is_kept():
    """The sentence to paste, and random texts, are no longer than the declaration allows."""
    spec = spec_of(DECLARATIONS["text"], batching={"length_input": "text", "max_length": 4})
    assert submitted(first_call(spec)) == {"text": ["a se"]}
    for job in random_jobs(spec, 20, np.random.default_rng(0)):
        spec.signature.check(job)


@pytest.mark.parametrize("inputs", DECLARATIONS.values(), ids=DECLARATIONS)
def test_random_jobs_fit_the_declaration(inputs):
    """Random inputs are of one row and pass the check of the client; where the declaration has room, they differ."""
    spec = spec_of(inputs)
    jobs = list(random_jobs(spec, 50, np.random.default_rng(0)))
    assert all(spec.signature.rows(spec.signature.check(job)) == 1 for job in jobs)
    distinct = {tuple(str(array.tolist()) for array in job.values()) for job in jobs}
    assert len(distinct) > 1
