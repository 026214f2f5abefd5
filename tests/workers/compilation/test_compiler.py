"""TorchCompiler: the outputs of a compiled form, its refusals, and that the serving module stays unchanged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from penstock.registry.errors import ConfigurationError
from penstock.registry.package import Package
from penstock.registry.package.spec_sections import Precision
from penstock.registry.settings import Settings
from penstock.registry.settings_sections import CompilationConfig
from penstock.workers.compilation import CompiledForward, TorchCompiler, TorchCompileSafetyMonitor
from penstock.workers.compilation.compiler import _backend
from penstock.workers.runtime.compilable import Compilable, CompilationRefused, Shapes
from penstock.workers.runtime.pytorch import PyTorchRuntime
from penstock.workers.runtime.tracing import trace
from tests.servers import ROOT, leave_out, wait_until
from tests.workers.compilation.conftest import Compiled
from tests.workers.compilation.packages import loaded, write_module

WAIT_S = 60.0
pytestmark = pytest.mark.timeout(900)
"""A C++ compiler beside other tests takes minutes on a slow machine."""


@pytest.fixture
def compiler(tmp_path: Path) -> TorchCompiler:
    """A compiler with nothing stored."""
    return TorchCompiler(CompilationConfig(cache_dir=tmp_path / "cache"), tmp_path / "compilation.key")


@dataclass
class Swapped:
    """A loaded runtime with another module than the one of its package."""

    runtime: PyTorchRuntime
    module: torch.nn.Module
    examples: tuple[tuple[torch.Tensor, ...], ...]
    content_hash: str

    @classmethod
    def of(cls, compiled: Compiled, module: torch.nn.Module) -> Swapped:
        """With the same parameter names and examples."""
        runtime = compiled.runtime
        return cls(runtime, module, runtime.compilable("compiled").examples, runtime.content_hash)

    @property
    def package(self) -> Package:
        """The runtime's."""
        return self.runtime.package

    @property
    def precision(self) -> Precision:
        """The runtime's."""
        return self.runtime.precision

    def compilable(self, form: str) -> Compilable:
        """The other module."""
        return Compilable(self.module, self.examples)


