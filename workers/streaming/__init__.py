"""The events of streaming jobs, on their way from an entry point to the broker."""

from __future__ import annotations

from penstock.workers.streaming.event_stream import EventStream
from penstock.workers.streaming.event_writer import EventWriter
from penstock.workers.streaming.outbox import Outbox

__all__ = ["EventStream", "EventWriter", "Outbox"]
