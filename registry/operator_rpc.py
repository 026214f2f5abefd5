"""What a worker does for operators who reach neither the registry's database nor the broker: its words on the wire.

    operator -- Errand, in a signed Command --> a worker's clerk --> registry, files, broker
             <-- Answer, sealed with the workers' key for results --

An errand that takes long answers "not yet", and is asked for again. Running it twice does no harm: whoever asks may
not know that it was done. What is written is signed by the operator beforehand, so that a worker needs no key for it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import msgspec

from penstock.registry.envelope import EventHeader, Keyring, open_event, seal
from penstock.registry.errors import BadSignature, PenstockError, UndecodableEnvelope, error_named

__all__ = [
    "Activate",
    "Actives",
    "Answer",
    "Enter",
    "Errand",
    "Export",
    "ExportedFile",
    "HashedFiles",
    "Inspect",
    "InspectedPackage",
    "Models",
    "Names",
    "PutSpec",
    "Read",
    "Rehash",
    "Row",
    "Spec",
    "Workers",
    "decode",
    "encode",
    "open_answer",
    "seal_answer",
]

Row: TypeAlias = Mapping[str, Any]
"""A row of registry/catalog/tables.py: text, whole numbers and nothing."""
_ANSWER: Final = "answer"


class _Errand(msgspec.Struct, frozen=True, array_like=True):
    """Encoded as an array that begins with the kind of the errand."""


class Names(_Errand, frozen=True, tag="names"):
    """The models of the registry -> tuple[str, ...]."""


class Read(_Errand, frozen=True, tag="read"):
    """Rows of the registry, see RegistryStore.read -> dict[str, Pages]."""

    names: tuple[str, ...] | None
    newest: int | None


class Enter(_Errand, frozen=True, tag="enter"):
    """Writes one change that was signed beforehand, see registry/catalog/store.py."""

    versions: tuple[dict[str, Any], ...]
    transitions: tuple[dict[str, Any], ...]


class Inspect(_Errand, frozen=True, tag="inspect"):
    """A package below the worker's models root, or at an absolute path of its machine -> InspectedPackage."""

    path: str


class Rehash(_Errand, frozen=True, tag="rehash"):
    """The files of a registered version as they are now -> HashedFiles."""

    source: str


class Export(_Errand, frozen=True, tag="export"):
    """Writes a version as ONNX into the worker's folder of exports -> ExportedFile."""

    source: str
    content_hash: str
    file: str
    is_int8: bool


class Models(_Errand, frozen=True, tag="models"):
    """Broker.models."""


class Spec(_Errand, frozen=True, tag="spec"):
    """Broker.spec."""

    slot: str
    version: str


class PutSpec(_Errand, frozen=True, tag="put_spec"):
    """Broker.put_spec."""

    slot: str
    spec: bytes
    version: str


class Actives(_Errand, frozen=True, tag="actives"):
    """Broker.actives."""

    slots: tuple[str, ...]


class Activate(_Errand, frozen=True, tag="activate"):
    """Broker.activate."""

    slot: str
    epoch: int
    record: bytes
    version: str
    spec: bytes


class Workers(_Errand, frozen=True, tag="workers"):
    """Broker.workers."""


class HashedFiles(msgspec.Struct, frozen=True):
    """SHA-256 by path, of a package's files and of weights that lie elsewhere; and of all together."""

    files: dict[str, str]
    source_files: dict[str, str]
    content_hash: str


class InspectedPackage(msgspec.Struct, frozen=True):
    """`source`: the package's folder on the worker's machine; `spec`: ModelSpec as JSON."""

    spec: bytes
    source: str
    hashed: HashedFiles


class ExportedFile(msgspec.Struct, frozen=True):
    """`path`: where it lies on the worker's machine; by output how far it is from the model's answers at most."""

    path: str
    bytes: int
    differences: dict[str, float]


Errand: TypeAlias = (
    Names | Read | Enter | Inspect | Rehash | Export | Models | Spec | PutSpec | Actives | Activate | Workers
)
_decoder: Final = msgspec.msgpack.Decoder(Errand)


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What came of an errand: nothing yet, a refusal, or a value."""

    is_done: bool = False
    code: str = ""
    """The class of registry/errors.py of a refusal."""
    message: str = ""
    value: msgspec.Raw = msgspec.Raw(b"\xc0")

    @classmethod
    def of(cls, value: object) -> Answer:
        """A value that msgspec can encode."""
        return cls(is_done=True, value=msgspec.Raw(msgspec.msgpack.encode(value)))

    @classmethod
    def refusal(cls, error: PenstockError) -> Answer:
        """An error that is raised again where the answer is read."""
        return cls(is_done=True, code=type(error).__name__, message=str(error))

    def read(self, kind: Any) -> Any:
        """The value as `kind`. Raises the error of a refusal, and UndecodableEnvelope for another kind of value."""
        if self.code:
            raise error_named(self.code, self.message)
        try:
            return msgspec.msgpack.decode(self.value, type=kind)
        except (msgspec.MsgspecError, RecursionError):
            raise UndecodableEnvelope("an answer of another kind than was asked for") from None


_answers: Final = msgspec.msgpack.Decoder(Answer)


def encode(errand: Errand) -> bytes:
    """As a Command carries it."""
    return msgspec.msgpack.encode(errand)


def decode(body: bytes) -> Errand:
    """Raises UndecodableEnvelope."""
    try:
        errand: Errand = _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UndecodableEnvelope(f"not an errand: {error!s:.200}") from None
    return errand


def seal_answer(errand: str, answer: Answer, keyring: Keyring) -> str:
    """The answer to the errand of this id as text, signed as results are."""
    header = EventHeader(id=errand, type=_ANSWER, key=keyring.signing_id)
    return base64.b64encode(seal("event", header, msgspec.msgpack.encode(answer), keyring)).decode()


def open_answer(errand: str, sealed: str, keyring: Keyring) -> Answer:
    """Raises Corrupt for anything but an answer to this errand that a worker with these keys gave."""
    try:
        header, body = open_event(base64.b64decode(sealed, validate=True), keyring)
        answer = _answers.decode(body)
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        raise UndecodableEnvelope("not an answer to an errand") from None
    if (header.id, header.type) != (errand, _ANSWER):
        raise BadSignature("the answer to another errand")
    return answer
