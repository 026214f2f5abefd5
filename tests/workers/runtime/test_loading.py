"""Before a version serves: which frameworks and devices it may have, how often it is warmed up, and loads given up."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import numpy as np
import pytest
import yaml

from penstock.registry.errors import ConfigurationError, ModelNotReady
from penstock.registry.package import load_package
from penstock.workers.runtime import open_runtime
from penstock.workers.runtime.base import Runtime
from penstock.workers.runtime.python_entrypoint import PythonRuntime
from penstock.workers.runtime.transformers import EncoderRuntime
from tests.packages import write_package
from tests.servers import ROOT
from tests.workers.runtime import gate
from tests.workers.runtime.formats import (
    MAX_TOKENS,
    WRITERS,
    answers,
    opened,
    write_encoder,
    write_onnx,
    write_python,
    write_pytorch,
    write_torchscript,
)

SAMPLES = ROOT / "models"
X = np.zeros((1, 4), np.float32)


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter: which modules it has loaded is its own affair."""
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)


def test_opening_a_runtime_imports_no_framework(models_root: Path):
    """Only `load` imports a framework, so that a worker for Python packages starts without any."""
    folders = [str(write(models_root / name)) for name, write in WRITERS.items()] + [str(SAMPLES / "minilm" / "1")]
    program = (
        "import sys; from pathlib import Path; from penstock.registry.package import load_package; "
        "from penstock.workers.runtime import open_runtime; "
        f"[open_runtime(load_package(Path(folder))) for folder in {folders!r}]; "
        "print(sorted({'torch', 'transformers', 'tokenizers', 'onnxruntime', 'onnx'} & set(sys.modules)))"
    )
    ran = run_python(program)
    assert ran.stdout.strip() == "[]", ran.stderr


@pytest.mark.parametrize(
    ("name", "framework"),
    [
        ("pytorch", "pytorch"),
        ("torchscript", "pytorch"),
        ("encoder", "transformers"),
        ("pipeline", "transformers"),
        ("onnx", "onnxruntime"),
    ],
)
def test_framework_that_the_settings_leave_out_is_refused_by_name(models_root: Path, name: str, framework: str):
    """The setting frameworks decides which formats are served (CF-005)."""
    package = load_package(WRITERS[name](models_root))
    allowed = {"onnxruntime", "pytorch", "transformers"} - {framework}
    with pytest.raises(ConfigurationError) as refused:
        open_runtime(package, frameworks=allowed)
    assert str(refused.value) == (
        f"{package.spec.reference}: format {package.spec.format} needs the framework {framework}, expected one of the "
        f"setting frameworks: {', '.join(sorted(allowed))}"
    )
    open_runtime(package, frameworks=[framework])


def test_python_packages_need_no_framework(models_root: Path):
    """Their code imports what it likes."""
    runtime = open_runtime(load_package(write_python(models_root)), frameworks=[])
    runtime.load("cpu", 1)
    assert answers(runtime, x=X)["y"].shape == (1, 4)


def test_worker_for_onnx_alone_never_imports_torch(models_root: Path):
    """With frameworks = [onnxruntime] a graph answers, a torch model is refused, and torch stays away (CF-005)."""
    graph, module = write_onnx(models_root / "a"), write_pytorch(models_root / "b")
    program = f"""
import sys
from pathlib import Path
import numpy as np
from penstock.registry.errors import ConfigurationError
from penstock.registry.package import load_package
from penstock.workers.runtime import open_runtime
runtime = open_runtime(load_package(Path({str(graph)!r})), frameworks=["onnxruntime"])
runtime.load("cpu", 1)
runtime.run(runtime.prepare([{{"x": np.zeros((1, 4), np.float32)}}]))
try:
    open_runtime(load_package(Path({str(module)!r})), frameworks=["onnxruntime"]).load("cpu", 1)
except ConfigurationError as error:
    print(error)
print(sorted({{"torch", "transformers"}} & set(sys.modules)))
"""
    ran = run_python(program)
    assert ran.stdout.splitlines() == [
        "affine/1: format pytorch needs the framework pytorch, expected one of the setting frameworks: onnxruntime",
        "[]",
    ], ran.stderr


