"""Audit logs on disk, for the tests: written with known keys, read back and damaged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from penstock.registry.audit_heads import AuditHead
from penstock.safety.audit import AuditConfig, AuditLogger
from penstock.safety.audit_chain import chain_files

__all__ = ["KEY", "MemoryHeads", "files_of", "write_log"]

KEY: Final = b"k" * 32


class MemoryHeads:
    """AuditHeads in memory."""

    def __init__(self) -> None:
        self.heads: dict[str, AuditHead] = {}

    def put(self, heads: Mapping[str, AuditHead]) -> None:
        self.heads.update(heads)

    def all(self) -> dict[str, AuditHead]:
        return dict(self.heads)


def write_log(
    folder: Path, count: int, *, heads: MemoryHeads | None = None, max_file_bytes: int = 1 << 20, key: bytes = KEY
) -> list[Path]:
    """Writes one chain with so many entries, numbered from 1 in their details; returns its files."""
    before = set(files_of(folder))
    config = AuditConfig(folder, key, max_file_bytes=max_file_bytes)
    with AuditLogger(config=config, heads=[heads] if heads else []) as log:
        for number in range(1, count + 1):
            log.log_event("gate_decision", "mlp", "compiled", "PASS", {"number": number})
    return sorted(set(files_of(folder)) - before)


def files_of(folder: Path) -> list[Path]:
    """The files of every chain in a folder."""
    return [file.path for files in chain_files([folder]).values() for file in files]
