"""One claimed job in a worker's memory."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from penstock.registry.broker.base import Delivery, Held
from penstock.registry.envelope import BodyKeys, JobHeader, Mac
from penstock.registry.queues import Priority, lane_key
from penstock.registry.tensors import DTYPES, Array, Tensor, decode
from penstock.safety.cache_entry import KEY_BYTES
from penstock.safety.fallback import LevelFailure

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = ["ClaimedJob", "FellBack", "Route", "SharedHeader", "inputs_of", "route_of"]

Route: TypeAlias = Literal["queue", "celery"]
"""The way by which a job came: from a client through the queue, or from Celery's `send_task`."""


def route_of(model: str, reply: str) -> Route:
    """The way by which a job with this reply address came."""
    return "celery" if reply == lane_key(model) else "queue"


@dataclass(frozen=True, slots=True, eq=False)
class SharedHeader:
    """What jobs have in common whose headers differ in nothing but the id; see workers/shared_headers.py."""

    front: bytes
    """The bytes before the id."""
    fields: tuple[Any, ...]
    """Of the header, behind the id."""
    slot: str
    priority: Priority
    body_bytes: int | None
    """Of the body as it travels. None: it has texts, whose lengths the header does not tell."""
    lifetime_ms: int
    """The longest time from a job's acceptance to its beginning."""
    mac: Mac | None
    """Of the key that signs them; None: they are not signed."""
    body_keys: BodyKeys | None
    """The keys that open their bodies; None: these are not sealed."""
    id_pattern: re.Pattern[bytes]
    is_plain: bool
    """Whether a client asks for one forward of the active version at `infer`, and for all of its outputs."""


class FellBack(NamedTuple):
    """A job that goes on to the version that its model's policy names for jobs that fail."""

    version: str
    """The label of the version on which it failed."""
    failures: tuple[LevelFailure, ...]
    """The levels of the fallback chain that failed before, or were stopped."""


class ClaimedJob(msgspec.Struct, eq=False):
    """A job that was opened and verified. It knows no model version: the part that holds the job knows that.

    `claimed` is monotonic seconds, `queue_ms` the time in the queue by the broker's clock.
    """

    delivery: Delivery
    header: JobHeader
    body: memoryview | bytes
    """The inputs, plain; see registry.tensors.decode. They were decoded once, or are of a kind that was."""
    rows: int
    claimed: float
    queue_ms: float
    expires_ms: int
    """After this time, by the broker's clock, the job must not begin."""
    shared: SharedHeader | None = None
    """What its header shares with those of other jobs; None: nothing is known of that."""
    decoded: dict[str, Array] | None = None
    """Its inputs, once somebody has asked for them."""
    known_digest: bytes = b""
    """What `digest` gives, once it was computed."""
    begun_key: _Hash | None = None
    """All of its key but the inputs, until somebody asks for the digest."""
    tries: int = 1
    """Forwards that this worker has given the job or is giving it, as its retry policy allows."""
    takes_room: bool = False
    """Whether the job counts against the capacity of its version. A follower and a delayed job do not."""
    is_cancelled: bool = False
    is_lost: bool = False
    fell_back: FellBack | None = None
    """None: every level so far was one of the version that the job came to."""

    @property
    def inputs(self) -> dict[str, Array]:
        """Read-only views of the body where the dtype allows, until the inputs are replaced."""
        if self.decoded is None:
            self.decoded = decode(self.header.content, self.body)
        return self.decoded

    @property
    def digest(self) -> bytes:
        """Equal jobs have the same digest. Empty: the job shares no answer. It is computed when it is first asked for:
        most jobs are told apart without it.
        """
        if self.begun_key is not None:
            state = self.begun_key.copy()
            state.update(self.body)
            self.known_digest, self.begun_key = state.digest()[:KEY_BYTES], None
        return self.known_digest

    @digest.setter
    def digest(self, digest: bytes) -> None:
        self.known_digest, self.begun_key = digest, None

    @property
    def is_suspect(self) -> bool:
        """Whether a process died while the job ran: it must run alone."""
        return self.delivery.crashes > 0

    @property
    def route(self) -> Route:
        """The way by which the job came."""
        return route_of(self.header.model, self.header.reply)

    @property
    def held(self) -> Held:
        """The job as the broker knows it."""
        delivery = self.delivery
        return Held(delivery.slot, delivery.priority, delivery.entry_id, self.header.id)

    def mark(self, lost: frozenset[Held], cancelled: frozenset[str]) -> bool:
        """Note that the lease of the job was lost, or that the job was cancelled; returns whether it must not run."""
        self.is_lost = self.is_lost or self.held in lost
        self.is_cancelled = self.is_cancelled or self.header.id in cancelled
        return self.is_lost or self.is_cancelled


def inputs_of(jobs: Sequence[ClaimedJob]) -> list[dict[str, Array]]:
    """The inputs of these jobs, for Runtime.prepare.

    Those of several jobs that are described alike but for their rows, and that nobody has asked for yet, are joined as
    bytes: one array for all rows costs less than an array for each job.
    """
    first = jobs[0].header.content
    if len(jobs) == 1 or jobs[0].decoded is not None:
        return [job.inputs for job in jobs]
    ends = {id(first): _ends(first)}
    for job in jobs:
        content = job.header.content
        is_new = id(content) not in ends
        if job.decoded is not None or (is_new and not _is_like(content, first)):
            return [each.inputs for each in jobs]
        if is_new:
            ends[id(content)] = _ends(content)
    joined: dict[str, Array] = {}
    for number, tensor in enumerate(first):
        parts = [job.body for job in jobs]
        if len(first) > 1:
            cuts = {key: slice(each[number], each[number + 1]) for key, each in ends.items()}
            parts = [job.body[cuts[id(job.header.content)]] for job in jobs]
        rows = sum([job.header.content[number].shape[0] for job in jobs])
        values = np.frombuffer(bytearray().join(parts), DTYPES[tensor.dtype])
        joined[tensor.name] = values.reshape(rows, *tensor.shape[1:])
    return [joined]


def _ends(content: Sequence[Tensor]) -> list[int]:
    """Where the tensors of a body begin and end, in bytes."""
    sizes = [math.prod(each.shape) * DTYPES[each.dtype].itemsize for each in content]
    return [*itertools.accumulate(sizes, initial=0)]


def _is_like(content: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether two descriptions differ in their rows only."""
    return len(content) == len(other) and all(
        (one.name, one.dtype, one.shape[1:]) == (two.name, two.dtype, two.shape[1:])
        for one, two in zip(content, other, strict=True)
    )
