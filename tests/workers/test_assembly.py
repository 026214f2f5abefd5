"""The assembly: the parts of a drain, the state that they share, and the options that replace them."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.deployment import Deployment
from penstock.registry.package import load_package
from penstock.registry.settings import Settings
from penstock.safety.operator_key import OperatorKey, PublicKeys
from penstock.workers.assembly import DrainOptions, PartTypes, build_drain
from penstock.workers.drain import Drain
from penstock.workers.executor import seats_for
from penstock.workers.observe.listener import NullListener
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.process.crash_journal import Journal, NullJournal
from penstock.workers.results import EncodedOutputs
from penstock.workers.versions.deployment_store import FileDeploymentStore, NullDeploymentStore
from tests.flow.conftest import amend
from tests.packages import write_double
from tests.workers.cache.stepped_tiers import DictTier
from tests.workers.doubles import Doubler, job_of

Build = Callable[..., Drain]
"""Builds a drain for the packages of `models_root`; keywords of DrainOptions, and `settings` for the rest."""


@pytest.fixture
def build(models_root: Path) -> Iterator[Build]:
    brokers: list[MemoryBroker] = []

    def build(settings: dict[str, Any] | None = None, **options: Any) -> Drain:
        brokers.append(MemoryBroker(lambda: 1000.0))
        packages = [load_package(path / "1") for path in sorted(models_root.iterdir())]
        defaults = DrainOptions(
            name="w", device="cpu", threads=1, listener=NullListener(), metrics=InferenceMetrics((1.0,))
        )
        return build_drain(Settings.load(overrides=settings), brokers[-1], packages, replace(defaults, **options))

    yield build
    for broker in brokers:
        broker.close()


class RememberedStore(NullDeploymentStore):
    """A store with a decision for version 7 of each model."""

    def last(self, model: str) -> bytes:
        return b"5 " + Deployment(5, model, "7", "e" * 64).seal()


def test_every_part_type_can_be_replaced(build: Build, models_root: Path):
    """Each class that the simulator puts in the place of a part is the one that the drain runs."""
    write_double(models_root)
    own: dict[str, Any] = {each.name: type("Own", (getattr(PartTypes(), each.name),), {}) for each in fields(PartTypes)}
    drain = build(types=PartTypes(**own), tiers=[DictTier("l2", time.monotonic)])
    parts = drain.parts
    built = {
        "drain": drain,
        "transfers": drain._transfers,
        "intake": parts.intake,
        "router": parts.router,
        "flights": parts.flights,
        "answers": parts.answers,
        "scheduler": parts.scheduler,
        "executor": parts.executor,
        "completer": parts.completer,
        "claimer": parts.claimer,
        "loader": parts.lifecycle.loader,
        "placement": parts.placement,
        "wake_up": parts.claimer.wake_up,
        "tiers": parts.answers.tiers,
    }
    assert {name: type(part) for name, part in built.items()} == own


def test_each_start_of_a_worker_is_another_consumer(build: Build, models_root: Path):
    """A restarted worker must not pass the fence of its predecessor; its name is the same."""
    write_double(models_root)
    first, second = build(name="gpu-0"), build(name="gpu-0")
    assert first.name == second.name == "gpu-0"
    assert first.consumer != second.consumer
    assert first.consumer.startswith("gpu-0:")


def test_the_model_threads_are_those_of_the_model_that_needs_most(build: Build, models_root: Path):
    """The journal is opened once, for this consumer, with a seat for each of them and for later ones."""
    amend(write_double(models_root, "a"), concurrency=20)
    amend(write_double(models_root, "b"), concurrency=3)
    opened: list[tuple[str, int]] = []

    def journal(consumer: str, seats: int) -> Journal:
        opened.append((consumer, seats))
        return NullJournal()

    drain = build(journal=journal)
    assert drain.parts.executor.threads == 20
    assert opened == [(drain.consumer, seats_for(20))]


def test_a_request_and_an_ended_forward_wake_the_loop(build: Build, models_root: Path):
    """Operators and model threads ring the wake-up on which the claimer sleeps."""
    write_double(models_root)
    drain = build()
    wake_up = drain.parts.claimer.wake_up
    poller = select.poll()
    poller.register(wake_up.fd, select.POLLIN)
    assert not poller.poll(0)
    drain.lifecycle.request(lambda: None)
    assert poller.poll(0)
    wake_up.clear()
    (version,) = drain.lifecycle.turns
    version.runtime = Doubler()
    version.has_loaded()
    drain.parts.backlog.add(version, [job_of()])
    drain.parts.scheduler.dispatch()
    run = drain.parts.executor.begin("a")
    assert run is not None
    assert not poller.poll(0)
    drain.parts.executor.finish("a", run)
    assert poller.poll(0)


def test_the_parts_share_one_account_of_leased_jobs(build: Build, models_root: Path):
    """A job that one of them has taken in counts for the claims, and for the readiness that a probe sees."""
    write_double(models_root)
    drain = build({"batching.max_queue_depth": 5})
    (claim,) = drain.parts.claimer.wanted()
    assert claim.credit == 5
    job = job_of()
    drain.parts.leased.take([job])
    (claim,) = drain.parts.claimer.wanted()
    assert (claim.credit, drain.health.readiness[1]["in_memory"]) == (4, 1)
    drain.parts.releaser.hand_over([job], "double", "2")
    assert drain.health.readiness[1]["in_memory"] == 0


def test_a_new_active_version_makes_the_cache_forget_the_former_content(build: Build, models_root: Path):
    """The caller is told of the change, also of the first one, before which no content was active."""
    write_double(models_root)
    changes: list[tuple[str, str, str]] = []
    drain = build(on_version_change=lambda *change: changes.append(change))
    model, memory = drain.lifecycle.models["double"], drain.parts.answers.memory
    for epoch, content in ((1, "a" * 64), (2, "b" * 64)):
        drain.lifecycle.follow(model, b"%d " % epoch + Deployment(epoch, "double", "1", content).seal())
        memory.put(content.encode(), EncodedOutputs((), b"", content, 0), 60.0)
    assert changes == [("double", "", "a" * 64), ("double", "a" * 64, "b" * 64)]
    assert memory.get(b"a" * 64) is None
    assert memory.get(b"b" * 64) is not None


@pytest.mark.parametrize(("models", "may_serve"), [((), True), (("double",), False)])
def test_a_worker_that_was_started_for_some_models_accepts_no_others(
    models: tuple[str, ...], may_serve: bool, build: Build, models_root: Path
):
    """Without a list operators may add models to it."""
    write_double(models_root)
    drain = build({"worker.models": list(models)})
    assert drain.lifecycle.may_serve("double")
    assert drain.lifecycle.may_serve("other") is may_serve


@pytest.mark.parametrize("signs", [True, False])
def test_decisions_are_remembered_under_the_home_where_operators_sign(
    signs: bool, build: Build, models_root: Path, tmp_path: Path
):
    """The version of such a decision is active from the start on; here it is not, so nothing takes its place."""
    write_double(models_root)
    operator = OperatorKey.generate(tmp_path / "operator.pem")
    verify = PublicKeys.parse(operator.public_text).verify
    decided = b"5 " + Deployment(5, "double", "7", "e" * 64).seal(operator.sign)
    FileDeploymentStore(tmp_path / "home" / "deployments", verify).keep("double", decided)
    drain = build({"home": str(tmp_path / "home"), "preload": False}, verify=verify if signs else None)
    drain.load()
    assert drain.lifecycle.models["double"].label == ("" if signs else "1")


def test_a_store_of_decisions_can_be_given(build: Build, models_root: Path):
    """It takes the place of the store under the home."""
    write_double(models_root)
    drain = build({"preload": False}, deployments=RememberedStore())
    drain.load()
    assert drain.lifecycle.models["double"].label == ""
