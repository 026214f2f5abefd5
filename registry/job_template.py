"""Jobs that differ in id, values and idempotency key only: the header is encoded once for each shape of the input.

    first job of a shape -> envelope.seal -> learn: the header's bytes around the id, and around the key's digest
    each later one       -> those bytes with its own id, its digest, its values, its MAC

Jobs with a key and jobs without one have different headers, and are learned apart.

The bytes are those of `envelope.seal`, but for the nonce of a sealed body. A job that a template cannot prove to be
good gets None, and its caller goes the plain way, which checks everything and raises the errors.
"""

from __future__ import annotations

import hashlib
from math import isfinite
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.registry.broker.base import Publication
from penstock.registry.envelope import MAC_BYTES, SEAL_BYTES, JobHeader, Keyring
from penstock.registry.idempotency import KeyDigests, fingerprint_state, is_key
from penstock.registry.queues import Priority, new_job_id
from penstock.registry.tensors import DTYPES

if TYPE_CHECKING:
    from penstock.registry.package import ModelSpec

__all__ = ["MOST_HEADER_BYTES", "MOST_SHAPES", "JobTemplate"]

MOST_SHAPES: Final = 64
"""Shapes that one template knows. One more makes it forget the others."""
MOST_HEADER_BYTES: Final = 1024
"""A template knows no longer headers, so that it takes at most 64 KiB."""
_MOST_ELEMENTS: Final = 8192
"""Larger inputs go the plain way: their copies cost more than the header."""
_DIGEST_FIELD: Final = b"\xb2idempotency_digest\xd9\x20"
"""What comes before a digest in msgpack: the name of its field, and the length of 32. No UTF-8 text contains it."""


class _KeyedEdges(NamedTuple):
    """The bytes of an envelope around the id and around the digest, and the fingerprint before the body."""

    before: bytes
    between: bytes
    after: bytes
    fingerprint: hashlib.blake2b


class JobTemplate:
    """What the jobs of one call have in common: spec, priority, and a header without id, inputs and idempotency key.

    It knows shapes only if the model has one input, of numbers without a range or a limit of length, and if no
    job has a webhook: the target of a webhook depends on the id. knows_shapes: False for the template of one job.
    """

    __slots__ = (
        *("_added_bytes", "_body_keys", "_digests", "_dtype", "_edges", "_input", "_is_finite", "_keyed", "_mac"),
        *("header", "priority", "spec"),
    )

    def __init__(
        self, spec: ModelSpec, header: JobHeader, priority: Priority, keyring: Keyring, *, knows_shapes: bool = True
    ) -> None:
        self.spec = spec
        self.header = header
        self.priority = priority
        self._input: str | None = None
        signature = spec.signature
        if not knows_shapes or len(signature.inputs) != 1 or not signature.is_of_shapes or header.options.webhook:
            return
        (declared,) = signature.inputs
        self._input = declared.name
        self._dtype = DTYPES[declared.dtype]
        self._is_finite = declared.must_be_finite
        self._mac = keyring.job_macs[header.key] if header.key else None
        self._body_keys = keyring.body_keys if header.is_sealed else None
        self._added_bytes = (MAC_BYTES if self._mac else 0) + (SEAL_BYTES if self._body_keys else 0)
        """To the body: its seal, and the MAC behind it."""
        self._edges: dict[tuple[int, ...], tuple[bytes, bytes]] = {}
        """By shape: the bytes of the envelope before the id, and those between the id and the body."""
        self._keyed: dict[tuple[int, ...], _KeyedEdges] = {}
        """The same of jobs with an idempotency key."""
        self._digests = KeyDigests(header.tenant)

    def build(self, inputs: object, key: object = None, account: str = "", job_id: str = "") -> Publication | None:
        """One sealed job. None: of an unknown shape, or perhaps bad inputs or a bad key.

        key: the idempotency key. account: the id of the API key that pays. job_id: one of DerivedIds; empty: a new
        one.
        """
        # The exact types only: a subclass may give other bytes, or another answer at the next question.
        if self._input is None or type(inputs) is not dict or len(inputs) != 1:
            return None
        values = inputs.get(self._input)
        if type(values) is not np.ndarray or values.dtype != self._dtype:
            return None
        edges = self._edges.get(values.shape) if key is None else self._keyed.get(values.shape)
        # NaN and infinity make the sum of the squares infinite or NaN. Large numbers do that, too.
        if edges is None or (self._is_finite and not isfinite(np.vdot(values, values))):
            return None
        header = self.header
        job_id = job_id or new_job_id(header.model)
        body = values.tobytes()
        digest = fingerprint = ""
        if not isinstance(edges, _KeyedEdges):
            front = b"".join((edges[0], job_id.encode(), edges[1]))
        elif is_key(key):
            digest, state = self._digests.of(key), edges.fingerprint.copy()
            state.update(body)
            fingerprint = state.hexdigest()
            front = b"".join((edges.before, job_id.encode(), edges.between, digest.encode(), edges.after))
        else:
            return None
        if self._body_keys is not None:
            body = self._body_keys.seal(body, front)
        parts = (front, body) if self._mac is None else (front, body, self._mac.digest(front, body))
        return Publication(
            job_id,
            self.priority,
            b"".join(parts),
            header.tenant,
            header.reply,
            digest,
            fingerprint,
            header.deadline_ms,
            "",
            account,
        )

    def learn(self, header: JobHeader, sealed: bytes, body_bytes: int) -> None:
        """Takes a job that was made the plain way: later ones of its shape are made by this template.

        body_bytes: of its plain body.
        """
        if self._input is None:
            return
        (tensor,) = header.content
        size = len(sealed) - body_bytes - self._added_bytes
        if size > MOST_HEADER_BYTES or body_bytes > _MOST_ELEMENTS * self._dtype.itemsize:
            return
        # The id is the first field. No byte before it is part of an id.
        before, _, after = sealed[:size].partition(header.id.encode())
        if len(self._edges) + len(self._keyed) >= MOST_SHAPES:
            self._edges.clear()
            self._keyed.clear()
        if not header.idempotency_digest:
            self._edges[tensor.shape] = before, after
            return
        between, name, rest = after.partition(_DIGEST_FIELD + header.idempotency_digest.encode())
        if name:
            state = fingerprint_state(header.version, header.content)
            self._keyed[tensor.shape] = _KeyedEdges(before, between + _DIGEST_FIELD, rest, state)
