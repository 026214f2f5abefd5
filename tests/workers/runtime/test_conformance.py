"""One suite over every runtime: what the drain, the loader and the optimizer rely on, whatever the format.

SPEC IN-006 and IN-024: each format is served from a package on disk.
"""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from penstock.registry.errors import ConfigurationError, ModelNotReady
from penstock.registry.package import load_package
from penstock.registry.package.manifest import Manifest
from penstock.registry.tensors import Array
from penstock.workers.runtime import Runtime, open_runtime
from penstock.workers.runtime.loading import LoadOptions, PackageRuntime
from penstock.workers.runtime.pytorch import ModuleRuntime
from tests.servers import ROOT
from tests.workers.runtime import formats
from tests.workers.runtime.jobs import Listener, drained, received

SAMPLES = ROOT / "models"
Job = Mapping[str, Array]
TEXTS = ["abc", "", "zz top", "hello there", "ab" * 9, "q"]
OF_NUMBERS = ["python", "pytorch", "torchscript", "onnx"]


INSTANCES: dict[str, Callable[[Path], Path]] = {
    "processes": lambda root: formats.write_python(root, instances=2),
    "threads": lambda root: formats.write_encoder(root, instances=2, instance_kind="thread"),
}
PIPELINES: dict[str, Callable[[Path], Path]] = {
    "steps": formats.write_steps,
    "instances of steps": lambda root: formats.write_steps(root, instances=2),
}


_IN_BOTH_WAYS = "instances of steps"
"""Slow: instances alone and steps alone stay in `make test`."""


