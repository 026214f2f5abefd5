"""Loads and unloads the versions of a worker's models, for jobs, for operators and within the memory limit.

    deliveries bring a record -- follow --> the version that is active from now on
    jobs that name a version -- named, is_offered --> found under the models root, loaded at its first job
    operators -- request_load, request_unload --> the I/O thread carries the requests out in run_requests

The active version is never unloaded on request. While it cannot be loaded here, this worker claims no jobs of the
model; another version never takes its place. What a job may have loaded: see versions/active.py.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from penstock.registry.broker.base import Broker
from penstock.registry.broker.breakers import CANDIDATE
from penstock.registry.deployment import Deployment
from penstock.registry.errors import BrokerUnavailable, ConfigurationError, InvalidInput, UnknownModel
from penstock.registry.package import Package
from penstock.registry.settings_sections import LATEST, InferenceConfig
from penstock.registry.signed import Verifier
from penstock.safety.orchestrator import SafetyOrchestrator
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.versions.active import ActiveVersions
from penstock.workers.versions.announcements import Announcements
from penstock.workers.versions.deployment_store import DeploymentStore
from penstock.workers.versions.loader import Loaded, Loader
from penstock.workers.versions.memory_limit import MemoryLimit
from penstock.workers.versions.offers import RequestedVersions, VersionOffers
from penstock.workers.versions.policy_swaps import PolicySwaps
from penstock.workers.versions.repository import ModelRepository
from penstock.workers.versions.table import UNLOADED, VersionTable
from penstock.workers.versions.tuner import Tuner
from penstock.workers.versions.version import ServedArms, ServedModel, ServedVersion, VersionState

__all__ = ["ModelLifecycle"]

logger = logging.getLogger("penstock.server")


class ModelLifecycle:
    """The models of one worker. The I/O thread owns it, except the methods "For any thread".

    packages: the active versions until another version is promoted. verify: checks the operators' signatures on
    records; None: no signatures are required. on_version_change: called with a model, the content hash that was active
    until now (empty: none) and the one that is active from now on. ring: wakes the I/O thread. accepts_new_models:
    whether operators may add models that the worker was not started with. deployments: the decisions that this machine
    has followed. admits_arm: whether jobs may come to a version of a model as an arm of an experiment. gate: see
    ServedVersion.
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
        accepts_new_models: bool,
        deployments: DeploymentStore,
        admits_arm: Callable[[str, str], bool] = lambda name, label: True,
        gate: SafetyOrchestrator | None = None,
    ) -> None:
        self.table: Final = VersionTable(config, repository, packages, gate)
        self.models: Final = self.table.models
        self.turns: Final = self.table.turns
        self.loader = loader
        self._active = ActiveVersions(deployments, verify, metrics, is_pinned=config.model_version != LATEST)
        self._memory = MemoryLimit(config.model_memory_mb, self.table)
        self._preloads = config.preload
        self._broker = broker
        self._tuner = tuner
        self._metrics = metrics
        self._on_version_change = on_version_change
        self._ring = ring
        self._admits_arm = admits_arm
        self._accepts_new_models = accepts_new_models
        self._requests: deque[Callable[[], None]] = deque()
        """Requests of other threads to this one."""
        self._may_exceed_memory = False
        """Whether the loaded versions may exceed the memory limit: checked at the next turn."""
        self._requested = RequestedVersions()
        self.offers: Final = VersionOffers(self.table, self._active, self._memory, self._requested)
        self.announcements: Final = Announcements(broker, self.table)
        self._to_unload: set[ServedVersion] = set()
        """Versions that are unloaded once they are idle."""
        self._swaps = PolicySwaps(config, self.table, loader)

    # For any thread

    def request_load(self, name: str, label: str, *, content_hash: str = "") -> None:
        """Load a version and keep it loaded; `described` shows the result. content_hash: the only content to load."""
        self.request(partial(self._load_requested, name, label, content_hash))

    def request_unload(self, name: str, label: str, *, content_hash: str = "") -> None:
        """Unload a version once it is idle and not active.

        content_hash: the registered content. If signatures are required, jobs that name the version may still load it.
        """
        self.request(partial(self._unload_requested, name, label, content_hash))

    def request(self, request: Callable[[], None]) -> None:
        """Call `request` on the I/O thread."""
        self._requests.append(request)
        self._ring()

    def may_serve(self, name: str) -> bool:
        """Whether this worker serves the model, or accepts new models."""
        return name in self.models or self._accepts_new_models

    def poll_records(self) -> None:
        """Look for promotions, because an idle worker gets no deliveries. Raises BrokerUnavailable."""
        for name, record in self._broker.actives(list(self.models)).items():
            if record != self.models[name].record:
                self.request(partial(self.on_record, name, record))

    def remember(self) -> None:
        """See ActiveVersions.remember. For the lease thread."""
        self._active.remember(self.models)

    def described(self) -> dict[str, dict[str, dict[str, Any]]]:
        """See VersionOffers.described."""
        return self.offers.described()

    # Life

    def open(self) -> None:
        """Load the active version of every model, unless `preload` leaves that to the first job, and announce specs.

        A model without a version that loads is tried again later; the others are served. Raises ConfigurationError if
        the version that the settings name cannot be loaded, or if no model can be served; BrokerUnavailable.
        """
        for name, record in self._broker.actives(list(self.models)).items():
            self.follow_at_start(self.models[name], record)
        if self._preloads:
            self._load_at_start()
        for version in self.table.active():
            self.announcements.publish(version)
        self._broker.prepare(list(self.models))

    def close(self) -> None:
        """Unload all versions."""
        for version in [version for version in self.turns if version.is_ready and not version.shares_model]:
            self._unload(version)

    @property
    def has_work(self) -> bool:
        """Whether a request, a load, or a version that is to be unloaded waits for a next turn."""
        return bool(
            self._requests
            or self._may_exceed_memory
            or self._to_unload
            or self._swaps.has_retired
            or self.loader.is_busy
        )

    def run_requests(self) -> None:
        """Carry out the requests of other threads, and unload what is to be unloaded."""
        while self._requests:
            # While the broker is away a request stays in the queue; after any other error it is dropped.
            try:
                self._requests[0]()
            except BrokerUnavailable:
                raise
            except Exception:
                logger.exception("a request failed")
            self._requests.popleft()
        if self._may_exceed_memory:
            for version in self._memory.to_unload():
                self._unload(version)
            self._may_exceed_memory = self._memory.excess_bytes() > 0
        for version in [each for each in self._to_unload if self._may_be_unloaded(each)] if self._to_unload else ():
            self._to_unload.discard(version)
            if version.is_ready:
                self._unload(version)
        for version in self._swaps.take_idle() if self._swaps.has_retired else ():
            # Another one has its place, so that the model as a whole stays loaded.
            self._tuner.detach(version)
            version.unload()

    def _may_be_unloaded(self, version: ServedVersion) -> bool:
        """An active version and an arm wait for another decision, a loading version waits for the end of its load."""
        is_loading = version.state is VersionState.LOADING
        return version.is_idle and not is_loading and not self.models[version.name].answers(version)

    def take_in_loaded(self) -> list[Loaded]:
        """The loads that have ended; the versions among them that are ready may run from now on."""
        ended: list[Loaded] = []
        for loaded in self.loader.take_done():
            if self._swaps.is_replacement(loaded.version):
                if self._swaps.finish(self.models[loaded.version.name], loaded):
                    self._on_loaded(loaded.version)
                continue
            if not loaded.problem:
                self._on_loaded(loaded.version)
            # Jobs wait for the load at the endpoints that share the model, too.
            ended += [loaded._replace(version=each) for each in loaded.version.with_sharing]
            self._swaps.catch_up(self.models[loaded.version.name], loaded.version)
        return ended

    def take_wanted_threads(self) -> int:
        """The forwards at a time that an endpoint may have since the last call; 0: no more than before."""
        return self._swaps.take_wanted_threads()

    def endpoint(self, version: ServedVersion, name: str) -> ServedVersion | None:
        """The version at an endpoint, with the queue of its jobs; None: it has no such endpoint."""
        return version.endpoints.get(name) or self._swaps.add_endpoint(self.models[version.name], version, name)

    def load(self, version: ServedVersion) -> None:
        """Begin to load a version that is cold; a failed one waits for `try_again` or for an operator."""
        loaded = version.base if version.shares_model else version
        if loaded.state is VersionState.COLD:
            self.loader.load(loaded)

    # The active version

    def follow(self, model: ServedModel, record: bytes) -> None:
        """Follow a model's record: from the claim that carried it on, its version is active."""
        before = model.content_hash
        deployment = self._active.accept(model, record)
        if deployment is None:
            return
        self._swaps.follow(model, deployment.policies)
        model.active = self._with_content(model, deployment.version, deployment.content_hash)
        former, model.arms = model.arms, self._arms_of(model, deployment)
        for each in former.here() if former is not None else ():
            each.experiment = ""
        _mark_arms(model)
        self._tell_shares(model, former)
        logger.info(
            "version changed",
            extra={"model": model.name, "version": deployment.version, "epoch": deployment.epoch},
        )
        if before != deployment.content_hash:
            self._on_version_change(model.name, before, deployment.content_hash)

    def _arms_of(self, model: ServedModel, deployment: Deployment) -> ServedArms | None:
        if deployment.routing is None:
            return None
        others = [arm for arm in deployment.routing.arms if arm.version != deployment.version]
        found = {arm.version: self._with_content(model, arm.version, arm.content_hash) for arm in others}
        found[deployment.version] = model.active
        return ServedArms(deployment, deployment.routing, found, partial(self._admits_arm, model.name))

    def follow_breaker(self, name: str, label: str) -> list[ServedVersion]:
        """The circuit breaker of a version has opened or closed: its share changes if it is an arm.

        Returns the versions, one for each endpoint, whose waiting jobs go to the version in production.
        """
        model = self.models.get(name)
        if model is None or model.arms is None or label not in model.arms.versions:
            return []
        is_admitted = model.arms.admits(label)
        self._tell_shares(model, model.arms)
        self._metrics.breaker(name, label, CANDIDATE, is_open=not is_admitted)
        facts = {"model": name, "version": label}
        logger.warning("an arm gets %s", "its jobs again" if is_admitted else "no jobs", extra=facts)
        return [] if is_admitted else [each for each in self.turns if (each.name, each.label) == (name, label)]

    def _tell_shares(self, model: ServedModel, former: ServedArms | None) -> None:
        """Set the shares of the arms; after the end of an experiment the active version has all jobs."""
        if former is not None or model.arms is not None:
            for label, share in _shares(model, former).items():
                self._metrics.traffic_share(model.name, label, share)

    def follow_at_start(self, model: ServedModel, record: bytes) -> None:
        """Follow the broker's record, unless this machine has followed a later decision."""
        last = self._active.last(model)
        if last != record:
            self.follow(model, last)
        self.follow(model, record)
        self._active.check_start(model, last)

    def on_record(self, name: str, record: bytes) -> None:
        """Follow a record that `poll_records` found: the model is idle, and has time to load its active version."""
        model = self.models[name]
        if record != model.record:
            self.follow(model, record)
        if model.active is not None and self._preloads:
            self.load(model.active)
            self._load_arms(model)

    def _load_arms(self, model: ServedModel) -> None:
        for version in model.arms.here() if model.arms is not None else ():
            self.load(version)

    def try_again(self) -> None:
        """Load the active versions and arms that were not found or failed: the files on disk may have changed."""
        for model in self.models.values():
            if model.deployment is not None and model.arms is not None:
                model.arms = self._arms_of(model, model.deployment)
                _mark_arms(model)
                for arm in model.arms.here() if model.arms is not None else ():
                    if arm.state in UNLOADED:
                        self.loader.load(arm)
        for model in [model for model in self.models.values() if not model.is_claimable]:
            if (deployment := model.deployment) is not None:
                model.active = self._with_content(model, deployment.version, deployment.content_hash)
            elif (found := self.table.reread(model, former := model.active)) is not None and found is not former:
                self.announcements.publish(found)
            if (version := model.active) is not None and version.state in UNLOADED:
                self.loader.load(version)

    def named(self, name: str, wanted: str) -> ServedVersion | None:
        """The version of a model that a job calls `wanted`, known already or under the models root."""
        model = self.models[name]
        return model.named(wanted) or self.table.resolve(model, wanted)

    def _with_content(self, model: ServedModel, label: str, content_hash: str) -> ServedVersion | None:
        """The version, pinned to this content (empty: any); None while it is not found or other content has jobs."""
        version = self.table.reread(model, self.table.resolve(model, label))
        if version is None or not content_hash:
            return version
        if version.is_ready and version.content_hash != content_hash:
            # The files on disk may have become the promoted ones after the load.
            if not version.is_idle:
                logger.error(
                    "the loaded content is not the promoted content",
                    extra={"model": model.name, "version": label, "content_hash": version.content_hash},
                )
                return None
            self._unload(version)
        version.pin_content(content_hash)
        self._swaps.drop_other_content(model, version, content_hash)
        return version

    # Operators' requests

    def _load_requested(self, name: str, label: str, content_hash: str) -> None:
        model = self.models.get(name) or self._add_model(name, label)
        if model is not None and model.label == label:
            # Only a promotion changes the active version; `described` shows that its content is another one.
            version: ServedVersion | None = model.active
        else:
            version = self._with_content(model, label, content_hash) if model is not None else None
        # Only now: `_with_content` may have unloaded other content.
        problem = self.table.problem(name, label) if version is None else ""
        self._requested.add(name, label, content_hash, problem)
        if version is None:
            logger.error("version not found: %s", problem, extra={"model": name[:80], "version": label[:80]})
            return
        version.is_wanted = True
        self._to_unload.discard(version)
        if version.state in UNLOADED:
            self.loader.load(version)

    def _add_model(self, name: str, label: str) -> ServedModel | None:
        """Serve a model that came under the models root after this worker's start."""
        try:
            package = self.table.package(name, label)
        except (ConfigurationError, InvalidInput, UnknownModel) as error:
            logger.error("model not loaded: %s", error, extra={"model": name[:80], "version": label[:80]})
            return None
        self._broker.prepare([name])
        record = self._broker.actives([name])[name]
        model = self.table.add(package)
        self.follow_at_start(model, record)
        if model.active is not None:
            self.announcements.publish(model.active)
        return model

    def _unload_requested(self, name: str, label: str, content_hash: str) -> None:
        self._requested.remove(name, label)
        is_registered = bool(content_hash) and self._active.are_signed
        if is_registered:
            self.table.register(name, label, content_hash)
        model = self.models.get(name)
        version = model.versions.get(label) if model is not None else None
        if model is None or version is None:
            return
        version.is_wanted = False
        if version is not model.active and (is_registered or version.state is VersionState.FAILED):
            # The next job that names the version loads the registered content, or else any content on disk.
            version.pin_content(content_hash if is_registered else "")
        self._to_unload.add(version)

    # Into memory and out of it

    def _load_at_start(self) -> None:
        problems = []
        for model in [model for model in self.models.values() if model.active is not None]:
            # A promoted version may load later, and no other version takes its place.
            if (problem := self._load_first_of(model)) and model.deployment is None:
                problems.append(problem)
        if problems and (self._active.is_pinned or not any(version.is_ready for version in self.table.active())):
            raise ConfigurationError(problems[0])

    def _load_first_of(self, model: ServedModel) -> str:
        """Load the active version; returns why that failed, or nothing. Before the first promotion the next lower
        version that loads becomes the active one in its place."""
        highest, problem = model.active, ""
        is_decided = self._active.is_pinned or model.deployment is not None
        others = [] if is_decided else self.table.lower_labels(model)
        for label in [highest.label, *others] if highest is not None else []:
            version = self.table.resolve(model, label)
            if version is None:
                continue
            try:
                self.loader.load_now(version)
            except ConfigurationError as error:
                problem = problem or str(error)
                continue
            if version is not highest:
                logger.error("version skipped: %s", problem, extra={"model": model.name, "active": label})
            model.active = version
            self._on_loaded(version)
            self._load_arms(model)
            return ""
        return problem

    def _on_loaded(self, version: ServedVersion) -> None:
        self._metrics.loaded(version.name, version.label, True)
        version.take_observer(
            self._tuner.attach(version, version.runtime, version.content_hash, version.queue.limits.max_rows)
        )
        self._may_exceed_memory = True

    def _unload(self, version: ServedVersion) -> None:
        """Unload an idle version; the next job for it loads it again."""
        self._tuner.detach(version)
        version.unload()
        for endpoint in version.endpoints.values():
            if endpoint.is_ready and not endpoint.shares_model and endpoint.is_idle:
                self._tuner.detach(endpoint)
                endpoint.unload()
        if content_hash := self.table.registered_hash(version):
            # The content may have been registered while the version was active: jobs may name it from now on.
            version.pin_content(content_hash)
        self._metrics.loaded(version.name, version.label, False)
        logger.info("model unloaded", extra={"model": version.name, "version": version.label})


def _shares(model: ServedModel, former: ServedArms | None) -> dict[str, float]:
    """The share of each version that has one, or had one."""
    shares = {arm.version: 0.0 for arm in former.routing.arms} if former is not None else {}
    if model.arms is not None:
        shares |= model.arms.shares()
    elif model.deployment is not None:
        shares[model.deployment.version] = 1.0
    return shares


def _mark_arms(model: ServedModel) -> None:
    """Results of an arm name its experiment."""
    if model.arms is not None:
        for arm in model.arms.here():
            arm.experiment = model.arms.routing.experiment
