"""Registry records are the operator's: whoever only has the database's password changes nothing that is believed.

RELIABILITY, threat S0.1. Each attack is SQL on a real database.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.registry.catalog import ModelLineage, ModelStage
from penstock.registry.catalog.tables import versions
from penstock.registry.errors import BadSignature
from penstock.safety.keys import OperatorKey, PublicKeys
from tests.registry.catalog.catalogs import ModelLifecycle, new_key

ARCHIVED, PRODUCTION, STAGING = ModelStage.ARCHIVED, ModelStage.PRODUCTION, ModelStage.STAGING


@pytest.fixture(scope="module")
def key() -> OperatorKey:
    """The operator's."""
    return new_key()


@pytest.fixture
def shelf(tmp_path: Path, models_root: Path, slot: str, key: OperatorKey) -> ModelLifecycle:
    """A model with one version archived, one in production and one in staging, all signed; in SQLite."""
    return _filled(f"sqlite:///{tmp_path}/registry.db", models_root, slot, key)


def _filled(url: str, models_root: Path, slot: str, key: OperatorKey) -> ModelLifecycle:
    signed = {"sign": key.sign, "verify": PublicKeys.parse(key.public_text).verify}
    shelf = ModelLifecycle(url, models_root, slot, signed)
    shelf.put("1", PRODUCTION)
    shelf.put("2", PRODUCTION)
    shelf.put("3", STAGING)
    return shelf


def test_signed_records_are_believed(shelf: ModelLifecycle):
    """What the operator wrote, every holder of the public key reads; describing and going back keep it so."""
    shelf.client.describe(shelf.name, "3", ModelLineage(code_hash="3f2a91c"))
    shelf.client.rollback(shelf.name)
    shelf.client.demote(shelf.name, "3")
    reader = shelf.reopened(sign=None)
    assert reader.find(shelf.name).version == "1"
    assert len(reader.history(shelf.name)) == 11


def test_signatures_hold_beyond_the_end_of_the_history(shelf: ModelLifecycle, monkeypatch: pytest.MonkeyPatch):
    """A version whose last change is forgotten by now is still the one that was signed."""
    monkeypatch.setattr("penstock.registry.catalog.store.HISTORY", 2)
    for version in ("4", "5"):
        shelf.put(version, PRODUCTION)
    history = shelf.client.history(shelf.name)
    assert history[0].epoch > 3
    assert shelf.client.find(shelf.name, "1").stage is ARCHIVED


def test_unsigned_records_are_refused(shelf: ModelLifecycle):
    """A client without the operator's key cannot bring a version that others believe."""
    intruder = shelf.reopened(sign=None, verify=None)
    shelf.put("4", STAGING, intruder)
    with pytest.raises(BadSignature, match=r"registry version .* 4: an unsigned record"):
        shelf.client.find(shelf.name)
    with pytest.raises(BadSignature):
        shelf.client.promote(shelf.name, "3", PRODUCTION)


def test_records_of_another_operator_are_refused(shelf: ModelLifecycle):
    """A key that nobody here was told of signs nothing."""
    shelf.put("4", STAGING, shelf.reopened(sign=new_key().sign, verify=None))
    with pytest.raises(BadSignature, match="not known here"):
        shelf.client.versions(shelf.name)


