"""`make bench-gpu`: what only a GPU can show. Without one every row says that it was not run, and why.

python -m tests.benchmarks.gpu -> a table; the exit status is 1 when a check failed or got a wrong answer
"""

from __future__ import annotations

import gc
import json
import os

# Before anything imports a numeric library, as in the other benchmarks: what runs beside the GPU has one thread.
os.environ["OMP_NUM_THREADS"] = "1"

import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import numpy as np
import pytest
import yaml

from penstock.compose import docstrings
from penstock.registry.package import load_package
from penstock.registry.package.spec_sections import Precision
from penstock.registry.settings_sections import CompilationConfig
from penstock.safety.orchestrator import judge
from penstock.safety.validators import changed_precision_validators
from penstock.workers.batching.calibrate import Calibration, calibrate
from penstock.workers.compilation import TorchCompiler
from penstock.workers.process.device import visible_gpus
from penstock.workers.runtime.base import Prepared, Runtime
from penstock.workers.runtime.device_peak import peak_used_bytes, total_bytes
from penstock.workers.runtime.forms import Forward, Tunable
from penstock.workers.runtime.open import open_runtime
from penstock.workers.versions.device_memory import forward_probe, largest_example
from tests.benchmarks import gpu_generation, mlp
from tests.benchmarks.gpu_generation import ONE_BILLION, SMALL
from tests.benchmarks.harness import Harness
from tests.benchmarks.report import FAILED, Progress, Row, as_data, machine, markdown, median, verdict
from tests.packages import write_package
from tests.servers import ROOT

__all__ = ["CHECKS", "Check", "main", "measure"]

_DEVICE: Final = "cuda:0"
_NOT_RUN: Final = "not run"
_HEADROOMS_PCT: Final = (0, 20, 50)
_ROWS_THAT_FILL: Final = 300
"""So many rows of the hungry model would fill the device."""
_CEILING: Final = 512
_FORWARDS_WATCHED: Final = 3
_DOUBLED_BATCHES: Final = 20
_WORKER_HEADROOM_PCT: Final = 20
_COMPILED_BATCH: Final = 8
_TIMED_FORWARDS: Final = 50
_TIMED_ROUNDS: Final = 9
_COMPARED_TEXTS: Final = 64
_TIMEOUT_S: Final = 120.0
_SHARES: Final = (0.5, 0.85)
_GRAPH_ROWS: Final = (1, 8, 64)

_HOLD_A_DEVICE: Final = """
import os, pathlib, sys
from penstock.registry.errors import ConfigurationError
from penstock.workers.process.device import pin
try:
    pin("cuda", None, pathlib.Path(sys.argv[1]), os.environ)
except ConfigurationError as refusal:
    print("refused", flush=True)
else:
    import torch
    print(os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.device_count(), flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table."""

    what: str
    required: str
    run: Callable[[Progress], tuple[str, bool, dict[str, float]]]
    """What was measured, whether that is enough, and the numbers."""

    def row(self, reason: str, say: Progress) -> Row:
        """Its line; `reason` says why it cannot be run here, if it cannot."""
        if reason:
            return Row(self.what, f"{_NOT_RUN}: {reason}", self.required, "", _NOT_RUN)
        try:
            measured, is_enough, figures = self.run(say)
        except (Exception, pytest.fail.Exception) as error:  # what the other checks found out is worth having
            say(f"{self.what}: {error}\n{traceback.format_exc()}")
            return Row(self.what, f"{FAILED}: {type(error).__name__}", self.required, "", verdict(required=False))
        finally:
            _give_memory_back()
        # A run that is cut off has shown what it found.
        say(f"{self.what}: {measured}")
        met = verdict(required=is_enough) if self.required else ""
        return Row(self.what, measured, self.required, "", met, figures)


