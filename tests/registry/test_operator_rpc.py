"""Operator RPC on the wire: requests arrive unchanged, and only a worker's own response to one is read. S0.3."""

from __future__ import annotations

import base64

import pytest

from penstock.registry import operator_rpc
from penstock.registry.catalog.store import ModelRows
from penstock.registry.envelope import Keyring
from penstock.registry.errors import (
    Corrupt,
    PenstockError,
    TransitionConflict,
    UndecodableEnvelope,
    UnknownModel,
    error_named,
)

KEYRING = Keyring.parse("k1:" + base64.b64encode(b"a" * 32).decode())
OTHER = Keyring.parse("k1:" + base64.b64encode(b"b" * 32).decode())
REQUESTS: list[operator_rpc.Request] = [
    operator_rpc.Names(),
    operator_rpc.Read(("minilm",), None),
    operator_rpc.Read(None, 1),
    operator_rpc.Enter(({"name": "minilm", "epoch": 1, "released_at": None},), ({"name": "minilm", "epoch": 1},)),
    operator_rpc.Inspect("minilm/1"),
    operator_rpc.Rehash("/models/minilm/1"),
    operator_rpc.Export("/models/minilm/1", "ab" * 32, "minilm.onnx", True),
    operator_rpc.Models(),
    operator_rpc.Spec("minilm", "1"),
    operator_rpc.PutSpec("minilm", b"\0\xff", "1"),
    operator_rpc.Actives(("minilm", "mlp")),
    operator_rpc.Activate("minilm", 7, b"\n\xff", "2", b"{}"),
    operator_rpc.Workers(),
]


@pytest.mark.parametrize("sent", REQUESTS, ids=lambda sent: type(sent).__name__)
def test_a_request_arrives_unchanged(sent: operator_rpc.Request):
    """Its kind, its bytes and its absent values."""
    assert operator_rpc.decode(operator_rpc.encode(sent)) == sent


@pytest.mark.parametrize("body", [b"", b"\x00", b"\x91\xa5erase", b"\x92\xa5names\x01\x02", b"\x91" * 10_000, b"[]"])
def test_a_body_that_is_no_request_is_refused(body: bytes):
    """A worker accepts the kinds that it knows, and no other."""
    with pytest.raises(UndecodableEnvelope, match="not an RPC request"):
        operator_rpc.decode(body)


@pytest.mark.parametrize("newest", [-1, 2**63])
def test_a_number_that_no_database_takes_is_refused(newest: int):
    """The operator learns which numbers are expected."""
    with pytest.raises(UndecodableEnvelope, match="Expected `int`"):
        operator_rpc.decode(operator_rpc.encode(operator_rpc.Read(None, newest)))


def test_a_response_carries_values_and_errors():
    """Rows and bytes come back unchanged; `read` raises a refusal with its class."""
    rows = {"minilm": ModelRows([{"epoch": 3, "released_at": None}], [], [], [])}
    sealed = operator_rpc.seal_response("e1", operator_rpc.Response.of(rows), KEYRING)
    assert operator_rpc.open_response("e1", sealed, KEYRING).read(dict[str, ModelRows]) == rows
    refusal = operator_rpc.Response.refusal(TransitionConflict("another came first"))
    with pytest.raises(TransitionConflict, match="another came first"):
        operator_rpc.open_response("e1", operator_rpc.seal_response("e1", refusal, KEYRING), KEYRING).read(None)
    assert not operator_rpc.open_response(
        "e1", operator_rpc.seal_response("e1", operator_rpc.Response(), KEYRING), KEYRING
    ).is_done
    with pytest.raises(UndecodableEnvelope, match="another type"):
        operator_rpc.Response.of([1]).read(dict[str, ModelRows])


def test_only_a_worker_s_response_to_this_request_is_read():
    """Refused: another request's, another key's, unsigned, with a flipped bit, or no response at all (S0.3)."""
    answer = operator_rpc.Response.of("ok")
    sealed = operator_rpc.seal_response("e1", answer, KEYRING)
    raw = base64.b64decode(sealed)
    flipped = [base64.b64encode(raw[:at] + bytes((raw[at] ^ 1,)) + raw[at + 1 :]).decode() for at in range(len(raw))]
    unsigned = operator_rpc.seal_response("e1", answer, Keyring.parse(None))
    for forged in (*flipped, unsigned, operator_rpc.seal_response("e1", answer, OTHER), "", "ü", "AAAA", sealed + "\n"):
        with pytest.raises(Corrupt):
            operator_rpc.open_response("e1", forged, KEYRING)
    with pytest.raises(Corrupt, match="another RPC request"):
        operator_rpc.open_response("e2", sealed, KEYRING)


def test_errors_keep_their_class_across_processes():
    """An unknown class becomes a PenstockError whose text begins with its name."""
    assert type(error_named("UnknownModel", "no such")) is UnknownModel
    newer = error_named("Paradox", "what now")
    assert (type(newer), str(newer)) == (PenstockError, "Paradox: what now")
