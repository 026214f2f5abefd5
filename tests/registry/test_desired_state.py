"""DesiredVersion and StateStore: signed requests of operators and reports of workers, in a real Redis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.registry.desired_state import DesiredVersion, StateStore
from penstock.registry.errors import BadSignature, BrokerUnavailable, UndecodableEnvelope
from penstock.registry.signed import seal_record
from penstock.safety.operator_key import PublicKeys
from tests.registry.catalog.catalogs import new_key
from tests.servers import RedisServer

WANTED = DesiredVersion("minilm", "2", content_hash="ab" * 32, at=1000.0)
UNWANTED = DesiredVersion("minilm", "2", is_wanted=False, content_hash="ab" * 32, at=1001.0)


@dataclass
class Site:
    """A store with a prefix of its own, and the bytes below it."""

    url: str
    prefix: str
    store: StateStore


@pytest.fixture
def site(shared_redis: RedisServer, slot: str) -> Iterator[Site]:
    """A store in the shared Redis."""
    with closing(StateStore.from_url(shared_redis.url, slot)) as store:
        yield Site(shared_redis.url, slot, store)


def test_a_signed_request_comes_back():
    """A request survives sealing and opening, signed or not."""
    key = new_key()
    verify = PublicKeys.parse(key.public_text).verify
    assert DesiredVersion.open(WANTED.seal(key.sign), verify) == WANTED
    assert DesiredVersion.open(UNWANTED.seal(None), None) == UNWANTED
    assert WANTED.reference == "minilm/2"


def test_requests_of_unknown_operators_are_refused():
    """A verifier refuses unsigned requests, requests of another operator, and records of another kind."""
    key, stranger = new_key(), new_key()
    verify = PublicKeys.parse(key.public_text).verify
    payload = WANTED.seal(None).partition(b"\n")[2]
    for forged in (WANTED.seal(None), WANTED.seal(stranger.sign), seal_record(payload, key.sign, "active minilm")):
        with pytest.raises(BadSignature):
            DesiredVersion.open(forged, verify)


@pytest.mark.parametrize("payload", [b"", b"[]", b'{"model": "minilm"}', b'{"model": 7, "version": "1"}'])
def test_bytes_that_are_no_request_are_refused(payload: bytes):
    """The error is one line that names the record."""
    with pytest.raises(UndecodableEnvelope, match=r"^the record of a wanted version: ") as refused:
        DesiredVersion.open(b"\n" + payload, None)
    assert "\n" not in str(refused.value)


def test_the_last_request_for_a_version_stays(site: Site):
    """A store keeps one request for each version: a later one replaces it."""
    other = DesiredVersion("mlp", "1")
    for request in (WANTED, other, UNWANTED):
        site.store.put(request)
    kept = {reference: DesiredVersion.open(record, None) for reference, record in site.store.desired().items()}
    assert kept == {"minilm/2": UNWANTED, "mlp/1": other}


def test_reports_are_those_of_the_present_workers(site: Site):
    """A worker's report replaces its earlier one, has a time, and leaves with the worker."""
    site.store.report("cpu0@a", {"versions": {}})
    site.store.report("cpu0@a", {"versions": {"minilm/2": "ready"}})
    site.store.report("cpu0@b", {"versions": {}})
    site.store.withdraw("cpu0@b")
    (report,) = site.store.loaded().values()
    assert report.pop("at") > 0
    assert (list(site.store.loaded()), report) == (["cpu0@a"], {"versions": {"minilm/2": "ready"}})


def test_stores_with_other_prefixes_are_apart(site: Site):
    """Two sites share a Redis and see nothing of each other."""
    site.store.put(WANTED)
    with closing(StateStore.from_url(site.url, f"{site.prefix}-other")) as other:
        assert (other.desired(), other.loaded()) == ({}, {})


def test_a_redis_that_is_away_is_unavailable(tmp_path: Path):
    """Each call raises BrokerUnavailable, without the address."""
    with closing(StateStore.from_url(f"unix://{tmp_path}/absent.sock", "penstock")) as store:
        for call in (store.desired, store.loaded, lambda: store.put(WANTED), lambda: store.withdraw("cpu0@a")):
            with pytest.raises(BrokerUnavailable, match="does not answer") as refused:
                call()
            assert "absent" not in str(refused.value)
