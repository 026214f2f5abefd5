"""The heads of audit chains in the broker's Redis: one hash, `<sequence> <mac>` by writer."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.registry.audit_heads import AuditHead
from penstock.registry.broker.redis_connection import RedisConnection
from penstock.registry.queues import AUDIT_HEADS_KEY

__all__ = ["RedisAuditHeads"]


class RedisAuditHeads(RedisConnection):
    """AuditHeads on one Redis. Thread-safe. Calls raise BrokerUnavailable and BrokerRefused."""

    def put(self, heads: Mapping[str, AuditHead]) -> None:
        """See AuditHeads.put. Each writer stores its own heads in order, so the last one is the newest."""
        if heads:
            fields = [part for writer, head in heads.items() for part in (writer, f"{head.sequence} {head.mac}")]
            self._run(["HSET", AUDIT_HEADS_KEY, *fields])

    def all(self) -> dict[str, AuditHead]:
        """See AuditHeads.all."""
        answer = self._run(["HGETALL", AUDIT_HEADS_KEY])
        texts = [each.decode(errors="replace") for each in answer]
        return {writer: _parse(text) for writer, text in zip(texts[::2], texts[1::2], strict=True)}


def _parse(text: str) -> AuditHead:
    sequence, _, mac = text.partition(" ")
    # Twenty digits are more than any chain has, and fewer than int() refuses.
    return AuditHead(int(sequence) if sequence.isdecimal() and len(sequence) < 20 else 0, mac)
