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
from penstock.registry.catalog.lineage import ModelLineage as Lineage
from penstock.registry.catalog.stages import Action, check_step
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
from tests.registry.catalog.catalogs import SOURCE, ModelLifecycle, productions
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
def shelf(registry_url: str, models_root: Path, slot: str) -> ModelLifecycle:
    """A model without versions."""
    return ModelLifecycle(registry_url, models_root, slot)


def test_registered_version_is_its_content(shelf: ModelLifecycle):
    """AR-018: the version is the SHA-256 of its files; one byte more is another version."""
    package = shelf.package("1")
    first = shelf.client.register(package)
    assert first.content_hash == package.manifest().content_hash
    assert first.stage is DRAFT
    assert set(first.files) == {"model.yaml", "model.py"}
    assert first.spec["entrypoint"] == "model:build"
    shelf.package("2")
    with (shelf.root / shelf.name / "2" / "model.py").open("a") as file:
        file.write("#")
    second = shelf.client.register(shelf.package("2"))
    assert second.content_hash != first.content_hash
    assert shelf.reopened().versions(shelf.name) == (first, second)
    assert shelf.name in shelf.client.models()


def test_registering_again_changes_nothing(shelf: ModelLifecycle):
    """The same content under the same label is the version that is there, wherever it stands by now."""
    shelf.put("1", STAGING)
    before = shelf.client.history(shelf.name)
    assert shelf.client.register(shelf.package("1")) == shelf.client.find(shelf.name, "1")
    assert shelf.client.register(shelf.package("1")).stage is STAGING
    assert shelf.client.history(shelf.name) == before


def test_label_belongs_to_one_content(shelf: ModelLifecycle):
    """Changed files under a known label are refused, with the file that changed; so is a label with a meaning."""
    shelf.put("1")
    (shelf.root / shelf.name / "1" / "model.py").write_text(SOURCE + "# changed\n")
    with pytest.raises(InvalidInput, match=r"/1: file model\.py is not as it was registered.*expected another label"):
        shelf.client.register(shelf.package("1"))
    with pytest.raises(InvalidInput, match="names the version in production"):
        shelf.client.register(shelf.package("latest"))
    assert shelf.stages() == {"1": DRAFT}


def test_content_has_one_label(shelf: ModelLifecycle):
    """Two labels for one content would make one of them a lie: the second is refused."""
    shelf.put("1")
    first = shelf.client.find(shelf.name, "1")
    package = shelf.package("2")
    manifest = replace(package.manifest(), content_hash=first.content_hash)
    thread_copy = _Fixed(package, manifest)
    with pytest.raises(InvalidInput, match="registered already, as version 1"):
        shelf.client.register(thread_copy)  # no two folders have the same content
    assert shelf.stages() == {"1": DRAFT}


class _Fixed:
    """A package whose manifest is given: SHA-256 has no collisions to test with."""

    def __init__(self, package: Package, manifest: Manifest) -> None:
        self.spec, self.folder, self._manifest = package.spec, package.folder, manifest

    def manifest(self) -> Manifest:
        """What was given."""
        return self._manifest


def _reach(shelf: ModelLifecycle, stage: ModelStage) -> None:
    # Another version is in production, so that only the rules decide.
    shelf.put("other", PRODUCTION)
    if stage is PRODUCTION:
        shelf.put("mine", PRODUCTION)
        shelf.put("later", STAGING)
    else:
        shelf.put("mine", stage)


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
def test_every_step_between_stages(before: ModelStage, after: ModelStage, shelf: ModelLifecycle):
    """AR-020: each of the 16 steps, by promote and by demote: done when allowed, else refused and nothing changed."""
    _reach(shelf, before)
    stages = shelf.stages()
    for action, step in (("promote", shelf.client.promote), ("demote", shelf.client.demote)):
        if action in ALLOWED.get((before, after), ()):
            done = step(shelf.name, "mine", after)
            assert (done.before, done.after) == (before, after)
            assert shelf.stages() == {**stages, "mine": after, **({"other": ARCHIVED} if after is PRODUCTION else {})}
            return
        with pytest.raises(TransitionRefused, match=rf"/mine is in {before}( already$|.*Expected)"):
            step(shelf.name, "mine", after)
    assert shelf.stages() == stages


@pytest.mark.parametrize("action", Action)
def test_rules_allow_what_the_table_says_and_no_more(action: Action):
    """AR-020: all 16 steps under every action, rollback included."""
    for before, after in product(ModelStage, ModelStage):
        if action in ALLOWED.get((before, after), ()):
            check_step("m/1", action, before, after)
        else:
            with pytest.raises(TransitionRefused):
                check_step("m/1", action, before, after)


