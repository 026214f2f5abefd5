"""How work leaves: claim -> open -> route -> batch -> execute -> commit. Read this file first.

    broker -- claim --> Intake: open, verify --> JobRouter --> Backlog --> Scheduler --> Executor (model threads)
      ^                                            |  cached, expired, revoked, invalid        |
      |                                            v                                           v
      '----------- commit and claim, one round trip: Claimer <------------------------------ Completer

One I/O thread takes the turns below. It does everything except loads, forwards and leases, which have threads of their
own. The parts own their state and return values. The router says where a job goes and JobTransfers puts it there; the
scheduler moves it on from the backlog to the executor. Which version answers a job is settled when it is claimed.

`start` runs three kinds of threads over three methods: Drain.step, Executor.begin to finish, LeaseKeeper.tick. The
simulator calls these methods itself, under a clock of its own, and has the whole worker in one thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Final

from penstock.registry.broker.base import Claim
from penstock.registry.envelope import Failure, JobHeader
from penstock.registry.errors import BrokerUnavailable
from penstock.registry.unrun import EXPIRED
from penstock.workers.credit import TakeOverRoom
from penstock.workers.drain_parts import DrainLimits, DrainParts
from penstock.workers.health import WorkerHealth
from penstock.workers.leases import LeaseKeeper, LeaseUpdate
from penstock.workers.results import JobOutcome
from penstock.workers.router import Suspect
from penstock.workers.transfers import JobTransfers
from penstock.workers.versions.lifecycle import ModelLifecycle
from penstock.workers.versions.queue import INTERRUPTED_S

__all__ = ["Drain"]

logger = logging.getLogger("penstock.server")

_FORWARD_HERE_S: Final = 0.1
"""How long a stop waits for a forward on the I/O thread before another thread gives the other jobs back."""
_LAST_COMMIT_S: Final = 6.0
_LOOK_AGAIN_S: Final = 0.02
_TICK_S: Final = 0.25
_IDLE_S: Final = 0.001
"""The sleep of an idle worker that has not left its blocking claim yet."""
_DEFERRED_S: Final = 0.1
"""How long deferred dead letters may wait for a moment in which there is nothing else to do."""
_REPORT_S: Final = 0.001
"""How long reports wait for the next job: it must not wait for them, and they fit in while the broker takes its
result."""
_SHORTEST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
"""How long to leave a broker alone that does not answer; doubled each time, between these."""


class Drain:
    """Serves models from the broker until told to stop. Call load, then start, then stop.

    name: the worker's, unique on the broker. consumer: unique for each start of it. checkpoint: called with the name of
    each point at which a crash is worth testing. clock: monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        consumer: str,
        parts: DrainParts,
        limits: DrainLimits,
        transfers: JobTransfers,
        *,
        checkpoint: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name: Final = name
        self.consumer: Final = consumer
        self.parts: Final = parts
        self._limits = limits
        self._checkpoint = checkpoint
        self._clock = clock
        self._broker = parts.broker
        self._backlog = parts.backlog
        self._completer = parts.completer
        self._transfers = transfers
        self._lease_updates: deque[LeaseUpdate] = deque()
        self._deferred_since = clock()
        self._pause_s = _SHORTEST_PAUSE_S
        self._has_settled = False
        """Whether this turn has settled jobs."""
        self._thread = threading.Thread(target=self._run, name="drain", daemon=True)
        self.leases: Final = LeaseKeeper(
            parts.broker,
            consumer,
            parts.lifecycle.offers.claimable,
            parts.leased,
            lease_s=limits.lease_s,
            offered=parts.lifecycle.offers.all_offered,
            room=self._room_to_take_over,
            on_update=self._on_lease_update,
            look=parts.lifecycle.poll_records,
            report=lambda: parts.status.report(is_ready=self.health.readiness[0]),
            clock=clock,
        )
        self.health: Final = WorkerHealth(parts, self._thread, self.leases, progress_s=limits.progress_s, clock=clock)

    # Life

    def load(self) -> None:
        """See ModelLifecycle.open. Raises ConfigurationError, BrokerUnavailable."""
        self.parts.lifecycle.open()
        for version in self.parts.lifecycle.turns:
            if version.is_ready:
                self.parts.executor.grow(version.policy.concurrency)

    def start(self) -> None:
        """Start the threads: from now on jobs are claimed."""
        self.parts.executor.start()
        self.leases.start()
        if self.parts.arm_breakers is not None:
            self.parts.arm_breakers.shared.start()
        self._thread.start()
        self.health.is_serving = True
        self.parts.metrics.ready(True)

    def stop(self, grace_s: float) -> None:
        """Claim nothing more, let running batches finish for up to `grace_s` seconds, give the rest back at once."""
        self.wind_up(grace_s)
        if self._thread.ident is not None:
            self.leases.stop(1.0)
            if self.parts.arm_breakers is not None:
                self.parts.arm_breakers.shared.stop(1.0)
            self.parts.executor.stop()
            self.parts.events.stop()
            if not self._thread.is_alive():
                # After the last report: the lease thread reports until it ends.
                with suppress(BrokerUnavailable):
                    self.parts.status.withdraw()
        self.parts.lifecycle.close()
        self.parts.answers.close()
        self.parts.mirror.close()

    def wind_up(self, grace_s: float) -> None:
        """As `stop`, without the end of the other threads and of the models."""
        self.ask_to_stop(grace_s)
        if self._thread.ident is None:
            return
        # A forward on that thread keeps it from giving back what has not begun.
        self._thread.join(min(grace_s, _FORWARD_HERE_S))
        with suppress(BrokerUnavailable):
            if self.parts.executor.here is not None:
                self._broker.unblock()
            self.give_back_others()
        self._thread.join(max(0.0, grace_s - _FORWARD_HERE_S))
        if (run := self.parts.executor.here) is not None:
            with suppress(BrokerUnavailable):
                # It may have begun since.
                self.give_back_others()
                self._broker.release(self.consumer, run.held)
            return
        # A last commit may have to wait for the broker once.
        self._thread.join(_LAST_COMMIT_S)

    def ask_to_stop(self, grace_s: float) -> None:
        """From now on the turns wind up, see `stop`; does not wait for them."""
        self.parts.metrics.ready(False)
        self.health.is_serving = False
        self.parts.journal.retire()
        self.parts.stop.set(grace_s)
        self.parts.claimer.wake_up.ring()

    @property
    def lifecycle(self) -> ModelLifecycle:
        """The versions of this worker, for operators' requests."""
        return self.parts.lifecycle

    def give_back_others(self) -> None:
        """Give back all jobs but those of a forward that hangs on the I/O thread. For the thread that ends the process.

        Without such a forward it does nothing. Raises BrokerUnavailable: they return when their leases lapse.
        """
        if (run := self.parts.executor.here) is not None:
            theirs = set(run.held)
            others = [held for held in self.parts.leased.snapshot() if held not in theirs]
            if others:
                self._broker.release(self.consumer, others)

    def active(self) -> list[JobHeader]:
        """The jobs whose forward runs now."""
        return [item.job.header for run in self.parts.executor.running() for item in run.batch.items]

    def reserved(self) -> list[JobHeader]:
        """The jobs in memory that wait for their forward."""
        formed = [item.job.header for run in self.parts.executor.waiting() for item in run.batch.items]
        return [*formed, *(job.header for job in self._backlog)]

    # The loop

    def _run(self) -> None:
        while (pause_s := self.step()) is not None:
            if pause_s:
                time.sleep(pause_s)

    def step(self, longest_wait_s: float = inf) -> float | None:
        """One turn of the loop. At its end it sleeps until something happens, for up to `longest_wait_s` seconds.

        Returns for how many seconds to leave the broker alone, or None: all is given back, there is no next turn.
        """
        self.health.ticked = self._clock()
        try:
            if not self.parts.stop.is_set:
                self._serve()
            elif not self._wind_up():
                return None
            self._transfers.admit(self.parts.claimer.wait(min(self.sleep_s(), longest_wait_s)))
        except BrokerUnavailable as error:
            logger.warning("the broker is away: %s", error)
            self.parts.claimer.reset()
            pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, _LONGEST_PAUSE_S)
            return pause_s
        self._pause_s = _SHORTEST_PAUSE_S
        return 0.0

    def _serve(self) -> None:
        parts, self._has_settled = self.parts, False
        self._completer.collect(parts.executor.take_done())
        parts.releaser.add_interrupted(parts.executor.take_interrupted())
        self._apply_lease_updates()
        self._follow_lifecycle()
        self._transfers.leave_stopped_arms()
        self._transfers.take_in_answers()
        if parts.scheduler.check_forwards():
            self._serve_no_more()
            return
        self._transfers.resume_delayed()
        self._transfers.refuse_overdue(self.health.ticked)
        self._give_back_paused()
        self._dispatch()  # the device comes first
        if self._exchange(self._claims()) or self._backlog.has_unplaced:
            self._transfers.place_unplaced()
            self._dispatch()
        if not parts.stop.is_set:
            # This turn may have freed a seat; then the next one claims.
            self._transfers.admit(parts.claimer.widen())
            parts.claimer.arm()
        if not (self._is_exchange_near or (self._has_settled and self.is_at_rest)):
            self._tell()
        self._dead_letter_deferred()

    def sleep_s(self) -> float:
        """For how long there is nothing to do, unless the broker or another thread wakes this one."""
        now = self._clock()
        if self.is_at_rest:
            # However short that limit is, a worker that sleeps makes progress.
            longest_s = _REPORT_S if self.parts.telemetry.has_work else self._limits.progress_s / 2
            return max(0.0, min(self.parts.claimer.next_wakeup() - now, longest_s))
        return _sleep_s(self.parts, now)

    @property
    def is_at_rest(self) -> bool:
        """Whether it only waits for its blocking claim: it holds nothing, and all else that it gets to do rings."""
        parts = self.parts
        return (
            parts.claimer.is_armed
            and not len(parts.leased)
            and not (parts.completer.has_work or parts.intake.has_deferred or parts.lifecycle.has_work)
            and not (parts.executor.running() or parts.executor.waiting())
            and not (parts.stop.is_set or parts.scheduler.unhealthy_reason)
        )

    # Jobs from part to part

    def _dispatch(self) -> None:
        """Form the next batches. If one is for this thread, it runs while the broker takes results; or now, if there
        are none to send."""
        executor = self.parts.executor
        self._form()
        self._completer.collect(executor.take_done())
        if executor.kept is not None and not self._completer.has_work:
            executor.run_kept()
            self._completer.collect(executor.take_done())
            self._form()

    def _form(self) -> None:
        if self.parts.stop.is_set:
            # Another thread may have given these jobs back already; see `wind_up`.
            return
        for job, version in self._backlog.take_stranded():
            self._transfers.put(job, Suspect(version))
        self._transfers.refuse_late_followers()
        if expired := self.parts.scheduler.dispatch():
            self._completer.refuse(expired, EXPIRED)

    def _meanwhile(self) -> None:
        """What no answer waits for: done while the broker answers an exchange.

        First the next blocking claim. A client may have its answer, and send its next job, before this thread has. It
        takes all jobs: an engine whose jobs are being committed has seats in a moment. Then a short forward.
        """
        if not (self.parts.stop.is_set or self.parts.scheduler.unhealthy_reason):
            self.parts.claimer.arm(may_be_narrow=False)
        self.parts.executor.run_kept()
        self._completer.keep_answers()
        self._tell()

    @property
    def _is_exchange_near(self) -> bool:
        """Whether an exchange follows within moments: reports wait for it, because a short forward has to share the
        interpreter with this thread."""
        return self._completer.has_work or self.parts.executor.ends_soon(self._clock())

    def _claims(self) -> list[Claim]:
        """What to claim now. The blocking claim has taken what had come: if the forward of that is about to end, its
        commit carries the next claims, which saves a round trip. If the next batch forms, further jobs fill it."""
        parts = self.parts
        if parts.claimer.has_just_waited and not self._completer.has_work:
            is_forming = any(len(version.queue.batcher) for version in parts.lifecycle.turns)
            if not is_forming and parts.executor.ends_soon(self._clock()):
                return []
        return [] if parts.stop.is_set else parts.claimer.wanted()

    def _tell(self) -> None:
        """Report what was settled, and let it steer the next batches."""
        self.parts.telemetry.flush()
        self._completer.steer()

    def _exchange(self, claims: Sequence[Claim]) -> bool:
        """Commit what has ended, and claim: one round trip. Returns whether jobs may have moved."""
        if not (claims or self._completer.has_work):
            return False
        self._transfers.send_ahead()
        self._transfers.apply_retries(self._completer.seal())
        commits = self._completer.commits
        if not (commits or claims):
            self._completer.keep_answers()
            return True
        begun = self._clock()
        statuses, deliveries = self.parts.claimer.exchange(commits, claims, self._meanwhile)
        if commits:
            settlement = self._completer.settle(statuses, begun)
            self.parts.telemetry.add(settlement)
            self._has_settled = True
            if self.parts.mirror.is_active:
                self.parts.mirror.offer(settlement)
        self._transfers.admit(deliveries)
        return True

    def _dead_letter_deferred(self) -> None:
        """Once nothing waits for this thread, or after some time."""
        parts = self.parts
        if not parts.intake.has_deferred:
            self._deferred_since = self._clock()
        elif self._clock() - self._deferred_since > _DEFERRED_S or not (
            self._completer.has_work or parts.executor.running() or parts.executor.waiting()
        ):
            parts.intake.dead_letter_next()

    # Versions

    def _follow_lifecycle(self) -> None:
        """Do what operators requested, and take in the loads that have ended."""
        lifecycle = self.parts.lifecycle
        lifecycle.run_requests()
        if threads := lifecycle.take_wanted_threads():
            self.parts.executor.grow(threads)
        if not lifecycle.loader.is_busy:
            return
        for version, problem, _, _ in lifecycle.take_in_loaded():
            if problem:
                self._transfers.reroute(job for job, _ in self._backlog.take_version(version))
                continue
            self.parts.executor.grow(version.policy.concurrency)
            for job, error in version.misfits():
                failure = Failure("InputRefused", str(error))
                self._completer.add(JobOutcome(job, failure, "refused", version))

    # Leases

    def _room_to_take_over(self) -> TakeOverRoom:
        """On the lease thread. The jobs that it found before and that are not in memory yet take room as well."""
        if self.parts.stop.is_set or self.parts.scheduler.unhealthy_reason:
            return TakeOverRoom(0, 0)
        run = self.parts.executor.here
        if run is not None and self._clock() - run.started > INTERRUPTED_S:
            # It may hang. This thread would not take them in, and nobody would renew their leases.
            return TakeOverRoom(0, 0)
        leased, limits = self.parts.leased, self._limits
        room = TakeOverRoom(limits.most_jobs - len(leased), limits.most_bytes - leased.nbytes)
        for update in tuple(self._lease_updates) if self._lease_updates else ():
            room = room.without(update.taken_over)
        return room

    def _on_lease_update(self, update: LeaseUpdate) -> None:
        """On the lease thread."""
        self._lease_updates.append(update)
        self.parts.claimer.wake_up.ring()

    def _apply_lease_updates(self) -> None:
        while self._lease_updates:
            (lost, cancelled), taken_over = self._lease_updates.popleft()
            for delivery in taken_over:
                self.parts.metrics.taken_over(delivery.slot)
            self._transfers.admit(taken_over)
            if lost or cancelled:
                self._transfers.drop_unwanted(lost, cancelled)

    # Back to the broker

    def _give_back_paused(self) -> None:
        """Give back the jobs of paused models that have not begun: no worker starts them until the model resumes."""
        if paused := self.parts.status.paused:
            if any(run.batch.key.model in paused for run in self.parts.executor.waiting()):
                self.parts.scheduler.recall_all()
            unbegun = self._backlog.take_models(paused)
            self.parts.releaser.add(job for job, _ in unbegun)
        self.parts.releaser.flush()

    def _serve_no_more(self) -> None:
        """A forward hangs, or the device is lost: commit what has ended, and give the rest to other workers."""
        self._completer.collect(self.parts.executor.take_done())
        self._give_back_unbegun()
        self._exchange([])
        # Followers of a job that has failed by now.
        self.give_back_waiting()
        self._tell()

    def _wind_up(self) -> bool:
        """Let running batches finish within the grace period, and give everything else back; whether any still runs."""
        self._checkpoint("mid-drain")
        self._give_back_unbegun()
        is_running = bool(self.parts.executor.running())
        self._completer.collect(self.parts.executor.take_done())
        self.parts.releaser.add_interrupted(self.parts.executor.take_interrupted())
        self._exchange([])
        self._tell()
        if (is_running or self._completer.has_unsent) and not self.parts.stop.is_over():
            return True
        running = [item.job for run in self.parts.executor.running() for item in run.batch.items]
        self.parts.releaser.add([*running, *self._completer.give_up_unsent()])
        while self.parts.intake.has_deferred:
            self.parts.intake.dead_letter_next()
        # Former followers of a job that ended without an answer are back in the backlog by now.
        self.give_back_waiting()
        logger.info("drained")
        return False

    def _give_back_unbegun(self) -> None:
        """Withdraw the blocking claim, and give back every job that is not on a model thread."""
        self._transfers.admit(self.parts.claimer.disarm())
        self._apply_lease_updates()
        self.parts.scheduler.recall_all()
        self.give_back_waiting()

    def give_back_waiting(self) -> None:
        """Give back the whole backlog."""
        self.parts.releaser.add(job for job, _ in self._backlog.take())
        self.parts.releaser.flush()


