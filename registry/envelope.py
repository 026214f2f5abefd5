"""Messages between processes: jobs, results, events and shadow pairs, each sealed as one string of bytes.

    "PS"  protocol  kind  header length (uint32 LE)  header (msgpack map)  body (registry/tensors.py)  [HMAC-SHA256]

The MAC covers everything before it. It is present if and only if the header names a key id. Jobs and results are
signed with different keys, both derived from the operator's key, so that a job cannot pass for a result. Bodies are
not decoded here: the reader decodes them after the signature was verified.

A body is encrypted if and only if the header says `is_sealed`; see safety/sealing.py. It is bound to all bytes before
it, and so to the kind, the job, the tenant and the model: it opens in no other envelope. Headers are not encrypted. A
reader that seals refuses plain bodies. The result of a failed job has no body, and is not encrypted.

The structs hold plain data without cycles: gc=False keeps tens of thousands of them a second from the garbage
collector.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec

from penstock.registry.backoff import backoff_delay_s
from penstock.registry.errors import (
    BadSeal,
    BadSignature,
    ConfigurationError,
    InvalidInput,
    JobFailed,
    PenstockError,
    UndecodableEnvelope,
    job_failure,
    shown,
)
from penstock.registry.tensors import MAX_BYTES, MAX_RESULT_BYTES, Tensor

__all__ = [
    "FIXED_BYTES",
    "ID_AT",
    "MAC_BYTES",
    "MAX_HEADER_BYTES",
    "MAX_JOB_BYTES",
    "PROTOCOL",
    "SEAL_BYTES",
    "TRACEPARENT",
    "BodyKeys",
    "EventHeader",
    "Failure",
    "JobHeader",
    "KeyName",
    "Keyring",
    "Mac",
    "Options",
    "PairHeader",
    "RequestContext",
    "ResultHeader",
    "Retry",
    "Timings",
    "encode_header",
    "envelope_prefix",
    "open_event",
    "open_job",
    "open_pair",
    "open_result",
    "peek_job",
    "seal",
    "verify_job",
    "verify_result",
]

PROTOCOL: Final = 1
MAX_HEADER_BYTES: Final = 64 * 1024
_MAGIC: Final = b"PS"
MAC_BYTES: Final = 32
SEAL_BYTES: Final = 32
"""By how many bytes a sealed body is longer: the id of the key, a nonce, a tag."""
TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
"""A trace context of W3C. Its group is the id of the trace."""
_SAME_KEYS: Final = "Expected the same PENSTOCK_SIGNING_KEYS at both ends"
_SAME_SEALS: Final = "Expected the same privacy.seal_payloads, and the same data keys, at both ends"
_MAX_ATTEMPTS: Final = 100
_MAX_PAUSE_S: Final = 3600
FIXED_BYTES: Final = 8
"""Bytes before the header: magic, protocol, kind, header length."""
ID_AT: Final = FIXED_BYTES + 6
"""Where an id of 32 bytes or more begins: behind the size of the header's map, the name `id`, and its own length."""
MAX_JOB_BYTES: Final = FIXED_BYTES + MAX_HEADER_BYTES + MAX_BYTES + SEAL_BYTES + MAC_BYTES
"""The largest envelope of a job."""

Kind = Literal["job", "result", "event", "pair"]
_LETTER: Final[dict[Kind, bytes]] = {"job": b"J", "result": b"R", "event": b"E", "pair": b"P"}
_PREFIX: Final = {kind: _MAGIC + bytes([PROTOCOL]) + letter for kind, letter in _LETTER.items()}


