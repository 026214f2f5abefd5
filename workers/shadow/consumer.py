"""The shadow worker: takes pairs, runs the candidate on them, compares, settles. A process that gives way to others.

    follow   the order of the model, and its active version            about once a second
    take     a micro-batch of pairs, under a lease
    sort     pairs that cannot or need not be compared                  expired, superseded, unreadable
    run      one forward for pairs of one shape; alone after a failure  error, timeout, crashed
    compare  with what was served                                       pass, fail
    settle   delete the pairs and add the comparisons up, in one step
    judge    the canary on all pairs so far; its FAIL ends the shadow

A shadow worker that dies leaves its pairs to the next one. Nothing here can delay or fail a job.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from penstock.registry.broker.redis_shadow import RedisShadow, Settled, TakenPair
from penstock.registry.deployment import Deployment
from penstock.registry.envelope import Keyring, PairHeader
from penstock.registry.errors import BrokerRefused, BrokerUnavailable, ConfigurationError, Corrupt, PenstockError
from penstock.registry.package import ModelSpec
from penstock.registry.settings_sections import InferenceConfig
from penstock.registry.shadow import ShadowOrder, ShadowPair
from penstock.registry.signature_match import signature_difference
from penstock.registry.signed import Verifier
from penstock.registry.tensors import Array
from penstock.safety.canary import CanaryVerdict, NoOutputs, Pair
from penstock.safety.validator_registry import ValidatorRegistry
from penstock.safety.validators import Verdict
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.runtime.base import concatenate
from penstock.workers.runtime.loading import LoadOptions
from penstock.workers.shadow.canary import ShadowCanary
from penstock.workers.shadow.candidate import Candidate, CandidateFailed, CandidateUnwanted
from penstock.workers.shadow.comparison import FAILED, Comparer, PairComparison
from penstock.workers.versions.policy import VersionPolicy
from penstock.workers.versions.repository import ModelRepository

__all__ = ["ComparedPair", "ShadowOptions", "ShadowWorker"]

_LOOK_S: Final = 1.0
_IDLE_S: Final = 0.1
_WITHOUT_ORDER_S: Final = 0.5
_TRY_AGAIN_S: Final = 10.0
"""Between two tries to load a candidate that could not be loaded."""
_MOST_BYTES: Final = 8 * 1024 * 1024
"""Of the pairs of one micro-batch."""
_MOST_DELIVERIES: Final = 3
"""A pair that was taken more often has ended its shadow workers: it is not run again."""
_MOST_TEXT: Final = 200
"""Characters of an input that an example shows."""

logger = logging.getLogger("penstock.shadow")

OnVerdict: TypeAlias = Callable[[ShadowOrder, str, CanaryVerdict], None]
"""Gets the order, the content of the candidate and the verdict."""
OnPass: TypeAlias = Callable[[ShadowOrder, str, CanaryVerdict, float], float]
"""Gets the order, the content of the candidate, the verdict, and since when its pairs were compared, in unix ms.

