"""Specs and active versions in Redis: the part that workers and operators have in common."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.registry.broker import redis_scripts as scripts
from penstock.registry.broker.redis_connection import RedisConnection
from penstock.registry.queues import MODELS_KEY, specs_key

__all__ = ["RedisSpecs"]


class RedisSpecs(RedisConnection):
    """The specs of models and the records of their active versions. Thread-safe."""

    def spec(self, slot: str, version: str = "") -> bytes | None:
        """See ProducerEnd.spec."""
        found: bytes | None = self._run(scripts.spec(slot, version))
        return found

    def put_spec(self, slot: str, spec: bytes, version: str = "") -> None:
        """See WorkerEnd.put_spec."""
        if version:
            self._run(["HSET", specs_key(slot), version, spec])
        else:
            self._run(scripts.announce(slot, spec, {}, replaces=True))
        self._run(["SADD", MODELS_KEY, slot])

    def actives(self, slots: Sequence[str]) -> dict[str, bytes]:
        """See WorkerEnd.actives."""
        return scripts.parse_actives(slots, self._run(scripts.actives(slots)))
