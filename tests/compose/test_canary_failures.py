"""What the FAIL of a canary does: the breaker of the candidate opens, and one alert is sent. AR-064, AR-068."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest

from penstock.compose.canary_failures import CanaryFailures, opened_failures
from penstock.compose.candidates import CheckedCandidate
from penstock.registry.broker.breakers import BreakerLimits, BreakerTransition
from penstock.registry.broker.redis_breakers import RedisBreakers
from penstock.registry.errors import BrokerUnavailable
from penstock.registry.settings import Settings
from penstock.registry.settings_sections import SafetyConfig
from penstock.safety.alerts import Alert, Alerts
from penstock.safety.audit_reader import entries
from penstock.safety.breaker import MemoryBreakers
from penstock.safety.canary import CanaryVerdict
from penstock.safety.orchestrator import replayed
from penstock.safety.validators import Verdict
from penstock.workers.levels.form_breakers import FormBreakers
from penstock.workers.observe.metrics import InferenceMetrics
from tests.servers import RedisServer, wait_until

VERSION = CheckedCandidate("minilm", "2", "", "c" * 64, "1")
FORM = CheckedCandidate("minilm", "1", "int8", "c" * 64, "1")
FAIL = CanaryVerdict(Verdict.FAIL, ("y: NaN or infinity",), 7)
REASON = "the canary says FAIL: y: NaN or infinity"


class _Breakers(MemoryBreakers):
    """Breakers whose broker can be away."""

    is_away = False

    def force_open_breaker(self, name: str, reason: str, id: str, limits: BreakerLimits) -> BreakerTransition:
        if self.is_away:
            raise BrokerUnavailable("away")
        return super().force_open_breaker(name, reason, id, limits)


class _Judge:
    """A process that judges candidates."""

    def __init__(self, breakers: MemoryBreakers, **safety: float) -> None:
        self.told: list[Alert] = []
        self.opened: list[tuple[CheckedCandidate, str]] = []
        self.metrics = InferenceMetrics((1.0,))
        alerts = Alerts()
        alerts.register("test", self.told.append)
        self.failures = CanaryFailures(
            breakers,
            alerts,
            self.metrics,
            SafetyConfig.model_validate(safety),
            on_opened=lambda candidate, reason: self.opened.append((candidate, reason)),
            now_s=lambda: 7.0,
        )

    def trips(self) -> float:
        (family,) = [each for each in self.metrics.collect() if each.name == "penstock_breaker_trips"]
        return sum(sample.value for sample in family.samples)


@pytest.mark.parametrize(("candidate", "name"), [(VERSION, "minilm/2:candidate"), (FORM, "minilm/1:int8")])
def test_candidate_that_fails_has_an_open_breaker(candidate: CheckedCandidate, name: str):
    """Two processes that find the same open it once; the reason is the canary's. A form has a breaker of its own."""
    breakers = _Breakers(lambda: 1)
    judges = [_Judge(breakers), _Judge(breakers)]
    for judge in judges:
        judge.failures.stop(candidate, FAIL)
    (record,) = breakers.breakers("minilm").records.items()
    assert (record[0], record[1].circuit, record[1].epoch) == (name, "open", 1)
    assert record[1].reason == REASON
    assert [judge.trips() for judge in judges] == [1, 0]
    assert [judge.opened for judge in judges] == [[(candidate, REASON)], []]


@pytest.mark.parametrize(("safety", "pause_s"), [({}, 3600), ({"max_off_s": 7200}, 7200), ({"min_off_s": 5000}, 5000)])
def test_form_that_fails_is_off_for_the_longest_time(safety: dict[str, float], pause_s: float):
    """That of the settings: no worker tries it again before."""
    breakers = _Breakers(lambda: 1)
    _Judge(breakers, **safety).failures.stop(FORM, FAIL)
    record = breakers.breakers("minilm").records["minilm/1:int8"]
    assert (record.retry_ms - record.opened_ms) / 1000 == pause_s


def test_form_that_fails_leaves_its_version_alone():
    """The version serves well as it is built; one alert tells of the form."""
    breakers = _Breakers(lambda: 0)
    judge = _Judge(breakers)
    judge.failures.stop(FORM, FAIL)
    judge.failures.tell(FORM, FAIL, "a")
    assert "minilm/1:candidate" not in breakers.breakers("minilm").records
    assert [(alert.kind, alert.version, alert.optimisation) for alert in judge.told] == [("canary", "1", "int8")]


