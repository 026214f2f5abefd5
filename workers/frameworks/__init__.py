"""Model objects of any framework at the serving boundary: which framework they are of, and who calls them."""

from __future__ import annotations

__all__ = ["adapters", "detector", "inference_proxy"]
