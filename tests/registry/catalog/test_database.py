"""The registry's database: its URL, its schema, many processes at its first start, and what happens without it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from penstock.registry.catalog import ModelRegistryClient, ModelStage
from penstock.registry.catalog.database import REVISION
from penstock.registry.catalog.tables import SCHEMA_TABLE, metadata
from penstock.registry.errors import ConfigurationError, PenstockError, RegistryUnavailable
from tests.registry.catalog.catalogs import Catalog
from tests.servers import ROOT, PostgresDatabase, free_port


@pytest.fixture(params=["sqlite", "postgresql"])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database that was never used."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/registry.db"
        return
    database = PostgresDatabase().create()
    try:
        yield database.url
    finally:
        database.drop()


def _execute(url: str, statement: str) -> None:
    with create_engine(url, poolclass=NullPool).begin() as connection:
        connection.execute(text(statement))


def test_migrations_make_the_tables_that_the_code_uses(new_url: str):
    """What Alembic made and registry/catalog/tables.py describes is the same, to the last column and index."""
    ModelRegistryClient(new_url).models()
    with create_engine(new_url, poolclass=NullPool).connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": SCHEMA_TABLE, "compare_type": True})
        assert compare_metadata(context, metadata) == []
        assert context.get_current_revision() == REVISION


def test_revision_of_the_code_is_the_last_migration():
    """A new migration without a new REVISION would never run."""
    config = Config()
    config.set_main_option("script_location", "penstock.registry.catalog:migrations")
    assert ScriptDirectory.from_config(config).get_heads() == [REVISION]


CROWD = """
import os, sys
import alembic.command, alembic.runtime.migration, alembic.script
from sqlalchemy import make_url
from penstock.registry.catalog import ModelRegistryClient

# What each fork would import for itself.
make_url(sys.argv[1]).get_dialect().import_dbapi()
gate, opened = os.pipe()
for _ in range(20):
    if os.fork() == 0:
        os.close(opened)
        os.read(gate, 1)
        ModelRegistryClient(sys.argv[1]).models()
        os._exit(0)
os.close(opened)
print(sorted({os.wait()[1] for _ in range(20)}))
"""


def test_many_processes_make_one_schema(new_url: str):
    """20 processes that meet a database without tables all get to work on it, and none sees an error."""
    crowd = subprocess.run([sys.executable, "-c", CROWD, new_url], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (crowd.stdout, crowd.stderr) == ("[0]\n", "")


def test_newer_schema_is_refused(new_url: str):
    """An older Penstock leaves a newer one's database alone, and says so in one line."""
    ModelRegistryClient(new_url).models()
    _execute(new_url, "UPDATE penstock_schema SET version_num = '9999'")
    with pytest.raises(ConfigurationError, match=r"has schema '9999', which a newer Penstock made\. Expected 0006"):
        ModelRegistryClient(new_url).models()


LATER = (
    "penstock_audit_heads",
    "penstock_experiments",
    "penstock_goldens",
    "penstock_policies",
    "penstock_api_keys",
)
"""The tables of later schemas than the first one."""


def test_a_database_of_the_first_schema_is_upgraded(new_url: str):
    """Its models stay, and the tables that came later are added."""
    ModelRegistryClient(new_url).models()
    for added in LATER:
        _execute(new_url, f"DROP TABLE {added}")
    _execute(new_url, "UPDATE penstock_schema SET version_num = '0001'")
    _execute(new_url, "INSERT INTO penstock_models (name) VALUES ('mlp')")
    assert ModelRegistryClient(new_url).models() == ("mlp",)
    with create_engine(new_url, poolclass=NullPool).connect() as connection:
        for added in LATER:
            assert connection.dialect.has_table(connection, added)


