"""Constants of every broker: how much it keeps, and for how long. They import no client of Redis."""

from __future__ import annotations

from typing import Final

__all__ = [
    "DEAD_LETTERS_BYTES",
    "DEAD_LETTERS_CAP",
    "DEFAULT_LEASE_MS",
    "EVENTS_CAP",
    "FORGET_MS",
    "MEMORY_HIGH_WATER_PCT",
    "OUTLIVES_MS",
    "REPLY_CAP",
    "REPLY_TTL_MS",
]

REPLY_CAP: Final = 512
"""Entries of at most 64 KiB that a reply stream keeps. A client that falls behind reads records instead."""
REPLY_TTL_MS: Final = 120_000
OUTLIVES_MS: Final = 3_600_000
"""How long a record outlives its job: a forward that began in time finds it, and a late reader finds the reason."""
DEFAULT_LEASE_MS: Final = 30_000
"""The lease of workers that have not told theirs yet. As in expire.lua."""
FORGET_MS: Final = 3_600_000
"""A lease is shorter than this. A longer one in `take_over` asks for released jobs only. As in take_over.lua."""
EVENTS_CAP: Final = 10_000
"""Events that a job's stream keeps. A subscriber that missed older ones gets a `reset`."""
MEMORY_HIGH_WATER_PCT: Final = 80
"""Percentage of the server's maxmemory beyond which no job is accepted. The rest is room for results."""
DEAD_LETTERS_CAP: Final = 100_000
DEAD_LETTERS_BYTES: Final = 256 * 1024 * 1024
"""Dead letters that one slot keeps: at most so many and so many bytes. The oldest are deleted first."""
