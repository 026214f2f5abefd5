"""Stores of the registry's rows: a database, or one that a worker reaches.

    ModelRegistryClient -- read, changing --> SqlStore --> SQLite, PostgreSQL
                        -- read, changing --> compose/rollout/remote.py --> OperatorRpcServer --> enter --> SqlStore

Rows are signed before they reach a store, so that a store needs no key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final, Protocol

import msgspec
from sqlalchemy import ColumnElement, Connection, Table, delete, func, insert, select, text, update

from penstock.registry.catalog.database import Database
from penstock.registry.catalog.registered_model import HISTORY, RegisteredModel, check_whole
from penstock.registry.catalog.stages import TransitionAction
from penstock.registry.catalog.tables import (
    RegisteredVersion,
    Transition,
    experiments,
    models,
    open_experiment,
    open_policy,
    open_transition,
    open_version,
    policies,
    transitions,
    versions,
)
from penstock.registry.errors import ConfigurationError, ContentChanged, InvalidInput, TransitionConflict
from penstock.registry.operator_rpc import Row
from penstock.registry.package.manifest import Manifest
from penstock.registry.signed import Verifier

__all__ = ["RegistryStore", "ModelTransaction", "ModelRows", "SqlStore", "check_files", "enter"]

_HASHED: Final = (TransitionAction.REGISTER, TransitionAction.PROMOTE, TransitionAction.ROLLBACK)


class ModelRows(msgspec.Struct, frozen=True):
    """The rows of one model: versions in the order of registration, transitions oldest first."""

    versions: Sequence[Row] = ()
    transitions: Sequence[Row] = ()
    experiments: Sequence[Row] = ()
    """Oldest first."""
    policies: Sequence[Row] = ()
    """One, or none."""


class ModelTransaction(Protocol):
    """A change of one model. Its rows are committed at the end of the change."""

    @property
    def rows(self) -> ModelRows:
        """The rows before the change."""

    def put_version(self, row: Row) -> None:
        """Write a new version, or a new state of one."""

    def put_transition(self, row: Row) -> None:
        """Write a new transition, or one with a new signature."""

    def put_experiment(self, row: Row) -> None:
        """Write a new experiment, or a new state of one."""

    def put_policy(self, row: Row) -> None:
        """Write the model's policy in place of the earlier one."""


class RegistryStore(Protocol):
    """A store of rows. Calls raise RegistryUnavailable."""

    def names(self) -> tuple[str, ...]:
        """The names of all models, sorted."""

    def read(self, names: Sequence[str] | None = None, newest: int | None = None) -> dict[str, ModelRows]:
        """A consistent view of the rows of these models, or of all.

        newest: the number of newest transitions to read; None: all.
        """

    def changing(
        self, name: str, *, is_new: bool = False, newest: int | None = None
    ) -> AbstractContextManager[ModelTransaction]:
        """A change of one model: committed at the end of the block, undone after an exception.

        is_new: the model may be new. Raises TransitionConflict when another change came first.
        """


class SqlStore:
    """RegistryStore in a database. Raises ConfigurationError for an unusable URL."""

    def __init__(self, url: str) -> None:
        self._database = Database(url)

    def names(self) -> tuple[str, ...]:
        """See RegistryStore.names."""
        with self._database.reading() as connection:
            return _names(connection)

    def read(self, names: Sequence[str] | None = None, newest: int | None = None) -> dict[str, ModelRows]:
        """See RegistryStore.read."""
        with self._database.reading() as connection:
            wanted = _names(connection) if names is None else names
            return {name: _rows(connection, name, newest) for name in wanted}

    @contextmanager
    def changing(self, name: str, *, is_new: bool = False, newest: int | None = None) -> Iterator[ModelTransaction]:
        """See RegistryStore.changing. The model is locked until the end of the block."""
        with self._database.writing() as connection:
            if is_new:
                connection.execute(
                    text(f"INSERT INTO {models.name} (name) VALUES (:name) ON CONFLICT DO NOTHING"),  # noqa: S608 - a constant
                    {"name": name},
                )
            connection.execute(select(models).where(models.c.name == name).with_for_update())
            yield _SqlTransaction(connection, name, _rows(connection, name, newest))


