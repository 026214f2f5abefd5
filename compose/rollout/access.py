"""How `penstock models` reaches registry, workers and broker: by itself, or through a worker (`--via`).

environment, --via --> RegistryAccess --> registry, deployer, fleet
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.compose.terminal import connected, load_settings, open_broker, terminable
from penstock.registry.errors import InvalidInput, shown

if TYPE_CHECKING:
    from penstock.compose.deploy import Deployer
    from penstock.compose.rollout.files import Files
    from penstock.registry.broker.base import FleetEnd
    from penstock.registry.catalog import ModelRegistryClient
    from penstock.registry.settings import Settings

__all__ = ["RegistryAccess"]


@dataclass(frozen=True, slots=True)
class RegistryAccess:
    """environ: this shell's. via: the worker that runs the requests, or `any`; empty: none, this process connects."""

    environ: Mapping[str, str]
    via: str = ""

    @contextmanager
    def registry(self, *, for_changes: bool = False) -> Iterator[ModelRegistryClient]:
        """The registry; needs no broker unless a worker reads it."""
        if self.via:
            with self.deployer() as deployer:
                yield deployer.registry
            return
        from penstock.compose.deploy import open_registry
        from penstock.compose.rollout.keys import operator_keys

        settings = self._settings()
        yield open_registry(settings, operator_keys(settings, for_changes=for_changes))

    @contextmanager
    def deployer(self) -> Iterator[Deployer]:
        """Registry and workers; how things go on is told on stderr."""
        from penstock.compose.deploy import Deployer

        settings = load_settings(self.environ) if self.via else connected(self.environ)
        # A command that is ended takes back what it asked of workers.
        with (
            terminable(),
            Deployer.connect(settings, via=self.via, tell=lambda line: click.echo(line, err=True)) as deployer,
        ):
            yield deployer

    @contextmanager
    def catalogue(self) -> Iterator[tuple[ModelRegistryClient, FleetEnd | None]]:
        """The registry and the broker, where there is one."""
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
        """The registry, and the machine on which its packages lie."""
        if self.via:
            with self.deployer() as deployer:
                yield deployer.registry, deployer.files
            return
        from penstock.compose.rollout.files import LocalFiles

        with self.registry() as registry:
            yield registry, LocalFiles()

    def fetched(self, reference: str) -> Path:
        """The folder of the package that is named, copied into the models root first where it lies elsewhere.

        Raises ConfigurationError, and InvalidInput for what a worker cannot fetch.
        """
        from penstock.registry.package.sources import is_elsewhere, package_folder

        if self.via and is_elsewhere(reference):
            raise InvalidInput(
                f"{shown(reference)} is fetched to this machine. Expected no --via, or the worker's folder"
            )
        return package_folder(reference, load_settings(self.environ).inference.repo_root, self.environ)

    def _settings(self) -> Settings:
        """With a broker in them where there is one: the registry needs none."""
        from penstock.registry import stack_file

        settings = load_settings(self.environ)
        if settings.redis_url or stack_file.read(settings.home) is None:
            return settings
        return stack_file.with_broker(settings)
