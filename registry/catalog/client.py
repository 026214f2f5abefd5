"""The model registry: the versions of each model, their stages, and the history of changes.

    register -> DRAFT -> promote -> STAGING -> promote -> PRODUCTION -> (another is promoted) -> ARCHIVED
                                                    rollback restores the previous production version

A version is its content: a label such as `2` belongs to one SHA-256 for ever. Every change is one transaction:

    read -> hash the files again -> approve -> gate -> lock the model -> compare it with the state that was read
         -> write the rows -> compare the files with their hashes -> audit -> commit -> call back

Of two operators who change a model at the same time, one gets TransitionConflict. Every committed change has an audit
record. An audit record without its change comes from a process that died before the commit.
With a signer, records are signed; with a verifier, only signed records are accepted. A program that can write to the
database can still set a whole model back to an older state with its old signatures.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol

from penstock.registry.catalog.lineage import ModelLineage
from penstock.registry.catalog.registered_model import (
    HISTORY,
    LATEST,
    Change,
    RegisteredModel,
    check_none_open,
    check_whole,
    described_experiment,
    listed,
)
from penstock.registry.catalog.stages import ModelStage, TransitionAction, check_step, parse_stage
from penstock.registry.catalog.store import ModelRows, ModelTransaction, RegistryStore, SqlStore, check_files
from penstock.registry.catalog.tables import (
    Experiment,
    PolicyRecord,
    RegisteredVersion,
    Transition,
    open_experiment,
    open_policy,
    open_transition,
    open_version,
    seal_row,
)
from penstock.registry.errors import (
    ConfigurationError,
    ContentChanged,
    InvalidInput,
    TransitionConflict,
    TransitionRefused,
    UnknownModel,
    described,
)
from penstock.registry.package import ModelSpec, load_package
from penstock.registry.package.manifest import Manifest
from penstock.registry.package.policy_overlay import changed_overlay, check_endpoint
from penstock.registry.queues import parse_name
from penstock.registry.signed import Signer, Verifier

__all__ = [
    "Change",
    "HISTORY",
    "LATEST",
    "ModelLineage",
    "ModelRegistryClient",
    "ModelStage",
    "Registrable",
    "RegisteredVersion",
    "StateAt",
    "Transition",
    "Veto",
    "VersionCallback",
]

Veto = Callable[[Change], str | None]
"""The reason why a change is refused; None: it is allowed."""
VersionCallback = Callable[[str, str | None, str], None]
"""(model, previous content hash in production, new content hash in production)."""
StateAt = Callable[[int], dict[str, Any]]
"""The state of an experiment from the epoch of the change that stores it. Other changes of the model have epochs, too,
so that only the transaction knows this one."""

_MAX_TEXT: Final = 500
_log: Final = logging.getLogger("penstock.registry")


class Registrable(Protocol):
    """A checked package: that of registry/package/loading.py, or one on another machine."""

    @property
    def spec(self) -> ModelSpec:
        """The spec."""

    @property
    def folder(self) -> Path:
        """The folder, on its machine."""

    def manifest(self) -> Manifest:
        """The hashes of its files. Raises ConfigurationError."""


def _manifest_at(folder: str) -> Manifest:
    return load_package(Path(folder)).manifest()


def _now() -> datetime:
    return datetime.now(UTC)


class ModelRegistryClient:
    """The registry in one database. Any number of processes may use it.

    store: the database's URL, or another store of the rows. sign, verify: the operator's key and the trusted public
    keys (safety/operator_key.py). approve: called before every change of a stage. gate: called before a promotion to
    production. audit: called with every change before its commit; an exception undoes the change. committed: called
    after every commit. rehash: source ->
    the manifest of its present files. actor: the name in the history.
    """

    def __init__(
        self,
        store: str | RegistryStore,
        *,
        sign: Signer | None = None,
        verify: Verifier | None = None,
        approve: Veto | None = None,
        gate: Veto | None = None,
        audit: Callable[[Transition], None] | None = None,
        committed: Callable[[], None] = lambda: None,
        rehash: Callable[[str], Manifest] = _manifest_at,
        clock: Callable[[], datetime] = _now,
        actor: str = "",
    ) -> None:
        self._store: RegistryStore = SqlStore(store) if isinstance(store, str) else store
        self._sign, self._verify = sign, verify
        self._approve, self._gate, self._audit = approve, gate, audit
        self._committed = committed
        self._rehash, self._clock = rehash, clock
        self._actor = _parse_text("actor", actor)
        self._callbacks: list[VersionCallback] = []

    def on_version_change(self, callback: VersionCallback) -> None:
        """Call `callback` once after every change of a production version that this client makes."""
        self._callbacks.append(callback)

    def models(self) -> tuple[str, ...]:
        """The names of all models, sorted."""
        return self._store.names()

    def versions(self, name: str | None = None) -> tuple[RegisteredVersion, ...]:
        """All versions of a model, or of every model, the oldest first. Raises UnknownModel."""
        found = self._store.read(None if name is None else (parse_name("model", name),), self._newest)
        return tuple(each for one, rows in found.items() for each in self._open(one, rows).versions.values())

    def find(self, name: str, version: str = LATEST) -> RegisteredVersion:
        """The version with this label or hash prefix (6 digits or more); `latest` is the one in production.

        Raises UnknownModel with the known versions, and InvalidInput for a prefix that several versions share.
        """
        return self._look(name).select(version)

    def lineage(self, name: str, version: str = LATEST) -> ModelLineage:
        """The lineage of a version. Raises as `find` does."""
        return self.find(name, version).lineage

    def history(self, name: str) -> tuple[Transition, ...]:
        """The changes of a model, oldest first, back to the HISTORY-th last production. Raises UnknownModel."""
        rows = self._store.read((parse_name("model", name),))[name]
        self._open(name, rows)
        return self._history(rows)

    def experiments(self, name: str) -> tuple[Experiment, ...]:
        """The experiments of a model, oldest first. Raises UnknownModel."""
        rows = self._store.read((parse_name("model", name),), self._newest)[name]
        self._open(name, rows)
        return tuple(open_experiment(row, self._verify) for row in rows.experiments)

    def experiment(self, name: str) -> Experiment | None:
        """The open experiment of a model, or None. Raises UnknownModel."""
        return self._look(name).experiment

    def policy(self, name: str) -> PolicyRecord | None:
        """The knobs that operators have set over those of model.yaml, or None. Raises UnknownModel."""
        return self._look(name).policy

    def verify(self, name: str, version: str = LATEST) -> RegisteredVersion:
        """Hashes the files of a version again. Raises ContentChanged, and as `find` does."""
        found = self.find(name, version)
        self._hash_again(found)
        return found

    def register(
        self,
        package: Registrable,
        lineage: ModelLineage | None = None,
        *,
        source: str | None = None,
        reason: str = "",
        after_epoch: int = 0,
    ) -> RegisteredVersion:
        """Registers a package as a DRAFT. If the package is registered, its version is returned unchanged.

        source: where `rehash` finds the files; None: the package's folder. after_epoch: the epochs of a new model
        begin after this one, that of another registry whose decisions workers follow.
        Raises InvalidInput if the label has other content, the content another label, or the lineage differs.
        """
        reason = _parse_text("reason", reason)
        source = _parse_text("source", str(package.folder) if source is None else source, 4096)
        manifest = package.manifest()
        with self._changing(package.spec.name, is_new=True) as (transaction, model):
            if known := _known(model, package, manifest, lineage):
                return known
            if not model.versions:
                model = replace(model, epoch=after_epoch)
            draft = RegisteredVersion(
                name=model.name,
                version=package.spec.version,
                content_hash=manifest.content_hash,
                stage=ModelStage.DRAFT,
                epoch=model.epoch + 1,
                files=dict(manifest.files),
                source_files=dict(manifest.source_files),
                spec=json.loads(package.spec.to_json()),
                source=source,
                lineage=lineage or ModelLineage(),
                registered_at=self._time(),
            )
            transaction.put_version(seal_row(draft, self._sign))
            change = Change(TransitionAction.REGISTER, draft, ModelStage.DRAFT, reason=reason)
            self._record(transaction, model, change, None, manifest)
        return draft

    def describe(self, name: str, version: str, lineage: ModelLineage, *, reason: str = "") -> Transition:
        """Replaces the lineage of a version that was never in production. Raises TransitionRefused for any other."""
        reason = _parse_text("reason", reason)
        with self._changing(name) as (transaction, model):
            found = model.select(version)
            if found.released_at is not None:
                raise TransitionRefused(
                    f"{found.reference} has been in production, which froze its lineage. Expected another version"
                )
            self._write(transaction, replace(found, epoch=model.epoch + 1, lineage=lineage))
            change = Change(TransitionAction.DESCRIBE, found, found.stage, reason=reason)
            return self._record(transaction, model, change, found.stage, None)

    def renew(self, name: str, *, reason: str = "", after_epoch: int = 0) -> Transition:
        """Signs all records of a model again with a new operator's key, while the old key is still trusted.

        Only the epoch of the production version changes, so that workers accept its record with the new signature.
        after_epoch: the new epoch is later than this one, for an older copy of the registry. Raises UnknownModel, and
        InvalidInput for a client that does not sign.
        """
        reason = _parse_text("reason", reason)
        if self._sign is None:
            raise InvalidInput("A client that does not sign cannot renew signatures. Expected an operator's key")
        with self._store.changing(parse_name("model", name)) as transaction:
            model = self._open(name, transaction.rows)
            model = replace(model, epoch=max(model.epoch, after_epoch))
            newest = model.production or model.select(self._history(transaction.rows)[-1].version)
            for version in model.versions.values():
                self._write(transaction, replace(version, epoch=model.epoch + 1) if version is newest else version)
            for transition in self._history(transaction.rows):
                transaction.put_transition(seal_row(transition, self._sign))
            for row in transaction.rows.experiments:
                transaction.put_experiment(seal_row(open_experiment(row, self._verify), self._sign))
            for row in transaction.rows.policies:
                transaction.put_policy(seal_row(open_policy(row, self._verify), self._sign))
            change = Change(TransitionAction.SIGN, newest, newest.stage, reason=reason)
            transition = self._record(transaction, model, change, newest.stage, None)
        self._committed()
        return transition

    def begin_experiment(self, experiment: Experiment, *, reason: str = "") -> Experiment:
        """Lets the arms of an experiment share the jobs; approvers and gate are asked for each arm.

        Its epoch, times and actor are filled in. The caller activates the record of the production version with the
        new epoch. Raises UnknownModel without a version in production or for an unknown arm, TransitionRefused while
        another experiment is open and for an archived arm, and ContentChanged.
        """
        seen = self._look(experiment.name)
        production = seen.select(LATEST)
        _check_arms(experiment, seen)
        for arm in experiment.arms:
            if arm.version != production.version:
                self._hash_again(seen.select(arm.version))
                self._ask(Change(TransitionAction.PROMOTE, seen.select(arm.version), ModelStage.PRODUCTION, production))
        return self._route(None, replace(experiment, begun_at=self._time()), reason)

    def change_experiment(
        self, seen: Experiment, changed: Experiment, *, reason: str = "", state_at: StateAt | None = None
    ) -> Experiment:
        """Changes the weights, the status or the state of an experiment, or ends it, as `begin_experiment` began it.

        state_at: makes the state from the epoch of this change; None: it is that of `changed`. Raises
        TransitionConflict if the experiment is not as `seen` any more.
        """
        return self._route(seen, changed, reason, state_at)

    def _route(
        self, seen: Experiment | None, changed: Experiment, reason: str, state_at: StateAt | None = None
    ) -> Experiment:
        reason = _parse_text("reason", reason)
        with self._changing(changed.name) as (transaction, model):
            if seen is None:
                _check_arms(changed, model)
            elif model.experiment != seen:
                raise TransitionConflict(f"{described_experiment(seen)} was changed meanwhile. Expected a new decision")
            production = model.select(LATEST)
            self._write(transaction, replace(production, epoch=model.epoch + 1))
            if state_at is not None:
                changed = replace(changed, state=state_at(model.epoch + 1))
            stored = self._write_experiment(transaction, changed, model.epoch + 1)
            change = Change(TransitionAction.ROUTE, production, ModelStage.PRODUCTION, reason=reason)
            self._record(transaction, model, change, ModelStage.PRODUCTION, None)
        return stored

    def set_policy(
        self, name: str, endpoint: str, knobs: Mapping[str, Any] | None, *, reason: str = ""
    ) -> PolicyRecord:
        """Sets these knobs of an endpoint over those of model.yaml. None: model.yaml alone decides again.

        endpoint: of the version in production; empty, with None only: every endpoint. The caller activates the record
        of the production version with the new epoch. Raises UnknownModel without a version in production, and
        InvalidInput for an unknown endpoint, and for a knob that is unknown or out of range.
        """
        production = self._look(name).select(LATEST)
        known = ModelSpec.from_json(json.dumps(production.spec).encode()).endpoints
        if endpoint or knobs is not None:
            check_endpoint(endpoint, known, name)
        changes = ", ".join(f"{knob}={value}" for knob, value in (knobs or {}).items()) or "reset"
        reason = _parse_text("reason", reason or f"policy of {endpoint or 'all endpoints'}: {changes}"[:_MAX_TEXT])
        with self._changing(name) as (transaction, model):
            production = model.select(LATEST)
            epoch = model.epoch + 1
            record = PolicyRecord(name, epoch, _overlay(model, endpoint, knobs), self._time(), self._actor)
            self._write(transaction, replace(production, epoch=epoch))
            transaction.put_policy(seal_row(record, self._sign))
            change = Change(TransitionAction.POLICY, production, ModelStage.PRODUCTION, reason=reason)
            self._record(transaction, model, change, ModelStage.PRODUCTION, None)
        return record

    def promote(
        self, name: str, version: str, to: ModelStage | str, *, reason: str = "", completes: Experiment | None = None
    ) -> Transition:
        """Moves a version to STAGING or PRODUCTION. The previous production version is archived in the same step.

        completes: the open experiment as it is after this promotion, which ends it. Raises TransitionRefused,
        TransitionConflict when another change came first, ContentChanged, and as `find` does.
        """
        return self._move(TransitionAction.PROMOTE, self._look(name), version, parse_stage(to), reason, completes)

    def demote(
        self, name: str, version: str, to: ModelStage | str = ModelStage.DRAFT, *, reason: str = ""
    ) -> Transition:
        """Moves a version that is not in production to DRAFT or ARCHIVED. Raises as `promote` does."""
        return self._move(TransitionAction.DEMOTE, self._look(name), version, parse_stage(to), reason)

    def rollback(self, name: str, to: str | None = None, *, reason: str = "") -> Transition:
        """Archives the production version and restores the previous one. The gate is not asked again.

        to: the label of the version that the caller expects to restore; if it is another one, TransitionConflict.
        Raises as `promote` does, and TransitionRefused when there is no previous version.
        """
        model = self._look(name)
        before = model.before_production()
        if to not in (None, before):
            raise TransitionConflict(f"A rollback of {name} restores {before} by now. Expected {described(to)}")
        return self._move(TransitionAction.ROLLBACK, model, before, ModelStage.PRODUCTION, reason)

    def _move(
        self,
        action: TransitionAction,
        seen: RegisteredModel,
        wanted: str,
        after: ModelStage,
        reason: str,
        completes: Experiment | None = None,
    ) -> Transition:
        version = seen.select(wanted)
        check_step(version.reference, action, version.stage, after)
        replaces = seen.production if after is ModelStage.PRODUCTION else None
        change = Change(action, version, after, replaces, _parse_text("reason", reason))
        completed = completes.experiment if completes is not None else ""
        seen.check_no_experiment(change, completed)
        manifest = None if action is TransitionAction.DEMOTE else self._hash_again(version)
        self._ask(change)
        with self._changing(seen.name) as (transaction, model):
            model.check_unchanged(change)
            model.check_no_experiment(change, completed)
            self._apply(transaction, change, model.epoch + 1)
            if completes is not None:
                self._write_experiment(transaction, completes, model.epoch + 1)
            transition = self._record(transaction, model, change, version.stage, manifest)
        if transition.enters_production:
            self._tell(version, replaces)
        return transition

    def _hash_again(self, version: RegisteredVersion) -> Manifest:
        try:
            manifest = self._rehash(version.source)
        except ConfigurationError as problem:
            raise ContentChanged(str(problem)) from None
        if manifest.content_hash != version.content_hash:
            raise ContentChanged(_difference(version, manifest))
        return manifest

    def _ask(self, change: Change) -> None:
        asked = [("approver", self._approve)]
        if change.action is TransitionAction.PROMOTE and change.after is ModelStage.PRODUCTION:
            asked.append(("gate", self._gate))
        for who, ask in asked:
            if ask is not None and (veto := ask(change)) is not None:
                raise TransitionRefused(
                    f"{change.version.reference} stays in {change.version.stage}, refused by the {who}: {veto}"
                )

    def _apply(self, transaction: ModelTransaction, change: Change, epoch: int) -> None:
        # The old version first: the index allows one in production at a time.
        if change.replaces is not None:
            self._write(transaction, replace(change.replaces, stage=ModelStage.ARCHIVED, epoch=epoch))
        moved = replace(change.version, stage=change.after, epoch=epoch)
        if change.after is ModelStage.PRODUCTION and moved.released_at is None:
            moved = replace(moved, released_at=self._time())
        self._write(transaction, moved)

    def _record(
        self,
        transaction: ModelTransaction,
        model: RegisteredModel,
        change: Change,
        before: ModelStage | None,
        manifest: Manifest | None,
    ) -> Transition:
        transition = Transition(
            name=model.name,
            epoch=model.epoch + 1,
            action=change.action,
            version=change.version.version,
            content_hash=change.version.content_hash,
            before=before,
            after=change.after,
            replaced=change.replaces.version if change.replaces else None,
            productions=model.productions_after(change),
            actor=self._actor,
            reason=change.reason,
            at=self._time(),
        )
        transaction.put_transition(seal_row(transition, self._sign))
        if manifest is not None:
            check_files(manifest)
        if self._audit is not None:
            self._audit(transition)
        return transition

    def _tell(self, version: RegisteredVersion, replaced: RegisteredVersion | None) -> None:
        for callback in self._callbacks:
            try:
                callback(version.name, replaced.content_hash if replaced else None, version.content_hash)
            except Exception:
                # The change is committed: the error of one callback must not reach the others or the caller.
                _log.exception("a callback for a change of version failed", extra={"model": version.name})

    @contextmanager
    def _changing(self, name: str, *, is_new: bool = False) -> Iterator[tuple[ModelTransaction, RegisteredModel]]:
        """A change of one model, which is locked until its end."""
        parse_name("model", name)
        with self._store.changing(name, is_new=is_new, newest=self._newest) as transaction:
            yield transaction, self._open(name, transaction.rows, is_new=is_new)
        self._committed()

    def _look(self, name: str) -> RegisteredModel:
        return self._open(name, self._store.read((parse_name("model", name),), self._newest)[name])

    @property
    def _newest(self) -> int | None:
        """Signed rows are checked as a whole. Otherwise the newest transition is enough."""
        return None if self._verify else 1

    def _open(self, name: str, rows: ModelRows, *, is_new: bool = False) -> RegisteredModel:
        found = [open_version(row, self._verify) for row in rows.versions]
        if not found and not is_new:
            raise UnknownModel(f"Unknown model {described(name)}. Registered: {listed(self._store.names())}")
        history = self._history(rows)
        epoch, productions = (history[-1].epoch, history[-1].productions) if history else (0, ())
        tried = (open_experiment(row, self._verify) for row in rows.experiments)
        running = next((each for each in tried if each.is_open), None)
        policy = next((open_policy(row, self._verify) for row in rows.policies), None)
        model = RegisteredModel(name, {each.version: each for each in found}, epoch, productions, running, policy)
        if self._verify is not None:
            check_whole(model, history)
        return model

    def _history(self, rows: ModelRows) -> tuple[Transition, ...]:
        return tuple(open_transition(row, self._verify) for row in rows.transitions)

    def _write(self, transaction: ModelTransaction, version: RegisteredVersion) -> None:
        transaction.put_version(seal_row(version, self._sign))

    def _write_experiment(self, transaction: ModelTransaction, experiment: Experiment, epoch: int) -> Experiment:
        stored = replace(experiment, epoch=epoch, changed_at=self._time(), actor=self._actor)
        row = seal_row(stored, self._sign)
        transaction.put_experiment(row)
        # As any process will read it: the columns do not tell tuples from lists.
        return open_experiment(row, None)

    def _time(self) -> str:
        return self._clock().astimezone(UTC).isoformat(timespec="microseconds")


def _overlay(model: RegisteredModel, endpoint: str, knobs: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """The knobs of each endpoint after `set_policy`."""
    before = model.policy.endpoints if model.policy is not None else {}
    if knobs is not None:
        return changed_overlay(before, endpoint, knobs)
    return {each: dict(values) for each, values in before.items() if endpoint and each != endpoint}


def _check_arms(experiment: Experiment, model: RegisteredModel) -> None:
    """Raises as ModelRegistryClient.begin_experiment does."""
    check_none_open(model.experiment)
    for arm in experiment.arms:
        version = model.select(arm.version)
        if version.stage not in (ModelStage.STAGING, ModelStage.PRODUCTION):
            raise TransitionRefused(
                f"{version.reference} is in {version.stage} and gets no traffic. Expected it in staging: "
                f"`penstock models promote {model.name} {version.version} --to staging`"
            )
        if version.content_hash != arm.content_hash:
            raise TransitionConflict(f"{version.reference} has other content than its arm. Expected a new decision")


def _known(
    model: RegisteredModel, package: Registrable, manifest: Manifest, lineage: ModelLineage | None
) -> RegisteredVersion | None:
    """The registered version of the package, or None. Raises InvalidInput if the package contradicts it."""
    label = package.spec.version
    if label == LATEST:
        raise InvalidInput(
            f"{package.spec.reference}: {LATEST} names the version in production. Expected another label"
        )
    known = model.versions.get(label)
    if known is None:
        for other in model.versions.values():
            if other.content_hash == manifest.content_hash:
                raise InvalidInput(f"{package.spec.reference} is registered already as version {other.version}")
        return None
    if known.content_hash != manifest.content_hash:
        raise InvalidInput(f"{_difference(known, manifest)}; changed files need another label")
    if lineage not in (None, known.lineage):
        raise InvalidInput(f"{known.reference} is registered with another lineage. Expected none, or the same")
    return known


def _difference(version: RegisteredVersion, manifest: Manifest) -> str:
    """The message for the first file that is not as it was registered."""
    then = {**version.source_files, **version.files}
    now = {**manifest.source_files, **manifest.files}
    changed = sorted(path for path in then.keys() | now.keys() if then.get(path) != now.get(path))
    what = f"file {changed[0]}" if changed else "its content"
    return f"{version.reference}: {what} is not as it was registered (content hash {version.content_hash[:12]})"


def _parse_text(field: str, value: str, longest: int = _MAX_TEXT) -> str:
    if len(value) > longest or not value.isprintable():
        raise InvalidInput(f"Bad {field}. Expected one line of at most {longest} printable characters")
    return value