EDITS = {
    "a version put into production": (
        "UPDATE penstock_versions SET stage = 'archived' WHERE name = :name AND version = '2'",
        "UPDATE penstock_versions SET stage = 'production' WHERE name = :name AND version = '1'",
    ),
    "other files": ("UPDATE penstock_versions SET files = '{}' WHERE name = :name AND version = '3'",),
    "files that are no list": ("UPDATE penstock_versions SET files = '{' WHERE name = :name AND version = '3'",),
    "another folder": ("UPDATE penstock_versions SET source = '/elsewhere' WHERE name = :name AND version = '3'",),
    "another lineage": ("UPDATE penstock_versions SET lineage = '{}' WHERE name = :name AND version = '3'",),
    "another signature": (
        "UPDATE penstock_versions SET signature = "
        "(SELECT signature FROM penstock_versions WHERE name = :name AND version = '2') "
        "WHERE name = :name AND version = '3'",
    ),
    "a version deleted": ("DELETE FROM penstock_versions WHERE name = :name AND version = '3'",),
    "a version renamed": ("UPDATE penstock_versions SET version = '4' WHERE name = :name AND version = '3'",),
    "a step renumbered": ("UPDATE penstock_transitions SET epoch = 99 WHERE name = :name AND epoch = 8",),
    "a step rewritten": ("UPDATE penstock_transitions SET replaced = NULL WHERE name = :name AND epoch = 6",),
    "another reason": ("UPDATE penstock_transitions SET reason = 'approved by ada' WHERE name = :name AND epoch = 6",),
    "a step taken out": ("DELETE FROM penstock_transitions WHERE name = :name AND epoch = 5",),
    "the last step taken out": ("DELETE FROM penstock_transitions WHERE name = :name AND epoch = 8",),
    "the history taken out": ("DELETE FROM penstock_transitions WHERE name = :name",),
    "other productions": (
        'UPDATE penstock_transitions SET productions = \'["3","2"]\' WHERE name = :name AND epoch = 8',
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edited_rows_are_refused(edit: str, shelf: ModelLifecycle):
    """Whatever SQL does to a model's rows, none of its reads and changes goes on as if nothing were."""
    for statement in EDITS[edit]:
        shelf.execute(statement)
    for call in (
        lambda: shelf.client.find(shelf.name, "2"),
        lambda: shelf.client.history(shelf.name),
        lambda: shelf.client.promote(shelf.name, "3", PRODUCTION),
        lambda: shelf.client.rollback(shelf.name),
    ):
        with pytest.raises(BadSignature) as refused:
            call()
        assert "\n" not in str(refused.value)


def test_missing_step_is_named(shelf: ModelLifecycle):
    """Whoever looks for what was hidden is told where."""
    shelf.execute("DELETE FROM penstock_transitions WHERE name = :name AND epoch = 5")
    with pytest.raises(BadSignature, match=f"the history of {shelf.name} has no epoch 5"):
        shelf.client.find(shelf.name)


def test_older_rows_put_back_are_refused(shelf: ModelLifecycle):
    """Rows that were good once do not bring back a version whose end is in the history."""
    old = shelf.execute("SELECT * FROM penstock_versions WHERE name = :name AND version = '2'")
    shelf.client.promote(shelf.name, "3", PRODUCTION)
    shelf.client.rollback(shelf.name)
    shelf.client.rollback(shelf.name)
    shelf.put("4", STAGING)
    shelf.execute("DELETE FROM penstock_versions WHERE name = :name AND version IN ('1', '2')")
    shelf.insert(versions, old[0])
    with pytest.raises(BadSignature, match="/2 is not the one of its last change"):
        shelf.client.find(shelf.name)


def test_rows_that_are_no_records_are_refused_without_keys_too(shelf: ModelLifecycle):
    """Whatever a column holds, the error is one line about the record."""
    trusting = shelf.reopened(verify=None)
    shelf.execute("UPDATE penstock_versions SET spec = 'nonsense' WHERE name = :name AND version = '3'")
    with pytest.raises(BadSignature, match=r"registry version .* 3: not a record that was written here"):
        trusting.find(shelf.name)
    shelf.execute("UPDATE penstock_versions SET spec = '{}' WHERE name = :name AND version = '3'")
    shelf.execute("UPDATE penstock_transitions SET action = 'launch' WHERE name = :name AND epoch = 8")
    with pytest.raises(BadSignature, match=r"registry transition .* 8: not a record"):
        trusting.find(shelf.name)
