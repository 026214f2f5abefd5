"""F15: 20 processes promote and roll back one model at once, and some are killed in the middle of a change."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.registry.catalog import ModelRegistryClient, ModelStage
from tests.faults.promoters import MODEL, moments_of, race, stock
from tests.faults.rounds import is_full, seeds
from tests.servers import PostgresDatabase, let_pass, wait_until

PROCESSES = 20
"""In each round; `make bench` lets each of them try 200 changes."""
FIRST, *_ = seeds()


@pytest.fixture(params=["sqlite", "postgresql"])
def own_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database that this test has for itself."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/registry.db"
        return
    database = PostgresDatabase().create()
    try:
        yield database.url
    finally:
        database.drop()


@pytest.mark.parametrize("seed", seeds(ways=2))
def test_racing_operators_leave_one_version_in_production(seed: int, own_url: str, tmp_path: Path, record_property):
    """AR-021: one version in production at every moment, though four die inside a change; every loser is told."""
    chance = random.Random(seed)
    times = 20 if is_full() else 2 if seed == FIRST else 4
    victims = dict.fromkeys(chance.sample(range(PROCESSES), 3), 1)

    def kill_another(pids: list[int]) -> None:
        let_pass(chance.uniform(0.0, 0.5))
        with suppress(ProcessLookupError):
            os.kill(pids[chance.choice(sorted(set(range(PROCESSES)) - victims.keys()))], signal.SIGKILL)

    found = race(
        own_url, tmp_path, processes=PROCESSES, times=times, seed=seed, victims=victims, meanwhile=kill_another
    )
    record_property("times", PROCESSES * times)
    record_property("lost", found.others)
    assert found.unexpected == []
    assert found.others == 0
    assert found.missing == 0
    assert found.moments > 0
    assert found.told > 0
    # Who was killed from outside may have been so between the commit and the note of it.
    assert 0 <= found.changes - found.outcomes["done"] <= 1
    assert len(victims) <= found.killed <= len(victims) + 1
    assert found.outcomes.total() >= (PROCESSES - len(victims) - 1) * times
    _promote_another(ModelRegistryClient(own_url))


def _promote_another(client: ModelRegistryClient) -> None:
    """An operator that comes after the killed ones finds no lock in the way."""
    stages = [version.stage for version in client.versions(MODEL)]
    assert stages.count(ModelStage.PRODUCTION) == 1
    current = client.find(MODEL)
    other = next(each for each in client.versions(MODEL) if each.stage is not ModelStage.PRODUCTION)
    if other.stage is ModelStage.ARCHIVED:
        client.promote(MODEL, other.version, ModelStage.STAGING)
    assert client.promote(MODEL, other.version, ModelStage.PRODUCTION).replaced == current.version


def test_race_that_is_broken_off_leaves_no_operator(tmp_path: Path):
    """A test's time-out or Ctrl-C that ends a race early ends its operators, too."""
    operators: list[int] = []

    def break_off(pids: list[int]) -> None:
        operators.extend(pids)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        race(f"sqlite:///{tmp_path}/registry.db", tmp_path, processes=3, times=1000, meanwhile=break_off)
    wait_until(lambda: not any(map(_is_alive, operators)), 10, f"the end of {operators}")
    assert len(operators) == 3


def _is_alive(pid: int) -> bool:
    # A killed process that was not waited for is a zombie, and no longer alive.
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_history_with_two_or_none_in_production_is_noticed(tmp_path: Path):
    """The checker itself: a step that forgets its predecessor, and one that leaves no version, are counted."""
    client = stock(f"sqlite:///{tmp_path}/registry.db", tmp_path / "models")
    client.promote(MODEL, "2", ModelStage.PRODUCTION)
    sound = client.history(MODEL)
    assert set(moments_of(sound)) == {1}
    forgetful = [*sound[:-1], replace(sound[-1], replaced=None)]
    assert moments_of(forgetful)[2] == 1
    deserted = [*sound, replace(sound[-1], after=ModelStage.DRAFT, before=ModelStage.PRODUCTION, replaced=None)]
    assert moments_of(deserted)[0] == 1
