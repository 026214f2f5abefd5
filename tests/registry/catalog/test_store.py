"""Changes that an operator signed on another machine, written by a process without a key. CX-003, IN-064."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.registry.catalog import ModelStage
from penstock.registry.catalog.store import ModelTransaction, SqlStore, enter
from penstock.registry.catalog.tables import open_transition, open_version, seal_row
from penstock.registry.errors import BadSignature, ContentChanged, InvalidInput, TransitionConflict
from penstock.registry.operator_rpc import Row
from penstock.registry.package import load_package
from penstock.safety.operator_key import OperatorKey, PublicKeys
from tests.registry.catalog.catalogs import Catalog, new_key


class Overheard:
    """A store that keeps what a client would write, and writes nothing."""

    def __init__(self, url: str) -> None:
        self._store = SqlStore(url)
        self.versions: list[Row] = []
        self.transitions: list[Row] = []
        self.experiments: list[Row] = []
        self.policies: list[Row] = []
        self.names = self._store.names
        self.read = self._store.read

    @contextmanager
    def changing(self, name: str, *, is_new: bool = False, newest: int | None = None) -> Iterator[ModelTransaction]:
        """The rows as they are; what is put stays here."""
        self.rows = self.read((name,), newest)[name]
        yield self

    def put_version(self, row: Row) -> None:
        """See ModelTransaction."""
        self.versions.append(row)

    def put_transition(self, row: Row) -> None:
        """See ModelTransaction."""
        self.transitions.append(row)

    def put_experiment(self, row: Row) -> None:
        """See ModelTransaction."""
        self.experiments.append(row)

    def put_policy(self, row: Row) -> None:
        """See ModelTransaction."""
        self.policies.append(row)


class Harness:
    """A registry with versions 1 (production), 2 (staging) and 3 (draft), and changes that are not written yet."""

    def __init__(self, url: str, root: Path, slot: str) -> None:
        self.key = new_key()
        self.verify = PublicKeys.parse(self.key.public_text).verify
        self.catalog = Catalog(url, root, slot, {"sign": self.key.sign, "verify": self.verify})
        self.catalog.put("1", ModelStage.PRODUCTION)
        self.catalog.put("2", ModelStage.STAGING)
        self.catalog.put("3")

    def decided(self, key: OperatorKey | None = None, version: str = "2") -> Overheard:
        """A promotion to production, signed."""
        overheard = Overheard(self.catalog.url)
        client = self.catalog.reopened(store=overheard, sign=(key or self.key).sign)
        client.promote(self.catalog.name, version, ModelStage.PRODUCTION)
        return overheard

    def enter(self, versions: Any, transitions: Any, rehash: Callable[[str], Any] | None = None) -> None:
        """As a worker does it."""
        look = rehash or (lambda source: load_package(Path(source)).manifest())
        enter(SqlStore(self.catalog.url), versions, transitions, verify=self.verify, rehash=look)

    @property
    def production(self) -> str:
        """The version in production."""
        return self.catalog.client.find(self.catalog.name).version


@pytest.fixture
def harness(registry_url: str, models_root: Path, slot: str) -> Harness:
    """See Harness."""
    return Harness(registry_url, models_root, slot)


def test_a_signed_change_is_entered_once(harness: Harness):
    """Its repetition, as after an answer that was lost, is confirmed and changes nothing."""
    decided = harness.decided()
    assert harness.production == "1"
    for _ in range(2):
        harness.enter(decided.versions, decided.transitions)
        assert harness.production == "2"
    stages = harness.catalog.stages()
    assert (stages["1"], stages["2"], stages["3"]) == (ModelStage.ARCHIVED, ModelStage.PRODUCTION, ModelStage.DRAFT)
    harness.catalog.client.rollback(harness.catalog.name)
    assert harness.production == "1"


def test_an_overtaken_change_is_refused(harness: Harness):
    """Whatever it was that came first, and however often it is sent; nothing of it is written."""
    decided = harness.decided()
    harness.catalog.client.promote(harness.catalog.name, "3", ModelStage.STAGING)
    for _ in range(2):
        with pytest.raises(TransitionConflict, match="changed meanwhile and is at epoch"):
            harness.enter(decided.versions, decided.transitions)
    assert harness.production == "1"


def test_only_what_a_known_operator_signed_is_entered(harness: Harness):
    """A stranger's rows, unsigned ones, and genuine ones with another word in them (S0.3)."""
    stranger = harness.decided(new_key())
    genuine = harness.decided()
    forged: list[tuple[Any, Any]] = [
        (stranger.versions, stranger.transitions),
        (stranger.versions, genuine.transitions),
        (genuine.versions, stranger.transitions),
        ([{**row, "signature": ""} for row in genuine.versions], genuine.transitions),
        ([{**row, "source": "/elsewhere"} for row in genuine.versions], genuine.transitions),
        (genuine.versions, [{**genuine.transitions[-1], "reason": "because"}]),
        ([{**row, "owner": "me"} for row in genuine.versions], genuine.transitions),
    ]
    for versions, transitions in forged:
        with pytest.raises(BadSignature):
            harness.enter(versions, transitions)
    assert harness.production == "1"