class _SqlTransaction:
    """ModelTransaction inside a transaction of the database."""

    def __init__(self, connection: Connection, name: str, rows: ModelRows) -> None:
        self._connection = connection
        self._name = name
        self.rows: Final = rows

    def put_version(self, row: Row) -> None:
        """See ModelTransaction.put_version."""
        is_known = any(each["version"] == row["version"] for each in self.rows.versions)
        self._put(versions, row, versions.c.version == row["version"] if is_known else None)

    def put_transition(self, row: Row) -> None:
        """See ModelTransaction.put_transition. Deletes transitions before the HISTORY-th last production."""
        is_known = any(each["epoch"] == row["epoch"] for each in self.rows.transitions)
        self._put(transitions, row, transitions.c.epoch == row["epoch"] if is_known else None)
        entered = (
            transitions.c.name == self._name,
            transitions.c.before != transitions.c.after,
            transitions.c.after == "production",
        )
        newest = select(transitions.c.epoch).where(*entered).order_by(transitions.c.epoch.desc()).limit(HISTORY)
        kept = newest.subquery()
        count, oldest = self._connection.execute(select(func.count(), func.min(kept.c.epoch))).one()
        if count == HISTORY:
            older = delete(transitions).where(transitions.c.name == self._name, transitions.c.epoch < oldest)
            self._connection.execute(older)

    def put_experiment(self, row: Row) -> None:
        """See ModelTransaction.put_experiment. Deletes all but the newest HISTORY experiments."""
        known = [each["experiment"] for each in self.rows.experiments]
        is_known = row["experiment"] in known
        self._put(experiments, row, experiments.c.experiment == row["experiment"] if is_known else None)
        if not is_known and len(known) >= HISTORY:
            of_model = experiments.c.name == self._name
            oldest = experiments.c.experiment.in_(known[: len(known) - HISTORY + 1])
            self._connection.execute(delete(experiments).where(of_model, oldest))

    def put_policy(self, row: Row) -> None:
        """See ModelTransaction.put_policy."""
        self._put(policies, row, policies.c.name == self._name if self.rows.policies else None)

    def _put(self, table: Table, row: Row, key: ColumnElement[bool] | None) -> None:
        change = insert(table) if key is None else update(table).where(table.c.name == self._name, key)
        self._connection.execute(change.values(row))


