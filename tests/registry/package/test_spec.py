"""ModelSpec: the accepted fields of model.yaml, and one line for each refusal."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.registry.errors import ConfigurationError, InvalidInput
from penstock.registry.package import ModelSpec, discover, load_package
from penstock.registry.package.spec_sections import EndpointPolicy
from tests.registry.package.documents import ENCODER, PLAIN, SCRIPTED, SEQUENCES, changed, nested, write
from tests.servers import ROOT

SAMPLES = ROOT / "models"


def test_sample_packages_are_valid_and_survive_the_broker():
    """What a client reads from the broker is what the worker read from the file."""
    found = discover(SAMPLES)
    assert [(ref.name, ref.version) for ref in found] == [("counter", "1"), ("minilm", "1"), ("mlp", "1")]
    for ref in found:
        spec = load_package(ref.path).spec
        assert ModelSpec.from_json(spec.to_json()) == spec


def test_keys_of_a_newer_worker_are_ignored_by_an_older_client(models_root: Path):
    """Rolling upgrades may put fields into the broker that a client does not know yet."""
    spec = load_package(write(models_root, PLAIN)).spec
    document = json.loads(spec.to_json())
    document["stages"] = {"canary": 1}
    document["batching"]["adaptive"] = True
    document["inputs"][0]["codec"] = "raw"
    assert ModelSpec.from_json(json.dumps(document).encode()) == spec


def test_stored_spec_that_is_none_is_one_clear_line():
    """A client that finds something else under the spec's key says so."""
    with pytest.raises(ConfigurationError, match=r"^Stored model spec: "):
        ModelSpec.from_json(b"not json")


TENSOR = {"name": "x", "dtype": "float32", "shape": ["batch", 4]}

