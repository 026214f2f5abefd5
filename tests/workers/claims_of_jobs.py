"""Jobs whose headers are alike, as clients publish and workers claim them, and what may go wrong with their bytes."""

from __future__ import annotations

import base64
import itertools
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import structs

from penstock.registry.broker.base import Delivery
from penstock.registry.envelope import (
    FIXED_BYTES,
    MAC_BYTES,
    SEAL_BYTES,
    JobHeader,
    Keyring,
    Options,
    Retry,
    encode_header,
    envelope_prefix,
)
from penstock.registry.queues import Priority, lane_key, reply_key
from penstock.registry.tensors import Array, encode
from tests.payload_keys import OTHER_DATA_KEY, sealing

__all__ = [
    *("KEYRINGS", "KINDS", "MISHAPS", "SEALING", "SIGNING", "SIGNING_AND_SEALING", "UNSIGNED"),
    *("Sealer", "delivery_of", "split"),
]


def _key(name: str) -> str:
    return f"{name}:{base64.b64encode(name[0].encode() * 32).decode()}"


UNSIGNED: Final = Keyring.parse(None)
SIGNING: Final = Keyring.parse(f"{_key('new')},{_key('old')}")
STRANGER: Final = Keyring.parse(_key("stranger"))
SEALING: Final = sealing(UNSIGNED)
SIGNING_AND_SEALING: Final = sealing(SIGNING)
KEYRINGS: Final[Mapping[str, Keyring]] = {
    "unsigned": UNSIGNED,
    "signed": SIGNING,
    "sealed": SEALING,
    "signed and sealed": SIGNING_AND_SEALING,
}


@dataclass(frozen=True)
class Kind:
    """Jobs that are alike: the inputs of the one with this number, and their header."""

    inputs: Callable[[int], Mapping[str, Array]] = lambda number: {"x": np.full((1, 1), number, np.float32)}
    header: Mapping[str, Any] = field(default_factory=dict)
    slot: str = "double"
    priority: Priority = Priority.NORMAL
    local_id: Callable[[int], str] = lambda number: str(uuid.UUID(int=number + (7 << 76)))


