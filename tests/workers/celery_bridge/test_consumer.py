"""The consumer that survives: which errors lead to a new connection instead of the worker's end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery import Celery
from celery.concurrency.solo import TaskPool
from kombu.exceptions import OperationalError

from penstock.workers.celery_bridge.consumer import ResilientConsumer


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