Returns after how many seconds it is to be called again; 0 and infinity: never."""


@dataclass(frozen=True, slots=True)
class ComparedPair:
    """A comparison that was counted, for what learns from the series: drift, canary. at_ms: when it was mirrored."""

    job_id: str
    at_ms: int
    candidate: str
    version: str
    """The version that answered."""
    comparison: PairComparison
    form: str = ""
    """Of the candidate; empty: the version as its author built it."""
    content_hash: str = ""
    """Of the candidate's package."""
    shadow: str = ""
    """The id of the shadow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowOptions:
    """How one shadow worker runs.

    consumer: its name, unique for each start. device, threads: see Runtime.load. verify: checks the operators'
    signatures; None: none are required. lease_s: after this time of silence other shadow workers take its pairs.
    validators: custom ones; None: the built-in ones alone. on_compared: called with each counted comparison.
    on_verdict: called once with each new verdict but INSUFFICIENT, the order and the content of the candidate, before
    it takes effect. on_pass: called while the canary says PASS. on_failure: called with a FAIL before the shadow ends,
    and again if the broker was away meanwhile. on_ended: called after the FAIL has ended the shadow, on the one shadow
    worker that ended it.
    is_stopping: set when the process is to end. clock: monotonic seconds.
    """

    consumer: str
    device: str = "cpu"
    threads: int = 1
    verify: Verifier | None = None
    lease_s: float = 15.0
    validators: ValidatorRegistry | None = None
    on_compared: Callable[[ComparedPair], None] = lambda _: None
    on_verdict: OnVerdict = lambda _order, _content_hash, _verdict: None
    on_pass: OnPass = lambda _order, _content_hash, _verdict, _since_ms: inf
    on_failure: OnVerdict = lambda _order, _content_hash, _verdict: None
    on_ended: OnVerdict = lambda _order, _content_hash, _verdict: None
    is_stopping: threading.Event = field(default_factory=threading.Event)
    clock: Callable[[], float] = time.monotonic


class _Readable(NamedTuple):
    """A pair that is to be compared."""

    taken: TakenPair
    header: PairHeader
    inputs: dict[str, Array]
    served: dict[str, Array]
    rows: int


class _Failure(NamedTuple):
    """A FAIL of the canary that has not ended its shadow yet."""

    order: ShadowOrder
    content_hash: str
    verdict: CanaryVerdict


class _Running(NamedTuple):
    """The shadow that this worker serves."""

    record: bytes
    order: ShadowOrder
    candidate: Candidate
    comparer: Comparer
    policy: VersionPolicy
    judge: ShadowCanary | None
    """None: the order wants no canary."""
    since_ms: float
    """When the candidate was loaded, in unix ms of the broker."""


class ShadowWorker:
    """Serves the shadow of one model. Call `run`, or `step` again and again; `close` last."""

    def __init__(
        self,
        end: RedisShadow,
        model: str,
        repository: ModelRepository,
        config: InferenceConfig,
        keyring: Keyring,
        metrics: InferenceMetrics,
        options: ShadowOptions,
    ) -> None:
        self.model: Final = model
        self._end = end
        self._repository = repository
        self._config = config
        self._keyring = keyring
        self._metrics = metrics
        self._options = options
        self._running: _Running | None = None
        self._active = ""
        """The label of the active version."""
        self._look_at = self._load_at = -inf
        self.problem = ""
        """Why the candidate is not loaded; empty: it is, or there is no order."""
        self._held: list[TakenPair] = []
        """Pairs under a lease of this worker."""
        self._renew_at = 0.0
        self._pass_at = -inf
        """When a PASS of the canary is told next."""
        self._note_at = -inf
        """When the state of the canary is written next."""
        self._has_unnoted = False
        self._failure: _Failure | None = None

    @property
    def candidate_pid(self) -> int | None:
        """The process of the candidate; None: none is loaded."""
        return self._running.candidate.pid if self._running is not None else None

    def run(self) -> None:
        """Take turns until the process is to end. A broker that is away is waited for.

        Raises BrokerRefused: the broker is there, and no repetition helps.
        """
        is_stopping = self._options.is_stopping
        while not is_stopping.is_set():
            try:
                pause_s = self.step()
            except BrokerRefused:
                raise
            except BrokerUnavailable as error:
                logger.warning("the broker is away: %s", error)
                pause_s = _LOOK_S
            if pause_s:
                is_stopping.wait(pause_s)

    def close(self) -> None:
        """End the candidate. Pairs that were taken and not settled are left to the next shadow worker."""
        with suppress(PenstockError):
            self._note_canary()
        self._leave()

    def step(self) -> float:
        """One turn: follow, take, run, compare, settle. Returns the pause before the next one in seconds.

        Raises BrokerUnavailable.
        """
        if self._failure is not None:
            self._end_failed(self._failure)
        now = self._options.clock()
        if now >= self._look_at:
            self._follow(now)
            self._look_at = self._options.clock() + _LOOK_S
        running = self._running
        if running is None:
            return _WITHOUT_ORDER_S
        taken = self._end.take(
            self.model,
            running.order.id,
            self._options.consumer,
            running.policy.limits.max_rows,
            most_bytes=_MOST_BYTES,
            lease_ms=int(self._options.lease_s * 1000),
        )
        if taken is None:
            self._look_at = -inf
            return _WITHOUT_ORDER_S
        if not taken:
            self._note_canary()
            self._tell_pass(running)
            return _IDLE_S
        self._process(running, taken)
        if self._running is running:
            self._tell_pass(running)
        return 0.0

    # The order

    def _follow(self, now: float) -> None:
        """Serve the order that is in force now. A candidate that cannot be loaded is tried again later."""
        record = self._end.orders([self.model])[self.model]
        self._active = self._active_label()
        if self._running is not None:
            if self._running.record == record and not self._running.order.is_over(self._now_ms()):
                return
            self._leave()
        if not record or now < self._load_at:
            return
        try:
            self._running = self._opened(record)
        except (Corrupt, PenstockError) as error:
            if isinstance(error, BrokerUnavailable):
                raise
            self._tell_problem(str(error))
            self._load_at = now + _TRY_AGAIN_S
        else:
            self._tell_problem("")

    def _opened(self, record: bytes) -> _Running | None:
        order = ShadowOrder.open(record, self.model, self._options.verify)
        if order.is_over(self._now_ms()):
            return None
        package = self._repository.package(self.model, order.candidate)
        self._check_signature(package.spec)
        policy = VersionPolicy.of(package.spec, self._config)
        options = LoadOptions(order.candidate_hash, policy.precision, self._config.compilation.warmup_requests)
        candidate = Candidate(
            package,
            options,
            form=order.form,
            device=self._options.device,
            threads=self._options.threads,
            timeout_s=policy.timeout_s,
            load_timeout_s=self._config.load_timeout_s,
            withholds_texts=policy.withholds_texts,
            on_wait=self._keep_leases,
            is_wanted=partial(self._is_in_force, record),
            pause=self._options.is_stopping.wait,
            clock=self._options.clock,
        )
        candidate.load()
        facts = {"model": self.model, "candidate": order.candidate, "content_hash": candidate.content_hash}
        logger.info("the candidate is loaded", extra=facts)
        self._end.note(self.model, candidate_hash=candidate.content_hash)
        spec, validators = package.spec, self._options.validators
        comparer = Comparer(self.model, spec.outputs, validators, task=spec.task, form=order.form)
        judge = ShadowCanary(comparer, order.canary_pairs) if order.canary_pairs else None
        return _Running(record, order, candidate, comparer, policy, judge, self._now_ms())

    def _check_signature(self, candidate: ModelSpec) -> None:
        """The files here may be others than those of the operator who started the shadow. Raises ConfigurationError."""
        _, served = self._end.active(self.model)
        if served and (difference := signature_difference(candidate, ModelSpec.from_json(served))):
            raise ConfigurationError(f"{candidate.reference}: {difference}")

    def _active_label(self) -> str:
        """The active version, as workers see it; empty while it is unknown."""
        record, spec = self._end.active(self.model)
        if record:
            try:
                return Deployment.open(record, self.model, self._options.verify).version
            except Corrupt as error:
                logger.error("the record of the active version is refused: %s", error)
                return ""
        return ModelSpec.from_json(spec).version if spec else ""

    def _leave(self) -> None:
        if self._running is not None:
            self._running.candidate.close()
            self._running = None
            self._has_unnoted = False
            self._load_at = self._pass_at = -inf

    def _tell_problem(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            if problem:
                logger.error("the candidate is not loaded: %s", problem, extra={"model": self.model})
            self._end.note(self.model, problem=problem)

    def _is_in_force(self, record: bytes) -> bool:
        """Whether the order has to be served still. While the broker is away, it is."""
        if self._options.is_stopping.is_set():
            return False
        try:
            return self._end.orders([self.model])[self.model] == record
        except BrokerUnavailable:
            return True

    def _now_ms(self) -> float:
        return self._end.now_ms()

    # Pairs

    def _process(self, running: _Running, taken: Sequence[TakenPair]) -> None:
        self._held = [*taken]
        self._renew_at = self._options.clock() + self._options.lease_s / 3
        try:
            readable, settled = self._sorted(running, taken)
            if settled:
                self._settle(running, settled, [])
            for group in _groups(running, readable):
                self._compare(running, group)
        except CandidateUnwanted:
            self._look_at = -inf
        except ConfigurationError as error:
            # The candidate ended, and cannot be loaded again: its pairs wait for their next shadow worker.
            self._tell_problem(str(error))
            self._leave()
            self._load_at = self._options.clock() + _TRY_AGAIN_S
        finally:
            self._held = []

    def _sorted(
        self, running: _Running, taken: Sequence[TakenPair]
    ) -> tuple[list[_Readable], list[tuple[TakenPair, str]]]:
        """The pairs that are to be compared, and the others with what became of them."""
        readable: list[_Readable] = []
        others: list[tuple[TakenPair, str]] = []
        oldest_ms = self._now_ms() - running.order.pair_ttl_ms
        signature = running.candidate.package.spec.signature
        for each in taken:
            if each.at_ms < oldest_ms:
                others.append((each, "expired"))
                continue
            try:
                pair = ShadowPair.open(each.sealed, self._keyring)
                header, inputs, served = pair.header, pair.inputs, pair.outputs
                rows = signature.rows(inputs)
            except (Corrupt, KeyError, IndexError) as error:
                logger.warning("a pair cannot be read: %s", error, extra={"model": self.model})
                others.append((each, "unreadable"))
                continue
            if header.model != self.model or header.shadow != running.order.id:
                others.append((each, "unreadable"))
            elif self._active and header.version != self._active:
                others.append((each, "superseded"))
            elif each.deliveries > _MOST_DELIVERIES:
                others.append((each, "abandoned"))
            else:
                readable.append(_Readable(each, header, inputs, served, rows))
        return readable, others

    def _compare(self, running: _Running, group: Sequence[_Readable]) -> None:
        """Run the candidate on the group and settle it. After a failure each pair runs alone.

        Pairs that are left when the process is to end are claimed by the next shadow worker.
        """
        if self._options.is_stopping.is_set():
            return
        try:
            outputs, seconds = running.candidate.run(concatenate([pair.inputs for pair in group]))
        except CandidateFailed as failure:
            if len(group) > 1:
                for pair in group:
                    self._compare(running, [pair])
                return
            alone = group[0]
            compared = [(alone, PairComparison(failure.outcome, str(failure)))]
            self._settle(running, [], compared, [_judged(alone, NoOutputs(failure.problem))])
            return
        rows = sum(pair.rows for pair in group)
        start = 0
        compared = []
        judged: list[Pair] = []
        for pair in group:
            own = {name: values[start : start + pair.rows] for name, values in outputs.items()}
            start += pair.rows
            found = running.comparer.compare(own, pair.served)
            figures = {
                **found.figures,
                "served_ms_per_row": pair.header.compute_ms / max(1, pair.header.batch_rows),
                "candidate_ms_per_row": seconds * 1e3 / max(1, rows),
            }
            compared.append((pair, replace(found, figures=figures)))
            judged.append(_judged(pair, own, seconds / max(1, rows)))
        self._settle(running, [], compared, judged)

    def _settle(
        self,
        running: _Running,
        others: Sequence[tuple[TakenPair, str]],
        compared: Sequence[tuple[_Readable, PairComparison]],
        judged: Sequence[Pair] = (),
    ) -> None:
        settled = [Settled(taken.entry_id, len(taken.sealed), outcome) for taken, outcome in others]
        settled += [self._settled(running, pair, comparison) for pair, comparison in compared]
        counted = self._end.settle(self.model, running.order.id, settled)
        done = {each.entry_id for each in settled}
        self._held = [each for each in self._held if each.entry_id not in done]
        for each, is_counted in zip(settled, counted, strict=True):
            if is_counted:
                self._metrics.shadow_compared(self.model, running.order.candidate, each.outcome)
        for (pair, comparison), is_counted in zip(compared, counted[len(others) :], strict=True):
            if is_counted:
                self._options.on_compared(_compared(running, pair, comparison))
        self._judge(
            running, [pair for pair, is_counted in zip(judged, counted[len(others) :], strict=True) if is_counted]
        )

    def _judge(self, running: _Running, pairs: Sequence[Pair]) -> None:
        """The canary on the pairs that were counted. FAIL ends the shadow: more pairs cannot improve it."""
        judge, order = running.judge, running.order
        if judge is None or not pairs or judge.verdict.is_final:
            return
        before, verdict = judge.verdict.verdict, judge.observe(pairs)
        self._has_unnoted = True
        if verdict.verdict is not before or self._options.clock() >= self._note_at:
            self._note_canary()
        if verdict.verdict in (before, Verdict.INSUFFICIENT):
            return
        facts = {"model": self.model, "candidate": order.label, "pairs": verdict.pairs, "reasons": verdict.reasons}
        logger.info("the canary says %s", verdict.verdict, extra=facts)
        self._options.on_verdict(order, running.candidate.content_hash, verdict)
        if verdict.is_final:
            self._failure = _Failure(order, running.candidate.content_hash, verdict)
            self._end_failed(self._failure)

    def _tell_pass(self, running: _Running) -> None:
        """A candidate whose breaker is open comes back by a PASS, at the end of the breaker's pause."""
        judge, now = running.judge, self._options.clock()
        if judge is not None and judge.verdict.verdict is Verdict.PASS and now >= self._pass_at:
            content_hash = running.candidate.content_hash
            wait_s = self._options.on_pass(running.order, content_hash, judge.verdict, running.since_ms)
            # One that is closed is looked at no more: what opens it then is newer than the verdict.
            self._pass_at = now + (wait_s or inf)

    def _end_failed(self, failure: _Failure) -> None:
        """End a shadow whose canary has refused the candidate. While the broker is away, the next turn tries again."""
        verdict = failure.verdict
        self._options.on_failure(*failure)
        reason = f"the canary says {verdict.verdict}: {'; '.join(verdict.reasons)}"
        ended = self._end.end(self.model, failure.order.id, reason)
        self._failure = None
        self._look_at = -inf
        if ended is not None:
            self._options.on_ended(*failure)

    def _note_canary(self) -> None:
        """Write what the canary has found, if it has found more: about once a second, and before each pause."""
        judge = self._running.judge if self._running is not None else None
        if judge is None or not self._has_unnoted:
            return
        self._end.note_canary(self.model, self._options.consumer, judge.state.encode())
        self._has_unnoted = False
        self._note_at = self._options.clock() + _LOOK_S

    def _settled(self, running: _Running, pair: _Readable, comparison: PairComparison) -> Settled:
        # The latencies are no part of the distance.
        distances = {name: value for name, value in comparison.figures.items() if not name.endswith("_ms_per_row")}
        judged = PairComparison(comparison.outcome, comparison.reason, distances)
        return Settled(
            pair.taken.entry_id,
            len(pair.taken.sealed),
            comparison.outcome,
            comparison.figures,
            is_in_series=True,
            badness=judged.badness,
            example=_example(pair, judged, running.policy) if judged.badness > 0 else "",
        )

    def _keep_leases(self) -> None:
        """While a forward or a load takes long. A broker that is away is met by the next call."""
        now = self._options.clock()
        if self._held and now >= self._renew_at:
            self._renew_at = now + self._options.lease_s / 3
            try:
                self._end.renew(self.model, self._options.consumer, self._held)
            except PenstockError as error:
                logger.warning("the leases of pairs are not renewed: %s", error)


