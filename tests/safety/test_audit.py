"""The audit log: entries with all fields, on disk before they are acknowledged, redacted, for its owner's eyes only."""

from __future__ import annotations

import json
import multiprocessing
import stat
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.registry.errors import BrokerUnavailable, ConfigurationError, InvalidInput
from penstock.registry.settings import Settings
from penstock.safety.audit import AuditConfig, AuditLogger
from penstock.safety.audit_reader import entries, verify
from tests.safety.audits import KEY, MemoryHeads, files_of, write_log
from tests.servers import ROOT, wait_until


class Clock:
    """Unix seconds that a test sets."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_an_entry_is_read_back_with_all_fields(tmp_path: Path):
    """The example of the documentation: one gate decision with its figures (CF-041)."""
    log = AuditLogger(config=AuditConfig(tmp_path / "audit", KEY), writer="cpu0@host", clock=Clock(12.5))
    details = {"cosine_sim": 0.998, "max_diff": 0.0012, "rows": 16}
    written = log.log_event("canary_validation", 42, "torch_compile_bert", "PASS", details)
    (found,) = AuditLogger(config=AuditConfig(tmp_path / "audit", KEY)).get_entries_since(0)
    assert found == written
    assert (found.operation, found.model_id, found.optimization_name, found.result, found.details, found.time) == (
        "canary_validation",
        42,
        "torch_compile_bert",
        "PASS",
        details,
        12.5,
    )
    assert (found.sequence, found.writer.startswith("cpu0@host-19700101T000012Z-")) == (1, True)


def test_only_the_owner_may_read_the_log(tmp_path: Path):
    """The folder has mode 0700 and each file 0600."""
    (file,) = write_log(tmp_path / "audit", 1)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_every_string_of_the_details_is_redacted(tmp_path: Path):
    """Values and names, in nested data; numbers stay, and bytes, arrays and objects show their type only (CF-041)."""
    log = AuditLogger(config=AuditConfig(tmp_path, KEY), redact=lambda text: text.replace("123-45-6789", "[ssn]"))
    details = {
        "reason": "bad 123-45-6789",
        "nested": [{"123-45-6789": ("123-45-6789", 3)}],
        "inputs": np.array([123456789]),
        "raw": b"123-45-6789",
        "gain": np.float32(1.5),
        "rows": np.int64(7),
        "nan": float("nan"),
        "huge": 1 << 80,
        "path": Path("/home/ada"),
        "none": None,
        "is_on": True,
    }
    log.log_event("gate_decision", details=details)
    (file,) = files_of(tmp_path)
    assert json.loads(file.read_bytes())["details"] == {
        "reason": "bad [ssn]",
        "nested": [{"[ssn]": ["[ssn]", 3]}],
        "inputs": "(ndarray)",
        "raw": "(bytes)",
        "gain": 1.5,
        "rows": 7,
        "nan": "nan",
        "huge": str(1 << 80),
        "path": "(PosixPath)",
        "none": None,
        "is_on": True,
    }


def test_entries_later_than_a_time_are_returned_also_after_a_restart(tmp_path: Path):
    """The time itself is excluded; entries of earlier processes are there, in the order of time (CF-042)."""
    clock, config = Clock(), AuditConfig(tmp_path, KEY)
    for _ in range(2):
        log = AuditLogger(config=config, clock=clock)
        for _ in range(3):
            log.log_event("gate_decision")
            clock.now += 10
        log.close()
    restarted = AuditLogger(config=config, clock=clock)
    assert [entry.time for entry in restarted.get_entries_since(1020.0)] == [1030.0, 1040.0, 1050.0]
    assert restarted.get_entries_since(1019.999)[0].time == 1020.0
    assert restarted.get_entries_since(datetime.fromtimestamp(1050, UTC)) == []
    few = AuditLogger(max_entries=2, config=config)
    assert [entry.time for entry in few.get_entries_since(0)] == [1040.0, 1050.0]
    with pytest.raises(ConfigurationError, match=r"max_entries is 0\. Expected at least 1"):
        AuditLogger(max_entries=0, config=config)


def test_a_log_that_is_off_writes_nothing(tmp_path: Path):
    """audit_log_enabled = false: neither entry, file, folder nor key (CF-025)."""
    environ = {"PENSTOCK_HOME": str(tmp_path / "home"), "PENSTOCK_INFERENCE_PRIVACY_AUDIT_LOG_ENABLED": "false"}
    with AuditLogger(config=AuditConfig.of(Settings.load(environ=environ))) as log:
        assert log.log_event("gate_decision", "mlp", "compiled", "PASS") is None
        assert log.get_entries_since(0) == []
    assert not (tmp_path / "home").exists()


def test_the_settings_of_the_environment_are_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`AuditLogger(max_entries=10_000)` of a program writes where the settings say, with a key of this machine."""
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    with penstock.AuditLogger(max_entries=10_000) as log:
        log.log_event("key_operation", result="made")
    assert files_of(tmp_path / "audit")
    assert stat.S_IMODE((tmp_path / "audit.key").stat().st_mode) == 0o600
    assert (tmp_path / "audit.key").read_text().strip() not in repr(log._config)


