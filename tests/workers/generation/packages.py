"""A `generate` package of a small Llama with random weights, and workers that serve it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.workers.generation.engines import write_model

__all__ = ["write_relay", "write_writer"]

_NO_CACHE: dict[str, Any] = {"policy": {"default": {"cache_ttl_s": 0}}}
"""Most tests are about the writing of texts, also of one that was written before."""


def write_writer(
    root: Path, name: str = "writer", positions: int = 256, *, has_cache: bool = False, **generate: Any
) -> Path:
    """Random weights, a byte tokenizer. positions: of prompt and text. generate: the section of model.yaml."""
    folder = root / name / "1"
    folder.mkdir(parents=True)
    write_model(folder, max_position_embeddings=positions)
    section = {"max_model_len": positions, "max_num_seqs": 4, "kv_cache_mb": 4, "packed_linears": "off", **generate}
    spec = {"name": name, "version": "1", "format": "generate", "generate": section, **({} if has_cache else _NO_CACHE)}
    (folder / "model.yaml").write_text(yaml.safe_dump(spec))
    return folder


def write_relay(root: Path, name: str, version: str = "1", *, has_cache: bool = False, **generate: Any) -> None:
    """A package without weights: another server writes its texts."""
    folder = root / name / version
    folder.mkdir(parents=True)
    spec = {"name": name, "version": version, "format": "generate", "generate": generate}
    spec |= {} if has_cache else _NO_CACHE
    (folder / "model.yaml").write_text(yaml.safe_dump(spec))