def test_promoting_archives_the_one_before(shelf: ModelLifecycle):
    """AR-082: one version is in production; the step that brings the next one says which it replaced."""
    shelf.put("1", PRODUCTION)
    shelf.put("2", STAGING)
    done = shelf.client.promote(shelf.name, "2", "production")
    assert (done.replaced, done.productions) == ("1", ("1", "2"))
    assert shelf.stages() == {"1": ARCHIVED, "2": PRODUCTION}


def test_database_itself_forbids_two_in_production(shelf: ModelLifecycle):
    """AR-082: SQL that goes past the client meets the unique index."""
    shelf.put("1", PRODUCTION)
    shelf.put("2", STAGING)
    with pytest.raises(DBAPIError, match=r"(?i)unique"):
        shelf.execute("UPDATE penstock_versions SET stage = 'production' WHERE name = :name AND version = '2'")
    assert shelf.stages() == {"1": PRODUCTION, "2": STAGING}


def test_two_rollbacks_go_back_two_versions(shelf: ModelLifecycle):
    """AR-022, AR-084: v1, v2, v3, then v2, then v1 again; then there is nothing to go back to."""
    for version in "123":
        shelf.put(version, PRODUCTION)
    back = shelf.client.rollback(shelf.name, reason="worse answers")
    assert (back.action, back.version, back.replaced, back.reason) == (Action.ROLLBACK, "2", "3", "worse answers")
    assert back.content_hash == shelf.client.find(shelf.name, "2").content_hash
    assert shelf.stages() == {"1": ARCHIVED, "2": PRODUCTION, "3": ARCHIVED}
    assert shelf.client.rollback(shelf.name).version == "1"
    assert shelf.stages() == {"1": PRODUCTION, "2": ARCHIVED, "3": ARCHIVED}
    with pytest.raises(TransitionRefused, match="no earlier production version"):
        shelf.client.rollback(shelf.name)
    assert [*productions(shelf.client.history(shelf.name))][-3:] == ["3", "2", "1"]


def test_rollback_after_a_rollback_forgets_what_was_undone(shelf: ModelLifecycle):
    """After v1, v2, back to v1, and v3, a rollback goes to v1 and not to v2."""
    shelf.put("1", PRODUCTION)
    shelf.put("2", PRODUCTION)
    shelf.client.rollback(shelf.name)
    shelf.put("3", PRODUCTION)
    assert shelf.client.rollback(shelf.name).version == "1"


def test_version_may_be_in_production_twice(shelf: ModelLifecycle):
    """An archived version goes through staging again; rollbacks go back through both of its times."""
    shelf.put("1", PRODUCTION)
    shelf.put("2", PRODUCTION)
    shelf.client.promote(shelf.name, "1", STAGING)
    assert shelf.client.promote(shelf.name, "1", PRODUCTION).productions == ("1", "2", "1")
    assert [shelf.client.rollback(shelf.name).version for _ in range(2)] == ["2", "1"]


def test_rollback_of_nothing(shelf: ModelLifecycle):
    """A model that was never in production has nothing to go back to."""
    shelf.put("1", STAGING)
    with pytest.raises(TransitionRefused, match="no earlier production version"):
        shelf.client.rollback(shelf.name)


def test_history_keeps_a_hundred_productions(models_root: Path, tmp_path: Path, slot: str):
    """AR-083: of 101 promotions 100 are remembered, and 99 rollbacks go back through them to the oldest."""
    manifests: dict[str, Manifest] = {}
    shelf = ModelLifecycle(
        f"sqlite:///{tmp_path}/registry.db", models_root, slot, {"rehash": lambda source: manifests[source]}
    )
    for version in "123":
        manifests[str(shelf.package(version).folder)] = shelf.package(version).manifest()
        shelf.put(version)
    for number in range(HISTORY + 1):
        for step in (STAGING, PRODUCTION):
            shelf.client.promote(slot, "123"[number % 3], step)
    history = shelf.client.history(slot)
    entered = tuple(step.version for step in history if step.enters_production)
    assert entered == tuple("123"[number % 3] for number in range(1, HISTORY + 1))
    assert history[-1].productions == entered
    assert [step.epoch for step in history] == [*range(history[0].epoch, 3 + 2 * (HISTORY + 1) + 1)]
    assert tuple(shelf.client.rollback(slot).version for _ in entered[1:]) == entered[-2::-1]
    with pytest.raises(TransitionRefused, match="no earlier"):
        shelf.client.rollback(slot)


