"""Which version answers a job: even, constant, nested and independent splits (AR-085, AR-086, AR-091)."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.registry.errors import InvalidInput
from penstock.safety.routing import MAX_ARMS, Arm, RoutingTable, rollout_table
from penstock.safety.statistics import chi_square_p
from tests.servers import ROOT

JOBS = 20_000
THREE = (Arm("1", 0.6), Arm("2", 0.3), Arm("3", 0.1))
JOB_IDS = [f"minilm.{number:032x}" for number in range(JOBS)]


def counts(table: RoutingTable, keys: list[str]) -> list[int]:
    found = Counter(map(table.version_for, keys))
    assert set(found) <= {arm.version for arm in table.arms}
    return [found[arm.version] for arm in table.arms]


@pytest.mark.parametrize("is_sticky", [False, True])
@pytest.mark.parametrize("arms", [THREE, (Arm("1", 0.99), Arm("2", 0.01)), (Arm("1", 0.5), Arm("2", 0.5))])
def test_the_split_fits_the_weights(arms: tuple[Arm, ...], is_sticky: bool):
    """20,000 jobs are within 4 sigma of each arm's weight, and chi-square has p > 0.001 (AR-085, AR-091)."""
    table = RoutingTable(arms, "split", is_sticky)
    table.check()
    keys = [table.key_of(job_id, f"user {number}") for number, job_id in enumerate(JOB_IDS)]
    found = counts(table, keys)
    for arm, seen in zip(arms, found, strict=True):
        assert abs(seen - JOBS * arm.weight) <= 4 * math.sqrt(JOBS * arm.weight * (1 - arm.weight))
    assert chi_square_p(found, [arm.weight for arm in arms]) > 0.001


def test_a_sticky_key_has_one_version():
    """All jobs of a user go to one version; without stickiness they are divided (AR-086)."""
    sticky, weighted = RoutingTable(THREE, "s", is_sticky=True), RoutingTable(THREE, "s", is_sticky=False)
    assert len({sticky.version_for(sticky.key_of(job_id, "user 7")) for job_id in JOB_IDS[:200]}) == 1
    assert len({weighted.version_for(weighted.key_of(job_id, "user 7")) for job_id in JOB_IDS[:200]}) == 3
    assert {sticky.version_for(f"user {number}") for number in range(50)} == {"1", "2", "3"}


def test_a_job_without_a_sticky_key_is_assigned_by_its_id():
    """An experiment that is sticky still divides the jobs of clients that give no key."""
    table = RoutingTable(THREE, "s", is_sticky=True)
    assert table.key_of("job", "") == "job"
    assert table.key_of("job", "user") == "user"


def test_two_salts_are_independent():
    """Keys that one experiment gave to B are divided by the next one as all others are."""
    first, second = (rollout_table("a", "b", 0.5, salt) for salt in ("first", "second"))
    cells = Counter((first.version_for(key), second.version_for(key)) for key in JOB_IDS)
    assert chi_square_p([cells[pair] for pair in (("a", "a"), ("a", "b"), ("b", "a"), ("b", "b"))], [0.25] * 4) > 0.001


@given(st.floats(0, 1), st.floats(0, 1), st.text(min_size=1), st.lists(st.text(), max_size=50))
def test_a_larger_share_keeps_its_keys(one: float, other: float, salt: str, keys: list[str]):
    """A key that has the candidate at 5 % has it at 10 %, too, whatever the shares are."""
    small, large = (rollout_table("stable", "candidate", share, salt) for share in sorted((one, other)))
    for key in keys:
        if small.version_for(key) == "candidate":
            assert large.version_for(key) == "candidate"


