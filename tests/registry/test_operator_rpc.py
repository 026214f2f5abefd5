"""Errands on the wire: what was asked arrives as it was asked, and only a worker's own answer to it is read. S0.3."""

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
ERRANDS: list[operator_rpc.Errand] = [
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


@pytest.mark.parametrize("errand", ERRANDS, ids=lambda errand: type(errand).__name__)
def test_an_errand_arrives_as_it_was_asked(errand: operator_rpc.Errand):
    """Kind, bytes and absent values alike."""
    assert operator_rpc.decode(operator_rpc.encode(errand)) == errand


@pytest.mark.parametrize("body", [b"", b"\x00", b"\x91\xa5erase", b"\x92\xa5names\x01\x02", b"\x91" * 10_000, b"[]"])
def test_what_is_no_errand_is_refused(body: bytes):
    """Also of an operator: a worker knows its own kinds only."""
    with pytest.raises(UndecodableEnvelope, match="not an errand"):
        operator_rpc.decode(body)


def test_an_answer_carries_values_and_errors():
    """Rows and bytes come back as they were; a refusal is raised as the error that it was."""
    pages = {"minilm": ModelRows([{"epoch": 3, "released_at": None}], [])}
    sealed = operator_rpc.seal_answer("e1", operator_rpc.Answer.of(pages), KEYRING)
    assert operator_rpc.open_answer("e1", sealed, KEYRING).read(dict[str, ModelRows]) == pages
    refusal = operator_rpc.Answer.refusal(TransitionConflict("another came first"))
    with pytest.raises(TransitionConflict, match="another came first"):
        operator_rpc.open_answer("e1", operator_rpc.seal_answer("e1", refusal, KEYRING), KEYRING).read(None)
    assert not operator_rpc.open_answer(
        "e1", operator_rpc.seal_answer("e1", operator_rpc.Answer(), KEYRING), KEYRING
    ).is_done
    with pytest.raises(UndecodableEnvelope, match="another kind"):
        operator_rpc.Answer.of([1]).read(dict[str, ModelRows])


def test_only_the_worker_s_answer_to_this_errand_is_read():
    """Of another errand, under another key, unsigned, with a flipped bit, or no answer at all (S0.3)."""
    answer = operator_rpc.Answer.of("ok")
    sealed = operator_rpc.seal_answer("e1", answer, KEYRING)
    raw = base64.b64decode(sealed)
    flipped = [base64.b64encode(raw[:at] + bytes((raw[at] ^ 1,)) + raw[at + 1 :]).decode() for at in range(len(raw))]
    unsigned = operator_rpc.seal_answer("e1", answer, Keyring.parse(None))
    for forged in (*flipped, unsigned, operator_rpc.seal_answer("e1", answer, OTHER), "", "ü", "AAAA", sealed + "\n"):
        with pytest.raises(Corrupt):
            operator_rpc.open_answer("e1", forged, KEYRING)
    with pytest.raises(Corrupt, match="another errand"):
        operator_rpc.open_answer("e2", sealed, KEYRING)


def test_errors_keep_their_class_across_processes():
    """A code of a newer version becomes a plain error that keeps it."""
    assert type(error_named("UnknownModel", "no such")) is UnknownModel
    newer = error_named("Paradox", "what now")
    assert (type(newer), str(newer)) == (PenstockError, "Paradox: what now")
