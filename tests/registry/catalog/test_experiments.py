"""Experiments in the registry: one open per model, each change an epoch, and what an open one forbids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.registry.catalog import ModelStage
from penstock.registry.catalog.stages import TransitionAction
from penstock.registry.catalog.store import SqlStore, enter
from penstock.registry.catalog.tables import Experiment
from penstock.registry.deployment import DeployedArm
from penstock.registry.errors import BadSignature, ContentChanged, TransitionConflict, TransitionRefused, UnknownModel
from penstock.registry.package import load_package
from penstock.safety.operator_key import PublicKeys
from tests.registry.catalog.catalogs import Catalog, new_key
from tests.registry.catalog.test_catalog import catalog as catalog
from tests.registry.catalog.test_store import Overheard


def experiment_of(catalog: Catalog, candidate: str = "2", share: float = 0.1) -> Experiment:
    """A rollout to be begun."""
    found = {version.version: version for version in catalog.client.versions(catalog.name)}
    arms = tuple(
        DeployedArm(label, found[label].content_hash, weight)
        for label, weight in ((candidate, share), ("1", 1 - share))
    )
    plan, state = {"candidate": candidate}, {"step": 0}
    return Experiment(catalog.name, "e-1", "rollout", "running", 0, arms, "weighted", plan, state, "", "", "")


@pytest.fixture
def stocked(catalog: Catalog) -> Catalog:
    """Version 1 in production, 2 in staging, 3 a draft."""
    catalog.put("1", ModelStage.PRODUCTION)
    catalog.put("2", ModelStage.STAGING)
    catalog.put("3")
    return catalog


def test_experiment_is_stored_with_an_epoch_of_its_own(stocked: Catalog):
    """Any process reads it as it was written; the history names the change, and no stage has changed."""
    stages = stocked.stages()
    before = stocked.client.history(stocked.name)[-1].epoch
    begun = stocked.client.begin_experiment(experiment_of(stocked), reason="a try")
    assert begun.epoch == before + 1
    assert stocked.reopened().experiment(stocked.name) == begun
    assert stocked.client.find(stocked.name).epoch == begun.epoch
    last = stocked.client.history(stocked.name)[-1]
    assert (last.action, last.version, last.reason, last.epoch) == (TransitionAction.ROUTE, "1", "a try", begun.epoch)
    assert not last.enters_production
    assert stocked.stages() == stages
    changed = stocked.client.change_experiment(begun, replace(begun, state={"step": 1}))
    assert (changed.epoch, changed.state, changed.begun_at) == (before + 2, {"step": 1}, begun.begun_at)
    assert stocked.reopened().experiments(stocked.name) == (changed,)


def test_a_state_is_made_from_the_epoch_that_stores_it(stocked: Catalog):
    """The epoch of a change follows all changes of the model, also those that leave the experiment as it was."""
    begun = stocked.client.begin_experiment(experiment_of(stocked))
    policy = stocked.client.set_policy(stocked.name, "infer", {"window_ms": 5})
    changed = stocked.client.change_experiment(begun, begun, state_at=lambda epoch: {"from_epoch": epoch})
    assert changed.state == {"from_epoch": policy.epoch + 1}
    assert changed.epoch == policy.epoch + 1
    assert stocked.reopened().experiment(stocked.name) == changed


def test_one_experiment_at_a_time(stocked: Catalog):
    """The second is refused with the first one's arms, and nothing changes; after its end there may be another."""
    begun = stocked.client.begin_experiment(experiment_of(stocked))
    second = replace(experiment_of(stocked), experiment="e-2")
    with pytest.raises(TransitionRefused, match=r"the rollout of .* \(2=0.1, 1=0.9\) is under way since .* stop"):
        stocked.reopened().begin_experiment(second)
    assert stocked.client.experiments(stocked.name) == (begun,)
    ended = stocked.client.change_experiment(begun, replace(begun, status="stopped"))
    assert (stocked.client.experiment(stocked.name), ended.routing) == (None, None)
    assert stocked.client.begin_experiment(second).experiment == "e-2"


def test_change_of_a_state_that_is_not_the_present_one_is_refused(stocked: Catalog):
    """Of two drivers that decide at once, one is told."""
    begun = stocked.client.begin_experiment(experiment_of(stocked))
    stocked.reopened().change_experiment(begun, replace(begun, state={"step": 1}))
    with pytest.raises(TransitionConflict, match="was changed meanwhile"):
        stocked.client.change_experiment(begun, replace(begun, state={"step": 9}))
    found = stocked.client.experiment(stocked.name)
    assert found is not None
    assert found.state == {"step": 1}


