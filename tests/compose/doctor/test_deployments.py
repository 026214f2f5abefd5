"""check_deployments: production versions of a real registry against the active versions of a real broker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.compose.doctor.deployments import check_deployments
from penstock.compose.doctor.findings import Finding
from penstock.compose.rollout.operator_keys import operator_keys
from penstock.compose.rollout.registry import open_registry
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.catalog.stages import ModelStage
from penstock.registry.deployment import Deployment
from penstock.registry.package import load_package
from penstock.registry.settings import Settings
from penstock.workers.versions.deployment_store import FileDeploymentStore
from tests.packages import write_double
from tests.servers import RedisServer

FIX = "penstock models sync double"


@dataclass
class Site:
    """A registry with a home, and a broker."""

    settings: Settings
    broker: RedisStreams

    def promote(self, root: Path) -> Deployment:
        """Takes `double/1` to production in the registry alone; returns the decision for the broker."""
        registry = open_registry(self.settings, operator_keys(self.settings, for_changes=True))
        package = load_package(write_double(root))
        self.broker.put_spec("double", package.spec.to_json())
        registry.register(package)
        registry.promote("double", "1", ModelStage.STAGING)
        done = registry.promote("double", "1", ModelStage.PRODUCTION)
        return Deployment(done.epoch, "double", "1", done.content_hash)

    def activate(self, decision: Deployment) -> None:
        """Makes the decision's version the active one."""
        record = decision.seal(operator_keys(self.settings).sign)
        assert self.broker.activate("double", decision.epoch, record, decision.version, b"{}")

    def found(self) -> list[Finding]:
        """The findings."""
        return list(check_deployments(self.settings, self.broker))


@pytest.fixture
def site(redis_server: RedisServer, tmp_path: Path) -> Iterator[Site]:
    """A home without a registry, and an empty broker."""
    environ = {"PENSTOCK_HOME": str(tmp_path / "home"), "PENSTOCK_REDIS_URL": redis_server.url}
    with closing(RedisStreams.from_url(redis_server.url)) as broker:
        yield Site(Settings.load(environ=environ, cwd=tmp_path), broker)


def test_a_home_without_a_registry_stays_without_one(site: Site, tmp_path: Path):
    """The check makes neither a database nor a key, and finds nothing in production."""
    assert site.found() == [Finding("registry", "ok", "in production and active: none")]
    assert list((tmp_path / "home").glob("*")) == []


def test_a_production_version_that_is_active_is_fine(site: Site, models_root: Path):
    """Registry and broker agree on epoch and content."""
    site.activate(site.promote(models_root))
    assert site.found() == [Finding("registry", "ok", "in production and active: double/1")]


def test_a_promotion_that_did_not_reach_the_broker_is_broken(site: Site, models_root: Path):
    """A version in production that is not active is found, and the fix is the command that activates it."""
    decision = site.promote(models_root)
    expected = Finding("registry", "broken", "double/1 is in production, but it is not the active version", FIX)
    assert site.found() == [expected]
    site.activate(Deployment(decision.epoch, "double", "1", "0" * 64))
    assert site.found() == [expected]


def test_a_record_that_cannot_be_read_is_not_the_active_version(site: Site, models_root: Path):
    """Foreign bytes in the place of the record count as no decision."""
    decision = site.promote(models_root)
    site.broker.activate("double", decision.epoch, b"\x00foreign", "1", b"{}")
    assert [finding.status for finding in site.found()] == ["broken"]


def test_a_decision_that_only_workers_know_is_broken(site: Site, models_root: Path):
    """A broker that lost its data has an older epoch than the workers of this machine, which keep theirs."""
    decision = site.promote(models_root)
    site.activate(decision)
    keys = operator_keys(site.settings)
    assert keys.verify is not None
    later = Deployment(decision.epoch + 5, "double", "1", decision.content_hash)
    store = FileDeploymentStore(site.settings.home / "deployments", keys.verify)
    store.keep("double", f"{later.epoch} ".encode() + later.seal(keys.sign))
    lost, good = site.found()
    assert (lost.status, good.status) == ("broken", "ok")
    assert f"applied epoch {later.epoch} of double and keep it; the broker has epoch {decision.epoch}" in lost.what
    assert lost.fix.startswith(FIX)


def test_a_registry_that_does_not_open_is_broken(site: Site, tmp_path: Path):
    """A file that is no database is one finding, and the check does not raise."""
    file = tmp_path / "other.db"
    file.write_bytes(b"no database" * 1000)
    site.settings = site.settings.model_copy(update={"registry_url": f"sqlite:///{file}"})
    (finding,) = site.found()
    assert (finding.area, finding.status) == ("registry", "broken")
