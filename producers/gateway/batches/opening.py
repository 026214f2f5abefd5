"""Settings -> the store of files, sealed where the settings say so."""

from __future__ import annotations

import time

from penstock.producers.gateway.batches.file_store import FileStore
from penstock.registry.settings import Settings
from penstock.safety.keys import load_data_keys

__all__ = ["open_store"]

_MIB = 1024 * 1024


def open_store(settings: Settings) -> FileStore | None:
    """The store; None in the privacy mode `hashes_only`, which keeps no inputs. No folder is made yet.

    Contents and records are sealed where data at rest or payloads are. Raises ConfigurationError without their key.
    """
    inference = settings.inference
    if inference.effective_mode == "hashes_only":
        return None
    batches = inference.batches
    return FileStore(
        batches.path,
        load_data_keys(settings),
        max_bytes=batches.max_stored_mb * _MIB,
        keep_s=batches.keep_s,
        clock=time.time,
    )
