"""Which decision about the active version a worker follows, and what a job may have loaded."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from penstock.registry.deployment import Deployment
from penstock.registry.package import Package
from penstock.registry.settings_sections import InferenceConfig
from penstock.registry.signed import Verifier
from penstock.safety.operator_key import OperatorKey, PublicKeys
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.versions.active import ActiveVersions
from penstock.workers.versions.deployment_store import DeploymentStore, FileDeploymentStore, NullDeploymentStore
from penstock.workers.versions.version import ServedModel, ServedVersion
from tests.workers.doubles import spec_of


@pytest.fixture
def operator(tmp_path: Path) -> OperatorKey:
    """The operator whose decisions count."""
    return OperatorKey.generate(tmp_path / "operator.pem")


def trust(operator: OperatorKey) -> Verifier:
    """A verifier that trusts this operator."""
    return PublicKeys.parse(operator.public_text).verify


def version(label: str) -> ServedVersion:
    """A version of the model `double`, not loaded."""
    return ServedVersion(Package(spec_of(version=label), Path("nowhere") / "double" / label), InferenceConfig())


def model() -> ServedModel:
    """The model `double`, with version 1 active before any decision."""
    return ServedModel("double", version("1"))


def active_versions(
    verify: Verifier | None = None, *, deployments: DeploymentStore | None = None, is_pinned: bool = False
) -> ActiveVersions:
    """A worker's active versions; without a store it remembers nothing."""
    metrics = InferenceMetrics((0.1, 1.0))
    return ActiveVersions(deployments or NullDeploymentStore(), verify, metrics, is_pinned=is_pinned)


def refused(metrics: InferenceMetrics) -> float:
    """How many records the metrics count as refused."""
    return sum(
        sample.value
        for family in metrics.collect()
        if family.name == "penstock_quarantined"
        for sample in family.samples
    )


def decision(epoch: int, operator: OperatorKey | None = None, *, label: str = "2", name: str = "double") -> bytes:
    """The record of a decision as a delivery carries it; unsigned without an operator."""
    sealed = Deployment(epoch, name, label, "ab" * 32).seal(operator.sign if operator else None)
    return b"%d %s" % (epoch, sealed)


def test_an_accepted_decision_is_returned_and_noted():
    """The model holds the record and the decision; the caller decides which version becomes active."""
    versions, served = active_versions(), model()
    accepted = versions.accept(served, decision(3))
    assert accepted == served.deployment == Deployment(3, "double", "2", "ab" * 32)
    assert served.record == served.decided == decision(3)
    assert served.label == "1"


def test_the_latest_epoch_stays_in_force():
    """An older record is noted as the broker's and is not followed; the same epoch and a later one are followed."""
    versions, served = active_versions(), model()
    versions.accept(served, decision(3))
    assert versions.accept(served, decision(2, label="1")) is None
    assert (served.record, served.decided) == (decision(2, label="1"), decision(3))
    for epoch in (3, 4):
        accepted = versions.accept(served, decision(epoch))
        assert accepted is not None
        assert accepted.epoch == epoch


@pytest.mark.parametrize("kind", ["garbage", "unsigned", "an untrusted key's", "another model's", "another epoch's"])
def test_an_unreadable_record_is_refused_and_counted(tmp_path: Path, operator: OperatorKey, kind: str):
    """The earlier decision stays in force, and the metrics count one refused record."""
    metrics = InferenceMetrics((0.1, 1.0))
    versions = ActiveVersions(NullDeploymentStore(), trust(operator), metrics, is_pinned=False)
    served = model()
    versions.accept(served, decision(3, operator))
    record = {
        "garbage": b"4 rubbish",
        "unsigned": decision(4),
        "an untrusted key's": decision(4, OperatorKey.generate(tmp_path / "other.pem")),
        "another model's": decision(4, operator, name="other"),
        "another epoch's": b"9" + decision(4, operator)[1:],
    }[kind]
    assert versions.accept(served, record) is None
    assert served.deployment is not None
    assert (served.deployment.epoch, served.decided) == (3, decision(3, operator))
    assert refused(metrics) == 1


def test_no_record_is_no_fault():
    """An empty record means that no version was promoted: nothing is followed, and nothing is counted as refused."""
    metrics = InferenceMetrics((0.1, 1.0))
    versions = ActiveVersions(NullDeploymentStore(), None, metrics, is_pinned=False)
    assert versions.accept(model(), b"") is None
    assert refused(metrics) == 0


