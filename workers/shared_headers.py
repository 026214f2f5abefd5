"""Jobs whose headers are equal but for the id: the rest of such a header is decoded and checked once.

    delivery --> SharedHeaders.open --> ClaimedJob: its header and its inputs have been seen before, byte by byte
                      ^       `-------> None: open it by itself
                      `-- learn: a job that was opened by itself

The id and the signature of every job are checked, and the signature covers all of its bytes. A sealed body is opened.
Inputs are decoded when they are asked for, but for texts: whether their bytes can be decoded is not known before.
"""

from __future__ import annotations

from hmac import compare_digest
from typing import Final

from penstock.registry.broker.base import Delivery
from penstock.registry.envelope import FIXED_BYTES, ID_AT, MAC_BYTES, SEAL_BYTES, JobHeader, Keyring, encode_header
from penstock.registry.errors import PenstockError
from penstock.registry.queues import job_id_pattern
from penstock.registry.tensors import MAX_BYTES, STRING
from penstock.workers.job import ClaimedJob, SharedHeader

__all__ = ["SharedHeaders"]

_LENGTH_IN_A_BYTE: Final = 0xD9
"""The type of a msgpack string of 32 to 255 bytes."""
_MOST: Final = 1024
_LONGEST: Final = 1024
"""Bytes of a header that is remembered, with what stands before it."""


class SharedHeaders:
    """The headers that one worker has seen, bounded in number and in bytes. The I/O thread owns it."""

    def __init__(self, keyring: Keyring, job_ttl_ms: int) -> None:
        self._keyring = keyring
        self._job_ttl_ms = job_ttl_ms
        self._known: dict[bytes, SharedHeader] = {}
        """By the bytes of the header behind the id."""

    def __len__(self) -> int:
        return len(self._known)

    def lifetime_ms(self, header: JobHeader) -> int:
        """The longest time from a job's acceptance to its beginning."""
        return min(header.deadline_ms or self._job_ttl_ms, self._job_ttl_ms)

    def open(self, delivery: Delivery, now: float, broker_now: float) -> ClaimedJob | None:
        """The job, if all but its id was seen before and nothing is wrong with it; see Intake.open."""
        sealed = delivery.sealed
        if len(sealed) < ID_AT or delivery.crashes:
            return None
        body_at = FIXED_BYTES + int.from_bytes(sealed[4:FIXED_BYTES], "little")
        id_end = ID_AT + sealed[ID_AT - 1]
        shared = self._known.get(sealed[id_end:body_at])
        if shared is None or not sealed.startswith(shared.front):
            return None
        if delivery.slot != shared.slot or delivery.priority is not shared.priority:
            return None
        body_bytes = shared.body_bytes
        body_end = body_at + (_rest(sealed, body_at, shared) if body_bytes is None else body_bytes)
        view = memoryview(sealed)
        if shared.mac is None:
            if len(sealed) != body_end:
                return None
        elif len(sealed) != body_end + MAC_BYTES or not compare_digest(
            shared.mac.digest(view[:body_end]), view[body_end:]
        ):
            return None
        if shared.id_pattern.fullmatch(sealed, ID_AT, id_end) is None:
            return None
        body: memoryview | bytes = view[body_at:body_end]
        if shared.body_keys is not None:
            try:
                body = shared.body_keys.open(body, sealed[:body_at])
            except PenstockError:
                return None
        accepted_ms = delivery.accepted_ms
        queue_ms = broker_now - accepted_ms
        job = ClaimedJob(
            delivery,
            JobHeader(sealed[ID_AT:id_end].decode("ascii"), *shared.fields),
            body,
            1,
            now,
            queue_ms if queue_ms > 0.0 else 0.0,
            accepted_ms + shared.lifetime_ms,
            shared,
        )
        return job if body_bytes is not None or _can_be_decoded(job) else None

    def learn(self, job: ClaimedJob) -> None:
        """Remember the header of a job that was opened by itself, unless its like is not to be expected."""
        header, sealed = job.header, job.delivery.sealed
        if header.traceparent or header.idempotency_digest or sealed[ID_AT - 2] != _LENGTH_IN_A_BYTE:
            return
        behind_id = ID_AT + sealed[ID_AT - 1]
        body_at = FIXED_BYTES + int.from_bytes(sealed[4:FIXED_BYTES], "little")
        if body_at > _LONGEST or encode_header(header) != sealed[FIXED_BYTES:body_at]:
            # In another encoding than ours the id may stand elsewhere, or twice.
            return
        if len(self._known) >= _MOST:
            self._known.clear()
        mac = self._keyring.job_macs[header.key] if header.key else None
        fields = tuple(getattr(header, name) for name in JobHeader.__struct_fields__[1:])
        options = header.options
        has_texts = any(tensor.dtype == STRING for tensor in header.content)
        job.shared = self._known[sealed[behind_id:body_at]] = SharedHeader(
            sealed[:ID_AT],
            fields,
            job.delivery.slot,
            job.delivery.priority,
            None if has_texts else len(job.body) + (SEAL_BYTES if header.is_sealed else 0),
            self.lifetime_ms(header),
            mac,
            self._keyring.body_keys if header.is_sealed else None,
            job_id_pattern(header.model),
            not (header.version or header.account or options.outputs or options.lane or options.endpoint)
            and job.route == "queue",
        )


def _rest(sealed: bytes, body_at: int, shared: SharedHeader) -> int:
    """The bytes from here to the signature; 0 for more than Intake.open is sure to accept."""
    rest = len(sealed) - body_at - (0 if shared.mac is None else MAC_BYTES)
    return rest if 0 < rest <= MAX_BYTES else 0


def _can_be_decoded(job: ClaimedJob) -> bool:
    """Whether the bytes of a job are the inputs that its header describes; they are decoded then."""
    try:
        return job.inputs is not None
    except PenstockError:
        return False
