"""model.yaml -> ModelSpec: the inputs and outputs of a model, its runtime, its limits.

    a mapping of fields -> ModelSpec (checked) -> ModelSpec.to_json -> `{model}:spec` in the broker
                                                  ModelSpec.from_json <- a client

Pure: no file is read here; registry/package/loading.py does that. Each problem is one line: the field, the value
found and the value expected.
"""

from __future__ import annotations

import datetime
import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError, model_validator

from penstock.registry.errors import ConfigurationError, InvalidInput, shown
from penstock.registry.package.generation import GENERATE, Generation, with_signature
from penstock.registry.package.inspection import PICKLES
from penstock.registry.package.signature import BATCH, Signature, TensorSpec, shape_text
from penstock.registry.package.spec_sections import (
    MAX_CONCURRENCY,
    Batching,
    Codecs,
    DeviceChoice,
    EndpointPolicy,
    InsidePath,
    Policy,
    Precision,
    Section,
    Source,
)
from penstock.registry.package.steps import MAX_STEPS, Step, check_names
from penstock.registry.queues import DEFAULT_ENDPOINT, parse_name
from penstock.registry.tensors import DTYPES, MAX_BYTES, MAX_RESULT_BYTES, MAX_TENSORS, STRING

__all__ = [
    "FORMATS",
    "FOUND_WEIGHTS",
    "PIPELINE",
    "SPEC_FILE",
    "ModelSpec",
    "first_problem",
]

SPEC_FILE: Final = "model.yaml"
_ENTRYPOINT: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*\Z")
_TASK: Final = re.compile(r"[a-z][a-z0-9-]{0,63}\Z")
_MAX_MEMORY_MB: Final = 1 << 24
_MAX_TIMEOUT_S: Final = 86_400
_STRING_BYTES: Final = 4
"""The bytes of an empty string in a body."""
_SHA256: Final = re.compile(r"[0-9a-f]{64}\Z")
_TENSORS: Final = ("inputs", "outputs")
"""The fields of the section `signature`, which may also stand beside it."""

Format = Literal["torchscript", "python", "pytorch", "transformers", "onnx", "pipeline", "generate"]
FORMATS: Final[tuple[str, ...]] = get_args(Format)
"""The formats of packages. Each has a runtime."""
PIPELINE: Final = "pipeline"
"""The format whose model is the packages of its steps."""
_TENSORFLOW: Final = frozenset({"tensorflow", "savedmodel", "saved_model", "keras", "tflite", "tfjs"})
_WEIGHTS: Final = {"torchscript": (".pt", ".ts"), "pytorch": (".safetensors",), "onnx": (".onnx",)}
"""The formats with a `weights` file, and the endings of its name."""
FOUND_WEIGHTS: Final = {
    "torchscript": ("model.ts", "model.pt"),
    "pytorch": ("model.safetensors",),
    "onnx": ("model.onnx",),
}
"""The files of a package that `weights` need not name."""


def _version_text(value: object) -> object:
    if isinstance(value, float | datetime.date):
        # The digits of the file are lost by now: 1.10 was read as 1.1.
        raise ValueError(f'found {value} without quotes, expected quotes, as in version: "{value}" with all its digits')
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _served_format(value: object) -> object:
    if isinstance(value, str) and value.lower() in _TENSORFLOW:
        raise ValueError(
            f"found {value!r}, expected one of: {', '.join(FORMATS)}; TensorFlow is not supported, export to onnx"
        )
    return value


def _checksum(digest: str) -> str:
    if not _SHA256.match(digest):
        raise ValueError(f"found {digest!r:.80}, expected a SHA-256 of 64 lower-case hex digits")
    return digest


