"""The limit of tokens that clients see: the largest of all live workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.errors import BrokerUnavailable
from penstock.registry.package import ModelSpec, load_package
from penstock.registry.settings_sections import InferenceConfig
from penstock.workers.versions.token_limits import announced_at_load, follow_limits
from penstock.workers.versions.version import ServedModel, ServedVersion
from tests.workers.generation.packages import write_writer

TTL_MS = 3_600_000


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_writer(tmp_path_factory.mktemp("limits"), max_model_len=None, kv_cache_mb=0.1)


@pytest.fixture
def version(package: Path) -> Iterator[ServedVersion]:
    """A version with an engine in memory, whose pages have room for less than the model."""
    version = ServedVersion(load_package(package), InferenceConfig())
    version.runtime.load("cpu", 1)
    version.has_loaded()
    yield version
    version.unload()


class Reports(MemoryBroker):
    """A broker that counts announcements, and may refuse to be read."""

    may_be_read = True
    announcements = 0

    def workers(self) -> list[bytes]:
        if not self.may_be_read:
            raise BrokerUnavailable("The broker refuses to work: NOPERM")
        return super().workers()

    def announce(self, slot: str, spec: bytes, versions: object, *, replaces: bool) -> None:
        self.announcements += 1
        super().announce(slot, spec, {}, replaces=replaces)

    def put(self, worker: str, most_tokens: int) -> None:
        versions = {"writer": {"1": {"is_offered": True, "most_tokens": most_tokens}}}
        self.report(worker, json.dumps({"name": worker, "ready": True, "versions": versions}).encode(), TTL_MS)

    @property
    def limit(self) -> int | None:
        spec = self.announced("writer").spec
        assert spec is not None
        generate = ModelSpec.from_json(spec).generate
        assert generate is not None
        return generate.max_model_len


def test_the_largest_limit_of_the_live_workers_is_announced(version: ServedVersion):
    """Whichever worker has announced last, and only where it is another one; it falls when that worker is gone."""
    broker, own = Reports(), version.most_tokens
    models = {"writer": ServedModel("writer", version)}
    assert 0 < own < 256
    broker.announce("writer", version.spec_json, {}, replaces=True)
    assert broker.limit == own
    cases = [({"a": own - 1}, own, 0), ({"a": 256, "b": own + 1}, 256, 1), ({"a": 0}, own + 1, 1)]
    for others, expected, announcements in cases:
        for name, most in others.items():
            broker.put(name, most)
        before = broker.announcements
        for _ in range(3):
            follow_limits(broker, models)
        assert broker.limit == expected
        assert broker.announcements == before + announcements
    broker.may_be_read = False
    follow_limits(broker, models)
    assert broker.limit == own + 1


def test_a_load_does_not_lower_what_others_announce(version: ServedVersion):
    """Nor does it raise it before the others can know where long jobs can go; alone, it is the own limit."""
    broker, own = Reports(), version.most_tokens
    for others, expected in ((0, own), (256, 256), (own - 1, own - 1)):
        broker.put("a", others)
        announced_at_load(broker, version)
        generate = ModelSpec.from_json(version.spec_json).generate
        assert generate is not None
        assert generate.max_model_len == expected
    broker.may_be_read = False
    announced_at_load(broker, version)


def test_damaged_specs_are_replaced(version: ServedVersion):
    """Any program may write to the broker."""
    broker = Reports()
    broker.announce("writer", b"{", {}, replaces=True)
    follow_limits(broker, {"writer": ServedModel("writer", version)})
    assert broker.limit == version.most_tokens