class Linear(torch.nn.Module):
    """A layer of the names that the package's module has."""

    def __init__(self, answer: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self._answer = answer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs that the test chose."""
        return self._answer(x)


def without_building(compiled: Compiled, monitor: TorchCompileSafetyMonitor | None = None) -> TorchCompiler:
    """A compiler that has the stored artefact and can make no other."""
    compiler = TorchCompiler(compiled.config, compiled.key_file, monitor)
    compiler.stop()
    return compiler


@pytest.fixture
def kept(compiled: Compiled) -> Iterator[Path]:
    """The stored artefact, restored after the test."""
    artifact, data = compiled.artifact, compiled.artifact.read_bytes()
    yield artifact
    artifact.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 3, 17, 64])
def test_one_graph_answers_every_batch(compiled: Compiled, rows: int):
    """ES-009: every number of rows in the examples' range is answered as the module does, by the same graph."""
    before = compiled.forward.uncovered_calls
    with torch.inference_mode():
        x = torch.randn(rows, 16)
        module = compiled.runtime.compilable("compiled").module
        assert torch.allclose(compiled.forward(x), module(x), atol=1e-6)
    assert compiled.forward.uncovered_calls == before
    assert compiled.forward.report.graphs == 1


@pytest.mark.slow
def test_other_shapes_are_answered_by_the_module(compiled: Compiled):
    """More rows than any example had, or another layout in memory: right answers, and the first is counted."""
    before = compiled.forward.uncovered_calls
    module = compiled.runtime.compilable("compiled").module
    with torch.inference_mode():
        many, turned = torch.randn(65, 16), torch.randn(16, 4).T
        assert torch.equal(compiled.forward(many), module(many))
        assert torch.allclose(compiled.forward(turned), module(turned), atol=1e-6)
    assert compiled.forward.uncovered_calls == before + 1


@pytest.mark.slow
def test_report_says_how_it_was_compiled(compiled: Compiled):
    """CF-013: the backend that was chosen, the graph breaks, the time and the memory, as plain data."""
    report = compiled.forward.made
    assert report["backend"] == "inductor"
    assert (report["graph_breaks"], report["graphs"], report["was_warm"]) == (0, 1, False)
    assert 0 < compiled.forward.report.compile_s < 600
    assert compiled.forward.report.memory_growth_mb <= 500


@pytest.mark.slow
def test_model_serves_on_while_it_is_compiled(compiled: Compiled):
    """CX-025: every eager forward of another thread during the compilation was right."""
    assert compiled.served.wrong == []
    assert compiled.served.forwards > 20


@pytest.mark.slow
def test_serving_module_stays_as_it_was(compiled: Compiled):
    """Its class, its call and its parameters are its own, and the compiled form reads those and no copies."""
    module = compiled.runtime.model
    assert isinstance(module, torch.nn.Module)
    assert type(module).__name__ == "Module"
    assert module._compiled_call_impl is None
    with torch.inference_mode():
        x = torch.ones(2, 16)
        bias = module.get_parameter("linear.bias")
        before = bias.clone()
        bias.add_(100.0)
        found, expected = compiled.forward(x), module(x)
        bias.copy_(before)
    assert torch.allclose(found, expected)
    assert found.min() > 90


@pytest.mark.slow
def test_other_threads_run_during_a_forward(compiled: Compiled):
    """The worker's other threads send beats and renew leases meanwhile: a forward holds no lock of the interpreter."""
    began, ended = threading.Event(), threading.Event()
    answers: list[torch.Tensor] = []

    def serve() -> None:
        with torch.inference_mode():
            rows = torch.randn(64, 16)
            began.set()
            # Kept, because a tensor that goes lets go of the lock as well.
            answers.append(compiled.forward(rows))
            ended.set()

    interval = sys.getswitchinterval()
    # From now on a thread runs until it lets go of the lock by itself.
    sys.setswitchinterval(WAIT_S)
    try:
        thread = threading.Thread(target=serve)
        thread.start()
        began.wait()
        is_in_the_middle = not ended.is_set()
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    assert is_in_the_middle


@pytest.mark.slow
def test_several_threads_get_their_own_answers(compiled: Compiled):
    """Calls at the same time take turns and mix nothing up."""
    module = compiled.runtime.compilable("compiled").module
    wrong: list[int] = []

    def serve(seed: int) -> None:
        with torch.inference_mode():
            rows = torch.full((2 + seed, 16), float(seed))
            expected = module(rows)
            wrong.extend(seed for _ in range(50) if not torch.allclose(compiled.forward(rows), expected, atol=1e-6))

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.slow
def test_short_call_does_not_wait_for_a_long_one(compiled: Compiled):
    """A model of some concurrency, or one that is timed while it serves, runs its compiled forwards side by side."""
    is_over = threading.Event()
    long_calls = 0

    def serve() -> None:
        nonlocal long_calls
        with torch.inference_mode():
            rows = torch.randn(64, 16)
            while not is_over.is_set():
                compiled.forward(rows)
                long_calls += 1

    thread = threading.Thread(target=serve)
    thread.start()
    beside = 0
    with torch.inference_mode():
        row = torch.randn(1, 16)
        wait_until(lambda: long_calls > 0, WAIT_S, "a long call")
        for _ in range(20):
            before = long_calls
            compiled.forward(row)
            beside += long_calls == before
    is_over.set()
    thread.join()
    assert beside > 10


@pytest.mark.slow
def test_closed_form_lets_the_module_answer(compiled: Compiled):
    """A call that comes after the end is answered all the same."""
    form = without_building(compiled).compile(compiled.runtime, "compiled")
    form.close()
    with torch.inference_mode():
        x = torch.ones(2, 16)
        assert torch.equal(form(x), compiled.runtime.compilable("compiled").module(x))
    assert form.uncovered_calls == 1


SECOND_START = """
import sys
from pathlib import Path
from penstock.registry.settings_sections import CompilationConfig
from tests.workers.compilation.packages import loaded
from penstock.workers.compilation import TorchCompiler

package, home = map(Path, sys.argv[1:])
compiler = TorchCompiler(CompilationConfig(cache_dir=home / "cache"), home / "compilation.key")
report = compiler.compile(loaded(package), "compiled").report
print(report.was_warm, compiler.refused_artifacts, report.compile_s < 30)
"""


@pytest.mark.slow
def test_second_process_uses_the_stored_artefact(compiled: Compiled):
    """CF-014, AR-040: another process has the compiled form at once, on a machine without a C++ compiler."""
    environment = {**os.environ, "CXX": "/bin/false", "CC": "/bin/false", "PYTHONPATH": str(ROOT)}
    started = subprocess.run(
        [sys.executable, "-c", SECOND_START, compiled.package, compiled.home],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert started.stdout.split() == ["True", "0", "True"]


@pytest.mark.slow
def test_tampered_artefact_is_refused(compiled: Compiled, kept: Path):
    """AR-040: one changed byte, and the file is counted, moved aside and not loaded."""
    data = bytearray(kept.read_bytes())
    data[len(data) // 2] ^= 1
    kept.write_bytes(data)
    compiler = without_building(compiled)
    with pytest.raises(CompilationRefused, match="The worker is stopping"):
        compiler.compile(compiled.runtime, "compiled")
    assert compiler.refused_artifacts == 1
    assert not kept.exists()


@pytest.mark.slow
def test_full_disk_costs_no_artefact(compiled: Compiled, monkeypatch: pytest.MonkeyPatch):
    """What cannot be unpacked for want of room is kept, and used when there is room again."""
    with monkeypatch.context() as full:
        full.setattr("tempfile.tempdir", str(compiled.home / "absent"))
        with pytest.raises(FileNotFoundError):
            without_building(compiled).compile(compiled.runtime, "compiled")
    assert without_building(compiled).compile(compiled.runtime, "compiled").report.was_warm


@pytest.mark.slow
def test_artefact_belongs_to_one_content(compiled: Compiled):
    """AR-040: a model of other content is compiled for itself."""
    module = compiled.runtime.compilable("compiled").module
    other = Swapped.of(compiled, module)
    other.content_hash = "0" * 64
    assert without_building(compiled).compile(Swapped.of(compiled, module), "compiled").report.was_warm
    with pytest.raises(CompilationRefused, match="The worker is stopping"):
        without_building(compiled).compile(other, "compiled")


@pytest.mark.slow
def test_artefact_belongs_to_the_library_of_the_models(compiled: Compiled, monkeypatch: pytest.MonkeyPatch):
    """AR-040: another transformers computes an encoder in its own way, whatever the package's files say."""
    monkeypatch.setattr("penstock.workers.compilation.compiler.version", lambda name: f"another {name}")
    with pytest.raises(CompilationRefused, match="The worker is stopping"):
        without_building(compiled).compile(compiled.runtime, "compiled")


@pytest.mark.slow
def test_artefact_belongs_to_a_number_of_threads(compiled: Compiled):
    """The code says with how many threads it runs, so other settings have code of their own."""
    torch.set_num_threads(2)
    try:
        with pytest.raises(CompilationRefused, match="The worker is stopping"):
            without_building(compiled).compile(compiled.runtime, "compiled")
    finally:
        torch.set_num_threads(1)


@pytest.mark.slow
def test_other_answers_are_refused(compiled: Compiled, kept: Path):
    """AR-055: compiled code with other outputs than the module is never used."""
    lying = Swapped.of(compiled, Linear(lambda x: x))
    with pytest.raises(CompilationRefused, match="The worker is stopping"):
        without_building(compiled).compile(lying, "compiled")
    # An artefact of no use is dropped before anything is built in its place.
    assert not kept.exists()


@pytest.mark.slow
def test_non_finite_answers_are_refused(compiled: Compiled, kept: Path, caplog: pytest.LogCaptureFixture):
    """AR-041: NaN in a compiled answer stops the swap, and the log says so."""
    module = Linear(lambda x: x)
    torch.nn.init.constant_(module.linear.bias, float("nan"))
    caplog.set_level("INFO", "penstock.compilation")
    with pytest.raises(CompilationRefused, match="The worker is stopping"):
        without_building(compiled).compile(Swapped.of(compiled, module), "compiled")
    assert [record.__dict__["reason"] for record in caplog.records] == ["output contains NaN or infinity"]


@pytest.mark.slow
def test_memory_growth_is_refused(compiled: Compiled, kept: Path, caplog: pytest.LogCaptureFixture):
    """AR-041: growth beyond the threshold stops the swap, also when another part of the process grew."""
    hoard: list[torch.Tensor] = []
    original = compiled.runtime.compilable("compiled").module

    def growing(x: torch.Tensor) -> torch.Tensor:
        hoard.append(torch.ones(16_000_000))
        answer: torch.Tensor = original(x)
        return answer

    module = Linear(growing)
    module.load_state_dict(original.state_dict())
    caplog.set_level("INFO", "penstock.compilation")
    monitor = TorchCompileSafetyMonitor(memory_growth_threshold_mb=32.0)
    with pytest.raises(CompilationRefused, match="The worker is stopping"):
        without_building(compiled, monitor).compile(Swapped.of(compiled, module), "compiled")
    assert caplog.records[0].__dict__["reason"].endswith("expected at most 32")


BREAKS = "\n".join(["x = x + 1", "torch._dynamo.graph_break()"] * 6 + ["return x + 1"])


@pytest.mark.slow
def test_too_many_graph_breaks_are_refused(tmp_path: Path, compiler: TorchCompiler):
    """CF-059, AR-041, AR-062: the sixth graph break stops it before anything is compiled; nothing is stored."""
    runtime = loaded(write_module(tmp_path / "models", BREAKS))
    with pytest.raises(CompilationRefused, match=r"^found 6 graph breaks, expected at most 5$"):
        compiler.compile(runtime, "compiled")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        ("return x if x.shape[0] % 4 == 2 else x * 2", "need a graph of their own"),
        ("return x if x.shape[0] > 10 else x * 2", "need a graph of their own|cannot be traced as one graph"),
        ("return x * 2 if float(x.sum()) > 0 else x", "cannot be traced as one graph"),
    ],
)
def test_model_that_is_not_one_graph_is_refused(tmp_path: Path, forward: str, reason: str):
    """Compiled code has no guards, so a model that takes other paths for other shapes or numbers stays as it is."""
    runtime = loaded(write_module(tmp_path / "models", forward))
    target = runtime.compilable("compiled")
    with pytest.raises(CompilationRefused, match=reason):
        trace(target, Shapes.of(target.examples))


def test_traceable_model_passes_its_guards(tmp_path: Path):
    """The check of the guards lets a plain model through."""
    target = loaded(write_module(tmp_path / "models")).compilable("compiled")
    assert trace(target, Shapes.of(target.examples)).graph_module is not None


def test_disabled_compilation_runs_no_dynamo(tmp_path: Path):
    """CF-012: with compilation.enabled false, dynamo sees no frame and no folder or key is made."""
    counters.clear()
    runtime = loaded(write_module(tmp_path / "models"))
    compiler = TorchCompiler(
        CompilationConfig(enabled=False, cache_dir=tmp_path / "cache"), tmp_path / "compilation.key"
    )
    with pytest.raises(CompilationRefused, match=r"^compilation\.enabled is false$"):
        compiler.compile(runtime, "compiled")
    assert sum(counters["frames"].values()) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models"]


def test_cudagraphs_on_a_cpu_are_refused(tmp_path: Path):
    """CF-013: CUDA graphs need a GPU, and the text says what to set instead."""
    config = CompilationConfig(backend="cudagraphs", cache_dir=tmp_path / "cache")
    runtime = loaded(write_module(tmp_path / "models"))
    with pytest.raises(CompilationRefused, match="found cudagraphs on cpu, expected auto or inductor"):
        TorchCompiler(config, tmp_path / "compilation.key").compile(runtime, "compiled")


@pytest.mark.parametrize(
    ("backend", "chosen"), [("auto", "inductor"), ("inductor", "inductor"), ("cudagraphs", "cudagraphs")]
)
def test_backend_on_a_gpu(backend: str, chosen: str):
    """CF-013: a GPU has every backend, and auto is the one without a cost for each shape."""
    config = CompilationConfig.model_validate({"backend": backend})
    assert _backend(config, torch.device("cuda:0")) == chosen


def test_unknown_backend_stops_the_start():
    """CF-013: a misspelt backend is found when the settings are read."""
    with pytest.raises(ConfigurationError, match=r"PENSTOCK_INFERENCE_COMPILATION_BACKEND.*'auto', 'inductor'"):
        Settings.load(environ={"PENSTOCK_INFERENCE_COMPILATION_BACKEND": "inductr"})


def test_cache_folder_follows_its_variable(tmp_path: Path):
    """CF-014: the folder lies where the environment says."""
    environ = {"PENSTOCK_INFERENCE_COMPILATION_CACHE_DIR": str(tmp_path / "elsewhere")}
    config = Settings.load(environ=environ).inference.compilation
    TorchCompiler(config, tmp_path / "compilation.key")
    assert (tmp_path / "elsewhere").is_dir()


def test_model_that_is_not_loaded_is_refused(tmp_path: Path, compiler: TorchCompiler, compiled_free: PyTorchRuntime):
    """Without a hash there is nothing to say which code was compiled."""
    with pytest.raises(CompilationRefused, match="were not hashed"):
        compiler.compile(compiled_free, "compiled")


@pytest.fixture
def compiled_free(tmp_path: Path) -> PyTorchRuntime:
    """A runtime before its load."""
    from penstock.registry.package import load_package
    from penstock.workers.runtime.open import open_runtime

    runtime = open_runtime(load_package(write_module(tmp_path / "models")))
    assert isinstance(runtime, PyTorchRuntime)
    return runtime


WAITS_IN_THE_CHILD = """
import os, time
from pathlib import Path
if marker := os.environ.get("CHILD_MARKER"):
    secrets = [name for name in os.environ if name.startswith("PENSTOCK_")]
    Path(marker + ".part").write_text(f"{os.getpid()} {os.getpriority(os.PRIO_PROCESS, 0)} {len(secrets)}")
    os.replace(marker + ".part", marker)
    time.sleep(600)
"""


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """The file in which the child reports its pid, its niceness, and the number of secrets that it sees."""
    return tmp_path / "marker"


@pytest.fixture
def waiting(tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> PyTorchRuntime:
    """A runtime whose package loads here, and hangs in the compiler's process."""
    runtime = loaded(write_module(tmp_path / "models", before_build=WAITS_IN_THE_CHILD))
    monkeypatch.setenv("CHILD_MARKER", str(marker))
    monkeypatch.setenv("PENSTOCK_SIGNING_KEYS", "main:c2VjcmV0")
    return runtime


@pytest.mark.slow
def test_stopping_ends_the_compiler(compiler: TorchCompiler, waiting: PyTorchRuntime, marker: Path):
    """A worker that stops does not wait: the child ends at once. It ran at low priority and knew no secrets."""
    refusals: list[str] = []

    def compile_it() -> None:
        try:
            compiler.compile(waiting, "compiled")
        except CompilationRefused as refusal:
            refusals.append(str(refusal))

    thread = threading.Thread(target=compile_it)
    thread.start()
    wait_until(marker.exists, WAIT_S, "the child")
    compiler.stop()
    thread.join(WAIT_S)
    pid, niceness, secrets = map(int, marker.read_text().split())
    assert refusals == ["The worker is stopping"]
    assert not is_running(pid)
    assert niceness >= 5
    assert secrets == 0


@pytest.mark.slow
def test_compiler_that_hangs_is_ended(tmp_path: Path, waiting: PyTorchRuntime):
    """A compilation has a time limit, and says so."""
    compiler = TorchCompiler(
        CompilationConfig(cache_dir=tmp_path / "cache"), tmp_path / "compilation.key", build_timeout_s=0.5
    )
    with pytest.raises(CompilationRefused, match="The compiler took longer than 0 s"):
        compiler.compile(waiting, "compiled")


KILLED_WORKER = """
import os
import sys
from pathlib import Path
from penstock.registry.settings_sections import CompilationConfig
from tests.workers.compilation.packages import loaded
from penstock.workers.compilation import TorchCompiler

package, home, marker = map(Path, sys.argv[1:])
runtime = loaded(package)
os.environ["CHILD_MARKER"] = str(marker)
TorchCompiler(CompilationConfig(cache_dir=home / "cache"), home / "compilation.key").compile(runtime, "compiled")
"""


@pytest.mark.slow
def test_compiler_ends_with_its_worker(tmp_path: Path, marker: Path):
    """A worker that is killed leaves no compiler behind, and no folder of it."""
    package = write_module(tmp_path / "models", before_build=WAITS_IN_THE_CHILD)
    (tmp_path / "tmp").mkdir()
    worker = subprocess.Popen(
        [sys.executable, "-c", KILLED_WORKER, package, tmp_path, marker],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")},
    )
    try:
        wait_until(marker.exists, WAIT_S, "the child")
    finally:
        worker.kill()
        worker.wait()
    pid = int(marker.read_text().split()[0])
    wait_until(lambda: not is_running(pid), 10, "the end of the child")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_compiler_without_a_package_says_what_was_wrong(tmp_path: Path, compiler: TorchCompiler):
    """What the child process found out reaches the caller in one line."""
    runtime = loaded(write_module(tmp_path / "models"))
    shutil.rmtree(tmp_path / "models")
    with pytest.raises(CompilationRefused, match=r"^module/1/model\.yaml: cannot be read"):
        compiler.compile(runtime, "compiled")


def test_importing_the_package_imports_no_torch():
    """A worker of Python packages starts without it."""
    program = "import sys, workers.compilation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=ROOT).returncode == 0


@pytest.mark.gpu
@pytest.mark.slow
def test_cudagraphs_replay_on_a_gpu(tmp_path: Path):
    """CF-013: with backend cudagraphs the second call of a shape is a replay, counted, with the right answer."""
    if not torch.cuda.is_available():
        leave_out("needs a CUDA device")
    runtime = loaded(write_module(tmp_path / "models"), "cuda:0")
    config = CompilationConfig(backend="cudagraphs", cache_dir=tmp_path / "cache")
    form: CompiledForward = TorchCompiler(config, tmp_path / "compilation.key").compile(runtime, "compiled")
    assert form.report.backend == "cudagraphs"
    before = form.replays
    with torch.inference_mode():
        for number in range(1, 4):
            x = torch.full((4, 16), float(number), device="cuda:0")
            assert torch.allclose(form(x), runtime.compilable("compiled").module(x), atol=1e-5)
    assert form.replays == before + 3
