"""Signed orders over Celery's remote control, against a node that listens as a worker's does. IN-064."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from celery import Celery

from penstock.compose.rollout.control_client import ControlClient
from penstock.registry.control import CONTROL_COMMAND, Command, CommandVerifier
from penstock.registry.errors import BrokerUnavailable, PenstockError
from penstock.registry.settings import Settings
from penstock.safety.keys import OperatorKey, PublicKeys
from tests.servers import RedisServer, let_pass, wait_until


def _control(celery_url: str, key: OperatorKey) -> ControlClient:
    return ControlClient(Settings.load(environ={"PENSTOCK_CELERY_URL": celery_url}), key.sign)


def _obedience(key: OperatorKey, name: str) -> CommandVerifier:
    return CommandVerifier(PublicKeys.parse(key.public_text).verify, name)


@contextmanager
def _listening(server: RedisServer, name: str, obedience: CommandVerifier) -> Iterator[list[Command]]:
    """A node that obeys; refuses to unload, and is slow to answer its first order to compile."""
    obeyed: list[Command] = []

    def act(_: object, command: object = None) -> dict[str, str]:
        try:
            obeyed.append(obedience.open(command))
        except PenstockError as error:
            return {"error": str(error)}
        if [each.action for each in obeyed] == ["compile"]:
            let_pass(1.2)
        return {"error": "it answers jobs"} if obeyed[-1].action == "unload" else {"ok": "done"}

    app = Celery("node", broker=server.celery_url, set_as_current=False)
    is_over = threading.Event()

    def listen() -> None:
        with app.connection_for_read() as connection, connection.channel() as channel:
            node = app.control.mailbox.Node(name, state=None, channel=channel, handlers={CONTROL_COMMAND: act})
            node.listen(callback=node.handle_message)
            while not is_over.is_set():
                try:
                    connection.drain_events(timeout=0.1)
                except TimeoutError:
                    continue

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield obeyed
    finally:
        is_over.set()
        thread.join(10)
        app.close()


def test_a_worker_that_listens_late_is_asked_again(redis_server: RedisServer, tmp_path: Path):
    """Its drain is ready before Celery listens in it: an order that nobody heard is given once more."""
    key = OperatorKey.generate(tmp_path / "operator.pem")
    control, name = _control(redis_server.celery_url, key), f"{uuid4().hex}@test"
    obedience = _obedience(key, name)
    refusals: list[dict[str, str]] = []
    asking = threading.Thread(target=lambda: refusals.append(control.give(Command("load", "m", "1"), [name], 20)))
    with redis_server.client() as client, client.pubsub(ignore_subscribe_messages=True) as on_heartbeat:
        on_heartbeat.psubscribe("*celery.pidbox*")
        on_heartbeat.get_message(timeout=5)
        asking.start()
        wait_until(lambda: on_heartbeat.get_message(timeout=0.1), 10, "the first order")
    with _listening(redis_server, name, obedience) as obeyed:
        asking.join(20)
    control.close()
    assert refusals == [{}]
    assert {(command.action, command.model, command.version) for command in obeyed} == {("load", "m", "1")}


def test_a_worker_that_answers_late_is_asked_again(redis_server: RedisServer, tmp_path: Path):
    """With a fresh order: the same one twice would be taken for a copy, and refused."""
    key = OperatorKey.generate(tmp_path / "operator.pem")
    name = f"{uuid4().hex}@test"
    with _listening(redis_server, name, _obedience(key, name)) as obeyed:
        control = _control(redis_server.celery_url, key)
        assert control.give(Command("compile", "m"), [name], 10) == {}
        assert len({command.nonce for command in obeyed}) == len(obeyed) >= 2
        control.close()


def test_refusals_and_silence_are_told_by_worker(redis_server: RedisServer, tmp_path: Path):
    """A worker's own words, and the name of one that says nothing."""
    key = OperatorKey.generate(tmp_path / "operator.pem")
    stranger = OperatorKey.generate(tmp_path / "stranger.pem")
    name = f"{uuid4().hex}@test"
    with _listening(redis_server, name, _obedience(key, name)):
        control = _control(redis_server.celery_url, key)
        assert control.give(Command("load", "m", "1"), [name], 10) == {}
        told = control.give(Command("unload", "m", "1"), [name, "nobody@test"], 1.5)
        assert told == {name: "it answers jobs", "nobody@test": "gave no answer within 1.5 s"}
        control.close()
        foreign = _control(redis_server.celery_url, stranger)
        (refusal,) = foreign.give(Command("load", "m", "1"), [name], 10).values()
        assert "its key is not known here" in refusal
        foreign.close()


def test_a_broker_that_is_away_is_named(tmp_path: Path):
    """Within the time-out, without its address."""
    control = _control(f"redis+socket://{tmp_path}/absent.sock", OperatorKey.generate(tmp_path / "operator.pem"))
    with pytest.raises(BrokerUnavailable, match=r"Celery's broker does not answer \(\w+\)\Z"):
        control.give(Command("reconcile"), ["nobody@test"], 1)
    control.close()