def test_a_pinned_version_ignores_decisions():
    """The settings name the active version: a record is noted only, and a refused one does not stop the version."""
    versions, served = active_versions(is_pinned=True), model()
    assert versions.accept(served, decision(3)) is None
    assert (served.record, served.deployment, served.decided) == (decision(3), None, b"")
    versions.check_start(served, b"")
    assert served.label == "1"


def test_where_operators_sign_a_job_loads_approved_versions_only(operator: OperatorKey):
    """After the first promotion these are the active version, a version with registered or promoted content, and a
    requested one."""
    versions, served = active_versions(trust(operator)), model()
    draft, registered, requested = version("2"), version("3"), version("4")
    registered.pin_content("ab" * 32)
    requested.is_wanted = True
    assert versions.may_be_loaded(served, draft), "before the first promotion any version may be loaded"
    versions.accept(served, decision(3, operator))
    assert served.active is not None
    candidates = (served.active, draft, registered, requested)
    loadable = [each.label for each in candidates if versions.may_be_loaded(served, each)]
    assert loadable == ["1", "3", "4"]


@pytest.mark.parametrize("kind", ["unsigned", "pinned", "refused"])
def test_a_draft_may_be_loaded_unless_a_signed_decision_is_in_force(operator: OperatorKey, kind: str):
    """Without signatures and with a pinned version it may. A refused record counts as a decision: it may not."""
    verify = None if kind == "unsigned" else trust(operator)
    versions, served = active_versions(verify, is_pinned=kind == "pinned"), model()
    versions.accept(served, decision(3, operator) if kind == "pinned" else decision(3))
    assert versions.may_be_loaded(served, version("2")) is (kind != "refused")
    assert versions.are_signed is (kind != "unsigned")


def test_after_a_refused_record_at_the_start_no_version_is_active(operator: OperatorKey):
    """The promoted version is unknown, and the highest version on disk may be a draft."""
    versions, served = active_versions(trust(operator)), model()
    versions.accept(served, decision(3))
    versions.check_start(served, b"")
    assert (served.active, served.is_claimable) == (None, False)


@pytest.mark.parametrize("broker_has", ["nothing", "an older decision", "the same decision"])
def test_a_start_reports_a_broker_that_lost_a_decision(operator: OperatorKey, caplog, broker_has: str):
    """The later decision stays in force; the log names its epoch once, unless the broker has the same decision."""
    last = decision(7, operator)
    record = {"nothing": b"", "an older decision": decision(6, operator), "the same decision": last}[broker_has]
    versions, served = active_versions(trust(operator)), model()
    for each in (last, record):
        versions.accept(served, each)
    versions.check_start(served, last)
    assert served.decided == last
    assert served.label == "1"
    errors = [entry.__dict__["epoch"] for entry in caplog.records if entry.levelname == "ERROR"]
    assert errors == ([] if broker_has == "the same decision" else [7])


def test_each_decision_is_written_once(tmp_path: Path, operator: OperatorKey):
    """A repeated call writes nothing; a later decision replaces the one that was written."""
    versions = active_versions(trust(operator), deployments=FileDeploymentStore(tmp_path / "kept", trust(operator)))
    served = model()
    versions.remember({"double": served})
    assert versions.last(served) == b"", "there is no decision yet"
    for epoch in (3, 4):
        versions.accept(served, decision(epoch, operator))
        versions.remember({"double": served})
        assert versions.last(served) == decision(epoch, operator)
    (tmp_path / "kept" / "double.active").unlink()
    versions.remember({"double": served})
    assert versions.last(served) == b""


def test_a_write_is_tried_again(tmp_path: Path, operator: OperatorKey, caplog):
    """While another worker writes, without a warning; while the folder cannot be written, with one warning."""
    folder = tmp_path / "kept"
    versions = active_versions(trust(operator), deployments=FileDeploymentStore(folder, trust(operator)))
    served = model()
    folder.mkdir()
    other = os.open(folder, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    versions.accept(served, decision(3, operator))
    versions.remember({"double": served})
    assert (versions.last(served), caplog.text) == (b"", "")
    os.close(other)
    folder.rmdir()
    folder.write_text("in its place")
    for _ in range(2):
        versions.remember({"double": served})
    assert caplog.text.count("will be forgotten") == 1
    folder.unlink()
    versions.remember({"double": served})
    assert versions.last(served) == decision(3, operator)
