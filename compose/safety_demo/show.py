"""`penstock demo --safety`: the three acts in order, then pictures, a report and figures in a folder."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.compose.safety_demo import acts
from penstock.compose.safety_demo.charts import check_matplotlib, draw_charts
from penstock.compose.safety_demo.page import page, sentences
from penstock.compose.safety_demo.stage import open_stage
from penstock.registry.errors import ConfigurationError
from penstock.workers.runtime.cpu import cpu_label
from penstock.workers.runtime.export import can_export

__all__ = ["show_safety"]


def show_safety(console: Console, environ: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Runs the acts on a private stack, and writes the files. Returns the facts.

    folder: where the files go; it is made if it is not there. Raises ConfigurationError where a package is missing, the
    folder cannot be written to, or the stack cannot start.
    """
    _check(folder)
    begun = time.monotonic()
    console.print(Text.assemble(("Penstock safety demo", "bold"), ": refused, promoted, broken. Takes some minutes"))
    with tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True) as models:
        facts = _acts(console, environ, Path(models))
    facts |= {"machine": _machine(), "seconds": round(time.monotonic() - begun, 1)}
    facts["files"] = _write(facts, folder)
    _close(console, facts)
    return facts


def _acts(console: Console, environ: Mapping[str, str], models: Path) -> dict[str, Any]:
    with open_stage(console, environ, models) as stage:
        _title(console, "Act 1: MiniLM in int8, without calibration")
        refused = acts.refused(stage)
        _told(console, {"refused": refused})
        _title(console, "Act 2: a classifier as an ONNX graph")
        reference = acts.Reference(models)
        vectors = acts.embedded(stage)
        promoted = acts.promoted(stage, vectors, reference)
        _told(console, {"promoted": promoted})
        broken = None
        if promoted["is_promoted"]:
            _title(console, "Act 3: an input on which the form fails")
            broken = acts.broken(stage, vectors, reference, form=promoted["form"])
            _told(console, {"broken": broken})
        return {"refused": refused, "promoted": promoted, "broken": broken}


def _check(folder: Path) -> None:
    """What is missing is said before the minutes, and not after them."""
    check_matplotlib()
    if not can_export():
        raise ConfigurationError("ONNX is not installed. Expected: pip install '.[demo-safety]'")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigurationError(f"--output cannot be written to ({error.strerror}). Expected a folder") from None


def _machine() -> dict[str, Any]:
    return {
        "processor": cpu_label(),
        "cores": os.cpu_count(),
        "Python": platform.python_version(),
        **{name: version(name) for name in ("torch", "onnxruntime", "numpy")},
    }


def _write(facts: Mapping[str, Any], folder: Path) -> dict[str, str]:
    pictures = draw_charts(facts, folder)
    report, data = folder / "report.html", folder / "facts.json"
    report.write_text(page(facts, pictures))
    data.write_text(json.dumps(facts, indent=1) + "\n")
    files = {**pictures, "report": report, "facts": data}
    return {name: str(file.absolute()) for name, file in files.items()}


def _title(console: Console, text: str) -> None:
    console.print(Text(f"\n{text}", style="bold"))


def _told(console: Console, facts: Mapping[str, Any]) -> None:
    for told in sentences(facts).values():
        for sentence in told:
            console.print(Text(f"  {sentence}"))


def _close(console: Console, facts: Mapping[str, Any]) -> None:
    """The closing table, and where the files are."""
    refused, promoted, broken = facts["refused"], facts["promoted"], facts["broken"]
    table = Table(box=None, pad_edge=False)
    for title in ("act", "outcome", "figure", "jobs", "wrong or failed"):
        table.add_column(title)
    canary = refused["canary"]
    table.add_row(
        "int8", canary["verdict"], "; ".join(canary["reasons"]) or f"{canary['pairs']:,} pairs", *_served(refused)
    )
    gain = "gain not measured" if promoted["gain"] is None else f"gain {promoted['gain']:.2f}"
    outcome = "promoted" if promoted["is_promoted"] else "not promoted"
    table.add_row("onnx", f"{promoted['canary']['verdict']}, {outcome}", gain, *_served(promoted))
    if broken:
        end = broken["at_the_end"]
        table.add_row("fault", f"breaker {end['circuit']}", f"{end['left_s']:.0f} s off left", *_served(broken))
    console.print()
    console.print(table)
    console.print(f"\n{facts['seconds']:.0f} s in all. Files:")
    for file in facts["files"].values():
        console.print(f"  {file}", soft_wrap=True)


def _served(act: Mapping[str, Any]) -> tuple[str, str]:
    return f"{act['served']['jobs']:,}", str(act["served"]["wrong_or_failed"])
