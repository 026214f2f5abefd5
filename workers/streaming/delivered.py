"""The event stream of a job -> the chunks that its earlier runs have delivered. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.registry.broker.base import StreamEntry
from penstock.registry.envelope import Keyring, open_event
from penstock.registry.errors import Corrupt
from penstock.registry.event_body import decode_parts
from penstock.registry.tensors import Array
from penstock.workers.job import ClaimedJob

__all__ = ["delivered_chunks"]


def delivered_chunks(
    entries: Iterable[StreamEntry] | None, job: ClaimedJob, keyring: Keyring
) -> list[dict[str, Array]] | None:
    """The chunks since the last reset. None: there are none, the first ones are no longer kept, or one is not ours."""
    chunks: list[dict[str, Array]] = []
    begins = False
    for entry in entries or ():
        kind, data = entry.fields[1], entry.fields[3]
        if kind in (b"started", b"reset"):
            chunks, begins = [], True
        elif kind == b"events":
            try:
                header, body = open_event(data, keyring)
                parts = decode_parts(body)
                if header.id != job.header.id:
                    return None
                chunks += [part.values(content) for part, content in parts if part.fraction is None]
            except Corrupt:
                return None
    return chunks if begins and chunks else None
