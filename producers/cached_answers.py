"""Answers from the shared cache before a job is queued: a hit costs no message of the queue.

    inputs -> ask: key of the active version -> find: one MGET for many jobs -> CachedAnswer -> an ended job
                                                                             -> None: the job is queued

The active version is that of the broker's record, which each client reads at most once a second: after that time a
promotion holds for the next job. Looked up are jobs for this version, without an idempotency key, a webhook and an
endpoint, of a model that does not stream. A shared cache that is broken is a miss: it delays a call by LOOKUP_S at
most, and is left out for a while then. Pure but for `find`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.producers.job_state import JobState, Outcome, ResultPolicy
from penstock.registry.admission import JobBuilder, SubmitOptions
from penstock.registry.broker.base import JobRecord, State
from penstock.registry.deployment import Deployment
from penstock.registry.envelope import RequestContext, ResultHeader
from penstock.registry.errors import ConfigurationError, Corrupt, InvalidInput
from penstock.registry.queues import DEFAULT_ENDPOINT, new_job_id
from penstock.registry.shared_cache import NoAnswer, SharedCache, transport_problem
from penstock.registry.signed import Verifier
from penstock.registry.tensors import decode
from penstock.safety.cache_entry import EXACT, CacheEntry, EntryKey, key_of, unpack
from penstock.safety.shared_entries import SharedEntries

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.registry.package import ModelSpec
    from penstock.registry.settings import Settings

__all__ = ["LOOKUP_S", "CachedAnswer", "CachedAnswers", "Question"]

LOOKUP_S: Final = 0.25
"""The longest time of one look-up, if `cache.socket_timeout_s` is not less."""
_KEEP_S: Final = 1.0
_AT_ONCE: Final = 256
_MOST_MODELS: Final = 10_000


class Question(NamedTuple):
    """What to look for: the key of a job's answer, and what the ended job will say."""

    key: EntryKey
    context: RequestContext
    deployment: Deployment


class CachedAnswer(NamedTuple):
    """The answer to a question."""

    entry: CacheEntry
    question: Question

    def ended_job(self, policy: ResultPolicy) -> JobState:
        """A new job that ended before it was queued: no worker has it, and no broker."""
        deployment, context, entry = self.question.deployment, self.question.context, self.entry
        header = ResultHeader(
            id=new_job_id(deployment.model),
            context=context,
            version=deployment.version,
            content=entry.content,
            attempt=0,
            content_digest=bytes.fromhex(entry.content_hash),
            is_cached=True,
        )
        return JobState(
            header.id,
            context.tenant,
            policy,
            awaits_reply=False,
            record=JobRecord(State.COMPLETED, ""),
            outcome=Outcome(State.COMPLETED, header, entry.body),
            was_queued=False,
        )