REFUSED: list[tuple[str, object, str]] = [
    ("missing format", changed(PLAIN, format=None), "format: missing, expected a value"),
    (
        "unknown format",
        changed(PLAIN, format="pickle"),
        "format: found \"pickle\", expected 'torchscript', 'python', 'pytorch', 'transformers', 'onnx', 'pipeline' or "
        "'generate'",
    ),
    ("misspelt field", changed(PLAIN, entrypont="m:b"), "entrypont: unknown field, expected entrypoint"),
    (
        "misspelt section field",
        changed(PLAIN, batching={"max_batchsize": 1}),
        "batching.max_batchsize: unknown field, expected max_batch_size",
    ),
    (
        "negative",
        changed(PLAIN, batching={"max_batch_size": -1}),
        "batching.max_batch_size: found -1, expected greater than or equal to 0",
    ),
    (
        "string for a number",
        changed(PLAIN, concurrency="2"),
        'concurrency: found "2", expected a whole number, without quotes',
    ),
    (
        "python without entry point",
        changed(PLAIN, entrypoint=None),
        "entrypoint: found None, expected module:build for format python",
    ),
    (
        "entry point that climbs",
        changed(PLAIN, entrypoint="../evil:build"),
        "entrypoint: found '../evil:build', expected module:build for format python",
    ),
    (
        "entry point that is not there",
        changed(PLAIN, entrypoint="absent:build"),
        "entrypoint: found 'absent:build', expected a module inside the package",
    ),
    ("other name", changed(PLAIN, name="other"), "name: found 'other', expected 'plain' as the folder says"),
    ("other version", changed(PLAIN, version=2), "version: found '2', expected '1' as the folder says"),
    (
        "dtype",
        changed(PLAIN, inputs=[TENSOR | {"dtype": "float"}]),
        "inputs[0].dtype: found 'float', expected one of: bool, int8, int16, int32, int64, uint8, uint16, uint32, "
        "uint64, float16, float32, float64, string",
    ),
    (
        "extent",
        changed(PLAIN, inputs=[TENSOR | {"shape": ["batch", 0]}]),
        "inputs[0].shape[1]: found 0, expected an extent of at least 1 or a symbolic name such as batch",
    ),
    (
        "batch elsewhere",
        changed(PLAIN, inputs=[TENSOR | {"shape": [4, "batch"]}]),
        "inputs[0]: shape: found (4, batch), expected batch as the first dimension only",
    ),
    (
        "no batch",
        changed(PLAIN, outputs=[TENSOR | {"shape": [4]}]),
        "shape of x: expected batch as the first dimension unless streams is true",
    ),
    ("two of a name", changed(PLAIN, inputs=[TENSOR, TENSOR]), "inputs: found x, x, expected distinct names"),
    (
        "nothing required",
        changed(PLAIN, inputs=[TENSOR | {"optional": True}]),
        "inputs: found optional ones only, expected one that is required",
    ),
    (
        "range",
        changed(PLAIN, inputs=[TENSOR | {"min": 2, "max": 1}]),
        "inputs[0]: min, max: found 2 > 1, expected min <= max",
    ),
    (
        "range beyond the type",
        changed(PLAIN, inputs=[TENSOR | {"dtype": "int8", "max": 1000}]),
        "inputs[0]: max: found 1000, expected a value that int8 can hold",
    ),
    (
        "range between the numbers of its type",
        changed(PLAIN, inputs=[TENSOR | {"dtype": "int8", "min": 0.5}]),
        "inputs[0]: min: found 0.5, expected a value that int8 can hold",
    ),
    (
        "range that is none",
        changed(PLAIN, inputs=[TENSOR | {"min": float("nan")}]),
        "inputs[0].min: found nan, expected a finite number",
    ),
    (
        "number beyond every float",
        changed(PLAIN, inputs=[TENSOR | {"max": 10**400}]),
        f"inputs[0].max: found 1{'0' * 79}, expected a finite number",
    ),
    (
        "NaN of integers",
        changed(PLAIN, inputs=[TENSOR | {"dtype": "int8", "allow_nan": True}]),
        "inputs[0]: allow_nan: found true for dtype int8, expected it for floats only",
    ),
    (
        "range of an output",
        changed(PLAIN, outputs=[TENSOR | {"max": 1}]),
        "outputs: x: max: found one, expected it for inputs only",
    ),
    (
        "output that may be missing",
        changed(PLAIN, outputs=[TENSOR | {"optional": True}]),
        "outputs: x: optional: found one, expected it for inputs only",
    ),
    (
        "row that fits into no message",
        changed(PLAIN, inputs=[TENSOR | {"shape": ["batch", 10**6, 10**6]}]),
        "inputs: x: found shape (batch, 1000000, 1000000), expected one row of all inputs within 10485760 bytes",
    ),
    (
        "more inputs than a message holds",
        changed(PLAIN, inputs=[TENSOR | {"name": f"x{number}"} for number in range(65)]),
        'inputs: found [{"dtype": "float32", "name": "x0", "shape": ["batch", 4]}, {"dtype": "float32",, expected at '
        "most 64 entries",
    ),
    (
        "threads without end",
        changed(PLAIN, concurrency=10**9),
        "concurrency: found 1000000000, expected less than or equal to 64",
    ),
    (
        "instances beside concurrency",
        changed(PLAIN, instances=2, concurrency=4),
        "instances: found 2 beside concurrency 4, expected one of them: each instance runs one forward at a time",
    ),
    (
        "instances on a GPU",
        changed(PLAIN, instances=2, device="cuda"),
        "instances: found 2, expected 1 with device cuda",
    ),
    (
        "tokenizer in another process",
        changed(ENCODER, instances=2),
        "instance_kind: found process, expected thread for format transformers: the worker itself tokenises",
    ),
    (
        "unknown kind of instances",
        changed(PLAIN, instances=2, instance_kind="fork"),
        "instance_kind: found \"fork\", expected 'process' or 'thread'",
    ),
    (
        "wait without end",
        changed(PLAIN, batching={"max_wait_ms": float("inf")}),
        "batching.max_wait_ms: found Infinity, expected a finite number",
    ),
    (
        "exponent that YAML reads as text",
        changed(PLAIN, timeout_s="1e2"),
        'timeout_s: found "1e2", expected a number, without quotes; with an exponent as in 1.0e-3',
    ),
    (
        "section without fields",
        changed(PLAIN) | {"batching": None},
        "batching: found null, expected a mapping of fields",
    ),
    ("mapping for a list", changed(PLAIN, inputs={"x": 1}), 'inputs: found {"x": 1}, expected a list'),
    ("number for a name", changed(PLAIN) | {3: 1}, "[3]: found a field that is called 3, expected names of text"),
    (
        "source of code",
        changed(PLAIN, source={"path": "."}),
        "source: found one, expected none for format python",
    ),
    (
        "embeddings of any width",
        changed(ENCODER, outputs=[{"name": "e", "dtype": "float32", "shape": ["batch", "width"]}]),
        "outputs: expected one float32 output of shape (batch, width) with a number as width, for format transformers",
    ),
    (
        "length of nothing",
        changed(PLAIN, batching={"length_input": "x"}),
        "batching.length_input: found 'x', expected an input of text or with a symbolic dimension besides batch",
    ),
    (
        "limit without length",
        changed(PLAIN, batching={"max_tokens": 9}),
        "batching.length_input: missing, expected with max_length, max_tokens and buckets",
    ),
    (
        "cutting what is no text",
        changed(SEQUENCES, batching={"length_input": "x", "truncate": True}),
        "batching.truncate: found true, expected it for format transformers only",
    ),
    (
        "buckets out of order",
        changed(SEQUENCES, batching={"length_input": "x", "buckets": [64, 32]}),
        "batching.buckets: found 64, 32, expected ascending lengths",
    ),
    (
        "bucket of nothing",
        changed(SEQUENCES, batching={"length_input": "x", "buckets": [0]}),
        "batching.buckets[0]: found 0, expected greater than or equal to 1",
    ),
    (
        "bucket beyond the limit",
        changed(SEQUENCES, batching={"length_input": "x", "max_length": 16, "buckets": [8, 32]}),
        "batching.buckets: found 32, expected at most max_length 16",
    ),
    (
        "buckets without a length",
        changed(PLAIN, batching={"buckets": [8]}),
        "batching.length_input: missing, expected with max_length, max_tokens and buckets",
    ),
    (
        "buckets of tensors",
        changed(SEQUENCES, batching={"length_input": "x", "buckets": [8, 32]}),
        "batching.buckets: found 8, 32, expected them for an encoder of transformers only: other models would take "
        "padding for input",
    ),
    (
        "buckets of a pipeline",
        changed(ENCODER, task="fill-mask", batching={"length_input": "text", "buckets": [8]}),
        "batching.buckets: found 8, expected them for an encoder of transformers only: other models would take "
        "padding for input",
    ),
    (
        "source outside",
        changed(ENCODER, source={"path": "../other"}),
        "source.path: found '../other', expected a relative path inside the package",
    ),
    (
        "TensorFlow",
        changed(PLAIN, format="SavedModel"),
        "format: found 'SavedModel', expected one of: torchscript, python, pytorch, transformers, onnx, pipeline, "
        "generate; "
        "TensorFlow is not supported, export to onnx",
    ),
    (
        "remote code",
        changed(ENCODER, source={"path": ".", "trust_remote_code": True}),
        "source: trust_remote_code: found True, expected none: code that comes with weights is never run",
    ),
    (
        "remote code at the top, switched off",
        changed(ENCODER, trust_remote_code=False),
        "trust_remote_code: found False, expected none: code that comes with weights is never run",
    ),
    (
        "sharding",
        changed(PLAIN, auto_shard_model=True),
        "auto_shard_model: found True, expected none: a model is served by one device and is not sharded",
    ),
    (
        "pickled weights",
        changed(PLAIN, format="pytorch", weights="model.bin"),
        "weights: found 'model.bin', expected a file .safetensors for format pytorch; a pickle can run code",
    ),
    (
        "checkpoint for ONNX",
        changed(SCRIPTED, format="onnx", weights="model.ckpt"),
        "weights: found 'model.ckpt', expected a file .onnx for format onnx; a pickle can run code",
    ),
    (
        "no weights",
        changed(SCRIPTED, weights=None),
        "weights: missing, expected model.ts or model.pt in the package, or the name of a file as weights",
    ),
    (
        "weights that are not there",
        changed(SCRIPTED, weights="absent.pt"),
        "weights: found 'absent.pt', expected a file of the package",
    ),
    (
        "weights outside",
        changed(SCRIPTED, weights="../model.pt"),
        "weights: found '../model.pt', expected a relative path inside the package",
    ),
    (
        "weights of a function",
        changed(PLAIN, weights="model.pt"),
        "weights: found 'model.pt', expected none for format python",
    ),
    (
        "entry point of TorchScript",
        changed(SCRIPTED, entrypoint="model:build"),
        "entrypoint: found one, expected none for format torchscript",
    ),
    (
        "number that lost digits",
        changed(PLAIN, version=1.1),
        'version: found 1.1 without quotes, expected quotes, as in version: "1.1" with all its digits',
    ),
    (
        "version that is a date",
        changed(PLAIN, version=datetime.date(2026, 11, 22)),
        'version: found 2026-11-22 without quotes, expected quotes, as in version: "2026-11-22" with all its digits',
    ),
    (
        "signature beside inputs",
        changed(nested(PLAIN), inputs=PLAIN["inputs"]),
        "signature: found beside inputs, expected one of the two forms",
    ),
    (
        "signature of another kind",
        changed(nested(PLAIN), signature="x"),
        "signature: found 'x', expected a mapping with inputs and outputs",
    ),
    (
        "field of a signature",
        changed(nested(PLAIN), signature={**nested(PLAIN)["signature"], "input": []}),
        "signature.input: unknown field, expected inputs or outputs",
    ),
    (
        "half a signature",
        changed(nested(PLAIN), signature={"inputs": PLAIN["inputs"]}),
        "signature.outputs: missing, expected a value",
    ),
    (
        "tensor in a signature",
        changed(
            nested(PLAIN),
            signature={**nested(PLAIN)["signature"], "outputs": [{"name": "y", "dtype": "f4", "shape": ["batch"]}]},
        ),
        "signature.outputs[0].dtype: found 'f4', expected one of: "
        "bool, int8, int16, int32, int64, uint8, uint16, uint32, uint64, float16, float32, float64, string",
    ),
    ("task elsewhere", changed(PLAIN, task="fill-mask"), "task: found one, expected none for format python"),
    (
        "task that is none",
        changed(ENCODER, task="Fill Mask"),
        "task: found 'Fill Mask', expected a pipeline's name such as text-classification",
    ),
    (
        "branch of a repository",
        changed(ENCODER, source={"hub": "org/name", "revision": "main"}),
        "source: revision: found 'main', expected a commit of 40 hex digits",
    ),
    (
        "repository without a commit",
        changed(ENCODER, source={"hub": "org/name"}),
        "source: revision: found None, expected a commit of 40 hex digits",
    ),
    (
        "repository that climbs",
        changed(ENCODER, source={"hub": "../name", "revision": "0" * 40}),
        "source: hub: found '../name', expected organisation/name",
    ),
    (
        "repository with the cache's separator",
        changed(ENCODER, source={"hub": "org--other/name", "revision": "0" * 40}),
        "source: hub: found 'org--other/name', expected organisation/name",
    ),
    (
        "two sources",
        changed(ENCODER, source={"hub": "org/name", "revision": "0" * 40, "package": "os"}),
        "source: hub: found beside package, expected one of them",
    ),
    (
        "commit of nothing",
        changed(ENCODER, source={"revision": "0" * 40}),
        "source: revision: found without hub, expected both or neither",
    ),
    (
        "checksum",
        changed(PLAIN, files={"model.py": "abc"}),
        "files.model.py: found 'abc', expected a SHA-256 of 64 lower-case hex digits",
    ),
    (
        "codec",
        changed(PLAIN, codecs={"default": "pickle"}),
        "codecs.default: found \"pickle\", expected 'json' or 'base64'",
    ),
    (
        "codec misspelt",
        changed(PLAIN, codecs={"defualt": "json"}),
        "codecs.defualt: unknown field, expected default",
    ),
    (
        "precision",
        changed(PLAIN, precision="int4"),
        "precision: found \"int4\", expected 'auto', 'fp32', 'bf16' or 'fp16'",
    ),
    ("device", changed(PLAIN, device="tpu"), "device: found \"tpu\", expected 'auto', 'cpu' or 'cuda'"),
    ("level", changed(PLAIN, max_level=5), "max_level: found 5, expected less than or equal to 4"),
    ("memory", changed(PLAIN, memory_mb=0), "memory_mb: found 0, expected greater than or equal to 1"),
    (
        "policy field",
        changed(PLAIN, policy={"endpoints": {"fast": {"rollout_percent": 101}}}),
        "policy.endpoints.fast.rollout_percent: found 101, expected less than or equal to 100",
    ),
    (
        "policy field misspelt",
        changed(PLAIN, policy={"default": {"windowms": 1}}),
        "policy.default.windowms: unknown field, expected window_ms",
    ),
    (
        "policy fields beside the endpoints",
        changed(PLAIN, policy={"window_ms": 1}),
        "policy.window_ms: unknown field, expected one of: default, endpoints",
    ),
    (
        "endpoint that is no name",
        changed(PLAIN, policy={"endpoints": {"../x": {}}}),
        "policy: endpoints: Bad endpoint name '../x'. Expected 1 to 64 characters of a-z, 0-9, '.', '_' or '-', "
        "starting with a letter or digit",
    ),
    (
        "encoder of numbers",
        changed(ENCODER, inputs=[TENSOR]),
        "inputs: expected one string input of shape (batch,) for format transformers",
    ),
    (
        "streams elsewhere",
        changed(PLAIN, format="pytorch", streams=True),
        "streams: found true, expected it for format python only, with max_batch_size 1",
    ),
    ("a list", [1, 2], "found list, expected a mapping of fields"),
]


