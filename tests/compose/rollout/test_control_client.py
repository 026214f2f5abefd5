"""Signed commands over Celery's remote control, to a node that listens as a worker does. IN-064."""

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
from penstock.registry.errors import BrokerRefused, BrokerUnavailable, PenstockError
from penstock.registry.settings import Settings
from penstock.safety.operator_key import OperatorKey, PublicKeys
from tests.servers import RedisServer, let_pass, wait_until


def _control(celery_url: str, key: OperatorKey) -> ControlClient:
    return ControlClient(Settings.load(environ={"PENSTOCK_CELERY_URL": celery_url}), key.sign)


def _verifier(key: OperatorKey, name: str) -> CommandVerifier:
    return CommandVerifier(PublicKeys.parse(key.public_text).verify, name)


@contextmanager
def _listening(server: RedisServer, name: str, verifier: CommandVerifier) -> Iterator[list[Command]]:
    """A node that accepts commands; it refuses to unload, and replies late to its first command to compile."""
    accepted: list[Command] = []

    def act(_: object, command: object = None) -> dict[str, str]:
        try:
            accepted.append(verifier.open(command))
        except PenstockError as error:
            return {"error": str(error)}
        if [each.action for each in accepted] == ["compile"]:
            let_pass(1.2)
        return {"error": "it is active"} if accepted[-1].action == "unload" else {"ok": "done"}

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
        yield accepted
    finally:
        is_over.set()
        thread.join(60)
        app.close()


def test_a_command_to_a_worker_that_listens_late_is_repeated(redis_server: RedisServer, tmp_path: Path):
    """A worker's drain is ready before its Celery listens, so a command without a reply is sent again."""
    key = OperatorKey.generate(tmp_path / "operator.pem")
    control, name = _control(redis_server.celery_url, key), f"{uuid4().hex}@test"
    verifier = _verifier(key, name)
    refusals: list[dict[str, str]] = []
    asking = threading.Thread(target=lambda: refusals.append(control.send(Command("load", "m", "1"), [name], 20)))
    with redis_server.client() as client, client.pubsub(ignore_subscribe_messages=True) as messages:
        messages.psubscribe("*celery.pidbox*")
        messages.get_message(timeout=5)
        asking.start()
        wait_until(lambda: messages.get_message(timeout=0.1), 10, "the first command")
    with _listening(redis_server, name, verifier) as accepted:
        asking.join(60)
    control.close()
    assert refusals == [{}]
    assert {(command.action, command.model, command.version) for command in accepted} == {("load", "m", "1")}


def test_a_repeated_command_has_another_nonce(redis_server: RedisServer, tmp_path: Path):
    """A worker that replies late gets a new command, because it would refuse a copy of the first."""
    key = OperatorKey.generate(tmp_path / "operator.pem")
    name = f"{uuid4().hex}@test"
    with _listening(redis_server, name, _verifier(key, name)) as accepted:
        control = _control(redis_server.celery_url, key)
        assert control.send(Command("compile", "m"), [name], 10) == {}
        assert len({command.nonce for command in accepted}) == len(accepted) >= 2
        control.close()


def test_refusals_are_returned_by_worker(redis_server: RedisServer, tmp_path: Path):
    """A refusal is the worker's own message; a worker that does not reply is a refusal, too."""
    key = OperatorKey.generate(tmp_path / "operator.pem")
    stranger = OperatorKey.generate(tmp_path / "stranger.pem")
    name = f"{uuid4().hex}@test"
    with _listening(redis_server, name, _verifier(key, name)):
        control = _control(redis_server.celery_url, key)
        assert control.send(Command("load", "m", "1"), [name], 10) == {}
        refusals = control.send(Command("unload", "m", "1"), [name, "absent@test"], 4.0)
        assert refusals == {name: "it is active", "absent@test": "did not reply within 4 s"}
        control.close()
        foreign = _control(redis_server.celery_url, stranger)
        (refusal,) = foreign.send(Command("load", "m", "1"), [name], 10).values()
        assert "its key is not known here" in refusal
        foreign.close()


def test_a_broker_that_is_away_is_named(tmp_path: Path):
    """The error of a broker that is away shows no address."""
    control = _control(f"redis+socket://{tmp_path}/absent.sock", OperatorKey.generate(tmp_path / "operator.pem"))
    with pytest.raises(BrokerUnavailable, match=r"Celery's broker does not answer \(\w+\)\Z"):
        control.send(Command("reconcile"), ["absent@test"], 1)
    control.close()


def test_a_broker_of_celery_that_refuses_is_named_at_once(redis_server: RedisServer, tmp_path: Path):
    """One connection, and a text with the address and the variable to change, without the password."""
    control = _control(redis_server.tcp_url.replace("//", "//x:hunter2@"), OperatorKey.generate(tmp_path / "o.pem"))
    with redis_server.client() as observer:
        before = observer.info("stats")["total_connections_received"]
        with pytest.raises(
            BrokerRefused, match=r"Celery's broker: redis://127\.0\.0\.1:\d+/0.*PENSTOCK_CELERY"
        ) as told:
            control.send(Command("reconcile"), ["absent@test"], 60)
        assert observer.info("stats")["total_connections_received"] - before == 1
    assert "hunter2" not in str(told.value)
    control.close()
