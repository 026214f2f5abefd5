"""Which version of a model answers, changed while jobs flow: prepared everywhere, decided once, flipped in one write.

    promote, rollback -> PREPARE  a wish for the version, until every live worker of the model has it in memory
                      -> DECIDE   one transaction of the registry, which gives the decision its epoch
                      -> FLIP     one write in the broker: jobs claimed from then on are answered by the new version

A worker that cannot load the version stops all of it before anything has changed. A crash between the last two steps
leaves the old version answering: `sync`, or the next decision, makes up for it. After the flip nothing fails any more:
what is left to do then, and could not be done, is told.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from penstock.compose.rollout.files import Files, LocalFiles
from penstock.compose.rollout.keys import OperatorKeys, operator_keys
from penstock.compose.rollout.replicas import ProgressCallback, Watch, replicas
from penstock.compose.views.levels import await_answers, entries
from penstock.registry.broker.base import FleetEnd
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.catalog import ModelRegistryClient, Veto
from penstock.registry.catalog.lineage import ModelLineage
from penstock.registry.catalog.stages import ModelStage, TransitionAction, check_step, parse_stage
from penstock.registry.catalog.tables import RegisteredVersion, Transition
from penstock.registry.control import Command
from penstock.registry.deployment import Deployment
from penstock.registry.desired_state import DesiredVersion, StateStore
from penstock.registry.errors import (
    BrokerUnavailable,
    ConfigurationError,
    Corrupt,
    ModelNotReady,
    PenstockError,
    RegistryUnavailable,
    TransitionConflict,
    TransitionRefused,
)
from penstock.registry.package import ModelSpec
from penstock.registry.settings import Settings
from penstock.registry.signed import Signer
from penstock.registry.stack_file import with_broker
from penstock.safety.audit import AuditLog

if TYPE_CHECKING:
    from penstock.compose.rollout.control_client import ControlClient
    from penstock.registry.catalog.store import RegistryStore

__all__ = ["Deployer", "Rollout", "Tuning", "deployed", "open_registry"]

Tuning: TypeAlias = Literal["compile", "optimise", "measure", "trace"]
"""What workers do with a loaded model when they are asked; `measure` tries every form and uses none."""

_FAR_POLL_S: Final = 0.5
"""Through a worker each look at the reports is a round through Celery's broker."""
_FOLLOW_S: Final = 3.0
"""Workers without jobs hear of a flip with their next report."""


class Rollout(NamedTuple):
    """How a promotion or a rollback went. `prepared`: the workers that had the version in memory before the flip;
    `late`: those that had not said afterwards that they answer with it; `flipped_at`: unix seconds when the new
    version answered, None for a stage in which none does; `seconds`: how long it took until then."""

    transition: Transition
    prepared: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    flipped_at: float | None = None
    seconds: float = 0.0


