"""Records of the registry are signed: the database's password alone is not enough to change a trusted record.

RELIABILITY, threat S0.1. Each attack is SQL on a real database.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.registry.catalog import ModelLineage, ModelStage
from penstock.registry.catalog.tables import versions
from penstock.registry.errors import BadSignature
from penstock.safety.operator_key import OperatorKey, PublicKeys
from tests.registry.catalog.catalogs import Catalog, new_key

ARCHIVED, PRODUCTION, STAGING = ModelStage.ARCHIVED, ModelStage.PRODUCTION, ModelStage.STAGING


@pytest.fixture(scope="module")
def key() -> OperatorKey:
    """The operator's."""
    return new_key()


@pytest.fixture
def catalog(tmp_path: Path, models_root: Path, slot: str, key: OperatorKey) -> Catalog:
    """A model with one version archived, one in production and one in staging, all signed; in SQLite."""
    return _filled(f"sqlite:///{tmp_path}/registry.db", models_root, slot, key)


def _filled(url: str, models_root: Path, slot: str, key: OperatorKey) -> Catalog:
    signed = {"sign": key.sign, "verify": PublicKeys.parse(key.public_text).verify}
    catalog = Catalog(url, models_root, slot, signed)
    catalog.put("1", PRODUCTION)
    catalog.put("2", PRODUCTION)
    catalog.put("3", STAGING)
    return catalog


def test_signed_records_are_believed(catalog: Catalog):
    """What the operator wrote, every holder of the public key reads; describing and going back keep it so."""
    catalog.client.describe(catalog.name, "3", ModelLineage(code_hash="3f2a91c"))
    catalog.client.rollback(catalog.name)
    catalog.client.demote(catalog.name, "3")
    reader = catalog.reopened(sign=None)
    assert reader.find(catalog.name).version == "1"
    assert len(reader.history(catalog.name)) == 11


def test_signatures_hold_beyond_the_end_of_the_history(catalog: Catalog, monkeypatch: pytest.MonkeyPatch):
    """A version whose last change is forgotten by now is still the one that was signed."""
    monkeypatch.setattr("penstock.registry.catalog.store.HISTORY", 2)
    for version in ("4", "5"):
        catalog.put(version, PRODUCTION)
    history = catalog.client.history(catalog.name)
    assert history[0].epoch > 3
    assert catalog.client.find(catalog.name, "1").stage is ARCHIVED


def test_unsigned_records_are_refused(catalog: Catalog):
    """Other clients refuse a version that was registered without the operator's key."""
    intruder = catalog.reopened(sign=None, verify=None)
    catalog.put("4", STAGING, intruder)
    with pytest.raises(BadSignature, match=r"registry version .* 4: an unsigned record"):
        catalog.client.find(catalog.name)
    with pytest.raises(BadSignature):
        catalog.client.promote(catalog.name, "3", PRODUCTION)


def test_records_of_another_operator_are_refused(catalog: Catalog):
    """A signature with an unknown key is refused."""
    catalog.put("4", STAGING, catalog.reopened(sign=new_key().sign, verify=None))
    with pytest.raises(BadSignature, match="not known here"):
        catalog.client.versions(catalog.name)


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
def test_edited_rows_are_refused(edit: str, catalog: Catalog):
    """Whatever SQL does to a model's rows, none of its reads and changes goes on as if nothing were."""
    for statement in EDITS[edit]:
        catalog.execute(statement)
    for call in (
        lambda: catalog.client.find(catalog.name, "2"),
        lambda: catalog.client.history(catalog.name),
        lambda: catalog.client.promote(catalog.name, "3", PRODUCTION),
        lambda: catalog.client.rollback(catalog.name),
    ):
        with pytest.raises(BadSignature) as refused:
            call()
        assert "\n" not in str(refused.value)


def test_missing_step_is_named(catalog: Catalog):
    """The error names the record that is missing."""
    catalog.execute("DELETE FROM penstock_transitions WHERE name = :name AND epoch = 5")
    with pytest.raises(BadSignature, match=f"the history of {catalog.name} has no epoch 5"):
        catalog.client.find(catalog.name)


def test_older_rows_put_back_are_refused(catalog: Catalog):
    """Rows that were good once do not bring back a version whose end is in the history."""
    old = catalog.execute("SELECT * FROM penstock_versions WHERE name = :name AND version = '2'")
    catalog.client.promote(catalog.name, "3", PRODUCTION)
    catalog.client.rollback(catalog.name)
    catalog.client.rollback(catalog.name)
    catalog.put("4", STAGING)
    catalog.execute("DELETE FROM penstock_versions WHERE name = :name AND version IN ('1', '2')")
    catalog.insert(versions, old[0])
    with pytest.raises(BadSignature, match="/2 is not the one of its last change"):
        catalog.client.find(catalog.name)


def test_rows_that_are_no_records_are_refused_without_keys_too(catalog: Catalog):
    """Whatever a column holds, the error is one line about the record."""
    trusting = catalog.reopened(verify=None)
    catalog.execute("UPDATE penstock_versions SET spec = 'nonsense' WHERE name = :name AND version = '3'")
    with pytest.raises(BadSignature, match=r"registry version .* 3: not a valid record"):
        trusting.find(catalog.name)
    catalog.execute("UPDATE penstock_versions SET spec = '{}' WHERE name = :name AND version = '3'")
    catalog.execute("UPDATE penstock_transitions SET action = 'launch' WHERE name = :name AND epoch = 8")
    with pytest.raises(BadSignature, match=r"registry transition .* 8: not a valid record"):
        trusting.find(catalog.name)
