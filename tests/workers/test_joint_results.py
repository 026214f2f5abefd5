"""The results of a batch that are cut out of its outputs together: byte by byte those of each job by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from penstock.registry.broker.base import Commit
from penstock.registry.envelope import Keyring
from penstock.registry.tensors import DTYPES, MAX_RESULT_BYTES, STRING, Array, encode
from penstock.workers import joint_results, results
from penstock.workers.batch_run import BatchRun, JointAnswers
from penstock.workers.job import ClaimedJob
from penstock.workers.joint_results import JointSealer
from penstock.workers.results import CachedAnswers, EncodedOutputs, JobOutcome, commit_of
from penstock.workers.versions.version import ServedVersion
from tests.workers.claims_of_jobs import KEYRINGS, KINDS, SIGNING, UNSIGNED, Sealer, delivery_of
from tests.workers.doubles import ready_version, run_of
from tests.workers.test_shared_headers import Reader

PLAIN: Final = ("plain", "another tenant", "several rows", "a deadline", "a reply", "retries", "a webhook", "long ids")
"""Kinds of jobs whose results may be sealed together."""
OTHERS: Final = ("outputs", "a task", "a version", "an idempotency key", "a trace", "short ids")
"""Kinds of jobs that are sealed one by one."""
NUMBERS: Final = tuple(sorted(set(DTYPES) - {STRING}))
LAYOUTS: Final[Mapping[str, Callable[[Array], Array]]] = {
    "contiguous": lambda values: values,
    "columns": np.asfortranarray,
    "turned": lambda values: np.ascontiguousarray(values.T).T,
    "every second": lambda values: np.repeat(values, 2, axis=0)[::2],
    "backwards": lambda values: values[::-1],
    "one row": lambda values: np.broadcast_to(values[:1], values.shape),
}
"""How the rows of an output may lie in memory."""
OUTPUT = st.tuples(
    st.sampled_from(NUMBERS), st.sampled_from([(), (3,), (0,), (2, 2), (1, 5)]), st.sampled_from(sorted(LAYOUTS))
)
NAMES: Final = ("y", "timings", "id", "\xa7timings\x93", "context", "a" * 40)


ALONE: Final[Any] = {"worker": "w", "keyring": UNSIGNED, "client_tracebacks": False}
"""How one job is sealed by itself."""


def jobs_of(kinds: list[str], keyring: Keyring, version: ServedVersion) -> list[ClaimedJob]:
    """One job of each of these kinds, claimed together, checked, and of different ages."""
    sealer = Sealer(keyring)
    deliveries = [delivery_of(sealer.job(KINDS[kind]), KINDS[kind], number) for number, kind in enumerate(kinds)]
    jobs = Reader(keyring).open_all(deliveries, 77.0, 6500.0)
    for kind, job in zip(kinds, jobs, strict=True):
        if kind == "no rows":
            job.rows = 0
        else:
            version.fit(job)
    return jobs


def run_with(jobs: list[ClaimedJob], outputs: Mapping[str, Array], version: ServedVersion) -> BatchRun:
    """A batch of these jobs that has ended with these outputs, half of a second after it began."""
    run = run_of(version, *jobs)
    run.answers = JointAnswers(dict(outputs), jobs)
    run.started, run.ended = 77.625, 78.125
    return run


def one_by_one(run: BatchRun, worker: str, keyring: Keyring) -> list[Commit]:
    """The commits of the jobs of a run, each sealed by itself."""
    return [
        commit_of(
            JobOutcome(job, answer, "ran", run.version, run), worker=worker, keyring=keyring, client_tracebacks=False
        )[1]
        for job, answer in zip(run.jobs, run.answers, strict=True)
    ]


def output_of(dtype: str, row_shape: tuple[int, ...], layout: str, rows: int) -> Array:
    """An output in which all rows differ, where the dtype has so many values."""
    size = int(np.prod((rows, *row_shape)))
    values = np.arange(size).astype(DTYPES[dtype]).reshape(rows, *row_shape)
    return LAYOUTS[layout](values)


def joint_commits(run: BatchRun, *, worker: str, keyring: Keyring) -> list[Commit] | None:
    """The commits of a run without followers."""
    results = JointSealer(worker=worker, keyring=keyring).of_run(run, {}, keeps=False)
    return None if results is None else results.commits


@pytest.mark.parametrize("keyring", KEYRINGS.values(), ids=KEYRINGS)
@settings(max_examples=80, derandomize=True)
@given(
    kinds=st.lists(st.sampled_from(PLAIN), min_size=1, max_size=6),
    outputs=st.dictionaries(st.sampled_from(NAMES), OUTPUT, min_size=1, max_size=3),
    worker=st.sampled_from(["", "gpu0@host", "timings", "\xa7timings\x93\xcb", "w" * 64]),
    ages=st.lists(st.floats(70.0, 80.0), min_size=6, max_size=6),
)
def test_results_that_are_sealed_together_are_those_that_are_sealed_one_by_one(
    kinds: list[str],
    outputs: dict[str, tuple[str, tuple[int, ...], str]],
    worker: str,
    ages: list[float],
    keyring: Keyring,
):
    """Of several kinds of jobs with several rows, for each dtype, shape and layout; they are sealed together."""
    version = ready_version()
    jobs = jobs_of(kinds, keyring, version)
    for job, age in zip(jobs, ages, strict=False):
        job.claimed, job.queue_ms = age, (age - 75) * 1000 if age > 75 else 0.0
    rows = sum(job.rows for job in jobs)
    run = run_with(jobs, {name: output_of(*output, rows) for name, output in outputs.items()}, version)
    assert joint_commits(run, worker=worker, keyring=keyring) == one_by_one(run, worker, keyring)


@settings(max_examples=80, derandomize=True)
@given(
    kinds=st.lists(st.sampled_from(PLAIN), min_size=1, max_size=6),
    outputs=st.dictionaries(st.sampled_from(NAMES), OUTPUT, min_size=1, max_size=3),
    keyless=st.integers(0, 6),
)
def test_the_answers_that_are_cached_are_those_of_each_job(
    kinds: list[str], outputs: dict[str, tuple[str, tuple[int, ...], str]], keyless: int
):
    """Described and encoded as for one job alone, each in memory of its own. A job without a key has none."""
    version = ready_version()
    jobs = jobs_of(kinds, UNSIGNED, version)
    for number, job in enumerate(jobs):
        job.digest = b"" if number == keyless else b"%d" % number
    rows = sum(job.rows for job in jobs)
    run = run_with(jobs, {name: output_of(*output, rows) for name, output in outputs.items()}, version)
    found = JointSealer(worker="w", keyring=UNSIGNED).of_run(run, {}, keeps=True)
    assert found is not None
    expected = [
        (job, commit_of(JobOutcome(job, answer, "ran", version, run), **ALONE)[0].answer)
        for job, answer in zip(jobs, run.answers, strict=True)
        if job.digest
    ]
    answers = found.answers(run)
    assert answers == expected
    assert all(type(answer.body) is bytes for _, answer in answers)
    alike = found.answers_alike(run)
    assert (alike is not None) is (keyless >= len(jobs) and len({job.rows for job in jobs}) == 1)
    assert alike is None or [*zip(run.jobs, alike, strict=True)] == expected


@pytest.mark.parametrize("keyring", KEYRINGS.values(), ids=KEYRINGS)
@settings(max_examples=40, derandomize=True)
@given(
    kinds=st.lists(st.sampled_from(PLAIN), min_size=1, max_size=4),
    other=st.sampled_from([*OTHERS, "second delivery", "lost"]),
    at=st.integers(0, 4),
)
def test_a_batch_with_a_job_of_another_kind_is_sealed_one_by_one(
    kinds: list[str], other: str, at: int, keyring: Keyring
):
    """Among plain jobs, at any place of the batch."""
    version = ready_version()
    at %= len(kinds) + 1
    jobs = jobs_of([*kinds[:at], other if other in KINDS else "plain", *kinds[at:]], keyring, version)
    if other == "second delivery":
        jobs[at].delivery = structs.replace(jobs[at].delivery, attempt=2)
    jobs[at].is_lost = other == "lost"
    run = run_with(jobs, {"y": output_of("float32", (1,), "contiguous", sum(job.rows for job in jobs))}, version)
    assert joint_commits(run, worker="w", keyring=keyring) is None


def found_answers() -> list[EncodedOutputs]:
    """Answers of a cache: of several shapes and contents; some have one description, others an equal one."""
    contents = [encode({"y": np.arange(rows, dtype=np.float32).reshape(rows, 1)}) for rows in (1, 1, 2)]
    contents += [encode({"y": np.ones((1, 3), np.int64), "z": np.zeros((1,), bool)}), encode({})]
    described = [EncodedOutputs(content, body, digit * 64, 0) for content, body in contents for digit in "ab"]
    first = described[0]
    return [*described, *(structs.replace(first, body=np.float32(number).tobytes()) for number in range(4))]


FOUND: Final = st.integers(0, len(found_answers()) - 1)
"""The number of a found answer."""


def together_and_by_themselves(
    kinds: list[str], numbers: list[int], sealer: JointSealer, keyring: Keyring, worker: str
) -> tuple[list[Commit] | None, list[Commit]]:
    """The commits of jobs of one claim, which have these answers of the cache."""
    version, answers = ready_version(), found_answers()
    cached = CachedAnswers(version, jobs_of(kinds, keyring, version), [answers[number] for number in numbers])
    alone = [
        commit_of(outcome, worker=worker, keyring=keyring, client_tracebacks=False)[1] for outcome in cached.outcomes()
    ]
    return sealer.of_cached(cached), alone


@pytest.mark.parametrize("keyring", KEYRINGS.values(), ids=KEYRINGS)
@settings(max_examples=60, derandomize=True)
@given(
    claims=st.lists(st.lists(st.tuples(st.sampled_from(PLAIN), FOUND), min_size=1, max_size=6), min_size=1, max_size=3),
    worker=st.sampled_from(["", "gpu0@host", "\xa7timings\x93\xcb"]),
)
def test_found_answers_that_are_sealed_together_are_those_that_are_sealed_one_by_one(
    claims: list[list[tuple[str, int]]], worker: str, keyring: Keyring
):
    """Of jobs of several kinds, with answers of several shapes and contents, in claim after claim of one worker."""
    sealer = JointSealer(worker=worker, keyring=keyring)
    for claim in claims:
        kinds, numbers = [kind for kind, _ in claim], [number for _, number in claim]
        together, alone = together_and_by_themselves(kinds, numbers, sealer, keyring, worker)
        assert together == alone


@settings(max_examples=40, derandomize=True)
@given(kinds=st.lists(st.sampled_from(PLAIN), max_size=3), other=st.sampled_from(OTHERS), at=st.integers(0, 3))
def test_found_answers_of_other_jobs_are_sealed_one_by_one(kinds: list[str], other: str, at: int):
    """One job that is not plain, at any place of its claim, is enough."""
    kinds.insert(at % (len(kinds) + 1), other)
    sealer = JointSealer(worker="w", keyring=SIGNING)
    together, alone = together_and_by_themselves(kinds, [0] * len(kinds), sealer, SIGNING, "w")
    assert (together, len(alone)) == (None, len(kinds))


@pytest.mark.parametrize(
    "values",
    [
        np.array(["a", "b"], object),
        np.array([1, 2], ">f4"),
        np.array([1, 2], np.complex64),
        np.array([1, 2], np.longdouble),
        np.array([(1, 2), (3, 4)], [("a", "<i2"), ("b", "<i2")]),
        np.array([b"ab", b"cd"], "S2"),
        np.array(["2026-01-01", "2026-01-02"], "datetime64[D]"),
    ],
    ids=lambda values: str(values.dtype),
)
def test_outputs_that_cannot_be_cut_as_bytes_are_sealed_one_by_one(values: Array):
    """Text, and what cannot travel: such a job fails with the reason, by itself."""
    version = ready_version()
    jobs = jobs_of(["plain", "plain"], UNSIGNED, version)
    run = run_with(jobs, {"y": output_of("float32", (1,), "contiguous", 2), "z": values}, version)
    assert joint_commits(run, worker="w", keyring=UNSIGNED) is None


def test_jobs_without_rows_are_sealed_one_by_one():
    """Their outputs have no rows from which the size of one could be told."""
    version = ready_version()
    jobs = jobs_of(["no rows", "no rows"], UNSIGNED, version)
    run = run_with(jobs, {"y": np.zeros((0, 1), np.float32)}, version)
    assert joint_commits(run, worker="w", keyring=UNSIGNED) is None
    mixed = jobs_of(["no rows", "plain", "no rows", "several rows"], SIGNING, version)
    run = run_with(mixed, {"y": output_of("float32", (1,), "contiguous", 6)}, version)
    assert joint_commits(run, worker="w", keyring=SIGNING) == one_by_one(run, "w", SIGNING)


@pytest.mark.parametrize(("cap", "together"), [(20, True), (19, False)])
def test_a_result_over_the_cap_is_not_sealed_with_the_others(cap: int, together: bool, monkeypatch: pytest.MonkeyPatch):
    """The largest of them decides: of five rows, four bytes each."""
    for module in (joint_results, results):
        monkeypatch.setattr(module, "MAX_RESULT_BYTES", cap)
    version = ready_version()
    jobs = jobs_of(["plain", "several rows", "plain"], UNSIGNED, version)
    run = run_with(jobs, {"y": output_of("float32", (1,), "contiguous", 7)}, version)
    commits = joint_commits(run, worker="w", keyring=UNSIGNED)
    assert commits == (one_by_one(run, "w", UNSIGNED) if together else None)


def test_the_caps_of_both_ways_are_one():
    """A result that the one way refuses is none that the other way sends."""
    assert vars(joint_results)["MAX_RESULT_BYTES"] == vars(results)["MAX_RESULT_BYTES"] == MAX_RESULT_BYTES


def test_an_id_of_another_length_is_sealed_one_by_one():
    """A template is made for ids of one length."""
    version = ready_version()
    first, second = jobs_of(["plain", "plain"], UNSIGNED, version)
    second.header = structs.replace(second.header, id=second.header.id + "a")
    run = run_with([first, second], {"y": output_of("float32", (1,), "contiguous", 2)}, version)
    assert joint_commits(run, worker="w", keyring=UNSIGNED) is None


def test_answers_of_several_forwards_are_sealed_one_by_one():
    """Only the outputs of one forward can be cut."""
    version = ready_version()
    jobs = jobs_of(["plain", "plain"], UNSIGNED, version)
    run = run_with(jobs, {"y": output_of("float32", (1,), "contiguous", 2)}, version)
    run.answers = list(run.answers)
    assert joint_commits(run, worker="w", keyring=UNSIGNED) is None


def test_a_job_that_was_tried_before_is_sealed_with_the_others():
    """The tries of this worker are no deliveries."""
    version = ready_version()
    jobs = jobs_of(["retries", "retries"], SIGNING, version)
    jobs[0].tries = 2
    run = run_with(jobs, {"y": output_of("int8", (), "contiguous", 2)}, version)
    assert joint_commits(run, worker="w", keyring=SIGNING) == one_by_one(run, "w", SIGNING)
