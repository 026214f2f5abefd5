"""What follows a try: the verdict on each answer, and pauses that grow over days."""

from __future__ import annotations

import pytest

from penstock.registry.webhooks.schedule import PAUSES_S, Answer, Delivered, Failed, pause_s, retry_after_s, verdict

NOW_S = 1_763_650_000.0
DAY_S = 86_400


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_success_is_any_2xx(status: int):
    """Whatever the receiver did with it."""
    assert verdict(Answer(status), NOW_S) == Delivered()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirect_is_a_failure(status: int):
    """It is said to be one, and tried again."""
    assert verdict(Answer(status), NOW_S) == Failed(f"the receiver answered {status}: redirects are not followed")


@pytest.mark.parametrize("status", [400, 401, 404, 408, 500, 502, 504])
def test_error_is_tried_again(status: int):
    """Its Retry-After does not count."""
    assert verdict(Answer(status, "120"), NOW_S) == Failed(f"the receiver answered {status}")


def test_gone_is_final():
    """410 ends it at once."""
    result = verdict(Answer(410), NOW_S)
    assert isinstance(result, Failed)
    assert result.is_final


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("120", 120),
        ("0", 0),
        ("999999999999999999", DAY_S),
        ("Thu, 20 Nov 2025 14:47:40 GMT", 60),
        ("Thu, 20 Nov 2025 14:00:00 GMT", 0),
        ("Sat, 20 Nov 2055 14:00:00 GMT", DAY_S),
        ("soon", 0),
        ("-5", 0),
        ("\u0663", 0),
        ("", 0),
    ],
)
def test_retry_after_is_respected_within_a_day(status: int, text: str, seconds: int):
    """Seconds or a date; what cannot be read asks for nothing."""
    result = verdict(Answer(status, text), NOW_S)
    assert isinstance(result, Failed)
    assert result.least_pause_s == pytest.approx(seconds)
    assert retry_after_s(text, NOW_S) == result.least_pause_s


def test_pauses_grow_over_days():
    """Eleven tries within four days, each pause at least as long as the one before it; then none."""
    pauses = [pause_s(tries, 0.0) for tries in range(1, 12)]
    assert pauses[:-1] == [*PAUSES_S] == sorted(PAUSES_S)
    assert pauses[-1] is None
    assert 3 * DAY_S < sum(PAUSES_S) < 4 * DAY_S


def test_jitter_lengthens_a_pause_by_at_most_a_fifth():
    """Also the one that the receiver asked for, which is never shortened."""
    assert pause_s(2, 0.999) == pytest.approx(72, rel=1e-3)
    assert pause_s(1, 0.0, least_s=600) == 600
    assert pause_s(4, 0.0, least_s=600) == 1800