@pytest.fixture(
    scope="module",
    params=[
        *formats.WRITERS,
        "minilm",
        *INSTANCES,
        *(name for name in PIPELINES if name != _IN_BOTH_WAYS),
        pytest.param(_IN_BOTH_WAYS, marks=pytest.mark.slow),
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of each format, the sample encoder with real weights, instances of each kind, and pipelines."""
    if request.param == "minilm":
        return SAMPLES / "minilm" / "1"
    return (formats.WRITERS | INSTANCES | PIPELINES)[request.param](tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def runtime(folder: Path) -> Iterator[Runtime]:
    """It, loaded."""
    loaded = formats.opened(folder)
    yield loaded
    loaded.close()


@pytest.fixture(params=[*formats.WRITERS])
def own_folder(request: pytest.FixtureRequest, models_root: Path) -> Path:
    """A package of each format whose files the test may change."""
    return formats.WRITERS[request.param](models_root)


def jobs_for(runtime: Runtime) -> Sequence[Job]:
    """Jobs of one, two and three rows, as a worker decodes them: read-only views of the received bytes."""
    if runtime.spec.inputs[0].name == "text":
        jobs: list[Job] = [{"text": np.array(texts, object)} for texts in (TEXTS[:1], TEXTS[1:3], TEXTS[3:])]
    else:
        numbers = np.random.default_rng(7)
        jobs = [{"x": numbers.standard_normal((rows, 4), np.float32)} for rows in (1, 2, 3)]
    return [received(job) for job in jobs]


def assert_same(found: Mapping[str, Array], expected: Mapping[str, Array], tolerance: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        if values.dtype == object:
            assert found[name].tolist() == values.tolist()
        else:
            np.testing.assert_allclose(found[name], values, rtol=tolerance, atol=tolerance)


def test_batched_rows_are_those_of_each_job_alone_in_order(runtime: Runtime):
    """A job in a batch gets the same outputs as alone, in its own place."""
    jobs = jobs_for(runtime)
    prepared = runtime.prepare(jobs)
    together = runtime.run(prepared)
    assert prepared.rows == 6
    runtime.spec.signature.check_outputs(together, 6)
    alone = [runtime.run(runtime.prepare([job])) for job in jobs]
    assert_same(together, {name: np.concatenate([one[name] for one in alone]) for name in together}, 1e-5)


def test_stream_of_a_model_that_does_not_stream_is_its_result(runtime: Runtime):
    """Callers need not know which models stream."""
    job = jobs_for(runtime)[1]
    chunks, outputs = drained(runtime.stream(job, Listener()))
    assert chunks == []
    assert_same(outputs, runtime.run(runtime.prepare([job])))


def test_received_bytes_are_not_written_to(runtime: Runtime):
    """Preparing and running a job leaves the job unchanged, and read-only inputs cause no warning."""
    job = jobs_for(runtime)[0]
    before = {name: values.copy() for name, values in job.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runtime.run(runtime.prepare([job]))
    assert_same(job, before)


def test_prepared_batches_may_wait_while_another_runs(runtime: Runtime):
    """A batch is prepared ahead of its turn: preparing the next one must not touch it."""
    first, second, _ = jobs_for(runtime)
    expected = runtime.run(runtime.prepare([first]))
    waiting = runtime.prepare([first])
    runtime.run(runtime.prepare([second]))
    assert_same(runtime.run(waiting), expected)


def test_what_answers_is_named_by_label_and_content(runtime: Runtime, folder: Path):
    """The label is the package's, the hash that of its files."""
    assert runtime.version == runtime.spec.version == "1"
    assert runtime.content_hash == load_package(folder).manifest().content_hash


def test_memory_of_the_weights_is_counted(runtime: Runtime):
    """At least the bytes of the weights; for Python code, the number that its package declares."""
    least = {"python": 0, "pytorch": 80, "torchscript": 80, "onnx": 80, "transformers": 10_000, "pipeline": 160}
    assert runtime.memory_bytes >= least[runtime.spec.format]
    assert (runtime.memory_bytes == 0) == (runtime.spec.format == "python")


def test_one_model_object_serves_unchanged_and_its_calls_are_counted(own_folder: Path):
    """Warm-up and jobs call the one instance that was built, through its adapter, which sets nothing on it (AR-008 to
    AR-011, AR-042, AR-043, CF-015)."""
    runtime = formats.opened(own_folder, warmup_requests=3)
    assert isinstance(runtime, PackageRuntime)
    assert runtime.call_count == 3
    model: Any = runtime.model  # type: ignore[attr-defined]
    before, fired = dict(vars(model)), []
    job = jobs_for(runtime)[0]
    for _ in range(4):
        runtime.run(runtime.prepare([job]))
    assert runtime.call_count == runtime.counts()["model_calls"] == 3 + 4
    assert runtime.model is model  # type: ignore[attr-defined]
    assert vars(model) == before
    if isinstance(model, torch.nn.Module) and not isinstance(model, torch.jit.ScriptModule):
        model.register_forward_hook(lambda *_: fired.append(1))
        runtime.run(runtime.prepare([job]))
        assert fired == [1]
    runtime.close()
    assert runtime.call_count == 0


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_each_format_computes_what_its_author_wrote(name: str, models_root: Path):
    """The same function in every format gives the same numbers (IN-006, IN-024)."""
    runtime = formats.opened(formats.WRITERS[name](models_root))
    x = np.random.default_rng(1).standard_normal((5, 4), np.float32)
    np.testing.assert_allclose(formats.answers(runtime, x=x)["y"], formats.affine(x), rtol=1e-5, atol=1e-6)
    runtime.close()


def test_close_lets_go_of_the_model(own_folder: Path):
    """Nothing of a version that was unloaded stays in memory, also after it answered."""
    runtime = formats.opened(own_folder)
    job = jobs_for(runtime)[2]
    runtime.run(runtime.prepare([job]))
    model = weakref.ref(runtime.model)  # type: ignore[attr-defined]
    runtime.close()
    gc.collect()
    assert model() is None
    assert runtime.memory_bytes == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("precision", ["auto", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["pytorch", "torchscript"])
def test_gpu_answers_like_the_cpu(name: str, precision: str, models_root: Path):
    """The same function on a device of its own, in every precision; `close` gives back what it takes there."""
    runtime = open_runtime(load_package(formats.WRITERS[name](models_root, precision=precision)))
    runtime.load("cuda:0", 1)
    x = np.random.default_rng(1).standard_normal((64, 4), np.float32)
    delta = {"bf16": 1e-1, "fp16": 1e-2}.get(precision, 1e-4)
    np.testing.assert_allclose(formats.answers(runtime, x=x)["y"], formats.affine(x), rtol=0, atol=delta)
    assert isinstance(runtime, ModuleRuntime)
    assert runtime.model is not None
    weights = [(one.is_cuda, weakref.ref(one)) for one in runtime.model.parameters()]
    runtime.close()
    gc.collect()
    assert [(is_cuda, weight()) for is_cuda, weight in weights] == [(True, None)] * 2


def test_model_that_is_not_loaded_says_so(own_folder: Path):
    """Before `load` and after `close` every use is refused in the same words (CX-025)."""
    runtime = open_runtime(load_package(own_folder))
    x = {"x": np.zeros((1, 4), np.float32), "text": np.array(["a"], object)}
    job = {runtime.spec.inputs[0].name: x[runtime.spec.inputs[0].name]}
    refused = pytest.raises(ModelNotReady, match=rf"^Model not loaded: {runtime.spec.reference}$")
    with refused:
        runtime.run(runtime.prepare([job]))
    assert (runtime.content_hash, runtime.memory_bytes) == ("", 0)
    runtime.load("cpu", 1)
    prepared = runtime.prepare([job])
    runtime.close()
    runtime.close()
    with refused:
        runtime.run(prepared)
    with refused:
        drained(runtime.stream(job, Listener()))


def test_threads_load_while_others_predict(own_folder: Path):
    """Loads and unloads of a version beside it do not disturb the one that answers (CX-025)."""
    serving = formats.opened(own_folder)
    job = jobs_for(serving)[2]
    expected = serving.run(serving.prepare([job]))
    is_over, problems, rounds = threading.Event(), [], []

    def predict() -> None:
        try:
            while not is_over.is_set():
                assert_same(serving.run(serving.prepare([job])), expected)
                rounds.append(1)
        except BaseException as error:
            problems.append(error)

    def reload() -> None:
        try:
            for _ in range(3):
                beside = formats.opened(own_folder)
                assert_same(beside.run(beside.prepare([job])), expected)
                beside.close()
        except BaseException as error:
            problems.append(error)

    predicting = threading.Thread(target=predict)
    loading = [threading.Thread(target=reload) for _ in range(2)]
    for thread in (predicting, *loading):
        thread.start()
    for thread in loading:
        thread.join()
    is_over.set()
    predicting.join()
    assert problems == []
    assert rounds
    serving.close()


def test_other_files_than_those_promoted_are_refused_before_anything_is_opened(own_folder: Path):
    """The registry knows a version by its hash; a folder that was changed since is not that version."""
    if (own_folder / "model.py").exists():
        with (own_folder / "model.py").open("a") as source:
            source.write("\nraise SystemExit('executed')\n")
    runtime = open_runtime(load_package(own_folder), "ab" * 32)
    with pytest.raises(ConfigurationError, match=r"differ from those that were promoted .* expected abababababab$"):
        runtime.load("cpu", 1)
    assert runtime.content_hash == ""


def loaded_weights(folder: Path) -> Path:
    """The file that most of the model comes from."""
    candidates = [path for path in folder.rglob("*") if path.suffix in (".safetensors", ".pt", ".onnx")]
    return candidates[0] if candidates else folder / "model.py"


def overwrite(file: Path) -> None:
    """Other bytes in the same file, of the same number, as an attacker or a careless copy would write them."""
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.seek(size // 2)
        opened.write(b"\x01" * (size - size // 2))


def changing(kind: type[PackageRuntime], change: Callable[[], None]) -> type[PackageRuntime]:
    """The runtime class, but that the files change once the model is built."""

    class Changing(kind):  # type: ignore[misc, valid-type]
        def _build(self, manifest: Manifest, device: str, threads: int) -> int:
            size: int = super()._build(manifest, device, threads)
            change()
            return size

    return Changing


def test_files_that_change_during_the_load_are_refused(own_folder: Path):
    """Only hashed content may serve; after a refusal the runtime is empty."""
    package = load_package(own_folder)
    kind = type(open_runtime(package))
    file = loaded_weights(own_folder)
    runtime = changing(kind, lambda: overwrite(file))(package, LoadOptions())  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=rf"{file.name}: changed since it was hashed"):
        runtime.load("cpu", 1)
    assert runtime.model is None  # type: ignore[attr-defined]
    assert runtime.content_hash == ""


def test_files_that_change_after_the_load_change_no_answer(own_folder: Path):
    """No weights are mapped from a file, so a write to it affects the next load and not this one."""
    runtime = formats.opened(own_folder)
    job = jobs_for(runtime)[2]
    expected = runtime.run(runtime.prepare([job]))
    overwrite(loaded_weights(own_folder))
    assert_same(runtime.run(runtime.prepare([job])), expected)
    runtime.close()


WRONG = [
    ({"name": "y", "dtype": "float32", "shape": ["batch", 5]}, "y"),
    ({"name": "y", "dtype": "float64", "shape": ["batch", 4]}, "float64"),
    ({"name": "z", "dtype": "float32", "shape": ["batch", 4]}, "z"),
    ({"name": "y", "dtype": "float32", "shape": ["batch", 4, 1]}, "4"),
]


@pytest.mark.parametrize(
    ("name", "declared", "text"),
    # Outputs of a torch module that are no mapping have no names of their own: they are taken in order.
    [(name, *wrong) for name in OF_NUMBERS for wrong in WRONG if "torch" not in name or wrong[1] != "z"],
)
def test_outputs_other_than_declared_are_refused_at_load(name: str, declared: Any, text: str, models_root: Path):
    """The real outputs are compared before the version serves: one line names the package and the output."""
    folder = formats.WRITERS[name](models_root, outputs=[declared])
    with pytest.raises(ConfigurationError, match=rf"^affine/1: .*{text}") as refused:
        formats.opened(folder)
    assert "\n" not in str(refused.value)
    assert str(folder) not in str(refused.value)


def test_more_outputs_than_the_model_has_are_refused_at_load(own_folder: Path):
    """One more than there are, in every format."""
    document = yaml.safe_load((own_folder / "model.yaml").read_text())
    document["outputs"].append({"name": "more", "dtype": "float32", "shape": ["batch"]})
    (own_folder / "model.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigurationError, match=r"^\w+/1"):
        formats.opened(own_folder)


def test_unreadable_weights_are_one_clear_line(own_folder: Path):
    """The load names the file or folder of an interrupted download, without a path of the machine."""
    file = loaded_weights(own_folder)
    file.write_bytes(b"half a file")
    with pytest.raises(ConfigurationError, match=r"^\w+/1: ") as refused:
        formats.opened(own_folder)
    assert "\n" not in str(refused.value)
    assert str(own_folder.parents[1]) not in str(refused.value)
