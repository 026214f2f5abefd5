"""The shadow of a model: an order that workers follow, and the pairs that they mirror to its queue.

    operator -- ShadowOrder.seal --> `{model}:shadow` -- read with the worker's report --> workers
    a committed job -- in Sample ---> ShadowPair.seal --> `infer.{model}.shadow` --> shadow worker: the candidate

A pair has both sides of a comparison but the candidate's: the inputs as they were received, and the outputs that were
served. It is never redacted, because a redacted input is another input. It is signed, and encrypted where payloads are.
"""

from __future__ import annotations

import hashlib
import secrets
import zlib
from collections.abc import Iterable
from math import ceil, isfinite
from typing import Final, NamedTuple

import msgspec

from penstock.registry.envelope import Keyring, PairHeader, open_pair, seal
from penstock.registry.errors import BadSignature, InvalidInput, UndecodableEnvelope
from penstock.registry.signed import Signer, Verifier, open_record, seal_record
from penstock.registry.tensors import Array, decode

__all__ = ["CANARY_PAIRS", "MAX_PAIR_BYTES", "Sample", "ShadowOrder", "ShadowPair"]

MAX_PAIR_BYTES: Final = 4 * 1024 * 1024
"""The largest pair, sealed. Larger ones are not mirrored: few of them would fill the queue."""
CANARY_PAIRS: Final = 1500
"""Without an error in so many pairs, less than 5 % are left for a candidate that errs in one of 500 (0.998 ** 1500)."""
_MAX_ORDER_BYTES: Final = 4096
_HASH_MASK: Final = 0xFFFF_FFFF


class ShadowOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """An operator's order: mirror a share of the answered jobs of `model`, and run `candidate` on them.

    The caps hold for the whole queue, whatever the number of workers. Raises InvalidInput for values out of range.
    """

    id: str
    """Names this shadow, and salts its sample: two shadows of one model sample other jobs."""
    model: str
    candidate: str
    """The version that runs on the pairs."""
    share: float
    """Of the answered jobs, above 0 and up to 1."""
    until_ms: int
    """The shadow ends by itself then, by the broker's clock."""
    candidate_hash: str = ""
    """The content that the candidate must have; empty: any."""
    max_pairs: int = 10_000
    """Pairs in the queue."""
    max_bytes: int = 64 * 1024 * 1024
    """Bytes in the queue."""
    pair_ttl_ms: int = 600_000
    """A pair that was not compared for so long is deleted."""
    form: str = ""
    """The form of the candidate that runs, such as `int8`; empty: the version as its author built it."""
    canary_pairs: int = CANARY_PAIRS
    """With fewer compared pairs, the canary gives no verdict but FAIL, which ends the shadow. 0: there is no canary."""

    def __post_init__(self) -> None:
        if not (isfinite(self.share) and 0 < self.share <= 1):
            raise InvalidInput(f"The share of a shadow is {self.share:g}. Expected a number above 0 and up to 1")
        for name in ("max_pairs", "max_bytes", "pair_ttl_ms"):
            if (value := getattr(self, name)) < 1:
                raise InvalidInput(f"{name} of a shadow is {value}. Expected a positive number")
        if self.canary_pairs < 0:
            raise InvalidInput(f"canary_pairs of a shadow is {self.canary_pairs}. Expected a positive number, or 0")

    @classmethod
    def new(cls, model: str, candidate: str, share: float, *, until_ms: int, **more: int | str) -> ShadowOrder:
        """An order with an id of its own. more: the other fields."""
        return cls(secrets.token_hex(8), model, candidate, share, until_ms, **more)  # type: ignore[arg-type]

    def seal(self, sign: Signer | None = None) -> bytes:
        """The record, signed if there is a signer."""
        return seal_record(msgspec.json.encode(self), sign, _context(self.model))

    @classmethod
    def open(cls, record: bytes, model: str, verify: Verifier | None = None) -> ShadowOrder:
        """The order of a record. Raises Corrupt for anything but an order for this model that an operator signed."""
        if len(record) > _MAX_ORDER_BYTES:
            raise UndecodableEnvelope(f"the order of a shadow has {len(record)} bytes")
        payload = open_record(record, verify, _context(model))
        try:
            order = _decode_order(payload)
        except (msgspec.MsgspecError, InvalidInput) as error:
            raise UndecodableEnvelope(f"the order of a shadow: {error!s:.200}") from None
        if order.model != model:
            raise BadSignature("the order of the shadow is for another model")
        return order

    @property
    def label(self) -> str:
        """The candidate for a person: `2`, or `2 in the form int8`."""
        return f"{self.candidate} in the form {self.form}" if self.form else self.candidate

    def is_over(self, now_ms: float) -> bool:
        """Whether its time has passed. A signed order of an earlier time has no effect."""
        return now_ms >= self.until_ms


_decode_order = msgspec.json.Decoder(ShadowOrder).decode


def _context(model: str) -> str:
    return f"shadow {model}"


class Sample:
    """The jobs that a shadow compares, by their ids: every worker and every delivery of a job agree.

    The CRC-32 of the id, times an odd number of the order (Knuth, TAOCP 3, section 6.4), is compared with the share.
    Every answered job is asked about, and a cryptographic hash would cost four times as much.
    """

    def __init__(self, order: ShadowOrder) -> None:
        digest = hashlib.blake2b(order.id.encode(), digest_size=8).digest()
        self._factor, self._start = int.from_bytes(digest[:4], "big") | 1, int.from_bytes(digest[4:], "big")
        self._threshold = ceil(order.share * (_HASH_MASK + 1))

    def places(self, job_ids: Iterable[str]) -> list[int]:
        """The places of the jobs that are in the sample."""
        # In one go: a call for each id takes longer than its hash.
        factor, start, threshold, crc32 = self._factor, self._start, self._threshold, zlib.crc32
        return [
            place
            for place, job_id in enumerate(job_ids)
            if (crc32(job_id.encode(), start) * factor & _HASH_MASK) < threshold
        ]

    def __contains__(self, job_id: str) -> bool:
        return bool(self.places((job_id,)))


class ShadowPair(NamedTuple):
    """One answered job: its inputs and the served outputs, encoded as registry/tensors.py says."""

    header: PairHeader
    encoded_inputs: bytes | memoryview
    encoded_outputs: bytes | memoryview

    def seal(self, keyring: Keyring) -> bytes:
        """The envelope, signed and encrypted as the keyring says."""
        header = self.header
        if (header.key, header.is_sealed) != (keyring.signing_id, keyring.seals):
            header = msgspec.structs.replace(header, key=keyring.signing_id, is_sealed=keyring.seals)
        return seal("pair", header, b"".join((self.encoded_inputs, self.encoded_outputs)), keyring)

    @classmethod
    def open(cls, sealed: bytes, keyring: Keyring) -> ShadowPair:
        """Raises UndecodableEnvelope, BadSignature or BadSeal."""
        header, body = open_pair(sealed, keyring)
        if not 0 <= header.input_bytes <= len(body):
            raise UndecodableEnvelope(f"a pair of {len(body)} bytes that claims {header.input_bytes} bytes of inputs")
        view = memoryview(body)
        return cls(header, view[: header.input_bytes], view[header.input_bytes :])

    @property
    def inputs(self) -> dict[str, Array]:
        """By name, as the worker received them. Raises UndecodableEnvelope."""
        return decode(self.header.inputs, self.encoded_inputs)

    @property
    def outputs(self) -> dict[str, Array]:
        """By name, as they were served. Raises UndecodableEnvelope."""
        return decode(self.header.outputs, self.encoded_outputs)
