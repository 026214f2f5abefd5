"""Alerts: one for each failure, and no hook disturbs the gate. AR-068."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from penstock.registry.broker.breakers import BreakerLimits
from penstock.registry.errors import InvalidInput
from penstock.safety.alerts import Alert, Alerts, BackgroundHook, Outcome, alert_event, breaker_alert
from penstock.safety.breaker import MemoryBreakers
from tests.servers import wait_until

ALERT = Alert("gate minilm/2:int8 1", "gate", "minilm", "min_cosine 0.88", 1_763_650_000.7, "2", "int8", {"rows": 64.0})


def test_each_failure_reaches_each_hook_once():
    """However often it is reported; another failure is another alert."""
    got: list[tuple[str, str]] = []
    alerts = Alerts()
    alerts.register("a", lambda alert: got.append(("a", alert.id)))
    alerts.register("b", lambda alert: got.append(("b", alert.id)))
    assert [alerts.notify(ALERT) for _ in range(3)] == [True, False, False]
    assert alerts.notify(replace(ALERT, id="another"))
    assert got == [("a", ALERT.id), ("b", ALERT.id), ("a", "another"), ("b", "another")]


def test_threads_that_report_one_failure_send_one_alert():
    """Eight model threads see the same failure at one moment."""
    got: list[str] = []
    alerts, start = Alerts(), threading.Barrier(8)
    alerts.register("a", lambda alert: got.append(alert.id))

    def report() -> None:
        start.wait()
        for number in range(50):
            alerts.notify(replace(ALERT, id=f"failure {number}"))

    threads = [threading.Thread(target=report, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == sorted(f"failure {number}" for number in range(50))


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(1), GeneratorExit()])
def test_a_failing_hook_is_counted_and_breaks_nothing(error: BaseException):
    """The gate goes on, and so do the hooks after it."""
    told: list[tuple[str, Outcome]] = []
    got: list[str] = []

    def broken(_: Alert) -> None:
        raise error

    alerts = Alerts(on_outcome=lambda name, outcome: told.append((name, outcome)))
    alerts.register("broken", broken)
    alerts.register("sound", lambda alert: got.append(alert.id))
    assert alerts.notify(ALERT)
    assert got == [ALERT.id]
    assert told == [("broken", "failed"), ("sound", "sent")]
    assert (alerts.count("broken", "failed"), alerts.count("broken", "sent")) == (1, 0)


def test_an_unregistered_hook_hears_nothing():
    """Its name is free again; an unknown name is refused."""
    got: list[str] = []
    alerts = Alerts()
    alerts.register("a", lambda alert: got.append(alert.id))
    with pytest.raises(InvalidInput, match="There is an alert hook a already"):
        alerts.register("a", print)
    alerts.unregister("a")
    alerts.notify(ALERT)
    assert got == []
    with pytest.raises(InvalidInput, match="Expected one of: none"):
        alerts.unregister("a")
    alerts.register("a", lambda alert: got.append(alert.id))


def test_what_is_no_plain_function_is_refused():
    """An async function would never run; a string is no function."""

    async def later(_: Alert) -> None:
        raise AssertionError("it was run")

    for hook in (later, "print"):
        with pytest.raises(InvalidInput, match="Expected a plain function"):
            Alerts().register("a", hook)  # type: ignore[arg-type]


def test_the_oldest_ids_are_forgotten():
    """The memory is bounded; an id that is reported again and again stays."""
    alerts = Alerts(remembered=2)
    first, second, third = (replace(ALERT, id=name) for name in ("1", "2", "3"))
    assert [alerts.notify(each) for each in (first, second, first, third)] == [True, True, False, True]
    assert [alerts.notify(each) for each in (first, second)] == [False, True]


def test_a_slow_hook_delays_nobody():
    """It runs on a thread of its own, in order. What finds no room is dropped and counted."""
    may_go, got = threading.Event(), []

    def slow(alert: Alert) -> None:
        may_go.wait(180)
        got.append(alert.id)

    hook, alerts = BackgroundHook(slow, waiting=2), Alerts()
    alerts.register("slow", hook)
    alerts.notify(replace(ALERT, id="0"))
    wait_until(lambda: hook._queue.empty(), 10, "the first alert is under way")
    for number in range(1, 5):
        alerts.notify(replace(ALERT, id=str(number)))
    assert got == []
    assert (alerts.count("slow", "sent"), alerts.count("slow", "dropped")) == (3, 2)
    may_go.set()
    assert hook.close(60)
    assert got == ["0", "1", "2"]
    alerts.notify(replace(ALERT, id="5"))
    assert alerts.count("slow", "dropped") == 3


def test_a_background_hook_outlives_its_failures():
    """Each is counted, and the next alert is tried."""
    told: list[str] = []

    def broken(alert: Alert) -> None:
        raise ValueError(alert.id)

    hook = BackgroundHook(broken, on_failure=lambda error: told.append(str(error)))
    assert [hook(replace(ALERT, id=name)) for name in "ab"] == [True, True]
    assert hook.close(60)
    assert (hook.failures, told) == (2, ["a", "b"])
    assert BackgroundHook(broken).close()


def test_one_of_the_workers_alerts_of_a_breaker():
    """All of them report the failures that open it. The transition tells one of them to alert."""
    breakers, limits, sent = MemoryBreakers(lambda: 7), BreakerLimits(), []
    for number in range(6):
        opened = breakers.fail_breaker("minilm/2:int8", "NaN", f"f{number}", limits)
        if opened.did:
            sent.append(breaker_alert("minilm/2:int8", opened.record, 1.0))
    assert sent == [Alert("breaker minilm/2:int8 f2", "breaker", "minilm", "NaN", 1.0, "2", "int8", {"epoch": 1.0})]


def test_the_event_names_the_failure():
    """The same shape as the event of a job; equal alerts have equal ids, and others do not."""
    event = alert_event(ALERT)
    assert event == {
        "id": event["id"],
        "object": "event",
        "type": "safety.gate",
        "created_at": 1_763_650_000,
        "data": {
            "model": "minilm",
            "version": "2",
            "optimisation": "int8",
            "reason": "min_cosine 0.88",
            "figures": {"rows": 64.0},
        },
    }
    assert alert_event(replace(ALERT))["id"] == event["id"]
    assert alert_event(replace(ALERT, id="another"))["id"] != event["id"]
    assert event["id"].startswith("evt_")
