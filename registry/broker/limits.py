"""Constants of every broker: how much it keeps, and for how long. They import no client of Redis."""

from __future__ import annotations

from typing import Final

__all__ = [
    "CALL_BYTES",
    "CLAIM_BYTES",
    "DEAD_LETTERS_BYTES",
    "DEAD_LETTERS_CAP",
    "DEFAULT_LEASE_MS",
    "FORGET_MS",
    "MEMORY_HIGH_WATER_PCT",
    "OBSERVATIONS_TTL_MS",
    "OUTLIVES_MS",
    "QUARANTINE_CAP",
    "REPLY_CAP",
    "REPLY_TTL_MS",
]

CALL_BYTES: Final = 8 * 1024 * 1024
"""Results that one call writes or reads, unless one result alone is larger: the server does nothing else meanwhile."""
CLAIM_BYTES: Final = 16 * 1024 * 1024
"""Jobs that one claim hands out; the last one may exceed it."""
REPLY_CAP: Final = 512
"""Entries of at most 64 KiB that a reply stream keeps. A client that falls behind reads records instead."""
REPLY_TTL_MS: Final = 120_000
OBSERVATIONS_TTL_MS: Final = 90 * 86_400_000
"""An experiment can be reported for 90 days after its last job, and after the last quality that a client reported."""
OUTLIVES_MS: Final = 3_600_000
"""How long a record outlives its job: a forward that began in time finds it, and a late reader finds the reason."""
DEFAULT_LEASE_MS: Final = 30_000
"""The lease of workers that have not told theirs yet. As in expire.lua."""
FORGET_MS: Final = 3_600_000
"""A lease is shorter than this. A longer one in `take_over` asks for released jobs only. As in take_over.lua."""
MEMORY_HIGH_WATER_PCT: Final = 80
"""Percentage of the server's maxmemory beyond which no job is accepted. The rest is room for results."""
QUARANTINE_CAP: Final = 1000
"""Foreign keys of one model that are kept. The oldest are deleted first, as with dead letters."""
DEAD_LETTERS_CAP: Final = 100_000
DEAD_LETTERS_BYTES: Final = 256 * 1024 * 1024
"""Dead letters that one slot keeps: at most so many and so many bytes. The oldest are deleted first."""
