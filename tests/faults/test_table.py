"""What `make chaos` prints: rounds added up by fault, and what went wrong in them."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from tests.faults.__main__ import FOLDER, Recorder, main, modules, table


def _round(module: str, outcome: str = "passed", longrepr: str | None = None, **told: float) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=f"tests/faults/{module}::test_it[1]",
        location=(module, 1, "test_it"),
        keywords={},
        outcome=outcome,  # type: ignore[arg-type]  # one of three words
        longrepr=longrepr,
        when="call",
        user_properties=[*told.items()],
    )


def test_rounds_of_a_fault_add_up_to_one_line():
    """Counts are sums, the recovery is the slowest, a wait in vain is a hang, and what took
    longer than promised is named; faults go by their numbers."""
    recorder = Recorder()
    for report in (
        _round("test_repeated_messages.py", times=600, jobs=200, lost=0, duplicated=0),
        _round("test_broker_dies.py", times=1, jobs=100, lost=0, duplicated=1, recovery_s=0.5, recovery_limit_s=2),
        _round("test_broker_dies.py", times=1, jobs=1200, lost=2, duplicated=0, recovery_s=0.25, recovery_limit_s=0.2),
        _round("test_broker_dies.py", "failed", "Failed: not within 30 s: more jobs end"),
    ):
        recorder.pytest_runtest_logreport(report)
    lines = table([*recorder.tallies.values()]).splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["| Fault", "| ---", "| F4", "| F11"]
    assert lines[2].endswith(" | 3 | 1,300 | 2 | 1 | 1 | 0.50 s |")
    assert lines[3].endswith(" | 600 | 200 | 0 | 0 | 0 |  |")
    tally = recorder.tallies["tests/faults/test_broker_dies.py"]
    assert tally.failed
    assert tally.late == ["tests/faults/test_broker_dies.py::test_it[1]: 0.25 s, promised 0.2 s"]


def test_every_fault_of_the_matrix_has_its_tests():
    """F1 to F13, and F15 to F27, each in one module; P1 in several."""
    every = [f"F{number}" for number in (*range(1, 14), *range(15, 28))]
    assert len(modules(every)) == len(every)
    assert len(modules(["P1"])) > 1
    assert set(modules([])) == {*modules(every), *modules(["P1"])}
    assert all(path.startswith(str(FOLDER)) for path in modules([]))


def test_unknown_fault_is_refused_with_those_that_are_known():
    """One line and exit status 2, before anything starts."""
    refused = CliRunner().invoke(main, ["--only", "f99"])
    assert refused.exit_code == 2
    assert "Unknown fault F99. Expected one of: F1, F2, F3," in refused.output