def test_one_fail_is_one_alert():
    """However often it is told; the next run of the canary has one of its own."""
    judge = _Judge(_Breakers(lambda: 0))
    for id in ("a", "a", "b"):
        judge.failures.tell(VERSION, FAIL, id)
    assert [alert.id for alert in judge.told] == ["canary a", "canary b"]
    assert {(alert.kind, alert.model, alert.version, alert.at_s) for alert in judge.told} == {
        ("canary", "minilm", "2", 7.0)
    }
    assert judge.told[0].figures["pairs"] == 7


def test_breaker_is_opened_once_the_broker_is_back():
    """The caller is told, and calls again."""
    breakers = _Breakers(lambda: 0)
    judge = _Judge(breakers)
    breakers.is_away = True
    with pytest.raises(BrokerUnavailable):
        judge.failures.stop(VERSION, FAIL)
    assert judge.opened == []
    breakers.is_away = False
    judge.failures.stop(VERSION, FAIL)
    assert breakers.breakers("minilm").records["minilm/2:candidate"].circuit == "open"
    assert judge.trips() == 1


# With a real broker


def _settings(server: RedisServer, home: Path, **overrides: object) -> Settings:
    environ = {"PENSTOCK_HOME": str(home), "PENSTOCK_REDIS_URL": server.url}
    return Settings.load(environ=environ, cwd=home, overrides=overrides)


def test_workers_use_a_form_that_fails_no_more(shared_redis: RedisServer, slot: str, tmp_path: Path):
    """A worker that has the form on hears of it through Redis, and nobody has told it."""
    settings = _settings(shared_redis, tmp_path)
    candidate = CheckedCandidate(slot, "1", "int8", "c" * 64, "1")
    name, closed = f"{slot}/1:int8", []
    with closing(RedisBreakers.from_url(shared_redis.url)) as end:
        worker = FormBreakers(
            end,
            lambda: [slot],
            lambda name, record: closed.append((name, record.reason)),
            time.monotonic,
            config=settings.inference.safety,
            forms=lambda: [name],
        )
        worker.shared.start()
        try:
            worker.switched_on(name)
            wait_until(lambda: worker.admits(name), 30, "the breaker is read")
            with opened_failures(settings, InferenceMetrics((1.0,))) as failures:
                failures.stop(candidate, FAIL)
            wait_until(lambda: not worker.admits(name), 30, "the form is refused")
        finally:
            worker.shared.stop()
    assert (worker.is_open(name), closed) == (True, [(name, REASON)])


@pytest.mark.parametrize("form", ["", "int8"])
def test_opening_is_in_the_audit_log(shared_redis: RedisServer, slot: str, tmp_path: Path, form: str):
    """One entry, however often the FAIL is found; from the log alone the candidate is off. AR-029."""
    settings, optimisation = _settings(shared_redis, tmp_path), form or "candidate"
    candidate = CheckedCandidate(slot, "1", form, "c" * 64, "2")
    for _ in range(2):
        with opened_failures(settings, InferenceMetrics((1.0,))) as failures:
            failures.stop(candidate, FAIL)
    (entry,) = found = entries([settings.inference.privacy.audit_log_path], 10).entries
    told = (entry.operation, entry.model_id, entry.optimization_name, entry.result)
    assert told == ("optimization_state", slot, optimisation, "disabled")
    assert (
        entry.details.items()
        >= {
            "version": "1",
            "content_hash": "c" * 64,
            "breaker": f"{slot}/1:{optimisation}",
            "criterion": "a canary refused it",
            "reason": REASON,
        }.items()
    )
    ((key, state),) = replayed(found).items()
    assert (key.model, key.optimization, state.is_on, state.reason) == (slot, optimisation, False, REASON)


@pytest.mark.parametrize("overrides", [{"privacy.audit_log_enabled": False}, {"privacy.audit_log_path": "/dev/null/x"}])
def test_breaker_opens_without_a_record(
    shared_redis: RedisServer, slot: str, tmp_path: Path, overrides: dict[str, object]
):
    """Where the log is off, or cannot be written: off is safe."""
    candidate = CheckedCandidate(slot, "1", "int8", "c" * 64, "1")
    settings = _settings(shared_redis, tmp_path, **overrides)
    with opened_failures(settings, InferenceMetrics((1.0,))) as failures:
        failures.stop(candidate, FAIL)
    with closing(RedisBreakers.from_url(shared_redis.url)) as end:
        assert end.breakers(slot).records[f"{slot}/1:int8"].circuit == "open"
