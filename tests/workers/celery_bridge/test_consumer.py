"""The consumer that survives: which errors lead to a new connection instead of the worker's end."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.concurrency.solo import TaskPool
from kombu.exceptions import OperationalError

from penstock.workers.celery_bridge.consumer import ResilientConsumer, drop_message


@pytest.fixture
def consumer() -> ResilientConsumer:
    """A consumer that is not started."""
    app = Celery(broker="memory://", set_as_current=False)
    controller = SimpleNamespace(use_eventloop=False)
    return ResilientConsumer(lambda _request: None, app=app, hostname="test", pool=TaskPool(1), controller=controller)


@pytest.mark.parametrize("error", [ValueError, KeyError, AttributeError, OperationalError, RuntimeError])
def test_an_error_of_a_message_or_of_the_connection_is_no_end(error: type[Exception], consumer: ResilientConsumer):
    """Celery reconnects after the errors of a channel; every other exception would end the worker and its drain."""
    assert issubclass(error, consumer.channel_errors)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_shutdown_is_no_lost_connection(error: type[BaseException], consumer: ResilientConsumer):
    """Celery stops its worker by exceptions of these classes."""
    assert not issubclass(error, consumer.channel_errors)


class _LostConnection:
    """A connection that holds a message, whose channel kombu cannot close after the broker's end."""

    connection_errors = (ConnectionError,)

    def __init__(self, error: type[Exception]) -> None:
        self._error = error

    def collect(self, socket_timeout: float | None = None) -> None:
        """Nothing is collected."""

    def close(self) -> None:
        """As kombu.transport.redis does when it gives a message back over a connection without a transport."""
        raise self._error("no attribute 'hostname'")


@pytest.mark.parametrize("error", [AttributeError, OperationalError, ConnectionError])
def test_a_lost_connection_that_cannot_be_closed_is_no_end(error: type[Exception], consumer: ResilientConsumer):
    """Celery closes it on its way to the next one, outside of what it recovers from."""
    consumer.connection_errors = (ConnectionError,)
    consumer.connection = _LostConnection(error)
    consumer.on_connection_error_after_connected(ConnectionError("closed by server"))


class _Message(SimpleNamespace):
    """A message with a payload in its body and in its headers."""

    def __init__(self) -> None:
        headers = {"id": "t1", "task": "nonesuch", "kwargsrepr": "canary"}
        kind = {"content_type": "application/json", "content_encoding": "utf-8", "delivery_info": {}, "properties": {}}
        super().__init__(body=b"canary", headers=headers, payload=([], {"x": "canary"}, {}), **kind)

    def ack(self) -> None:
        """Nothing is acknowledged."""

    def reject_log_error(self, *_: object) -> None:
        """Nothing is rejected."""


@pytest.mark.parametrize(
    ("report", "text"),
    [
        ("on_unknown_message", "a message that is not a task was dropped"),
        ("on_unknown_task", "a task of an unknown name was dropped: 'nonesuch'"),
        ("on_invalid_task", "an invalid task message was dropped: 'nonesuch'"),
        ("on_decode_error", "a message that cannot be decoded was dropped: type 'application/json', encoding 'utf-8'"),
    ],
)
def test_celerys_report_of_a_message_shows_no_payload(
    report: str, text: str, consumer: ResilientConsumer, caplog: pytest.LogCaptureFixture
):
    """Body and headers may hold inputs: the log has the reason alone, for each message that Celery cannot handle."""
    consumer.event_dispatcher = None
    caplog.handler.addFilter(drop_message)
    try:
        message, error = _Message(), KeyError("nonesuch")
        arguments = {"on_unknown_message": (b"canary", message), "on_decode_error": (message, error)}
        getattr(consumer, report)(*arguments.get(report, (b"canary", message, error)))
    finally:
        caplog.handler.removeFilter(drop_message)
    (record,) = caplog.records
    assert record.getMessage() == text
    assert "canary" not in caplog.text


def test_other_records_are_logged_as_they_are():
    """Also those whose message is no text."""
    for msg, args in (("%s and %s", ("one", 2)), ({"a": 1}, ()), ("plain", None)):
        record = logging.LogRecord("other", logging.INFO, "", 0, msg, args, None)
        assert drop_message(record)
        assert (record.msg, record.args) == (msg, args)