def test_epoch_grows_with_every_change(shelf: ModelLifecycle):
    """Every change has a number of its own, one more than the last; a refused one has none."""
    shelf.put("1", PRODUCTION)
    shelf.put("2", STAGING)
    shelf.client.demote(shelf.name, "2")
    with pytest.raises(TransitionRefused):
        shelf.client.demote(shelf.name, "1")
    done = shelf.client.describe(shelf.name, "2", LINEAGE)
    history = shelf.client.history(shelf.name)
    assert [step.epoch for step in history] == [*range(1, 8)]
    assert history[-1] == done
    assert shelf.client.find(shelf.name, "2").epoch == 7
    assert shelf.client.find(shelf.name).epoch == 3


def test_lineage_survives_a_restart(registry_url: str, models_root: Path, slot: str):
    """AR-019, AR-081: another process reads every field as it was told."""
    shelf = ModelLifecycle(registry_url, models_root, slot)
    shelf.client.register(shelf.package("1"), LINEAGE)
    program = (
        "import sys; from penstock.registry.catalog import ModelRegistryClient as C; "
        "print(C(sys.argv[1]).lineage(*sys.argv[2:]).model_dump_json())"
    )
    told = subprocess.run(
        [sys.executable, "-c", program, registry_url, slot, "1"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ModelLineage.model_validate_json(told.stdout) == LINEAGE


def test_lineage_is_frozen_by_production(shelf: ModelLifecycle):
    """AR-081: it may be corrected until the version was in production, and never again: not by SQL, nor archived."""
    shelf.client.register(shelf.package("1"), LINEAGE)
    better = LINEAGE.model_copy(update={"data_version": "reviews-2026-11"})
    shelf.client.describe(shelf.name, "1", better)
    assert shelf.client.lineage(shelf.name, "1") == better
    shelf.put("1", PRODUCTION)
    for stage in (PRODUCTION, ARCHIVED):
        assert shelf.stages()["1"] is stage
        with pytest.raises(TransitionRefused, match="froze its lineage"):
            shelf.client.describe(shelf.name, "1", LINEAGE)
        with pytest.raises(DBAPIError, match="content is frozen"):
            shelf.execute("UPDATE penstock_versions SET lineage = '{}' WHERE name = :name AND version = '1'")
        with pytest.raises(DBAPIError, match="content is frozen"):
            shelf.execute("UPDATE penstock_versions SET released_at = NULL WHERE name = :name AND version = '1'")
        if stage is PRODUCTION:
            shelf.put("2", PRODUCTION)
    assert shelf.client.lineage(shelf.name, "1") == better


def test_content_is_frozen_in_the_database(shelf: ModelLifecycle):
    """AR-018: no statement gives a registered version another content."""
    shelf.put("1")
    with pytest.raises(DBAPIError, match="content is frozen"):
        shelf.execute("UPDATE penstock_versions SET content_hash = :other WHERE name = :name", other="0" * 64)


def test_registering_with_another_lineage_is_refused(shelf: ModelLifecycle):
    """Only `describe` changes a lineage; saying nothing, or the same again, is fine."""
    shelf.client.register(shelf.package("1"), LINEAGE)
    assert shelf.client.register(shelf.package("1")).lineage == LINEAGE
    assert shelf.client.register(shelf.package("1"), LINEAGE).lineage == LINEAGE
    with pytest.raises(InvalidInput, match="another lineage"):
        shelf.client.register(shelf.package("1"), ModelLineage(code_hash="other"))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"code": "3f2a91c"}, "Lineage: code: .*Expected one of: data_version, code_hash"),
        ({"code_hash": 7}, "Lineage: code_hash: "),
        ({"training_metrics": {"loss": float("nan")}}, "Lineage: training_metrics.loss: .*finite"),
        ({"hyperparameters": {"rate": float("inf")}}, "Lineage"),
        ({"hyperparameters": {"words": ["x" * 70_000]}}, "Lineage: .*expected at most 65536"),
        ({"parent_model": "x" * 501}, "Lineage: parent_model: "),
    ],
)
def test_bad_lineage_is_refused_by_field(fields: dict, told: str):
    """One line that names the field; numbers that JSON does not have, and whole books, are no lineage."""
    with pytest.raises(InvalidInput, match=told) as refused:
        Lineage.parse(fields)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_approver_sees_every_step_and_may_veto_it(shelf: ModelLifecycle):
    """AR-020: who approves is asked before each change of a stage, with what it would replace."""
    seen: list[Change] = []
    vetoed = {PRODUCTION: "not on a Friday"}

    def approve(change: Change) -> str | None:
        seen.append(change)
        return vetoed.get(change.after)

    client = shelf.reopened(approve=approve)
    shelf.put("1", PRODUCTION)
    shelf.put("2", STAGING, client)
    with pytest.raises(TransitionRefused, match=r"/2 stays in staging, refused by the approver: not on a Friday"):
        client.promote(shelf.name, "2", PRODUCTION, reason="faster")
    asked = [(each.version.version, each.version.stage, each.after) for each in seen]
    assert asked == [("2", DRAFT, STAGING), ("2", STAGING, PRODUCTION)]
    assert seen[-1].replaces == shelf.client.find(shelf.name, "1")
    assert seen[-1].reason == "faster"
    assert shelf.stages() == {"1": PRODUCTION, "2": STAGING}
    vetoed.clear()
    client.promote(shelf.name, "2", PRODUCTION)
    vetoed[PRODUCTION] = "ask first"
    with pytest.raises(TransitionRefused, match="ask first"):
        client.rollback(shelf.name)
    assert shelf.stages() == {"1": ARCHIVED, "2": PRODUCTION}


