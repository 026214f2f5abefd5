"""The circuit breaker: when a server that failed is asked again."""

from __future__ import annotations

from penstock.registry.circuit_breaker import CircuitBreaker


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def _breaker(clock: _Clock) -> CircuitBreaker:
    return CircuitBreaker(clock, lambda: 1.0, first_s=1, longest_s=5)


def test_a_closed_circuit_admits_every_call():
    """Before a failure, and after calls that were answered."""
    breaker = _breaker(_Clock())
    assert breaker.admits()
    assert not breaker.succeeded()
    assert breaker.admits()


def test_pauses_double_up_to_the_longest():
    """After each pause one call tries; its failure begins the next pause, which is twice as long."""
    clock = _Clock()
    breaker = _breaker(clock)
    assert breaker.failed()
    for pause_s in (1, 2, 4, 5, 5):
        clock.now += pause_s - 0.01
        assert not breaker.admits()
        clock.now += 0.01
        assert breaker.admits()
        assert not breaker.failed()


def test_one_call_tries_at_a_time():
    """While it is under way, the others are skipped; its success admits all."""
    clock = _Clock()
    breaker = _breaker(clock)
    breaker.failed()
    clock.now += 1
    assert [breaker.admits() for _ in range(3)] == [True, False, False]
    assert breaker.succeeded()
    assert [breaker.admits() for _ in range(3)] == [True, True, True]


def test_a_try_that_tells_nothing_is_followed_by_another():
    """Its caller was interrupted: after a pause the next call tries."""
    clock = _Clock()
    breaker = _breaker(clock)
    breaker.failed()
    clock.now += 1
    assert breaker.admits()
    clock.now += 1
    assert breaker.admits()


def test_calls_that_fail_together_count_once():
    """Calls of several threads time out at one moment: the pause is that of one failure."""
    clock = _Clock()
    breaker = _breaker(clock)
    assert [breaker.failed() for _ in range(5)] == [True, False, False, False, False]
    clock.now += 1
    assert breaker.admits()


def test_pauses_begin_anew_after_a_success():
    """The next failure begins with the first pause."""
    clock = _Clock()
    breaker = _breaker(clock)
    for _ in range(4):
        breaker.failed()
        clock.now += 5
        assert breaker.admits()
    breaker.succeeded()
    assert breaker.failed()
    clock.now += 1
    assert breaker.admits()


def test_pauses_are_jittered():
    """With the smallest jitter the pause is half as long."""
    clock = _Clock()
    breaker = CircuitBreaker(clock, lambda: 0.0, first_s=1, longest_s=5)
    breaker.failed()
    clock.now += 0.5
    assert breaker.admits()
