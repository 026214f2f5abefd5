"""Templates of results: the bytes of `seal` for every id of the same length, or no template."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from penstock.registry.envelope import Failure, Keyring, RequestContext, ResultHeader, Timings, seal
from penstock.registry.result_template import ResultTemplate
from penstock.registry.tensors import Tensor
from tests.payload_keys import sealing
from tests.registry.test_envelope import SIGNING, UNSIGNED

NAMES = ["", "timings", "id", "key", "\xa7timings\x93", "\xa7timings\x93\xcb" + "\0" * 8, "w" * 40, "w" * 300]
TIMES = st.one_of(st.just(0.0), st.floats(0.0, 1e9))
HEADERS = st.builds(
    ResultHeader,
    id=st.integers(1, 300).map(lambda size: ("model." + "0123456789abcdef-_:Z" * 20)[:size]),
    context=st.builds(RequestContext, tenant=st.sampled_from(NAMES), traceparent=st.sampled_from(NAMES)),
    version=st.sampled_from(NAMES),
    worker=st.sampled_from(NAMES),
    content=st.lists(
        st.builds(
            Tensor,
            name=st.sampled_from(NAMES),
            dtype=st.sampled_from(["float32", "timings"]),
            shape=st.lists(st.integers(0, 1 << 40), max_size=3).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
    error=st.one_of(st.none(), st.builds(Failure, code=st.sampled_from(NAMES), message=st.sampled_from(NAMES))),
    attempt=st.integers(1, 300),
    batch_size=st.integers(0, 70_000),
    timings=st.builds(Timings, queue_ms=TIMES, batch_ms=TIMES, compute_ms=TIMES),
    content_digest=st.sampled_from([b"", b"d" * 32]),
    is_cached=st.booleans(),
)


@pytest.mark.parametrize("keyring", [UNSIGNED, SIGNING, sealing(SIGNING)], ids=["unsigned", "signed", "sealed"])
@settings(max_examples=120, derandomize=True)
@given(first=HEADERS, times=st.tuples(TIMES, TIMES, TIMES), local=st.integers(0, 9), body=st.binary(max_size=40))
def test_a_template_seals_what_seal_would(
    first: ResultHeader, times: tuple[float, float, float], local: int, body: bytes, keyring: Keyring
):
    """For another id and other times; ids whose length takes one byte have a template, others may have none."""
    first = structs.replace(first, key=keyring.signing_id, is_sealed=keyring.seals)
    template = ResultTemplate.of(first, keyring)
    if template is None:
        assert not 32 <= len(first.id) <= 255
        return
    second = structs.replace(first, id=first.id[:-1] + str(local), timings=Timings(*times))
    for header in (first, second):
        timings = header.timings
        sealed = template.seal(header.id, timings.queue_ms, timings.batch_ms, timings.compute_ms, body)
        assert sealed == seal("result", header, body, keyring)
    assert template.seal(first.id + "a", *times, body) is None
    assert template.seal(first.id[:-1], *times, body) is None
    assert template.seal(first.id[:-1] + "\xe9", *times, body) is None


def test_times_that_are_no_floats_have_no_template():
    """Whole numbers are encoded in other bytes."""
    header = ResultHeader("m." + "a" * 36, RequestContext("acme"), timings=Timings(1, 2, 3))
    assert ResultTemplate.of(header, UNSIGNED) is None


def test_a_template_for_an_unknown_key_is_refused():
    """As `seal` refuses it."""
    header = ResultHeader("m." + "a" * 36, RequestContext("acme"), key="stranger")
    with pytest.raises(KeyError):
        ResultTemplate.of(structs.replace(header, timings=Timings(1.5, 2.5, 3.5)), SIGNING)
