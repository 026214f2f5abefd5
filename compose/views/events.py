"""One event of a job as a line: for a person, or as JSON for a program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from penstock.compose.jobs import json_tensors
from penstock.compose.terminal import printable
from penstock.producers.events import JobEvent
from penstock.registry.codecs import Codec
from penstock.registry.tensors import Array

__all__ = ["as_json", "as_text"]

_SHOWN_ELEMENTS: Final = 16


def as_json(job_id: str, event: JobEvent, codec: Codec) -> dict[str, Any]:
    """{"job_id", "seq", "type"}, with "outputs", "fraction", "reason" or "error" as the type has them."""
    data = event.data
    facts: dict[str, Any]
    if isinstance(data, Mapping):
        facts = {"outputs": json_tensors.written(data, codec)}
    elif isinstance(data, Exception):
        facts = {"error": {"type": type(data).__name__, "message": str(data)}}
    else:
        facts = {"progress": {"fraction": data}, "reset": {"reason": data}}.get(event.type, {})
    return {"job_id": job_id, "seq": event.seq, "type": event.type, **facts}


def as_text(event: JobEvent) -> str:
    """Sequence number, type and data; large outputs are abridged, control characters are escaped.

    >>> as_text(JobEvent(4, "progress", 0.25))
    '    4  progress   25 %'
    """
    data = event.data
    if isinstance(data, Mapping):
        shown = ", ".join(f"{name} {_values(values)}" for name, values in data.items())
    elif isinstance(data, Exception):
        shown = f"{type(data).__name__}: {data}"
    elif event.type == "progress":
        shown = f"{data * 100:.0f} %"
    else:
        shown = "" if data is None else str(data)
    return printable(f"{event.seq:5}  {event.type:<10} {shown}".rstrip())


def _values(values: Array) -> str:
    text = np.array2string(values, threshold=_SHOWN_ELEMENTS, separator=", ", edgeitems=3)
    return f"{values.dtype} {values.shape} {' '.join(text.split())}"
