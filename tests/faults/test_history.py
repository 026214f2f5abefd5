"""The checker itself: histories that are broken on purpose, one way each."""

from __future__ import annotations

import pytest

from tests.faults.history import Effect, History, check


def _sound() -> History:
    """Three jobs, one of which ran twice, and one whose client never heard of its acceptance."""
    results = {1.0: b"one", 2.0: b"two", 3.0: b"three"}
    return History(
        offered={1.0, 2.0, 3.0, 4.0},
        accepted={1.0, 2.0},
        effects=[Effect(job, result) for job, result in results.items()],
        records=dict(results),
        forwards=[1.0, 2.0, 2.0, 3.0],
    )


def _told_again(history: History) -> None:
    history.effects.append(Effect(2.0, b"two"))


def _told_another(history: History) -> None:
    history.records[2.0] = b"two, by a worker whose lease was gone"


def _never_told(history: History) -> None:
    del history.effects[0]


def _not_kept(history: History) -> None:
    del history.records[1.0]


def _vanished(history: History) -> None:
    del history.effects[0]
    del history.records[1.0]
    history.forwards.remove(1.0)


def _from_nowhere(history: History) -> None:
    history.effects.append(Effect(9.0, b"nine"))
    history.records[9.0] = b"nine"
    history.forwards.append(9.0)


def _answered_without_a_forward(history: History) -> None:
    history.forwards.remove(1.0)


def test_sound_history_has_no_violation():
    """A second forward and an acceptance that no client heard of are allowed, and are told apart."""
    findings = check(_sound())
    assert findings.violations == {}
    assert findings.re_executed == {2.0}
    assert findings.recovered == {3.0}


@pytest.mark.parametrize(
    ("break_it", "violations"),
    [
        (_told_again, {"duplicated": [2.0]}),
        (_told_another, {"duplicated": [2.0]}),
        (_never_told, {"lost": [1.0]}),
        (_not_kept, {"lost": [1.0], "duplicated": [1.0]}),
        (_vanished, {"lost": [1.0]}),
        (_from_nowhere, {"unexpected": [9.0]}),
        (_answered_without_a_forward, {"unexpected": [1.0]}),
    ],
)
def test_broken_history_is_caught(break_it, violations):
    """Each way in which a broker could break its promise shows as the violation that it is."""
    history = _sound()
    break_it(history)
    assert check(history).violations == violations


def test_failure_without_a_forward_is_expected():
    """A job that expired or was cancelled ends without having run."""
    history = History({1.0}, {1.0}, [Effect(1.0, b"expired", is_answer=False)], {1.0: b"expired"}, [])
    assert check(history).violations == {}


def test_equal_jobs_may_share_one_forward():
    """Jobs that ask the same question are told apart by their numbers, and one forward answers for all of them."""
    results = {1.0: b"one", 2.0: b"two"}
    effects = [Effect(job, result) for job, result in results.items()]
    history = History({1.0, 2.0}, {1.0, 2.0}, effects, results, forwards=[7.0], questions={1.0: 7.0, 2.0: 7.0})
    assert check(history).violations == {}
    history.forwards.clear()
    assert check(history).violations == {"unexpected": [1.0, 2.0]}