KINDS: Final[Mapping[str, Kind]] = {
    "plain": Kind(),
    "another tenant": Kind(header={"tenant": "other"}),
    "several rows": Kind(lambda number: {"x": np.arange(number, number + 5, dtype=np.float32).reshape(5, 1)}),
    "several inputs": Kind(
        lambda number: {
            "a": np.full((2, 3), number, np.int64),
            "b": np.full((2,), number % 2, bool),
            "c": np.full((2, 0), number, np.float16),
        }
    ),
    "no rows": Kind(lambda _number: {"x": np.zeros((0, 1), np.float32)}),
    "texts": Kind(lambda number: {"x": np.array([f"text {number % 10}"], object)}),
    "a deadline": Kind(header={"deadline_ms": 2000}),
    "a distant deadline": Kind(header={"deadline_ms": 10**9}),
    "a reply": Kind(header={"reply": reply_key("double", "client")}),
    "outputs": Kind(header={"options": Options(outputs=("y",))}),
    "retries": Kind(header={"options": Options(retry=Retry(attempts=2))}),
    "a webhook": Kind(header={"options": Options(webhook="https://example.org/hook")}),
    "a task": Kind(header={"options": Options(lane=True), "reply": lane_key("double")}),
    "a version": Kind(header={"version": "2"}),
    "an idempotency key": Kind(header={"idempotency_digest": "d" * 32}),
    "a trace": Kind(header={"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}),
    "another model": Kind(slot="d.u-b_l", priority=Priority.LOW),
    "short ids": Kind(local_id=str),
    "long ids": Kind(local_id=lambda number: f"{number:_>9}".replace("_", "a") + "_:-Z" * 29 + "abc"),
}
"""The kinds of jobs of a claim, by name."""


class Sealer:
    """Makes the envelopes of one client, each for a job of its own."""

    def __init__(self, keyring: Keyring) -> None:
        self.keyring = keyring
        self._numbers = itertools.count(1)

    def header(self, kind: Kind) -> tuple[JobHeader, bytes]:
        """The header and the body of the next job."""
        number = next(self._numbers)
        content, body = encode(kind.inputs(number))
        header = JobHeader(f"{kind.slot}.{kind.local_id(number)}", "acme", kind.slot, kind.priority.label, content)
        keyring = self.keyring
        return structs.replace(header, key=keyring.signing_id, is_sealed=keyring.seals, **kind.header), body

    def job(self, kind: Kind) -> bytes:
        """The envelope of the next job."""
        header, body = self.header(kind)
        return self.sealed(encode_header(header), body)

    def sealed(self, encoded: bytes, body: bytes) -> bytes:
        """The envelope of these bytes, sealed if the keyring seals, signed if it signs, whatever they say."""
        front = envelope_prefix("job", encoded) + encoded
        if self.keyring.seals and self.keyring.body_keys is not None:
            body = self.keyring.body_keys.seal(body, front)
        return self.signed(front + body)

    def signed(self, front: bytes) -> bytes:
        """These bytes, signed if the keyring signs."""
        key = self.keyring.signing_id
        return front + self.keyring.job_macs[key].digest(front) if key else front


def split(sealed: bytes, keyring: Keyring) -> tuple[bytes, bytes]:
    """(the encoded header, the plain body) of an envelope that such a keyring made."""
    encoded, body = _travelling(sealed, keyring)
    if keyring.seals and keyring.body_keys is not None:
        body = keyring.body_keys.open(body, envelope_prefix("job", encoded) + encoded)
    return encoded, body


def _travelling(sealed: bytes, keyring: Keyring) -> tuple[bytes, bytes]:
    body_at = FIXED_BYTES + int.from_bytes(sealed[4:FIXED_BYTES], "little")
    return sealed[FIXED_BYTES:body_at], sealed[body_at : len(sealed) - (MAC_BYTES if keyring.signs else 0)]


Mishap = Callable[[Sealer, Kind, int], bytes]
"""The bytes of the next job of this kind, of which something is wrong at the place `at`."""


def _flipped(sealer: Sealer, kind: Kind, at: int) -> bytes:
    sealed = bytearray(sealer.job(kind))
    sealed[at % len(sealed)] ^= 1 << at % 8
    return bytes(sealed)


def _flipped_mac(sealer: Sealer, kind: Kind, at: int) -> bytes:
    sealed = bytearray(sealer.job(kind))
    sealed[-1 - at % MAC_BYTES] ^= 1 << at % 8
    return bytes(sealed)


def _flipped_header(sealer: Sealer, kind: Kind, at: int) -> bytes:
    encoded, body = split(sealer.job(kind), sealer.keyring)
    changed = bytearray(encoded)
    changed[at % len(encoded)] ^= 1 << at % 8
    return sealer.sealed(bytes(changed), body)


def _cut(sealer: Sealer, kind: Kind, at: int) -> bytes:
    sealed = sealer.job(kind)
    return sealed[: at % len(sealed)]


def _swapped_body(sealer: Sealer, kind: Kind, at: int) -> bytes:
    (encoded, body), other = split(sealer.job(kind), sealer.keyring), sealer.job(kind)
    added = SEAL_BYTES if sealer.keyring.seals else 0
    return envelope_prefix("job", encoded) + encoded + other[-len(body) - added - MAC_BYTES :]


def _swapped_header(sealer: Sealer, kind: Kind, at: int) -> bytes:
    sealed, (encoded, _) = sealer.job(kind), split(sealer.job(kind), sealer.keyring)
    return sealed[:FIXED_BYTES] + encoded + sealed[FIXED_BYTES + len(encoded) :]


def _with_id(id_of: Callable[[bytes, int], bytes]) -> Mishap:
    def changed(sealer: Sealer, kind: Kind, at: int) -> bytes:
        header, body = sealer.header(kind)
        encoded, job_id = encode_header(header), header.id.encode()
        return sealer.sealed(encoded.replace(job_id, id_of(job_id, at), 1), body)

    return changed


def _foreign_character(job_id: bytes, at: int) -> bytes:
    place = at % len(job_id)
    return job_id[:place] + b"/ \n\0.$\xff\xe9"[at % 8 : at % 8 + 1] + job_id[place + 1 :]


def _as_map(sealer: Sealer, kind: Kind, change: Callable[[dict[str, Any], int], object], at: int) -> bytes:
    header, body = sealer.header(kind)
    fields = msgspec.msgpack.decode(encode_header(header))
    return sealer.sealed(msgspec.msgpack.encode(change(fields, at)), body)


def _second_id(sealer: Sealer, kind: Kind, at: int) -> bytes:
    header, body = sealer.header(kind)
    encoded = encode_header(header)
    other = msgspec.msgpack.encode("id") + msgspec.msgpack.encode(f"{kind.slot}.{kind.local_id(at)}")
    return sealer.sealed(bytes([encoded[0] + 1]) + encoded[1:] + other, body)


def _id_at_the_end(fields: dict[str, Any], at: int) -> object:
    return {**{name: value for name, value in fields.items() if name != "id"}, "id": fields["id"]}


def _turned(fields: dict[str, Any], at: int) -> object:
    names = list(fields)
    return {name: fields[name] for name in names[at % len(names) :] + names[: at % len(names)]}


def _long_string_type(sealer: Sealer, kind: Kind, at: int) -> bytes:
    header, body = sealer.header(kind)
    encoded = encode_header(header)
    job_id = header.id.encode()
    id_at = encoded.index(job_id)
    return sealer.sealed(encoded[:4] + b"\xda" + len(job_id).to_bytes(2, "big") + encoded[id_at:], body)


def _with_length(change: Callable[[bytes, int], bytes]) -> Mishap:
    def changed(sealer: Sealer, kind: Kind, at: int) -> bytes:
        encoded, body = split(sealer.job(kind), sealer.keyring)
        return sealer.sealed(encoded, change(body, at))

    return changed


def _id_length(sealer: Sealer, kind: Kind, at: int) -> bytes:
    encoded, body = split(sealer.job(kind), sealer.keyring)
    return sealer.sealed(encoded[:5] + bytes([(encoded[5] + 1 + at) % 256]) + encoded[6:], body)


def _header_length(sealer: Sealer, kind: Kind, at: int) -> bytes:
    sealed = sealer.job(kind)
    length = int.from_bytes(sealed[4:FIXED_BYTES], "little") + (at % 9 - 4)
    return sealed[:4] + length.to_bytes(4, "little") + sealed[FIXED_BYTES:]


def _of_stranger(sealer: Sealer, kind: Kind, at: int) -> bytes:
    return Sealer(STRANGER).job(kind)


def _of_old_key(sealer: Sealer, kind: Kind, at: int) -> bytes:
    old = replace(sealer.keyring, names=SIGNING.names[1:], job_macs=SIGNING.job_macs, result_macs=SIGNING.result_macs)
    return Sealer(old).job(kind)


def _of_no_key(sealer: Sealer, kind: Kind, at: int) -> bytes:
    return Sealer(UNSIGNED).job(kind)


def _protocol(sealer: Sealer, kind: Kind, at: int) -> bytes:
    sealed = sealer.job(kind)
    return sealed[:2] + bytes([2 + at % 200]) + sealed[3:]


def _result(sealer: Sealer, kind: Kind, at: int) -> bytes:
    sealed = sealer.job(kind)
    return sealed[:3] + b"R" + sealed[4:]


def _moved_body(sealer: Sealer, kind: Kind, at: int) -> bytes:
    """The body of another job as it travels, in an envelope that its sender signed."""
    (encoded, _), (_, other) = (_travelling(sealer.job(kind), sealer.keyring) for _ in range(2))
    return sealer.signed(envelope_prefix("job", encoded) + encoded + other)


def _flipped_body(sealer: Sealer, kind: Kind, at: int) -> bytes:
    encoded, body = _travelling(sealer.job(kind), sealer.keyring)
    changed = bytearray(body or b"\0")
    changed[at % len(changed)] ^= 1 << at % 8
    return sealer.signed(envelope_prefix("job", encoded) + encoded + bytes(changed))


def _cut_body(sealer: Sealer, kind: Kind, at: int) -> bytes:
    encoded, body = _travelling(sealer.job(kind), sealer.keyring)
    return sealer.signed(envelope_prefix("job", encoded) + encoded + body[: at % (len(body) + 1)])


def _not_sealed(sealer: Sealer, kind: Kind, at: int) -> bytes:
    return Sealer(replace(sealer.keyring, seals=False)).job(kind)


def _plain_body(sealer: Sealer, kind: Kind, at: int) -> bytes:
    """The header says that the body is sealed, and it is not."""
    header, body = sealer.header(kind)
    encoded = encode_header(structs.replace(header, is_sealed=True))
    return sealer.signed(envelope_prefix("job", encoded) + encoded + body)


def _of_other_data_key(sealer: Sealer, kind: Kind, at: int) -> bytes:
    return Sealer(sealing(sealer.keyring, OTHER_DATA_KEY)).job(kind)


def _sealed(sealer: Sealer, kind: Kind, at: int) -> bytes:
    return Sealer(sealing(sealer.keyring)).job(kind)


def _again(sealer: Sealer, kind: Kind, at: int) -> bytes:
    return Sealer(sealer.keyring).job(kind)


MISHAPS: Final[Mapping[str, Mishap]] = {
    "none": lambda sealer, kind, at: sealer.job(kind),
    "a byte was changed": _flipped,
    "a byte of the signature was changed": _flipped_mac,
    "a byte of the header was changed, and it was signed": _flipped_header,
    "cut": _cut,
    "longer": lambda sealer, kind, at: sealer.job(kind) + bytes(1 + at % 40),
    "the body of another job": _swapped_body,
    "the header of another job": _swapped_header,
    "foreign bytes": lambda sealer, kind, at: (b"PSxx" * 99)[: at % 300],
    "zeros": lambda sealer, kind, at: bytes(at % 300),
    "another protocol": _protocol,
    "a result": _result,
    "another id": _with_id(lambda job_id, at: job_id[:-1] + b"abcXYZ09"[at % 8 : at % 8 + 1]),
    "an id with a foreign character": _with_id(_foreign_character),
    "the id of another model": _with_id(lambda job_id, at: b"triple" + job_id[6:]),
    "another length of the id": _id_length,
    "another length of the header": _header_length,
    "two ids": _second_id,
    "the id at the end": lambda sealer, kind, at: _as_map(sealer, kind, _id_at_the_end, at),
    "another order of the fields": lambda sealer, kind, at: _as_map(sealer, kind, _turned, at),
    "an unknown field": lambda sealer, kind, at: _as_map(sealer, kind, lambda fields, _: {**fields, "more": at}, at),
    "another type of string": _long_string_type,
    "an unknown key": _of_stranger,
    "the old key": _of_old_key,
    "no key": _of_no_key,
    "no body": _with_length(lambda body, at: b""),
    "a shorter body": _with_length(lambda body, at: body[:-1]),
    "a longer body": _with_length(lambda body, at: body + b"\0"),
    "a body of other bytes": _with_length(lambda body, at: bytes((byte + at) % 256 for byte in body)),
    "a body of NaN": _with_length(lambda body, at: b"\xff" * len(body)),
    "the bytes of an earlier job": _again,
    "the sealed body of another job": _moved_body,
    "a byte of the body was changed, and it was signed": _flipped_body,
    "the sealed body was cut": _cut_body,
    "not sealed": _not_sealed,
    "a plain body that is called sealed": _plain_body,
    "sealed with another key": _of_other_data_key,
    "sealed": _sealed,
}
"""What may be wrong with the bytes of a job, by name."""


def delivery_of(sealed: bytes, kind: Kind, number: int, **changes: Any) -> Delivery:
    """These bytes, claimed from the queue of this kind; `changes` are those of the delivery."""
    delivery = Delivery(kind.slot, kind.priority, f"{4000 + number % 1999}-{number}".encode(), sealed)
    return structs.replace(delivery, **changes)
