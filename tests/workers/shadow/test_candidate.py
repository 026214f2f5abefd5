"""The pauses before a crashed candidate is started again; what its process does is in test_consumer.py."""

from __future__ import annotations

from collections.abc import Iterator
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


class CrashingCandidate:
    """A candidate whose pauses pass on the clock of its process."""

    def __init__(self, models_root: Path) -> None:
        self.candidate = Candidate(
            load_package(formats.write_pytorch(models_root)),
            LoadOptions(),
            device="cpu",
            threads=1,
            timeout_s=5.0,
            load_timeout_s=5.0,
            withholds_texts=False,
            pause=self._pause,
            clock=lambda: CrashingProcess.now,
        )
        self.candidate.load()

    def _pause(self, seconds: float) -> None:
        CrashingProcess.now += seconds

    def pause_before_crash(self, *, answers: int = 0) -> float:
        """Seconds from the last crash to the load before the next one, which follows so many answers."""
        begun, CrashingProcess.answers = CrashingProcess.now, answers
        for _ in range(answers):
            self.candidate.run({})
        with pytest.raises(CandidateFailed):
            self.candidate.run({})
        return CrashingProcess.now - begun - LOAD_S


@pytest.fixture
def crashing(models_root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CrashingCandidate]:
    """It is loaded, and its first forward has crashed."""
    monkeypatch.setattr(candidates, "InstanceProcess", CrashingProcess)
    made = CrashingCandidate(models_root)
    yield made
    made.candidate.close()


def test_loads_of_a_crashing_candidate_take_a_hundredth_of_the_time(crashing: CrashingCandidate):
    """The pause is 99 times as long as the load."""
    assert crashing.pause_before_crash() == -LOAD_S, "the first process was there"
    assert [crashing.pause_before_crash() for _ in range(3)] == pytest.approx([99 * LOAD_S] * 3)


def test_a_candidate_that_had_answered_is_started_again_soon(crashing: CrashingCandidate):
    """Three times, however much it answers in between: a candidate that crashes on each tenth pair would load without
    end."""
    crashing.pause_before_crash(answers=1)
    pauses = [crashing.pause_before_crash(answers=1) for _ in range(5)]
    assert pauses == pytest.approx([0.25, 0.25, 0.25, 99 * LOAD_S, 99 * LOAD_S])


def test_time_without_a_crash_counts_as_pause(crashing: CrashingCandidate):
    """A candidate that ran for longer is started again soon, as often as that happens."""
    crashing.pause_before_crash(answers=1)
    for _ in range(6):
        CrashingProcess.now += 99 * LOAD_S
        assert crashing.pause_before_crash(answers=1) == pytest.approx(0.25)
