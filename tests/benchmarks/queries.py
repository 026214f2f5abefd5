"""Statements that jobs send to the model registry's database, by the server's own count.

PostgreSQL counts the sessions and transactions of each database. The registry is in use meanwhile:
the model that answers is its production version.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

import numpy as np
import pytest

from penstock.registry.catalog import ModelRegistryClient, ModelStage
from penstock.registry.package import load_package
from tests.benchmarks import mlp
from tests.benchmarks.harness import Harness
from tests.benchmarks.report import Progress, Row, verdict
from tests.benchmarks.scale import Scale
from tests.servers import PostgresDatabase, wait_until

__all__ = ["measure"]

_WHAT: Final = "database queries on the job path"
_REQUIRED: Final = "0 per job"
_TIMEOUT_S: Final = 10.0
_STATISTICS: Final = """
SELECT sessions, xact_commit + xact_rollback,
       (SELECT count(*) FROM pg_stat_activity WHERE datname = %(name)s AND backend_type = 'client backend')
FROM pg_stat_database WHERE datname = %(name)s
"""


class Use(NamedTuple):
    """What a database has seen so far, and who is connected to it now."""

    sessions: int
    transactions: int
    connected: int


def measure(scale: Scale, say: Progress) -> list[Row]:
    """Transactions on the registry's database while jobs run, from submission to result, in client and worker."""
    try:
        database = PostgresDatabase().create()
    except pytest.skip.Exception as reason:
        return [Row(_WHAT, f"not run: {reason}", _REQUIRED)]
    try:
        return [_counted(database, scale.stored_jobs, say)]
    finally:
        database.drop()


def _counted(database: PostgresDatabase, jobs: int, say: Progress) -> Row:
    catalog = ModelRegistryClient(database.url)
    catalog.register(load_package(mlp.MODELS / "mlp" / "1", (mlp.MODELS,)))
    catalog.promote("mlp", "1", ModelStage.STAGING)
    catalog.promote("mlp", "1", ModelStage.PRODUCTION)
    with Harness({"PENSTOCK_REGISTRY_URL": database.url}) as harness:
        server = harness.redis()
        harness.worker(server, "mlp")
        client = harness.producer(server)
        client.map("mlp", mlp.inputs(mlp.BATCH, seed=0))
        rows = mlp.inputs(jobs, seed=1)
        before = _use(database)
        mlp.check(rows, np.stack(client.map("mlp", rows)))
        queries = _transactions(before, _use(database))
    before = _use(database)
    catalog.find("mlp")
    # Without this the count above would prove nothing: a session is counted when it has ended.
    wait_until(lambda: _transactions(before, _use(database)), _TIMEOUT_S, "a look at the registry is counted")
    say(f"queries: {queries} in {jobs:,} jobs")
    return Row(
        _WHAT,
        f"{queries / jobs:g} per job ({queries} in {jobs:,} jobs)",
        _REQUIRED,
        "",
        verdict(required=queries == 0),
        {"queries": queries, "jobs": jobs},
    )


def _transactions(before: Use, after: Use) -> int:
    """Of clients; the server's own housekeeping opens no session."""
    if after.sessions == before.sessions and not after.connected:
        return 0
    return after.transactions - before.transactions


def _use(database: PostgresDatabase) -> Use:
    import psycopg

    host = os.environ.get("PGHOST", "127.0.0.1")
    with psycopg.connect(host=host, dbname="postgres", autocommit=True, connect_timeout=5) as connection:
        found = connection.execute(_STATISTICS, {"name": database.name}).fetchone()
    if found is None:
        raise ValueError("The registry's database is gone")
    return Use(*found)