class Deployer:
    """Registers, promotes, rolls back, loads and unloads; `with Deployer.connect() as deployer: ...`

    registry: decides. fleet: the broker. states: where workers look for what they are to load; None: `orders` tell
    each of them. files: where the packages lie; None: on this machine. sign: the operator's signature. load_timeout_s:
    how long workers may take to load. sweep_s: how often they look. poll_s: how often their reports are
    looked at. tell: hears, line by line, how things go on.
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
        tell: ProgressCallback = lambda line: None,
    ) -> None:
        self.registry: Final = registry
        self.fleet: Final = fleet
        self.files: Final[Files] = files or LocalFiles()
        self._states = states
        self._control = control
        self._sign = sign
        self._load_timeout_s = load_timeout_s
        self._sweep_s = sweep_s
        self._poll_s = poll_s
        self._tell = tell
        self._exits = ExitStack()

    @classmethod
    def connect(
        cls,
        settings: Settings | None = None,
        *,
        via: str = "",
        approve: Veto | None = None,
        gate: Veto | None = None,
        tell: ProgressCallback = lambda line: None,
    ) -> Deployer:
        """With the broker, the registry and the operator's key of these settings, or of this process's environment.

        via: the name of a worker, or `any`: everything goes through it, by signed orders over Celery's remote control,
        and this process connects to nothing but Celery's broker. approve: asked before every change of a stage, gate:
        before a promotion to production; what either says is why it may not be. Every change is recorded in this
        machine's audit log before it is made. Makes the key at the first use. Raises ConfigurationError, and
        ModelNotReady when no such worker listens.
        """
        # Celery takes a third of a second, which those who only look need not wait for.
        from penstock.compose.rollout.control_client import ControlClient
        from penstock.compose.rollout.remote import Remote, RemoteFleet, RemoteLedger

        settings = settings or Settings.load()
        if not (via and settings.celery_url):
            settings = with_broker(settings)
        keys = operator_keys(settings, for_changes=True)
        with ExitStack() as exits:
            control = ControlClient(settings, keys.sign) if keys.sign else None
            if control is not None:
                exits.callback(control.close)
            where: dict[str, Any]
            if via:
                remote = Remote(_needed(control), via)
                registry = _registry(
                    settings, keys, RemoteLedger(remote), rehash=remote.rehash, approve=approve, gate=gate
                )
                where = {"fleet": RemoteFleet(remote), "files": remote, "poll_s": _FAR_POLL_S}
            else:
                broker = RedisStreams.from_url(settings.redis_url or "")
                exits.callback(broker.close)
                states = _state_store(settings)
                if states is not None:
                    exits.callback(states.close)
                registry = _registry(settings, keys, approve=approve, gate=gate)
                where = {"fleet": broker, "states": states}
            deployer = cls(
                registry,
                **where,
                control=control,
                sign=keys.sign,
                load_timeout_s=settings.inference.load_timeout_s,
                sweep_s=settings.inference.state_reconcile_interval_s,
                tell=tell,
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
        """Give back the connections that `connect` made."""
        self._exits.close()

    # Stages

    def register(self, path: Path, lineage: ModelLineage | None = None, *, reason: str = "") -> RegisteredVersion:
        """Makes the package in a folder a DRAFT, and known to the broker, so that jobs that name it are accepted.

        Where nothing answers for the model yet, jobs that name no version are accepted by its spec, too. Repeating it
        changes nothing. Raises ConfigurationError for the package, and as ModelRegistryClient.register does;
        BrokerUnavailable when the version is registered but the broker did not hear of it.
        """
        package = self.files.package(path)
        spec = package.spec
        after_epoch = 0
        with suppress(BrokerUnavailable, Corrupt):
            after_epoch = self._followed_epoch(spec.name)
        version = self.registry.register(package, lineage, reason=reason, after_epoch=after_epoch)
        try:
            self.fleet.put_spec(spec.name, spec.to_json(), spec.version)
            if not self._is_answered(spec.name):
                self.fleet.put_spec(spec.name, spec.to_json())
            if self._states is not None and not self._is_known(version):
                self._ask(version, is_wanted=False)
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
    ) -> Rollout:
        """Takes a version to STAGING, or to PRODUCTION, where it answers from the next claim on.

        prepare: wait, for `timeout_s` or the limit of a load, until every live worker has it in memory. Raises
        TransitionRefused when one cannot load it, with nothing changed; as ModelRegistryClient.promote does; and
        BrokerUnavailable.
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
            lambda: self.registry.promote(name, found.version, stage, reason=reason),
            self._load_timeout_s if timeout_s is None else timeout_s,
            prepare=prepare,
        )

    def rollback(self, name: str, *, reason: str = "", prepare: bool = True, timeout_s: float | None = None) -> Rollout:
        """Restores the version that was in production before, prepared and flipped like a promotion.

        Raises TransitionConflict when that is another one once the workers have it, and as `promote` does.
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
        """Makes the version in production the one that answers, where a crash has left the broker behind.

        It writes the decision of that time again, to the letter, and never over another one: for a change of the
        operator's key there is `sign`. Raises UnknownModel without one in production, and
        TransitionConflict when the broker follows a later decision, or this one with another signature.
        """
        version = self.registry.find(name)
        self._flip(version, version.epoch)
        return version

    def sign(self, name: str, *, reason: str = "") -> Transition:
        """Signs all that the registry has of a model, and the decision that workers follow, with this operator's key.

        For a change of keys: while workers and operators believe the old key and the new one. And for an older copy of
        the registry, which its operator wants to go on with: its version in production answers afterwards. Raises as
        ModelRegistryClient.renew does, and BrokerUnavailable.
        """
        transition = self.registry.renew(name, reason=reason, after_epoch=self._followed_epoch(name))
        for version in self.registry.versions(name):
            if version.stage is ModelStage.PRODUCTION:
                self._flip(version, version.epoch)
            if self._states is not None:
                self._ask(version, is_wanted=self._is_wanted(version))
        return transition

    def _roll_out(
        self, version: RegisteredVersion, decide: Callable[[], Transition], timeout_s: float, *, prepare: bool
    ) -> Rollout:
        begun = time.monotonic()
        self._check_followed(version.name)
        with self._prepared(version, timeout_s) if prepare else nullcontext(()) as prepared:
            transition = decide()
        try:
            self._flip(version, transition.epoch)
        except BrokerUnavailable as error:
            raise BrokerUnavailable(
                f"{version.reference} is in production in the registry, but the old version still answers: {error}. "
                f"Expected `penstock models sync {version.name}`, once the broker answers"
            ) from error
        flipped_at, seconds = time.time(), time.monotonic() - begun
        self._tell(f"{version.reference} answers from now on (epoch {transition.epoch})")
        with self._at_most_told("older versions may still be in memory"):
            self._release_older(transition)
        late = prepared
        with self._at_most_told("its workers could not be asked whether they follow"):
            late = self._late(version) if prepared else ()
        return Rollout(transition, prepared, late, flipped_at, seconds)

    def _check_followed(self, name: str) -> None:
        """Raises TransitionConflict where the next decision of this registry would not be followed."""
        epoch, followed = self.registry.history(name)[-1].epoch, self._followed_epoch(name)
        if followed > epoch:
            raise TransitionConflict(
                f"Workers follow a decision about {name} of epoch {followed}, this registry is at epoch {epoch}: it is "
                "another one, or an older copy. Nothing was changed. Expected the registry of that decision, or "
                f"`penstock models sign {name}`, to go on with this one"
            )

    def _followed_epoch(self, name: str) -> int:
        """The epoch of the decision that workers follow; 0 before the first one. Raises Corrupt."""
        decision = deployed(self.fleet, name)
        return decision.epoch if decision else 0

    @contextmanager
    def _prepared(self, version: RegisteredVersion, timeout_s: float) -> Iterator[tuple[str, ...]]:
        """The block begins when every live worker has the version in memory; an exception takes the wish back.

        A wish that was there before is somebody else's, and stays.
        """
        watch = self._watch(version.name, version.version)
        if not watch.look():
            self._tell(f"no live worker serves {version.name}: nothing to prepare")
        was_wanted = self._is_wanted(version)
        try:
            yield self._prepare(watch, version, timeout_s)
        except BaseException:
            if not was_wanted:
                self._take_back(version)
            raise

    def _prepare(self, watch: Watch, version: RegisteredVersion, timeout_s: float) -> tuple[str, ...]:
        try:
            self._ask(version, is_wanted=True)
            return tuple(watch.await_ready(version.content_hash, timeout_s))
        except ModelNotReady as problem:
            raise TransitionRefused(f"{version.reference} stays in {version.stage}. {problem}") from None

    def _flip(self, version: RegisteredVersion, epoch: int) -> None:
        record = Deployment(epoch, version.name, version.version, version.content_hash).seal(self._sign)
        spec = ModelSpec.from_json(json.dumps(version.spec).encode()).to_json()
        if not self.fleet.activate(version.name, epoch, record, version.version, spec):
            raise TransitionConflict(
                f"{version.reference} is in production since epoch {epoch} of this registry, and the broker follows "
                "another decision: a later one, or that of this epoch as another key has signed it. Expected a new "
                "decision, made in the registry of the latest one: another version promoted, or a rollback"
            )

    def _release_older(self, transition: Transition) -> None:
        """Workers need not keep what neither answers nor would be restored by a rollback."""
        kept = transition.productions[-2:]
        for version in self.registry.versions(transition.name):
            if version.stage is ModelStage.ARCHIVED and version.version not in kept and self._is_wanted(version):
                self._ask(version, is_wanted=False)

    def _late(self, version: RegisteredVersion) -> tuple[str, ...]:
        return tuple(self._watch(version.name, version.version).await_active(_FOLLOW_S))

    @contextmanager
    def _at_most_told(self, what: str) -> Iterator[None]:
        """For what comes after a flip: its failure is no failure of the rollout."""
        try:
            yield
        except PenstockError as problem:
            self._tell(f"{what}: {problem}")

    # Memory

    def load(self, name: str, version: str, *, worker: str | None = None, timeout_s: float | None = None) -> list[str]:
        """Has a version loaded by every live worker of the model, or by one; returns which have it.

        Raises ModelNotReady with a worker's problem, or when the time is over; ConfigurationError.
        """
        found = self.registry.find(name, version)
        watch = self._watch(name, found.version, only=worker)
        self._need_one(watch, name, worker)
        self._ask(found, is_wanted=True, worker=worker)
        return watch.await_ready(found.content_hash, self._load_timeout_s if timeout_s is None else timeout_s)

    def unload(
        self, name: str, version: str, *, worker: str | None = None, timeout_s: float | None = None
    ) -> list[str]:
        """Has a version unloaded, once it is idle, by every live worker of the model, or by one; returns which.

        Raises TransitionRefused for the version that answers, and as `load` does.
        """
        found = self.registry.find(name, version)
        watch = self._watch(name, found.version, only=worker)
        self._need_one(watch, name, worker)
        if found.stage is ModelStage.PRODUCTION or any(replica.is_active for replica in watch.look()):
            raise TransitionRefused(f"{found.reference} answers jobs. Expected another version to be promoted first")
        self._ask(found, is_wanted=False, worker=worker)
        return watch.await_gone(self._load_timeout_s if timeout_s is None else timeout_s)

    def tune(
        self, name: str, action: Tuning = "compile", *, worker: str | None = None, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Has the workers of a model, or one, compile, optimise, measure or trace it now, beside their traffic.

        Returns an entry of compose/views/levels.py per worker and version, with what came of it as its `answer`. Raises
        ModelNotReady when a worker refuses, or when the time is over.
        """
        serving = self._workers_of(name, worker)
        return await_answers(
            name,
            lambda: entries(self.fleet, name, serving),
            lambda: self._command(Command(action, name), serving),
            self._load_timeout_s if timeout_s is None else timeout_s,
        )

    def _ask(self, version: RegisteredVersion, *, is_wanted: bool, worker: str | None = None) -> None:
        if worker is None and self._states is not None:
            # Also of one that is let go of: jobs may name what is registered, and workers know its content by this.
            desired_version = DesiredVersion(
                version.name, version.version, is_wanted, version.content_hash, time.time()
            )
            self._states.put(desired_version, self._sign)
            self._nudge(version.name)
            return
        action: Literal["load", "unload"] = "load" if is_wanted else "unload"
        command = Command(action, version.name, version.version, version.content_hash)
        self._command(command, self._workers_of(version.name, worker))

    def _take_back(self, version: RegisteredVersion) -> None:
        """Takes the wish for a version back, unless it answers: somebody else may have promoted it meanwhile."""
        # Of two problems the first one counts.
        with suppress(BrokerUnavailable, RegistryUnavailable, ConfigurationError, ModelNotReady):
            if self.registry.find(version.name, version.version).stage is not ModelStage.PRODUCTION and not any(
                replica.is_active and replica.content_hash == version.content_hash
                for replica in replicas(self.fleet, version.name, version.version)
            ):
                self._ask(version, is_wanted=False)

    def _is_wanted(self, version: RegisteredVersion) -> bool:
        if self._states is None:
            return any(replica.state == "ready" for replica in self._watch(version.name, version.version).look())
        record = self._states.desired().get(version.reference)
        try:
            return record is not None and DesiredVersion.open(record, None).is_wanted
        except Corrupt:
            return False

    def _is_known(self, version: RegisteredVersion) -> bool:
        """Whether workers have been told of this content, wanted or not."""
        record = self._states.desired().get(version.reference) if self._states is not None else None
        try:
            return record is not None and DesiredVersion.open(record, None).content_hash == version.content_hash
        except Corrupt:
            return False

    def _nudge(self, name: str) -> None:
        """Workers look by themselves every few seconds; those that obey commands look at once."""
        workers = self._workers_of(name, None)
        if self._control is not None and workers:
            with suppress(BrokerUnavailable):
                self._control.notify(Command("reconcile"), workers)

    def _command(self, command: Command, workers: list[str]) -> None:
        refusals = _needed(self._control).give(command, workers) if workers else {}
        for worker, problem in refusals.items():
            raise ModelNotReady(f"{worker}: {problem}")

    def _watch(self, name: str, label: str, *, only: str | None = None) -> Watch:
        return Watch(self.fleet, name, label, sweep_s=self._sweep_s, tell=self._tell, only=only, poll_s=self._poll_s)

    def _need_one(self, watch: Watch, name: str, worker: str | None) -> None:
        if not watch.look():
            who = "No live worker" if worker is None else f"{worker[:80]!r} is no live worker that"
            serving = ", ".join(self._workers_of(name, None)) or "there is none"
            raise ModelNotReady(f"{who} serves {name}. Expected one of: {serving}")

    def _workers_of(self, name: str, only: str | None) -> list[str]:
        found = [replica.worker for replica in replicas(self.fleet, name, "")]
        return [worker for worker in found if only in (None, worker)]

    def _is_answered(self, name: str) -> bool:
        return bool(self.fleet.actives([name])[name]) or bool(self._workers_of(name, None))


