"""What the tests of the model registry share: tiny packages, a client that signs, versions on their way up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import Table, create_engine, insert, text
from sqlalchemy.pool import NullPool

from penstock.registry.catalog import ModelLineage, ModelRegistryClient, ModelStage, RegisteredVersion, Transition
from penstock.registry.package import Package, load_package
from penstock.safety.operator_key import OperatorKey
from tests.packages import write_package

SOURCE = """
def build():
    return lambda inputs: {"y": inputs["x"] * 2}
"""


def new_key() -> OperatorKey:
    """An operator's key that lies in no file."""
    return OperatorKey(Ed25519PrivateKey.generate())


def ticks() -> Callable[[], datetime]:
    """A clock that is a second later at every look."""
    moments = (datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=second) for second in range(10**9))
    return lambda: next(moments)


def registered(version: str, stage: ModelStage = ModelStage.DRAFT, epoch: int = 1, **fields: Any) -> RegisteredVersion:
    """The record of a version of `minilm`, whose content hash is the digits of its label, repeated."""
    spec = {"name": "minilm", "version": version, "format": "python", "entrypoint": "model:build"}
    tensors = [{"name": name, "dtype": "float32", "shape": ["batch", 4]} for name in "xy"]
    record = RegisteredVersion(
        name="minilm",
        version=version,
        content_hash=(version * 64)[:64],
        stage=stage,
        epoch=epoch,
        files={"model.py": "ab" * 32},
        source_files={},
        spec=spec | {"inputs": tensors[:1], "outputs": tensors[1:]},
        source="/models/minilm",
        lineage=ModelLineage(),
        registered_at="2026-01-01T00:00:00+00:00",
    )
    return replace(record, **fields)


@dataclass
class Catalog:
    """One model of a registry, with its packages on the disk."""

    url: str
    root: Path
    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.client = self.reopened()

    def reopened(self, **options: Any) -> ModelRegistryClient:
        """A client as another process would make it."""
        return ModelRegistryClient(**{"store": self.url, "clock": ticks(), **self.options, **options})

    def package(self, version: str) -> Package:
        """The package of a version, made when it is first asked for."""
        folder = self.root / self.name / version
        return load_package(folder if folder.exists() else write_package(self.root, self.name, SOURCE, version=version))

    def put(
        self, version: str, stage: ModelStage = ModelStage.DRAFT, client: ModelRegistryClient | None = None
    ) -> None:
        """Register a version and take it up to a stage; to ARCHIVED by way of DRAFT."""
        client = client or self.client
        client.register(self.package(version))
        if stage is ModelStage.ARCHIVED:
            client.demote(self.name, version, ModelStage.ARCHIVED)
        for step in (ModelStage.STAGING, ModelStage.PRODUCTION):
            if stage in (step, ModelStage.PRODUCTION):
                client.promote(self.name, version, step)

    def stages(self) -> dict[str, ModelStage]:
        """The stage of each version."""
        return {each.version: each.stage for each in self.client.versions(self.name)}

    def execute(self, statement: str, **values: object) -> list[dict[str, Any]]:
        """Runs SQL without the operator's key; `:name` is the model. Returns the rows, if any."""
        with create_engine(self.url, poolclass=NullPool).begin() as connection:
            result = connection.execute(text(statement), {"name": self.name, **values})
            return [dict(row) for row in result.mappings()] if result.returns_rows else []

    def insert(self, table: Table, row: dict[str, Any]) -> None:
        """A row as `execute` read it, put back."""
        with create_engine(self.url, poolclass=NullPool).begin() as connection:
            connection.execute(insert(table).values(row))


def productions(history: tuple[Transition, ...]) -> Iterator[str | None]:
    """The version in production after each change, told from the steps alone.

    Fails where a step leaves two in production, or none after there was one.
    """
    current: str | None = None
    for number, step in enumerate(history):
        if step.enters_production:
            assert step.replaced == current or number == 0, (
                f"epoch {step.epoch} replaces {step.replaced}, not {current}"
            )
            current = step.version
        else:
            assert step.before is not ModelStage.PRODUCTION or step.version == current
            assert step.replaced is None
        yield current
