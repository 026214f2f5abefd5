"""The sources of data keys: what holds the entries of keys, and what makes keys of entries.

source  holder of the entries                     entries
env     EnvironmentKeys: one variable, by commas  PlainKeys: hex digits or base64
file    FileKeys: one on each line, # comments    PlainKeys
hsm     FileKeys                                  Hsm (hsm.py): wrapped by a key in the HSM
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Final

from penstock.registry.data_keys import new_data_key, parse_data_key
from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Settings
from penstock.safety.hsm import PREFIX, Hsm, open_hsm
from penstock.safety.private_file import locked_folder, read_private, replace, write_new

__all__ = ["EnvironmentKeys", "FileKeys", "PlainKeys", "entries_of", "holder_of", "open_entries"]

_VARIABLE: Final = "PENSTOCK_L2_ENCRYPTION_KEY"
_WHAT: Final = "The file of the data keys"


class EnvironmentKeys:
    """The entries in PENSTOCK_L2_ENCRYPTION_KEY. A process cannot change it, so changes are lines for the operator."""

    def __init__(self, text: str) -> None:
        self._items = [item for item in map(str.strip, text.split(",")) if item]

    def read(self) -> list[str]:
        """One entry each, the sealing one first. Raises ConfigurationError without an entry."""
        if not self._items:
            raise ConfigurationError(
                f"There is no data key: {_VARIABLE} is not set. Expected a key there, such as `penstock keys generate` "
                "makes, or another PENSTOCK_INFERENCE_PRIVACY_ENCRYPTION_KEY_SOURCE"
            )
        return self._items

    def create(self, entry: str, _key_id: str) -> str:
        """The line that sets the variable to a first entry. Raises ConfigurationError when it is set."""
        self.refuse_existing()
        return self.replace([entry])

    def refuse_existing(self) -> None:
        """Raises ConfigurationError when there is an entry."""
        if self._items:
            raise ConfigurationError(f"{_VARIABLE} has a data key already. Expected `penstock keys rotate`")

    def line(self, entry: str, _key_id: str) -> str:
        """What `replace` takes for a new entry."""
        return entry

    def replace(self, lines: Sequence[str]) -> str:
        """The line that sets the variable to these entries."""
        return f"export {_VARIABLE}={','.join(lines)}"

    def changing(self) -> AbstractContextManager[None]:
        """Inside the block nothing else changes the entries."""
        return nullcontext()


class FileKeys:
    """The entries in a file of mode 0600. Lines and ends of lines that begin with # are comments."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[str]:
        """The lines, comments included. Raises ConfigurationError, also for a file without an entry."""
        name = self._path.name
        try:
            lines = read_private(self._path, _WHAT).decode(errors="replace").splitlines()
        except FileNotFoundError:
            lines = []
        except OSError as error:
            raise ConfigurationError(
                f"{_WHAT} {name} cannot be read ({error.strerror}). Expected a file of this user"
            ) from None
        if not entries_of(lines):
            raise ConfigurationError(
                f"There is no data key: {name} does not exist or is empty. Expected the file that `penstock keys "
                "generate` makes, or its path in PENSTOCK_INFERENCE_PRIVACY_ENCRYPTION_KEY_FILE"
            )
        return lines

    def create(self, entry: str, key_id: str) -> str:
        """Writes the file. Returns no line for the environment. Raises ConfigurationError when the file exists."""
        try:
            write_new(self._path, _text([self.line(entry, key_id)]))
        except FileExistsError:
            raise self._existing() from None
        except OSError as error:
            raise self._unwritable(error) from None
        return ""

    def refuse_existing(self) -> None:
        """Raises ConfigurationError when the file exists."""
        if self._path.exists():
            raise self._existing()

    def line(self, entry: str, key_id: str) -> str:
        """What `replace` takes for a new entry: with its id, so that an operator knows which line to delete."""
        return f"{entry}  # {key_id}"

    def replace(self, lines: Sequence[str]) -> str:
        """Writes the file in the place of the old one. Returns no line. Raises ConfigurationError."""
        try:
            replace(self._path, _text(lines))
        except OSError as error:
            raise self._unwritable(error) from None
        return ""

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Inside the block no other command changes the file. Raises ConfigurationError."""
        folder = self._path.parent
        with ExitStack() as held:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                held.enter_context(locked_folder(folder))
            except OSError as error:
                raise self._unwritable(error) from None
            yield

    def _existing(self) -> ConfigurationError:
        return ConfigurationError(f"{self._path.name} exists already. Expected `penstock keys rotate`")

    def _unwritable(self, error: OSError) -> ConfigurationError:
        return ConfigurationError(
            f"{_WHAT} {self._path.name} cannot be written ({error.strerror}). Expected a folder of this user"
        )


class PlainKeys:
    """Entries that are keys."""

    def open_all(self, entries: Sequence[str]) -> list[bytes]:
        """The keys of these entries. Raises ConfigurationError."""
        if any(entry.startswith(PREFIX) for entry in entries):
            raise ConfigurationError(
                "The data keys are wrapped by an HSM. Expected PENSTOCK_INFERENCE_PRIVACY_ENCRYPTION_KEY_SOURCE=hsm"
            )
        return [parse_data_key(entry, f"Data key {place}") for place, entry in enumerate(entries, 1)]

    def new_entry(self) -> str:
        """A random key."""
        return new_data_key()


def holder_of(settings: Settings) -> EnvironmentKeys | FileKeys:
    """What holds the entries of the source in the settings."""
    privacy = settings.inference.privacy
    if privacy.encryption_key_source == "env":
        secret = settings.l2_encryption_key
        return EnvironmentKeys(secret.get_secret_value() if secret else "")
    return FileKeys(privacy.encryption_key_file)


def open_entries(settings: Settings, *, makes_keys: bool = False) -> AbstractContextManager[PlainKeys | Hsm]:
    """Makes keys of the entries of the source in the settings; inside the block an HSM is logged in to.

    makes_keys: whether the block makes keys in the HSM. Raises ConfigurationError.
    """
    if settings.inference.privacy.encryption_key_source != "hsm":
        return nullcontext(PlainKeys())
    pin = settings.pkcs11_pin.get_secret_value() if settings.pkcs11_pin else ""
    return open_hsm(settings.inference.privacy, pin, makes_keys=makes_keys)


def entries_of(lines: Sequence[str]) -> dict[int, str]:
    """The entries of lines without comments, by the number of their line."""
    entries = {number: line.partition("#")[0].strip() for number, line in enumerate(lines)}
    return {number: entry for number, entry in entries.items() if entry}


def _text(lines: Sequence[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