def open_registry(settings: Settings, keys: OperatorKeys) -> ModelRegistryClient:
    """The registry of these settings, in the name of whoever runs this process; changes are recorded beforehand."""
    return _registry(settings, keys)


def _registry(
    settings: Settings, keys: OperatorKeys, store: RegistryStore | None = None, **options: Any
) -> ModelRegistryClient:
    return ModelRegistryClient(
        store or settings.registry_url,
        sign=keys.sign,
        verify=keys.verify,
        actor=_actor(),
        audit=_auditor(settings),
        **options,
    )


def _auditor(settings: Settings) -> Callable[[Transition], None] | None:
    """Records a change before it is made, or raises ConfigurationError: what cannot be recorded is not done."""
    privacy = settings.inference.privacy

    def record(transition: Transition) -> None:
        try:
            AuditLog(privacy.audit_log_path, "models").record("transition", transition.as_data())
        except OSError as error:
            raise ConfigurationError(
                f"The audit log cannot be written ({error.strerror}), and nothing was changed. Expected room for it"
            ) from None

    return record if privacy.audit_log_enabled else None


def _needed(control: ControlClient | None) -> ControlClient:
    if control is None:
        raise ConfigurationError("Control commands are signed. Expected an operator's key, see `penstock doctor`")
    return control


def _state_store(settings: Settings) -> StateStore | None:
    """Where workers look for what they are to load; None where the settings say that each keeps its own state."""
    inference = settings.inference
    if not inference.state_reconcile_enabled:
        return None
    return StateStore.from_url(inference.state_redis_url or settings.redis_url or "", inference.state_prefix)


def deployed(fleet: FleetEnd, name: str) -> Deployment | None:
    """What the broker hands to workers as the decision about a model; None before the first one.

    Raises Corrupt for what is no such record; signatures are for workers to check.
    """
    active = fleet.actives([name])[name]
    return Deployment.open(active, name) if active else None


def _actor() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container's user need not have a name.
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
