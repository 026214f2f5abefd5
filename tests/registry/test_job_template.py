"""Jobs by a template are those of the plain way, byte for byte. What it cannot make, the plain way makes or refuses."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from penstock.registry import admission, envelope
from penstock.registry.admission import JobBuilder, SubmitOptions
from penstock.registry.broker.base import Publication
from penstock.registry.envelope import Keyring, Retry, open_job
from penstock.registry.errors import InvalidInput, PenstockError
from penstock.registry.job_template import MOST_HEADER_BYTES, MOST_SHAPES
from penstock.registry.package import ModelSpec
from penstock.registry.queues import DerivedIds, new_job_id
from penstock.registry.tensors import DTYPES, STRING
from tests.payload_keys import sealing

KEYRINGS = [
    Keyring.parse(None),
    Keyring.parse(",".join(f"{name}:{base64.b64encode(name.encode() * 32).decode()}" for name in "ab")),
]
KEYRINGS += [sealing(keyring) for keyring in KEYRINGS]
IDS = ["unsigned", "signed", "sealed", "signed and sealed"]
MAX_BYTES = 600
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
X = {"name": "x", "dtype": "float32", "shape": ["batch", 4]}


class Name(str):
    """Text of a type of its own."""

    __slots__ = ()


class Array(np.ndarray[Any, Any]):
    """An array of a type of its own, which says other bytes than it has."""

    def tobytes(self, order: Any = "C") -> bytes:
        return b"\x00" * self.nbytes


class Inputs(dict[str, Any]):
    """A mapping of a type of its own."""


def spec_of(*inputs: dict[str, Any], name: str = "m", **batching: object) -> ModelSpec:
    """A model of these inputs."""
    return ModelSpec.model_validate(
        {
            "name": name,
            "version": "1",
            "format": "python",
            "entrypoint": "model:build",
            "inputs": inputs or [X],
            "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch"]}],
            "batching": batching,
            "streams": any(tensor["shape"][:1] != ["batch"] for tensor in inputs),
        }
    )


def builder_of(keyring: Keyring = KEYRINGS[0]) -> JobBuilder:
    """A builder without templates."""
    return JobBuilder(tenant="acme", keyring=keyring, max_bytes=MAX_BYTES)


def made(call: Callable[[], object]) -> Any:
    """What was made, or what its refusal says."""
    try:
        return call()
    except (PenstockError, TypeError) as error:
        return type(error), str(error)


Job = tuple[SubmitOptions, Any, str, Any]
"""Options, inputs, reply, idempotency key."""


def plain(keyring: Keyring, spec: ModelSpec, job: Job, found: Any) -> Any:
    """What the plain way makes of a job, with the id of `found`: a given id has no template."""
    options, inputs, reply, key = job
    job_id = found.job_id if isinstance(found, Publication) else new_job_id(spec.name)
    builder = builder_of(keyring)
    return made(lambda: builder.build(spec, inputs, options, reply=reply, idempotency_key=key, job_id=job_id))


NUMBERS = [dtype for dtype in DTYPES if dtype != STRING]
SHAPES = [["batch"], ["batch", 4], ["batch", "n"], [3], [2, "n"], []]


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    """Models of one input mostly, and mostly of numbers."""
    inputs: list[dict[str, Any]] = []
    for name in draw(st.sampled_from(["x", "x", "x", "xy"])):
        dtype = draw(st.sampled_from([*NUMBERS, *["float32"] * 12, STRING]))
        tensor: dict[str, Any] = {"name": name, "dtype": dtype, "shape": draw(st.sampled_from(SHAPES))}
        if DTYPES[dtype].kind == "f":
            tensor["allow_nan"] = draw(st.booleans())
        if DTYPES[dtype].kind in "iuf" and draw(st.integers(0, 5)) == 0:
            tensor |= {"min": 0, "max": 5}
        tensor["optional"] = name == "y" and draw(st.booleans())
        inputs.append(tensor)
    has_limit = "n" in inputs[0]["shape"] and draw(st.integers(0, 3)) == 0
    limit = {"length_input": "x", "max_length": 3} if has_limit else {}
    return spec_of(*inputs, name=draw(st.sampled_from(["m", "a" * 64])), **limit)


def options() -> st.SearchStrategy[SubmitOptions]:
    """Good and bad ones, simple ones mostly."""
    return st.builds(
        SubmitOptions,
        priority=st.sampled_from(["normal", "normal", "high", Name("normal"), "urgent", 1, []]),
        deadline_s=st.sampled_from([None, None, None, 1, 1.0, True, 0, -1.0, math.nan, 10**400, "1", np.float64(1)]),
        tenant=st.sampled_from([None, None, "acme", "globex", "Bad Name", Name("globex"), ""]),
        version=st.sampled_from([None, None, "", "1", "2", Name("1")]),
        outputs=st.sampled_from([(), (), (), ["y"], ["z"], ("y",)]),
        traceparent=st.sampled_from(["", "", "", TRACE, "trace"]),
        retry=st.sampled_from([None, None, None, Retry(2), 7]),
        webhook=st.sampled_from([None, None, None, "https://example.com/x", "no url"]),
        account=st.sampled_from(["", "", "k1"]),
    )


KEYS = st.sampled_from([None, None, None, "k", "k", "a" * 255, "\ud800", Name("k"), "", "a" * 256, 7])
"""Idempotency keys: none, good ones and bad ones."""


def values_for(draw: st.DrawFn, tensor: Any) -> Any:
    """Values for an input of a model: good ones, bad ones, and good ones in unusual forms."""
    symbols = {"n": draw(st.sampled_from([1, 2, 5])), "batch": draw(st.sampled_from([1, 1, 2, 3, 0, 60]))}
    shape = tuple(dim if isinstance(dim, int) else symbols[dim] for dim in tensor.shape)
    if tensor.dtype == STRING:
        return np.full(shape, "text", object)
    dtype = DTYPES[tensor.dtype]
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    form = draw(st.sampled_from(["plain"] * 6 + sorted(FORMS)))
    return FORMS[form](array) if form in FORMS else array


def _with(array: Any, value: float) -> Any:
    changed = array.copy()
    if changed.size and changed.dtype.kind == "f":
        changed.reshape(-1)[-1] = value
    return changed


def _frozen(array: Any) -> Any:
    array.setflags(write=False)
    return array


FORMS: dict[str, Callable[[Any], Any]] = {
    "NaN": lambda array: _with(array, math.nan),
    "infinity": lambda array: _with(array, -math.inf),
    "large": lambda array: _with(array, 3e4),
    "other dtype": lambda array: array.astype(np.float64),
    "dtype of the same size": lambda array: array.astype(np.int32),
    "complex": lambda array: array.astype(np.complex64),
    "big-endian": lambda array: array.astype(array.dtype.newbyteorder(">")),
    "other rank": lambda array: array[None],
    "other extent": lambda array: np.concatenate([array, array], axis=-1) if array.ndim else array,
    "Fortran order": np.asfortranarray,
    "strided": lambda array: np.repeat(array, 2, axis=0)[::2] if array.ndim else array,
    "backwards": lambda array: array[::-1] if array.ndim else array,
    "read-only": _frozen,
    "subclass": lambda array: array.view(Array),
    "masked": np.ma.masked_array,
    "lists": lambda array: array.tolist(),
    "text": lambda array: "text",
    "nothing": lambda array: None,
}


@st.composite
def calls(draw: st.DrawFn) -> tuple[ModelSpec, list[Job]]:
    """A model, and jobs of few kinds for it."""
    spec = draw(specs())
    kinds = [*draw(st.lists(options(), min_size=1, max_size=2)), SubmitOptions()]
    jobs = []
    for _ in range(draw(st.integers(2, 8))):
        inputs: Any = {tensor.name: values_for(draw, tensor) for tensor in spec.inputs}
        twist = draw(st.sampled_from([None] * 8 + ["more", "fewer", "renamed", "subclass", "none"]))
        if twist == "more":
            inputs["z"] = 1
        elif twist == "fewer":
            inputs.popitem()
        elif twist == "renamed":
            inputs = {"z": next(iter(inputs.values()))}
        elif twist == "subclass":
            inputs = Inputs(inputs)
        elif twist == "none":
            inputs = None
        jobs.append((draw(st.sampled_from(kinds)), inputs, draw(st.sampled_from(["", "{m}:reply:c"])), draw(KEYS)))
    return spec, jobs


@given(case=calls(), keyring=st.sampled_from(KEYRINGS))
def test_every_job_is_that_of_the_plain_way(case: tuple[ModelSpec, list[Job]], keyring: Keyring):
    """Equal bytes for an equal id, or an equal error: job by job, and again when the template knows them all."""
    spec, jobs = case
    builder = builder_of(keyring)
    for options, inputs, reply, key in jobs * 2:
        build = partial(builder.build, spec, inputs, options, reply=reply, idempotency_key=key)
        found = made(build)
        assert found == plain(keyring, spec, (options, inputs, reply, key), found)


@given(case=calls(), keyring=st.sampled_from(KEYRINGS))
def test_every_job_of_one_call_is_that_of_the_plain_way(case: tuple[ModelSpec, list[Job]], keyring: Keyring):
    """Each refused item has its error and its index; an error of the options is that of the call."""
    spec, jobs = case
    options, _, reply, _ = jobs[0]
    pairs = [(inputs, key) for _, inputs, _, key in jobs] * 2
    refused: dict[int, Any] = {}
    many = made(lambda: builder_of(keyring).build_many(spec, pairs, options, reply=reply, refused=refused))
    if isinstance(many, tuple):
        assert many in [plain(keyring, spec, (options, inputs, reply, key), None) for inputs, key in pairs]
        return
    rest = iter(many)
    for index, (inputs, key) in enumerate(pairs):
        found = None if index in refused else next(rest)
        expected = plain(keyring, spec, (options, inputs, reply, key), found)
        if found is None:
            assert (type(refused[index]), str(refused[index])) == (expected[0], f"Item {index}: {expected[1]}")
        else:
            assert found == expected
    assert next(rest, None) is None


@pytest.fixture
def sealed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the jobs that went the plain way."""
    ids: list[str] = []

    def seal(kind: Any, header: Any, *rest: Any) -> bytes:
        ids.append(header.id)
        return envelope.seal(kind, header, *rest)

    monkeypatch.setattr(admission, "seal", seal)
    return ids


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("keyring", KEYRINGS, ids=IDS)
@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_known_shape_is_that_of_the_plain_way(form: str, keyring: Keyring, key: str | None):
    """The template knows the shape, and the values are good ones in another form, or bad ones."""
    spec, builder = spec_of(), builder_of(keyring)
    builder.build(spec, TWO, idempotency_key=key and "first")
    inputs = {"x": FORMS[form](np.arange(8, dtype=np.float32).reshape(2, 4))}
    found = made(lambda: builder.build(spec, inputs, idempotency_key=key))
    assert found == plain(keyring, spec, (SubmitOptions(), inputs, "", key), found)
    both = {**inputs, "z": 1}
    refused = made(lambda: builder.build(spec, both, idempotency_key=key))
    assert refused == plain(keyring, spec, (SubmitOptions(), both, "", key), None)


