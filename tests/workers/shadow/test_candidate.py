"""The pauses before a crashed candidate is started again; what its process does is in test_consumer.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.registry.package import load_package
from penstock.workers.runtime.base import InstanceLost
from penstock.workers.runtime.instance_process import LoadedInstance
from penstock.workers.runtime.loading import LoadOptions
from penstock.workers.shadow import candidate as candidates
from penstock.workers.shadow.candidate import Candidate, CandidateFailed
from tests.workers.runtime import formats

LOAD_S = 4.0


class CrashingProcess:
    """Loads in four seconds of a clock that stands still otherwise. A forward ends it, but for the first ones."""

    now = 0.0
    answers = 0
    """Forwards that succeed, of all processes together."""

    def __init__(self, *_: object, **__: object) -> None:
        self.is_alive = True

    def begin_load(self) -> None:
        CrashingProcess.now += LOAD_S

    def end_load(self) -> LoadedInstance:
        return LoadedInstance("ab" * 32, 0)

    def run(self, _: object) -> dict[str, object]:
        if CrashingProcess.answers:
            CrashingProcess.answers -= 1
            return {}
        self.is_alive = False
        raise InstanceLost("an instance ended with status 3", "0" * 16)

    def end(self) -> None:
        self.is_alive = False


@pytest.mark.parametrize(("answers", "first"), [(0, 19 * LOAD_S), (1, 0.25)], ids=["at once", "after an answer"])
def test_loads_of_a_crashing_candidate_take_a_twentieth_of_the_time(
    models_root: Path, monkeypatch: pytest.MonkeyPatch, answers: int, first: float
):
    """The pause is 19 times as long as the load, unless the process had answered something."""
    monkeypatch.setattr(candidates, "InstanceProcess", CrashingProcess)
    monkeypatch.setattr(CrashingProcess, "answers", answers)
    pauses: list[float] = []
    candidate = Candidate(
        load_package(formats.write_pytorch(models_root)),
        LoadOptions(),
        device="cpu",
        threads=1,
        timeout_s=5.0,
        load_timeout_s=5.0,
        withholds_texts=False,
        pause=pauses.append,
        clock=lambda: CrashingProcess.now,
    )
    candidate.load()
    for _ in range(answers):
        candidate.run({})
    totals: list[float] = []
    for _ in range(4):
        with pytest.raises(CandidateFailed):
            candidate.run({})
        totals.append(sum(pauses))
        pauses.clear()
    candidate.close()
    assert totals == pytest.approx([0, first, 19 * LOAD_S, 19 * LOAD_S])
