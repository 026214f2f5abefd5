"""LoadRequests: signed requests in the state store, and the need of an operator's key for commands to workers.

Commands that reach a worker are tested in test_control_client.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing

import pytest

from penstock.compose.rollout.load_requests import LoadRequests, require_control
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.control import Command
from penstock.registry.desired_state import DesiredVersion, StateStore
from penstock.registry.errors import BadSignature, ConfigurationError
from penstock.safety.operator_key import OperatorKey, PublicKeys
from tests.registry.catalog.catalogs import new_key, registered
from tests.servers import RedisServer

VERSION = registered("2")
OTHER = registered("2", content_hash="ef" * 32)


@pytest.fixture(scope="module")
def key() -> OperatorKey:
    """The operator's key."""
    return new_key()


@pytest.fixture
def states(shared_redis: RedisServer, slot: str) -> Iterator[StateStore]:
    """An empty store."""
    with closing(StateStore.from_url(shared_redis.url, slot)) as store:
        yield store


@pytest.fixture
def fleet() -> MemoryBroker:
    """A broker to which one worker of minilm reports; minilm/2 is ready in it."""
    broker = MemoryBroker()
    versions = {"minilm": {"2": {"state": "ready"}, "3": {"state": "cold"}}}
    broker.report("a", json.dumps({"name": "a", "versions": versions}).encode(), 3_600_000)
    return broker


def test_a_request_to_all_workers_is_stored_and_signed(fleet: MemoryBroker, states: StateStore, key: OperatorKey):
    """Workers that start later find the request, and accept it as this operator's only."""
    requests = LoadRequests(fleet, states, None, key.sign)
    assert requests.are_stored
    requests.request(VERSION, is_wanted=True)
    record = states.desired()["minilm/2"]
    desired = DesiredVersion.open(record, PublicKeys.parse(key.public_text).verify)
    assert (desired.is_wanted, desired.content_hash, desired.at > 0) == (True, VERSION.content_hash, True)
    with pytest.raises(BadSignature):
        DesiredVersion.open(record, PublicKeys.parse(new_key().public_text).verify)


def test_the_last_request_counts(fleet: MemoryBroker, states: StateStore):
    """A version is wanted from a load request until an unload request; both make its content known."""
    requests = LoadRequests(fleet, states, None, None)
    assert (requests.is_wanted(VERSION), requests.is_known(VERSION)) == (False, False)
    requests.request(VERSION, is_wanted=True)
    assert (requests.is_wanted(VERSION), requests.is_known(VERSION)) == (True, True)
    requests.request(VERSION, is_wanted=False)
    assert (requests.is_wanted(VERSION), requests.is_known(VERSION)) == (False, True)


def test_a_request_for_other_content_is_not_known(fleet: MemoryBroker, states: StateStore):
    """A stored request with another content hash does not tell workers of this content."""
    requests = LoadRequests(fleet, states, None, None)
    requests.request(OTHER, is_wanted=True)
    assert not requests.is_known(VERSION)


def test_a_repeated_request_is_a_new_one(fleet: MemoryBroker, states: StateStore):
    """Workers try again to load a version that they could not load."""
    requests = LoadRequests(fleet, states, None, None)
    records = set()
    for _ in range(2):
        requests.request(VERSION, is_wanted=True)
        records.add(states.desired()["minilm/2"])
    assert len(records) == 2


def test_a_record_that_cannot_be_read_is_no_request(
    fleet: MemoryBroker, states: StateStore, shared_redis: RedisServer, slot: str
):
    """Foreign bytes in the store count as no request."""
    with shared_redis.client() as client:
        client.hset(f"{slot}:wanted", "minilm/2", b"foreign")
    requests = LoadRequests(fleet, states, None, None)
    assert (requests.is_wanted(VERSION), requests.is_known(VERSION)) == (False, False)


def test_without_a_store_the_reports_tell_what_is_wanted(fleet: MemoryBroker):
    """A version that a worker has loaded is wanted; no content is known for workers that start later."""
    requests = LoadRequests(fleet, None, None, None)
    assert not requests.are_stored
    assert (requests.is_wanted(VERSION), requests.is_wanted(registered("3"))) == (True, False)
    assert not requests.is_known(VERSION)


def test_a_command_needs_the_operators_key(fleet: MemoryBroker, states: StateStore):
    """One worker, and workers without a store, get commands, which only an operator can sign."""
    for store, worker in ((states, "a"), (None, None)):
        requests = LoadRequests(fleet, store, None, None)
        with pytest.raises(ConfigurationError, match="Expected an operator's key"):
            requests.request(VERSION, is_wanted=True, worker=worker)
    assert states.desired() == {}
    with pytest.raises(ConfigurationError, match="Control commands are signed"):
        require_control(None)


def test_without_workers_no_command_is_sent(fleet: MemoryBroker):
    """A request for a model that no worker serves needs no key, and neither does an empty list of workers."""
    requests = LoadRequests(fleet, None, None, None)
    requests.request(registered("1", name="mlp"), is_wanted=True)
    requests.send(Command("reconcile"), [])
