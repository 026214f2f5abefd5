"""`penstock doctor`: checks installation, settings, broker and registry, and names the fix of each fault."""

from __future__ import annotations

from penstock.compose.doctor.examine import Finding, as_json, examine, write

__all__ = ["Finding", "as_json", "examine", "write"]
