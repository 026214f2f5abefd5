"""Every endpoint against changed and random input: a clear refusal within 50 ms, or a valid reading. Reduced counts.

`python -m tests.threats` runs the same with a hundred thousand.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.threats import fuzz
from tests.threats.conftest import AttackedWorker
from tests.threats.hostile_load import send_hostile_entries, send_hostile_tasks

ENDPOINTS = ["envelope", "tensors", "events", "inputs", "spec", "settings", "lane"]


@pytest.fixture(scope="module")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fuzz.Target]:
    """By name."""
    found = {target.name: target for target in fuzz.targets(tmp_path_factory.mktemp("endpoints"))}
    assert list(found) == ENDPOINTS
    return found


@pytest.mark.parametrize("name", ENDPOINTS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(random=st.randoms(use_true_random=False))
def test_endpoint_refuses_or_reads(name: str, endpoints: dict[str, fuzz.Target], random: Random):
    """Every offer; hypothesis looks for the smallest that does something else."""
    ingress = endpoints[name]
    ingress.offer(ingress.make(random))


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDPOINTS)
def test_endpoint_withstands_many(name: str, endpoints: dict[str, fuzz.Target]):
    """A seeded run of some hundreds: mostly refusals, so that the changes do what they are for, and some readings."""
    ingress, random = endpoints[name], Random(f"{name} 1")
    outcomes = [ingress.offer(ingress.make(random)) for _ in range(300)]
    assert sum(bool(outcome.refusal) for outcome in outcomes) > 150
    assert name == "envelope" or not all(outcome.refusal for outcome in outcomes)


@pytest.mark.parametrize(
    ("name", "kind"), [("envelope", "envelopes"), ("spec", "specs"), ("lane", "lane"), ("settings", "settings")]
)
def test_known_attacks_are_refused(name: str, kind: str, endpoints: dict[str, fuzz.Target]):
    """The corpus: what fuzzing found, and what others' parsers fell for. The first item is a good one."""
    good, *hostile = fuzz.seeds(kind)
    ingress = endpoints[name]
    shape = {"settings": lambda item: ({}, item), "lane": fuzz.arguments_of}.get(name, lambda item: item)
    shaped = [shape(item) for item in (good, *hostile)]
    outcomes = [ingress.offer(item) for item in shaped]
    assert len(outcomes) > 25
    assert sum(bool(outcome.refusal) for outcome in outcomes[1:]) > len(hostile) * 0.7
    assert name == "envelope" or not outcomes[0].refusal


def test_worker_survives_hostile_messages(target: AttackedWorker):
    """A thousand entries of every kind in its queues: each one leaves them, and good jobs between them are served."""
    with target.client() as client:
        load = send_hostile_entries(target.worker, client, Random(1), 1_000)
    assert load.dead_lettered > 900


def test_worker_survives_hostile_tasks(target: AttackedWorker):
    """Tasks with changed arguments on Celery's queue: each one is taken, and the lane goes on."""
    send_hostile_tasks(target.worker, Random(1), 100, broken=1)


def test_finding_is_found():
    """The checks themselves: another exception, a refusal that says nothing, and one beyond its limit."""

    def wrong(_: object) -> None:
        raise KeyError("x")

    def silent(_: object) -> None:
        raise ValueError

    def late(_: object) -> None:
        raise ValueError("late")

    for take, limit_s in ((wrong, 60.0), (silent, 60.0), (late, -1.0)):
        with pytest.raises(fuzz.Finding):
            fuzz.Target("endpoint", lambda random: 0, take, (ValueError,)).offer(0, limit_s)


def test_corpus_is_data():
    """Lines of JSON strings, so that nothing in it can be taken for a program."""
    for path in sorted(Path(fuzz.CORPUS).iterdir()):
        assert path.suffix == ".jsonl"
        assert fuzz.seeds(path.stem)
