"""The tables of `penstock models levels`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console

from penstock.compose.views.levels import draw_levels
from penstock.registry.settings_sections import InferenceConfig
from penstock.workers.levels.optimizer import InferenceOptimizer
from penstock.workers.observe.metrics import InferenceMetrics
from tests.workers.runtime.formats import MAX_TOKENS, answers, opened, write_encoder


def test_levels_show_the_backend_and_the_counts(models_root: Path, tmp_path: Path):
    """A step shows the backend of its form; a version shows model calls and batches per length bucket (CF-013)."""
    runtime = opened(write_encoder(models_root, batching={"length_input": "text", "buckets": [8, 16]}))
    metrics = InferenceMetrics((1.0,))
    optimizer = InferenceOptimizer(
        InferenceConfig(), home=tmp_path, device="cpu", audit=lambda _: None, metrics=metrics, compiler=None
    )
    optimizer.attach("encoder", runtime, runtime.content_hash, 4)
    answers(runtime, text=np.array(["abc"], object))
    (entry,) = optimizer.report()["encoder"]
    steps = entry["steps"]
    assert isinstance(steps, list)
    steps[0] |= {"made": {"backend": "inductor", "compile_s": 12.345678}, "evidence": {"rows": 64.0}}
    console = Console(width=300)
    with console.capture() as printed:
        console.print(draw_levels([{"worker": "cpu0@here", **entry}]))
    text = printed.get()
    assert f"counted: model_calls 4, slices_of_8 2, slices_of_16 1, slices_of_{MAX_TOKENS} 1" in text
    assert "backend inductor, compile_s 12.3457, rows 64" in text
    runtime.close()