@pytest.mark.parametrize("name", WRITERS)
def test_package_for_a_gpu_is_refused_on_a_cpu(models_root: Path, name: str):
    """`device: cuda` is a demand, in every format."""
    folder = WRITERS[name](models_root, device="cuda")
    with pytest.raises(ConfigurationError, match=r"^\w+/1: device: found cpu, expected cuda as its package says$"):
        opened(folder)


def test_package_for_the_cpu_stays_there_on_a_worker_with_a_gpu(models_root: Path):
    """`device: cpu` is kept whatever the worker has."""
    runtime = open_runtime(load_package(write_torchscript(models_root, device="cpu")))
    runtime.load("cuda:0", 1)
    assert answers(runtime, x=X)["y"].shape == (1, 4)


COUNTING = {
    "python": """
    lengths = []
    def build():
        def forward(inputs):
            lengths.append(inputs["x"].shape)
            return {"y": inputs["x"]}
        forward.lengths = lengths
        return forward
    """,
    "pytorch": """
    import torch
    class Module(torch.nn.Module):
        lengths = []
        def forward(self, x):
            self.lengths.append(tuple(x.shape))
            return x.clone()
    def build():
        return Module()
    """,
}


def write_counting(root: Path, format_: str, **fields: Any) -> Path:
    folder = write_package(root, "counting", COUNTING[format_])
    document = yaml.safe_load((folder / "model.yaml").read_text()) | {"format": format_} | fields
    (folder / "model.yaml").write_text(yaml.safe_dump(document))
    return folder


@pytest.mark.parametrize("format_", COUNTING)
@pytest.mark.parametrize(("asked", "forwards"), [(3, 3), (1, 1), (5, 5), (0, 0)])
def test_model_is_run_as_often_as_the_setting_says_before_it_is_ready(
    models_root: Path, format_: str, asked: int, forwards: int
):
    """warmup_requests counts forwards, the one that checks the outputs among them; 0 runs none (CF-015)."""
    runtime = opened(write_counting(models_root, format_), warmup_requests=asked)
    shapes = runtime.model.lengths  # type: ignore[attr-defined]
    assert shapes == [(2, 4), *[(1, 4)] * (forwards - 1)][:forwards]


@pytest.mark.parametrize(("asked", "slices"), [(0, (0, 0, 0)), (1, (1, 1, 1)), (4, (2, 1, 1))])
def test_each_bucket_is_warmed_up_once_at_least(models_root: Path, asked: int, slices: tuple[int, ...]):
    """A length that rows are padded to is not met for the first time by a job, unless no warm-up is asked (CF-015)."""
    folder = write_encoder(models_root, batching={"length_input": "text", "buckets": [8, 16]})
    runtime = opened(folder, warmup_requests=asked)
    assert isinstance(runtime, EncoderRuntime)
    counts = runtime.counts()
    assert tuple(counts[f"slices_of_{length}"] for length in (8, 16, MAX_TOKENS)) == slices
    assert counts["model_calls"] == sum(slices)


def test_first_job_does_not_pay_for_what_the_first_forwards_cost(models_root: Path):
    """The first forwards, in which compilers and caches take their time, are over when the model is ready (CF-015)."""
    source = """
    forwards = []
    def build():
        def forward(inputs):
            forwards.append(1)
            return {"y": inputs["x"] * 0 + len(forwards)}
        return forward
    """
    runtime = opened(write_package(models_root, "slow", source), warmup_requests=3)
    assert answers(runtime, x=X)["y"].flat[0] == 4


def write_stream(root: Path, body: str) -> Path:
    """A streaming package; `body` is that of its entry point, which may note its steps in `log`."""
    source = f"log = []\ndef stream(inputs, ctx):\n{indent(dedent(body), '    ')}\ndef build():\n    return stream\n"
    folder = write_package(root, "stream", source)
    document = yaml.safe_load((folder / "model.yaml").read_text()) | {"streams": True, "batching": {}}
    (folder / "model.yaml").write_text(yaml.safe_dump(document))
    return folder