LIMITED = {
    "range": spec_of({**X, "min": 0, "max": 2}),
    "length": spec_of({**X, "shape": ["batch", "n"]}, length_input="x", max_length=4),
    "integers": spec_of({**X, "dtype": "int8", "max": 2}),
}


@pytest.mark.parametrize("limit", LIMITED)
def test_ranges_and_limits_are_checked_for_every_job(limit: str):
    """Also when a good job of the same shape, or of the same model, went before."""
    spec, builder = LIMITED[limit], builder_of()
    dtype = DTYPES[spec.inputs[0].dtype]
    for _ in range(2):
        builder.build(spec, {"x": np.ones((2, 4), dtype)})
        with pytest.raises(InvalidInput, match=r"range|Expected at most 4"):
            builder.build(spec, {"x": np.full((2, 5 if limit == "length" else 4), 7, dtype)})


def test_deadlines_are_those_of_each_call(sealed: list[str]):
    """In the header, and beside it. Equal ones share a template."""
    spec, builder = spec_of(), builder_of()
    jobs = [builder.build(spec, ONE, SubmitOptions(deadline_s=each)) for each in (1, None, 2.5, 1, None, 2.5)]
    assert [job.deadline_ms for job in jobs] == [1000, 0, 2500] * 2
    assert [open_job(job.sealed, KEYRINGS[0])[0].deadline_ms for job in jobs] == [1000, 0, 2500] * 2
    assert len(sealed) == 3


