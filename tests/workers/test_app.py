"""Celery's application of a worker process: what its import changes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.servers import ROOT, RedisServer

PROGRAM = """
import warnings

import penstock.workers.app
from celery.exceptions import SecurityWarning
from celery.platforms import ROOT_DISCOURAGED

warnings.warn(SecurityWarning(ROOT_DISCOURAGED.format(uid=0, euid=0, gid=0, egid=0)))
warnings.warn(SecurityWarning({another!r}))
"""


BROKER_AND_BACKEND = """
from penstock.workers.app import app

for connection in (app.connection(), app.connection_for_read(), app.connection_for_write()):
    print(connection.port, connection.virtual_host)
print(app.backend.connparams["port"], app.backend.connparams["db"])
"""


def test_the_variables_of_another_celery_program_do_not_move_the_worker():
    """Celery prefers its own variables to the settings of an application; here they belong to another program."""
    names = ("BROKER_URL", "BROKER_READ_URL", "BROKER_WRITE_URL", "RESULT_BACKEND")
    foreign = {f"CELERY_{name}": "redis://127.0.0.1:2/7" for name in names}
    ended = subprocess.run(
        [sys.executable, "-c", BROKER_AND_BACKEND],
        cwd=ROOT,
        env={"PENSTOCK_REDIS_URL": "redis://127.0.0.1:1/0", **foreign},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["1 0"] * 4


RESTORE_THROTTLE = """
from penstock.workers.app import app

print(getattr(app.connection_for_read().default_channel, "unacked_restore_throttle", 1))
"""


def test_messages_of_a_killed_worker_come_back_at_the_next_turn(shared_redis: RedisServer):
    """kombu 5.7 looks for them at every tenth turn of 10 s only, unless it is told; older ones cannot be told."""
    ended = subprocess.run(
        [sys.executable, "-c", RESTORE_THROTTLE],
        cwd=ROOT,
        env={"PENSTOCK_REDIS_URL": shared_redis.url},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ended.stdout.strip() == "1", ended.stderr


@pytest.mark.parametrize("another", ["An uid and gid of 0 will be assumed", "another warning"])
def test_celery_does_not_warn_of_the_user_root_at_each_start(another: str):
    """Its five lines are about pickle, which is not accepted here. Its other warnings of this kind stay."""
    ended = subprocess.run(
        [sys.executable, "-W", "default", "-c", PROGRAM.format(another=another)],
        cwd=ROOT,
        env={"PENSTOCK_REDIS_URL": "redis://127.0.0.1:1/0"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ended.returncode == 0, ended.stderr
    assert "superuser" not in ended.stderr
    assert another in ended.stderr
