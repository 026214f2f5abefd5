"""The requirements that `penstock doctor` checks, and how it compares versions."""

from __future__ import annotations

import pytest

from penstock.compose.doctor.installed import check_requirements, is_within


@pytest.mark.parametrize(
    ("version", "bounds", "expected"),
    [
        ("5.7.0", ">=5.6.3,<6", True),
        ("5.6.2", "<6,>=5.6.3", False),
        ("6.0.0rc1", ">=5.6.3,<6", False),
        ("5.10", ">=5.9", True),
        ("2.13.0+cpu", "<3,>=2.11", True),
        ("0.1.0", "==0.1.0", True),
        ("0.2.0", "==0.1.0", False),
        ("1.0", "", True),
    ],
)
def test_versions_are_compared_by_number(version: str, bounds: str, expected: bool):
    """Versions compare as in pip, for the kinds of bounds that our requirements have."""
    assert is_within(version, bounds) is expected


@pytest.mark.parametrize(
    ("requirement", "status", "what", "fix"),
    [
        ("msgspec>=0.1", "ok", "msgspec ", ""),
        ("msgspec<0.1", "broken", "; expected <0.1", "pip install 'msgspec<0.1'"),
        ("nonesuch<6,>=5", "broken", "nonesuch is not installed", "pip install 'nonesuch<6,>=5'"),
        ("nonesuch[hiredis]>=6", "broken", "nonesuch is not installed", "pip install 'nonesuch>=6'"),
        ("nonesuch; extra == 'cli'", "broken", "nonesuch is not installed", "pip install '.[cli]'"),
        ('nonesuch>=1; extra == "worker"', "warning", "nonesuch is not installed: no worker can", "'.[worker]'"),
    ],
)
def test_requirements_become_findings(requirement: str, status: str, what: str, fix: str):
    """A package that is missing or out of its bounds is found; the fix installs it, or the extra that has it."""
    (finding,) = check_requirements([requirement])
    assert finding.status == status
    assert what in finding.what
    assert fix in finding.fix


@pytest.mark.parametrize(
    "requirement",
    [
        "nonesuch; extra == 'dev'",
        "penstock[cli]; extra == 'worker'",
        "nonesuch; extra == 'torch'",
        "nonesuch; (python_version < '3.13') and extra == 'worker'",
    ],
)
def test_other_requirements_are_left_out(requirement: str):
    """Other extras, Penstock itself, helpers of a framework and requirements of some machines are not checked."""
    assert list(check_requirements([requirement])) == []
