"""The objects of OpenAI's API that files and batches are: what clients see, and what the store keeps of a batch."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

__all__ = [
    "ENDED",
    "Batch",
    "BatchError",
    "BatchErrors",
    "BatchStatus",
    "Counts",
    "File",
    "Purpose",
    "StoredBatch",
]

Purpose = Literal["batch", "batch_output"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ENDED: Final = frozenset({"failed", "completed", "expired", "cancelled"})
"""The states of a batch that no process runs."""


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A file. Times are in Unix seconds. expires_at: when it is deleted."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    object: str = "file"
    status: str = "processed"


class Counts(msgspec.Struct, frozen=True):
    """The lines of a batch: all, those with an answer, and those in the error file."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(msgspec.Struct, frozen=True):
    """Why a batch failed before its first line ran. line: its number, from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, frozen=True):
    """The errors of one batch."""

    data: tuple[BatchError, ...]
    object: str = "list"


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Times are in Unix seconds; None: that has not happened."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: BatchStatus = "validating"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = Counts()
    metadata: dict[str, str] | None = None
    object: str = "batch"


class StoredBatch(msgspec.Struct, frozen=True):
    """A batch with what clients do not see. output, errors: the ids that its files get when it ends. key_id: the API
    key for which its jobs run; empty where none was asked for. rounds: how many jobs of a line have expired, by the
    number of the line; without the lines that have ended, and those with none."""

    tenant: str
    output: str
    errors: str
    batch: Batch
    key_id: str = ""
    rounds: dict[int, int] = {}