ONE = {"x": np.ones((1, 4), np.float32)}
TWO = {"x": np.ones((2, 4), np.float32)}


@pytest.mark.parametrize("keyring", KEYRINGS, ids=IDS)
def test_one_header_is_encoded_for_each_shape(keyring: Keyring, sealed: list[str]):
    """The first job of a shape goes the plain way, in single calls and in one call; each id is its own."""
    spec, builder = spec_of(), builder_of(keyring)
    jobs = [builder.build(spec, inputs) for inputs in (ONE, ONE, TWO, ONE, TWO)]
    jobs += builder.build_many(spec, [(inputs, None) for inputs in (ONE, TWO, ONE)])
    assert sealed == [jobs[0].job_id, jobs[2].job_id]
    assert len({job.job_id for job in jobs}) == 8


@pytest.mark.parametrize(
    "options",
    [
        SubmitOptions(outputs=["y"]),
        SubmitOptions(traceparent=TRACE),
        SubmitOptions(retry=Retry(2)),
        SubmitOptions(deadline_s=np.float64(1)),
    ],
)
def test_uncommon_options_have_a_template_for_one_call(options: SubmitOptions, sealed: list[str]):
    """Each call encodes a header once. Nothing is kept for the next one."""
    spec, builder = spec_of(), builder_of()
    for _ in range(2):
        builder.build_many(spec, [(ONE, None)] * 3, options)
    assert len(sealed) == 2
    builder.build(spec, ONE)
    builder.build(spec, ONE)
    assert len(sealed) == 3