def test_what_gets_no_traffic(stocked: Catalog):
    """A draft, changed files, a veto, a model without production: refused before anything is written."""
    with pytest.raises(TransitionRefused, match=r"3 is in draft and gets no traffic\. Expected it in staging"):
        stocked.client.begin_experiment(experiment_of(stocked, "3"))
    vetoing = stocked.reopened(gate=lambda change: "not today" if change.version.version == "2" else None)
    with pytest.raises(TransitionRefused, match="2 stays in staging, refused by the gate: not today"):
        vetoing.begin_experiment(experiment_of(stocked))
    model = stocked.root / stocked.name / "2" / "model.py"
    model.write_text(model.read_text() + "\n")
    with pytest.raises(ContentChanged):
        stocked.client.begin_experiment(experiment_of(stocked))
    assert stocked.client.experiments(stocked.name) == ()
    assert stocked.client.history(stocked.name)[-1].action is not TransitionAction.ROUTE


def test_without_production_there_is_no_experiment(catalog: Catalog):
    """There would be no version to go back to."""
    catalog.put("1", ModelStage.STAGING)
    catalog.put("2", ModelStage.STAGING)
    with pytest.raises(UnknownModel, match="no version in production"):
        catalog.client.begin_experiment(experiment_of(catalog))


def test_open_experiment_forbids_changes_of_its_versions(stocked: Catalog):
    """Promotions to production, rollbacks and demotions of an arm wait for its end; other versions move."""
    begun = stocked.client.begin_experiment(experiment_of(stocked))
    client, name = stocked.client, stocked.name
    for change in (
        lambda: client.promote(name, "2", ModelStage.PRODUCTION),
        lambda: client.demote(name, "2"),
    ):
        with pytest.raises(TransitionRefused, match=r"is under way\. Expected `penstock rollout stop"):
            change()
    client.promote(name, "3", ModelStage.STAGING)
    with pytest.raises(TransitionRefused, match="is under way"):
        client.promote(name, "3", ModelStage.PRODUCTION)
    client.change_experiment(begun, replace(begun, status="stopped"))
    client.promote(name, "3", ModelStage.PRODUCTION)


def test_promotion_completes_its_experiment_in_one_step(stocked: Catalog):
    """The candidate enters production and the experiment ends with it, or neither."""
    begun = stocked.client.begin_experiment(experiment_of(stocked))
    completed = replace(begun, status="completed")
    vetoing = stocked.reopened(gate=lambda change: "not today")
    with pytest.raises(TransitionRefused, match="not today"):
        vetoing.promote(stocked.name, "2", ModelStage.PRODUCTION, completes=completed)
    assert stocked.client.experiment(stocked.name) == begun
    transition = stocked.client.promote(stocked.name, "2", ModelStage.PRODUCTION, completes=completed)
    assert (transition.replaced, stocked.client.find(stocked.name).version) == ("1", "2")
    (ended,) = stocked.client.experiments(stocked.name)
    assert (ended.status, ended.epoch, ended.routing) == ("completed", transition.epoch, None)


@pytest.fixture
def signed(registry_url: str, models_root: Path, slot: str) -> tuple[Catalog, PublicKeys]:
    """A registry whose rows are signed, with an open experiment."""
    key = new_key()
    trusted = PublicKeys.parse(key.public_text)
    catalog = Catalog(registry_url, models_root, slot, {"sign": key.sign, "verify": trusted.verify})
    catalog.put("1", ModelStage.PRODUCTION)
    catalog.put("2", ModelStage.STAGING)
    return catalog, trusted


def test_experiment_is_signed_and_signed_again_with_a_new_key(signed: tuple[Catalog, PublicKeys]):
    """A row that another key signed is refused; `renew` gives it the new signature and keeps it open."""
    catalog, _ = signed
    begun = catalog.client.begin_experiment(experiment_of(catalog))
    other = new_key()
    stranger = catalog.reopened(verify=PublicKeys.parse(other.public_text).verify)
    with pytest.raises(BadSignature):
        stranger.experiment(catalog.name)
    rotating = catalog.reopened(sign=other.sign, verify=None)
    rotating.renew(catalog.name)
    found = stranger.experiment(catalog.name)
    assert found is not None
    assert (found.state, found.arms) == (begun.state, begun.arms)


def test_change_of_an_experiment_is_entered_for_a_remote_operator(signed: tuple[Catalog, PublicKeys]):
    """A worker writes signed rows: the transition and the experiment together, once."""
    catalog, trusted = signed
    heard = Overheard(catalog.url)
    remote = catalog.reopened(store=heard)
    begun = remote.begin_experiment(experiment_of(catalog))
    rows = (heard.versions, heard.transitions, heard.experiments)

    def rehash(source: str):
        return load_package(Path(source)).manifest()

    for _ in range(2):
        enter(SqlStore(catalog.url), *rows, verify=trusted.verify, rehash=rehash)
    assert catalog.client.experiment(catalog.name) == begun
    forged = [{**heard.experiments[0], "state": '{"step":5}'}]
    with pytest.raises(BadSignature):
        enter(SqlStore(catalog.url), heard.versions, heard.transitions, forged, verify=trusted.verify, rehash=rehash)
