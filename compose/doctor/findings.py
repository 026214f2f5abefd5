"""The findings of `penstock doctor`, and how they are printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

from rich.console import Console
from rich.text import Text

from penstock.compose.terminal import printable

__all__ = ["Finding", "Status", "as_json", "write"]

Status = Literal["ok", "warning", "broken"]
_STYLES: Final[dict[Status, str]] = {"ok": "green", "warning": "yellow", "broken": "bold red"}


class Finding(NamedTuple):
    """The outcome of one check. `fix` is the line to type or the setting to make; empty when all is well."""

    area: str
    status: Status
    what: str
    fix: str = ""


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """{"findings": [...], "warnings": n, "broken": n}"""
    return {
        "findings": [finding._asdict() for finding in findings],
        "warnings": sum(finding.status == "warning" for finding in findings),
        "broken": sum(finding.status == "broken" for finding in findings),
    }


def write(findings: Sequence[Finding], console: Console) -> None:
    """One line per finding with its fix below, and the counts."""
    for finding in findings:
        console.print(Text(f"{finding.status:<8}", style=_STYLES[finding.status]), end="")
        # Not wrapped, so that the fix can be copied.
        console.print(Text(f"{finding.area:<9} {printable(finding.what)}"), soft_wrap=True)
        if finding.fix:
            console.print(Text(f"{'':<17} -> {printable(finding.fix)}"), soft_wrap=True)
    counts = as_json(findings)
    console.print(f"{counts['broken']} broken, {counts['warnings']} warnings")
