"""The model registry on SQLite and PostgreSQL: versions, stages, lineage, history, rollback, and who is told."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from sqlalchemy.exc import DBAPIError

from penstock.registry.catalog import (
    HISTORY,
    Change,
    ModelLineage,
    ModelRegistryClient,
    ModelStage,
    RegisteredVersion,
    Transition,
)
from penstock.registry.catalog.stages import TransitionAction, check_step
from penstock.registry.errors import (
    ContentChanged,
    InvalidInput,
    PenstockError,
    TransitionConflict,
    TransitionRefused,
    UnknownModel,
)
from penstock.registry.package import Package, load_package
from penstock.registry.package.manifest import Manifest
from tests.registry.catalog.catalogs import SOURCE, Catalog, new_key, productions
from tests.servers import ROOT

DRAFT, STAGING, PRODUCTION, ARCHIVED = ModelStage

LINEAGE = ModelLineage(
    data_version="reviews-2026-10",
    code_hash="3f2a91c",
    hyperparameters={"rate": 0.001, "layers": [128, 64], "name": "größer", "warm": True, "seed": None},
    training_metrics={"accuracy": 0.9731, "loss": 1e-7},
    parent_model="minilm/1",
)


@pytest.fixture
def catalog(registry_url: str, models_root: Path, slot: str) -> Catalog:
    """A model without versions."""
    return Catalog(registry_url, models_root, slot)


def test_registered_version_is_its_content(catalog: Catalog):
    """AR-018: the version is the SHA-256 of its files; one byte more is another version."""
    package = catalog.package("1")
    first = catalog.client.register(package)
    assert first.content_hash == package.manifest().content_hash
    assert first.stage is DRAFT
    assert set(first.files) == {"model.yaml", "model.py"}
    assert first.spec["entrypoint"] == "model:build"
    catalog.package("2")
    with (catalog.root / catalog.name / "2" / "model.py").open("a") as file:
        file.write("#")
    second = catalog.client.register(catalog.package("2"))
    assert second.content_hash != first.content_hash
    assert catalog.reopened().versions(catalog.name) == (first, second)
    assert catalog.name in catalog.client.models()


def test_registering_again_changes_nothing(catalog: Catalog):
    """The same content under the same label is the version that is there, wherever it stands by now."""
    catalog.put("1", STAGING)
    before = catalog.client.history(catalog.name)
    assert catalog.client.register(catalog.package("1")) == catalog.client.find(catalog.name, "1")
    assert catalog.client.register(catalog.package("1")).stage is STAGING
    assert catalog.client.history(catalog.name) == before


def test_label_belongs_to_one_content(catalog: Catalog):
    """Changed files under a known label are refused, with the file that changed; so is a label with a meaning."""
    catalog.put("1")
    (catalog.root / catalog.name / "1" / "model.py").write_text(SOURCE + "# changed\n")
    with pytest.raises(InvalidInput, match=r"/1: file model\.py is not as it was registered.*need another label"):
        catalog.client.register(catalog.package("1"))
    with pytest.raises(InvalidInput, match="names the version in production"):
        catalog.client.register(catalog.package("latest"))
    assert catalog.stages() == {"1": DRAFT}


def test_content_has_one_label(catalog: Catalog):
    """Two labels for one content would make one of them a lie: the second is refused."""
    catalog.put("1")
    first = catalog.client.find(catalog.name, "1")
    package = catalog.package("2")
    manifest = replace(package.manifest(), content_hash=first.content_hash)
    thread_copy = _Fixed(package, manifest)
    with pytest.raises(InvalidInput, match="registered already as version 1"):
        catalog.client.register(thread_copy)  # no two folders have the same content
    assert catalog.stages() == {"1": DRAFT}


class _Fixed:
    """A package whose manifest is given: SHA-256 has no collisions to test with."""

    def __init__(self, package: Package, manifest: Manifest) -> None:
        self.spec, self.folder, self._manifest = package.spec, package.folder, manifest

    def manifest(self) -> Manifest:
        """What was given."""
        return self._manifest


def _reach(catalog: Catalog, stage: ModelStage) -> None:
    # Another version is in production, so that only the rules decide.
    catalog.put("other", PRODUCTION)
    if stage is PRODUCTION:
        catalog.put("mine", PRODUCTION)
        catalog.put("later", STAGING)
    else:
        catalog.put("mine", stage)


ALLOWED = {
    (DRAFT, STAGING): {"promote"},
    (DRAFT, ARCHIVED): {"demote"},
    (STAGING, DRAFT): {"demote"},
    (STAGING, PRODUCTION): {"promote", "rollback"},
    (STAGING, ARCHIVED): {"demote"},
    (ARCHIVED, STAGING): {"promote"},
    (ARCHIVED, PRODUCTION): {"rollback"},
}


@pytest.mark.parametrize(("before", "after"), [*product(ModelStage, ModelStage)], ids=lambda stage: stage.value)
def test_every_step_between_stages(before: ModelStage, after: ModelStage, catalog: Catalog):
    """AR-020: each of the 16 steps, by promote and by demote: done when allowed, else refused and nothing changed."""
    _reach(catalog, before)
    stages = catalog.stages()
    for action, step in (("promote", catalog.client.promote), ("demote", catalog.client.demote)):
        if action in ALLOWED.get((before, after), ()):
            done = step(catalog.name, "mine", after)
            assert (done.before, done.after) == (before, after)
            assert catalog.stages() == {**stages, "mine": after, **({"other": ARCHIVED} if after is PRODUCTION else {})}
            return
        with pytest.raises(TransitionRefused, match=rf"/mine is in {before}( already$|.*Expected)"):
            step(catalog.name, "mine", after)
    assert catalog.stages() == stages


@pytest.mark.parametrize("action", TransitionAction)
def test_rules_allow_what_the_table_says_and_no_more(action: TransitionAction):
    """AR-020: all 16 steps under every action, rollback included."""
    for before, after in product(ModelStage, ModelStage):
        if action in ALLOWED.get((before, after), ()):
            check_step("m/1", action, before, after)
        else:
            with pytest.raises(TransitionRefused):
                check_step("m/1", action, before, after)


def test_promoting_archives_the_one_before(catalog: Catalog):
    """AR-082: one version is in production; the step that brings the next one says which it replaced."""
    catalog.put("1", PRODUCTION)
    catalog.put("2", STAGING)
    done = catalog.client.promote(catalog.name, "2", "production")
    assert (done.replaced, done.productions) == ("1", ("1", "2"))
    assert catalog.stages() == {"1": ARCHIVED, "2": PRODUCTION}


def test_database_itself_forbids_two_in_production(catalog: Catalog):
    """AR-082: SQL that goes past the client meets the unique index."""
    catalog.put("1", PRODUCTION)
    catalog.put("2", STAGING)
    with pytest.raises(DBAPIError, match=r"(?i)unique"):
        catalog.execute("UPDATE penstock_versions SET stage = 'production' WHERE name = :name AND version = '2'")
    assert catalog.stages() == {"1": PRODUCTION, "2": STAGING}


def test_two_rollbacks_go_back_two_versions(catalog: Catalog):
    """AR-022, AR-084: v1, v2, v3, then v2, then v1 again; then there is nothing to go back to."""
    for version in "123":
        catalog.put(version, PRODUCTION)
    back = catalog.client.rollback(catalog.name, reason="worse answers")
    assert (back.action, back.version, back.replaced, back.reason) == (
        TransitionAction.ROLLBACK,
        "2",
        "3",
        "worse answers",
    )
    assert back.content_hash == catalog.client.find(catalog.name, "2").content_hash
    assert catalog.stages() == {"1": ARCHIVED, "2": PRODUCTION, "3": ARCHIVED}
    assert catalog.client.rollback(catalog.name).version == "1"
    assert catalog.stages() == {"1": PRODUCTION, "2": ARCHIVED, "3": ARCHIVED}
    with pytest.raises(TransitionRefused, match="no earlier production version"):
        catalog.client.rollback(catalog.name)
    assert [*productions(catalog.client.history(catalog.name))][-3:] == ["3", "2", "1"]


def test_rollback_after_a_rollback_forgets_what_was_undone(catalog: Catalog):
    """After v1, v2, back to v1, and v3, a rollback goes to v1 and not to v2."""
    catalog.put("1", PRODUCTION)
    catalog.put("2", PRODUCTION)
    catalog.client.rollback(catalog.name)
    catalog.put("3", PRODUCTION)
    assert catalog.client.rollback(catalog.name).version == "1"


def test_version_may_be_in_production_twice(catalog: Catalog):
    """An archived version goes through staging again; rollbacks go back through both of its times."""
    catalog.put("1", PRODUCTION)
    catalog.put("2", PRODUCTION)
    catalog.client.promote(catalog.name, "1", STAGING)
    assert catalog.client.promote(catalog.name, "1", PRODUCTION).productions == ("1", "2", "1")
    assert [catalog.client.rollback(catalog.name).version for _ in range(2)] == ["2", "1"]


def test_rollback_of_nothing(catalog: Catalog):
    """A model that was never in production has nothing to go back to."""
    catalog.put("1", STAGING)
    with pytest.raises(TransitionRefused, match="no earlier production version"):
        catalog.client.rollback(catalog.name)


def test_history_keeps_a_hundred_productions(models_root: Path, tmp_path: Path, slot: str):
    """AR-083: of 101 promotions 100 are remembered, and 99 rollbacks go back through them to the oldest."""
    manifests: dict[str, Manifest] = {}
    catalog = Catalog(
        f"sqlite:///{tmp_path}/registry.db", models_root, slot, {"rehash": lambda source: manifests[source]}
    )
    for version in "123":
        manifests[str(catalog.package(version).folder)] = catalog.package(version).manifest()
        catalog.put(version)
    for number in range(HISTORY + 1):
        for step in (STAGING, PRODUCTION):
            catalog.client.promote(slot, "123"[number % 3], step)
    history = catalog.client.history(slot)
    entered = tuple(step.version for step in history if step.enters_production)
    assert len(entered) == HISTORY == 100
    assert entered == tuple("123"[number % 3] for number in range(1, HISTORY + 1))
    assert history[-1].productions == entered
    assert [step.epoch for step in history] == [*range(history[0].epoch, 3 + 2 * (HISTORY + 1) + 1)]
    assert tuple(catalog.client.rollback(slot).version for _ in entered[1:]) == entered[-2::-1]
    with pytest.raises(TransitionRefused, match="no earlier"):
        catalog.client.rollback(slot)


def test_epoch_grows_with_every_change(catalog: Catalog):
    """Every change has a number of its own, one more than the last; a refused one has none."""
    catalog.put("1", PRODUCTION)
    catalog.put("2", STAGING)
    catalog.client.demote(catalog.name, "2")
    with pytest.raises(TransitionRefused):
        catalog.client.demote(catalog.name, "1")
    done = catalog.client.describe(catalog.name, "2", LINEAGE)
    history = catalog.client.history(catalog.name)
    assert [step.epoch for step in history] == [*range(1, 8)]
    assert history[-1] == done
    assert catalog.client.find(catalog.name, "2").epoch == 7
    assert catalog.client.find(catalog.name).epoch == 3


def test_lineage_survives_a_restart(registry_url: str, models_root: Path, slot: str):
    """AR-019, AR-081: another process reads every field as it was told."""
    catalog = Catalog(registry_url, models_root, slot)
    catalog.client.register(catalog.package("1"), LINEAGE)
    program = (
        "import sys; from penstock.registry.catalog import ModelRegistryClient as C; "
        "print(C(sys.argv[1]).lineage(*sys.argv[2:]).model_dump_json())"
    )
    told = subprocess.run(
        [sys.executable, "-c", program, registry_url, slot, "1"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ModelLineage.model_validate_json(told.stdout) == LINEAGE


def test_lineage_is_frozen_by_production(catalog: Catalog):
    """AR-081: it may be corrected until the version was in production, and never again: not by SQL, nor archived."""
    catalog.client.register(catalog.package("1"), LINEAGE)
    better = LINEAGE.model_copy(update={"data_version": "reviews-2026-11"})
    catalog.client.describe(catalog.name, "1", better)
    assert catalog.client.lineage(catalog.name, "1") == better
    catalog.put("1", PRODUCTION)
    for stage in (PRODUCTION, ARCHIVED):
        assert catalog.stages()["1"] is stage
        with pytest.raises(TransitionRefused, match="froze its lineage"):
            catalog.client.describe(catalog.name, "1", LINEAGE)
        with pytest.raises(DBAPIError, match="content is frozen"):
            catalog.execute("UPDATE penstock_versions SET lineage = '{}' WHERE name = :name AND version = '1'")
        with pytest.raises(DBAPIError, match="content is frozen"):
            catalog.execute("UPDATE penstock_versions SET released_at = NULL WHERE name = :name AND version = '1'")
        if stage is PRODUCTION:
            catalog.put("2", PRODUCTION)
    assert catalog.client.lineage(catalog.name, "1") == better


def test_content_is_frozen_in_the_database(catalog: Catalog):
    """AR-018: no statement gives a registered version another content."""
    catalog.put("1")
    with pytest.raises(DBAPIError, match="content is frozen"):
        catalog.execute("UPDATE penstock_versions SET content_hash = :other WHERE name = :name", other="0" * 64)


def test_registering_with_another_lineage_is_refused(catalog: Catalog):
    """Only `describe` changes a lineage; saying nothing, or the same again, is fine."""
    catalog.client.register(catalog.package("1"), LINEAGE)
    assert catalog.client.register(catalog.package("1")).lineage == LINEAGE
    assert catalog.client.register(catalog.package("1"), LINEAGE).lineage == LINEAGE
    with pytest.raises(InvalidInput, match="another lineage"):
        catalog.client.register(catalog.package("1"), ModelLineage(code_hash="other"))


def test_approver_sees_every_step_and_may_veto_it(catalog: Catalog):
    """AR-020: who approves is asked before each change of a stage, with what it would replace."""
    seen: list[Change] = []
    vetoed = {PRODUCTION: "not on a Friday"}

    def approve(change: Change) -> str | None:
        seen.append(change)
        return vetoed.get(change.after)

    client = catalog.reopened(approve=approve)
    catalog.put("1", PRODUCTION)
    catalog.put("2", STAGING, client)
    with pytest.raises(TransitionRefused, match=r"/2 stays in staging, refused by the approver: not on a Friday"):
        client.promote(catalog.name, "2", PRODUCTION, reason="faster")
    asked = [(each.version.version, each.version.stage, each.after) for each in seen]
    assert asked == [("2", DRAFT, STAGING), ("2", STAGING, PRODUCTION)]
    assert seen[-1].replaces == catalog.client.find(catalog.name, "1")
    assert seen[-1].reason == "faster"
    assert catalog.stages() == {"1": PRODUCTION, "2": STAGING}
    vetoed.clear()
    client.promote(catalog.name, "2", PRODUCTION)
    vetoed[PRODUCTION] = "ask first"
    with pytest.raises(TransitionRefused, match="ask first"):
        client.rollback(catalog.name)
    assert catalog.stages() == {"1": ARCHIVED, "2": PRODUCTION}


def test_gate_is_asked_before_production_only(catalog: Catalog):
    """The gate judges what is promoted to production; a rollback restores what has passed it."""
    asked: list[str] = []

    def gate(change: Change) -> str | None:
        asked.append(change.version.version)
        return "cosine 0.97" if change.version.version == "bad" else None

    client = catalog.reopened(gate=gate)
    catalog.put("1", PRODUCTION, client)
    catalog.put("2", PRODUCTION, client)
    catalog.put("bad", STAGING, client)
    with pytest.raises(TransitionRefused, match="refused by the gate: cosine"):
        client.promote(catalog.name, "bad", PRODUCTION)
    client.rollback(catalog.name)
    assert asked == ["1", "2", "bad"]
    assert catalog.stages() == {"1": PRODUCTION, "2": ARCHIVED, "bad": STAGING}


def test_every_change_is_audited_before_it_is_committed(catalog: Catalog):
    """What cannot be recorded does not happen; what happens is recorded once, refused attempts are not."""
    recorded: list[Transition] = []
    client = catalog.reopened(audit=recorded.append, actor="ada")
    catalog.put("1", PRODUCTION, client)
    with pytest.raises(TransitionRefused):
        client.rollback(catalog.name)
    assert tuple(recorded) == client.history(catalog.name)
    assert {step.actor for step in recorded} == {"ada"}

    def full(_: Transition) -> None:
        raise OSError("no space left on device")

    catalog.put("2", STAGING)
    with pytest.raises(OSError, match="no space"):
        catalog.reopened(audit=full).promote(catalog.name, "2", PRODUCTION)
    assert catalog.stages() == {"1": PRODUCTION, "2": STAGING}
    assert len(catalog.client.history(catalog.name)) == 5


def test_every_change_tells_that_it_is_committed(catalog: Catalog):
    """Once for each, after it is recorded: the audit log stores its end then, also for new signatures."""
    told: list[str] = []
    client = catalog.reopened(
        sign=new_key().sign, audit=lambda change: told.append(str(change.action)), committed=lambda: told.append("done")
    )
    catalog.put("1", PRODUCTION, client)
    client.set_policy(catalog.name, "infer", {"window_ms": 5})
    client.renew(catalog.name)
    assert told == [
        word for action in ("register", "promote", "promote", "policy", "sign") for word in (action, "done")
    ]


def test_change_is_seen_when_it_is_committed(catalog: Catalog):
    """Readers wait for no writer, and see what was there before its commit."""
    seen: list[str] = []
    catalog.put("1", PRODUCTION)
    catalog.put("2", STAGING)
    reader = catalog.reopened()
    writer = catalog.reopened(audit=lambda _: seen.append(reader.find(catalog.name).version))
    writer.promote(catalog.name, "2", PRODUCTION)
    assert seen == ["1"]
    assert reader.find(catalog.name).version == "2"


def test_listeners_are_told_of_every_change_of_production_once(catalog: Catalog):
    """AR-080: (name, content before, content now) after the commit, to every callback, also when one fails."""
    told: list[tuple[str, str | None, str]] = []

    def broken(*_: object) -> None:
        raise ValueError("a listener's own problem")

    catalog.client.on_version_change(broken)
    catalog.client.on_version_change(lambda *change: told.append(change))
    catalog.put("1", PRODUCTION)
    catalog.put("2", PRODUCTION)
    catalog.client.rollback(catalog.name)
    first, second = (catalog.client.find(catalog.name, version).content_hash for version in "12")
    assert told == [(catalog.name, None, first), (catalog.name, first, second), (catalog.name, second, first)]


def test_latest_is_the_version_in_production(catalog: Catalog):
    """CX-014: not the highest label, nor the newest one."""
    catalog.put("1", PRODUCTION)
    catalog.put("3", STAGING)
    assert catalog.client.find(catalog.name).version == "1"
    assert catalog.client.find(catalog.name, "latest").version == "1"
    catalog.client.promote(catalog.name, "3", PRODUCTION)
    assert catalog.client.find(catalog.name, "latest").version == "3"


def test_latest_without_production(catalog: Catalog):
    """CX-014: the error says what there is."""
    catalog.put("1", STAGING)
    with pytest.raises(UnknownModel, match=r"has no version in production. There are: 1 \(staging, [0-9a-f]{8}\)"):
        catalog.client.find(catalog.name)


def test_version_is_named_by_its_label_or_its_hash(catalog: Catalog):
    """A label, the whole hash, or six digits of it and more; fewer digits name nothing."""
    catalog.put("1")
    catalog.put("2.0-rc1")
    for version in catalog.client.versions(catalog.name):
        for wanted in (version.version, version.content_hash, version.content_hash[:6]):
            assert catalog.client.find(catalog.name, wanted) == version
        with pytest.raises(UnknownModel, match=r"Expected one of: 1 \(draft"):
            catalog.client.find(catalog.name, version.content_hash[:5])


def test_shared_hash_prefix_is_refused(catalog: Catalog):
    """Six digits that begin two hashes name neither, and the error names both labels."""
    for version, end in (("1", "1"), ("2", "2")):
        package = catalog.package(version)
        fixed = _Fixed(package, replace(package.manifest(), content_hash="abcdef" + end * 58))
        catalog.client.register(fixed)
    with pytest.raises(InvalidInput, match=r"'abcdef' begins the hash of several versions of .*: 1, 2"):
        catalog.client.find(catalog.name, "abcdef")
    assert catalog.client.find(catalog.name, "abcdef1").version == "1"


@pytest.mark.parametrize(
    ("call", "error", "told"),
    [
        (
            lambda client, name: client.find("no-such-model"),
            UnknownModel,
            "Unknown model 'no-such-model'. Registered: ",
        ),
        (lambda client, name: client.find(name, "9"), UnknownModel, r"Unknown version '9' of .* Expected one of: 1 \("),
        (lambda client, name: client.promote(name, "1", "live"), InvalidInput, "Unknown stage 'live'. Expected one of"),
        (lambda client, name: client.find("../etc"), InvalidInput, "Bad model name"),
        (lambda client, name: client.find(name, "x\0y" * 1000), UnknownModel, "Unknown version"),
        (lambda client, name: client.rollback(name, reason="a\nb"), TransitionRefused, "no earlier"),
        (lambda client, name: client.promote(name, "1", STAGING, reason="a\nb"), InvalidInput, "Bad reason"),
        (lambda client, name: client.promote(name, "1", STAGING, reason="x" * 501), InvalidInput, "at most 500"),
        (lambda client, name: client.history("no-such-model"), UnknownModel, "Unknown model"),
        (lambda client, name: client.describe("no-such-model", "1", LINEAGE), UnknownModel, "Unknown model"),
    ],
)
def test_what_does_not_exist_is_told_with_what_does(call, error: type[PenstockError], told: str, catalog: Catalog):
    """One line, what was asked for and what there is; nothing is changed."""
    catalog.put("1")
    with pytest.raises(error, match=told) as refused:
        call(catalog.client, catalog.name)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000
    assert catalog.stages() == {"1": DRAFT}


def test_changed_files_are_found_and_never_promoted(catalog: Catalog):
    """AR-021: one byte more in a file, and neither verify nor promote nor rollback takes the version."""
    catalog.put("1", PRODUCTION)
    catalog.put("2", PRODUCTION)
    catalog.put("3", STAGING)
    assert catalog.client.verify(catalog.name, "3").version == "3"
    for version in "13":
        with (catalog.root / catalog.name / version / "model.py").open("a") as file:
            file.write("#")
    for call in (
        lambda: catalog.client.verify(catalog.name, "3"),
        lambda: catalog.client.promote(catalog.name, "3", PRODUCTION),
        lambda: catalog.client.rollback(catalog.name),
    ):
        with pytest.raises(ContentChanged, match=r"file model\.py is not as it was registered"):
            call()
    assert catalog.stages() == {"1": ARCHIVED, "2": PRODUCTION, "3": STAGING}


def test_missing_files_are_never_promoted(catalog: Catalog):
    """A version whose folder is gone says so, with no path of this machine."""
    catalog.put("1", STAGING)
    (catalog.root / catalog.name / "1" / "model.yaml").unlink()
    with pytest.raises(ContentChanged, match=r"/1/model\.yaml: cannot be read") as refused:
        catalog.client.promote(catalog.name, "1", PRODUCTION)
    assert str(catalog.root) not in str(refused.value)


@pytest.mark.parametrize("swap", ["write", "replace", "add", "touch back"])
def test_file_swapped_between_verify_and_apply_is_refused(swap: str, catalog: Catalog):
    """AR-021: the files were right when they were hashed and are others at the commit: nothing is promoted."""
    catalog.put("1", PRODUCTION)
    catalog.put("2", STAGING)
    file = catalog.root / catalog.name / "2" / "model.py"

    def meanwhile(_: Change) -> None:
        before = file.stat()
        if swap == "add":
            file.with_name("more.py").write_text("")
            return
        if swap == "replace":
            file.unlink()
        file.write_text(SOURCE.replace("* 2", "* 3"))
        if swap == "touch back":
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    with pytest.raises(ContentChanged, match="since"):
        catalog.reopened(gate=meanwhile).promote(catalog.name, "2", PRODUCTION)
    assert catalog.stages() == {"1": PRODUCTION, "2": STAGING}


def test_swap_while_registering_is_refused(catalog: Catalog):
    """The files must still be those that were hashed when the version is written."""
    package = catalog.package("1")
    manifest = package.manifest()
    (package.folder / "model.py").write_text(SOURCE + "#")
    with pytest.raises(ContentChanged, match="changed since"):
        catalog.client.register(_Fixed(package, manifest))
    with pytest.raises(UnknownModel):
        catalog.client.find(catalog.name, "1")


def test_who_decides_second_is_told(catalog: Catalog):
    """AR-021: while one promotion is being approved another one comes first: the slower one is refused."""
    for version in ("1", "2", "3"):
        catalog.put(version, PRODUCTION if version == "1" else STAGING)

    def meanwhile(_: Change) -> None:
        catalog.client.promote(catalog.name, "3", PRODUCTION)

    with pytest.raises(TransitionConflict, match=r"another production version now: 3\. Expected 1"):
        catalog.reopened(gate=meanwhile).promote(catalog.name, "2", PRODUCTION)
    assert catalog.stages() == {"1": ARCHIVED, "2": STAGING, "3": PRODUCTION}


def test_what_was_approved_is_what_is_changed(catalog: Catalog):
    """A version that went elsewhere while its promotion was being approved is not promoted from there."""
    catalog.put("1", STAGING)

    def meanwhile(_: Change) -> None:
        catalog.client.demote(catalog.name, "1")

    with pytest.raises(TransitionConflict, match="changed meanwhile and is in draft now"):
        catalog.reopened(gate=meanwhile).promote(catalog.name, "1", PRODUCTION)
    assert catalog.stages() == {"1": DRAFT}


def test_two_rollbacks_at_once_go_back_one_version(catalog: Catalog):
    """Two operators who see the same bad version undo it once; the second is told."""
    for version in "123":
        catalog.put(version, PRODUCTION)

    def meanwhile(_: Change) -> None:
        catalog.client.rollback(catalog.name)

    with pytest.raises(TransitionConflict):
        catalog.reopened(approve=meanwhile).rollback(catalog.name)
    assert catalog.stages() == {"1": ARCHIVED, "2": PRODUCTION, "3": ARCHIVED}


def _at_once(calls: list[Callable[[], RegisteredVersion]]) -> list[RegisteredVersion]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result(180) for future in [threads.submit(call) for call in calls]]


def test_registrations_at_once_all_succeed(catalog: Catalog):
    """Different versions that are registered at the same moment wait for each other; none is turned away."""
    versions = [str(number) for number in range(8)]
    for version in versions:
        catalog.package(version)
    made = _at_once([partial(catalog.reopened().register, catalog.package(version)) for version in versions])
    assert sorted(each.version for each in made) == versions
    assert sorted(each.epoch for each in made) == [*range(1, 9)]


def test_one_version_registered_by_many_at_once_is_one(catalog: Catalog):
    """Registering is idempotent also in a race: every caller gets the same version."""
    catalog.package("1")
    made = _at_once([partial(catalog.reopened().register, catalog.package("1")) for _ in range(8)])
    assert len({each.registered_at for each in made}) == 1
    assert len(catalog.client.history(catalog.name)) == 1


def test_rollback_to_what_was_looked_at(catalog: Catalog):
    """Who prepared version 2 for a rollback is told when the rollback would restore another one by now."""
    for version in "123":
        catalog.put(version, PRODUCTION)
    with pytest.raises(TransitionConflict, match=r"restores 2 by now\. Expected '1'"):
        catalog.client.rollback(catalog.name, "1")
    assert catalog.stages()["3"] is PRODUCTION
    assert catalog.client.rollback(catalog.name, "2").version == "2"


def test_two_clients_see_each_other(catalog: Catalog):
    """AR-044: what one client did, another one of the same database sees at once."""
    other = catalog.reopened()
    catalog.put("1", STAGING)
    other.promote(catalog.name, "1", PRODUCTION)
    assert catalog.client.find(catalog.name).version == "1"
    assert [step.after for step in catalog.client.history(catalog.name)] == [DRAFT, STAGING, PRODUCTION]


def test_sqlite_file_is_private(tmp_path: Path, models_root: Path, slot: str):
    """The file and its folder are made when they are first needed, for their owner only."""
    file = tmp_path / "home" / "registry.db"
    client = ModelRegistryClient(f"sqlite:///{file}")
    assert not file.parent.exists()
    assert client.models() == ()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert client.versions() == ()
    client.register(load_package(Catalog(f"sqlite:///{file}", models_root, slot).package("1").folder))
    assert [each.reference for each in client.versions()] == [f"{slot}/1"]
