"""Goldens beyond the life of a process: in the registry's database, bound to their version, sealed where privacy asks.

    GoldenStore -- save, sealed --> penstock_goldens -- load, opened --> GoldenStore.offer of the next process

A sealed sample opens only with its model, version, content hash and digest: a row that was moved or changed is passed
over. Only the privacy mode `persisted_encrypted` stores samples. `ephemeral` keeps them in memory, `hashes_only` none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.registry.errors import ConfigurationError, PenstockError
from penstock.registry.settings import Settings
from penstock.registry.tensors import Array, Tensor, decode, encode
from penstock.safety.golden_store import Golden, input_digest

if TYPE_CHECKING:
    from penstock.registry.catalog.goldens import GoldenOwner, SqlGoldens
    from penstock.safety.sealing import DataKeys

__all__ = ["GoldenArchive"]

logger = logging.getLogger("penstock.registry")

_FORMAT: Final = 1
_PLAIN: Final = b"\x00"
_SEALED: Final = b"\x01"


class _Sample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    format: int
    job_id: str
    stratum: str
    inputs: tuple[tuple[Tensor, ...], bytes]
    outputs: tuple[tuple[Tensor, ...], bytes]


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Sample).decode


class GoldenArchive:
    """The stored goldens of all models. For any thread.

    url: of the registry's database, which the first call opens. data_keys: None stores samples unencrypted.
    """

    def __init__(self, url: str, data_keys: DataKeys | None) -> None:
        self._url = url
        self._data_keys = data_keys

    @classmethod
    def of(cls, settings: Settings, data_keys: DataKeys | None) -> GoldenArchive | None:
        """The archive of these settings; None where their privacy mode stores no inputs.

        Raises ConfigurationError where samples must be sealed and there is no key.
        """
        inference = settings.inference
        if not inference.persists_goldens:
            return None
        is_sealed = inference.privacy.encrypt_at_rest or inference.seals_payloads
        if is_sealed and data_keys is None:
            raise ConfigurationError(
                "The reference samples have no data key. Expected one, or privacy.encrypt_at_rest = false with "
                "privacy.seal_payloads = off"
            )
        return cls(settings.registry_url, data_keys if is_sealed else None)

    def save(self, owner: GoldenOwner, goldens: Iterable[Golden], saved_at: int) -> None:
        """Stores goldens that this content answered. saved_at: unix seconds. Raises RegistryUnavailable."""
        self._rows.put(owner, {golden.digest: self._sealed(owner, golden) for golden in goldens}, saved_at)

    def load(self, owner: GoldenOwner) -> list[Golden]:
        """The goldens of this content, oldest first. Samples that cannot be opened are passed over with a warning.

        Raises RegistryUnavailable.
        """
        found, refused = [], 0
        for digest, stored in self._rows.of(owner).items():
            try:
                found.append(self._opened(owner, digest, stored))
            except (PenstockError, msgspec.DecodeError, ValueError):
                refused += 1
        if refused:
            facts = {"model": owner.model, "version": owner.version, "samples": refused}
            logger.warning("stored reference samples cannot be opened", extra=facts)
        return found

    def forget(self, model: str, version: str | None = None) -> int:
        """Removes the samples of a version, or of all versions of a model; returns how many there were."""
        return self._rows.forget(model, version)

    @cached_property
    def _rows(self) -> SqlGoldens:
        # Here: the library takes 30 MB, and most workers store nothing.
        from penstock.registry.catalog.goldens import SqlGoldens

        return SqlGoldens(self._url)

    def _sealed(self, owner: GoldenOwner, golden: Golden) -> bytes:
        sides = [encode(arrays) for arrays in (golden.inputs, golden.outputs)]
        plain = _encode(_Sample(_FORMAT, golden.job_id, golden.stratum, *sides))
        if self._data_keys is None:
            return _PLAIN + plain
        return _SEALED + self._data_keys.seal(plain, _bound(owner, golden.digest))

    def _opened(self, owner: GoldenOwner, digest: str, stored: bytes) -> Golden:
        kind, body = stored[:1], stored[1:]
        if kind != (_PLAIN if self._data_keys is None else _SEALED):
            raise ValueError("a plain sample where they are sealed, or the reverse")
        if self._data_keys is not None:
            body = self._data_keys.open(body, _bound(owner, digest))
        sample = _decode(body)
        if sample.format != _FORMAT:
            raise ValueError("a sample of another format")
        inputs, outputs = _arrays(sample.inputs), _arrays(sample.outputs)
        if input_digest(inputs) != digest:
            raise ValueError("a sample under the digest of another one")
        nbytes = len(sample.inputs[1]) + len(sample.outputs[1])
        return Golden(sample.job_id, inputs, outputs, nbytes, digest, sample.stratum)


def _arrays(side: tuple[tuple[Tensor, ...], bytes]) -> dict[str, Array]:
    return decode(*side)


def _bound(owner: GoldenOwner, digest: str) -> bytes:
    facts: tuple[Any, ...] = (_FORMAT, *owner, digest)
    return _encode(facts)