def _sleep_s(parts: DrainParts, now: float) -> float:
    if parts.completer.has_work or parts.claimer.has_widened:
        return 0.0
    until = min(parts.scheduler.next_wakeup(), parts.answers.next_timeout) - now
    is_running, is_loading = bool(parts.executor.running()), parts.lifecycle.loader.is_busy
    if parts.intake.has_deferred:
        until = min(until, _SHORTEST_PAUSE_S if is_running else 0.0)
    elif parts.claimer.is_armed:
        until = min(until, parts.claimer.next_wakeup() - now)
        if parts.claimer.awaits_pages:
            until = min(until, _LOOK_AGAIN_S)
    elif not (is_running or is_loading or parts.scheduler.unhealthy_reason) and _claims_at_once(parts):
        until = min(until, _IDLE_S)
    elif parts.claimer.has_room and not parts.scheduler.unhealthy_reason:
        # Other models must not wait for the long forward of the one whose queue is full.
        until = min(until, _LOOK_AGAIN_S)
    return max(0.0, min(until, _TICK_S))


def _claims_at_once(parts: DrainParts) -> bool:
    """Whether the next turn claims. It does not while jobs that wait for a worker with their version take all room."""
    return bool(parts.lifecycle.offers.claimable()) and parts.claimer.may_wait