def test_gate_is_asked_before_production_only(shelf: ModelLifecycle):
    """The gate judges what is promoted to production; a rollback restores what has passed it."""
    asked: list[str] = []

    def gate(change: Change) -> str | None:
        asked.append(change.version.version)
        return "cosine 0.97" if change.version.version == "bad" else None

    client = shelf.reopened(gate=gate)
    shelf.put("1", PRODUCTION, client)
    shelf.put("2", PRODUCTION, client)
    shelf.put("bad", STAGING, client)
    with pytest.raises(TransitionRefused, match="refused by the gate: cosine"):
        client.promote(shelf.name, "bad", PRODUCTION)
    client.rollback(shelf.name)
    assert asked == ["1", "2", "bad"]
    assert shelf.stages() == {"1": PRODUCTION, "2": ARCHIVED, "bad": STAGING}


def test_every_change_is_audited_before_it_is_committed(shelf: ModelLifecycle):
    """What cannot be recorded does not happen; what happens is recorded once, refused attempts are not."""
    recorded: list[Transition] = []
    client = shelf.reopened(audit=recorded.append, actor="ada")
    shelf.put("1", PRODUCTION, client)
    with pytest.raises(TransitionRefused):
        client.rollback(shelf.name)
    assert tuple(recorded) == client.history(shelf.name)
    assert {step.actor for step in recorded} == {"ada"}

    def full(_: Transition) -> None:
        raise OSError("no space left on device")

    shelf.put("2", STAGING)
    with pytest.raises(OSError, match="no space"):
        shelf.reopened(audit=full).promote(shelf.name, "2", PRODUCTION)
    assert shelf.stages() == {"1": PRODUCTION, "2": STAGING}
    assert len(shelf.client.history(shelf.name)) == 5


def test_change_is_seen_when_it_is_committed(shelf: ModelLifecycle):
    """Readers wait for no writer, and see what was there before its commit."""
    seen: list[str] = []
    shelf.put("1", PRODUCTION)
    shelf.put("2", STAGING)
    reader = shelf.reopened()
    writer = shelf.reopened(audit=lambda _: seen.append(reader.find(shelf.name).version))
    writer.promote(shelf.name, "2", PRODUCTION)
    assert seen == ["1"]
    assert reader.find(shelf.name).version == "2"


def test_listeners_are_told_of_every_change_of_production_once(shelf: ModelLifecycle):
    """AR-080: (name, content before, content now) after the commit; a listener that fails keeps nobody from it."""
    told: list[tuple[str, str | None, str]] = []

    def broken(*_: object) -> None:
        raise ValueError("a listener's own problem")

    shelf.client.on_version_change(broken)
    shelf.client.on_version_change(lambda *change: told.append(change))
    shelf.put("1", PRODUCTION)
    shelf.put("2", PRODUCTION)
    shelf.client.rollback(shelf.name)
    first, second = (shelf.client.find(shelf.name, version).content_hash for version in "12")
    assert told == [(shelf.name, None, first), (shelf.name, first, second), (shelf.name, second, first)]