def _groups(running: _Running, readable: Sequence[_Readable]) -> list[list[_Readable]]:
    """The pairs of each forward: of one shape, and of so many rows as a batch may have.

    A pair whose shadow worker died runs alone, as does each pair of a model that streams.
    """
    spec, most_rows = running.candidate.package.spec, running.policy.limits.max_rows
    groups: defaultdict[Hashable, list[list[_Readable]]] = defaultdict(list)
    for pair in readable:
        is_alone = spec.streams or pair.taken.deliveries > 1
        key: Hashable = pair.taken.entry_id if is_alone else _shape_of(pair.inputs)
        batches = groups[key]
        if not batches or sum(each.rows for each in batches[-1]) + pair.rows > most_rows:
            batches.append([])
        batches[-1].append(pair)
    return [batch for batches in groups.values() for batch in batches]


def _compared(running: _Running, pair: _Readable, comparison: PairComparison) -> ComparedPair:
    order, header = running.order, pair.header
    return ComparedPair(
        header.id,
        pair.taken.at_ms,
        order.candidate,
        header.version,
        comparison,
        order.form,
        running.candidate.content_hash,
        order.id,
    )


def _judged(pair: _Readable, candidate: Mapping[str, Array] | NoOutputs, seconds_per_row: float = 0.0) -> Pair:
    """The pair for the canary. The latencies are of a row, because the batches of both sides differ."""
    served_s = pair.header.compute_ms / max(1, pair.header.batch_rows) / 1e3
    return Pair(pair.served, candidate, served_s, seconds_per_row, pair.header.id)


def _shape_of(inputs: Mapping[str, Array]) -> Hashable:
    return tuple((name, values.dtype.str, values.shape[1:]) for name, values in inputs.items())


def _example(pair: _Readable, comparison: PairComparison, policy: VersionPolicy) -> str:
    """A comparison for a person, as JSON. Of a private model no input and no text is shown."""
    inputs = {} if policy.withholds_texts else {name: _shown(values, policy) for name, values in pair.inputs.items()}
    # The text of a validator has figures only; that of a candidate may quote inputs.
    reason = comparison.reason if comparison.outcome not in FAILED else policy.redact(comparison.reason)[:_MOST_TEXT]
    return json.dumps(
        {
            "job_id": pair.header.id,
            "served_version": pair.header.version,
            "outcome": comparison.outcome,
            "reason": reason,
            "figures": dict(comparison.figures),
            "inputs": inputs,
        }
    )


def _shown(values: Array, policy: VersionPolicy) -> Any:
    """Texts, redacted and cut; of numbers only their kind: a person cannot read hundreds of them."""
    if values.dtype != object:
        return f"{np.dtype(values.dtype).name} {values.shape}"
    return [policy.redact(str(text))[:_MOST_TEXT] for text in values.ravel()[:3].tolist()]
