"""Many operators at once: processes that promote and roll back one model, some of them killed, and one that observes.

    race -> 20 x operate (promote, roll back, at random) -> one database <- Observer (samples, and the whole history)
                                                                        -> Findings

    python -m tests.faults.promoters URL FOLDER PROCESSES TIMES SEED VICTIM:CHANGE ...

An operator writes what became of each attempt into a file of its own. A victim dies by SIGKILL inside the transaction
of its CHANGE-th change, with all rows written and the model locked.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sqlalchemy import create_engine, func, make_url, select

from penstock.registry.catalog import ModelRegistryClient, ModelStage, Transition
from penstock.registry.catalog.tables import versions
from penstock.registry.errors import PenstockError, TransitionRefused
from penstock.registry.package import load_package
from tests.packages import write_package
from tests.servers import ROOT

__all__ = ["Findings", "MODEL", "Observer", "moments_of", "race", "stock"]

MODEL: Final = "contested"
_VERSIONS: Final = ("1", "2", "3", "4", "5")
_SAMPLE_EVERY_S: Final = 0.005
_SAMPLES_PER_LOOK: Final = 10
"""How many samples between two looks at the history, which forgets what lies 100 productions back."""
_LONGEST_LIFE: Final = 1000
"""Changes that a victim tries; it dies in the first that is not refused."""
_BUILD: Final = """
def build():
    return lambda inputs: {"y": inputs["x"]}
"""


@dataclass(slots=True)
class Findings:
    """What a race came to. A moment is a sample of the observer, or a change of the history."""

    moments: int = 0
    """All that were looked at."""
    others: int = 0
    """Those with other than one version in production."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Attempts by what the operator was told: done, TransitionRefused, TransitionConflict."""
    unexpected: list[str] = field(default_factory=list)
    changes: int = 0
    """Steps of the history since the race began."""
    missing: int = 0
    """Steps that were not observed: the history must be whole, or it proves nothing."""
    killed: int = 0

    @property
    def told(self) -> int:
        """Attempts that were refused, and said so."""
        return self.outcomes["TransitionRefused"] + self.outcomes["TransitionConflict"]


def stock(url: str, root: Path) -> ModelRegistryClient:
    """A registry with one model, whose first version is in production and the others in staging."""
    client = ModelRegistryClient(url)
    for version in _VERSIONS:
        client.register(load_package(write_package(root, MODEL, _BUILD, version=version)))
        client.promote(MODEL, version, ModelStage.STAGING)
    client.promote(MODEL, _VERSIONS[0], ModelStage.PRODUCTION)
    return client


class Observer:
    """Looks at the database on a thread of its own, between entry and exit."""

    def __init__(self, url: str, client: ModelRegistryClient) -> None:
        self.samples: Counter[int] = Counter()
        """How often so many versions were in production."""
        self.steps: dict[int, Transition] = {}
        self._engine = create_engine(url)
        self._client = client
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="observer", daemon=True)

    def __enter__(self) -> Observer:
        self._read_history()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(60)
        self._read_history()
        self._engine.dispose()

    def _look(self) -> None:
        in_production = select(func.count()).where(
            versions.c.name == MODEL, versions.c.stage == ModelStage.PRODUCTION.value
        )
        while not self._is_over.wait(_SAMPLE_EVERY_S):
            with self._engine.connect() as connection:
                self.samples[connection.execute(in_production).scalar_one()] += 1
            if self.samples.total() % _SAMPLES_PER_LOOK == 0:
                self._read_history()

    def _read_history(self) -> None:
        self.steps.update({step.epoch: step for step in self._client.history(MODEL)})


def moments_of(steps: Sequence[Transition]) -> Counter[int]:
    """How many versions were in production after each step, by how often it was so, told from the steps alone.

    What came before the first production does not count.
    """
    stages: dict[str, ModelStage] = {}
    moments: Counter[int] = Counter()
    for step in steps:
        stages[step.version] = step.after
        if step.replaced is not None:
            stages[step.replaced] = ModelStage.ARCHIVED
        in_production = sum(stage is ModelStage.PRODUCTION for stage in stages.values())
        if in_production or moments:
            moments[in_production] += 1
    return moments


