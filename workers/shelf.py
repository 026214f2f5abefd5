"""Which versions of which models a worker has, which of them answers, and what is loaded.

    claims bring a record -- follow --> the version that answers      operators -- want, let_go_of --> loads, unloads
    jobs that name a version -- meet --> found under the models root, loaded at its first job

The I/O thread owns the shelf; `want`, `let_go_of` and `described` are for any thread. The version that answers is
never unloaded for an operator, and where it is not to be had nothing of its model is claimed: no other version
answers in its place.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from registry.broker.base import Broker
from registry.deployment import Deployment
from registry.errors import BrokerUnavailable, ConfigurationError, Corrupt, InvalidInput, UnknownModel
from registry.package import Package
from registry.settings import LATEST, InferenceConfig
from registry.signed import Verifier
from workers.library import Library
from workers.loader import Loaded, Loader, excess_bytes, to_unload
from workers.observe.metrics import InferenceMetrics
from workers.served import ServedModel, ServedVersion, VersionState
from workers.tuning import Tuner

__all__ = ["Shelf"]

logger = logging.getLogger("server")

_NOT_HERE: Final = {"state": "failed", "content_hash": "", "is_active": False, "memory_bytes": 0}
_UNLOADED: Final = (VersionState.COLD, VersionState.FAILED)


class Shelf:
    """The models of one worker; it begins with `packages`, which answer until another version was promoted.

    verify: the operators' signatures on records; None: none are asked for. on_version_change: called with a model and
    the content hashes that answered it until now, empty for none, and from now on. ring: wakes the I/O thread.
    takes_any: whether operators may bring models that the worker was not started with.
    """

    def __init__(
        self,
        config: InferenceConfig,
        packages: Sequence[Package],
        broker: Broker,
        loader: Loader,
        *,
        library: Library,
        tuner: Tuner,
        metrics: InferenceMetrics,
        verify: Verifier | None,
        on_version_change: Callable[[str, str, str], None],
        ring: Callable[[], None],
        takes_any: bool,
    ) -> None:
        self.models: Final[dict[str, ServedModel]] = {}
        self.turns: Final[deque[ServedVersion]] = deque()
        """All versions of all models, in the order in which they may begin their next batch."""
        self.loader = loader
        self._config = config
        self._broker = broker
        self._library = library
        self._tuner = tuner
        self._metrics = metrics
        self._verify = verify
        self._on_version_change = on_version_change
        self._ring = ring
        self._takes_any = takes_any
        self._is_pinned = config.model_version != LATEST
        """Whether one version answers whatever is promoted."""
        self._orders: deque[Callable[[], None]] = deque()
        """What other threads ask of this one."""
        self._missing: dict[tuple[str, str], str] = {}
        """What operators want and is not to be found, and why."""
        self._is_over_memory = False
        """Whether what is loaded may be too much: looked into at the next turn."""
        self._wished: dict[tuple[str, str], str] = {}
        """By model and label, the content that operators asked for."""
        self._unwanted: set[ServedVersion] = set()
        """To be unloaded once they are idle."""
        for package in packages:
            self._add_model(package)

    # For any thread

    def want(self, name: str, label: str, *, content_hash: str = "") -> None:
        """Load a version and keep it loaded; `described` tells how it went. content_hash: what it must hash to."""
        self.order(partial(self._want, name, label, content_hash))

    def let_go_of(self, name: str, label: str) -> None:
        """Unload a version once it is idle, unless it is the one that answers."""
        self.order(partial(self._let_go_of, name, label))

    def order(self, order: Callable[[], None]) -> None:
        """Have something done on the I/O thread."""
        self._orders.append(order)
        self._ring()

    def may_serve(self, name: str) -> bool:
        """Whether the model is one of this worker's: it is served already, or the worker takes whatever comes."""
        return name in self.models or self._takes_any

    def claimable(self) -> list[str]:
        """The models whose answering version is to be had here."""
        return [name for name, model in tuple(self.models.items()) if model.is_claimable]

    def described(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Model -> version label -> state, content hash, memory, problem, as plain data.

        A version that is wanted and is not under the models root is one that has failed.
        """
        described = {name: _described(model) for name, model in tuple(self.models.items())}
        for (name, label), problem in tuple(self._missing.items()):
            described.setdefault(name, {}).setdefault(label, {**_NOT_HERE, "problem": problem})
        for (name, label), content_hash in tuple(self._wished.items()):
            entry = described.get(name, {}).get(label)
            if entry is not None and content_hash and entry["content_hash"] not in ("", content_hash):
                entry["problem"] = "it was loaded with other content than was asked for"
        return described

    # Life

    def open(self) -> None:
        """Loads the version of every model that answers, unless that is left to the first job, and announces specs.

        Raises ConfigurationError, BrokerUnavailable.
        """
        for name, active in self._broker.actives(list(self.models)).items():
            self._follow_at_start(self.models[name], active)
        answering = [model.active for model in self.models.values() if model.active is not None]
        for version in answering if self._config.preload else ():
            self._load_at_start(version)
        for version in answering:
            self._announce(version)
        self._broker.prepare(list(self.models))

    def close(self) -> None:
        """Unloads everything."""
        for version in [version for version in self.turns if version.is_ready]:
            self._unload(version)

    def tend(self) -> None:
        """Does what other threads have asked for."""
        while self._orders:
            # An order that the broker was away for is still there when it is back; any other error is its end.
            try:
                self._orders[0]()
            except BrokerUnavailable:
                raise
            except Exception:
                logger.exception("an order could not be followed")
            self._orders.popleft()
        if self._is_over_memory:
            self._give_memory_back()
        for version in [version for version in self._unwanted if self._may_go(version)]:
            self._unwanted.discard(version)
            if version.is_ready:
                self._unload(version)

    def _may_go(self, version: ServedVersion) -> bool:
        """Whether nothing needs it: one that is asked to go while it answers goes when another does."""
        return version.is_idle and self.models[version.name].active is not version

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
        model.deployment = deployment
        model.active = self._copy_of(model, deployment.version, deployment.content_hash)
        logger.info(
            "version changed",
            extra={"model": model.name, "version": deployment.version, "epoch": deployment.epoch},
        )
        if before != deployment.content_hash:
            self._on_version_change(model.name, before, deployment.content_hash)

    def _follow_at_start(self, model: ServedModel, active: bytes) -> None:
        self.follow(model, active)
        if active and model.deployment is None and not self._is_pinned:
            # Something was promoted, and nobody here knows what: the highest version on disk may be a draft.
            model.active = None

    def hear(self, name: str, active: bytes) -> None:
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
            if (version := model.active) is not None and version.state in _UNLOADED:
                self.loader.load(version)

    def meet(self, model: ServedModel, label: str) -> ServedVersion | None:
        """A version of this label, loaded or not, if it lies under the models root."""
        if (version := model.versions.get(label)) is not None:
            return version
        version = self._find(model.name, label)
        if version is None:
            return None
        rows = max((known.calibrated_rows for known in model.versions.values()), default=0)
        if rows and version.is_sized_by_memory:
            # To measure again would take the memory that the serving version works in.
            version.calibrated_rows = rows
            version.resize(rows)
        model.versions[label] = version
        self.turns.append(version)
        return version

    def _copy_of(self, model: ServedModel, label: str, content_hash: str) -> ServedVersion | None:
        """The version, with this content and no other; None while it is not to be had here."""
        version = self._reread(model, self.meet(model, label))
        if version is None or not content_hash or version.content_hash == content_hash:
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
        version.promise(content_hash)
        return version

    # Into memory and out of it

    def _give_memory_back(self) -> None:
        """Unloads what is too much, now or once it is idle."""
        if excess := excess_bytes(self.turns, self._config.model_memory_mb):
            answering = [model.active for model in self.models.values() if model.active is not None]
            for version in to_unload(self.turns, excess, answering):
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
            return ServedVersion(self._library.package(name, label), self._config)
        except (ConfigurationError, InvalidInput, UnknownModel) as error:
            # Jobs may name any version, so this is for those who look closely.
            logger.debug("version not found: %s", error, extra={"model": name, "version": label[:80]})
            return None

    def _reread(self, model: ServedModel, version: ServedVersion | None) -> ServedVersion | None:
        """The version as its package says now, where nothing of it is in memory yet."""
        if version is None or version.state not in _UNLOADED or not version.is_idle or version.in_memory:
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

    def _want(self, name: str, label: str, content_hash: str) -> None:
        model = self.models.get(name) or self._bring(name, label)
        if model is not None and model.label == label:
            # What answers is for promotions to change; `described` tells of any difference.
            version: ServedVersion | None = model.active
        else:
            version = self._copy_of(model, label, content_hash) if model is not None else None
        # Not before: a copy with other content has just been unloaded.
        self._wished[name, label] = content_hash
        if version is None:
            self._missing[name, label] = f"{name}/{label} is not under this worker's models root, or is not valid"
            logger.error("version not found", extra={"model": name[:80], "version": label[:80]})
            return
        self._missing.pop((name, label), None)
        version.is_wanted = True
        self._unwanted.discard(version)
        if version.state in _UNLOADED:
            self.loader.load(version)

    def _bring(self, name: str, label: str) -> ServedModel | None:
        """A model that came under the models root after this worker's start."""
        try:
            package = self._library.package(name, label)
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

    def _let_go_of(self, name: str, label: str) -> None:
        self._missing.pop((name, label), None)
        self._wished.pop((name, label), None)
        model = self.models.get(name)
        version = model.versions.get(label) if model is not None else None
        if model is None or version is None:
            return
        version.is_wanted = False
        if version.state is VersionState.FAILED and version is not model.active:
            # Whoever names it next may have what is there then.
            version.promise("")
        self._unwanted.add(version)

    def _load_at_start(self, version: ServedVersion) -> None:
        try:
            self.loader.load_now(version)
        except ConfigurationError:
            # A promoted version that has gone bad here may come right; the other models are served meanwhile.
            if self.models[version.name].deployment is None:
                raise
            return
        self._has_loaded(version)

    def _has_loaded(self, version: ServedVersion) -> None:
        self._metrics.loaded(version.name, version.label, True)
        version.observer = self._tuner.attach(version, version.runtime, version.content_hash, version.limits.max_rows)
        self._is_over_memory = True

    def _unload(self, version: ServedVersion) -> None:
        """Lets go of an idle version's memory; the next job for it loads it again."""
        self._tuner.detach(version)
        version.unload()
        self._metrics.loaded(version.name, version.label, False)
        logger.info("model unloaded", extra={"model": version.name, "version": version.label})

    def _announce(self, version: ServedVersion) -> None:
        """Clients check jobs against specs: that of the version that answers, and those of the ones they may name."""
        model = self.models[version.name]
        self._broker.put_spec(version.name, version.spec.to_json())
        for label in self._library.labels(version.name):
            if (other := self.meet(model, label)) is not None:
                self._broker.put_spec(other.name, other.spec.to_json(), label)


def _described(model: ServedModel) -> dict[str, dict[str, Any]]:
    return {
        label: {
            "state": version.state.value,
            "content_hash": version.content_hash,
            "is_active": version is model.active,
            "memory_bytes": version.runtime.memory_bytes,
            "problem": version.problem,
        }
        for label, version in tuple(model.versions.items())
    }
