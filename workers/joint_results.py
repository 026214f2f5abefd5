"""The results of jobs that are alike and were answered together: what they share is encoded once.

BatchRun      --> JointSealer.of_run    --> a commit for each job and follower, equal to that of commit_of
CachedAnswers --> JointSealer.of_cached --> a commit for each job
                              `-----------> None: seal the results one by one
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from penstock.registry.broker.base import Commit, State
from penstock.registry.envelope import Keyring
from penstock.registry.result_template import ResultTemplate
from penstock.registry.tensors import MAX_RESULT_BYTES, STRING, Tensor, dtype_name
from penstock.workers.backlog import Waiting
from penstock.workers.batch_run import BatchRun, JointAnswers, Outputs
from penstock.workers.credit import TURN_BYTES
from penstock.workers.job import ClaimedJob, SharedHeader
from penstock.workers.results import CachedAnswers, EncodedOutputs, result_header, timings_of
from penstock.workers.versions.version import ServedVersion

__all__ = ["JointResults", "JointSealer"]

_COMPLETED: Final = State.COMPLETED
_MOST_TEMPLATES: Final = 1024


class JointResults(NamedTuple):
    """The results of one run."""

    jobs: list[ClaimedJob]
    """Those of the batch in order, each with its followers behind it."""
    commits: list[Commit]
    """One for each of these."""
    bodies: list[bytes | memoryview]
    """The outputs of each job of the batch, in order, if the answers may be cached."""
    contents: dict[int, tuple[Tensor, ...]]
    """The descriptions of the outputs, by the rows of a job."""

    def answers_alike(self, run: BatchRun) -> list[EncodedOutputs] | None:
        """As `answers`, for each job of the batch, at half of the cost; None: a job has no key, or rows differ."""
        if len(self.contents) != 1 or not all([job.digest for job in run.jobs]):
            return None
        (content,) = self.contents.values()
        content_hash, generation = run.model.content_hash, run.generation
        return [EncodedOutputs(content, bytes(body), content_hash, generation) for body in self.bodies]

    def answers(self, run: BatchRun) -> list[tuple[ClaimedJob, EncodedOutputs]]:
        """The answers that may be cached. They are made when no job waits for them; see Completer.keep_answers."""
        content_hash, generation, contents = run.model.content_hash, run.generation, self.contents
        # The cache would copy a view, at more cost.
        return [
            (job, EncodedOutputs(contents[job.rows], bytes(body), content_hash, generation))
            for job, body in zip(run.jobs, self.bodies, strict=True)
            if job.digest
        ]


class _Output(NamedTuple):
    """One output of all jobs: its rows as bytes, one after another."""

    name: str
    dtype: str
    row_shape: tuple[int, ...]
    rows: memoryview
    row_bytes: int


class JointSealer:
    """Seals the results of jobs that were answered together, for one worker. The I/O thread owns it.

    What results have in common is remembered, bounded in number.
    """

    def __init__(self, *, worker: str, keyring: Keyring) -> None:
        self._worker = worker
        self._keyring = keyring
        self._templates: dict[Hashable, ResultTemplate | None] = {}

    def of_run(
        self, run: BatchRun, followers: Mapping[ClaimedJob, Sequence[Waiting]], *, keeps: bool
    ) -> JointResults | None:
        """The results of the jobs of a run and of their followers; None unless all are completed and plain.

        A plain job wants all outputs and was delivered once. Its follower is plain as well, and waits for the same
        version. The copies for the followers of one job fit one round trip. keeps: whether the answers may be cached.
        """
        answers, jobs = run.answers, run.jobs
        if not isinstance(answers, JointAnswers) or not all(map(_is_plain, jobs)):
            return None
        if not all(_is_plain(job) and version is run.version for group in followers.values() for job, version in group):
            return None
        outputs = _as_bytes(answers.outputs)
        if outputs is None:
            return None
        contents: dict[int, tuple[Tensor, ...]] = {}
        results = JointResults([], [], [], contents)
        templates: dict[SharedHeader | None, ResultTemplate] = {}
        start, started = 0, run.started
        compute_ms = timings_of(jobs[0], run).compute_ms
        for leader in jobs:
            stop = start + leader.rows
            parts = [output.rows[start * output.row_bytes : stop * output.row_bytes] for output in outputs]
            body: bytes | memoryview = parts[0] if len(parts) == 1 else b"".join(parts)
            start = stop
            if leader.rows not in contents:
                contents[leader.rows] = _content_of(outputs, leader.rows)
            following = followers.get(leader) if followers else None
            if len(body) > MAX_RESULT_BYTES or (following and len(body) * len(following) > TURN_BYTES):
                return None
            for job in (leader, *(follower for follower, _ in following)) if following else (leader,):
                template = templates.get(job.shared)
                if template is None:
                    if (template := self._of_run(job, run, contents[leader.rows])) is None:
                        return None
                    templates[job.shared] = template
                batch_ms = (started - job.claimed) * 1e3
                sealed = template.seal(
                    job.header.id, job.queue_ms, batch_ms if batch_ms > 0.0 else 0.0, compute_ms, body
                )
                if sealed is None:
                    return None
                results.jobs.append(job)
                results.commits.append(_commit(job, sealed))
            if keeps:
                results.bodies.append(body)
        return results

    def of_cached(self, cached: CachedAnswers) -> list[Commit] | None:
        """The commits of these jobs, in order; None unless all of them are plain."""
        if not all(map(_is_plain, cached.jobs)):
            return None
        commits: list[Commit] = []
        shared = content = content_hash = template = None
        for job, answer in zip(cached.jobs, cached.answers, strict=True):
            if (
                job.shared is not shared
                or answer.content is not content
                or answer.content_hash is not content_hash
                or template is None
            ):
                shared, content, content_hash = job.shared, answer.content, answer.content_hash
                template = self._of_cached(job, answer, cached.version)
            if template is None:
                return None
            sealed = template.seal(job.header.id, job.queue_ms, 0.0, 0.0, answer.body)
            if sealed is None:
                return None
            commits.append(_commit(job, sealed))
        return commits

    def _of_run(self, job: ClaimedJob, run: BatchRun, content: tuple[Tensor, ...]) -> ResultTemplate | None:
        """For the results of the jobs that share the header of this one, and so have as many rows."""
        label, content_hash, experiment = run.version.label, run.model.content_hash, run.version.base.experiment
        about = job.shared, label, experiment, content_hash, run.batch.rows, content, run.level
        if about not in self._templates:
            header = result_header(
                job,
                run,
                version=label,
                experiment=experiment,
                content_hash=content_hash,
                worker=self._worker,
                content=content,
                key=self._keyring.signing_id,
                is_sealed=self._keyring.seals,
                level=run.level,
            )
            self._remember(about, ResultTemplate.of(header, self._keyring))
        return self._templates[about]

    def _of_cached(self, job: ClaimedJob, answer: EncodedOutputs, version: ServedVersion) -> ResultTemplate | None:
        label, experiment = version.label, version.base.experiment
        about = job.shared, label, experiment, answer.content_hash, answer.content
        if about not in self._templates:
            header = result_header(
                job,
                None,
                version=label,
                experiment=experiment,
                content_hash=answer.content_hash,
                worker=self._worker,
                content=answer.content,
                is_cached=True,
                key=self._keyring.signing_id,
                is_sealed=self._keyring.seals,
            )
            self._remember(about, ResultTemplate.of(header, self._keyring))
        return self._templates[about]

    def _remember(self, about: Hashable, template: ResultTemplate | None) -> None:
        if len(self._templates) >= _MOST_TEMPLATES:
            self._templates.clear()
        self._templates[about] = template


def _commit(job: ClaimedJob, sealed: bytes) -> Commit:
    delivery, header = job.delivery, job.header
    return Commit(
        delivery.slot,
        delivery.priority,
        delivery.entry_id,
        header.id,
        _COMPLETED,
        sealed,
        header.tenant,
        header.reply,
    )


def _is_plain(job: ClaimedJob) -> bool:
    shared = job.shared
    return shared is not None and shared.is_plain and not job.is_lost and job.delivery.attempt == 1


def _as_bytes(outputs: Outputs) -> list[_Output] | None:
    """None: they cannot be cut by rows as bytes."""
    found = []
    for name, values in outputs.items():
        dtype = dtype_name(values.dtype)
        if dtype is None or dtype == STRING or not len(values):
            return None
        row_shape = values.shape[1:]
        rows = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        found.append(_Output(name, dtype, row_shape, rows, values.nbytes // len(values)))
    return found


def _content_of(outputs: Sequence[_Output], rows: int) -> tuple[Tensor, ...]:
    return _content(tuple([(output.name, output.dtype, output.row_shape) for output in outputs]), rows)


@lru_cache(maxsize=1024)
def _content(described: tuple[tuple[str, str, tuple[int, ...]], ...], rows: int) -> tuple[Tensor, ...]:
    """The description of outputs. The same object for equal ones: cached answers of one model share it."""
    return tuple(Tensor(name, dtype, (rows, *row_shape)) for name, dtype, row_shape in described)