def race(
    url: str,
    folder: Path,
    *,
    processes: int = 20,
    times: int = 200,
    seed: int = 1,
    victims: Mapping[int, int] | None = None,
    meanwhile: Callable[[list[int]], None] = lambda pids: None,
) -> Findings:
    """Let so many operators try so many changes each, and say what came of it.

    victims: operator -> the change in whose middle it is killed. meanwhile: gets the pids of the operators.
    """
    client = stock(url, folder / "models")
    begun_at = client.history(MODEL)[-1].epoch
    dying = [f"{operator}:{change}" for operator, change in (victims or {}).items()]
    command = [sys.executable, "-m", "tests.faults.promoters", url, str(folder), str(processes), str(times), str(seed)]
    with (
        Observer(url, client) as observer,
        subprocess.Popen(
            [*command, *dying], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as operators,
    ):
        try:
            output = operators.stdout
            meanwhile(json.loads(output.readline()) if output else [])
            killed = operators.communicate()[0]
        except BaseException:
            # All of them: who has lost its parent would go on.
            os.killpg(operators.pid, signal.SIGKILL)
            raise
    return _judge(observer, folder, begun_at, int(killed))


def _judge(observer: Observer, folder: Path, begun_at: int, killed: int) -> Findings:
    steps = [step for _, step in sorted(observer.steps.items())]
    moments = observer.samples + moments_of(steps)
    findings = Findings(moments.total(), moments.total() - moments[1], killed=killed)
    for file in folder.glob("operator-*"):
        for outcome, text in map(json.loads, file.read_text().splitlines()):
            findings.outcomes[outcome] += 1
            if outcome not in ("done", "TransitionRefused", "TransitionConflict"):
                findings.unexpected.append(f"{outcome}: {text}")
    findings.changes = steps[-1].epoch - begun_at
    findings.missing = steps[-1].epoch - len(steps)
    return findings


def _operate(url: str, forward_log: Path, times: int, chance: random.Random, dies_at: int | None) -> None:
    changes = 0

    def die_in_time(_: Transition) -> None:
        nonlocal changes
        changes += 1
        if changes == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    client = ModelRegistryClient(url, audit=die_in_time)
    with forward_log.open("a", buffering=1) as outcomes:
        # Who is to die in a change goes on until it has made one.
        for _ in range(times if dies_at is None else _LONGEST_LIFE):
            try:
                _change(client, chance)
                outcome = ("done", "")
            except TransitionRefused as refusal:
                outcome = (type(refusal).__name__, str(refusal))
            except PenstockError as error:
                outcome = (type(error).__name__, str(error))
            outcomes.write(json.dumps(outcome) + "\n")


def _change(client: ModelRegistryClient, chance: random.Random) -> Transition:
    version = client.find(MODEL, chance.choice(_VERSIONS))
    if version.stage is ModelStage.PRODUCTION or chance.random() < 0.3:
        return client.rollback(MODEL)
    is_candidate = version.stage is ModelStage.STAGING
    return client.promote(MODEL, version.version, ModelStage.PRODUCTION if is_candidate else ModelStage.STAGING)


def _main(url: str, folder: str, processes: str, times: str, seed: str, *victims: str) -> None:
    """Forks the operators, says who they are, lets them begin at once, and says how many were killed."""
    dying = {int(operator): int(change) for operator, change in (victim.split(":") for victim in victims)}
    # Here, and not in each of the forks.
    make_url(url).get_dialect().import_dbapi()
    gate, opened = os.pipe()
    pids = []
    for operator in range(int(processes)):
        if (pid := os.fork()) == 0:
            os.close(opened)
            os.read(gate, 1)
            chance = random.Random(f"{seed} {operator}")
            _operate(url, Path(folder) / f"operator-{operator}", int(times), chance, dying.get(operator))
            os._exit(0)
        pids.append(pid)
    sys.stdout.write(json.dumps(pids) + "\n")
    sys.stdout.flush()
    os.close(opened)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    if wrong := [status for status in statuses if os.waitstatus_to_exitcode(status) not in (0, -signal.SIGKILL)]:
        sys.exit(f"operators ended with {wrong}")
    sys.stdout.write(f"{sum(status != 0 for status in statuses)}\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
