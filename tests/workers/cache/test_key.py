"""The key of an answer: equal for equal questions to one version, and for no others."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.registry.admission import JobBuilder, SubmitOptions
from penstock.registry.envelope import Keyring, Options, Retry, open_job
from penstock.registry.package import ModelSpec
from penstock.safety.cache_entry import key_of
from penstock.workers.cache import JobKeys
from tests.workers.cache.equal_jobs import OpenedJobs, apart
from tests.workers.doubles import spec_of

UNSIGNED = Keyring.parse(None)
SIGNED = Keyring.parse(f"first:{base64.b64encode(b'1' * 32).decode()}")
OTHER_KEY = Keyring.parse(f"second:{base64.b64encode(b'2' * 32).decode()}")
VECTOR = {"shape": ["batch", 2]}
SPEC = spec_of(
    inputs=[{"name": "x", "dtype": "float32", **VECTOR}, {"name": "z", "dtype": "int32", "optional": True, **VECTOR}],
    outputs=[{"name": "y", "dtype": "float32", **VECTOR}, {"name": "w", "dtype": "float32", **VECTOR}],
)
INPUTS = {"x": [[1.0, 2.0]]}


def key(
    inputs: dict[str, Any] = INPUTS,
    *,
    spec: ModelSpec = SPEC,
    keyring: Keyring = UNSIGNED,
    label: str = "1",
    tenant: str = "acme",
    **options: Any,
) -> bytes:
    """The key of a job with these inputs and options, sealed by a client."""
    builder = JobBuilder(tenant="acme", keyring=keyring, max_bytes=1 << 20)
    sealed = builder.build(spec, inputs, SubmitOptions(**options)).sealed
    return key_of(*open_job(sealed, keyring), label, tenant=tenant)


def test_a_key_has_sixteen_bytes_and_repeats():
    """Two jobs with the same inputs have different ids and one key."""
    assert key() == key()
    assert len(key()) == 16


@pytest.mark.parametrize(
    "options",
    [
        {"priority": "critical"},
        {"deadline_s": 5.0},
        {"retry": Retry(attempts=2)},
        {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"},
        {"keyring": SIGNED},
        {"keyring": OTHER_KEY},
        {"inputs": {"x": np.array([[1, 2]], np.float32)}},
    ],
    ids=["priority", "deadline", "retry", "trace", "signed", "another key", "an array"],
)
def test_the_way_of_a_job_is_no_part_of_its_question(options: dict[str, Any]):
    """Jobs that differ only in their way to the model share an answer."""
    assert key(**options) == key()


@pytest.mark.parametrize(
    "question",
    [
        {"inputs": {"x": [[1.0, 2.5]]}},
        {"inputs": {"x": [[2.0, 1.0]]}},
        {"inputs": {"x": [[1.0, 2.0], [1.0, 2.0]]}},
        {"inputs": {"x": [[1.0, 2.0]], "z": [[0, 0]]}},
        {"outputs": ["y"]},
        {"outputs": ["w"]},
        {"label": "2"},
        {"tenant": "umbrella"},
        {"tenant": ""},
        {"spec": SPEC.model_copy(update={"name": "other"})},
    ],
    ids=["value", "order", "rows", "input", "output", "other output", "version", "tenant", "no tenant", "model"],
)
def test_another_question_has_another_key(question: dict[str, Any]):
    """Values, rows, inputs, requested outputs, model, version and owner each count."""
    assert key(**question) != key()


def test_equal_bytes_of_another_dtype_are_another_question():
    """The bytes of the inputs are the same, and only their description differs."""
    tensor = {"name": "x", "shape": ["batch", 1]}
    whole = spec_of(inputs=[{"dtype": "int32", **tensor}])
    real = spec_of(inputs=[{"dtype": "float32", **tensor}])
    number = np.array([[1.5]], np.float32)
    assert key({"x": number}, spec=real) != key({"x": number.view(np.int32)}, spec=whole)


_KINDS: list[dict[str, Any]] = [
    {},
    {"tenant": "umbrella"},
    {"options": Options(outputs=("y",))},
    {"options": Options(retry=Retry(attempts=2))},
    {"deadline_ms": 5000},
]


@given(
    st.lists(st.tuples(st.integers(0, len(_KINDS) - 1), st.lists(st.integers(0, 2), min_size=1, max_size=3))),
    st.booleans(),
    st.sampled_from([UNSIGNED, SIGNED]),
)
def test_jobs_of_a_claim_get_the_keys_of_jobs_by_themselves(
    asked: list[tuple[int, list[int]]], isolates: bool, keyring: Keyring
):
    """Whatever their headers share, for two versions in turn, and again when the headers are known."""
    opened, keys = OpenedJobs(keyring), JobKeys(isolates_tenants=isolates)
    for label in ("1", "2", "1"):
        jobs = [opened.open(*numbers, **_KINDS[kind]) for kind, numbers in asked]
        alone = apart(jobs)
        keys.begin_all(jobs, label)
        keys.begin_all(alone, label)
        expected = [key_of(job.header, job.body, label, tenant=job.header.tenant if isolates else "") for job in jobs]
        assert [job.digest for job in jobs] == expected
        assert [job.digest for job in alone] == expected


def test_what_is_remembered_of_headers_is_bounded():
    """A client may send ever new headers."""
    opened, keys = OpenedJobs(UNSIGNED), JobKeys(isolates_tenants=True)
    for number in range(3000):
        job = opened.open(1.0, deadline_ms=number + 1)
        assert job.shared is not None
        keys.begin_all([job], "1")
        assert job.digest == key_of(job.header, job.body, "1", tenant="acme")
        assert 0 < len(keys) <= 1024
