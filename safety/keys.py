"""The keys that encrypt data: read at the start of a process, made and rotated by `penstock keys`.

    settings -> load_data_keys -> DataKeys (sealing.py)
    `penstock keys` -> generate_keys, rotate_keys, promote_key -> the key file, or a line for the environment

The first key seals, all open. A new key comes first, and the old ones stay until nothing is sealed with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Settings
from penstock.safety.audit import KEY_OPERATION, AuditLogger
from penstock.safety.hsm import Hsm
from penstock.safety.key_source import PlainKeys, entries_of, holder_of, open_entries
from penstock.safety.sealing import DataKeys

__all__ = [
    "Audit",
    "KeyChange",
    "encrypts_at_rest",
    "generate_keys",
    "key_audit",
    "load_data_keys",
    "needs_data_keys",
    "promote_key",
    "read_data_keys",
    "rotate_keys",
]

Audit = Callable[[str, str, Mapping[str, object]], None]
"""Records (operation, result, details) of one operation on keys. The results are begun, done and failed. Details hold
the source and the ids of keys, and no key."""
_Change = Callable[[list[str], PlainKeys | Hsm], list[str]]


class KeyChange(NamedTuple):
    """The ids of all keys afterwards, the sealing one first. line: what to put into the environment, if anything."""

    ids: tuple[str, ...]
    line: str


def needs_data_keys(settings: Settings) -> bool:
    """Whether these settings encrypt anything. If so, a missing key is an error."""
    return encrypts_at_rest(settings) or settings.inference.seals_payloads


def encrypts_at_rest(settings: Settings) -> bool:
    """Whether data that outlives the process is encrypted."""
    inference = settings.inference
    return inference.effective_mode == "persisted_encrypted" and inference.privacy.encrypt_at_rest


def load_data_keys(settings: Settings, audit: Audit | None = None) -> DataKeys | None:
    """The data keys of these settings; None only where they encrypt nothing. Raises as `read_data_keys` does."""
    if not needs_data_keys(settings):
        return None
    try:
        return read_data_keys(settings, audit)
    except ConfigurationError as error:
        if encrypts_at_rest(settings):
            raise
        plain = "PENSTOCK_INFERENCE_PRIVACY_SEAL_PAYLOADS=off to send inputs and results in plaintext"
        raise ConfigurationError(f"{error}, or {plain}") from None


def read_data_keys(settings: Settings, audit: Audit | None = None) -> DataKeys:
    """The data keys of these settings, also where they encrypt nothing.

    audit: is told of the keys, or that they could not be read. Raises ConfigurationError for a key that is missing or
    has another length, for a key file that other users can open, and where a library is missing.
    """
    try:
        # First: without an entry there is no reason to log in to an HSM.
        lines = holder_of(settings).read()
        with open_entries(settings) as codec:
            keys = _keys_of(lines, codec)
    except ConfigurationError:
        if audit is not None:
            audit("read", "failed", _facts(settings))
        raise
    if audit is not None:
        audit("read", "done", _facts(settings, keys.ids))
    return keys


def generate_keys(settings: Settings, audit: Audit, *, makes_wrapping_key: bool = False) -> KeyChange:
    """Makes the first data key. makes_wrapping_key: makes the key in the HSM that wraps it, too.

    Raises ConfigurationError, also when there is a key already.
    """
    if makes_wrapping_key and settings.inference.privacy.encryption_key_source != "hsm":
        raise ConfigurationError(
            "Only an HSM has a wrapping key. Expected PENSTOCK_INFERENCE_PRIVACY_ENCRYPTION_KEY_SOURCE=hsm"
        )
    holder = holder_of(settings)
    with _recorded(audit, "generate", settings) as done, holder.changing():
        holder.refuse_existing()
        with open_entries(settings, makes_keys=makes_wrapping_key) as codec:
            if makes_wrapping_key and isinstance(codec, Hsm):
                codec.make_wrapping_key()
            entry, key_id = _new_entry(codec)
        line = holder.create(entry, key_id)
        done((key_id,))
    return KeyChange((key_id,), line)


def rotate_keys(settings: Settings, audit: Audit, *, is_last: bool = False) -> KeyChange:
    """Adds a new data key. It seals from the next start on; is_last: it only opens, until `promote_key`.

    Raises ConfigurationError, also without a key.
    """

    def add(lines: list[str], codec: PlainKeys | Hsm) -> list[str]:
        line = holder_of(settings).line(*_new_entry(codec))
        place = len(lines) if is_last else min(entries_of(lines))
        return [*lines[:place], line, *lines[place:]]

    return _change(settings, audit, "rotate", add)


def promote_key(settings: Settings, audit: Audit, key_id: str) -> KeyChange:
    """Puts an existing data key first, so that it seals from the next start on. Raises ConfigurationError."""

    def move(lines: list[str], codec: PlainKeys | Hsm) -> list[str]:
        ids = _keys_of(lines, codec).ids
        if key_id not in ids:
            raise ConfigurationError(f"No data key has the id {key_id[:80]!r}. Expected one of: {', '.join(ids)}")
        numbers = [*entries_of(lines)]
        chosen = numbers[ids.index(key_id)]
        rest = [line for number, line in enumerate(lines) if number != chosen]
        return [*rest[: numbers[0]], lines[chosen], *rest[numbers[0] :]]

    return _change(settings, audit, "promote", move)


def key_audit(log: AuditLogger) -> Audit:
    """Records operations on keys in an audit log; where that fails, it raises ConfigurationError."""

    def record(operation: str, result: str, details: Mapping[str, object]) -> None:
        try:
            log.log_event(KEY_OPERATION, result=result, details={"what": operation, **details})
        except OSError as error:
            raise ConfigurationError(
                f"The audit log cannot be written ({error.strerror}). Expected room for it"
            ) from None

    return record


def _change(settings: Settings, audit: Audit, operation: str, change: _Change) -> KeyChange:
    holder = holder_of(settings)
    with _recorded(audit, operation, settings) as done, holder.changing():
        lines = holder.read()
        with open_entries(settings) as codec:
            changed = change(lines, codec)
            ids = _keys_of(changed, codec).ids
        line = holder.replace(changed)
        done(ids)
    return KeyChange(ids, line)


@contextmanager
def _recorded(audit: Audit, operation: str, settings: Settings) -> Iterator[Callable[[Sequence[str]], None]]:
    """Records the block: before it begins, and at its end, with the ids that it gives to the function."""
    ids: list[str] = []
    audit(operation, "begun", _facts(settings))
    try:
        yield ids.extend
    except ConfigurationError:
        audit(operation, "failed", _facts(settings))
        raise
    audit(operation, "done", _facts(settings, ids))


def _facts(settings: Settings, ids: Sequence[str] = ()) -> dict[str, object]:
    return {"source": settings.inference.privacy.encryption_key_source, "keys": [*ids]}


def _keys_of(lines: Sequence[str], codec: PlainKeys | Hsm) -> DataKeys:
    return DataKeys(codec.open_all([*entries_of(lines).values()]))


def _new_entry(codec: PlainKeys | Hsm) -> tuple[str, str]:
    """A new entry, and the id of its key."""
    entry = codec.new_entry()
    return entry, DataKeys(codec.open_all([entry])).ids[0]
