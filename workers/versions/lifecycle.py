"""Which versions of which models a worker has, which of them answers, and what is loaded.

    claims bring a record -- follow --> the version that answers      operators -- want, let_go_of --> loads, unloads
    jobs that name a version -- meet, is_offered --> found under the models root, loaded at its first job

The I/O thread owns the shelf; `want`, `let_go_of`, `described` and `offered` are for any thread. The version that
answers is never unloaded for an operator, and where it is not to be had nothing of its model is claimed: no other
version answers in its place. Where operators sign and have promoted a version of a model, jobs have no other content
of it loaded than what these have promoted, asked for or registered: before, what lies under the models root decides.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from penstock.registry.broker.base import Broker
from penstock.registry.deployment import Deployment
from penstock.registry.errors import BrokerUnavailable, ConfigurationError, Corrupt, InvalidInput, UnknownModel
from penstock.registry.package import Package
from penstock.registry.settings import LATEST, InferenceConfig
from penstock.registry.signed import Verifier
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.versions.deployment_store import DeploymentStore, epoch_of
from penstock.workers.versions.loader import Loaded, Loader, excess_bytes, to_unload
from penstock.workers.versions.repository import ModelRepository
from penstock.workers.versions.tuner import Tuner
from penstock.workers.versions.version import ServedModel, ServedVersion, VersionState

__all__ = ["ModelLifecycle"]

logger = logging.getLogger("penstock.server")

_NOT_HERE: Final = {
    "state": "failed",
    "content_hash": "",
    "is_active": False,
    "is_offered": False,
    "memory_bytes": 0,
}
_UNLOADED: Final = (VersionState.COLD, VersionState.FAILED)
_IN_MEMORY: Final = (VersionState.READY, VersionState.LOADING)


class ModelLifecycle:
    """The models of one worker; it begins with `packages`, which answer until another version was promoted.

    verify: the operators' signatures on records; None: none are asked for. on_version_change: called with a model and
    the content hashes that answered it until now, empty for none, and from now on. ring: wakes the I/O thread.
    takes_any: whether operators may bring models that the worker was not started with. remembered: what this machine
    has obeyed before.
    """

    def __init__(
        self,
        config: InferenceConfig,
        packages: Sequence[Package],
        broker: Broker,
        loader: Loader,
        *,
        repository: ModelRepository,
        tuner: Tuner,
        metrics: InferenceMetrics,
        verify: Verifier | None,
        on_version_change: Callable[[str, str, str], None],
        ring: Callable[[], None],
        takes_any: bool,
        deployments: DeploymentStore,
    ) -> None:
        self.models: Final[dict[str, ServedModel]] = {}
        self.turns: Final[deque[ServedVersion]] = deque()
        """All versions of all models, in the order in which they may begin their next batch."""
        self.loader = loader
        self._config = config
        self._broker = broker
        self._repository = repository
        self._tuner = tuner
        self._metrics = metrics
        self._verify = verify
        self._on_version_change = on_version_change
        self._ring = ring
        self._takes_any = takes_any
        self._deployments = deployments
        self._kept: dict[str, bytes] = {}
        """By model, the decision that is remembered; empty for one that could not be written."""
        self._is_pinned = config.model_version != LATEST
        """Whether one version answers whatever is promoted."""
        self._requests: deque[Callable[[], None]] = deque()
        """What other threads ask of this one."""
        self._missing: dict[tuple[str, str], str] = {}
        """What operators want and is not to be found, and why."""
        self._is_over_memory = False
        """Whether what is loaded may be too much: looked into at the next turn."""
        self._wished: dict[tuple[str, str], str] = {}
        """By model and label, the content that operators asked for."""
        self._registered: dict[tuple[str, str], str] = {}
        """By model and label, the content that jobs may have loaded, on the disk or still to come."""
        self._unwanted: set[ServedVersion] = set()
        """To be unloaded once they are idle."""
        for package in packages:
            self._add_model(package)

    # For any thread

    def request_load(self, name: str, label: str, *, content_hash: str = "") -> None:
        """Load a version and keep it loaded; `described` tells how it went. content_hash: what it must hash to."""
        self.request(partial(self._load_requested, name, label, content_hash))

    def request_unload(self, name: str, label: str, *, content_hash: str = "") -> None:
        """Unload a version once it is idle, unless it is the one that answers. content_hash: what jobs that name it may
        have loaded all the same, where operators sign."""
        self.request(partial(self._unload_requested, name, label, content_hash))

    def request(self, request: Callable[[], None]) -> None:
        """Have something done on the I/O thread."""
        self._requests.append(request)
        self._ring()

    def may_serve(self, name: str) -> bool:
        """Whether the model is one of this worker's: it is served already, or the worker takes whatever comes."""
        return name in self.models or self._takes_any

    def claimable(self) -> list[str]:
        """The models whose answering version is to be had here."""
        return [name for name, model in tuple(self.models.items()) if model.is_claimable]

    def offered(self, name: str) -> dict[str, int]:
        """The versions of a model that jobs which name them may wait for here, by label, and how many more may."""
        return {
            label: version.room
            for label, version in tuple(self.models[name].versions.items())
            if version.room and self.is_offered(version)
        }

    def all_offered(self) -> dict[str, dict[str, int]]:
        """`offered` of every model."""
        return {name: self.offered(name) for name in tuple(self.models)}

    def poll_records(self) -> None:
        """Look for promotions: a worker that claims no jobs learns of them, too. Raises BrokerUnavailable."""
        for name, active in self._broker.actives(list(self.models)).items():
            if active != self.models[name].record:
                self.request(partial(self.on_record, name, active))

    def is_offered(self, version: ServedVersion) -> bool:
        """Whether jobs that name it are answered here: it is in memory or on its way, or may be loaded for them."""
        if version.state in _IN_MEMORY:
            return True
        return version.state is VersionState.COLD and self.may_be_loaded(version) and self._fits(version)

    def may_be_loaded(self, version: ServedVersion) -> bool:
        """Whether a job may have it loaded; see above for what operators sign."""
        model = self.models[version.name]
        is_decided = bool(model.record or model.decided) and not self._is_pinned
        return self._verify is None or not is_decided or version is model.active or version.is_approved

    def _fits(self, version: ServedVersion) -> bool:
        """Whether there is memory for it beside what answers or is wanted; the rest would go."""
        limit = self._config.model_memory_mb << 20
        active = [model.active for model in tuple(self.models.values())]
        staying = [each for each in tuple(self.turns) if each.is_ready and (each.is_wanted or each in active)]
        taken = sum(each.runtime.memory_bytes for each in staying)
        return not limit or taken + ((version.spec.memory_mb or 0) << 20) <= limit

    def remember(self) -> None:
        """Keeps what was decided for this machine's next start. For the thread that reports: it may have to wait."""
        for name, model in tuple(self.models.items()):
            decided, kept = model.decided, self._kept.get(name)
            if not decided or decided == kept:
                continue
            try:
                self._deployments.keep(name, decided)
            except BlockingIOError:
                # Another worker of this machine is at it.
                continue
            except OSError as error:
                if kept != b"":
                    logger.warning("a decision will be forgotten at the next start: %s", error, extra={"model": name})
                self._kept[name] = b""
            else:
                self._kept[name] = decided

    def described(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Model -> version label -> state, content hash, memory, problem, as plain data.

        A version that is wanted and is not under the models root is one that has failed.
        """
        described = {name: self._describe(model) for name, model in tuple(self.models.items())}
        for (name, label), problem in tuple(self._missing.items()):
            described.setdefault(name, {}).setdefault(label, {**_NOT_HERE, "problem": problem})
        for (name, label), content_hash in tuple(self._wished.items()):
            entry = described.get(name, {}).get(label)
            if entry is not None and content_hash and entry["content_hash"] not in ("", content_hash):
                entry["problem"] = "it was loaded with other content than was asked for"
        return described

    def _describe(self, model: ServedModel) -> dict[str, dict[str, Any]]:
        return {
            label: {
                "state": version.state.value,
                "content_hash": version.content_hash,
                "is_active": version is model.active,
                "is_offered": self.is_offered(version),
                "memory_bytes": version.runtime.memory_bytes,
                "problem": version.problem,
            }
            for label, version in tuple(model.versions.items())
        }

    # Life

    def open(self) -> None:
        """Loads the version of every model that answers, unless that is left to the first job, and announces specs.

        A model of which nothing can be loaded is tried again later, while the others are served. Raises
        ConfigurationError when the settings name the version that cannot be loaded, or when no model can be served;
        BrokerUnavailable.
        """
        for name, active in self._broker.actives(list(self.models)).items():
            self._follow_at_start(self.models[name], active)
        if self._config.preload:
            self._load_at_start()
        for version in self._answering():
            self._announce(version)
        self._broker.prepare(list(self.models))

    def close(self) -> None:
        """Unloads everything."""
        for version in [version for version in self.turns if version.is_ready]:
            self._unload(version)

    def run_requests(self) -> None:
        """Does what other threads have asked for."""
        while self._requests:
            # An order that the broker was away for is still there when it is back; any other error is its end.
            try:
                self._requests[0]()
            except BrokerUnavailable:
                raise
            except Exception:
                logger.exception("an order could not be followed")
            self._requests.popleft()
        if self._is_over_memory:
            self._give_memory_back()
        for version in [version for version in self._unwanted if self._may_go(version)]:
            self._unwanted.discard(version)
            if version.is_ready:
                self._unload(version)

    def _may_go(self, version: ServedVersion) -> bool:
        """Whether nothing needs it: one that is asked to go while it answers goes when another does, and one whose load
        is under way goes when that has ended."""
        is_loading = version.state is VersionState.LOADING
        return version.is_idle and not is_loading and self.models[version.name].active is not version

    def take_in_loaded(self) -> list[Loaded]:
        """The loads that have ended: what is ready may run from now on, and what is too much goes."""
        ended = self.loader.take_done()
        for loaded in ended:
            if not loaded.problem:
                self._has_loaded(loaded.version)
        return ended

    def load(self, version: ServedVersion) -> None:
        """Begins to load a version that was not loaded so far, or not again since it was unloaded."""
        if version.state is VersionState.COLD:
            self.loader.load(version)

    # Which version

    def follow(self, model: ServedModel, active: bytes) -> None:
        """The version that answers may have changed: from the claim that brought this record on, the new one does."""
        model.record = active
        if not active or self._is_pinned:
            return
        try:
            deployment = Deployment.open(active, model.name, self._verify)
        except Corrupt as error:
            logger.error("the active version is not believed: %s", error, extra={"model": model.name})
            self._metrics.quarantined(model.name)
            return
        if model.deployment is not None and deployment.epoch < model.deployment.epoch:
            logger.warning("an older decision came back", extra={"model": model.name, "epoch": deployment.epoch})
            return
        before = model.content_hash
        model.deployment, model.decided = deployment, active
        model.active = self._copy_of(model, deployment.version, deployment.content_hash)
        logger.info(
            "version changed",
            extra={"model": model.name, "version": deployment.version, "epoch": deployment.epoch},
        )
        if before != deployment.content_hash:
            self._on_version_change(model.name, before, deployment.content_hash)

    def _follow_at_start(self, model: ServedModel, active: bytes) -> None:
        """What the broker has, unless this machine has obeyed a later decision."""
        last = self._deployments.last(model.name)
        if last != active:
            self.follow(model, last)
        self.follow(model, active)
        if last and model.decided == last != active:
            logger.error(
                "the broker has an older decision than this machine has obeyed, or none: the later one goes on. "
                "Expected a new decision, or `penstock models sync`; to begin anew, another operator's key, or no such "
                "file in deployments/ under PENSTOCK_HOME",
                extra={"model": model.name, "epoch": epoch_of(last)},
            )
        if active and model.deployment is None and not self._is_pinned:
            # Something was promoted, and nobody here knows what: the highest version on disk may be a draft.
            model.active = None

    def on_record(self, name: str, active: bytes) -> None:
        """A record that no claim has brought: the model is idle, and has time to load what answers from now on."""
        model = self.models[name]
        if active != model.record:
            self.follow(model, active)
        answering = model.active
        if answering is not None and self._config.preload:
            self.load(answering)

    def try_again(self) -> None:
        """Versions that should answer and are not to be had here: they may have come, or load this time."""
        for model in [model for model in self.models.values() if not model.is_claimable]:
            if (deployment := model.deployment) is not None:
                model.active = self._copy_of(model, deployment.version, deployment.content_hash)
            elif (found := self._reread(model, former := model.active)) is not None and found is not former:
                self._announce(found)
            if (version := model.active) is not None and version.state in _UNLOADED:
                self.loader.load(version)

    def named(self, name: str, wanted: str) -> ServedVersion | None:
        """The version of a model that a job calls `wanted`: met already, or lying under the models root."""
        model = self.models[name]
        return model.named(wanted) or self.resolve(model, wanted)

    def resolve(self, model: ServedModel, label: str) -> ServedVersion | None:
        """A version of this label, loaded or not, if it lies under the models root."""
        if (version := model.versions.get(label)) is not None:
            return version
        version = self._find(model.name, label)
        if version is None:
            return None
        rows = max((known.calibrated_rows for known in model.versions.values()), default=0)
        if rows and version.policy.is_sized_by_memory:
            # To measure again would take the memory that the serving version works in.
            version.calibrated_rows = rows
            version.queue.resize(rows)
        if content_hash := self._registered.get((model.name, label)):
            version.pin_content(content_hash)
        model.versions[label] = version
        self.turns.append(version)
        return version

    def _copy_of(self, model: ServedModel, label: str, content_hash: str) -> ServedVersion | None:
        """The version, with this content and no other; None while it is not to be had here."""
        version = self._reread(model, self.resolve(model, label))
        if version is None or not content_hash:
            return version
        if version.content_hash == content_hash:
            version.pin_content(content_hash)
            return version
        if version.is_ready:
            # The files may have been made right since it was loaded.
            if not version.is_idle:
                logger.error(
                    "the copy that is loaded is not the one that was promoted",
                    extra={"model": model.name, "version": label, "content_hash": version.content_hash},
                )
                return None
            self._unload(version)
        version.pin_content(content_hash)
        return version

    # Into memory and out of it

    def _give_memory_back(self) -> None:
        """Unloads what is too much, now or once it is idle."""
        if excess := excess_bytes(self.turns, self._config.model_memory_mb):
            for version in to_unload(self.turns, excess, self._answering()):
                self._unload(version)
        self._is_over_memory = bool(excess_bytes(self.turns, self._config.model_memory_mb))

    def _add_model(self, package: Package) -> ServedModel:
        version = ServedVersion(package, self._config)
        model = self.models[package.spec.name] = ServedModel(package.spec.name, version)
        self.turns.append(version)
        return model

    def _find(self, name: str, label: str) -> ServedVersion | None:
        """A version as it lies under the models root now."""
        try:
            return ServedVersion(self._repository.package(name, label), self._config)
        except (ConfigurationError, InvalidInput, UnknownModel) as error:
            # Jobs may name any version, so this is for those who look closely.
            logger.debug("version not found: %s", error, extra={"model": name, "version": label[:80]})
            return None

    def _why_missing(self, name: str, label: str) -> str:
        """What is wrong with a version that an operator asks for and that is not to be had here, in one line."""
        try:
            self._repository.package(name, label)
        except (ConfigurationError, InvalidInput, UnknownModel) as error:
            return str(error)
        return f"{name}/{label} is not under this worker's models root with the content that was asked for"

    def _reread(self, model: ServedModel, version: ServedVersion | None) -> ServedVersion | None:
        """The version as its package says now, where nothing of it is in memory yet."""
        if version is None or version.state not in _UNLOADED or not version.is_idle or version.queue.in_memory:
            return version
        found = self._find(model.name, version.label)
        if found is None or found.package.spec == version.package.spec:
            return version
        found.is_wanted = version.is_wanted
        model.versions[version.label] = found
        self.turns[self.turns.index(version)] = found
        if model.active is version:
            model.active = found
        return found

    def _load_requested(self, name: str, label: str, content_hash: str) -> None:
        model = self.models.get(name) or self._bring(name, label)
        if model is not None and model.label == label:
            # What answers is for promotions to change; `described` tells of any difference.
            version: ServedVersion | None = model.active
        else:
            version = self._copy_of(model, label, content_hash) if model is not None else None
        # Not before: a copy with other content has just been unloaded.
        self._wished[name, label] = content_hash
        if version is None:
            problem = self._missing[name, label] = self._why_missing(name, label)
            logger.error("version not found: %s", problem, extra={"model": name[:80], "version": label[:80]})
            return
        self._missing.pop((name, label), None)
        version.is_wanted = True
        self._unwanted.discard(version)
        if version.state in _UNLOADED:
            self.loader.load(version)

    def _bring(self, name: str, label: str) -> ServedModel | None:
        """A model that came under the models root after this worker's start."""
        try:
            package = self._repository.package(name, label)
        except (ConfigurationError, InvalidInput, UnknownModel) as error:
            logger.error("model not loaded: %s", error, extra={"model": name[:80], "version": label[:80]})
            return None
        self._broker.prepare([name])
        active = self._broker.actives([name])[name]
        model = self._add_model(package)
        self._follow_at_start(model, active)
        if model.active is not None:
            self._announce(model.active)
        return model

    def _unload_requested(self, name: str, label: str, content_hash: str) -> None:
        self._missing.pop((name, label), None)
        self._wished.pop((name, label), None)
        is_registered = bool(content_hash) and self._verify is not None
        if is_registered:
            self._registered[name, label] = content_hash
        model = self.models.get(name)
        version = model.versions.get(label) if model is not None else None
        if model is None or version is None:
            return
        version.is_wanted = False
        if version is not model.active and (is_registered or version.state is VersionState.FAILED):
            # Whoever names it next may have what was registered, or else what is there then.
            version.pin_content(content_hash if is_registered else "")
        self._unwanted.add(version)

    def _load_at_start(self) -> None:
        problems = []
        for model in [model for model in self.models.values() if model.active is not None]:
            # A promoted version that has gone bad here may come right, and no other answers in its place.
            if (problem := self._load_first_of(model)) and model.deployment is None:
                problems.append(problem)
        if problems and (self._is_pinned or not any(version.is_ready for version in self._answering())):
            raise ConfigurationError(problems[0])

    def _load_first_of(self, model: ServedModel) -> str:
        """Loads the version that answers, or why that failed; where only the disk says which, the next lower that loads
        answers in its place."""
        highest, problem = model.active, ""
        candidates = [highest.label, *self._lower_labels(model)] if highest is not None else []
        for label in candidates:
            version = self.resolve(model, label)
            if version is None:
                continue
            try:
                self.loader.load_now(version)
            except ConfigurationError as error:
                problem = problem or str(error)
                continue
            if version is not highest:
                logger.error("version passed over: %s", problem, extra={"model": model.name, "answers": label})
            model.active = version
            self._has_loaded(version)
            return ""
        return problem

    def _lower_labels(self, model: ServedModel) -> list[str]:
        """The versions to try in the place of the one that answers, the highest first; none if somebody decided."""
        if self._is_pinned or model.deployment is not None:
            return []
        labels = self._repository.labels(model.name)
        return labels[: labels.index(model.label)][::-1] if model.label in labels else []

    def _answering(self) -> list[ServedVersion]:
        return [model.active for model in self.models.values() if model.active is not None]

    def _has_loaded(self, version: ServedVersion) -> None:
        self._metrics.loaded(version.name, version.label, True)
        version.observer = self._tuner.attach(
            version, version.runtime, version.content_hash, version.queue.limits.max_rows
        )
        self._is_over_memory = True

    def _unload(self, version: ServedVersion) -> None:
        """Lets go of an idle version's memory; the next job for it loads it again."""
        self._tuner.detach(version)
        version.unload()
        if content_hash := self._registered.get((version.name, version.label)):
            # Also where it was registered while it answered: jobs may name it later.
            version.pin_content(content_hash)
        self._metrics.loaded(version.name, version.label, False)
        logger.info("model unloaded", extra={"model": version.name, "version": version.label})

    def _announce(self, version: ServedVersion) -> None:
        """Clients check jobs against specs: that of the version that answers, and those of the ones they may name."""
        model = self.models[version.name]
        self._broker.put_spec(version.name, version.spec.to_json())
        for label in self._repository.labels(version.name):
            if (other := self.resolve(model, label)) is not None:
                self._broker.put_spec(other.name, other.spec.to_json(), label)
