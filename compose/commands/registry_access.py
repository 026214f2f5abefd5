"""Connects `penstock models` to registry, workers and broker: directly, or through a worker (`--via`).

environment, --via --> RegistryAccess --> registry, deployer, fleet
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.compose.terminal import connected, load_settings, open_broker, terminable
from penstock.registry.errors import InvalidInput, PenstockError, UnknownModel, shown

if TYPE_CHECKING:
    from penstock.compose.deploy import Deployer
    from penstock.compose.rollout.files import Files
    from penstock.registry.broker.base import FleetEnd
    from penstock.registry.catalog import ModelRegistryClient
    from penstock.registry.settings import Settings

__all__ = ["RegistryAccess"]


@dataclass(frozen=True, slots=True)
class RegistryAccess:
    """environ: that of this shell. via: the name of a worker, or `any`; empty: this process connects directly."""

    environ: Mapping[str, str]
    via: str = ""

    @contextmanager
    def registry(self, *, for_changes: bool = False) -> Iterator[ModelRegistryClient]:
        """The registry; without `via` it needs no broker."""
        if self.via:
            with self.deployer() as deployer:
                yield deployer.registry
            return
        from penstock.compose.rollout.operator_keys import operator_keys
        from penstock.compose.rollout.registry import open_registry

        settings = self._settings()
        yield open_registry(settings, operator_keys(settings, for_changes=for_changes))

    @contextmanager
    def records(self, name: str) -> Iterator[ModelRegistryClient]:
        """The registry, to read what it has of `name`. Raises UnknownModel, also for a model that is only served."""
        try:
            with self.registry() as registry:
                yield registry
        except UnknownModel as error:
            if self._is_served(name):
                raise UnknownModel(
                    f"{shown(name)}: served, not registered. Expected `penstock models register` with its folder"
                ) from error
            raise

    @contextmanager
    def deployer(self) -> Iterator[Deployer]:
        """Registry and workers; progress is printed on stderr."""
        from penstock.compose.deploy import Deployer

        settings = load_settings(self.environ) if self.via else connected(self.environ)
        # With `terminable` an interrupted command withdraws its load requests.
        with terminable(), Deployer.connect(settings, via=self.via, on_progress=_print_progress) as deployer:
            yield deployer

    @contextmanager
    def catalogue(self) -> Iterator[tuple[ModelRegistryClient, FleetEnd | None]]:
        """The registry and the broker; None without a configured broker."""
        if self.via:
            with self.deployer() as deployer:
                yield deployer.registry, deployer.fleet
            return
        settings = self._settings()
        with self.registry() as registry:
            if not settings.redis_url:
                yield registry, None
                return
            with open_broker(settings) as broker:
                yield registry, broker

    @contextmanager
    def fleet(self) -> Iterator[FleetEnd]:
        """The broker."""
        if self.via:
            with self.deployer() as deployer:
                yield deployer.fleet
            return
        with open_broker(connected(self.environ)) as broker:
            yield broker

    @contextmanager
    def files(self) -> Iterator[tuple[ModelRegistryClient, Files]]:
        """The registry, and the machine that has its packages."""
        if self.via:
            with self.deployer() as deployer:
                yield deployer.registry, deployer.files
            return
        from penstock.compose.rollout.files import LocalFiles

        with self.registry() as registry:
            yield registry, LocalFiles()

    def fetched(self, reference: str) -> Path:
        """The folder of a package. A package of MLflow or of the hub is first copied into the models root.

        Raises ConfigurationError, and InvalidInput for a package that a worker cannot fetch.
        """
        from penstock.registry.package.sources import is_elsewhere, package_folder

        if self.via and is_elsewhere(reference):
            raise InvalidInput(
                f"{shown(reference)} is fetched to this machine. Expected no --via, or the worker's folder"
            )
        return package_folder(reference, load_settings(self.environ).inference.repo_root, self.environ)

    def _is_served(self, name: str) -> bool:
        from penstock.compose.views.overview import workers

        # Without a broker, the registry alone answers.
        with suppress(PenstockError), self.fleet() as fleet:
            return any(name in report["models"] for report in workers(fleet))
        return False

    def _settings(self) -> Settings:
        """The settings, with the broker of a running stack if there is one; the registry needs none."""
        from penstock.registry import stack_file

        settings = load_settings(self.environ)
        if settings.redis_url or stack_file.read(settings.home) is None:
            return settings
        return stack_file.with_broker(settings)


def _print_progress(line: str) -> None:
    click.echo(line, err=True)
