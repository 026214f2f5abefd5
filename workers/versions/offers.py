"""Which versions this worker has and offers, as clients, operators and other workers see it. For any thread."""

from __future__ import annotations

from typing import Any, Final

from penstock.workers.versions.active import ActiveVersions
from penstock.workers.versions.memory_limit import MemoryLimit
from penstock.workers.versions.table import VersionTable
from penstock.workers.versions.token_limits import receiver_of
from penstock.workers.versions.version import ServedModel, ServedVersion, VersionState

__all__ = ["RequestedVersions", "VersionOffers"]

_NOT_FOUND: Final = {
    "state": "failed",
    "content_hash": "",
    "is_active": False,
    "is_offered": False,
    "memory_bytes": 0,
}
_IN_MEMORY: Final = (VersionState.READY, VersionState.LOADING)


class RequestedVersions:
    """What operators asked for, by model and label. The I/O thread changes it."""

    def __init__(self) -> None:
        self._contents: dict[tuple[str, str], str] = {}
        """The content that was requested; empty: any."""
        self._problems: dict[tuple[str, str], str] = {}
        """Versions that are not found, and why."""

    def add(self, name: str, label: str, content_hash: str, problem: str = "") -> None:
        """An operator wants this version. problem: why it is not found; empty: it is."""
        self._contents[name, label] = content_hash
        self._problems.pop((name, label), None)
        if problem:
            self._problems[name, label] = problem

    def remove(self, name: str, label: str) -> None:
        """No operator wants this version."""
        self._contents.pop((name, label), None)
        self._problems.pop((name, label), None)

    def add_to(self, described: dict[str, dict[str, dict[str, Any]]]) -> None:
        """Write what is missing, or other than requested, into the description of what is here."""
        for (name, label), problem in tuple(self._problems.items()):
            described.setdefault(name, {}).setdefault(label, {**_NOT_FOUND, "problem": problem})
        for (name, label), content_hash in tuple(self._contents.items()):
            entry = described.get(name, {}).get(label)
            if entry is not None and content_hash and entry["content_hash"] not in ("", content_hash):
                entry["problem"] = "the loaded content is not the requested content"


class VersionOffers:
    """Looks at the versions of one worker; see ModelLifecycle."""

    def __init__(
        self, table: VersionTable, active: ActiveVersions, memory: MemoryLimit, requested: RequestedVersions
    ) -> None:
        self._models = table.models
        self._active = active
        self._memory = memory
        self._requested = requested

    def claimable(self) -> list[str]:
        """The models whose active version is here, or can be loaded here."""
        return [name for name, model in tuple(self._models.items()) if model.is_claimable]

    def offered(self, name: str) -> dict[str, int]:
        """The versions of a model for which jobs that name them may wait here, by label, with the number of jobs."""
        return {
            label: room
            for label, version in tuple(self._models[name].versions.items())
            if (room := version.room) and self.is_offered(version)
        }

    def all_offered(self) -> dict[str, dict[str, int]]:
        """`offered` of every model, and the receivers of jobs that are too long for other workers."""
        return {name: {**self.offered(name), **self._long_offered(name)} for name in tuple(self._models)}

    def is_offered(self, version: ServedVersion) -> bool:
        """Whether jobs that name the version run here: it is loaded, is loading, or may be loaded for them."""
        if version.state in _IN_MEMORY:
            return True
        if version.state is not VersionState.COLD:
            return False
        return self.may_be_loaded(version) and self._memory.fits(version)

    def may_be_loaded(self, version: ServedVersion) -> bool:
        """See ActiveVersions.may_be_loaded."""
        return self._active.may_be_loaded(self._models[version.name], version)

    def contents_of(self, name: str) -> set[str]:
        """The content hashes of the versions of a model that were loaded here, as far as they are known."""
        model = self._models.get(name)
        versions = tuple(model.versions.values()) if model is not None else ()
        return {version.content_hash or version.last_hash for version in versions} - {""}

    def described(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Model -> version label -> state, content hash, memory, problem, as plain data.

        A requested version that is not under the models root counts as failed.
        """
        described = {name: self._describe(model) for name, model in tuple(self._models.items())}
        self._requested.add_to(described)
        return described

    def _long_offered(self, name: str) -> dict[str, int]:
        versions = tuple(self._models[name].versions.values())
        return {receiver_of(each.label, each.most_tokens): each.room for each in versions if each.most_tokens}

    def _describe(self, model: ServedModel) -> dict[str, dict[str, Any]]:
        return {
            label: {
                "state": version.state.value,
                "content_hash": version.content_hash,
                "is_active": version is model.active,
                "is_offered": self.is_offered(version),
                "memory_bytes": version.runtime.memory_bytes,
                "problem": version.problem,
                **({"most_tokens": version.most_tokens} if version.most_tokens else {}),
                **_described_endpoints(version),
            }
            for label, version in tuple(model.versions.items())
        }


def _described_endpoints(version: ServedVersion) -> dict[str, Any]:
    """The endpoints that have had jobs here, besides `infer`; nothing where there is none."""
    endpoints = {
        name: {"state": each.state.value, "precision": each.policy.precision, "problem": each.problem}
        for name, each in tuple(version.endpoints.items())
    }
    return {"endpoints": endpoints} if endpoints else {}
