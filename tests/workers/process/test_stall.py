"""When a watchdog must not judge others, because its own process stood still."""

from __future__ import annotations

from penstock.workers.process.stall import StallDetector


def test_the_first_turn_is_no_stall():
    """A loop that begins late has not stalled, whatever its clock shows."""
    detector = StallDetector(1.0)
    assert not detector.turn(1_000_000.0)
    assert detector.gap_s == 0.0


def test_a_gap_up_to_the_limit_is_no_stall():
    """Turns that are as far apart as the limit allows are trusted, and the gap is known."""
    detector = StallDetector(1.0)
    assert [detector.turn(now) for now in (5.0, 6.0, 6.5, 7.5)] == [False] * 4
    assert detector.gap_s == 1.0


def test_without_recovery_only_the_turn_after_the_gap_is_distrusted():
    """With no time to recover, one turn is skipped and the next one is trusted."""
    detector = StallDetector(1.0)
    assert [detector.turn(now) for now in (5.0, 7.0, 7.1)] == [False, True, False]


def test_others_get_time_to_recover():
    """Every turn within the recovery time is distrusted; a second stall starts that time again."""
    detector = StallDetector(1.0, recovery_s=2.0)
    turns = [0.0, 10.0, 11.0, 11.9, 14.0, 15.0, 15.9, 16.0]
    assert [detector.turn(now) for now in turns] == [False, True, True, True, True, True, True, False]
