"""The same load in other shapes: several models, many tenants, several rows, priorities, traces, keys, texts, streams.

Each shape runs in turn with the plain one (one model, one tenant, one row, one priority), on the same worker.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from tests.benchmarks import mlp
from tests.benchmarks.clients import MODELS_OF_SHAPES, SHAPES, STREAMING_MODEL, TEXT_MODEL
from tests.benchmarks.harness import Harness, Sample
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale

__all__ = ["measure"]

_IN_FLIGHT: Final = 256
_PLAIN: Final = "plain"
_MIXED: Final = "mixed"
_STREAMS: Final = "streams"
_STREAMS_ARE_SLOWER: Final = 10
_REQUIRED: Final = 0.75
_AIM: Final = 0.9
_STREAMING: Final = """
import runpy
from pathlib import Path

def build():
    module = runpy.run_path(str(Path(__file__).with_name("module.py")))["build"]().eval()

    def stream(inputs, context):
        import torch

        with torch.inference_mode():
            logits = module(torch.from_numpy(inputs["x"].copy())).numpy()
        yield {"logits": logits}
        return {"logits": logits}

    return stream
"""

_TEXT: Final = """
import runpy
from pathlib import Path

def build():
    module = runpy.run_path(str(Path(__file__).with_name("module.py")))["build"]().eval()

    def forward(inputs):
        import numpy
        import torch

        # The text of a warm-up is a shorter one.
        text = "".join([each.ljust(1536, chr(0))[:1536] for each in inputs["x"].tolist()])
        rows = numpy.frombuffer(bytearray(text, "latin-1"), "<f4").reshape(-1, 384)
        with torch.inference_mode():
            return {"logits": module(torch.from_numpy(rows)).numpy()}

    return forward
"""


def measure(scale: Scale, say: Progress) -> list[Row]:
    """See the module."""
    with Harness() as harness:
        server = harness.redis()
        models = [*MODELS_OF_SHAPES, STREAMING_MODEL, TEXT_MODEL]
        worker = harness.worker(server, *models, models_root=_models(harness.folder()))
        clients = [harness.client(shape, server.url, worker=worker, broker=server) for shape in SHAPES]
        samples: dict[str, list[Sample]] = {shape: [] for shape in SHAPES}
        for client in clients:
            client.run(min(512, scale.jobs), _IN_FLIGHT)
        for number in range(scale.rounds):
            for client in clients:
                jobs = scale.jobs // _STREAMS_ARE_SLOWER if client.kind == _STREAMS else scale.jobs
                sample = client.run(jobs, _IN_FLIGHT)
                samples[client.kind].append(sample)
                rate = f"{sample.jobs_per_s:,.0f}/s, {_spent([sample])}"
                say(f"shapes {number + 1}/{scale.rounds}: {client.kind}: {rate}")
    return [_row(shape, samples[shape], samples[_PLAIN]) for shape in SHAPES if shape != _PLAIN]


def _row(shape: str, ours: Sequence[Sample], plain: Sequence[Sample]) -> Row:
    ratio = median(our.jobs_per_s / one.jobs_per_s for our, one in zip(ours, plain, strict=True))
    rates = [median(each.jobs_per_s for each in samples) for samples in (ours, plain)]
    measured = f"{rates[0]:,.0f} against {rates[1]:,.0f} jobs/s: {ratio:.2f}x; {_spent(ours)} against {_spent(plain)}"
    figures = {"ratio": ratio, "jobs_per_s": rates[0], "worker_us": median(each.worker_us for each in ours)}
    what = f"{SHAPES[shape].title}, against one model, tenant, row and priority"
    if shape != _MIXED:
        return Row(what, measured, figures=figures)
    ok = verdict(required=ratio >= _REQUIRED, aim=ratio >= _AIM)
    return Row(what, measured, f">= {_REQUIRED}x", f">= {_AIM}x", ok, figures)


def _spent(runs: Sequence[Sample]) -> str:
    parts = [median(getattr(run, part) for run in runs) for part in ("worker_us", "client_us", "broker_us")]
    return " / ".join(f"{part:,.0f}" for part in parts) + " us"


def _models(root: Path) -> Path:
    """The benchmark's model under several names, as one that streams its answer as one chunk, and as one of texts."""
    package = mlp.MODELS / "mlp" / "1"
    spec = yaml.safe_load((package / "model.yaml").read_text())
    for name in MODELS_OF_SHAPES:
        copied = shutil.copytree(package, root / name / "1", ignore=shutil.ignore_patterns("__pycache__"))
        (copied / "model.yaml").write_text(yaml.safe_dump(spec | {"name": name}))
    streamed = {"name": STREAMING_MODEL, "format": "python", "streams": True, "batching": {"max_batch_size": 1}}
    _write(root, _STREAMING, package, spec | streamed)
    texts = {"name": TEXT_MODEL, "format": "python", "inputs": [{"name": "x", "dtype": "string", "shape": ["batch"]}]}
    _write(root, _TEXT, package, spec | texts)
    return root


def _write(root: Path, source: str, package: Path, spec: dict[str, Any]) -> None:
    """A Python package around the module of `package`."""
    folder = root / spec["name"] / "1"
    folder.mkdir(parents=True)
    shutil.copy(package / "model.py", folder / "module.py")
    (folder / "model.py").write_text(source)
    (folder / "model.yaml").write_text(yaml.safe_dump(spec))