def test_the_steps_of_a_rollout_are_nested_and_real_shares():
    """From 1 to 100 % each step holds the keys of the one before, and its share of all."""
    before: set[str] = set()
    for share in (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0):
        table = rollout_table("stable", "candidate", share, "rollout")
        inside = {key for key in JOB_IDS if table.version_for(key) == "candidate"}
        assert before <= inside
        assert abs(len(inside) - JOBS * share) <= 4 * math.sqrt(JOBS * share * (1 - share))
        before = inside


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=MAX_ARMS).filter(any),
    st.text(min_size=1),
    st.one_of(st.text(), st.binary(), st.characters(categories=["Cs"])),
)
def test_an_arm_without_weight_gets_nothing(weights: list[int], salt: str, key: str | bytes):
    """Whatever the key is and however weights round, an arm with weight answers."""
    arms = tuple(Arm(str(place), weight / sum(weights)) for place, weight in enumerate(weights))
    table = RoutingTable(arms, salt)
    table.check()
    chosen = table.version_for(key)
    assert next(arm.weight for arm in arms if arm.version == chosen) > 0


def test_text_and_its_bytes_are_one_key():
    """A worker that has the id as bytes sends the job where the client's text leads."""
    table = RoutingTable(THREE, "bytes")
    assert [table.version_for(key) for key in JOB_IDS[:100]] == [
        table.version_for(key.encode()) for key in JOB_IDS[:100]
    ]


def test_every_process_decides_alike():
    """The seed of Python's own hash has no part in it, and a decoded table decides as the first one."""
    table = RoutingTable(THREE, "processes", is_sticky=True)
    ours = "".join(table.version_for(key) for key in JOB_IDS[:200])
    program = (
        "import sys, msgspec; from penstock.safety.routing import RoutingTable\n"
        "table = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=RoutingTable)\n"
        "print(''.join(table.version_for(f'minilm.{number:032x}') for number in range(200)))"
    )
    encoded = msgspec.msgpack.encode(table).hex()
    theirs = subprocess.run(
        [sys.executable, "-c", program, encoded], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert theirs.stdout.strip() == ours


def test_the_assignment_is_the_same_in_the_next_release():
    """A change of the hash would move users between versions in the middle of an experiment."""
    table = RoutingTable(THREE, "pinned")
    assert "".join(table.version_for(f"user {number}") for number in range(24)) == "112122113132112111121111"


@pytest.mark.parametrize(
    ("arms", "salt", "message"),
    [
        ((), "s", "0 arms, expected 1 to 32"),
        (tuple(Arm(str(place), 1 / 33) for place in range(33)), "s", "33 arms, expected 1 to 32"),
        ((Arm("1", 1.0),), "", "salt is empty"),
        ((Arm("1", 0.5), Arm("1", 0.5)), "s", "'1' is there twice"),
        ((Arm("1", 0.5), Arm("", 0.5)), "s", "expected the name of a version"),
        ((Arm("1", 1.5), Arm("2", -0.5)), "s", "weight 1.5, expected a number 0 to 1"),
        ((Arm("1", -0.1), Arm("2", 1.0)), "s", "weight -0.1, expected a number 0 to 1"),
        ((Arm("1", math.nan), Arm("2", 1.0)), "s", "weight nan, expected"),
        ((Arm("1", True),), "s", "weight True, expected a number"),
        ((Arm("1", 0.5), Arm("2", 0.4)), "s", "add up to 0.9, expected 1"),
        ((Arm("1", 0.7), Arm("2", 0.4)), "s", "add up to 1.1, expected 1"),
        ((Arm("1", 0.0), Arm("2", 0.0)), "s", "add up to 0, expected 1"),
    ],
)
def test_a_table_that_divides_nothing_is_refused(arms: tuple[Arm, ...], salt: str, message: str):
    """The error says what was found and what is expected."""
    with pytest.raises(InvalidInput, match=message):
        RoutingTable(arms, salt).check()


def test_an_unknown_arm_is_refused_with_the_known_ones():
    """A version that the model lacks is named beside those that it has."""
    table = RoutingTable((Arm("1", 0.9), Arm("9", 0.1)), "s")
    table.check()
    with pytest.raises(InvalidInput, match=r"Unknown arm '9'\. Expected some of: 1, 2"):
        table.check(known={"2", "1"})


@pytest.mark.parametrize("share", [-0.1, 1.5, math.nan, math.inf])
def test_a_share_outside_0_to_1_is_refused(share: float):
    """A rollout of 150 % is a mistake in a unit."""
    with pytest.raises(InvalidInput, match="expected a number 0 to 1"):
        rollout_table("1", "2", share, "s")
