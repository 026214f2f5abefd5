"""How work leaves: claim -> open -> batch -> execute -> commit. Read this file first.

    broker -- claim --> open, verify --> batcher --> executor (model threads) --> results --> commit --> broker
                           |  equal jobs follow one                               |  kept        ^
                           |---- an equal job's answer is kept: workers/cache <---'  ------------|
                           |---- expired, revoked, cancelled, invalid ---------------------------|
                           '---- name a version that is not here: nobody has it -----------------'
                                    `-- another worker has it --> given back, for those that do

One I/O thread does everything but the loads, the forwards and the leases. It gives an idle model thread its next
batch before anything else, then commits what is done and claims what there is room for in one round trip; when the
queues are empty it leaves a blocking claim with the broker, and sleeps until that or a model thread wakes it. Which
version answers a job is settled when it is claimed: every claim brings along what was last promoted.

`start` runs three kinds of threads over three methods: Drain.step, Executor.begin to finish, LeaseKeeper.tick. Whoever
calls these in their place, under a clock of their own, has the whole worker in one thread.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import random
import secrets
import select
import socket
import threading
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from penstock.registry.broker.base import Broker, Claim, Commit, CommitStatus, Delivery, Held, State
from penstock.registry.envelope import Failure, JobHeader
from penstock.registry.errors import BrokerUnavailable, ConfigurationError, InvalidInput
from penstock.registry.package import Package
from penstock.registry.queues import Priority
from penstock.registry.settings import Settings
from penstock.registry.signed import Verifier
from penstock.workers.cache import L1Cache, key_of
from penstock.workers.executor import BatchRun, Executor, seats_for
from penstock.workers.intake import Intake
from penstock.workers.job import ClaimedJob
from penstock.workers.leases import AgeingReserve, LeasedJobs, LeaseKeeper, LeaseUpdate
from penstock.workers.observe.listener import Failed, JobListener
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.process.crash_journal import Journal, NullJournal
from penstock.workers.results import CANCELLED, EXPIRED, REVOKED, EncodedOutputs, JobOutcome, commit_of
from penstock.workers.streaming import EventStream
from penstock.workers.telemetry import Account
from penstock.workers.versions.deployment_store import DeploymentStore, FileDeploymentStore, NullDeploymentStore
from penstock.workers.versions.handover import Placing
from penstock.workers.versions.lifecycle import ModelLifecycle
from penstock.workers.versions.loader import Loader
from penstock.workers.versions.peers import Peers
from penstock.workers.versions.repository import EmptyRepository, ModelRepository
from penstock.workers.versions.tuner import NullTuner, Tuner
from penstock.workers.versions.version import ServedModel, ServedVersion, VersionState

__all__ = ["Drain"]

logger = logging.getLogger("penstock.server")

_BLOCK_MS: Final = 1000
_ANSWER_S: Final = 0.25
"""How long after its time a blocking claim may answer."""
_LOOK_AGAIN_S: Final = 0.02
_TICK_S: Final = 0.25
_ASIDE_S: Final = 0.1
"""How long what was put aside may wait for a moment in which nothing else is to be done."""
_SHORTEST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
"""How long to leave a broker alone that does not answer; doubled each time, between these."""
_STUCK_S: Final = 30.0
"""An I/O or lease thread that has not come round for so long hangs."""
_STOOD_STILL_S: Final = 1.0
"""An I/O thread that wants to turn several times a second and does not for so long has been kept from it."""
_REPORT_TTL_MS: Final = 5000
_TRY_AGAIN_EVERY: Final = 10
"""Reports, and so seconds, between two tries to load what should answer and could not be loaded."""


class Drain:
    """Serves the models of `packages` from the broker until told to stop. Call load, then start, then stop.

    name: the worker's, unique on the broker. device, threads: see Runtime.load. probe_url: where its probe answers,
    for its report. checkpoint: called with the name of each point at which a crash is worth testing. clock: monotonic
    seconds. jitter: random numbers in [0, 1). journal: opens the journal of this consumer, with so many seats.
    library: where other versions of the models are found, None for nowhere. verify: the operators' signatures on
    records, None where none are asked for. on_version_change: called with a model and the content hashes that
    answered it until now, empty for none, and from now on, once per change. tuner: makes loaded versions faster.
    remembered: the decisions that this machine has obeyed; None: where signatures are asked for, those under the home.
    """

    def __init__(
        self,
        settings: Settings,
        broker: Broker,
        packages: Sequence[Package],
        *,
        name: str,
        device: str,
        threads: int,
        listener: JobListener,
        metrics: InferenceMetrics,
        probe_url: str = "",
        checkpoint: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        journal: Callable[[str, int], Journal] = lambda _consumer, _seats: NullJournal(),
        repository: ModelRepository | None = None,
        verify: Verifier | None = None,
        on_version_change: Callable[[str, str, str], None] = lambda _model, _old, _new: None,
        tuner: Tuner | None = None,
        deployments: DeploymentStore | None = None,
    ) -> None:
        if not packages:
            raise ConfigurationError("There is no model to serve. Expected at least one package under the models root")
        queue = settings.inference.queue
        self.name = name
        # A restarted worker must not pass its predecessor's fence.
        self.consumer = f"{name}:{secrets.token_hex(4)}"
        self._keyring = settings.keyring
        self._broker = broker
        self._device = device
        self._threads = threads
        self._listener = listener
        self._metrics = metrics
        self._probe_url = probe_url
        self._started_at = time.time()
        self._checkpoint = checkpoint
        self._clock = clock
        self._jitter = jitter
        self._job_ttl_ms = int(queue.job_ttl_s * 1000)
        self._result_ttl_ms = int(queue.result_ttl_s * 1000)
        self._ageing_ms = int(queue.ageing_s * 1000)
        self._max_in_memory = settings.inference.batching.max_queue_depth
        batching = settings.inference.batching
        self._loader = Loader(
            device,
            threads,
            headroom_pct=batching.gpu_headroom_pct,
            ceiling=max(1, self._max_in_memory // 2),
            timeout_s=settings.inference.load_timeout_s,
            ring=self._ring,
            clock=clock,
        )
        self._preloads = settings.inference.preload
        self._tuner = tuner or NullTuner()
        self._lifecycle = ModelLifecycle(
            settings.inference,
            packages,
            broker,
            self._loader,
            repository=repository or EmptyRepository(),
            tuner=self._tuner,
            metrics=metrics,
            verify=verify,
            on_version_change=self._change_version,
            ring=self._ring,
            takes_any=not settings.worker.models,
            deployments=deployments or _deployments(settings, verify),
        )
        self._placing = Placing(
            self._lifecycle, Peers(broker, name, clock), clock, most_waiting=self._max_in_memory // 4
        )
        self._served = self._lifecycle.models
        self._turns = self._lifecycle.turns
        self._reports = 0
        self._account = Account(listener, metrics)
        self._intake = Intake(
            broker,
            self.consumer,
            settings.keyring,
            worker=name,
            job_ttl_ms=self._job_ttl_ms,
            max_crashes=queue.max_crashes,
            version_of=self._label_of,
            listener=listener,
            metrics=metrics,
        )
        self._lower_share = AgeingReserve()
        self._leased = LeasedJobs()
        self._cache = L1Cache(settings.inference.cache.l1_size, settings.inference.cache.l1_max_bytes, clock)
        self._isolates_tenants = settings.inference.privacy.cache_tenant_isolation
        self._on_version_change = on_version_change
        self._leaders: dict[bytes, ClaimedJob] = {}
        self._concluded: list[JobOutcome] = []
        self._uncommitted: list[tuple[JobOutcome, Commit]] = []
        self._to_release: list[ClaimedJob] = []
        self._resting: list[tuple[float, int, ClaimedJob]] = []
        """Jobs whose forward failed and that wait for the next, by when that is due; no batch has room for them."""
        self._rested = 0
        self._suspects: deque[ClaimedJob] = deque()
        """Jobs during whose forward a process died; see _dispatch_suspects."""
        self._was_suspect = False
        """Whether the last forward was a suspect's."""
        self._paused: frozenset[str] = frozenset()
        self._ailment = ""
        """Why this process can only be replaced; empty while all is well."""
        self._news: deque[LeaseUpdate] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Not before the last model thread, hung ones included, has let go of the drain: it may still ring.
        weakref.finalize(self, os.close, self._wake).atexit = False
        model_threads = max(version.concurrency for version in self._turns)
        self._journal = journal(self.consumer, seats_for(model_threads))
        self.executor: Final = Executor(model_threads, self._ring, self._too_late, checkpoint, clock, self._journal)
        self.leases: Final = LeaseKeeper(
            broker,
            self.consumer,
            self._lifecycle.claimable,
            self._leased,
            lease_s=queue.lease_s,
            offered=self._offered,
            room=self._room_to_take_over,
            news=self._hear,
            look=self._look_for_decisions,
            report=self._report,
            clock=clock,
        )
        self._pollers: dict[int, select.poll] = {}
        self._is_stopping = False
        self._stop_at = float("inf")
        self._ticked = self._looked = self._aside_since = clock()
        self._pause_s = _SHORTEST_PAUSE_S
        self._is_armed = False
        self._armed_count = 0
        self._armed_until = 0.0
        self._is_ready = False
        self._thread = threading.Thread(target=self._run, name="drain", daemon=True)

    # Life

    def load(self) -> None:
        """See ModelLifecycle.open. Raises ConfigurationError, BrokerUnavailable."""
        self._lifecycle.open()
        for version in self._turns:
            if version.is_ready:
                self.executor.grow(version.concurrency)

    def start(self) -> None:
        """Begins to claim."""
        self.executor.start()
        self.leases.start()
        self._thread.start()
        self._is_ready = True
        self._metrics.ready(True)

    def stop(self, grace_s: float) -> None:
        """Claims nothing more, lets running batches finish for up to `grace_s`, gives the rest back at once."""
        self.ask_to_stop(grace_s)
        if self._thread.ident is not None:
            # A last commit may have to wait for the broker once.
            self._thread.join(grace_s + 6.0)
            self.leases.stop(1.0)
            self.executor.stop()
            self._withdraw_report()
        self._lifecycle.close()

    def ask_to_stop(self, grace_s: float) -> None:
        """From now on the steps wind up, see `stop`; does not wait for them."""
        self._metrics.ready(False)
        self._is_ready = False
        self._stop_at = self._clock() + grace_s
        self._journal.retire()
        self._is_stopping = True
        self._ring()

    @property
    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Whether jobs are being served, and the details for a probe."""
        problem = self.is_healthy() or (None if self.leases.is_in_touch else "the broker does not answer")
        if problem is None and not self._lifecycle.claimable():
            problem = "no version that answers is to be had here"
        is_ready = self._is_ready and problem is None
        return is_ready, {"models": sorted(self._served), "problem": problem, "in_memory": len(self._leased)}

    def is_healthy(self) -> str | None:
        """None, or why this process should be replaced: a thread has died or hangs."""
        if not self._is_ready:
            return None
        if self.executor.device_lost:
            return f"the device is lost: {self.executor.device_lost}"
        if self._ailment:
            return self._ailment
        now = self._clock()
        for name, is_alive, ticked in (
            ("drain", self._thread.is_alive(), self._ticked),
            ("lease", self.leases.is_alive(), self.leases.ticked),
            ("model", self.executor.is_alive(), now),
        ):
            if not is_alive:
                return f"the {name} thread has died"
            if now - ticked > _STUCK_S:
                return f"the {name} thread hangs"
        return None

    def active(self) -> list[JobHeader]:
        """The jobs whose forward runs now."""
        return [item.job.header for work in self.executor.running() for item in work.batch.items]

    def reserved(self) -> list[JobHeader]:
        """The jobs in memory that wait for their forward."""
        formed = [item for work in self.executor.waiting() for item in work.batch.items]
        pending = [item for version in tuple(self._turns) for item in version.batcher.pending()]
        others = (*tuple(self._suspects), *self._placing)
        return [item.job.header for item in (*formed, *pending)] + [job.header for job in others]

    # The loop

    def _run(self) -> None:
        while (pause_s := self.step()) is not None:
            if pause_s:
                time.sleep(pause_s)

    def step(self, longest_wait_s: float = _TICK_S) -> float | None:
        """One turn of the loop; in the end it waits for news, for up to `longest_wait_s` seconds.

        Returns for how many seconds to leave the broker alone, or None: all is given back, there is no next turn.
        """
        self._ticked = self._clock()
        try:
            if not self._is_stopping:
                self._serve()
            elif not self._wind_up():
                return None
            self._listen(min(self._patience_s(), longest_wait_s))
        except BrokerUnavailable as error:
            logger.warning("the broker is away: %s", error)
            self._broker.drop_armed()
            self._pollers.clear()
            self._is_armed = False
            pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, _LONGEST_PAUSE_S)
            return pause_s
        self._pause_s = _SHORTEST_PAUSE_S
        return 0.0

    def _serve(self) -> None:
        self._take_in_done()
        self._follow_news()
        self._lifecycle.run_requests()
        if self._loader.is_busy:
            self._take_in_loaded()
        self._look_for_hung_work()
        if self._ailment:
            self._serve_no_more()
            return
        self._rouse_rested()
        if self._paused or self._to_release:
            self._leave_paused()
        self._dispatch()
        self._exchange(self._wishes())
        if self._placing:
            self._place()
        self._dispatch()
        self._arm()
        self._account.tell()
        self._dead_letter_deferred()

    def _dead_letter_deferred(self) -> None:
        """Once nobody waits for this thread, or when that has been so for too long."""
        if not self._intake.is_behind:
            self._aside_since = self._clock()
        elif self._clock() - self._aside_since > _ASIDE_S or not (
            self._concluded or self._uncommitted or self.executor.running() or self.executor.waiting()
        ):
            self._intake.bury_next()

    def _take_in_done(self) -> None:
        for work in self.executor.take_done():
            self._conclude(work)

    def _exchange(self, desired: list[Claim]) -> None:
        """Commits what is done and claims what there is room for."""
        self._seal_concluded()
        if not (desired or self._uncommitted):
            return
        pending = self._uncommitted
        if pending:
            self._checkpoint("before-commit")
        if desired:
            self._checkpoint("before-claim")
        begun = self._clock()
        statuses, deliveries = self._broker.exchange(
            self.consumer, [commit for _, commit in pending], desired, self._result_ttl_ms
        )
        self._uncommitted = []
        if pending:
            self._checkpoint("after-commit")
            self._settle(pending, statuses, begun)
        self._note_drained({wish.slot: wish.credit for wish in desired}, deliveries)
        self._admit(deliveries)

    def _note_drained(self, asked: Mapping[str, int], deliveries: Sequence[Delivery]) -> None:
        found = Counter(delivery.slot for delivery in deliveries)
        for slot, credit in asked.items():
            self._served[slot].is_empty = found[slot] < credit

    @property
    def _is_quiet(self) -> bool:
        """Whether every queue was seen empty, with room for more: time to wait instead of asking."""
        return all(model.is_empty and model.free > 0 for model in self._served.values() if model.is_claimable)

    def _wishes(self) -> list[Claim]:
        """What to claim now; nothing when the queues were empty a moment ago: the blocking claim will tell."""
        if self._is_armed or self._is_stopping or self._is_quiet:
            return []
        room = self._max_in_memory - len(self._leased)
        desired = []
        for model in self._served.values():
            credit = min(model.free, room)
            if credit > 0:
                room -= credit
                desired.append(Claim(model.name, credit, self._lower_share.of(credit), self._ageing_ms))
        return desired

    def _arm(self) -> None:
        """Leaves a blocking claim for all queues, once all were seen empty.

        While one of them has more than this worker can take, every commit carries the next claims of all.
        """
        if self._is_armed or self._is_stopping or not self._is_quiet:
            return
        room, slots = self._max_in_memory - len(self._leased), self._lifecycle.claimable()
        if room <= 0 or not slots:
            return
        # COUNT holds for each of the queues, and several may answer at once; one job of each is always welcome.
        share = room // (len(slots) * len(Priority))
        count = max(1, min([share, *(self._served[slot].free for slot in slots)]))
        self._checkpoint("before-claim")
        self._armed_count = count
        self._broker.arm(self.consumer, slots, count, _BLOCK_MS)
        self._is_armed = True
        self._armed_until = self._clock() + _BLOCK_MS / 1000 + _ANSWER_S

    def _collect(self) -> None:
        """The blocking claim has an answer, or is overdue: on a half-open connection none may ever come."""
        deliveries = self._broker.collect() if self._clock() < self._armed_until else self._broker.disarm()
        self._is_armed = False
        self._note_drained(dict.fromkeys(self._served, self._armed_count), deliveries)
        self._admit(deliveries)

    def _patience_s(self) -> float:
        """For how long there is nothing to do, unless the broker or a model thread has something."""
        timeout_s = _TICK_S
        if self._uncommitted or self._concluded:
            timeout_s = 0.0
        elif self._intake.is_behind:
            timeout_s = _SHORTEST_PAUSE_S if self.executor.running() else 0.0
        elif self._is_armed:
            timeout_s = min(timeout_s, max(0.0, self._armed_until - self._clock()))
        elif not self.executor.running() and not self._loader.is_busy and self._lifecycle.claimable():
            timeout_s = 0.001
        elif self._loader.is_busy or any(model.free > 0 for model in self._served.values()):
            # Other models must not wait for the long forward of the one whose queue is full.
            timeout_s = _LOOK_AGAIN_S
        if self.executor.idle == 0 and not (self._suspects or self._was_suspect):
            for version in filter(self._may_form_ahead, self._turns):
                if (flush_at := version.batcher.next_flush_at()) is not None:
                    timeout_s = min(timeout_s, max(0.0, flush_at - self._clock()) + 0.0005)
        if self._resting:
            timeout_s = min(timeout_s, max(0.0, self._resting[0][0] - self._clock()) + 0.0005)
        return timeout_s

    def _listen(self, timeout_s: float) -> None:
        """Waits for the broker or a model thread."""
        for fd, _ in self._poller(self._broker.fileno() if self._is_armed else -1).poll(timeout_s * 1000):
            if fd == self._wake:
                os.eventfd_read(self._wake)
            else:
                self._collect()
        if self._is_armed and self._clock() >= self._armed_until:
            self._collect()

    def _poller(self, broker_fd: int) -> select.poll:
        """What to sleep on: the wake-up descriptor and, unless it is -1, the broker's."""
        poller = self._pollers.get(broker_fd)
        if poller is None:
            poller = self._pollers[broker_fd] = select.poll()
            poller.register(self._wake, select.POLLIN)
            if broker_fd >= 0:
                poller.register(broker_fd, select.POLLIN)
        return poller

    def _ring(self) -> None:
        os.eventfd_write(self._wake, 1)

    # Claim and open

    def _admit(self, deliveries: Sequence[Delivery]) -> None:
        """Opens claimed jobs and puts them before the batchers; what cannot run is concluded at once."""
        if not deliveries:
            return
        self._checkpoint("after-claim")
        now, broker_now = self._clock(), self._broker.now_ms()
        opened = [job for delivery in deliveries if (job := self._intake.open(delivery, now, broker_now)) is not None]
        self._leased.take(opened)
        self._listener.received([job.header for job in opened], time.time())
        runnable: defaultdict[ServedVersion, list[ClaimedJob]] = defaultdict(list)
        for job in opened:
            model = self._served[job.delivery.slot]
            if job.delivery.active != model.record:
                self._lifecycle.follow(model, job.delivery.active)
            failure = self._refusal(job, model, broker_now)
            version = job.version
            if failure is not None:
                self._concluded.append(JobOutcome(job, failure))
            elif version is None and job.header.version:
                self._placing.add([job])
            elif version is None:
                # The version that answers is not to be had here: others may have it.
                self._to_release.append(job)
            elif job.is_suspect:
                self._add_suspect(version, job)
            elif self._needs_forward(job, version):
                runnable[version].append(job)
        for version, jobs in runnable.items():
            self._add(version, jobs)
        self._checkpoint("before-batch")

    def _add(self, version: ServedVersion, jobs: list[ClaimedJob]) -> None:
        """Puts jobs before the batcher of a version, which is loaded if it is not."""
        self._lifecycle.load(version)
        if version.state is VersionState.FAILED:
            self._part_with(version, jobs)
        else:
            version.add(jobs)

    def _add_suspect(self, version: ServedVersion, job: ClaimedJob) -> None:
        self._lifecycle.load(version)
        if version.state is VersionState.FAILED:
            self._part_with(version, [job])
            return
        version.reserve(job)
        self._suspects.append(job)

    def _part_with(self, version: ServedVersion, jobs: Iterable[ClaimedJob]) -> None:
        """The version cannot be loaded here: its jobs are for a worker that has it."""
        for job in [each for leader in jobs for each in (leader, *self._end_flight(leader))]:
            if job.header.version:
                version.release(job)
                job.version = None
                self._placing.add([job])
            else:
                self._to_release.append(job)

    def _refusal(self, job: ClaimedJob, model: ServedModel, broker_now: float) -> Failure | None:
        """Why the job must not run, if it must not; otherwise its version is settled, if that is to be had here."""
        if broker_now > job.expires_ms:
            return EXPIRED
        if self._listener.is_revoked(job.header.id):
            return REVOKED
        if named := job.header.version:
            version = self._lifecycle.named(model.name, named)
            is_here = version is not None and version.room > 0 and self._lifecycle.is_offered(version)
        else:
            version = model.active
            is_here = version is not None and self._may_wait(version)
        return self._fit(job, version) if version is not None and is_here else None

    def _fit(self, job: ClaimedJob, version: ServedVersion) -> Failure | None:
        """Why the version cannot answer the job; otherwise it does."""
        try:
            version.fit(job)
        except InvalidInput as error:
            # The producer checked against another spec than the one that is served now.
            return Failure("ModelError", f"InvalidInput: {error}")
        job.version = version
        return None

    def _may_wait(self, version: ServedVersion) -> bool:
        """Whether jobs may wait here for the version that answers: otherwise they go back, for whoever has it.

        While it is loaded its jobs wait in the queue, unless loads are left to the first job.
        """
        if version.is_ready:
            return True
        if self._preloads:
            self._lifecycle.load(version)
            return False
        return version.room > 0

    def _place(self) -> None:
        """Gives jobs that name a version to the workers that have it; they fail where no live worker does.

        While nobody is known to have it they wait here, for as long as a worker may need to be heard of again. Raises
        BrokerUnavailable, and then keeps what has no place yet.
        """
        broker_now = self._broker.now_ms()
        going: defaultdict[tuple[str, str], list[ClaimedJob]] = defaultdict(list)
        for job in self._placing.due():
            if job.is_lost or job.is_cancelled or broker_now > job.expires_ms:
                self._concluded.append(JobOutcome(job, EXPIRED if broker_now > job.expires_ms else CANCELLED))
                continue
            place = self._find_place(job)
            if isinstance(place, ServedVersion):
                self._take(job, place)
            elif isinstance(place, Failure):
                self._concluded.append(JobOutcome(job, place))
            elif place is None:
                self._placing.wait(job)
            else:
                going[job.header.model, place].append(job)
        # What the broker does not hear of now is looked at again.
        self._placing.add(job for leaving in going.values() for job in leaving)
        for (model, label), leaving in going.items():
            self._broker.release(self.consumer, [job.held for job in leaving], version=label)
            logger.info("jobs handed over", extra={"model": model, "version": label, "jobs": len(leaving)})
            for job in leaving:
                job.is_lost = True
            self._placing.drop(leaving)
            self._let_go(leaving)

    def _find_place(self, job: ClaimedJob) -> ServedVersion | str | Failure | None:
        return self._placing.find(job)

    def _take(self, job: ClaimedJob, version: ServedVersion) -> None:
        if (failure := self._fit(job, version)) is not None:
            self._concluded.append(JobOutcome(job, failure))
        elif job.is_suspect:
            self._add_suspect(version, job)
        elif self._needs_forward(job, version):
            self._add(version, [job])

    def _needs_forward(self, job: ClaimedJob, version: ServedVersion) -> bool:
        """Whether no equal job's answer will do: one that is kept, or that of a forward under way."""
        if not (version.cache_ttl_s or version.shares_flights):
            return True
        tenant = job.header.tenant if self._isolates_tenants else ""
        job.digest = key_of(job.header, job.delivery.sealed, version.label, tenant=tenant)
        if not (self._is_known(job, version) or self._joins_another(job, version)):
            return True
        self._listener.started([job.header], time.time())
        return False

    def _is_known(self, job: ClaimedJob, version: ServedVersion) -> bool:
        """Whether what this content of the version answers in this form is kept: that is the job's answer."""
        if not version.cache_ttl_s or version.name in self._paused:
            return False
        kept = self._cache.get(job.digest)
        is_hit = kept is not None and kept.content_hash == version.content_hash and kept.form == version.form
        self._account.looked_up(version.name, is_hit=is_hit)
        if kept is None or not is_hit:
            return False
        version.used_at = self._clock()
        self._concluded.append(JobOutcome(job, kept))
        return True

    def _joins_another(self, job: ClaimedJob, version: ServedVersion) -> bool:
        """Single flight: whether an equal job of the tenant is under way, whose answer this one will get.

        It may be a failure, so only jobs of one retry policy share it.
        """
        if not version.shares_flights:
            return False
        leader = self._leaders.setdefault(job.digest, job)
        first, header = leader.header, job.header
        if leader is job or (first.tenant, first.options.retry) != (header.tenant, header.options.retry):
            return False
        leader.followers = [*(leader.followers or ()), job]
        self._metrics.single_flight(version.name)
        return True

    # Versions

    def _change_version(self, model: str, old: str, new: str) -> None:
        forgotten = self._cache.forget(old) if old else 0
        logger.info("the version changed", extra={"model": model, "old": old, "new": new, "forgotten": forgotten})
        self._on_version_change(model, old, new)

    def request_load(self, name: str, label: str, *, content_hash: str = "") -> None:
        """See ModelLifecycle.want. For any thread."""
        self._lifecycle.request_load(name, label, content_hash=content_hash)

    def request_unload(self, name: str, label: str, *, content_hash: str = "") -> None:
        """See ModelLifecycle.let_go_of. For any thread."""
        self._lifecycle.request_unload(name, label, content_hash=content_hash)

    def may_serve(self, name: str) -> bool:
        """See ModelLifecycle.may_serve. For any thread."""
        return self._lifecycle.may_serve(name)

    def versions(self) -> dict[str, dict[str, dict[str, Any]]]:
        """See ModelLifecycle.described. For any thread."""
        return self._lifecycle.described()

    def _take_in_loaded(self) -> None:
        """Versions have been loaded, or cannot be: the jobs that waited for these end, or go elsewhere."""
        broker_now = self._broker.now_ms()
        for version in [each for each in self._turns if each.state is VersionState.LOADING]:
            self._drop_expired(version, broker_now)
        for version, problem, _, _ in self._lifecycle.take_in_loaded():
            if not problem:
                self.executor.grow(version.concurrency)
            else:
                waiting = [item.job for item in version.batcher.discard(lambda _: True)]
                waiting += [job for job in self._suspects if job.version is version]
                self._suspects = deque(job for job in self._suspects if job.version is not version)
                self._part_with(version, waiting)
            for job, error in [] if problem else version.misfits():
                self._concluded.append(JobOutcome(job, Failure("ModelError", f"InvalidInput: {error}")))

    # Batch and execute

    def _dispatch(self) -> None:
        """Gives every idle model thread a batch, and forms the next full one while they are busy."""
        self._recall_for_urgent()
        if self._suspects or self._was_suspect:
            self._dispatch_suspects()
            return
        while (idle := self.executor.idle) >= 0:
            work = self._next_work(is_idle=idle > 0)
            if work is None:
                return
            self._submit(work, is_idle=idle > 0)

    def _submit(self, work: BatchRun, *, is_idle: bool) -> None:
        self._listener.started([item.job.header for item in work.batch.items], time.time())
        self.executor.submit(work, prepare_apart=_version_of(work).tokenises and not is_idle)

    def _dispatch_suspects(self) -> None:
        """Suspects have the model threads to themselves, or the innocent would be counted with them: one suspect, then
        one batch of others, as long as there are both."""
        if self.executor.idle < self.executor.threads:
            return
        work = self._next_work(is_idle=True) if self._was_suspect else None
        self._was_suspect = work is None and (work := self._next_suspect()) is not None
        # A suspect whose version is still being loaded keeps nobody waiting.
        if work is not None or (work := self._next_work(is_idle=True)) is not None:
            self._submit(work, is_idle=True)

    def _next_suspect(self) -> BatchRun | None:
        """The suspect that has been here longest, unless it is too late for it, or its version is not there yet."""
        for _ in range(len(self._suspects)):
            job = self._suspects.popleft()
            version = job.version
            if self._broker.now_ms() > job.expires_ms:
                self._concluded.append(JobOutcome(job, EXPIRED))
            elif version is not None and version.is_ready:
                version.in_flight += 1
                return version.work(version.alone(job), self._open_stream, is_as_built=True)
            elif version is not None:
                self._add_suspect(version, job)
        return None

    def _next_work(self, *, is_idle: bool) -> BatchRun | None:
        """The next batch, model by model in turn, without the jobs whose deadline has passed meanwhile."""
        now = self._clock()
        for _ in range(len(self._turns)):
            version = self._turns[0]
            self._turns.rotate(-1)
            if not version.is_ready:
                continue
            version.raise_cap(now)
            if version.may_start <= 0 and (is_idle or not self._may_form_ahead(version)):
                continue
            while (batch := version.batcher.next(now, device_idle=is_idle)) is not None:
                broker_now = self._broker.now_ms()
                if all(broker_now <= item.job.expires_ms for item in batch.items):
                    version.in_flight += 1
                    return version.work(batch, self._open_stream)
                version.batcher.put_back(batch)
                self._drop_expired(version, broker_now)
        return None

    def _may_form_ahead(self, version: ServedVersion) -> bool:
        """Whether a batch may wait for a thread: any that becomes free must be allowed to run it."""
        spare = version.may_start
        return version.is_ready and (spare > 0 or (spare == 0 and version.concurrency >= self.executor.threads))

    def _drop_expired(self, version: ServedVersion, broker_now: float) -> None:
        late = version.batcher.discard(lambda item: broker_now > item.job.expires_ms)
        self._concluded += [JobOutcome(item.job, EXPIRED) for item in late]

    def _recall_for_urgent(self) -> None:
        """A batch that is ready but has not begun is dissolved when a more urgent job has come."""
        if self.executor.idle >= 0:
            return
        urgent = [
            priority
            for version in self._turns
            if version.is_ready and (priority := version.batcher.most_urgent()) is not None
        ]
        if urgent and (work := self.executor.recall(more_urgent=min(urgent))) is not None:
            self._put_back(work)

    def _put_back(self, work: BatchRun) -> None:
        version = _version_of(work)
        version.batcher.put_back(work.batch)
        version.in_flight -= 1

    def _open_stream(self, job: ClaimedJob, touch: Callable[[], None]) -> EventStream:
        return EventStream(
            job,
            touch,
            self._broker,
            self.consumer,
            self._keyring,
            self._job_ttl_ms,
            may_wait=lambda: self._clock() < self._stop_at,
        )

    def _look_for_hung_work(self) -> None:
        """A forward over its limit cannot be ended but with its process, which whoever watches that will do."""
        self._ailment = self._ailment or self.executor.device_lost
        now = self._clock()
        gap_s, self._looked = now - self._looked, now
        for work in self.executor.running():
            if gap_s > max(work.limit_s, _STOOD_STILL_S):
                # The whole process stood still, and the forward with it.
                work.touch()
            elif now - work.alive_at > work.limit_s and not self._ailment:
                model = work.batch.key.model
                self._ailment = f"a forward of {model} took longer than its limit of {work.limit_s:g} s"
                logger.error("a forward hangs", extra={"model": model, "limit_s": work.limit_s})

    def _serve_no_more(self) -> None:
        """What is done is committed, and the rest is for others: a forward hangs, or the device is lost."""
        self._give_back_unbegun()
        self._exchange([])
        self._account.tell()

    # Conclude and commit

    def _too_late(self, jobs: Sequence[ClaimedJob]) -> dict[int, Failure]:
        """Asked on the model thread as the last thing before a forward: the jobs may have waited for it."""
        now = self._broker.now_ms()
        late = [job for job in jobs if job.is_cancelled or job.is_lost or now > job.expires_ms]
        return {id(job): CANCELLED if job.is_cancelled or job.is_lost else EXPIRED for job in late}

    def _conclude(self, work: BatchRun) -> None:
        version = _version_of(work)
        version.in_flight -= 1
        version.used_at = work.ended
        if work.misfits:
            self._metrics.out_of_memory(version.name)
            if (too_large := work.too_large) is not None:
                version.cap_batches(too_large, self._clock())
        self._concluded += [
            JobOutcome(item.job, answer, None if answer is CANCELLED or answer is EXPIRED else work)
            for item, answer in zip(work.batch.items, work.answers, strict=True)
        ]

    def _seal_concluded(self) -> None:
        """Every concluded job, and those that follow it, becomes a commit."""
        concluded, self._concluded = self._concluded, []
        for end in concluded:
            job = end.job
            if job.header.options.retry is not None and end.state is State.FAILED and self._runs_again(end):
                continue
            followers = self._end_flight(job) if job.digest else []
            if job.is_lost:
                self._let_go([job])
            else:
                end, commit = self._commit_of(end)
                self._uncommitted.append((end, commit))
                self._keep(end)
            # That the leader was lost, cancelled or late says nothing about its equals.
            if job.is_lost or end.state in (State.CANCELLED, State.EXPIRED):
                self._rejoin(followers)
                continue
            for follower in followers:
                self._uncommitted.append(self._commit_of(JobOutcome(follower, end.answer, end.work)))

    def _keep(self, end: JobOutcome) -> None:
        """What a forward answered is the answer to equal jobs, while the version answers in the same form."""
        job, answer, version = end.job, end.answer, end.job.version
        if not job.digest or version is None or not version.cache_ttl_s or not isinstance(answer, EncodedOutputs):
            return
        # A batch may end after another version has begun to answer.
        is_asked_for = bool(job.header.version) or version is self._served[version.name].active
        is_as_now = answer.content_hash == version.content_hash and answer.form == version.form
        if end.work is not None and is_asked_for and is_as_now:
            self._cache.put(job.digest, answer, version.cache_ttl_s)

    def _runs_again(self, end: JobOutcome) -> bool:
        """Whether the job's retry policy gives it another forward, after a pause or elsewhere."""
        job, failure = end.job, end.failure
        policy = job.header.options.retry
        if policy is None or failure is None or end.work is None or job.tries >= policy.attempts or job.is_lost:
            return False
        pause_s = policy.pause_s(job.tries, self._jitter())
        if job.is_cancelled or self._broker.now_ms() + pause_s * 1000 > job.expires_ms:
            return False
        self._listener.retried([Failed(job.header, failure)], time.time())
        self._metrics.retried(job.header.model)
        # A pause may be longer than its equals can wait: they go ahead.
        self._rejoin(self._end_flight(job))
        job.tries += 1
        if len(self._resting) >= self._max_in_memory // 2:
            # Too many rest already: they would keep out jobs that nothing is wrong with.
            pause_s = 0.0
        if job.version is not None:
            job.version.release(job)
        self._rested += 1
        heapq.heappush(self._resting, (self._clock() + pause_s, self._rested, job))
        return True

    def _rouse(self) -> ClaimedJob:
        """The job that has rested longest of those that rest."""
        _, _, job = heapq.heappop(self._resting)
        return job

    def _rouse_rested(self) -> None:
        while self._resting and self._resting[0][0] <= self._clock():
            job = self._rouse()
            if job.is_lost or job.is_cancelled:
                self._concluded.append(JobOutcome(job, CANCELLED))
            elif self._listener.is_revoked(job.header.id):
                self._concluded.append(JobOutcome(job, REVOKED))
            elif job.version is not None and job.is_suspect:
                self._add_suspect(job.version, job)
            elif job.version is not None:
                self._add(job.version, [job])

    def _end_flight(self, job: ClaimedJob) -> list[ClaimedJob]:
        """From now on nobody follows the job; returns those that did."""
        if job.digest and self._leaders.get(job.digest) is job:
            del self._leaders[job.digest]
        followers, job.followers = job.followers or [], None
        return followers

    def _commit_of(self, end: JobOutcome) -> tuple[JobOutcome, Commit]:
        return commit_of(end, worker=self.name, keyring=self._keyring)

    def _label_of(self, name: str) -> str:
        return self._served[name].label

    def _rejoin(self, followers: Iterable[ClaimedJob]) -> None:
        for follower in followers:
            version = follower.version
            if version is not None and not self._joins_another(follower, version):
                self._add(version, [follower])

    def _settle(
        self, pending: Sequence[tuple[JobOutcome, Commit]], statuses: Sequence[CommitStatus], begun: float
    ) -> None:
        """The broker has answered: the jobs leave this worker's memory, and those who watch will be told."""
        now = self._clock()
        self._let_go([end.job for end, _ in pending])
        settled: list[tuple[JobOutcome, State]] = []
        for (end, commit), verdict in zip(pending, statuses, strict=True):
            if verdict is CommitStatus.COMMITTED:
                settled.append((end, commit.state))
            elif verdict is CommitStatus.FENCED:
                self._metrics.fenced(commit.slot)
                logger.warning("a late commit was discarded", extra={"job_id": commit.job_id, "model": commit.slot})
        self._account.settled(settled, now - begun, now)

    def _let_go(self, jobs: Sequence[ClaimedJob]) -> None:
        for job in jobs:
            if job.version is not None:
                job.version.release(job)
        self._leased.drop(jobs)

    # Leases

    def _room_to_take_over(self) -> int:
        return 0 if self._is_stopping or self._ailment else self._max_in_memory - len(self._leased)

    def _hear(self, news: LeaseUpdate) -> None:
        self._news.append(news)
        self._ring()

    def _follow_news(self) -> None:
        while self._news:
            renewal, taken_over = self._news.popleft()
            for delivery in taken_over:
                self._metrics.taken_over(delivery.slot)
            self._admit(taken_over)
            if renewal.lost or renewal.cancelled:
                self._drop_unwanted(renewal.lost, renewal.cancelled)

    def _drop_unwanted(self, lost: frozenset[Held], cancelled: frozenset[str]) -> None:
        """Lost jobs are forgotten, cancelled ones concluded; those that run are told, and concluded when they end."""

        def is_unwanted(job: ClaimedJob) -> bool:
            job.is_lost = job.is_lost or job.held in lost
            job.is_cancelled = job.is_cancelled or job.header.id in cancelled
            return job.is_lost or job.is_cancelled

        for work in (*self.executor.running(), *self.executor.waiting()):
            for item in work.batch.items:
                is_unwanted(item.job)
        for version in self._turns:
            for item in version.batcher.discard(lambda item: is_unwanted(item.job)):
                self._concluded.append(JobOutcome(item.job, CANCELLED))
        for job in self._placing:
            is_unwanted(job)
        self._concluded += [JobOutcome(job, CANCELLED) for job in self._suspects if is_unwanted(job)]
        self._suspects = deque(job for job in self._suspects if not (job.is_lost or job.is_cancelled))
        if self._resting:
            self._resting = [(0.0 if is_unwanted(job) else due, number, job) for due, number, job in self._resting]
            heapq.heapify(self._resting)

    def _look_for_decisions(self) -> None:
        """Twice a second, on the lease thread: a worker that claims nothing hears, too, which version answers."""
        for name, active in self._broker.actives(list(self._served)).items():
            if active != self._served[name].record:
                self._lifecycle.request(partial(self._lifecycle.on_record, name, active))

    def _report(self) -> None:
        """Once a second, on the lease thread: pauses, queue metrics, this worker's entry for `penstock status`,
        decisions to remember."""
        names = list(self._served)
        self._reports += 1
        if self._reports % _TRY_AGAIN_EVERY == 0 and len(self._lifecycle.claimable()) < len(names):
            self._lifecycle.request(self._lifecycle.try_again)
        paused = self._broker.paused(names)
        if paused != self._paused:
            logger.info("paused", extra={"models": sorted(paused)})
            self._paused = paused
            self._ring()
        for name in names:
            for depth in self._broker.depths(name):
                self._metrics.queue(name, depth.priority.label, depth.jobs, depth.oldest_waiting_s)
        self._cache.expire()
        self._metrics.cache_size(len(self._cache), self._cache.nbytes, self._cache.evicted)
        report = {
            "name": self.name,
            "pid": os.getpid(),
            "device": self._device,
            "models": {name: self._served[name].label for name in names},
            "versions": self._lifecycle.described(),
            "ready": self.readiness[0],
            "in_memory": len(self._leased),
            "batches": self._account.batches,
            "probe": self._probe_url,
            "host": socket.gethostname(),
            "started": self._started_at,
            "load": self._metrics.totals(),
            "levels": self._tuner.report(),
        }
        self._broker.report(self.name, json.dumps(report).encode(), _REPORT_TTL_MS)
        self._lifecycle.remember()

    def _offered(self) -> dict[str, dict[str, int]]:
        return {name: self._lifecycle.offered(name) for name in tuple(self._served)}

    def _withdraw_report(self) -> None:
        """After the last one: the lease thread reports until it ends. Without a broker the report expires."""
        if not self._thread.is_alive():
            with suppress(BrokerUnavailable):
                self._broker.report(self.name, b"", 1)

    # Stop

    def _wind_up(self) -> bool:
        """Finishes what runs, within the grace period, and gives everything else back; whether something still runs."""
        self._checkpoint("mid-drain")
        self._give_back_unbegun()
        may_finish = bool(self.executor.running()) and self._clock() < self._stop_at
        self._take_in_done()
        self._exchange([])
        self._account.tell()
        if may_finish:
            return True
        self._to_release += [item.job for work in self.executor.running() for item in work.batch.items]
        while self._intake.is_behind:
            self._intake.bury_next()
        # Jobs that had joined one which ended without an answer are back in the batchers by now.
        self._give_back_waiting()
        logger.info("drained")
        return False

    def _leave_paused(self) -> None:
        """Gives back what has not begun of the models that an operator paused: nobody starts it until they resume."""
        if any(work.batch.key.model in self._paused for work in self.executor.waiting()):
            while (work := self.executor.recall()) is not None:
                self._put_back(work)
        for version in [version for version in self._turns if version.name in self._paused]:
            self._to_release += [item.job for item in version.batcher.discard(lambda _: True)]
        self._to_release += [job for job in self._suspects if job.delivery.slot in self._paused]
        self._suspects = deque(job for job in self._suspects if job.delivery.slot not in self._paused)
        self._to_release += self._placing.take_out(lambda job: job.delivery.slot in self._paused)
        self._release()

    def _give_back_unbegun(self) -> None:
        """Withdraws the blocking claim, and releases all that is not on a model thread."""
        if self._is_armed:
            self._is_armed = False
            self._admit(self._broker.disarm())
        self._follow_news()
        while (work := self.executor.recall()) is not None:
            _version_of(work).in_flight -= 1
            self._to_release += [item.job for item in work.batch.items]
        self._give_back_waiting()

    def _give_back_waiting(self) -> None:
        """Releases what has not begun; what the broker did not hear of is kept for the next try."""
        for version in self._turns:
            self._to_release += [item.job for item in version.batcher.discard(lambda _: True)]
        while self._resting:
            self._to_release.append(self._rouse())
        self._to_release += [*self._suspects, *self._placing.take_out()]
        self._suspects.clear()
        self._release()

    def _release(self) -> None:
        if not self._to_release:
            return
        jobs: list[ClaimedJob] = [each for job in self._to_release for each in (job, *(job.followers or ()))]
        for job in jobs:
            job.is_lost = True
            job.followers = None
            if job.digest and self._leaders.get(job.digest) is job:
                del self._leaders[job.digest]
        self._to_release = jobs
        self._broker.release(self.consumer, [job.held for job in jobs])
        self._to_release = []
        self._let_go(jobs)


def _deployments(settings: Settings, verify: Verifier | None) -> DeploymentStore:
    return FileDeploymentStore(settings.home / "deployments", verify) if verify is not None else NullDeploymentStore()


def _version_of(work: BatchRun) -> ServedVersion:
    version = work.batch.items[0].job.version
    if version is None:
        raise RuntimeError("a batch was made of a job that no version answers")
    return version