def test_rows_of_one_change_belong_together(harness: Harness):
    """Without the archived one there would be two in production; without the promoted one, none."""
    decided = harness.decided()
    old, new = decided.versions
    for versions in ([new], [old], [], [old, new, *harness.decided(version="2").rows.versions]):
        with pytest.raises((InvalidInput, BadSignature, TransitionConflict)):
            harness.enter(versions, decided.transitions)
    assert (harness.production, harness.catalog.stages()["2"]) == ("1", ModelStage.STAGING)


def test_files_are_hashed_where_they_lie(harness: Harness):
    """Changed before the change is entered, or while it is: refused, with nothing written (S0.5)."""
    decided = harness.decided()
    folder = harness.catalog.root / harness.catalog.name / "2"

    def hash_then_swap(source: str) -> Any:
        manifest = load_package(Path(source)).manifest()
        (folder / "model.py").write_text("def build():\n    return None\n")
        return manifest

    with pytest.raises(ContentChanged, match=r"model\.py: changed since it was hashed"):
        harness.enter(decided.versions, decided.transitions, hash_then_swap)
    with pytest.raises(ContentChanged, match="not as they were registered"):
        harness.enter(decided.versions, decided.transitions)
    assert harness.production == "1"


def test_a_change_without_a_transition_is_none(harness: Harness):
    """Rows alone say nothing of why they changed."""
    with pytest.raises(InvalidInput, match="Expected a transition"):
        harness.enter(harness.decided().versions, [])


def test_a_row_that_lacks_a_column_is_refused_in_words(harness: Harness):
    """The operator of another program learns which columns are expected."""
    decided = harness.decided()
    for column in ("name", "signature", "stage"):
        lacking = [{name: value for name, value in row.items() if name != column} for row in decided.versions]
        with pytest.raises(InvalidInput, match=rf"versions lacks {column}\. Expected: name, "):
            harness.enter(lacking, decided.transitions)
    assert harness.production == "1"


def test_records_signed_anew_are_the_same_records(harness: Harness):
    """A renewal replaces signatures and nothing else: with another word in it, it is refused as a whole."""
    new = new_key()
    both = PublicKeys.parse(f"{harness.key.public_text},{new.public_text}").verify
    overheard = Overheard(harness.catalog.url)
    harness.catalog.reopened(store=overheard, sign=new.sign).renew(harness.catalog.name)
    harness.verify = both
    for label in ("2", "3"):
        other = next(open_version(row, both) for row in overheard.versions if row["version"] == label)
        forged = seal_row(replace(other, source="/elsewhere"), new.sign)
        versions = [forged if row["version"] == label else row for row in overheard.versions]
        with pytest.raises(InvalidInput, match="differ in signatures"):
            harness.enter(versions, overheard.transitions)
    first = open_transition(overheard.transitions[0], both)
    rewritten = [seal_row(replace(first, reason="because"), new.sign), *overheard.transitions[1:]]
    with pytest.raises(InvalidInput, match="differ in signatures"):
        harness.enter(overheard.versions, rewritten)
    harness.enter(overheard.versions, overheard.transitions)
    alone = harness.catalog.reopened(verify=PublicKeys.parse(new.public_text).verify)
    assert [each.action for each in alone.history(harness.catalog.name)][-1] == "sign"
    with pytest.raises(BadSignature):
        harness.catalog.client.find(harness.catalog.name)