@pytest.mark.parametrize(("document", "text"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_refusal_names_the_file_the_field_what_was_found_and_expected(models_root: Path, document: object, text: str):
    """A package that cannot work is refused in one line (IN-023, IN-024, IN-025)."""
    with pytest.raises(ConfigurationError) as refused:
        load_package(write(models_root, document))
    assert str(refused.value) == f"plain/1/model.yaml: {text}"


@pytest.mark.parametrize(
    "fields",
    [
        {"format": "torchscript", "weights": "model.pt", "entrypoint": None},
        {"format": "torchscript", "weights": "nested/model.ts", "entrypoint": None},
        {"format": "onnx", "weights": "model.onnx", "entrypoint": None},
        {"format": "pytorch", "weights": "model.safetensors"},
        {"format": "pytorch"},
        {"format": "python"},
    ],
    ids=lambda fields: f"{fields['format']} {fields.get('weights', '')}",
)
def test_each_format_names_its_weights(fields: dict[str, Any], models_root: Path):
    """The file is found in the package; a format without weights has none (IN-024)."""
    folder = models_root / "plain" / "1"
    if name := fields.get("weights"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(b"weights")
    package = load_package(write(models_root, changed(PLAIN, **fields)))
    assert package.weights_file() == ((folder / name).resolve() if name else None)


@pytest.mark.parametrize(
    "base", [PLAIN, ENCODER, ENCODER | {"task": "text-classification"}], ids=["plain", "encoder", "pipeline"]
)
def test_every_optional_field_survives_the_broker(base: dict[str, Any], models_root: Path):
    """A client knows what the worker knows, but for the checksums (IN-026, IN-027, AR-023)."""
    document = base | {
        "batching": {"length_input": base["inputs"][0]["name"], "max_length": 64},
        "codecs": {"default": "base64"},
        "concurrency": 3,
        "precision": "bf16",
        "device": "cpu",
        "max_level": 3,
        "memory_mb": 100,
        "policy": {"default": {"cache_ttl_s": 60}, "endpoints": {"fast": {"window_ms": 1.5}}},
        "files": {"model.py": "0" * 64},
    }
    if base is PLAIN:
        document["inputs"] = SEQUENCES["inputs"]
    if base is ENCODER:
        document["batching"]["buckets"] = [16, 32, 64]
    spec = load_package(write(models_root, document)).spec
    read = ModelSpec.from_json(spec.to_json())
    assert read == spec.model_copy(update={"files": None})
    buckets = (16, 32, 64) if base is ENCODER else ()
    assert (read.batching.buckets, read.codecs.default, read.precision) == (buckets, "base64", "bf16")


def test_policy_of_an_endpoint_falls_back_field_by_field():
    """The endpoint's own value, else the policy's default, else the model's; None: the setting's (AR-023)."""
    own = {"batching": {"max_wait_ms": 7}, "precision": "fp16", "concurrency": 2}
    policy = {
        "default": {"window_ms": 5, "cache_ttl_s": 60, "fallback_runtime": "reference"},
        "endpoints": {"fast": {"window_ms": 0, "concurrency": 4, "precision": "bf16", "rollout_percent": 10}},
    }
    spec = ModelSpec.model_validate(PLAIN | own | {"policy": policy})
    assert spec.policy_for("fast") == EndpointPolicy(
        window_ms=0,
        precision="bf16",
        concurrency=4,
        cache_ttl_s=60,
        fallback_runtime="reference",
        rollout_percent=10,
    )
    assert spec.policy_for("infer") == EndpointPolicy(
        window_ms=5, precision="fp16", concurrency=2, cache_ttl_s=60, fallback_runtime="reference"
    )
    assert ModelSpec.model_validate(PLAIN).policy_for("infer") == EndpointPolicy(concurrency=1)
    assert ModelSpec.model_validate(PLAIN | {"instances": 3}).policy_for("infer") == EndpointPolicy(concurrency=3)


def test_513_are_refused_where_512_are_the_limit():
    """Longer than the model's or the setting's limit is refused before anything is written (CX-022)."""
    own = ModelSpec.model_validate(SEQUENCES | {"batching": {"length_input": "x", "max_length": 1024}})
    for length in (512, 513):
        own.signature.check({"x": [[1] * length]})
    lowered = own.limited_to(512)
    lowered.signature.check({"x": [[1] * 512]})
    with pytest.raises(InvalidInput, match=r"^x: 513 long\. Expected at most 512$"):
        lowered.signature.check({"x": [[1] * 513]})


def test_lowering_a_limit_never_raises_it():
    """A model's own lower limit stays, buckets beyond the limit go, and a model without a length has no limit."""
    short = ModelSpec.model_validate(SEQUENCES | {"batching": {"length_input": "x", "max_length": 16}})
    assert short.limited_to(512) == short
    assert ModelSpec.model_validate(PLAIN).limited_to(512).batching.max_length is None
    bucketed = ModelSpec.model_validate(ENCODER | {"batching": {"length_input": "text", "buckets": [8, 32]}})
    assert bucketed.limited_to(16).batching.buckets == (8,)
    encoder = ModelSpec.model_validate(ENCODER).limited_to(512)
    assert (encoder.batching.max_length, encoder.batching.length_input) == (512, "text")


@pytest.mark.parametrize(
    ("own", "positions", "setting", "limit"),
    [(None, 256, 512, 256), (None, 1024, 512, 512), (None, None, 512, 512), (128, 1024, 512, 128)],
)
def test_a_setting_never_asks_for_more_than_the_weights_read(
    own: int | None, positions: int | None, setting: int, limit: int, models_root: Path
):
    """The setting lowers what an encoder's package and weights allow; it makes no package unloadable (CX-022)."""
    batching = {"batching": {"length_input": "text", "max_length": own}} if own else {}
    folder = write(models_root, ENCODER | {"source": {"path": "."}} | batching)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    assert load_package(folder).limited_to(setting).spec.batching.max_length == limit


def test_clients_do_not_count_the_tokens_of_a_text():
    """A limit in tokens is the worker's to apply: a client would count characters."""
    limited = ModelSpec.model_validate(ENCODER | {"batching": {"length_input": "text", "max_length": 16}})
    limited.signature.check({"text": ["a" * 100]})


@pytest.mark.parametrize("field", ["auto_shard_model", "sharding", "sharding_axis_dims"])
def test_models_are_not_sharded_and_the_refusal_says_so(models_root: Path, field: str):
    """Fields by which other servers spread a model over devices have the reason in place of a guess (ES-018)."""
    with pytest.raises(ConfigurationError) as refused:
        load_package(write(models_root, changed(PLAIN, **{field: [1, 1, 1, -1, 1]})))
    reason = "expected none: a model is served by one device and is not sharded"
    assert str(refused.value) == f"plain/1/model.yaml: {field}: found [1, 1, 1, -1, 1], {reason}"
