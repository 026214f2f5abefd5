"""A `generate` package of a small Llama with random weights, and workers that serve it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.workers.generation.engines import write_model

__all__ = ["write_relay", "write_writer"]


def write_writer(root: Path, name: str = "writer", positions: int = 256, **generate: Any) -> Path:
    """Random weights, a byte tokenizer. positions: of prompt and text. generate: the section of model.yaml."""
    folder = root / name / "1"
    folder.mkdir(parents=True)
    write_model(folder, max_position_embeddings=positions)
    section = {"max_model_len": positions, "max_num_seqs": 4, "kv_cache_mb": 4, "packed_linears": "off", **generate}
    spec = {"name": name, "version": "1", "format": "generate", "generate": section}
    (folder / "model.yaml").write_text(yaml.safe_dump(spec))
    return folder


def write_relay(root: Path, name: str, **generate: Any) -> None:
    """A package without weights: another server writes its texts."""
    folder = root / name / "1"
    folder.mkdir(parents=True)
    spec = {"name": name, "version": "1", "format": "generate", "generate": generate}
    (folder / "model.yaml").write_text(yaml.safe_dump(spec))