def test_half_made_schema_is_never_seen(new_url: str, monkeypatch: pytest.MonkeyPatch):
    """A process that dies while it makes the tables leaves none; the next one makes them all."""
    client = ModelRegistryClient(new_url)

    def dies(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("alembic.op.create_index", dies)
    with pytest.raises(KeyboardInterrupt):
        client.models()
    monkeypatch.undo()
    with create_engine(new_url, poolclass=NullPool).connect() as connection:
        assert not connection.dialect.has_table(connection, "penstock_models")
    assert client.models() == ()


def test_options_of_the_url_are_kept(shared_postgres: PostgresDatabase):
    """A URL may name a schema of the server's database: everything is made there."""
    _execute(shared_postgres.url, "CREATE SCHEMA apart")
    ModelRegistryClient(f"{shared_postgres.url}&options=-csearch_path%3Dapart").models()
    with create_engine(shared_postgres.url, poolclass=NullPool).connect() as connection:
        assert connection.dialect.has_table(connection, "penstock_versions", schema="apart")


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("", "cannot be parsed"),
        ("registry.db", "cannot be parsed"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("mysql://me:secret@host/db", "begins with 'mysql'"),
        ("postgresql+asyncpg://me:secret@host/db", r"begins with 'postgresql\+asyncpg'"),
        ("postgresql://me:secret@host:port/db", "cannot be parsed"),
    ],
)
def test_url_that_cannot_work_is_refused_at_once(url: str, told: str):
    """One line with what is expected, never with the URL: it may hold a password."""
    with pytest.raises(ConfigurationError, match=f"{told}.*Expected sqlite:///FILE") as refused:
        ModelRegistryClient(url)
    assert "secret" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg"])
def test_server_that_does_not_answer(scheme: str):
    """One line without address, user and password."""
    port = free_port()
    client = ModelRegistryClient(f"{scheme}://me:secret@127.0.0.1:{port}/db")
    with pytest.raises(RegistryUnavailable, match=r"cannot be used \(Connection refused\)") as refused:
        client.models()
    assert not any(word in str(refused.value) for word in ("secret", "me", str(port), "127"))


def test_database_that_does_not_exist(shared_postgres: PostgresDatabase):
    """What a server says that refuses, without the name that the URL has."""
    client = ModelRegistryClient(shared_postgres.url.replace(shared_postgres.name, "penstock_none"))
    with pytest.raises(RegistryUnavailable, match=r"cannot be used \(database does not exist\)") as refused:
        client.models()
    assert "penstock_none" not in str(refused.value)


def test_file_that_is_no_database(tmp_path: Path):
    """A file of something else is left as it is."""
    file = tmp_path / "registry.db"
    file.write_bytes(b"something else entirely " * 100)
    with pytest.raises(RegistryUnavailable, match="file is not a database"):
        ModelRegistryClient(f"sqlite:///{file}").models()
    assert file.read_bytes().startswith(b"something else")


def test_folder_that_cannot_be_made(tmp_path: Path):
    """A file stands where the folder should be: one line that names the database's file only."""
    (tmp_path / "home").write_text("")
    with pytest.raises(ConfigurationError, match=r"file registry\.db cannot be made") as refused:
        ModelRegistryClient(f"sqlite:///{tmp_path}/home/registry.db").models()
    assert str(tmp_path) not in str(refused.value)


def test_making_the_file_leaves_nothing_else(tmp_path: Path):
    """The folder holds the database, and nothing that it was made from."""
    ModelRegistryClient(f"sqlite:///{tmp_path}/home/registry.db").models()
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["registry.db"]


def test_refused_change_leaves_nothing_behind(registry_url: str, models_root: Path, slot: str):
    """An exception after the rows were written undoes them all, on both databases."""
    catalog = Catalog(registry_url, models_root, slot)
    catalog.put("1", ModelStage.PRODUCTION)
    catalog.put("2", ModelStage.STAGING)
    before = (catalog.client.versions(slot), catalog.client.history(slot))

    def refuse(_: object) -> None:
        raise PenstockError("the audit log is full")

    with pytest.raises(PenstockError, match="full"):
        catalog.reopened(audit=refuse).promote(slot, "2", ModelStage.PRODUCTION)
    assert (catalog.client.versions(slot), catalog.client.history(slot)) == before


def test_importing_the_catalogue_opens_nothing():
    """No connection and no file before the first use, and Alembic only where a schema is made."""
    program = (
        "import sys; from penstock.registry.catalog import ModelRegistryClient as C; "
        "C('sqlite:////nowhere/x.db'); print('alembic' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"
