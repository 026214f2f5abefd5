"""Changes the active version of a model while jobs flow: prepare in every worker, decide once, activate in one write.

    promote, rollback -> PREPARE   request the version, until every live worker of the model has it in memory
                      -> DECIDE    one transaction of the registry, which gives the decision its epoch
                      -> ACTIVATE  one write in the broker: jobs claimed from then on run on the new version

When a worker cannot load the version, nothing has changed yet, and nothing changes. After a crash between the last two
steps the old version stays active; `sync`, or the next decision, activates the new one. After the activation nothing
fails any more: a later step that cannot be done is only reported.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from penstock.compose.rollout.active_version import active_deployment
from penstock.compose.rollout.endpoint_shares import endpoint_shares
from penstock.compose.rollout.ends import connect_ends
from penstock.compose.rollout.files import Files, LocalFiles
from penstock.compose.rollout.load_requests import LoadRequests
from penstock.compose.rollout.preparation import Preparation
from penstock.compose.rollout.replicas import ProgressCallback, workers_of
from penstock.compose.views.levels import await_answers, entries
from penstock.registry.broker.base import FleetEnd
from penstock.registry.catalog import ModelRegistryClient, Veto
from penstock.registry.catalog.lineage import ModelLineage
from penstock.registry.catalog.stages import ModelStage, TransitionAction, check_step, parse_stage
from penstock.registry.catalog.tables import Experiment, PolicyRecord, RegisteredVersion, Transition
from penstock.registry.control import Command
from penstock.registry.deployment import Deployment
from penstock.registry.desired_state import StateStore
from penstock.registry.errors import (
    BrokerUnavailable,
    Corrupt,
    PenstockError,
    TransitionConflict,
    TransitionRefused,
)
from penstock.registry.package import ModelSpec
from penstock.registry.settings import Settings
from penstock.registry.signed import Signer
from penstock.registry.stack_file import with_broker

if TYPE_CHECKING:
    from penstock.compose.rollout.control_client import ControlClient

__all__ = ["Deployer", "Rollout", "Tuning"]

Tuning: TypeAlias = Literal["compile", "optimise", "measure", "trace"]
"""What workers can do with a loaded model on request; `measure` tries every form and uses none."""

_ACTIVATION_REPORT_S: Final = 3.0
"""Workers without jobs learn of an activation with their next report."""


class Rollout(NamedTuple):
    """The outcome of a promotion or a rollback. `prepared`: the workers that had the version in memory before the
    activation; `late`: those that did not report afterwards that they serve it; `activated_at`: unix seconds of the
    activation, None for a stage without one; `seconds`: the time until then."""

    transition: Transition
    prepared: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    activated_at: float | None = None
    seconds: float = 0.0


class Deployer:
    """Registers, promotes, rolls back, loads and unloads; `with Deployer.connect() as deployer: ...`

    registry: decides. fleet: the broker. states, control, sign: see LoadRequests. files: the packages; None: those of
    this machine. load_timeout_s: the limit of a load in a worker. sweep_s: how often workers read `states`. poll_s: how
    often their reports are read. on_progress: called with one line per step.
    """

    def __init__(
        self,
        registry: ModelRegistryClient,
        fleet: FleetEnd,
        *,
        states: StateStore | None = None,
        control: ControlClient | None = None,
        files: Files | None = None,
        sign: Signer | None = None,
        load_timeout_s: float = 300.0,
        sweep_s: float = 5.0,
        poll_s: float = 0.05,
        on_progress: ProgressCallback = lambda line: None,
    ) -> None:
        self.registry: Final = registry
        self.fleet: Final = fleet
        self.files: Final[Files] = files or LocalFiles()
        self._requests = LoadRequests(fleet, states, control, sign)
        self._sign = sign
        self._load_timeout_s = load_timeout_s
        self._preparation = Preparation(
            registry, fleet, self._requests, sweep_s=sweep_s, poll_s=poll_s, on_progress=on_progress
        )
        self._on_progress = on_progress
        self._exits = ExitStack()

    @classmethod
    def connect(
        cls,
        settings: Settings | None = None,
        *,
        via: str = "",
        approve: Veto | None = None,
        gate: Veto | None = None,
        on_progress: ProgressCallback = lambda line: None,
    ) -> Deployer:
        """With the broker, the registry and the operator's key of these settings, or of this process's environment.

        via: the name of a worker, or `any`: that worker reads and writes for this process, on signed commands over
        Celery's remote control, and this process connects to nothing but Celery's broker. approve: asked before every
        change of a stage; gate: asked before a promotion to production; each returns the reason of its veto, or None.
        Every change is recorded in the audit log of this machine before it is made. The operator's key is made at the
        first use. Raises ConfigurationError, and ModelNotReady when the worker does not listen.
        """
        settings = settings or Settings.load()
        if not (via and settings.celery_url):
            settings = with_broker(settings)
        with ExitStack() as exits:
            ends = connect_ends(settings, via, exits, approve=approve, gate=gate)
            deployer = cls(
                ends.registry,
                ends.fleet,
                states=ends.states,
                control=ends.control,
                files=ends.files,
                sign=ends.sign,
                load_timeout_s=settings.inference.load_timeout_s,
                sweep_s=settings.inference.state_reconcile_interval_s,
                poll_s=ends.poll_s,
                on_progress=on_progress,
            )
            deployer._exits = exits.pop_all()
        return deployer

    def __enter__(self) -> Deployer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections that `connect` opened."""
        self._exits.close()

    # Stages

    def register(self, path: Path, lineage: ModelLineage | None = None, *, reason: str = "") -> RegisteredVersion:
        """Register the package in a folder as a DRAFT, and publish its spec, so that jobs that name it are accepted.

        Jobs that name no version are accepted by this spec, too, while the model has no active version. Repeating the
        call changes nothing. Raises ConfigurationError for the package, and as ModelRegistryClient.register does;
        BrokerUnavailable when the version is registered but its spec is not published.
        """
        package = self.files.package(path)
        spec = package.spec
        after_epoch = 0
        with suppress(BrokerUnavailable, Corrupt):
            after_epoch = self._broker_epoch(spec.name)
        version = self.registry.register(package, lineage, reason=reason, after_epoch=after_epoch)
        try:
            self._publish_spec(version, spec)
        except BrokerUnavailable as error:
            raise BrokerUnavailable(
                f"{version.reference} is registered, in {version.stage}, but its jobs are not accepted yet: {error}. "
                "Expected the same command again, once the broker answers"
            ) from error
        return version

    def promote(
        self,
        name: str,
        version: str,
        to: ModelStage | str = ModelStage.PRODUCTION,
        *,
        reason: str = "",
        prepare: bool = True,
        timeout_s: float | None = None,
        completes: Experiment | None = None,
    ) -> Rollout:
        """Move a version to STAGING, or to PRODUCTION, where it is active from the next claim on.

        prepare: wait, for `timeout_s` or the limit of a load, until every live worker has it in memory. completes: see
        ModelRegistryClient.promote. Raises TransitionRefused when one cannot load it, with nothing changed; as
        ModelRegistryClient.promote does; and BrokerUnavailable.
        """
        stage = parse_stage(to)
        found = self.registry.find(name, version)
        if found.stage is ModelStage.PRODUCTION:
            self.sync(name)
        check_step(found.reference, TransitionAction.PROMOTE, found.stage, stage)
        if stage is not ModelStage.PRODUCTION:
            return Rollout(self.registry.promote(name, found.version, stage, reason=reason))
        self.registry.verify(name, found.version)
        return self._roll_out(
            found,
            lambda: self.registry.promote(name, found.version, stage, reason=reason, completes=completes),
            self._load_timeout_s if timeout_s is None else timeout_s,
            prepare=prepare,
        )

    def rollback(self, name: str, *, reason: str = "", prepare: bool = True, timeout_s: float | None = None) -> Rollout:
        """Restore the previous production version, prepared and activated like a promotion.

        Raises TransitionConflict when the previous version changed during the preparation, and as `promote` does.
        """
        productions = self.registry.history(name)[-1].productions
        if len(productions) < 2:
            raise TransitionRefused(f"{name} has no earlier production version to go back to. Expected a promotion")
        restored = self.registry.verify(name, productions[-2])
        return self._roll_out(
            restored,
            lambda: self.registry.rollback(name, restored.version, reason=reason),
            self._load_timeout_s if timeout_s is None else timeout_s,
            prepare=prepare,
        )

    def sync(self, name: str) -> RegisteredVersion:
        """Activate the version in production, after a crash between decision and activation.

        While an experiment is open, its arms share the jobs from then on. It writes the same record that the crash
        prevented, and never replaces another decision; for a new operator's key use `sign`. Raises UnknownModel without
        a version in production, and TransitionConflict when the broker has a later decision, or this one with another
        signature.
        """
        version = self.registry.find(name)
        self._activate(version, version.epoch)
        return version

    def sign(self, name: str, *, reason: str = "") -> Transition:
        """Sign all records of a model with this operator's key: registry, active version, stored load requests.

        For a key rotation, while workers and operators trust the old key and the new one. Also to continue with an
        older copy of the registry: its version in production is active afterwards. Raises as ModelRegistryClient.renew
        does, and BrokerUnavailable.
        """
        transition = self.registry.renew(name, reason=reason, after_epoch=self._broker_epoch(name))
        for version in self.registry.versions(name):
            if version.stage is ModelStage.PRODUCTION:
                self._activate(version, version.epoch)
            if self._requests.are_stored:
                self._requests.request(version, is_wanted=self._requests.is_wanted(version))
        return transition

    def _publish_spec(self, version: RegisteredVersion, spec: ModelSpec) -> None:
        self.fleet.put_spec(spec.name, spec.to_json(), spec.version)
        if not self.fleet.actives([spec.name])[spec.name] and not workers_of(self.fleet, spec.name):
            self.fleet.put_spec(spec.name, spec.to_json())
        if self._requests.are_stored and not self._requests.is_known(version):
            self._requests.request(version, is_wanted=False)

    def _roll_out(
        self, version: RegisteredVersion, decide: Callable[[], Transition], timeout_s: float, *, prepare: bool
    ) -> Rollout:
        begun = time.monotonic()
        self._check_epoch(version.name)
        with self._preparation.prepared(version, timeout_s) if prepare else nullcontext(()) as prepared:
            transition = decide()
        try:
            self._activate(version, transition.epoch)
        except BrokerUnavailable as error:
            raise BrokerUnavailable(
                f"{version.reference} is in production in the registry, but the old version is still active: {error}. "
                f"Expected `penstock models sync {version.name}`, once the broker answers"
            ) from error
        activated_at, seconds = time.time(), time.monotonic() - begun
        self._on_progress(f"{version.reference} is active from now on (epoch {transition.epoch})")
        with self._only_reported("older versions may still be in memory"):
            self._release_older(transition)
        late = prepared
        with self._only_reported("the workers could not be asked which version they serve"):
            late = self._late(version) if prepared else ()
        return Rollout(transition, prepared, late, activated_at, seconds)

    def _check_epoch(self, name: str) -> None:
        """Raises TransitionConflict when workers would ignore the next decision of this registry."""
        epoch, active_epoch = self.registry.history(name)[-1].epoch, self._broker_epoch(name)
        if active_epoch > epoch:
            raise TransitionConflict(
                f"The active version of {name} was decided in epoch {active_epoch}, and this registry is at epoch "
                f"{epoch}: it is another registry, or an older copy. Nothing was changed. Expected the registry of "
                f"that decision, or `penstock models sign {name}` to continue with this one"
            )

    def _broker_epoch(self, name: str) -> int:
        """The epoch of the active version; 0 before the first promotion. Raises Corrupt."""
        decision = active_deployment(self.fleet, name)
        return decision.epoch if decision else 0

    def _activate(self, version: RegisteredVersion, epoch: int) -> None:
        experiment = self.registry.experiment(version.name)
        policy = self.registry.policy(version.name)
        policies = policy.endpoints if policy is not None else {}
        routing = experiment.routing if experiment is not None else None
        if routing is not None and routing.kind == "rollout":
            candidate = self.registry.find(version.name, routing.arms[0].version)
            routing = msgspec.structs.replace(routing, shares=endpoint_shares(candidate, policies, routing))
        deployment = Deployment(epoch, version.name, version.version, version.content_hash, routing, policies)
        record = deployment.seal(self._sign)
        spec = ModelSpec.from_json(json.dumps(version.spec).encode()).to_json()
        if not self.fleet.activate(version.name, epoch, record, version.version, spec):
            raise TransitionConflict(
                f"{version.reference} is in production since epoch {epoch} of this registry, and the broker has "
                "another decision: a later one, or one of this epoch that another key signed. Expected a new "
                "decision in the registry of the latest one: a promotion of another version, or a rollback"
            )

    def _release_older(self, transition: Transition) -> None:
        """Workers unload versions that are neither active nor the target of a rollback."""
        kept = transition.productions[-2:]
        for version in self.registry.versions(transition.name):
            is_released = version.stage is ModelStage.ARCHIVED and version.version not in kept
            if is_released and self._requests.is_wanted(version):
                self._requests.request(version, is_wanted=False)

    def _late(self, version: RegisteredVersion) -> tuple[str, ...]:
        return tuple(self._preparation.watch(version.name, version.version).await_active(_ACTIVATION_REPORT_S))

    @contextmanager
    def _only_reported(self, consequence: str) -> Iterator[None]:
        """For steps after an activation: an error in the block is reported, and the rollout has succeeded."""
        try:
            yield
        except PenstockError as problem:
            self._on_progress(f"{consequence}: {problem}")

    # Policies

    def set_policy(
        self, name: str, endpoint: str, knobs: Mapping[str, Any] | None, *, reason: str = ""
    ) -> PolicyRecord:
        """Change knobs of an endpoint at run time; see ModelRegistryClient.set_policy. Workers follow with their next
        claim. Raises TransitionConflict, and BrokerUnavailable when the change is in the registry only.
        """
        self._check_epoch(name)
        record = self.registry.set_policy(name, endpoint, knobs, reason=reason)
        try:
            self.sync(name)
        except BrokerUnavailable as error:
            raise BrokerUnavailable(
                f"The policy is in the registry, but the earlier one of {name} is still in force: {error}. Expected "
                f"`penstock models sync {name}`, once the broker answers"
            ) from error
        return record

    # Memory

    def load(self, name: str, version: str, *, worker: str | None = None, timeout_s: float | None = None) -> list[str]:
        """Load a version in every live worker of the model, or in one; returns the workers that have it.

        Raises ModelNotReady with the problem of a worker, or when the time is over; ConfigurationError.
        """
        found = self.registry.find(name, version)
        watch = self._preparation.watch_workers(name, found.version, worker)
        self._requests.request(found, is_wanted=True, worker=worker)
        return watch.await_ready(found.content_hash, self._load_timeout_s if timeout_s is None else timeout_s)

    def unload(
        self, name: str, version: str, *, worker: str | None = None, timeout_s: float | None = None
    ) -> list[str]:
        """Unload a version, once it is idle, in every live worker of the model, or in one; returns the workers.

        Raises TransitionRefused for the active version, and as `load` does.
        """
        found = self.registry.find(name, version)
        watch = self._preparation.watch_workers(name, found.version, worker)
        if self._is_arm(found):
            raise TransitionRefused(
                f"{found.reference} is an arm of an open experiment. Expected its end first: `penstock rollout stop`, "
                "or `penstock ab stop`"
            )
        if found.stage is ModelStage.PRODUCTION or any(replica.is_active for replica in watch.current()):
            raise TransitionRefused(
                f"{found.reference} is the active version. Expected another version to be promoted first"
            )
        self._requests.request(found, is_wanted=False, worker=worker)
        return watch.await_gone(self._load_timeout_s if timeout_s is None else timeout_s)

    def is_wanted(self, version: RegisteredVersion) -> bool:
        """Whether workers were asked to load the version; see LoadRequests.is_wanted."""
        return self._requests.is_wanted(version)

    def release(self, version: RegisteredVersion) -> None:
        """Let workers unload a version that answers no jobs any more, without waiting for it."""
        if not self._is_arm(version) and version.stage is not ModelStage.PRODUCTION:
            with self._only_reported(f"{version.reference} may still be in memory"):
                self._requests.request(version, is_wanted=False)

    def _is_arm(self, version: RegisteredVersion) -> bool:
        experiment = self.registry.experiment(version.name)
        return experiment is not None and any(arm.version == version.version for arm in experiment.arms)

    def tune(
        self, name: str, action: Tuning = "compile", *, worker: str | None = None, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Compile, optimise, measure or trace a model now, in all its workers or in one, beside their traffic.

        Returns an entry of compose/views/levels.py per worker and version, with the outcome as its `answer`. Raises
        ModelNotReady when a worker refuses, or when the time is over.
        """
        serving = workers_of(self.fleet, name, only=worker)
        return await_answers(
            name,
            lambda: entries(self.fleet, name, serving),
            lambda: self._requests.send(Command(action, name), serving),
            self._load_timeout_s if timeout_s is None else timeout_s,
        )

    def clear_cache(self, name: str = "") -> list[str]:
        """Remove the cached answers of a model, or of all, in every live worker and its tiers; returns the workers.

        Raises ModelNotReady when a worker refuses or does not reply, ConfigurationError without an operator's key.
        """
        live = [json.loads(report)["name"] for report in self.fleet.workers()]
        serving = workers_of(self.fleet, name) if name else live
        self._requests.send(Command("clear_cache", name), serving)
        return serving