def test_jobs_with_a_key_have_a_header_of_their_own(sealed: list[str]):
    """One plain way for each shape with keys, and one without. Each key has its digest, also in the header."""
    spec, builder = spec_of(), builder_of(KEYRINGS[1])
    jobs = builder.build_many(spec, [(ONE, key) for key in ("k1", None, "k2", None, "k1")])
    assert sealed == [jobs[0].job_id, jobs[1].job_id]
    opened = [open_job(job.sealed, KEYRINGS[1])[0] for job in jobs]
    assert [header.idempotency_digest for header in opened] == [job.idempotency_digest for job in jobs]
    assert [bool(job.idempotency_digest) for job in jobs] == [True, False, True, False, True]
    assert jobs[0].idempotency_digest == jobs[4].idempotency_digest != jobs[2].idempotency_digest
    # The first is that of the plain way.
    assert jobs[0].fingerprint == jobs[2].fingerprint == jobs[4].fingerprint
    other = builder.build(spec, {"x": np.zeros((1, 4), np.float32)}, idempotency_key="k1")
    assert other.idempotency_digest == jobs[0].idempotency_digest
    assert other.fingerprint != jobs[0].fingerprint
    assert len(sealed) == 2


def test_jobs_with_derived_ids_have_a_template(sealed: list[str]):
    """Only the first goes the plain way. Each has the id of its item, as the header says, too; one id is too few."""
    spec, builder = spec_of(), builder_of(KEYRINGS[1])
    ids = [DerivedIds(spec.name, "batch_1", 1_700_000_000_000).of(number) for number in range(4)]
    items = [(ONE, None)] * 4
    jobs = builder.build_many(spec, items, job_ids=ids)
    assert sealed == ids[:1]
    assert [job.job_id for job in jobs] == ids
    assert [open_job(job.sealed, KEYRINGS[1])[0].id for job in jobs] == ids
    assert open_job(builder.build(spec, ONE).sealed, KEYRINGS[1])[0].id not in ids
    with pytest.raises(ValueError, match="zip"):
        builder.build_many(spec, items, job_ids=ids[:3])


def test_what_depends_on_the_id_goes_the_plain_way(sealed: list[str]):
    """Jobs with a given id or a webhook, and those of Celery. None of them spoils a template."""
    spec, builder = spec_of(), builder_of(KEYRINGS[1])
    webhook = SubmitOptions(webhook="https://example.com/x")
    builder.build(spec, ONE)
    sealed.clear()
    assert builder.build(spec, ONE, job_id="m.7").job_id == "m.7"
    hooked = builder.build_many(spec, [(ONE, None)] * 2, webhook)
    assert len({job.webhook for job in hooked}) == 2
    lane = [builder.build(spec, ONE, lane=True) for _ in range(2)]
    assert all(open_job(job.sealed, KEYRINGS[1])[0].options.lane for job in lane)
    job = builder.build(spec, ONE)
    assert (len(sealed), job.idempotency_digest, job.webhook) == (5, "", "")
    assert not open_job(job.sealed, KEYRINGS[1])[0].options.lane


