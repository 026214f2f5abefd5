"""requirements.txt of a package -> compared with the packages that are installed here, before the model is built.

Lines are those of pip. A marker decides whether a line counts here. Options that say where or how pip installs are
skipped; those that name other files or folders are refused, because their content could not be compared.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from hashlib import sha256
from importlib import metadata
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.registry.errors import ConfigurationError, MissingRequirement, shown
from penstock.registry.package import Package
from penstock.registry.package.manifest import Manifest

if TYPE_CHECKING:
    from packaging.requirements import Requirement

__all__ = ["REQUIREMENTS_FILE", "check_lines", "check_requirements"]

REQUIREMENTS_FILE: Final = "requirements.txt"
_MAX_BYTES: Final = 1 << 20
_REFUSED: Final = ("-r", "--requirement", "-c", "--constraint", "-e", "--editable")
_COMMENT: Final = re.compile(r"(^|\s)#.*$")
_OPTION: Final = re.compile(r"\s--[a-z].*$")


class _Line(NamedTuple):
    number: int
    text: str


def check_requirements(package: Package, manifest: Manifest) -> None:
    """Compares the requirements of a package with this environment.

    Raises MissingRequirement with the line for pip when one is not met, and ConfigurationError for a line that is no
    requirement.
    """
    if REQUIREMENTS_FILE in manifest.files:
        check_lines(_read(package, manifest), package.spec.reference)


def check_lines(text: str, reference: str) -> None:
    """Compares the text of a requirements.txt with this environment. `reference` names its package.

    Raises as `check_requirements`.
    """
    unmet = []
    for line in _lines(text):
        requirement = _parsed(line, reference)
        if requirement is not None and (problem := _problem(requirement)):
            unmet.append((str(requirement).partition(";")[0].strip(), problem))
    if unmet:
        found = "; ".join(problem for _, problem in unmet)
        wanted = " ".join(shlex.quote(text) for text, _ in unmet)
        raise MissingRequirement(f"{reference}: {REQUIREMENTS_FILE}: {found}. Expected: pip install {wanted}")


def _read(package: Package, manifest: Manifest) -> str:
    label = f"{package.spec.reference}: {REQUIREMENTS_FILE}"
    try:
        with (package.folder / REQUIREMENTS_FILE).open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"{label}: cannot be read ({error.strerror})") from None
    if len(data) > _MAX_BYTES:
        raise ConfigurationError(f"{label}: found more than {_MAX_BYTES} bytes, expected less")
    if sha256(data).hexdigest() != manifest.files[REQUIREMENTS_FILE]:
        raise ConfigurationError(f"{label}: changed since it was hashed, expected the same bytes")
    return data.decode("utf-8-sig", "replace")


def _lines(text: str) -> Iterator[_Line]:
    """The lines without comments, each with the lines that continue it."""
    begun, joined = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        begun = begun or number
        if line.endswith("\\"):
            joined += line[:-1]
            continue
        if content := _COMMENT.sub("", joined + line).strip():
            yield _Line(begun, content)
        begun, joined = 0, ""
    if content := _COMMENT.sub("", joined).strip():
        yield _Line(begun, content)


def _parsed(line: _Line, reference: str) -> Requirement | None:
    """The requirement; None for an option of pip, and for a requirement whose marker does not hold here."""
    from packaging.requirements import InvalidRequirement, Requirement

    label = f"{reference}: {REQUIREMENTS_FILE}, line {line.number}"
    if line.text.startswith("-"):
        if line.text.startswith(_REFUSED):
            option = re.split(r"[\s=]", line.text)[0]
            raise ConfigurationError(f"{label}: found {option}, expected requirements such as scikit-learn>=1.4")
        return None
    try:
        requirement = Requirement(_OPTION.sub("", line.text))
    except InvalidRequirement:
        raise ConfigurationError(
            f"{label}: found {shown(line.text)}, expected a requirement such as scikit-learn>=1.4"
        ) from None
    return requirement if requirement.marker is None or requirement.marker.evaluate() else None


def _problem(requirement: Requirement) -> str:
    """Why the environment does not meet the requirement; empty if it does. Extras and addresses are not compared."""
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is not installed"
    if requirement.specifier.contains(found, prereleases=True):
        return ""
    return f"{requirement.name} is {found}, expected {requirement.specifier}"