class Retry(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Retries of a job whose forward fails: up to `attempts` forwards in all, with pauses between them.

    The pauses double from `backoff_s` up to `longest_s`. Each is reduced at random by up to a half, so that jobs that
    failed together do not return together. A forward over its time limit counts: the next one follows in another
    process, without a pause. Crashes of a worker have a limit of their own, `queue.max_crashes`.
    Raises InvalidInput for numbers out of range.
    """

    attempts: int = 3
    backoff_s: float = 0.5
    longest_s: float = 30.0

    def __post_init__(self) -> None:
        # The exact types only: True and 3.0 compare as numbers, but no worker can read a header with them.
        if type(self.attempts) is not int or not 1 <= self.attempts <= _MAX_ATTEMPTS:
            raise InvalidInput(
                f"retry.attempts is {self.attempts!r:.40}. Expected a whole number from 1 to {_MAX_ATTEMPTS}"
            )
        pauses = (self.backoff_s, self.longest_s)
        if any(type(pause) not in (int, float) for pause in pauses) or not 0 <= pauses[0] <= pauses[1] <= _MAX_PAUSE_S:
            raise InvalidInput(
                f"retry pauses are {pauses[0]!r:.40} to {pauses[1]!r:.40} s. Expected plain numbers, "
                f"backoff_s <= longest_s, both from 0 to {_MAX_PAUSE_S}"
            )

    def pause_s(self, tries: int, jitter: float) -> float:
        """The pause in seconds after `tries` forwards. `jitter` is in [0, 1).

        >>> [Retry(backoff_s=1, longest_s=5).pause_s(tries, jitter=0) for tries in (1, 2, 3, 4, 1000)]
        [0.5, 1.0, 2.0, 2.5, 2.5]
        """
        return backoff_delay_s(tries, self.backoff_s, self.longest_s, jitter)


class Options(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The options of a job besides its inputs."""

    outputs: tuple[str, ...] = ()
    """The requested outputs; empty: all declared ones."""
    lane: bool = False
    """The job came through Celery's `send_task`. Its result is also stored in Celery's backend."""
    retry: Retry | None = None
    """None: the job fails with its first failed forward."""
    webhook: str = ""
    """The URL that is told of the job's end. The record of the job has it, too; see registry/webhook_target.py."""
    sticky_key: str = ""
    """In a sticky experiment, jobs of one key have one version; empty: jobs of one tenant have."""
    endpoint: str = ""
    """The endpoint of the model, whose policy the job has; empty: `infer`."""


class RequestContext(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The tenant and the trace of a job. It passes from producer to worker to result unchanged."""

    tenant: str
    traceparent: str = ""


class JobHeader(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The header of a job. Its deadline counts from acceptance, by the broker's clock."""

    id: str
    tenant: str
    model: str
    priority: str
    content: tuple[Tensor, ...]
    version: str = ""
    """Empty: the active version."""
    deadline_ms: int = 0
    """The job must start within these milliseconds after its acceptance, and a text must end; 0: no deadline."""
    reply: str = ""
    idempotency_digest: str = ""
    """Digest of (tenant, idempotency key); empty when the producer gave no key. See registry/admission.py."""
    traceparent: str = ""
    options: Options = Options()
    key: str = ""
    """Id of the signing key; empty: unsigned."""
    is_sealed: bool = False
    """Whether the body is encrypted."""
    account: str = ""
    """The id of the API key that pays for the tokens of a text; empty: none, and for other models."""

    @property
    def context(self) -> RequestContext:
        """The part that passes to the result."""
        return RequestContext(self.tenant, self.traceparent)

    @property
    def trace_id(self) -> str:
        """The trace in `traceparent`; empty without one. Clients that are not ours may have written any text there."""
        match = TRACEPARENT.fullmatch(self.traceparent)
        return match[1] if match else ""


class Failure(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A JobFailed as plain data: its class name, its message, and where a model raised it."""

    code: str
    message: str
    where: str = ""
    """The last frame of the package's own code: `model.py, line 7, in predict`."""
    traceback: str = ""
    """With the paths of the worker's files, so a client gets it only where the settings allow that."""

    def exception(self) -> JobFailed:
        """The exception that a client sees."""
        return job_failure(self.code, self.message, where=self.where, traceback=self.traceback)


class Timings(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The stages of a job in milliseconds: `queue_ms` by the broker's clock, the others by the worker's."""

    queue_ms: float = 0.0
    """From acceptance to claim."""
    batch_ms: float = 0.0
    """From claim to the beginning of its forward."""
    compute_ms: float = 0.0
    """The forward of its batch."""


class ResultHeader(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The header of a result: how the job ended."""

    id: str
    context: RequestContext
    version: str = ""
    """The version that ran the job."""
    worker: str = ""
    content: tuple[Tensor, ...] = ()
    error: Failure | None = None
    attempt: int = 1
    batch_size: int = 0
    """Rows of the job's micro-batch."""
    timings: Timings = Timings()
    key: str = ""
    content_digest: bytes = b""
    """SHA-256 of the content of that version; empty for a job that no model ran."""
    is_cached: bool = False
    """Whether the result comes from the response cache, without a forward."""
    experiment: str = ""
    """The id of the experiment whose arm answered; empty for none, and for a job that named a version."""
    is_sealed: bool = False
    """Whether the body is encrypted."""
    level: str = ""
    """The level of the fallback chain that answered, where an earlier one had failed or was stopped; see
    safety/fallback.py. Empty: the first one answered."""

    @property
    def content_hash(self) -> str:
        """The digest of the content in hexadecimal digits, as people read it."""
        return self.content_digest.hex()


class EventHeader(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The header of some events of a running job; event_body.py has their body. `id` names the job."""

    id: str
    type: str = "events"
    attempt: int = 1
    key: str = ""
    is_sealed: bool = False
    """Whether the body is encrypted."""
    tenant: str = ""
    """The tenant of the job, to which a sealed body is bound; empty while bodies are not sealed."""


class PairHeader(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The header of a shadow pair: the inputs of an answered job and the outputs that were served; see shadow.py."""

    id: str
    """The job."""
    tenant: str
    model: str
    shadow: str
    """The id of the order that asked for the pair."""
    version: str
    """The version that answered."""
    content_hash: str
    """SHA-256 of the content of that version."""
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    input_bytes: int
    """Bytes of the body that are inputs; those of the outputs follow."""
    compute_ms: float = 0.0
    """The forward of its batch."""
    batch_rows: int = 1
    """Rows of that batch."""
    key: str = ""
    is_sealed: bool = False
    """Whether the body is encrypted."""


Header = TypeVar("Header", JobHeader, ResultHeader, EventHeader, PairHeader)

_encode: Final = msgspec.msgpack.Encoder().encode
_job_decoder: Final = msgspec.msgpack.Decoder(JobHeader)
_result_decoder: Final = msgspec.msgpack.Decoder(ResultHeader)
_event_decoder: Final = msgspec.msgpack.Decoder(EventHeader)
_pair_decoder: Final = msgspec.msgpack.Decoder(PairHeader)


class Mac:
    """HMAC-SHA256 (RFC 2104) with one key of at most 64 bytes. Its two keyed states are made once.

    A third faster on a job's envelope than hmac.digest, which makes the states and looks up SHA-256 in every call.
    """

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        padded = key.ljust(64, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded))

    def digest(self, *message: bytes | memoryview) -> bytes:
        """The 32 bytes of the MAC of these parts, one after another."""
        inner = self._inner.copy()
        for part in message:
            inner.update(part)
        outer = self._outer.copy()
        outer.update(inner.digest())
        return outer.digest()


class KeyName(NamedTuple):
    """A signing key without the key: its id, and 8 hex digits that tell two keys of one id apart."""

    id: str
    fingerprint: str


class BodyKeys(Protocol):
    """The keys that encrypt bodies: safety.sealing.DataKeys, which a client without encryption does not import."""

    def seal(self, plain: bytes | memoryview, bound: bytes) -> bytes:
        """`plain`, encrypted and bound to `bound`. Longer by SEAL_BYTES."""

    def open(self, sealed: bytes | memoryview, bound: bytes) -> bytes:
        """The plain bytes. Raises PenstockError for a key that is not here, and for changed, cut or moved bytes."""


@dataclass(frozen=True, slots=True)
class Keyring:
    """The signing keys: the first one signs, all verify. Without a key, signing is off.

    Key rotation: put the new key first, wait until every process trusts both keys, then remove the old one.
    body_keys: open sealed bodies, and seal them while `seals`; None: there is no data key here. `Settings.keyring` has
    none, safety.payload_keys.envelope_keys gives all.
    """

    names: tuple[KeyName, ...]
    job_macs: dict[str, Mac] = field(repr=False)
    result_macs: dict[str, Mac] = field(repr=False)
    body_keys: BodyKeys | None = field(default=None, repr=False)
    seals: bool = False
    """Whether bodies are sealed, and plain ones refused."""

    @classmethod
    def parse(cls, text: str | None) -> Keyring:
        """From `id:base64[,id:base64]`, each key at least 32 bytes. Raises ConfigurationError, without the key."""
        secrets: dict[str, bytes] = {}
        for position, item in enumerate(filter(None, (text or "").split(",")), 1):
            key_id, colon, encoded = item.strip().partition(":")
            try:
                secret = base64.b64decode(encoded, validate=True)
            except binascii.Error:
                secret = b""
            if not colon or not key_id or len(key_id) > 64 or len(secret) < 32 or key_id in secrets:
                raise ConfigurationError(
                    f"Signing key {position} is not usable. Expected id:base64[,id:base64] with distinct ids and "
                    "keys of at least 32 bytes"
                )
            secrets[key_id] = secret
        return cls(
            tuple(KeyName(key_id, _derived(secret, "name")[:4].hex()) for key_id, secret in secrets.items()),
            {key_id: Mac(_derived(secret, "job")) for key_id, secret in secrets.items()},
            {key_id: Mac(_derived(secret, "result")) for key_id, secret in secrets.items()},
        )

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the keys, the signing one first."""
        return tuple(name.id for name in self.names)

    @property
    def signs(self) -> bool:
        """Whether envelopes are signed, and unsigned ones refused."""
        return bool(self.names)

    @property
    def signing_id(self) -> str:
        """The key id for a header before it is sealed; empty when signing is off."""
        return self.names[0].id if self.names else ""


def _derived(secret: bytes, purpose: str) -> bytes:
    """A key of its own for each purpose: none of them tells anything about another one, nor about the secret."""
    return hmac.digest(secret, f"penstock {purpose} v1".encode(), "sha256")


AnyHeader: TypeAlias = JobHeader | ResultHeader | EventHeader | PairHeader


def encode_header(header: AnyHeader) -> bytes:
    """The header as it stands in an envelope: a msgpack map without the fields that have their default."""
    return _encode(header)


def envelope_prefix(kind: Kind, encoded_header: bytes) -> bytes:
    """What stands before the header in an envelope, FIXED_BYTES long."""
    return _PREFIX[kind] + len(encoded_header).to_bytes(4, "little")


def seal(kind: Kind, header: AnyHeader, body: bytes | memoryview, keyring: Keyring) -> bytes:
    """The envelope of a header and its body, signed with the key `header.key`; empty: unsigned.

    The body is encrypted if the header says so. Raises KeyError for an unknown key: take it from `keyring.signing_id`,
    and `is_sealed` from `keyring.seals`.
    """
    head = _encode(header)
    front = b"".join((envelope_prefix(kind, head), head))
    if header.is_sealed:
        if keyring.body_keys is None:
            raise KeyError("body_keys")
        body = keyring.body_keys.seal(body, front)
    if not header.key:
        return b"".join((front, body))
    macs = keyring.job_macs if kind == "job" else keyring.result_macs
    # The MAC of two parts: appending it to the whole would copy a large body once more.
    return b"".join((front, body, macs[header.key].digest(front, body)))


def open_job(sealed: bytes, keyring: Keyring) -> tuple[JobHeader, memoryview | bytes]:
    """(header, plain body) of a job. Raises UndecodableEnvelope, BadSignature or BadSeal."""
    return _open("job", sealed, keyring, _job_decoder)


def verify_job(sealed: bytes, keyring: Keyring) -> JobHeader:
    """The header of a job, without its body: no data key is needed. Raises UndecodableEnvelope or BadSignature."""
    return _verified("job", sealed, keyring, _job_decoder)[0]


def peek_job(sealed: bytes) -> JobHeader | None:
    """The header of a job, without a check of its signature; None when it cannot be decoded.

    `sealed` may be cut off after the header.
    """
    size = int.from_bytes(sealed[4:FIXED_BYTES], "little")
    if sealed[:4] != _PREFIX["job"] or not 0 < size <= MAX_HEADER_BYTES or len(sealed) < FIXED_BYTES + size:
        return None
    try:
        return _job_decoder.decode(sealed[FIXED_BYTES : FIXED_BYTES + size])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def open_result(sealed: bytes, keyring: Keyring) -> tuple[ResultHeader, memoryview | bytes]:
    """(header, plain body) of a result. Raises UndecodableEnvelope, BadSignature or BadSeal."""
    return _open("result", sealed, keyring, _result_decoder)


def verify_result(sealed: bytes, keyring: Keyring) -> ResultHeader:
    """The header of a result, without its body: no data key is needed. Raises UndecodableEnvelope or BadSignature."""
    return _verified("result", sealed, keyring, _result_decoder)[0]


def open_event(sealed: bytes, keyring: Keyring) -> tuple[EventHeader, memoryview | bytes]:
    """(header, plain body) of some events of a job. Raises UndecodableEnvelope, BadSignature or BadSeal."""
    return _open("event", sealed, keyring, _event_decoder)


def open_pair(sealed: bytes, keyring: Keyring) -> tuple[PairHeader, memoryview | bytes]:
    """(header, plain body) of a shadow pair. Raises UndecodableEnvelope, BadSignature or BadSeal."""
    return _open("pair", sealed, keyring, _pair_decoder)


def _open(
    kind: Kind, sealed: bytes, keyring: Keyring, decoder: msgspec.msgpack.Decoder[Header]
) -> tuple[Header, memoryview | bytes]:
    header, body = _verified(kind, sealed, keyring, decoder)
    if not header.is_sealed:
        if keyring.seals and not (isinstance(header, ResultHeader) and header.error is not None and not body):
            raise BadSeal(
                f"a {kind}{_sender(header)} whose body is not encrypted, but its reader seals payloads. {_SAME_SEALS}",
                _claimed(header),
            )
        return header, body
    if keyring.body_keys is None:
        raise BadSeal(
            f"a {kind}{_sender(header)} whose body is encrypted, but its reader has no data key. {_SAME_SEALS}",
            _claimed(header),
        )
    body_at = FIXED_BYTES + int.from_bytes(sealed[4:FIXED_BYTES], "little")
    try:
        return header, keyring.body_keys.open(body, sealed[:body_at])
    except PenstockError as error:
        raise BadSeal(
            f"a {kind}{_sender(header)} whose body cannot be decrypted. {error}. {_SAME_SEALS}", _claimed(header)
        ) from None


def _verified(
    kind: Kind, sealed: bytes, keyring: Keyring, decoder: msgspec.msgpack.Decoder[Header]
) -> tuple[Header, memoryview]:
    """The header and the body as it travels. The signature is verified, the seal is not."""
    if sealed[:4] != _PREFIX[kind]:
        raise UndecodableEnvelope(_foreign(sealed, kind), _claimed_elsewhere(sealed, kind))
    size = int.from_bytes(sealed[4:FIXED_BYTES], "little")
    if size > MAX_HEADER_BYTES or FIXED_BYTES + size > len(sealed):
        raise UndecodableEnvelope(f"its header claims {size} bytes")
    cap = MAX_BYTES if kind == "job" else MAX_RESULT_BYTES
    if len(sealed) > cap + size + FIXED_BYTES + SEAL_BYTES + MAC_BYTES:
        raise UndecodableEnvelope(f"its {len(sealed)} bytes exceed the cap of {cap}")
    view = memoryview(sealed)
    try:
        header = decoder.decode(view[FIXED_BYTES : FIXED_BYTES + size])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise UndecodableEnvelope(f"its header is not the header of a {kind}") from None
    end = len(sealed)
    if header.key:
        end -= MAC_BYTES
        if (problem := _mismatch(kind, header, view, end, keyring)) is not None:
            raise BadSignature(problem, _claimed(header))
    elif keyring.signs:
        raise BadSignature(
            f"an unsigned {kind}{_sender(header)}, but its reader has signing keys. {_SAME_KEYS}",
            _claimed(header),
        )
    if end < FIXED_BYTES + size:
        raise UndecodableEnvelope("it ends before its signature")
    body = view[FIXED_BYTES + size : end]
    if len(body) > cap + (SEAL_BYTES if header.is_sealed else 0):
        raise UndecodableEnvelope(f"the {len(body)} bytes of its body exceed the cap of {cap}", _claimed(header))
    return header, body


def _mismatch(kind: Kind, header: AnyHeader, sealed: memoryview, end: int, keyring: Keyring) -> str | None:
    """Why the signature is wrong, or None."""
    macs = keyring.job_macs if kind == "job" else keyring.result_macs
    mac = macs.get(header.key)
    if mac is None:
        return (
            f"a {kind}{_sender(header)} that is signed with key {header.key!r:.80}, which its reader does not have. "
            f"{_SAME_KEYS}"
        )
    if end < FIXED_BYTES or not hmac.compare_digest(mac.digest(sealed[:end]), sealed[end:]):
        return (
            f"a {kind}{_sender(header)} whose signature is wrong: it was changed, or key {header.key!r:.80} is another "
            f"one at its sender. {_SAME_KEYS}"
        )
    return None


def _sender(header: AnyHeader) -> str:
    """The worker that a result names, for a message: the name is not verified."""
    return f" of worker {shown(header.worker)}" if isinstance(header, ResultHeader) and header.worker else ""


def _claimed(header: AnyHeader) -> tuple[str, str] | None:
    return (header.id, header.tenant) if isinstance(header, JobHeader) else None


class _Claim(msgspec.Struct, gc=False):
    """The fields that the headers of all protocols have."""

    id: str
    tenant: str


_claim_decoder: Final = msgspec.msgpack.Decoder(_Claim)


def _claimed_elsewhere(sealed: bytes, kind: Kind) -> tuple[str, str] | None:
    """(job id, tenant) of a job in another protocol, if its header has these fields; else None."""
    if kind != "job" or sealed[:2] != _MAGIC or sealed[3:4] != _PREFIX[kind][3:4]:
        return None
    size = int.from_bytes(sealed[4:FIXED_BYTES], "little")
    if size > MAX_HEADER_BYTES:
        return None
    try:
        claim = _claim_decoder.decode(memoryview(sealed)[FIXED_BYTES : FIXED_BYTES + size])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return claim.id, claim.tenant


def _foreign(sealed: bytes, kind: Kind) -> str:
    if sealed[:2] != _MAGIC or len(sealed) < FIXED_BYTES:
        return "not a Penstock envelope"
    if sealed[2] != PROTOCOL:
        return f"protocol {sealed[2]}; expected {PROTOCOL}"
    return f"not a {kind}"