def test_options_that_only_compare_as_equal_are_checked(sealed: list[str]):
    """True is equal to 1. It is refused, also after a deadline of one second."""
    spec, builder = spec_of(), builder_of()
    for _ in range(2):
        builder.build(spec, ONE, SubmitOptions(deadline_s=1))
    assert len(sealed) == 1
    with pytest.raises(InvalidInput, match=r"^deadline_s is a bool\. Expected seconds from now$"):
        builder.build(spec, ONE, SubmitOptions(deadline_s=True))


@pytest.mark.parametrize(
    ("options", "reply"),
    [
        (SubmitOptions(priority="high"), "r"),
        (SubmitOptions(deadline_s=1), "r"),
        (SubmitOptions(tenant="globex"), "r"),
        (SubmitOptions(version="1"), "r"),
        (SubmitOptions(outputs=["y"]), "r"),
        (SubmitOptions(traceparent=TRACE), "r"),
        (SubmitOptions(retry=Retry(2)), "r"),
        (SubmitOptions(webhook="https://example.com/x"), "r"),
        (SubmitOptions(sticky_key="user 7"), "r"),
        (SubmitOptions(account="k1"), "r"),
        (SubmitOptions(), "s"),
    ],
    ids=lambda each: str(each)[:60],
)
def test_a_call_with_other_arguments_does_not_get_what_the_last_one_had(options: SubmitOptions, reply: str):
    """Calls of two kinds take turns. Each job is as a builder makes it that has seen no other one."""
    builder, first, common = builder_of(), spec_of(), SubmitOptions()
    calls = [(first, common, "r"), (first, options, reply)] * 3
    # Another spec of the same name: its active version has changed.
    calls += [(spec_of({**X, "allow_nan": True}), common, "r"), (first, common, "r")]
    for spec, how, to in calls:
        made = builder.build(spec, ONE, how, reply=to)
        alone = builder_of().build(spec, ONE, how, reply=to, job_id=made.job_id)
        assert structs.replace(made, webhook="") == structs.replace(alone, webhook="")
        assert builder._template(spec, how, to).spec is spec


def test_the_last_template_is_that_of_its_spec():
    """Also between single calls: another input is checked against its own spec."""
    builder, first, other = builder_of(), spec_of(), spec_of({**X, "dtype": "int8"})
    for _ in range(3):
        for _ in range(2):
            assert builder.build(first, ONE).job_id
        with pytest.raises(InvalidInput, match="x"):
            builder.build(other, {"x": np.full((1, 4), 0.5)})
        whole = {"x": np.ones((1, 4), np.int8)}
        assert open_job(builder.build(other, whole).sealed, KEYRINGS[0])[0].content[0].dtype == "int8"


def test_another_spec_of_the_name_has_templates_of_its_own():
    """Its active version has changed, and with it the input."""
    builder = builder_of()
    for _ in range(3):
        for dtype in (np.float32, np.int8):
            spec = spec_of({**X, "dtype": np.dtype(dtype).name})
            job = builder.build_many(spec, [({"x": np.ones((1, 4), dtype)}, None)] * 2)[1]
            assert open_job(job.sealed, KEYRINGS[0])[0].content[0].dtype == np.dtype(dtype).name


def test_templates_are_bounded():
    """In number, in shapes and in the bytes of a header; large inputs are none of their business."""
    spec, builder = spec_of(), JobBuilder(tenant="acme", keyring=KEYRINGS[1], max_bytes=10**6)
    for number in range(200):
        builder.build(spec, ONE, SubmitOptions(tenant=f"t{number}"))
        assert len(builder._templates) <= admission._MOST_TEMPLATES
    template = builder._template(spec, SubmitOptions(), "")
    for rows in range(1, 200):
        builder.build(spec, {"x": np.ones((rows, 4), np.float32)})
        assert 0 < len(template._edges) <= MOST_SHAPES
    known = dict(template._edges)
    builder.build(spec, {"x": np.ones((2049, 4), np.float32)})
    long = builder._template(spec, SubmitOptions(), "r" * MOST_HEADER_BYTES)
    builder.build(spec, ONE, reply="r" * MOST_HEADER_BYTES)
    assert (template._edges, long._edges) == (known, {})
