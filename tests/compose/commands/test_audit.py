"""`penstock audit`: entries by time, verification with exit status 1 on damage, and what it cannot compare."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pytest
from click.testing import Result

from penstock.registry.settings import Settings
from penstock.safety.audit import AuditConfig, AuditLogger
from tests.compose.conftest import penstock as run_penstock
from tests.safety.audits import files_of
from tests.servers import RedisServer


class Clock:
    """Unix seconds that a test sets."""

    now = 1_795_370_400.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def penstock(home: Path, *arguments: str, **environ: str) -> Result:
    return run_penstock(home, "audit", *arguments, **environ)


def write(home: Path, *writers: str, clock: Clock | None = None) -> None:
    """One entry of each writer, a minute apart."""
    clock = clock or Clock()
    config = AuditConfig.of(Settings.load(environ={"PENSTOCK_HOME": str(home)}))
    for writer in writers:
        with AuditLogger(config=config, writer=writer, clock=clock) as log:
            log.log_event("gate_decision", "mlp", "compiled", "PASS", {"writer": writer, "escape": "\x1b[2J"})
        clock.now += 60


def test_tail_shows_the_newest_entries_of_all_writers(home: Path):
    """Merged by time, oldest first; with --json all fields, one list."""
    write(home, "b", "a", "c")
    shown = penstock(home, "tail", "-n", "2")
    assert shown.exit_code == 0, shown.output
    first, _, second, where = shown.stdout.splitlines()
    assert first == "2026-11-22 18:01:00Z  gate_decision      mlp compiled PASS"
    assert second.startswith("2026-11-22 18:02:00Z")
    assert where.startswith("    c-20261122T180200Z-")
    assert "\x1b" not in shown.stdout
    entries = json.loads(penstock(home, "tail", "--json").stdout)
    assert [entry["details"]["writer"] for entry in entries] == ["b", "a", "c"]
    assert set(entries[0]) == {
        *("sequence", "time", "operation", "model_id", "optimization_name", "result", "details", "writer")
    }


def test_since_takes_an_age_or_a_date(home: Path):
    """A date without a zone is UTC; an entry of exactly this time is not later."""
    write(home, "a", "b", "c")
    for text in ("2026-11-22T18:01:00Z", "2026-11-22T18:01:00", "2026-11-22T19:01:00+01:00"):
        entries = json.loads(penstock(home, "since", text, "--json").stdout)
        assert [entry["details"]["writer"] for entry in entries] == ["c"]
    assert penstock(home, "since", "1s").stdout == "No entries.\n"
    assert len(json.loads(penstock(home, "since", "36500d", "--json").stdout)) == 3
    refused = penstock(home, "since", "yesterday")
    assert refused.exit_code == 1
    assert "Expected an age such as 1h, 30m or 7d, or a date such as 2026-11-23T18:00:00Z" in refused.stderr


def test_an_empty_log_is_no_error(home: Path):
    """There is nothing to show yet; to verify, a key is needed."""
    assert penstock(home, "tail").stdout == "No entries.\n"
    refused = penstock(home, "verify")
    assert (refused.exit_code, "There is no key of the audit log here" in refused.stderr) == (78, True)
    verified = penstock(home, "verify", PENSTOCK_AUDIT_KEY=secrets.token_hex(32))
    assert (verified.exit_code, verified.stdout) == (0, "0 entries in 0 chains: no damage; stored heads: registry 0.\n")


def test_verify_names_the_first_bad_entry(home: Path):
    """File, line and sequence number, and exit status 1; the next verification finds it again."""
    write(home, "a", "b")
    sound = penstock(home, "verify")
    assert (sound.exit_code, sound.stdout) == (0, "2 entries in 2 chains: no damage; stored heads: registry 0.\n")
    assert "warning: 2 chains had no stored head until now" in sound.stderr
    assert penstock(home, "verify").stderr == ""
    file = files_of(home / "audit")[1]
    kept = file.read_bytes()
    file.write_bytes(kept.replace(b"PASS", b"FAIL"))
    for _ in range(2):
        shown = penstock(home, "verify")
        assert shown.exit_code == 1
        assert shown.stdout.startswith(f"{file.name}, line 1, entry 1: the entry was changed")
    assert json.loads(penstock(home, "verify", "--json").stdout)["damage"] == [
        {
            "file": file.name,
            "line": 1,
            "sequence": 1,
            "problem": "the entry was changed, or written with a key that is not here",
        }
    ]
    file.write_bytes(kept)
    assert penstock(home, "verify").exit_code == 0


def test_verify_keeps_the_ends_of_sound_chains_in_the_registry(home: Path):
    """A file that is deleted after a verification is found, though its writer has stored no end."""
    write(home, "a")
    (file,) = files_of(home / "audit")
    assert penstock(home, "verify").exit_code == 0
    file.unlink()
    shown = penstock(home, "verify")
    assert (shown.exit_code, shown.stdout.splitlines()[0]) == (1, f"{file.name}, entry 1: the file is missing")


def test_verify_tells_what_it_could_not_compare(home: Path, tmp_path: Path, shared_redis: RedisServer):
    """A broker that is away, and files that are no part of a chain."""
    write(home, "a")
    (home / "audit" / "levels.jsonl").touch()
    away = penstock(home, "verify", PENSTOCK_REDIS_URL=f"unix://{tmp_path}/none.sock")
    assert away.exit_code == 0
    assert "warning: the heads in the broker were not compared: " in away.stderr
    assert "warning: levels.jsonl is no part of a chain and was not verified" in away.stderr


def test_verify_takes_an_archive(home: Path, tmp_path: Path):
    """FOLDERs replace the folder of the settings."""
    write(home, "a", "b")
    assert penstock(home, "verify").exit_code == 0
    archive = tmp_path / "archive"
    archive.mkdir()
    file = files_of(home / "audit")[0]
    file.rename(archive / file.name)
    assert penstock(home, "verify").exit_code == 1
    both = penstock(home, "verify", str(home / "audit"), str(archive))
    assert (both.exit_code, both.stdout) == (0, "2 entries in 2 chains: no damage; stored heads: registry 2.\n")


def test_unreadable_lines_are_told(home: Path):
    """`tail` goes on, and points to the verification."""
    write(home, "a")
    (file,) = files_of(home / "audit")
    file.write_bytes(b"garbage\n" + file.read_bytes())
    shown = penstock(home, "tail")
    assert (shown.exit_code, len(shown.stdout.splitlines())) == (0, 2)
    assert shown.stderr == "warning: 1 line could not be read; `penstock audit verify` names the first\n"


@pytest.mark.parametrize("command", ["tail", "since", "verify"])
def test_help_has_an_example(home: Path, command: str):
    """As every command."""
    assert f"penstock audit {command}" in penstock(home, command, "--help").stdout.partition("\n")[2]
