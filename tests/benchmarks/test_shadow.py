"""The verdict of the benchmark of a shadow: cheap is not enough, the shadow must have worked."""

from __future__ import annotations

import pytest

from tests.benchmarks.shadow import _CONDITIONS, _Pair, _row, _Taken

OFF = _Taken(100.0, 5.0, 9.0, 0, 0, 0)
ON = OFF._replace(mirrored=100, compared=90)


def ok(name: str, on: _Taken) -> str | None:
    """The verdict on three runs of this kind."""
    return _row(name, [_Pair(on, OFF, OFF)] * 3, 1000.0).ok


@pytest.mark.parametrize("name", _CONDITIONS)
def test_shadow_that_worked_and_was_cheap_passes(name: str):
    """Neither of these is enough alone."""
    assert ok(name, ON) == "yes"
    for dear in (
        ON._replace(worker_us=106.0),
        ON._replace(p50_ms=5.3),
        ON._replace(p99_ms=11.5),
        ON._replace(failed=1),
    ):
        assert ok(name, dear) == "**no**"


@pytest.mark.parametrize("name", _CONDITIONS)
def test_shadow_that_mirrored_nothing_fails(name: str):
    """Without pairs nothing was measured."""
    assert ok(name, ON._replace(mirrored=0, compared=0)) == "**no**"


@pytest.mark.parametrize("name", _CONDITIONS)
def test_shadow_worker_that_compared_nothing_fails(name: str):
    """Where there is one whose candidate answers in a run; without one, pairs are mirrored only."""
    is_needed = {"shadow worker": True, "no shadow worker": False, "slow": False, "crashing": True, "full": False}
    assert ok(name, ON._replace(compared=0)) == ("**no**" if is_needed[name] else "yes")
