"""No test compares clock times: it counts, uses a clock of its own, or is a measured row of the benchmarks."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest

from tests.architecture.clock_reads import clock_comparisons
from tests.servers import ROOT
from tests.sources import parsed, without_collections

PLANTED = {
    "directly": "assert time.monotonic() - begun < 5",
    "through a variable": """
        took = time.perf_counter() - begun
        assert 0.1 <= round(took, 3)
        """,
    "through a list": """
        seconds = []
        for _ in range(3):
            seconds.append(time.process_time() - begun)
        assert min(seconds) < 0.5
        """,
    "through a helper": """
        def elapsed():
            return time.monotonic() - begun

        assert elapsed() < 2 * LIMIT_S
        """,
    "through a field": """
        class Load:
            def run(self):
                self.slowest_s = time.monotonic() - begun

        assert load.slowest_s < 1
        """,
    "through a tuple's field": """
        class Report(NamedTuple):
            sent: int
            pause_s: float

        report = Report(3, time.time() - begun)
        assert report.pause_s < 2
        """,
    "through a helper that asserts": """
        def recovered(seconds, within):
            assert seconds <= within

        recovered(time.thread_time() - begun, 1.0)
        """,
    "as an approximation": "assert time.monotonic() - begun == pytest.approx(1)",
    "through a function that gets the clock": "assert gain(rows, time.perf_counter) > 1.5",
}
SOUND = {
    "a deadline": """
        until = time.monotonic() + 5
        while time.monotonic() < until:
            pass
        """,
    "a clock of the test's own": "assert clock.now - begun == 3",
    "a count beside a time": """
        class Report(NamedTuple):
            sent: int
            pause_s: float

        report = Report(3, time.time() - begun)
        assert report.sent > 2
        """,
    "a time that is data": "assert store.put(DesiredVersion(at=time.time())) is None",
}


def lines_found(source: str) -> list[int]:
    """The lines at which the checker finds a comparison in a test of this body."""
    body = "\n".join(f"    {line}" for line in dedent(source).strip().splitlines())
    text = f"def test_planted():\n    begun = time.monotonic()\n{body}\n"
    return [finding.line for finding in clock_comparisons({"test_planted.py": ast.parse(text)})]


@pytest.mark.parametrize("way", PLANTED)
def test_a_planted_comparison_is_found(way: str):
    """Whichever way the time takes from the clock to the assertion, there is one finding."""
    assert len(lines_found(PLANTED[way])) == 1


@pytest.mark.parametrize("use", SOUND)
def test_other_uses_of_a_clock_are_left_alone(use: str):
    """Deadlines, stamps and clocks of the test's own compare nothing that a busy machine changes."""
    assert lines_found(SOUND[use]) == []


def test_no_test_compares_clock_times():
    """Seconds belong into tests/benchmarks and the tables of tests/faults and tests/threats."""
    paths = [path for path in (ROOT / "tests").rglob("*.py") if "benchmarks" not in path.parts]
    trees = {str(path.relative_to(ROOT)): parsed(path) for path in paths}
    assert len(trees) > 200
    with without_collections():
        assert [f"{finding.path}:{finding.line}" for finding in clock_comparisons(trees)] == []
