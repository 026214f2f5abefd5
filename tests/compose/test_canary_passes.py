"""The PASS of a canary: the breaker of a version closes, after its pause and by new evidence alone. AR-066."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from penstock.compose.breaker_audit import record_closing, record_opening
from penstock.compose.canary_passes import CanaryPasses
from penstock.compose.candidates import CheckedCandidate
from penstock.registry.broker.breakers import BreakerLimits, new_breaker_id
from penstock.registry.settings import Settings
from penstock.safety.audit import AuditConfig, AuditLogger
from penstock.safety.breaker import MemoryBreakers
from penstock.safety.canary import CanaryVerdict
from penstock.safety.orchestrator import StateKey, replayed
from penstock.safety.validators import Verdict

VERSION = CheckedCandidate("minilm", "2", "", "c" * 64, "1")
FORM = CheckedCandidate("minilm", "2", "int8", "c" * 64, "1")
PASS = CanaryVerdict(Verdict.PASS, (), 1500)
NAME = "minilm/2:candidate"
LIMITS = BreakerLimits(open_ms=300_000)


class Store:
    """Breakers on a clock of their own, and what was recorded before one of them closed."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000
        self.breakers = MemoryBreakers(lambda: self.now_ms)
        self.recorded: list[tuple[str, str, bool]] = []
        self.passes = CanaryPasses(self.breakers, LIMITS, self.record)

    def open(self) -> None:
        self.breakers.force_open_breaker(NAME, "drift", new_breaker_id(), LIMITS)

    def is_closed(self) -> bool:
        found = self.breakers.breakers("minilm").records.get(NAME)
        return found is None or found.is_closed

    def record(self, candidate: CheckedCandidate, reason: str) -> None:
        self.recorded.append((candidate.version, reason, self.is_closed()))

    def readmit(self, since_ms: float, candidate: CheckedCandidate = VERSION) -> float:
        return self.passes.readmit(candidate, PASS, since_ms)


@pytest.fixture
def store() -> Store:
    return Store()


def test_a_version_comes_back_after_the_pause(store: Store):
    """300 s after it was stopped; the record comes first."""
    store.open()
    store.now_ms += 1000
    since_ms = store.now_ms
    assert store.readmit(since_ms) == 299.0
    store.now_ms += 298_999
    assert store.readmit(since_ms) == 0.001
    assert not store.is_closed()
    store.now_ms += 1
    assert store.readmit(since_ms) == 0.0
    assert store.recorded == [("2", "the canary says PASS on 1500 pairs", False)]
    assert store.is_closed()
    assert store.readmit(since_ms) == 0.0
    assert len(store.recorded) == 1


def test_pairs_from_before_the_opening_close_nothing(store: Store):
    """The candidate drifted, or failed its jobs, while the canary compared: this verdict says nothing about that."""
    since_ms = store.now_ms
    store.now_ms += 5
    store.open()
    store.now_ms += 10_000_000
    assert store.readmit(since_ms) == inf
    assert not store.is_closed()
    # An open breaker was opened once more.
    again_ms = store.now_ms
    store.open()
    store.now_ms += 10_000_000
    assert store.readmit(again_ms) == inf
    assert store.readmit(again_ms + 1) == 0.0


def test_a_form_leaves_the_breaker_of_its_version_alone(store: Store):
    """Workers probe forms by themselves."""
    store.open()
    store.now_ms += 10_000_000
    assert store.readmit(store.now_ms, FORM) == inf
    assert not store.is_closed()


def test_without_a_record_the_breaker_stays_open(store: Store, caplog: pytest.LogCaptureFixture):
    """A full disk: it is tried again soon."""

    def fails(candidate: CheckedCandidate, reason: str) -> None:
        raise OSError("no space left")

    store.open()
    store.now_ms += 10_000_000
    assert 0 < CanaryPasses(store.breakers, LIMITS, fails).readmit(VERSION, PASS, store.now_ms) < 60
    assert not store.is_closed()
    assert "stays open without a record: no space left" in caplog.text


@pytest.mark.parametrize("candidate", [VERSION, FORM], ids=["version", "form"])
def test_the_audit_log_tells_the_state_of_a_breaker(tmp_path: Path, candidate: CheckedCandidate):
    """Read again by the replay of all states: the last entry counts."""
    settings = Settings.load(environ={"PENSTOCK_HOME": str(tmp_path)})
    record_opening(settings, candidate, "drift", "y.cosine fell")
    record_closing(settings, candidate, "canary", "PASS on 1500 pairs")
    with AuditLogger(config=AuditConfig.of(settings)) as log:
        entries = log.get_entries_since(0.0)
    key = StateKey("", "minilm", "c" * 64, candidate.form or "candidate")
    for upto, (is_on, reason) in enumerate([(False, "y.cosine fell"), (True, "PASS on 1500 pairs")], 1):
        states = replayed(entries[:upto])
        assert {each: (state.is_on, state.reason) for each, state in states.items()} == {key: (is_on, reason)}