class ModelSpec(Section):
    """One version of one model. Clients and workers check jobs with it."""

    name: str
    """The name of the model: the folder above that of the version."""
    version: Annotated[str, BeforeValidator(_version_text, json_schema_input_type=str | int)]
    """The name of the version: the package's folder."""
    format: Annotated[Format, BeforeValidator(_served_format, json_schema_input_type=Format)]
    """The format of the model, which selects its runtime."""
    entrypoint: str | None = None
    """`module:build` for `pytorch` and `python`; the module is a file of the package."""
    weights: InsidePath | None = None
    """The file of a `torchscript` or `onnx` model, or the safetensors that a `pytorch` module loads; null: model.ts,
    model.pt, model.onnx or model.safetensors."""
    source: Source | None = None
    """The location of the weights of a `transformers` or `generate` model; null: model.safetensors in the package."""
    task: str | None = None
    """The pipeline of a `transformers` model, such as text-classification; null: sentence embeddings."""
    steps: Annotated[tuple[Step, ...] | None, Field(strict=False, min_length=1, max_length=MAX_STEPS)] = None
    """The steps of a `pipeline`, in the order in which they run."""
    files: dict[InsidePath, Annotated[str, AfterValidator(_checksum)]] | None = None
    """SHA-256 of every file of the package except model.yaml; null: files are not compared."""
    inputs: Annotated[tuple[TensorSpec, ...], Field(strict=False, min_length=1, max_length=MAX_TENSORS)]
    """The inputs of a job."""
    outputs: Annotated[tuple[TensorSpec, ...], Field(strict=False, max_length=MAX_TENSORS)]
    """The outputs of the model."""
    generate: Generation | None = None
    """The engine of a `generate` model."""
    batching: Batching = Batching()
    """How jobs are batched."""
    codecs: Codecs = Codecs()
    """How outputs are encoded as JSON."""
    policy: Policy = Policy()
    """Settings by endpoint."""
    precision: Precision = "auto"
    """The number format of a forward; auto: as the worker's setting says."""
    device: DeviceChoice = "auto"
    """The device of the model; auto: the worker's."""
    max_level: Annotated[int | None, Field(ge=0, le=4)] = None
    """The highest optimization level of the model; null: as the worker's setting says."""
    memory_mb: Annotated[int | None, Field(ge=1, le=_MAX_MEMORY_MB)] = None
    """Memory of the loaded model, for runtimes that cannot measure it."""
    concurrency: Annotated[int, Field(ge=1, le=MAX_CONCURRENCY)] = 1
    """Concurrent forwards of one copy of this model in one worker."""
    instances: Annotated[int, Field(ge=1, le=MAX_CONCURRENCY)] = 1
    """Copies of this model in one worker; each runs one forward at a time, on the CPU."""
    instance_kind: Literal["process", "thread"] = "process"
    """Where the copies are: `process` for models that hold Python's lock, `thread` for models that release it."""
    streams: bool = False
    """Whether the entry point yields chunks. Such jobs run one at a time."""
    deterministic: bool = True
    """Whether equal jobs may share one forward. Its response is also cached for `cache_ttl_s`."""
    timeout_s: Annotated[float | None, Field(gt=0, le=_MAX_TIMEOUT_S)] = None
    """The longest time of one forward; null: as the worker's setting says."""

    @model_validator(mode="before")
    @classmethod
    def _takes_signature(cls, fields: Any) -> Any:
        """Moves `signature.inputs` and `signature.outputs` beside the other fields."""
        if not isinstance(fields, Mapping) or "signature" not in fields:
            return fields
        section = fields["signature"]
        if beside := [name for name in _TENSORS if name in fields]:
            raise ValueError(f"signature: found beside {' and '.join(beside)}, expected one of the two forms")
        if not isinstance(section, Mapping):
            raise ValueError(f"signature: found {section!r:.80}, expected a mapping with inputs and outputs")
        if unknown := [name for name in section if name not in _TENSORS]:
            raise ValueError(f"signature.{shown(unknown[0])}: unknown field, expected inputs or outputs")
        return {name: value for name, value in fields.items() if name != "signature"} | dict(section)

    @model_validator(mode="before")
    @classmethod
    def _has_signature(cls, fields: Any) -> Any:
        """Adds the inputs and outputs of a `generate` package."""
        if isinstance(fields, Mapping) and fields.get("format") == GENERATE:
            return with_signature({"generate": {}, **fields})
        return fields

    @model_validator(mode="after")
    def _is_consistent(self) -> ModelSpec:
        for check in (
            _check_names,
            _check_format,
            _check_weights,
            _check_steps,
            _check_outputs,
            _check_batch_dimension,
            _check_sizes,
            _check_length,
            _check_instances,
        ):
            check(self)
        return self

    @cached_property
    def signature(self) -> Signature:
        """The check for this model's inputs."""
        # Clients cannot count tokens: the worker checks this limit.
        limit = None if self.format == "transformers" else self.batching.max_length
        return Signature(self.inputs, self.outputs, self.batching.length_input, limit)

    @property
    def reference(self) -> str:
        """`name/version`."""
        return f"{self.name}/{self.version}"

    @cached_property
    def endpoints(self) -> tuple[str, ...]:
        """The names of the endpoints that jobs may name, sorted."""
        return tuple(sorted({DEFAULT_ENDPOINT, *self.policy.endpoints}))

    def policy_for(self, endpoint: str) -> EndpointPolicy:
        """The policy of an endpoint: its own values, else the default's, else the model's; None: the setting's."""
        # The values were checked as those of this spec.
        own = EndpointPolicy.model_construct(
            window_ms=self.batching.max_wait_ms,
            precision=None if self.precision == "auto" else self.precision,
            concurrency=max(self.concurrency, self.instances),
        )
        return self.policy.of(endpoint).over(own)

    def limited_to(self, max_length: int) -> ModelSpec:
        """The spec with `length_input` limited to `max_length`, in the unit of the model."""
        batching = self.batching
        measured = batching.length_input or (self.inputs[0].name if self.format == "transformers" else None)
        if measured is None or (batching.max_length is not None and batching.max_length <= max_length):
            return self
        lowered = {
            "length_input": measured,
            "max_length": max_length,
            "buckets": tuple(edge for edge in batching.buckets if edge <= max_length),
        }
        limited = self.model_copy(update={"batching": batching.model_copy(update=lowered)})
        # A copy keeps the cached properties of its original.
        limited.__dict__.pop("signature", None)
        return limited

    def to_json(self) -> bytes:
        """The spec as the broker stores it for clients, without the checksums of files."""
        return self.model_dump_json(exclude_none=True, exclude={"files"}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> ModelSpec:
        """The spec from `to_json`. Unknown keys of a newer worker are ignored. Raises ConfigurationError."""
        try:
            return cls.model_validate_json(data, extra="ignore")
        except ValidationError as error:
            raise ConfigurationError(f"Stored model spec: {first_problem(error)}") from None


def _check_names(spec: ModelSpec) -> None:
    for field, kind, name in (("name", "model", spec.name), ("version", "version", spec.version)):
        try:
            parse_name(kind, name)
        except InvalidInput as error:
            raise ValueError(f"{field}: {error}") from None
    for field, tensors in (("inputs", spec.inputs), ("outputs", spec.outputs)):
        names = [tensor.name for tensor in tensors]
        if len(set(names)) < len(names):
            raise ValueError(f"{field}: found {', '.join(names)}, expected distinct names")


def _check_format(spec: ModelSpec) -> None:
    is_code = spec.format in ("pytorch", "python")
    if is_code and (spec.entrypoint is None or not _ENTRYPOINT.match(spec.entrypoint)):
        raise ValueError(f"entrypoint: found {spec.entrypoint!r:.80}, expected module:build for format {spec.format}")
    if spec.generate is not None and spec.format != GENERATE:
        raise ValueError(f"generate: found one, expected none for format {spec.format}")
    if spec.format == "transformers":
        _check_transformers(spec)
    elif spec.format == GENERATE:
        _check_generate(spec)
    else:
        for field in ("source", "task") if is_code else ("entrypoint", "source", "task"):
            if getattr(spec, field) is not None:
                raise ValueError(f"{field}: found one, expected none for format {spec.format}")
    if spec.streams and (spec.format not in ("python", GENERATE) or spec.batching.max_batch_size > 1):
        raise ValueError("streams: found true, expected it for format python only, with max_batch_size 1")


def _check_generate(spec: ModelSpec) -> None:
    has_server = spec.generate is not None and spec.generate.runtime_url is not None
    if spec.source is None and not has_server:
        raise ValueError(f"source: expected a source, or model.safetensors in the package, for format {GENERATE}")
    if spec.source is not None and has_server:
        raise ValueError("source: found weights beside generate.runtime_url, expected one of both")
    for field in ("entrypoint", "task"):
        if getattr(spec, field) is not None:
            raise ValueError(f"{field}: found one, expected none for format {GENERATE}")
    for field, found, expected in (
        ("concurrency", spec.concurrency, "1: generate.max_num_seqs says how many jobs run at a time"),
        ("instances", spec.instances, "1"),
        ("precision", "auto" if spec.precision in ("fp32", "bf16") else spec.precision, "auto, fp32 or bf16"),
    ):
        if found not in (1, "auto"):
            raise ValueError(f"{field}: found {found}, expected {expected} for format {GENERATE}")
    if spec.device == "cpu" and spec.generate is not None and spec.generate.hbm_utilization is not None:
        raise ValueError("generate.hbm_utilization: found one with device cpu, expected kv_cache_mb in its place")


def _check_transformers(spec: ModelSpec) -> None:
    if spec.source is None or spec.entrypoint is not None:
        raise ValueError(
            "source: expected a source, or model.safetensors in the package, and no entrypoint for format transformers"
        )
    if [(one.dtype, one.shape) for one in spec.inputs] != [(STRING, (BATCH,))]:
        raise ValueError(f"inputs: expected one string input of shape ({BATCH},) for format transformers")
    if spec.task is not None:
        if not _TASK.match(spec.task):
            raise ValueError(f"task: found {spec.task!r:.80}, expected a pipeline's name such as text-classification")
    elif [(one.dtype, len(one.shape)) for one in spec.outputs] != [("float32", 2)] or isinstance(
        spec.outputs[0].shape[1], str
    ):
        raise ValueError(
            f"outputs: expected one float32 output of shape ({BATCH}, width) with a number as width, for format "
            "transformers"
        )


def _check_weights(spec: ModelSpec) -> None:
    endings = _WEIGHTS.get(spec.format)
    if endings is None:
        if spec.weights is not None:
            raise ValueError(f"weights: found {spec.weights!r:.80}, expected none for format {spec.format}")
        return
    if spec.weights is None:
        if spec.format == "pytorch":
            return
        found = " or ".join(FOUND_WEIGHTS[spec.format])
        raise ValueError(f"weights: missing, expected {found} in the package, or the name of a file as weights")
    if not spec.weights.endswith(endings):
        reason = "; a pickle can run code" if spec.weights.endswith(PICKLES) else ""
        raise ValueError(
            f"weights: found {spec.weights!r:.80}, expected a file {' or '.join(endings)} for format "
            f"{spec.format}{reason}"
        )


def _check_steps(spec: ModelSpec) -> None:
    if spec.format != PIPELINE:
        if spec.steps is not None:
            raise ValueError(f"steps: found some, expected none for format {spec.format}")
        return
    if spec.steps is None:
        raise ValueError(f"steps: missing, expected a list of steps for format {PIPELINE}")
    check_names(spec.steps, [one.name for one in spec.inputs], [one.name for one in spec.outputs])


def _check_outputs(spec: ModelSpec) -> None:
    """Refuses fields of inputs, which have no effect on outputs."""
    for output in spec.outputs:
        for field in ("optional", "min", "max"):
            if getattr(output, field) not in (None, False):
                raise ValueError(f"outputs: {output.name}: {field}: found one, expected it for inputs only")


def _check_sizes(spec: ModelSpec) -> None:
    """Refuses a signature of which one row would not fit into a message."""
    for field, tensors, most in (("inputs", spec.inputs, MAX_BYTES), ("outputs", spec.outputs, MAX_RESULT_BYTES)):
        needed = 0
        for tensor in tensors:
            if not tensor.optional:
                width = _STRING_BYTES if tensor.dtype == STRING else DTYPES[tensor.dtype].itemsize
                needed += width * math.prod(extent for extent in tensor.shape if isinstance(extent, int))
            if needed > most:
                raise ValueError(
                    f"{field}: {tensor.name}: found shape {shape_text(tensor.shape)}, expected one row of all {field} "
                    f"within {most} bytes"
                )


def _check_batch_dimension(spec: ModelSpec) -> None:
    if spec.streams:
        return
    if not spec.outputs:
        raise ValueError("outputs: found none, expected at least one unless streams is true")
    for tensor in (*spec.inputs, *spec.outputs):
        if not tensor.is_batched:
            raise ValueError(f"shape of {tensor.name}: expected {BATCH} as the first dimension unless streams is true")
    if all(tensor.optional for tensor in spec.inputs):
        raise ValueError("inputs: found optional ones only, expected one that is required")


def _check_instances(spec: ModelSpec) -> None:
    if spec.instances == 1:
        return
    if spec.concurrency > 1:
        raise ValueError(
            f"instances: found {spec.instances} beside concurrency {spec.concurrency}, expected one of them: each "
            "instance runs one forward at a time"
        )
    if spec.device == "cuda":
        raise ValueError(f"instances: found {spec.instances}, expected 1 with device cuda")
    if spec.format == "transformers" and spec.instance_kind == "process":
        raise ValueError(
            "instance_kind: found process, expected thread for format transformers: the worker itself tokenises"
        )


def _check_length(spec: ModelSpec) -> None:
    batching = spec.batching
    measured = next((tensor for tensor in spec.inputs if tensor.name == batching.length_input), None)
    if batching.length_input is not None and (
        measured is None or (measured.dtype != STRING and measured.length_axis is None)
    ):
        raise ValueError(
            f"batching.length_input: found {batching.length_input!r:.80}, expected an input of text or with a symbolic "
            f"dimension besides {BATCH}"
        )
    if measured is None and (batching.max_length or batching.max_tokens or batching.buckets):
        raise ValueError("batching.length_input: missing, expected with max_length, max_tokens and buckets")
    if batching.truncate and spec.format != "transformers":
        raise ValueError("batching.truncate: found true, expected it for format transformers only")
    if batching.max_length is not None and max(batching.buckets, default=0) > batching.max_length:
        raise ValueError(
            f"batching.buckets: found {batching.buckets[-1]}, expected at most max_length {batching.max_length}"
        )
    if batching.buckets and (spec.format != "transformers" or spec.task is not None):
        raise ValueError(
            f"batching.buckets: found {', '.join(map(str, batching.buckets))}, expected them for an encoder of "
            "transformers only: other models would take padding for input"
        )


def first_problem(error: ValidationError, document: object = None) -> str:
    """The first problem in one line: the field, the value found, the value expected.

    document: the fields as they were written; a field in its `signature` is named with this section.
    """
    problem = error.errors(include_url=False)[0]
    # pydantic appends this part to the path of a mapping's key.
    path = [part for part in problem["loc"] if part != "[key]"]
    if path and path[0] in _TENSORS and isinstance(document, Mapping) and "signature" in document:
        path.insert(0, "signature")
    field = shown("".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix("."))
    kind, found = problem["type"], problem["input"]
    if kind == "value_error":
        return (f"{field}: " if field else "") + str(problem["ctx"]["error"])
    if kind == "missing":
        return f"{field}: missing, expected a value"
    if kind == "extra_forbidden":
        return f"{field}: unknown field, expected {_nearest(problem['loc'])}"
    if kind == "invalid_key":
        return f"{field}: found a field that is called {json.dumps(found, default=str)[:80]}, expected names of text"
    expected = _expectation(kind, found, problem.get("ctx", {})) or problem["msg"].removeprefix("Input should be ")
    return f"{field}: found {json.dumps(found, default=str)[:80]}, expected {expected}"


def _expectation(kind: str, found: object, limits: Mapping[str, Any]) -> str | None:
    """The expectation in words of YAML, where those of the validator are about Python; else None."""
    if kind == "float_type" and isinstance(found, str):
        # YAML 1.1 reads 1e-3 as text.
        return "a number, without quotes; with an exponent as in 1.0e-3"
    if kind == "int_type" and isinstance(found, str):
        return "a whole number, without quotes"
    return {
        "bool_type": "true or false",
        "dict_type": "a mapping of fields",
        "float_type": "a number",
        "int_type": "a whole number",
        "model_type": "a mapping of fields",
        "string_type": "text, in quotes where it looks like something else",
        "too_long": f"at most {limits.get('max_length')} entries",
        "too_short": f"at least {limits.get('min_length')} entry",
        "tuple_type": "a list",
    }.get(kind)


def _nearest(location: Sequence[int | str]) -> str:
    known: dict[str, type[BaseModel]] = {
        "batching": Batching,
        "codecs": Codecs,
        "generate": Generation,
        "policy": Policy if len(location) == 2 else EndpointPolicy,
        "source": Source,
        "steps": Step,
        "inputs": TensorSpec,
        "outputs": TensorSpec,
    }
    section = known.get(str(location[0]), ModelSpec) if len(location) > 1 else ModelSpec
    near = difflib.get_close_matches(str(location[-1]), section.model_fields, n=1)
    return near[0] if near else f"one of: {', '.join(section.model_fields)}"