def test_latest_is_the_version_in_production(shelf: ModelLifecycle):
    """CX-014: not the highest label, nor the newest one."""
    shelf.put("1", PRODUCTION)
    shelf.put("3", STAGING)
    assert shelf.client.find(shelf.name).version == "1"
    assert shelf.client.find(shelf.name, "latest").version == "1"
    shelf.client.promote(shelf.name, "3", PRODUCTION)
    assert shelf.client.find(shelf.name, "latest").version == "3"


def test_latest_without_production(shelf: ModelLifecycle):
    """CX-014: the error says what there is."""
    shelf.put("1", STAGING)
    with pytest.raises(UnknownModel, match=r"has no version in production. There are: 1 \(staging, [0-9a-f]{8}\)"):
        shelf.client.find(shelf.name)


def test_version_is_named_by_its_label_or_its_hash(shelf: ModelLifecycle):
    """A label, the whole hash, or six digits of it and more; fewer digits name nothing."""
    shelf.put("1")
    shelf.put("2.0-rc1")
    for version in shelf.client.versions(shelf.name):
        for wanted in (version.version, version.content_hash, version.content_hash[:6]):
            assert shelf.client.find(shelf.name, wanted) == version
        with pytest.raises(UnknownModel, match=r"Expected one of: 1 \(draft"):
            shelf.client.find(shelf.name, version.content_hash[:5])


def test_shared_hash_prefix_is_refused(shelf: ModelLifecycle):
    """Six digits that begin two hashes name neither, and the error names both labels."""
    for version, end in (("1", "1"), ("2", "2")):
        package = shelf.package(version)
        fixed = _Fixed(package, replace(package.manifest(), content_hash="abcdef" + end * 58))
        shelf.client.register(fixed)
    with pytest.raises(InvalidInput, match=r"'abcdef' begins the hash of several versions of .*: 1, 2"):
        shelf.client.find(shelf.name, "abcdef")
    assert shelf.client.find(shelf.name, "abcdef1").version == "1"


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
def test_what_does_not_exist_is_told_with_what_does(call, error: type[PenstockError], told: str, shelf: ModelLifecycle):
    """One line, what was asked for and what there is; nothing is changed."""
    shelf.put("1")
    with pytest.raises(error, match=told) as refused:
        call(shelf.client, shelf.name)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000
    assert shelf.stages() == {"1": DRAFT}


def test_changed_files_are_found_and_never_promoted(shelf: ModelLifecycle):
    """AR-021: one byte more in a file, and neither verify nor promote nor rollback takes the version."""
    shelf.put("1", PRODUCTION)
    shelf.put("2", PRODUCTION)
    shelf.put("3", STAGING)
    assert shelf.client.verify(shelf.name, "3").version == "3"
    for version in "13":
        with (shelf.root / shelf.name / version / "model.py").open("a") as file:
            file.write("#")
    for call in (
        lambda: shelf.client.verify(shelf.name, "3"),
        lambda: shelf.client.promote(shelf.name, "3", PRODUCTION),
        lambda: shelf.client.rollback(shelf.name),
    ):
        with pytest.raises(ContentChanged, match=r"file model\.py is not as it was registered"):
            call()
    assert shelf.stages() == {"1": ARCHIVED, "2": PRODUCTION, "3": STAGING}


def test_missing_files_are_never_promoted(shelf: ModelLifecycle):
    """A version whose folder is gone says so, with no path of this machine."""
    shelf.put("1", STAGING)
    (shelf.root / shelf.name / "1" / "model.yaml").unlink()
    with pytest.raises(ContentChanged, match=r"/1/model\.yaml: cannot be read") as refused:
        shelf.client.promote(shelf.name, "1", PRODUCTION)
    assert str(shelf.root) not in str(refused.value)


@pytest.mark.parametrize("swap", ["write", "replace", "add", "touch back"])
def test_file_swapped_between_verify_and_apply_is_refused(swap: str, shelf: ModelLifecycle):
    """AR-021: the files were right when they were hashed and are others at the commit: nothing is promoted."""
    shelf.put("1", PRODUCTION)
    shelf.put("2", STAGING)
    file = shelf.root / shelf.name / "2" / "model.py"

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
        shelf.reopened(gate=meanwhile).promote(shelf.name, "2", PRODUCTION)
    assert shelf.stages() == {"1": PRODUCTION, "2": STAGING}


def test_swap_while_registering_is_refused(shelf: ModelLifecycle):
    """The files must still be those that were hashed when the version is written."""
    package = shelf.package("1")
    manifest = package.manifest()
    (package.folder / "model.py").write_text(SOURCE + "#")
    with pytest.raises(ContentChanged, match="changed since"):
        shelf.client.register(_Fixed(package, manifest))
    with pytest.raises(UnknownModel):
        shelf.client.find(shelf.name, "1")


