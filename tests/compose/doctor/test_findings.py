"""Findings as lines of a terminal and as JSON."""

from __future__ import annotations

import json

from rich.console import Console

from penstock.compose.doctor.findings import Finding, as_json, write

FINDINGS = [
    Finding("settings", "ok", "no contradiction"),
    Finding("broker", "warning", "it is slow", "move it"),
    Finding("broker", "broken", "it is a replica", "PENSTOCK_REDIS_URL of the primary"),
    Finding("models", "broken", "bad/1: [red]not[/red] a package\x1b[31m", "correct it"),
]


def written(findings: list[Finding], width: int = 80) -> list[str]:
    """The lines on a console without colours."""
    console = Console(width=width, no_color=True)
    with console.capture() as printed:
        write(findings, console)
    return printed.get().splitlines()


def test_json_has_findings_and_counts():
    """The document has each finding as an object, and the numbers of warnings and broken ones."""
    document = json.loads(json.dumps(as_json(FINDINGS)))
    assert (document["warnings"], document["broken"]) == (1, 2)
    assert document["findings"][1] == {"area": "broker", "status": "warning", "what": "it is slow", "fix": "move it"}
    assert as_json([]) == {"findings": [], "warnings": 0, "broken": 0}


def test_a_finding_is_a_line_with_its_fix_below():
    """A good finding has no second line; the last line has the counts."""
    lines = written(FINDINGS[:3])
    assert lines == [
        "ok      settings  no contradiction",
        "warning broker    it is slow",
        "                  -> move it",
        "broken  broker    it is a replica",
        "                  -> PENSTOCK_REDIS_URL of the primary",
        "1 broken, 1 warnings",
    ]


def test_long_lines_are_not_wrapped():
    """A fix can be copied also from a narrow terminal, and a text searched for."""
    what, fix = "no " * 40 + "way", "redis-cli CONFIG SET " + "x" * 100
    lines = written([Finding("broker", "broken", what, fix)], width=40)
    assert lines[:2] == [f"broken  broker    {what}", f"                  -> {fix}"]


def test_texts_from_elsewhere_have_no_effect():
    """Marks of rich are printed as they are, and control characters do not reach the terminal."""
    (line,) = [line for line in written(FINDINGS) if "bad/1" in line]
    assert "[red]not[/red]" in line
    assert "\x1b" not in line