def enter(
    store: RegistryStore,
    changed: Sequence[Row],
    done: Sequence[Row],
    tried: Sequence[Row] = (),
    ruled: Sequence[Row] = (),
    *,
    verify: Verifier,
    rehash: Callable[[str], Manifest],
) -> None:
    """Writes a change that an operator has signed on another machine, if it is the next change of its model.

    changed: the rows of the versions after the change. done: the row of its transition, at the end; rows before it,
    and other versions, may only have new signatures. tried: the rows of experiments that it changed. ruled: the row of
    the policy, if it changed that. A change that is already written is confirmed. Raises BadSignature, InvalidInput
    when the rows are not those of one change, ContentChanged, TransitionConflict.
    """
    if not done:
        raise InvalidInput("Expected a transition with the rows of a change")
    for table, rows in ((versions, changed), (transitions, done), (experiments, tried), (policies, ruled)):
        _check_columns(table, rows)
    told = [open_transition(row, verify) for row in done]
    last, renewed = told[-1], told[:-1]
    after = [open_version(row, verify) for row in changed]
    moved = [each for each in after if each.epoch == last.epoch]
    routed = [open_experiment(row, verify) for row in tried]
    policies_after = [open_policy(row, verify) for row in ruled]
    names = {each.name for each in after} | {each.name for each in renewed}
    names |= {each.name for each in routed} | {each.name for each in policies_after}
    strangers = names != {last.name}
    if strangers or last.version not in {each.version for each in moved}:
        raise InvalidInput("These rows are of several changes. Expected the versions that one transition changed")
    manifest = _hashed(next(each for each in moved if each.version == last.version), last.action, rehash)
    with store.changing(last.name, is_new=last.action is TransitionAction.REGISTER) as transaction:
        before = transaction.rows
        if before.transitions and dict(before.transitions[-1]) == dict(done[-1]):
            return
        _check_next(last, before)
        known = {each.version: each for each in (open_version(row, verify) for row in before.versions)}
        history = [open_transition(row, verify) for row in before.transitions]
        known_policy = next((open_policy(row, verify) for row in before.policies), None)
        unmoved = [each for each in after if each not in moved]
        older = [each for each in routed if each.epoch != last.epoch]
        stored = [open_experiment(row, verify) for row in before.experiments] if older else []
        if (
            any(known.get(each.version) != each for each in unmoved)
            or any(each not in history for each in renewed)
            or any(each not in stored for each in older)
            or any(each != known_policy for each in policies_after if each.epoch != last.epoch)
        ):
            raise InvalidInput(
                "Rows of this change differ from the stored ones. Expected them to differ in signatures only"
            )
        for row in changed:
            transaction.put_version(row)
        for row in done:
            transaction.put_transition(row)
        for row in tried:
            transaction.put_experiment(row)
        for row in ruled:
            transaction.put_policy(row)
        whole = known | {each.version: each for each in moved}
        policy = policies_after[-1] if policies_after else known_policy
        check_whole(RegisteredModel(last.name, whole, last.epoch, last.productions, policy=policy), (*history, last))
        if manifest is not None:
            check_files(manifest)


def _check_columns(table: Table, rows: Sequence[Row]) -> None:
    names = [column.name for column in table.columns]
    for name in names:
        if any(name not in row for row in rows):
            raise InvalidInput(f"A row of {table.name} lacks {name}. Expected: {', '.join(names)}")


def _check_next(last: Transition, before: ModelRows) -> None:
    """Raises TransitionConflict unless the transition follows the stored ones."""
    epoch = before.transitions[-1]["epoch"] if before.transitions else 0
    if last.epoch != epoch + 1 and not (last.epoch > epoch and (last.action is TransitionAction.SIGN or not epoch)):
        raise TransitionConflict(
            f"{last.name} was changed meanwhile and is at epoch {epoch} now. Expected a new decision"
        )


def _hashed(version: RegisteredVersion, action: TransitionAction, rehash: Callable[[str], Manifest]) -> Manifest | None:
    """The present files, if the change depends on them. Raises ContentChanged."""
    if action not in _HASHED:
        return None
    manifest = rehash(version.source)
    if manifest.content_hash != version.content_hash:
        raise ContentChanged(f"{version.reference}: its files are not as they were registered")
    return manifest


def check_files(manifest: Manifest) -> None:
    """Raises ContentChanged when a file has changed since it was hashed."""
    try:
        manifest.check_unchanged()
    except ConfigurationError as problem:
        raise ContentChanged(str(problem)) from None


def _names(connection: Connection) -> tuple[str, ...]:
    return tuple(connection.execute(select(models.c.name).order_by(models.c.name)).scalars())


def _rows(connection: Connection, name: str, newest: int | None) -> ModelRows:
    found = select(versions).where(versions.c.name == name).order_by(versions.c.registered_at, versions.c.version)
    done = select(transitions).where(transitions.c.name == name).order_by(transitions.c.epoch.desc()).limit(newest)
    tried = select(experiments).where(experiments.c.name == name)
    tried = tried.order_by(experiments.c.begun_at, experiments.c.experiment)
    ruled = select(policies).where(policies.c.name == name)
    return ModelRows(
        [dict(row) for row in connection.execute(found).mappings()],
        [dict(row) for row in reversed(connection.execute(done).mappings().all())],
        [dict(row) for row in connection.execute(tried).mappings()],
        [dict(row) for row in connection.execute(ruled).mappings()],
    )