def test_who_decides_second_is_told(shelf: ModelLifecycle):
    """AR-021: while one promotion is being approved another one comes first: the slower one is refused."""
    for version in ("1", "2", "3"):
        shelf.put(version, PRODUCTION if version == "1" else STAGING)

    def meanwhile(_: Change) -> None:
        shelf.client.promote(shelf.name, "3", PRODUCTION)

    with pytest.raises(TransitionConflict, match=r"another production version meanwhile: 3\. Expected 1"):
        shelf.reopened(gate=meanwhile).promote(shelf.name, "2", PRODUCTION)
    assert shelf.stages() == {"1": ARCHIVED, "2": STAGING, "3": PRODUCTION}


def test_what_was_approved_is_what_is_changed(shelf: ModelLifecycle):
    """A version that went elsewhere while its promotion was being approved is not promoted from there."""
    shelf.put("1", STAGING)

    def meanwhile(_: Change) -> None:
        shelf.client.demote(shelf.name, "1")

    with pytest.raises(TransitionConflict, match="changed meanwhile, it is in draft now"):
        shelf.reopened(gate=meanwhile).promote(shelf.name, "1", PRODUCTION)
    assert shelf.stages() == {"1": DRAFT}


def test_two_rollbacks_at_once_go_back_one_version(shelf: ModelLifecycle):
    """Two operators who see the same bad version undo it once; the second is told."""
    for version in "123":
        shelf.put(version, PRODUCTION)

    def meanwhile(_: Change) -> None:
        shelf.client.rollback(shelf.name)

    with pytest.raises(TransitionConflict):
        shelf.reopened(approve=meanwhile).rollback(shelf.name)
    assert shelf.stages() == {"1": ARCHIVED, "2": PRODUCTION, "3": ARCHIVED}


def _at_once(calls: list[Callable[[], RegisteredVersion]]) -> list[RegisteredVersion]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result(60) for future in [threads.submit(call) for call in calls]]


def test_registrations_at_once_all_succeed(shelf: ModelLifecycle):
    """Different versions that are registered at the same moment wait for each other; none is turned away."""
    versions = [str(number) for number in range(8)]
    for version in versions:
        shelf.package(version)
    made = _at_once([partial(shelf.reopened().register, shelf.package(version)) for version in versions])
    assert sorted(each.version for each in made) == versions
    assert sorted(each.epoch for each in made) == [*range(1, 9)]


def test_one_version_registered_by_many_at_once_is_one(shelf: ModelLifecycle):
    """Registering is idempotent also in a race: everybody gets the same version."""
    shelf.package("1")
    made = _at_once([partial(shelf.reopened().register, shelf.package("1")) for _ in range(8)])
    assert len({each.registered_at for each in made}) == 1
    assert len(shelf.client.history(shelf.name)) == 1


def test_rollback_to_what_was_looked_at(shelf: ModelLifecycle):
    """Who prepared version 2 for a rollback is told when the rollback would restore another one by now."""
    for version in "123":
        shelf.put(version, PRODUCTION)
    with pytest.raises(TransitionConflict, match=r"restores 2 by now\. Expected '1'"):
        shelf.client.rollback(shelf.name, "1")
    assert shelf.stages()["3"] is PRODUCTION
    assert shelf.client.rollback(shelf.name, "2").version == "2"


def test_two_clients_see_each_other(shelf: ModelLifecycle):
    """AR-044: what one client did, another one of the same database sees at once."""
    other = shelf.reopened()
    shelf.put("1", STAGING)
    other.promote(shelf.name, "1", PRODUCTION)
    assert shelf.client.find(shelf.name).version == "1"
    assert [step.after for step in shelf.client.history(shelf.name)] == [DRAFT, STAGING, PRODUCTION]


def test_sqlite_file_is_private(tmp_path: Path, models_root: Path, slot: str):
    """The file and its folder are made when they are first needed, for their owner only."""
    file = tmp_path / "home" / "registry.db"
    client = ModelRegistryClient(f"sqlite:///{file}")
    assert not file.parent.exists()
    assert client.models() == ()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert client.versions() == ()
    client.register(load_package(ModelLifecycle(f"sqlite:///{file}", models_root, slot).package("1").folder))
    assert [each.reference for each in client.versions()] == [f"{slot}/1"]