class CachedAnswers:
    """The look-ups of one client. For any thread.

    isolates_tenants: whether each tenant has answers of its own. verify: checks the records of active versions; None
    means that operators sign none.
    """

    def __init__(
        self,
        server: SharedCache,
        entries: SharedEntries,
        *,
        isolates_tenants: bool,
        verify: Verifier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._entries = entries
        self._isolates_tenants = isolates_tenants
        self._verify = verify
        self._clock = clock
        self._active: dict[str, tuple[float, Deployment | None]] = {}

    @classmethod
    def of(cls, settings: Settings) -> CachedAnswers | None:
        """The look-ups of a client with these settings; None where `cache.producer_lookup` is off.

        Raises ConfigurationError without `cache.redis_url`, in another mode than persisted_encrypted, without a data
        key, and where entries would travel plain.
        """
        cache, privacy = settings.inference.cache, settings.inference.privacy
        if not cache.producer_lookup or not cache.enabled:
            return None
        if not cache.redis_url:
            raise ConfigurationError("cache.producer_lookup is on without a shared cache. Expected cache.redis_url")
        if not settings.inference.persists_answers:
            raise ConfigurationError(
                "cache.producer_lookup is on, and there is no shared cache in this privacy mode. Expected "
                "persisted_encrypted in privacy.mode or cache.privacy_mode, and no hashes_only"
            )
        # With `cryptography`, which the base install does not have.
        from penstock.safety.keys import encrypts_at_rest, read_data_keys
        from penstock.safety.operator_key import PublicKeys

        data_keys = read_data_keys(settings) if encrypts_at_rest(settings) else None
        if (problem := transport_problem(cache.redis_url, data_keys is not None)) is not None:
            raise ConfigurationError(problem)
        operators = PublicKeys.parse(settings.operator_public_keys)
        return cls(
            SharedCache(cache.redis_url, timeout_s=min(LOOKUP_S, cache.socket_timeout_s)),
            SharedEntries(cache.key_prefix, data_keys),
            isolates_tenants=privacy.cache_tenant_isolation,
            verify=operators.verify if len(operators) else None,
        )

    def is_due(self, model: str) -> bool:
        """Whether the record of the active version must be read again; see `note`."""
        kept = self._active.get(model)
        return kept is None or kept[0] <= self._clock()

    def note(self, model: str, record: bytes, read_at: float) -> None:
        """Takes the broker's record of the active version; empty: none was promoted. read_at: before it was read."""
        deployment = None
        if record:
            try:
                deployment = Deployment.open(record, model, self._verify)
            except Corrupt:
                # The workers do not follow it either.
                deployment = None
        if len(self._active) >= _MOST_MODELS:
            self._active.clear()
        self._active[model] = read_at + _KEEP_S, deployment

    def now(self) -> float:
        """The clock of `note`."""
        return self._clock()

    def takes(self, spec: ModelSpec, options: SubmitOptions) -> bool:
        """Whether jobs with these options may be looked up."""
        is_plain = options.webhook is None and options.endpoint is None
        return is_plain and spec.deterministic and not spec.streams

    def ask_all(
        self,
        builder: JobBuilder,
        spec: ModelSpec,
        items: Iterable[tuple[Mapping[str, object] | InvalidInput, str | None]],
        options: SubmitOptions,
    ) -> dict[int, Question]:
        """The questions of the items that are looked up, by the place of the item."""
        asked = {}
        for place, (inputs, key) in enumerate(items):
            if (question := self.ask(builder, spec, inputs, options, key)) is not None:
                asked[place] = question
        return asked

    def ask(
        self,
        builder: JobBuilder,
        spec: ModelSpec,
        inputs: Mapping[str, object] | InvalidInput,
        options: SubmitOptions,
        key: str | None,
    ) -> Question | None:
        """The question of a job; None for a job that is not looked up, bad inputs included: their error comes later.

        key: the idempotency key.
        """
        kept = self._active.get(spec.name)
        deployment = kept[1] if kept is not None else None
        if key is not None or deployment is None or isinstance(inputs, InvalidInput):
            return None
        if deployment.routing is not None or DEFAULT_ENDPOINT in deployment.policies:
            # The worker assigns the version, by an id that the job does not have yet; or another precision or lifetime
            # of answers than those of model.yaml may be in force.
            return None
        if spec.version != deployment.version or options.version not in (None, "", deployment.version):
            return None
        try:
            header, body = builder.encoded(spec, inputs, options)
        except InvalidInput:
            return None
        tenant = header.tenant if self._isolates_tenants else ""
        digest = key_of(header, body, deployment.version, tenant=tenant)
        return Question(EntryKey(deployment.content_hash, digest, tenant), header.context, deployment)

    def find(self, questions: Sequence[Question]) -> list[CachedAnswer | None]:
        """The answers, in order. None for what is not there, and for all when the shared cache does not answer."""
        found: list[CachedAnswer | None] = []
        for start in range(0, len(questions), _AT_ONCE):
            part = questions[start : start + _AT_ONCE]
            keys = [question.key for question in part]
            answers = self._server.ask(self._entries.commands(keys))
            if isinstance(answers, NoAnswer):
                return found + [None] * (len(questions) - start)
            values = self._entries.opened(keys, answers).values
            found += map(_answer, part, values)
        return found

    def close(self) -> None:
        """Close the connections."""
        self._server.close()


def _answer(question: Question, value: bytes | None) -> CachedAnswer | None:
    """The answer in a value. None for one of another form or content, and for bytes that are no answer."""
    if value is None:
        return None
    try:
        entry = unpack(value)
        if entry.form != EXACT or entry.content_hash != question.deployment.content_hash:
            return None
        # Now: the result of an ended job raises nothing of this kind.
        decode(entry.content, entry.body)
    except (Corrupt, InvalidInput):
        return None
    return CachedAnswer(entry, question)
