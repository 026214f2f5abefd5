"""Operator RPC: requests to a worker from an operator who reaches neither the registry's database nor the broker.

    operator -- Request, in a signed Command --> OperatorRpcServer of a worker --> registry, files, broker
             <-- Response, signed with the workers' key for results --

While a request runs, its response is "not done", and the operator repeats the command. Running a request twice is
harmless: an operator who lost the response repeats it. The operator signs every row and record before it is written,
so that a worker needs no signing key of operators.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from penstock.registry.envelope import EventHeader, Keyring, open_event, seal
from penstock.registry.errors import BadSignature, PenstockError, UndecodableEnvelope, error_named

__all__ = [
    "Activate",
    "Actives",
    "Enter",
    "Export",
    "ExportedFile",
    "HashedFiles",
    "Inspect",
    "InspectedPackage",
    "Models",
    "Names",
    "Observations",
    "PutSpec",
    "Ratings",
    "Read",
    "Rehash",
    "Request",
    "Response",
    "Row",
    "Spec",
    "Workers",
    "decode",
    "encode",
    "open_response",
    "seal_response",
]

Row: TypeAlias = Mapping[str, Any]
"""A row of registry/catalog/tables.py: text, integers and None."""
_RESPONSE: Final = "response"
_MOST_TRANSITIONS: Final = 2**31 - 1
"""Every database takes this number."""


class _Request(msgspec.Struct, frozen=True, array_like=True):
    """Encoded as an array that begins with the kind of the request."""


class Names(_Request, frozen=True, tag="names"):
    """The names of the registered models -> tuple[str, ...]."""


class Read(_Request, frozen=True, tag="read"):
    """Rows of the registry -> dict[str, ModelRows]. See RegistryStore.read."""

    names: tuple[str, ...] | None
    newest: Annotated[int, msgspec.Meta(ge=0, le=_MOST_TRANSITIONS)] | None


class Enter(_Request, frozen=True, tag="enter"):
    """Writes one signed change of the registry. See registry/catalog/store.py."""

    versions: tuple[dict[str, Any], ...]
    transitions: tuple[dict[str, Any], ...]
    experiments: tuple[dict[str, Any], ...] = ()
    policies: tuple[dict[str, Any], ...] = ()


class Inspect(_Request, frozen=True, tag="inspect"):
    """Reads a package below the worker's models root or at an absolute path on its machine -> InspectedPackage."""

    path: str


class Rehash(_Request, frozen=True, tag="rehash"):
    """Hashes the present files of a registered version -> HashedFiles."""

    source: str


class Export(_Request, frozen=True, tag="export"):
    """Writes a version as ONNX into the worker's export folder -> ExportedFile."""

    source: str
    content_hash: str
    file: str
    is_int8: bool


class Models(_Request, frozen=True, tag="models"):
    """Broker.models."""


class Spec(_Request, frozen=True, tag="spec"):
    """Broker.spec."""

    slot: str
    version: str


class PutSpec(_Request, frozen=True, tag="put_spec"):
    """Broker.put_spec."""

    slot: str
    spec: bytes
    version: str


class Actives(_Request, frozen=True, tag="actives"):
    """Broker.actives."""

    slots: tuple[str, ...]


class Activate(_Request, frozen=True, tag="activate"):
    """Broker.activate."""

    slot: str
    epoch: int
    record: bytes
    version: str
    spec: bytes


class Observations(_Request, frozen=True, tag="observations"):
    """Broker.observations."""

    slot: str
    experiment: str


class Ratings(_Request, frozen=True, tag="ratings"):
    """Broker.ratings."""

    slot: str
    experiment: str


class Workers(_Request, frozen=True, tag="workers"):
    """Broker.workers."""


class HashedFiles(msgspec.Struct, frozen=True):
    """SHA-256 by path of a package's files and of weights outside it, and the hash of all of them."""

    files: dict[str, str]
    source_files: dict[str, str]
    content_hash: str


class InspectedPackage(msgspec.Struct, frozen=True):
    """`source`: the package's folder on the worker's machine; `spec`: ModelSpec as JSON."""

    spec: bytes
    source: str
    hashed: HashedFiles


class ExportedFile(msgspec.Struct, frozen=True):
    """`path`: on the worker's machine. `differences`: by output, the largest difference from the model's outputs."""

    path: str
    bytes: int
    differences: dict[str, float]


Request: TypeAlias = (
    Names
    | Read
    | Enter
    | Inspect
    | Rehash
    | Export
    | Models
    | Spec
    | PutSpec
    | Actives
    | Activate
    | Observations
    | Ratings
    | Workers
)
_request_decoder: Final = msgspec.msgpack.Decoder(Request)


class Response(msgspec.Struct, frozen=True, omit_defaults=True):
    """The response to a request: not done yet, a refusal, or a value."""

    is_done: bool = False
    code: str = ""
    """The class of the refusal in registry/errors.py."""
    message: str = ""
    value: msgspec.Raw = msgspec.Raw(b"\xc0")

    @classmethod
    def of(cls, value: object) -> Response:
        """A response with a value that msgspec can encode."""
        return cls(is_done=True, value=msgspec.Raw(msgspec.msgpack.encode(value)))

    @classmethod
    def refusal(cls, error: PenstockError) -> Response:
        """A response with an error, which `read` raises again."""
        return cls(is_done=True, code=type(error).__name__, message=str(error))

    def read(self, kind: Any) -> Any:
        """The value as `kind`. Raises the error of a refusal, and UndecodableEnvelope for another kind of value."""
        if self.code:
            raise error_named(self.code, self.message)
        try:
            return msgspec.msgpack.decode(self.value, type=kind)
        except (msgspec.MsgspecError, RecursionError):
            raise UndecodableEnvelope("a response of another type than the request expects") from None


_response_decoder: Final = msgspec.msgpack.Decoder(Response)


def encode(request: Request) -> bytes:
    """The request as the body of a Command."""
    return msgspec.msgpack.encode(request)


def decode(body: bytes) -> Request:
    """The request in the body of a Command. Raises UndecodableEnvelope."""
    try:
        request: Request = _request_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UndecodableEnvelope(f"not an RPC request: {error!s:.200}") from None
    return request


def seal_response(request_id: str, response: Response, keyring: Keyring) -> str:
    """The response to the request with this id as text, signed as results are."""
    header = EventHeader(id=request_id, type=_RESPONSE, key=keyring.signing_id)
    return base64.b64encode(seal("event", header, msgspec.msgpack.encode(response), keyring)).decode()


def open_response(request_id: str, sealed: str, keyring: Keyring) -> Response:
    """The response to the request with this id. Raises Corrupt unless a worker with these keys has signed it."""
    try:
        header, body = open_event(base64.b64decode(sealed, validate=True), keyring)
        response = _response_decoder.decode(body)
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        raise UndecodableEnvelope("not an RPC response") from None
    if (header.id, header.type) != (request_id, _RESPONSE):
        raise BadSignature("the response to another RPC request")
    return response