def stream_log(runtime: Runtime) -> list[object]:
    return runtime.model.__globals__["log"]  # type: ignore[attr-defined, no-any-return]


STREAM = """
log.append(inputs["x"].shape)
yield {"part": inputs["x"]}
return {"y": inputs["x"]}
"""


@pytest.mark.parametrize("asked", [0, 1, 3])
def test_streaming_packages_run_as_often_before_they_are_ready(models_root: Path, asked: int):
    """Each time a stream of one row, like a job, to its end (CF-015)."""
    runtime = opened(write_stream(models_root, STREAM), warmup_requests=asked)
    assert stream_log(runtime) == [(1, 4)] * asked


def test_a_stream_without_an_end_is_closed_in_its_warm_up(models_root: Path):
    """After some chunks it is told that its job is cancelled, and ends where it is."""
    body = """
    try:
        while True:
            log.append("chunk")
            yield {"part": inputs["x"]}
    finally:
        log.append(("closed", ctx.is_cancelled))
    """
    log = stream_log(opened(write_stream(models_root, body), warmup_requests=1))
    assert log == ["chunk"] * 16 + [("closed", True)]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('yield {"part": 1 / 0}', "the first forward failed (ZeroDivisionError: division by zero)"),
        ('yield {}\nreturn {"z": inputs["x"]}', "The model returned the outputs: z. Declared outputs: y"),
    ],
)
def test_a_stream_that_fails_in_its_warm_up_is_refused_unless_none_is_asked(models_root: Path, body: str, problem: str):
    """A worker finds the mistake before the version is active. With 0 it finds it with the first job."""
    folder = write_stream(models_root, body)
    with pytest.raises(ConfigurationError, match=re.escape(f"stream/1: {problem}")):
        opened(folder, warmup_requests=2)
    opened(folder, warmup_requests=0)


GATED = """
from tests.workers.runtime import gate
gate.wait()
def build():
    return lambda inputs: {"y": inputs["x"]}
"""


@pytest.fixture
def waiting(models_root: Path) -> Any:
    """A load that hangs in the package's code: (runtime, its thread, what it raised, the modules before it)."""
    gate.close()
    known = set(sys.modules)
    runtime = open_runtime(load_package(write_package(models_root, "gated", GATED)))
    raised: list[BaseException] = []

    def load() -> None:
        try:
            runtime.load("cpu", 1)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    assert gate.reached.wait(180)
    yield runtime, thread, raised, known
    gate.may_pass.set()
    thread.join(30)


def test_load_that_was_given_up_leaves_nothing(waiting: Any):
    """`close` returns at once while a load hangs. When the load ends, it releases its model (CX-026)."""
    runtime, thread, raised, known = waiting
    runtime.close()
    assert thread.is_alive()
    gate.may_pass.set()
    thread.join(30)
    assert [type(error) for error in raised] == [ModelNotReady]
    assert str(raised[0]) == "gated/1 was unloaded while it was being loaded"
    assert isinstance(runtime, PythonRuntime)
    assert runtime.model is None
    assert (runtime.content_hash, runtime.memory_bytes) == ("", 0)
    assert not [name for name in set(sys.modules) - known if name.startswith("penstock_package_")]


def test_model_is_not_used_before_its_load_has_ended(waiting: Any):
    """A job that comes before the load fails with ModelNotReady (CX-025)."""
    runtime, thread, raised, _ = waiting
    with pytest.raises(ModelNotReady, match=r"^Model not loaded: gated/1$"):
        answers(runtime, x=X)
    gate.may_pass.set()
    thread.join(30)
    assert raised == []
    assert answers(runtime, x=X)["y"].shape == (1, 4)


def test_load_that_fails_leaves_nothing(models_root: Path):
    """The modules of a package that was refused are gone."""
    folder = write_package(models_root, "refused", "def build(): return lambda inputs: {'z': 1}")
    before = set(sys.modules)
    with pytest.raises(ConfigurationError):
        opened(folder)
    assert not [name for name in set(sys.modules) - before if name.startswith("penstock_package_")]
