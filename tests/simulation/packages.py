"""The models of schedules: specs and packages without files, made once for all schedules of a process.

Workers boot three times in a schedule, and every boot asks each spec for the same policy and the same JSON.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

from penstock.registry.package import ModelSpec, Package
from penstock.registry.package.spec_sections import EndpointPolicy

__all__ = ["further_version", "packages_of"]

_FORWARD_LIMIT_S: Final = 3.0
_policies: Final[dict[tuple[int, str], tuple[ModelSpec, EndpointPolicy]]] = {}
_texts: Final[dict[int, tuple[ModelSpec, bytes]]] = {}
_further: Final[dict[tuple[int, str, int], tuple[ModelSpec, ModelSpec]]] = {}
"""By the identity of a spec, which is kept beside the value: so its identity is nobody else's."""


class _LastingSpec(ModelSpec):
    """A spec that is asked the same in every schedule. A copy of it is another one."""

    def policy_for(self, endpoint: str) -> EndpointPolicy:
        """See ModelSpec.policy_for."""
        known = _policies.get((id(self), endpoint))
        if known is None:
            known = _policies[id(self), endpoint] = (self, super().policy_for(endpoint))
        return known[1]

    def to_json(self) -> bytes:
        """See ModelSpec.to_json."""
        known = _texts.get(id(self))
        if known is None:
            known = _texts[id(self)] = (self, super().to_json())
        return known[1]


@cache
def packages_of(models: int, max_rows: int, concurrency: int) -> list[Package]:
    """The packages of version 1."""
    return [Package(_spec(f"model-{index}", max_rows, concurrency), Path(f"model-{index}")) for index in range(models)]


def further_version(spec: ModelSpec, label: str, *, further_threads: int = 0) -> ModelSpec:
    """The same model in another version, which may run so many more forwards at a time."""
    key = (id(spec), label, further_threads)
    known = _further.get(key)
    if known is None:
        changes = {"version": label, "concurrency": spec.concurrency + further_threads}
        known = _further[key] = (spec, spec.model_copy(update=changes))
    return known[1]


def _spec(name: str, max_rows: int, concurrency: int) -> ModelSpec:
    tensor = {"dtype": "float32", "shape": ["batch", 4]}
    return _LastingSpec.model_validate(
        {
            "name": name,
            "version": "1",
            "format": "python",
            "entrypoint": "model:build",
            "inputs": [{"name": "x", **tensor}],
            "outputs": [{"name": "y", **tensor}],
            "batching": {"max_batch_size": max_rows},
            "concurrency": concurrency,
            "timeout_s": _FORWARD_LIMIT_S,
        }
    )
