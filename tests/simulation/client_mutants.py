"""Clients that break a fast way: a job by its template, and a result by the bytes of its header.

    job_template.py  the jobs of one call share the bytes of their headers, but for id and digest of the key
    result_match.py  a result is compared with an earlier one; id and tenant must be those of the job

What the simulator cannot show is tested beside the fast way: nothing in it is signed or encrypted, and no bytes of a
result are cut.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Final

from msgspec import structs

from penstock.registry.admission import JobBuilder
from penstock.registry.broker.base import Publication
from penstock.registry.envelope import FIXED_BYTES, open_result
from penstock.registry.job_template import JobTemplate
from penstock.registry.result_match import ResultMatcher
from penstock.registry.tensors import Array
from tests.simulation.broker import UNSIGNED
from tests.simulation.checker import Mutation
from tests.simulation.mutants import Mutant

__all__ = ["CLIENT_MUTANTS"]


# Jobs


class _Builder(JobBuilder):
    """Its templates make other jobs than the real ones: `change` has the first job of a template, and the next one."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.first: dict[tuple[int, int, bool], Publication] = {}
        """By template, size, and whether there is a key."""

    def _template(self, *args: Any, **kwargs: Any) -> JobTemplate:
        return _Template(super()._template(*args, **kwargs), self)

    @staticmethod
    @abstractmethod
    def change(first: Publication, job: Publication) -> Publication:
        """The job that is made in the place of `job`."""


class _Template(JobTemplate):
    """A template with the parts of another one, for a builder that changes its jobs."""

    __slots__ = ("builder", "of")

    def __init__(self, template: JobTemplate, builder: _Builder) -> None:
        for name in JobTemplate.__slots__:
            setattr(self, name, getattr(template, name))
        self.of = template
        self.builder = builder

    def build(self, inputs: object, key: object = None, account: str = "", job_id: str = "") -> Publication | None:
        job = super().build(inputs, key, account, job_id)
        if job is None:
            return None
        about = id(self.of), len(job.sealed), bool(job.idempotency_digest)
        return self.builder.change(self.builder.first.setdefault(about, job), job)


class TemplateWithABody(_Builder):
    """Jobs of one template have the inputs of the first of them."""

    @staticmethod
    def change(first: Publication, job: Publication) -> Publication:
        header, _ = _parts(job)
        _, body = _parts(first)
        return structs.replace(job, sealed=header + body)


class TemplateWithAnId(_Builder):
    """Jobs of one template have the id of the first of them in their headers."""

    @staticmethod
    def change(first: Publication, job: Publication) -> Publication:
        return structs.replace(job, sealed=job.sealed.replace(job.job_id.encode(), first.job_id.encode()))


class TemplateWithADigest(_Builder):
    """Jobs of one template have the idempotency key of the first of them."""

    @staticmethod
    def change(first: Publication, job: Publication) -> Publication:
        digest, of_first = job.idempotency_digest, first.idempotency_digest
        sealed = job.sealed.replace(digest.encode(), of_first.encode()) if digest else job.sealed
        return structs.replace(job, idempotency_digest=of_first, sealed=sealed)


def _parts(job: Publication) -> tuple[bytes, bytes]:
    body_at = FIXED_BYTES + int.from_bytes(job.sealed[4:FIXED_BYTES], "little")
    return job.sealed[:body_at], job.sealed[body_at:]


# Results


class ResultOfAnyJob(ResultMatcher):
    """A result whose header is known is taken for that of the job, whatever its id says."""

    def answer(self, job_id: str, tenant: str, sealed: bytes) -> tuple[dict[str, Array], str] | None:
        return super().answer(open_result(sealed, UNSIGNED)[0].id, tenant, sealed)


class ResultOfAnyTenant(ResultMatcher):
    """A result whose header is known is taken for one of the tenant, whatever it says."""

    def answer(self, job_id: str, tenant: str, sealed: bytes) -> tuple[dict[str, Array], str] | None:
        return super().answer(job_id, open_result(sealed, UNSIGNED)[0].context.tenant, sealed)


def _builds(builder: type[JobBuilder], finding: str) -> Mutant:
    return Mutant(Mutation(builder.__name__, builder=builder), finding)


def _reads(matcher: type[ResultMatcher], finding: str) -> Mutant:
    return Mutant(Mutation(matcher.__name__, matcher=matcher), finding)


CLIENT_MUTANTS: Final[tuple[Mutant, ...]] = (
    _builds(TemplateWithABody, "its client read the answer of another"),
    _builds(TemplateWithAnId, "lost"),
    _builds(TemplateWithADigest, "its key is that of another job"),
    _reads(ResultOfAnyJob, "its client took a forged result"),
    _reads(ResultOfAnyTenant, "its client took a forged result"),
)
