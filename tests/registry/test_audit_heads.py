"""The heads of audit chains: one suite over the registry's database and the broker."""

from __future__ import annotations

import secrets

import pytest
import redis

from penstock.registry.audit_heads import AuditHead, AuditHeads
from penstock.registry.broker.redis_audit_heads import RedisAuditHeads
from penstock.registry.catalog.audit_heads import SqlAuditHeads
from penstock.registry.errors import BrokerUnavailable, ConfigurationError
from penstock.registry.queues import AUDIT_HEADS_KEY
from tests.servers import PostgresDatabase, RedisServer

MACS = ["ab" * 32, "cd" * 32]


@pytest.fixture(params=["sqlite", "postgresql", "redis"])
def heads(request: pytest.FixtureRequest, tmp_path) -> AuditHeads:
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("shared_redis")
        return RedisAuditHeads.from_url(server.url)
    if request.param == "sqlite":
        return SqlAuditHeads(f"sqlite:///{tmp_path}/home/registry.db")
    database: PostgresDatabase = request.getfixturevalue("shared_postgres")
    return SqlAuditHeads(database.url)


@pytest.fixture
def writer() -> str:
    return f"cpu0@host-20261123T180000Z-{secrets.token_hex(4)}"


def test_the_last_head_of_each_writer_is_kept(heads: AuditHeads, writer: str):
    """A newer one replaces it; an empty call changes nothing."""
    other = f"{writer}-2"
    heads.put({})
    heads.put({writer: AuditHead(1, MACS[0]), other: AuditHead(7, MACS[1])})
    heads.put({writer: AuditHead(1 << 40, MACS[1])})
    found = heads.all()
    assert (found[writer], found[other]) == (AuditHead(1 << 40, MACS[1]), AuditHead(7, MACS[1]))


def test_a_head_of_the_registry_never_goes_back(registry_url: str, writer: str):
    """Neither to an earlier entry, nor to another MAC of the same one."""
    heads = SqlAuditHeads(registry_url)
    heads.put({writer: AuditHead(5, MACS[0])})
    heads.put({writer: AuditHead(4, MACS[1])})
    heads.put({writer: AuditHead(5, MACS[1])})
    assert heads.all()[writer] == AuditHead(5, MACS[0])


@pytest.mark.parametrize("text", ["", "x", f"-1 {MACS[0]}", "9" * 30, b"\xff \xff"])
def test_a_head_that_was_overwritten_has_sequence_0(shared_redis: RedisServer, writer: str, text: str | bytes):
    """Garbage in the hash is no error of the reader, but no head either."""
    with redis.Redis.from_url(shared_redis.url) as client:
        client.hset(AUDIT_HEADS_KEY, writer, text)
        found = RedisAuditHeads.from_url(shared_redis.url).all()[writer]
        client.hdel(AUDIT_HEADS_KEY, writer)
    assert found.sequence == 0


def test_a_foreign_key_makes_room_for_the_heads(redis_server: RedisServer, writer: str):
    """Another program has written a string there: it is quarantined, and the heads are stored."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.set(AUDIT_HEADS_KEY, "x")
        heads = RedisAuditHeads.from_url(redis_server.url)
        heads.put({writer: AuditHead(1, MACS[0])})
        assert heads.all() == {writer: AuditHead(1, MACS[0])}
        assert len(client.keys("penstock:quarantine:*")) == 1


def test_a_store_that_is_away_is_a_typed_error(tmp_path):
    """The logger and the verification go on without it."""
    with pytest.raises(BrokerUnavailable):
        RedisAuditHeads.from_url(f"unix://{tmp_path}/none.sock", timeout_s=0.1).all()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError):
        SqlAuditHeads(f"sqlite:///{tmp_path}/file/registry.db").all()