def test_an_unwritable_folder_is_refused_at_the_start(tmp_path: Path):
    """The error names the settings, and no path."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="audit_log_path") as refusal:
        AuditLogger(config=AuditConfig(tmp_path / "file" / "audit", KEY))
    assert str(tmp_path) not in str(refusal.value)


def test_entries_of_many_threads_form_one_chain(tmp_path: Path):
    """Each thread gets its own entry; the chain has no gap and verifies."""
    log = AuditLogger(config=AuditConfig(tmp_path, KEY))

    def write(number: int) -> None:
        for _ in range(50):
            entry = log.log_event("gate_decision", number)
            assert entry is not None
            assert entry.model_id == number

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    verified = verify([tmp_path], [KEY])
    assert (verified.entries, verified.damage) == (200, ())


def test_entries_of_a_group_share_one_sync(tmp_path: Path):
    """With audit_group_ms the first caller waits for the others, and one sync acknowledges all of them."""
    is_full, threads = threading.Event(), []

    def pause(seconds: float) -> None:
        assert seconds == 0.02
        wait_until(lambda: len(written()) == 8, 30, "eight entries are written")
        assert not is_full.is_set()
        is_full.set()

    def written() -> list[object]:
        return [*entries([tmp_path], 100).entries]

    acknowledged = []

    def write() -> None:
        acknowledged.append(log.log_event("gate_decision"))
        assert is_full.is_set()

    log = AuditLogger(config=AuditConfig(tmp_path, KEY, group_s=0.02), pause=pause)
    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(acknowledged), log.syncs) == (8, 1)


def test_without_a_group_each_entry_is_synced(tmp_path: Path):
    """One thread, one sync for each entry."""
    log = AuditLogger(config=AuditConfig(tmp_path, KEY))
    for _ in range(5):
        log.log_event("gate_decision")
    assert log.syncs == 5


def test_a_chain_goes_on_over_its_files(tmp_path: Path):
    """A full file is followed by the next one; the sequence and the chain go on."""
    files = write_log(tmp_path, 20, max_file_bytes=600)
    assert len(files) > 5
    assert [file.name.split(".")[1] for file in files] == [f"{number:06d}" for number in range(len(files))]
    verified = verify([tmp_path], [KEY])
    assert (verified.chains, verified.entries, verified.damage) == (1, 20, ())
    assert [entry.details["number"] for entry in entries([tmp_path], 100).entries] == [*range(1, 21)]


def test_a_fork_has_a_chain_of_its_own(tmp_path: Path):
    """The parent's chain stays whole, and the entries of both are there."""
    log = AuditLogger(config=AuditConfig(tmp_path, KEY))
    log.log_event("gate_decision", "parent")
    child = multiprocessing.get_context("fork").Process(target=log.log_event, args=("gate_decision", "child"))
    child.start()
    child.join()
    log.log_event("gate_decision", "parent")
    verified = verify([tmp_path], [KEY])
    assert (child.exitcode, verified.chains, verified.entries, verified.damage) == (0, 2, 3, ())


FULL = """
import resource
import sys
from pathlib import Path
from penstock.safety.audit import AuditConfig, AuditLogger

resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
log = AuditLogger(config=AuditConfig(Path(sys.argv[1]), b"k" * 32))
acknowledged = failed = 0
for size in [100, 100, 900, 100, 900, 100]:
    try:
        log.log_event("gate_decision", details={"text": "x" * size})
        acknowledged += 1
    except OSError:
        failed += 1
print(acknowledged, failed)
"""


def test_an_entry_that_does_not_fit_leaves_no_trace(tmp_path: Path):
    """On a full disk `log_event` raises OSError; the entries before and after it form a sound chain."""
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "4 2\n"
    verified = verify([tmp_path], [KEY])
    assert (verified.chains, verified.entries, verified.damage) == (1, 4, ())
    assert files_of(tmp_path)[0].read_bytes().endswith(b"\n")


def test_a_failed_sync_acknowledges_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """After an error of the disk the caller gets OSError, and the next entry begins a chain of its own."""
    heads = MemoryHeads()
    log = AuditLogger(config=AuditConfig(tmp_path, KEY), heads=[heads])
    log.log_event("gate_decision")
    log.anchor()

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("penstock.safety.audit_chain.os.fsync", fail)
        with pytest.raises(OSError, match="Input/output error"):
            log.log_event("gate_decision")
    log.log_event("gate_decision")
    log.close()
    verified = verify([tmp_path], [KEY], [heads.all()])
    assert (verified.chains, verified.damage, len(heads.heads)) == (2, (), 2)


def test_an_entry_that_is_too_large_is_refused(tmp_path: Path):
    """The error says what was expected, and the chain goes on."""
    log = AuditLogger(config=AuditConfig(tmp_path, KEY))
    with pytest.raises(InvalidInput, match=r"An audit entry of \d+ bytes is too large\. Expected at most 65536"):
        log.log_event("gate_decision", details={"text": "x" * 70_000})
    log.log_event("gate_decision")
    assert verify([tmp_path], [KEY]).entries == 1


def test_the_end_of_the_chain_is_stored_when_the_store_answers_again(tmp_path: Path):
    """A store that is away is counted and fails no entry; the next call stores the end."""

    class Away(MemoryHeads):
        is_away = True

        def put(self, heads):
            if self.is_away:
                raise BrokerUnavailable("away")
            super().put(heads)

    heads = Away()
    log = AuditLogger(config=AuditConfig(tmp_path, KEY), heads=[heads])
    log.log_event("gate_decision")
    log.anchor()
    assert (log.anchor_failures, heads.all()) == (1, {})
    heads.is_away = False
    log.anchor()
    (head,) = heads.all().values()
    assert head.sequence == 1
