"""The audit log: one line for each decision, in order, for its owner's eyes only."""

from __future__ import annotations

import json
import stat
import threading
from pathlib import Path

import pytest

from penstock.registry.errors import ConfigurationError
from penstock.safety.audit import AuditLog


def test_each_record_is_one_line_with_its_time(tmp_path: Path):
    """In the order in which they were recorded, by however many writers."""
    log = AuditLog(tmp_path / "audit", "worker", clock=lambda: 12.5)
    log.record("level", {"model": "minilm", "step": "bf16"})
    log.record("level", {"model": "minilm\n", "step": None})
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert lines == [
        {"at": 12.5, "kind": "level", "model": "minilm", "step": "bf16"},
        {"at": 12.5, "kind": "level", "model": "minilm\n", "step": None},
    ]
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(log.path.parent.stat().st_mode) == 0o700


def test_writers_do_not_tear_each_others_lines(tmp_path: Path):
    """Two logs over one file, written to at the same time: every line is whole."""
    logs = [AuditLog(tmp_path, "shared") for _ in range(2)]

    def write(log: AuditLog) -> None:
        for _ in range(200):
            log.record("k", {"n": "x" * 2000})

    threads = [threading.Thread(target=write, args=(log,)) for log in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [json.loads(line)["n"] for line in logs[0].path.read_text().splitlines()] == ["x" * 2000] * 400


def test_a_folder_that_cannot_be_written_is_said_so(tmp_path: Path):
    """One line that names the setting, and no path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="audit_log_path") as refusal:
        AuditLog(tmp_path / "file" / "audit", "worker")
    assert str(tmp_path) not in str(refusal.value)