def _give_memory_back() -> None:
    """What a check held on the device would count as another process's in the next one."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def _calibrated(say: Progress) -> tuple[str, bool, dict[str, float]]:
    """CF-011: for each headroom the rows, and the peak of forwards with so many."""
    total = total_bytes(_DEVICE)
    found: list[tuple[Calibration, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        runtime = _hungry(Path(folder), total // _ROWS_THAT_FILL)
        for headroom_pct in _HEADROOMS_PCT:
            chosen = calibrate(
                forward_probe(runtime, _DEVICE), total_bytes=total, headroom_pct=headroom_pct, ceiling=_CEILING
            )
            peak_pct = _peak_bytes(runtime, chosen.rows) / total * 100
            say(f"headroom {headroom_pct} %: {chosen.rows} rows in {len(chosen.readings)} forwards, {peak_pct:.1f} %")
            found.append((chosen, peak_pct))
        runtime.close()
    rows = [chosen.rows for chosen, _ in found]
    is_inside = all(peak <= 100 - headroom for headroom, (_, peak) in zip(_HEADROOMS_PCT, found, strict=True))
    return (
        ", ".join(f"{chosen.rows} rows at {peak:.1f} %" for chosen, peak in found),
        is_inside and rows == sorted(rows, reverse=True) and len(set(rows)) == len(rows) and rows[-1] > 1,
        {
            f"rows_at_{headroom}": float(chosen.rows)
            for headroom, (chosen, _) in zip(_HEADROOMS_PCT, found, strict=True)
        },
    )


def _peak_bytes(runtime: Runtime, rows: int) -> int:
    prepared = runtime.prepare([largest_example(runtime, rows)])

    def forwards() -> None:
        for _ in range(_FORWARDS_WATCHED):
            runtime.run(prepared)

    peak = peak_used_bytes(_DEVICE, forwards)
    if peak is None:
        raise MemoryError(f"{rows} rows were chosen and do not fit")
    return peak


def _worker_calibrates(say: Progress) -> tuple[str, bool, dict[str, float]]:
    """CF-007: a worker with max_batch_size 0, and more jobs than two of its batches all the time."""
    import torch

    settings = {
        "PENSTOCK_INFERENCE_DEVICE": "cuda",
        "PENSTOCK_INFERENCE_BATCHING_MAX_BATCH_SIZE": "0",
        "PENSTOCK_INFERENCE_BATCHING_GPU_HEADROOM_PCT": str(_WORKER_HEADROOM_PCT),
    }
    with Harness(settings) as harness:
        server, root = harness.redis(), harness.folder()
        _write_hungry(root, total_bytes(_DEVICE) // _ROWS_THAT_FILL)
        worker = harness.worker(server, "hungry", models_root=root)
        rows = np.ones((_ROWS_THAT_FILL * _DOUBLED_BATCHES, 4), np.float32)
        answers = harness.producer(server).map("hungry", rows, window=2 * _ROWS_THAT_FILL)
        if not np.array_equal(np.stack(answers), rows * 2):
            raise ValueError("Wrong answers: not twice the inputs")
        # What torch reserved at its peak stays reserved.
        free, total = torch.cuda.mem_get_info(torch.device(_DEVICE))
        logs = worker.logs()
    largest = max(line["size"] for line in logs if line["msg"] == "batch committed")
    misfits = sum(line["msg"] == "a forward did not fit the device" for line in logs)
    peak_pct = (1 - free / total) * 100
    say(f"worker: batches of up to {largest}, {peak_pct:.1f} % of the device, {misfits} forwards that did not fit")
    return (
        f"batches of up to {largest} rows, {peak_pct:.1f} % of the device, {misfits} forwards out of memory",
        largest > 1 and peak_pct <= 100 - _WORKER_HEADROOM_PCT and not misfits,
        {"rows": float(largest), "peak_pct": peak_pct, "misfits": float(misfits)},
    )


def _compiled(say: Progress) -> tuple[str, bool, dict[str, float]]:
    """ES-009: MiniLM, the same batch by the reference and by the compiled form, taking turns."""
    runtime = _minilm()
    prepared = _prepared(runtime, _COMPILED_BATCH)
    if not isinstance(runtime, Tunable):
        raise TypeError("MiniLM's runtime has no other forms")
    reference = runtime.forms.reference
    with tempfile.TemporaryDirectory() as folder:
        compiler = TorchCompiler(CompilationConfig(cache_dir=Path(folder) / "cache"), Path(folder) / "key")
        compiled = runtime.candidates(compiler)["compiled"]()
        _check_alike(runtime, compiled(prepared), reference(prepared))
        ratios, eager_ms, compiled_ms = [], [], []
        for _ in range(_TIMED_ROUNDS):
            eager_ms.append(_milliseconds(reference, prepared))
            compiled_ms.append(_milliseconds(compiled, prepared))
            ratios.append(eager_ms[-1] / compiled_ms[-1])
    runtime.close()
    ratio = median(ratios)
    say(f"compiled: {ratio:.2f}x")
    return (
        f"{median(compiled_ms):.2f} against {median(eager_ms):.2f} ms: {ratio:.2f}x",
        ratio >= 1.2,
        {"ratio": ratio, "eager_ms": median(eager_ms), "compiled_ms": median(compiled_ms)},
    )


def _milliseconds(forward: Forward, prepared: Prepared) -> float:
    """Of one forward, answers on the host included."""
    begun = time.perf_counter()
    for _ in range(_TIMED_FORWARDS):
        forward(prepared)
    return (time.perf_counter() - begun) / _TIMED_FORWARDS * 1000


def _one_worker_per_device(say: Progress) -> tuple[str, bool, dict[str, float]]:
    """SH-002: as many processes as there are GPUs, and one more, each of which wants one."""
    gpus = visible_gpus(os.environ)
    with tempfile.TemporaryDirectory() as home, ExitStack() as ends:
        answers = [_held_device(home, ends) for _ in range(len(gpus) + 1)]
    held = [answer.split() for answer in answers if answer != "refused"]
    devices, seen = {device for device, _ in held}, {int(count) for _, count in held}
    say(f"devices: {answers}")
    return (
        f"{len(held)} processes on {len(devices)} devices, each sees {', '.join(map(str, sorted(seen)))}; "
        f"{answers.count('refused')} refused",
        len(held) == len(devices) == len(gpus) and seen == {1} and answers.count("refused") == 1,
        {"gpus": float(len(gpus)), "held": float(len(held)), "devices": float(len(devices))},
    )


def _held_device(home: str, ends: ExitStack) -> str:
    """What a process says that tried to take a device; it keeps it until `ends`."""
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLD_A_DEVICE, home],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    ends.enter_context(child)
    ends.callback(child.kill)
    if child.stdout is None:
        raise RuntimeError("The process has no pipe")
    return child.stdout.readline().strip()


def _precise(precision: Precision) -> Callable[[Progress], tuple[str, bool, dict[str, float]]]:
    def run(say: Progress) -> tuple[str, bool, dict[str, float]]:
        """ES-018: MiniLM in fp32 and in this precision over the same texts."""
        outputs = []
        for each in ("fp32", precision):
            runtime = _minilm(each)
            outputs.append(runtime.run(_prepared(runtime, _COMPARED_TEXTS)))
            spec = runtime.spec
            runtime.close()
        golden, reduced = outputs
        judged = judge([reduced], [golden], changed_precision_validators(spec.outputs, golden))
        say(f"{precision}: {dict(judged.figures)} {judged.reasons}")
        figures = ", ".join(f"{name} {value:.5f}" for name, value in judged.figures.items() if name != "rows")
        return "; ".join((figures, *judged.reasons)), judged.accepted, dict(judged.figures)

    return run


def _generates(rows: int, **options: bool) -> Callable[[Progress], tuple[str, bool, dict[str, float]]]:
    """Decoding of a model of random weights in bf16."""
    return lambda say: gpu_generation.decoding(_DEVICE, ONE_BILLION, rows=rows, **options)


def _against_transformers(
    required: float, *, is_continuous: bool
) -> Callable[[Progress], tuple[str, bool, dict[str, float]]]:
    """Ours and theirs in turns."""
    return lambda say: gpu_generation.against_transformers(_DEVICE, ONE_BILLION, required, is_continuous=is_continuous)


def _replays(say: Progress) -> tuple[str, bool, dict[str, float]]:
    """One launch for all kernels of a step."""
    return gpu_generation.graphs(_DEVICE, ONE_BILLION, rows=_GRAPH_ROWS)


def _keeps_share(say: Progress) -> tuple[str, bool, dict[str, float]]:
    """ES-012, ES-023."""
    return gpu_generation.kept_share(_DEVICE, ONE_BILLION, _SHARES)


def _writes_the_same(attention: str) -> Callable[[Progress], tuple[str, bool, dict[str, float]]]:
    """With the kernel, and without it."""
    return lambda say: gpu_generation.agreement(_DEVICE, SMALL, attention=attention)


CHECKS: Final = (
    Check(
        f"calibrated batch, headroom {' / '.join(map(str, _HEADROOMS_PCT))} %: rows and peak of device memory",
        f"at most {' / '.join(str(100 - headroom) for headroom in _HEADROOMS_PCT)} %, ever fewer rows",
        _calibrated,
    ),
    Check(
        f"worker with max_batch_size 0 and headroom {_WORKER_HEADROOM_PCT} %, twice its batches in flight",
        f"more than 1 row, at most {100 - _WORKER_HEADROOM_PCT} %, never out of memory",
        _worker_calibrates,
    ),
    Check(f"MiniLM compiled against eager, batch {_COMPILED_BATCH}", ">= 1.2x", _compiled),
    Check("two workers never on one device", "each process sees its own, one more is refused", _one_worker_per_device),
    Check("MiniLM in bf16 against fp32", "accepted by the validator", _precise("bf16")),
    Check("MiniLM in fp16 against fp32", "accepted by the validator", _precise("fp16")),
    Check(
        "generation, 1.5 billion parameters in bf16, 64 rows of 512 tokens: tokens/s, share of the bandwidth of copies",
        "",
        _generates(64),
    ),
    Check(
        "generation, the same with compile_decoding",
        ">= 50 %",
        _generates(64, compile_decoding=True),
    ),
    Check(
        "generation, the same for one row with compile_decoding",
        "",
        _generates(1, compile_decoding=True),
    ),
    Check(
        "generation, the same, CUDA graphs against none at " + ", ".join(map(str, _GRAPH_ROWS)) + " rows: tokens/s",
        ">= 1x each",
        _replays,
    ),
    Check(
        "generation, 64 requests, prompts of 16 to 256 tokens, outputs of 16 to 160: tokens/s against batches of 32",
        ">= 2.2x",
        _against_transformers(2.2, is_continuous=False),
    ),
    Check(
        "generation, the same against transformers' continuous batching",
        ">= 2x",
        _against_transformers(2, is_continuous=True),
    ),
    Check(
        "generation, 512 tokens of a prompt in the prefix cache: time to the first token against none",
        ">= 5x",
        lambda say: gpu_generation.cached_prefix(_DEVICE, ONE_BILLION, 5),
    ),
    Check(
        "generation, a prompt of 2,000 tokens beside 8 streams, default budget: longest step against 8 alone",
        "<= 5x",
        lambda say: gpu_generation.long_prompt(_DEVICE, ONE_BILLION, 5),
    ),
    Check(
        "generation, hbm_utilization " + " / ".join(f"{share:g}" for share in _SHARES) + ": memory in use",
        "within 3 points",
        _keeps_share,
    ),
    Check(
        "generation in fp32, the kernel on the GPU against the CPU: greedy tokens",
        "accepted by the validator",
        _writes_the_same("triton"),
    ),
    Check(
        "generation in fp32, SDPA over gathered pages on the GPU against the CPU: greedy tokens",
        "accepted by the validator",
        _writes_the_same("sdpa"),
    ),
)
"""In the order of the table."""


def _minilm(precision: Precision = "auto") -> Runtime:
    runtime = open_runtime(load_package(mlp.MODELS / "minilm" / "1", (mlp.MODELS,)), precision=precision)
    runtime.load(_DEVICE, 1)
    return runtime


def _prepared(runtime: Runtime, texts: int) -> Prepared:
    return runtime.prepare([{"text": np.array([text], object)} for text in docstrings.collect(texts)])


def _check_alike(runtime: Runtime, ours: dict[str, np.ndarray], golden: dict[str, np.ndarray]) -> None:
    judged = judge([ours], [golden], changed_precision_validators(runtime.spec.outputs, golden))
    if not judged.accepted:
        raise ValueError(f"Wrong answers: {'; '.join(judged.reasons)}")


def _hungry(root: Path, row_bytes: int) -> Runtime:
    runtime = open_runtime(load_package(_write_hungry(root, row_bytes), (root,)))
    runtime.load(_DEVICE, 1)
    return runtime


def _write_hungry(root: Path, row_bytes: int) -> Path:
    """Answers 2 x on the device, and takes `row_bytes` of its memory for each row, in two pieces."""
    folder = write_package(
        root,
        "hungry",
        f"""
        import torch

        class Hungry(torch.nn.Module):
            def forward(self, x):
                wide = x[:, :1].expand(-1, {row_bytes // 8}).contiguous()
                return x * 2 + wide.sub_(wide.clone()).sum(1, keepdim=True)

        def build():
            return Hungry()
        """,
    )
    spec = yaml.safe_load((folder / "model.yaml").read_text())
    (folder / "model.yaml").write_text(yaml.safe_dump({**spec, "format": "pytorch", "batching": {}}))
    return folder


def why_not() -> str:
    """Why nothing can be measured here; empty where it can."""
    import torch

    if torch.version.cuda is None:
        return "torch is a build without CUDA"
    return "" if torch.cuda.is_available() else "no CUDA device"


def measure(checks: Sequence[Check], say: Progress) -> list[Row]:
    """A row for each check, run or not."""
    reason = why_not()
    return [check.row(reason, say) for check in checks]


def _say(text: str) -> None:
    click.echo(text, err=True)


@click.command(epilog="Example:\n\n  python -m tests.benchmarks.gpu --json figures.json\n")
@click.option("--only", metavar="WORD", default="", help="Run the rows with this word in them.")
@click.option(
    "--json",
    "file",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the figures there as well.",
)
def main(only: str, file: Path | None) -> None:
    """Measure on a GPU what only a GPU can show, and print the figures as Markdown; progress goes to stderr."""
    rows = measure([check for check in CHECKS if only in check.what], _say)
    described = ", ".join(f"{name} {value}" for name, value in machine().items() if name not in ("load", "date"))
    gpus = ", ".join(gpu.uuid for gpu in visible_gpus(os.environ)) or "none"
    click.echo(f"{machine()['date']}; GPUs {gpus}; {described}\n")
    click.echo(markdown(rows, []))
    if file is not None:
        file.write_text(json.dumps(as_data(rows, []), indent=1))
    if any(row.measured.startswith(FAILED) for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
