"""The file of a home's embedded stack, and the lock that keeps it the only one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.registry import stack_file
from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Settings
from penstock.registry.stack_file import RunningStack
from tests.servers import ROOT, wait_until

KEYS = "local:" + "QUFB" * 11
HOLDER = (
    "import sys, time; from pathlib import Path; from penstock.registry import stack_file\n"
    "with stack_file.hold(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
)


def running(home: Path) -> RunningStack:
    keys = home / "signing-keys"
    stack_file.write_private(keys, KEYS)
    return RunningStack(os.getpid(), "unix:///run/redis.sock", str(keys), "http://127.0.0.1:1", "user", "secret")


def holder(home: Path) -> subprocess.Popen[bytes]:
    """Another process that holds the home."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(home)], env=environ, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def test_a_running_stack_is_found(tmp_path):
    """Other processes of the same user read the file until the stack removes it."""
    assert stack_file.read(tmp_path) is None
    with stack_file.hold(tmp_path):
        stack = running(tmp_path)
        stack_file.write(tmp_path, stack)
        assert stack_file.read(tmp_path) == stack
        assert stack.signing_keys() == KEYS
        stack_file.remove(tmp_path)
        assert stack_file.read(tmp_path) is None


def test_a_home_that_was_never_used_has_no_stack(tmp_path):
    """A home that does not exist is no error."""
    assert stack_file.read(tmp_path / "nowhere") is None


def test_only_this_user_can_read_it(tmp_path):
    """The file holds secrets: its mode is 0600, and the repr of its content shows no password."""
    with stack_file.hold(tmp_path):
        stack_file.write(tmp_path, running(tmp_path))
        assert (tmp_path / "stack.json").stat().st_mode & 0o777 == 0o600
    assert "secret" not in repr(running(tmp_path))


def test_the_file_of_a_killed_stack_is_ignored(tmp_path):
    """No client connects to the socket of a stack that was killed."""
    process = holder(tmp_path)
    stack_file.write(tmp_path, running(tmp_path))
    assert stack_file.read(tmp_path) is not None
    process.kill()
    process.communicate()
    wait_until(lambda: stack_file.read(tmp_path) is None, 5, "the lock is gone")


def test_second_stack_on_a_home_is_refused(tmp_path):
    """One clear line says that a stack runs there already, which process it is, and what to do."""
    process = holder(tmp_path)
    try:
        stack_file.write(tmp_path, running(tmp_path))
        with pytest.raises(ConfigurationError, match=rf"already runs on this home \(process {os.getpid()}\)\. Stop it"):
            stack_file.hold(tmp_path).__enter__()
    finally:
        process.kill()
        process.communicate()


def test_readers_do_not_keep_a_stack_from_starting(tmp_path):
    """A reader that holds the lock for a moment does not keep a stack from starting."""
    reader = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from penstock.registry import stack_file\n"
            "print('reading', flush=True)\n"
            "while True: stack_file.read(Path(sys.argv[1]))",
            str(tmp_path),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    try:
        assert reader.stdout is not None
        reader.stdout.readline()
        for _ in range(50):
            with stack_file.hold(tmp_path):
                pass
    finally:
        reader.kill()
        reader.communicate()


def test_an_explicit_url_wins_over_the_running_stack(tmp_path):
    """The embedded stack is only where nothing else is configured."""
    settings = Settings.load(environ={"PENSTOCK_HOME": str(tmp_path)}, cwd=tmp_path)
    with pytest.raises(ConfigurationError, match=r"No broker is configured .* Expected PENSTOCK_REDIS_URL"):
        stack_file.with_broker(settings)
    with stack_file.hold(tmp_path):
        stack_file.write(tmp_path, running(tmp_path))
        found = stack_file.with_broker(settings)
        assert found.redis_url == "unix:///run/redis.sock"
        assert found.keyring.signing_id == "local"
        own = Settings.load(
            environ={"PENSTOCK_HOME": str(tmp_path), "PENSTOCK_REDIS_URL": "redis://elsewhere:6379/0"}, cwd=tmp_path
        )
        assert stack_file.with_broker(own).redis_url == "redis://elsewhere:6379/0"


def test_a_file_of_another_version_is_named(tmp_path):
    """A stack.json that cannot be understood is said to be that, not a traceback."""
    with stack_file.hold(tmp_path):
        (tmp_path / "stack.json").write_text('{"pid": 1, "carrier_pigeon": true}')
        with pytest.raises(ConfigurationError, match=r"stack\.json .* cannot be read"):
            stack_file.read(tmp_path)
