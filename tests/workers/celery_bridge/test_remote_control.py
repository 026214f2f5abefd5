"""Remote control, through the entries of Celery's own tables."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, states
from celery.utils.collections import AttributeDict
from celery.worker import heartbeat
from celery.worker import state as worker_state
from celery.worker.control import Panel
from kombu.connection import Connection

from penstock.registry.control import CONTROL_COMMAND, CommandVerifier
from penstock.registry.envelope import JobHeader
from penstock.workers.celery_bridge.events import CeleryEventSender
from penstock.workers.celery_bridge.remote_control import (
    OPEN_COMMANDS,
    keep_foreign_results,
    refuse_commands,
    refuse_pool_commands,
    register_control_command,
    restored_tables,
    show_drain,
)
from tests.workers.celery_bridge.jobs import HOST, ended, job


class HeldJobs:
    """The jobs that a drain holds."""

    def __init__(self, active: Sequence[JobHeader], reserved: Sequence[JobHeader]) -> None:
        self._active, self._reserved = list(active), list(reserved)

    def active(self) -> list[JobHeader]:
        return self._active

    def reserved(self) -> list[JobHeader]:
        return self._reserved


def test_inspect_shows_the_drains_jobs(app: Celery):
    """`active` and `reserved` show the drain's jobs, `stats` counts the finished ones, all without payloads. The job of
    a Celery task has the id of that task.
    """
    listener = CeleryEventSender(app, HOST, interval_s=1, is_wanted=lambda: False)
    running, waiting = job(), job("minilm", is_task=True, local_id="b6f1c0de-task")
    show_drain(HeldJobs([running], [waiting]), listener, HOST, settings={})
    listener.finished([ended(job()), ended(job())], 1000.0)

    controller = SimpleNamespace(stats=lambda: {"total": {"penstock.infer": 1}, "pid": 1})
    state = SimpleNamespace(tset=set, consumer=SimpleNamespace(controller=controller))
    (active,) = Panel.data["active"](state, safe=True)
    (reserved,) = Panel.data["dump_reserved"](state)
    stats = Panel.data["stats"](state)

    assert (active["id"], active["name"], active["hostname"]) == (running.id, "penstock.infer.mlp", HOST)
    assert (reserved["id"], reserved["name"]) == ("b6f1c0de-task", "penstock.infer.minilm")
    assert stats["total"] == {"penstock.infer": 1, "penstock.infer.mlp": 2}
    assert stats["pid"] == 1


@pytest.mark.parametrize(
    "url",
    [
        "redis+socket://:s3cret@/run/redis.sock?virtual_host=1",
        "redis://:s3cret@one:6379/0;redis://:s3cret@two:6379/0",
        "amqp://someone:s3cret@host//",
    ],
)
def test_stats_show_no_password_of_the_broker(app: Celery, url: str):
    """Celery removes the password alone, and shows the URLs of sockets and of further brokers as they are."""
    listener = CeleryEventSender(app, HOST, interval_s=1, is_wanted=lambda: False)
    show_drain(HeldJobs([], []), listener, HOST, settings={})
    facts = {name: value for name, value in Connection(url).info().items() if name != "password"}
    controller = SimpleNamespace(stats=lambda: {"total": {}, "broker": facts})
    stats = Panel.data["stats"](SimpleNamespace(consumer=SimpleNamespace(controller=controller)))
    assert stats["broker"].keys() == facts.keys()
    assert "s3cret" not in repr(stats)


@pytest.mark.parametrize("command", ["revoke", "terminate"])
def test_revoke_changes_no_result_of_a_task_that_is_not_held_here(app: Celery, command: str):
    """The id is known as revoked; the task may run in another program, or as a job, and then it is not revoked."""
    keep_foreign_results()
    state = AttributeDict(app=app, consumer=SimpleNamespace(pool=None))
    named = {"signal": "TERM"} if command == "terminate" else {}
    answer = Panel.data[command](state, task_id=["runs-elsewhere"], **named)
    assert "ok" in answer
    assert "runs-elsewhere" in worker_state.revoked
    assert app.backend.get_state("runs-elsewhere") == states.PENDING


def test_celerys_heartbeat_counts_the_drains_jobs(app: Celery):
    """Flower's column of active tasks comes from the heartbeat."""
    listener = CeleryEventSender(app, HOST, interval_s=1, is_wanted=lambda: False)
    show_drain(HeldJobs([job(), job()], []), listener, HOST, settings={})
    listener.finished([ended(job())], 1000.0)
    sent: list[dict[str, Any]] = []
    eventer = SimpleNamespace(
        on_enabled=set(), on_disabled=set(), send=lambda event, **fields: sent.append({"type": event, **fields})
    )
    heartbeat.Heart(None, eventer)._send("worker-heartbeat")
    assert (sent[0]["active"], sent[0]["processed"]) == (2, 1)


def answer_of(name: str) -> object:
    return Panel.data[name](SimpleNamespace(), n=1)


def test_only_commands_that_look_or_revoke_stay_open(caplog: pytest.LogCaptureFixture):
    """In every version of Celery, the commands that stop, resize or re-route a worker are refused, in words and without
    a traceback: Flower shows the words."""
    open_ones = {name: Panel.data[name] for name in Panel.data.keys() & OPEN_COMMANDS}
    closed = Panel.data.keys() - OPEN_COMMANDS
    assert {"shutdown", "pool_grow", "pool_restart", "autoscale", "add_consumer", "cancel_consumer"} <= closed
    refuse_commands()
    assert {name: Panel.data[name] for name in open_ones} == open_ones
    for name in closed:
        answer = answer_of(name)
        assert isinstance(answer, dict)
        assert list(answer) == ["error"]
        assert answer["error"].startswith(name)
        assert "Expected" in answer["error"]
    assert [record.exc_info for record in caplog.records] == [None] * len(closed)


def test_a_pool_without_a_size_refuses_grow_and_shrink():
    """Where operators opened remote control, Grow and Shrink are still refused, and the other commands are Celery's."""
    celerys = dict(Panel.data)
    refuse_pool_commands()
    changed = {name for name in celerys if Panel.data[name] is not celerys[name]}
    assert changed == {"autoscale", "pool_grow", "pool_restart", "pool_shrink"}
    assert answer_of("pool_grow") == {
        "error": "pool_grow: a worker is one process with one device. Expected another worker: `penstock worker`"
    }


def test_celerys_tables_are_given_back(app: Celery):
    """After the block, the commands and the heartbeat's counts are Celery's own again, also the refused ones."""
    commands, descriptions = dict(Panel.data), dict(Panel.meta)
    listener = CeleryEventSender(app, HOST, interval_s=1, is_wanted=lambda: False)
    with restored_tables():
        show_drain(HeldJobs([], []), listener, HOST, settings={})
        refuse_commands()
        assert Panel.data != commands
    assert (dict(Panel.data), dict(Panel.meta)) == (commands, descriptions)
    assert heartbeat.active_requests is worker_state.active_requests
    assert heartbeat.all_total_count is worker_state.all_total_count


def test_a_control_command_has_one_argument():
    """One with further arguments is refused in words, without the names of functions."""
    with restored_tables():
        register_control_command(CommandVerifier(lambda *_: True, "w"), lambda _: "done")
        for further in ({"foo": 1}, {"state": 1}):
            assert Panel.data[CONTROL_COMMAND](None, command="x", **further) == {
                "error": "a control command with 2 arguments. Expected one"
            }
