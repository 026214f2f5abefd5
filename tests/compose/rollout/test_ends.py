"""connect_ends: the connections of an operator who reaches registry and broker directly.

Connections through a worker are tested in test_remote.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.compose.rollout.ends import DeployerEnds, connect_ends
from penstock.compose.rollout.files import LocalFiles
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.desired_state import DesiredVersion
from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Settings
from penstock.safety.operator_key import OperatorKey
from tests.servers import RedisServer

Connect = Callable[..., DeployerEnds]


@pytest.fixture
def connect(shared_redis: RedisServer, tmp_path: Path, slot: str) -> Iterator[Connect]:
    """Connects with these variables beside those of a shell; the connections end with the test."""
    with ExitStack() as exits:

        def connect(**environ: str) -> DeployerEnds:
            base = {
                "PENSTOCK_HOME": str(tmp_path / "home"),
                "PENSTOCK_REDIS_URL": shared_redis.url,
                "PENSTOCK_CELERY_URL": shared_redis.celery_url,
                "PENSTOCK_INFERENCE_STATE_PREFIX": slot,
            }
            settings = Settings.load(environ=base | environ, cwd=tmp_path)
            return connect_ends(settings, "", exits, approve=None, gate=None)

        yield connect


def test_an_operator_gets_a_key_and_every_connection(connect: Connect, tmp_path: Path):
    """The first operator of a home gets a key, which signs records and commands."""
    ends = connect()
    key = OperatorKey.load(tmp_path / "home" / "operator.pem")
    assert ends.sign is not None
    assert ends.sign(b"message")[0] == key.key_id
    assert isinstance(ends.fleet, RedisStreams)
    assert isinstance(ends.files, LocalFiles)
    assert ends.control is not None
    assert ends.registry.versions() == ()


def test_requests_are_stored_under_the_prefix_of_the_settings(connect: Connect, shared_redis: RedisServer, slot: str):
    """Operator and workers meet at the prefix of their settings, in the Redis of the broker."""
    states = connect().states
    assert states is not None
    states.put(DesiredVersion("minilm", "2"))
    with shared_redis.client() as client:
        assert client.hkeys(f"{slot}:wanted") == [b"minilm/2"]


def test_the_store_may_be_another_redis(connect: Connect, shared_redis: RedisServer, slot: str):
    """The URL of the store goes before that of the broker."""
    states = connect(PENSTOCK_INFERENCE_STATE_REDIS_URL=f"unix://{shared_redis.socket}?db=3").states
    assert states is not None
    states.put(DesiredVersion("minilm", "2"))
    with shared_redis.client() as client:
        assert client.hkeys(f"{slot}:wanted") == []


def test_without_reconciliation_there_is_no_store(connect: Connect):
    """Where workers read no store, requests go to each worker as commands."""
    assert connect(PENSTOCK_INFERENCE_STATE_RECONCILE_ENABLED="false").states is None


def test_an_operator_whom_no_worker_trusts_is_refused(connect: Connect, tmp_path: Path):
    """With the public keys of other operators the error names both settings, and no key is made."""
    other = OperatorKey.generate(tmp_path / "other.pem")
    with pytest.raises(ConfigurationError, match="PENSTOCK_OPERATOR_KEY_FILE a key of PENSTOCK_OPERATOR_PUBLIC_KEYS"):
        connect(PENSTOCK_OPERATOR_PUBLIC_KEYS=other.public_text)
    assert not (tmp_path / "home" / "operator.pem").exists()
