"""One suite over every runtime, then what is particular to each."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from registry.errors import ConfigurationError, ModelError, OutOfMemory
from registry.package import Package, load_package
from registry.tensors import Array, decode, encode
from tests.packages import write_package
from workers.runtime import Runtime, open_runtime
from workers.runtime.python_entrypoint import PythonRuntime
from workers.runtime.pytorch import PyTorchRuntime
from workers.runtime.transformers import EncoderRuntime, slice_by_length

SAMPLES = Path(__file__).parents[2] / "models"
TEXTS = [
    "Returns the date that a string stands for.",
    "",
    "Ein Satz mit Umlauten: äöü, und 数字 🙂.",
    "Compresses bytes. " * 120,
    "short",
    "a" * 5000,
]
Job = Mapping[str, Array]


@dataclass
class Listener:
    """A subscriber's end of a streaming job."""

    job_id: str = "counter.0"
    tenant: str = "acme"
    is_cancelled: bool = False
    fractions: list[float] = field(default_factory=list)

    def progress(self, fraction: float) -> None:
        self.fractions.append(fraction)


def opened(package: Package) -> Runtime:
    runtime = open_runtime(package)
    runtime.load("cpu", 1)
    return runtime


def received(job: Job) -> dict[str, Array]:
    """The job as a worker decodes it: read-only views of the received bytes."""
    content, body = encode(job)
    return decode(content, body)


def drained(
    stream: Generator[dict[str, Array], None, dict[str, Array]],
) -> tuple[list[dict[str, Array]], dict[str, Array]]:
    chunks = []
    while True:
        try:
            chunks.append(next(stream))
        except StopIteration as end:
            return chunks, end.value


@pytest.fixture(scope="module")
def minilm() -> Iterator[EncoderRuntime]:
    runtime = opened(load_package(SAMPLES / "minilm" / "1"))
    assert isinstance(runtime, EncoderRuntime)
    yield runtime
    runtime.close()


@pytest.fixture(scope="module")
def mlp() -> Iterator[PyTorchRuntime]:
    runtime = opened(load_package(SAMPLES / "mlp" / "1"))
    assert isinstance(runtime, PyTorchRuntime)
    yield runtime
    runtime.close()


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    source = 'def build():\n    return lambda inputs: {"y": inputs["x"] * 2}\n'
    runtime = opened(load_package(write_package(tmp_path_factory.mktemp("models"), "double", source)))
    yield runtime
    runtime.close()


@pytest.fixture(params=["mlp", "minilm", "double"])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    loaded: Runtime = request.getfixturevalue(request.param)
    return loaded


def jobs_for(runtime: Runtime) -> Sequence[Job]:
    """Jobs of one, two and three rows."""
    if runtime.spec.name == "minilm":
        return [{"text": np.array(texts, object)} for texts in (TEXTS[:1], TEXTS[1:3], TEXTS[3:])]
    width = int(runtime.spec.inputs[0].shape[1])
    numbers = np.random.default_rng(7)
    return [{"x": numbers.standard_normal((rows, width), np.float32)} for rows in (1, 2, 3)]


def test_batched_rows_are_those_of_each_job_alone_in_order(runtime: Runtime):
    """Whoever shares a batch gets the answer it would have got alone, in its own place."""
    jobs = [received(job) for job in jobs_for(runtime)]
    prepared = runtime.prepare(jobs)
    together = runtime.run(prepared)
    assert prepared.rows == 6
    runtime.spec.signature.check_outputs(together, 6)
    alone = [runtime.run(runtime.prepare([job])) for job in jobs]
    for name, values in together.items():
        np.testing.assert_allclose(values, np.concatenate([one[name] for one in alone]), rtol=1e-5, atol=1e-6)


def test_stream_of_a_model_that_does_not_stream_is_its_result(runtime: Runtime):
    """Callers need not know which models stream."""
    job = received(jobs_for(runtime)[1])
    chunks, outputs = drained(runtime.stream(job, Listener()))
    assert chunks == []
    for name, values in runtime.run(runtime.prepare([job])).items():
        np.testing.assert_array_equal(outputs[name], values)


def test_received_bytes_are_not_written_to(runtime: Runtime):
    """Preparing and running a job leaves the job unchanged, and read-only inputs cause no warning."""
    job = received(jobs_for(runtime)[0])
    before = {name: values.copy() for name, values in job.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runtime.run(runtime.prepare([job]))
    for name, values in job.items():
        np.testing.assert_array_equal(values, before[name])


def test_prepared_batches_may_wait_while_another_runs(runtime: Runtime):
    """A batch is prepared ahead of its turn: preparing the next one must not touch it."""
    first, second, _ = jobs_for(runtime)
    expected = runtime.run(runtime.prepare([first]))
    waiting = runtime.prepare([first])
    runtime.run(runtime.prepare([second]))
    for name, values in runtime.run(waiting).items():
        np.testing.assert_array_equal(values, expected[name])


def test_version_is_that_of_the_package(runtime: Runtime):
    """Results name the version that answered."""
    assert runtime.version == runtime.spec.version == "1"


def test_mlp_is_the_module_that_its_author_built(mlp: PyTorchRuntime):
    """The module answers outside as inside, stays the same object, and is in evaluation mode (AR-001, IN-028)."""
    module = mlp.model
    assert module is not None
    x = np.random.default_rng(3).standard_normal((5, 384), np.float32)
    logits = mlp.run(mlp.prepare([{"x": x}]))["logits"]
    assert mlp.model is module
    assert not module.training
    with torch.inference_mode():
        np.testing.assert_array_equal(logits, module(torch.from_numpy(x)).numpy())


def test_mlp_has_the_same_weights_in_every_process(mlp: PyTorchRuntime):
    """Two workers answer alike, whatever the global seed."""
    torch.manual_seed(1)
    other = opened(load_package(SAMPLES / "mlp" / "1"))
    x = {"x": np.ones((1, 384), np.float32)}
    np.testing.assert_array_equal(mlp.run(mlp.prepare([x]))["logits"], other.run(other.prepare([x]))["logits"])
    other.close()


def test_minilm_equals_sentence_transformers(minilm: EncoderRuntime):
    """Embeddings agree with the reference implementation to 1e-5, long, empty and foreign text included."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = load_package(SAMPLES / "minilm" / "1").source_folder()
    reference = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    ours = minilm.run(minilm.prepare([{"text": np.array(TEXTS, object)}]))["embedding"]
    np.testing.assert_allclose(ours, reference.encode(TEXTS, normalize_embeddings=True), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-5)


def test_minilm_pads_little_in_arrival_order(minilm: EncoderRuntime):
    """One long text does not make the short ones of its batch as dear as itself."""
    texts = ["a few words"] * 31 + ["word " * 250]
    prepared = minilm.prepare([{"text": np.array([text], object)} for text in texts])
    padded_together = 32 * max(piece.ids.shape[1] for piece in prepared.payload)
    assert prepared.padded_tokens <= 1.1 * prepared.tokens
    assert prepared.padded_tokens <= 0.1 * padded_together


def test_minilm_length_grows_with_the_text_up_to_what_is_read(minilm: EncoderRuntime):
    """The estimate orders jobs by cost and ends at the cut."""
    lengths = [minilm.length({"text": np.array([text], object)}) for text in ("", "a few words", "word " * 20)]
    assert lengths == sorted(set(lengths))
    assert minilm.length({"text": np.array(["short", "word " * 9000], object)}) == 256


def write_encoder(root: Path, **batching: object) -> Path:
    """MiniLM as a package with its own weights folder; returns its folder."""
    sample = load_package(SAMPLES / "minilm" / "1")
    folder = root / "encoder" / "1"
    shutil.copytree(sample.source_folder(), folder / "weights")
    document = yaml.safe_load((sample.folder / "model.yaml").read_text())
    document |= {"name": "encoder", "source": {"path": "weights"}}
    document["batching"] |= batching
    (folder / "model.yaml").write_text(yaml.safe_dump(document))
    return folder


def test_unreadable_weights_are_one_clear_line(models_root: Path):
    """A download that broke off is told at load, without a path."""
    folder = write_encoder(models_root)
    (folder / "weights" / "model.safetensors").write_bytes(b"half a file")
    with pytest.raises(ConfigurationError, match=r"^encoder/1: the weights or the tokenizer cannot be read \(\w+\)$"):
        opened(load_package(folder))


def test_limit_beyond_what_the_model_can_read_is_refused(models_root: Path):
    """More tokens than the model has positions would fail on the first long text."""
    folder = write_encoder(models_root, max_length=513)
    with pytest.raises(ConfigurationError, match=r"^encoder/1: batching\.max_length: found 513, expected at most 512"):
        opened(load_package(folder))


def test_weights_that_are_pooled_in_another_way_are_refused(models_root: Path):
    """A model trained for another pooling would answer with plausible nonsense."""
    folder = write_encoder(models_root)
    pooling = '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}'
    (folder / "weights" / "1_Pooling" / "config.json").write_text(pooling)
    with pytest.raises(ConfigurationError, match="pooled by cls_token, expected mean_tokens"):
        opened(load_package(folder))


@given(st.lists(st.integers(1, 256), min_size=1, max_size=64), st.integers(0, 512))
def test_slices_hold_every_row_once_and_pad_within_the_cost_of_a_forward(lengths: list[int], forward_tokens: int):
    """No row is lost or doubled; within a slice lengths ascend and padding stays below what a forward costs."""
    slices = slice_by_length(lengths, forward_tokens)
    assert sorted(row for rows in slices for row in rows) == list(range(len(lengths)))
    for rows in slices:
        ascending = [lengths[row] for row in rows]
        assert ascending == sorted(ascending)
        assert sum(ascending[-1] - length for length in ascending) <= forward_tokens


@pytest.fixture
def counter() -> Iterator[Runtime]:
    runtime = opened(load_package(SAMPLES / "counter" / "1"))
    yield runtime
    runtime.close()


def test_counter_streams_chunks_progress_and_its_result(counter: Runtime):
    """What it yields are chunks, what it reports is progress, what it returns is the result."""
    listener = Listener()
    chunks, outputs = drained(counter.stream(received({"count": np.array([4])}), listener))
    assert [chunk["value"].tolist() for chunk in chunks] == [[1], [2], [3], [4]]
    assert listener.fractions == [0.25, 0.5, 0.75, 1.0]
    assert outputs["total"].tolist() == [4]


def test_counter_stops_when_cancelled(counter: Runtime):
    """An entry point sees the cancellation between chunks."""
    listener = Listener()
    stream = counter.stream({"count": np.array([1000])}, listener)
    next(stream)
    listener.is_cancelled = True
    chunks, outputs = drained(stream)
    assert chunks == []
    assert outputs["total"].tolist() == [1]


def test_streaming_entry_point_also_runs_without_a_listener(counter: Runtime):
    """The result alone can be had like that of any model."""
    assert counter.run(counter.prepare([{"count": np.array([3])}]))["total"].tolist() == [3]


def write_streaming(root: Path, source: str) -> Path:
    folder = write_package(root, "stream", source)
    document = yaml.safe_load((folder / "model.yaml").read_text())
    document |= {"streams": True, "batching": {}}
    (folder / "model.yaml").write_text(yaml.safe_dump(document))
    return folder


def test_abandoned_stream_runs_the_entry_points_cleanup(models_root: Path):
    """Closing a stream half-way closes the entry point's generator, even if something else still refers to it."""
    source = """
    cleaned = []
    def build():
        def forever(inputs, ctx):
            try:
                while True:
                    yield {"y": 1}
            finally:
                cleaned.append(ctx.job_id)
        forever.cleaned = cleaned
        return forever
    """
    runtime = opened(load_package(write_streaming(models_root, source)))
    assert isinstance(runtime, PythonRuntime)
    assert runtime.model is not None
    forever, kept = runtime.model, []

    def keeping(inputs, ctx):
        kept.append(forever(inputs, ctx))
        return kept[-1]

    runtime.model = keeping
    stream = runtime.stream({"x": np.zeros((1, 4), np.float32)}, Listener())
    next(stream)
    stream.close()
    assert forever.cleaned == ["counter.0"]  # type: ignore[attr-defined]


def test_streaming_entry_point_may_write_to_its_inputs(models_root: Path):
    """What it changes is its own copy, not the received bytes."""
    source = """
    def build():
        def one(inputs, ctx):
            inputs["x"] += 1
            yield {}
            return {"y": inputs["x"]}
        return one
    """
    runtime = opened(load_package(write_streaming(models_root, source)))
    job = received({"x": np.zeros((1, 4), np.float32)})
    assert drained(runtime.stream(job, Listener()))[1]["y"].tolist() == [[1.0] * 4]
    assert not job["x"].any()


def test_stream_that_returns_other_outputs_than_declared_fails_its_job(models_root: Path):
    """A result is checked against the signature before anyone sees it."""
    source = """
    def build():
        def one(inputs, ctx):
            yield {"part": "text"}
            return {"y": inputs["x"][:1]}
        return one
    """
    runtime = opened(load_package(write_streaming(models_root, source)))
    stream = runtime.stream({"x": np.zeros((2, 4), np.float32)}, Listener())
    assert next(stream)["part"].item() == "text"
    with pytest.raises(ModelError, match=r"^Output y is float32 \(1, 4\)\. Declared is float32 \(batch, 4\)"):
        drained(stream)


def test_exceptions_of_a_model_pass_through(models_root: Path):
    """The drain decides what an exception means: the runtime neither hides nor renames it."""
    source = """
    def build():
        def forward(inputs):
            if inputs["x"].any():
                raise ZeroDivisionError("no")
            return {"y": inputs["x"]}
        return forward
    """
    runtime = opened(load_package(write_package(models_root, "raiser", source)))
    with pytest.raises(ZeroDivisionError):
        runtime.run(runtime.prepare([{"x": np.ones((1, 4), np.float32)}]))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("build = 3", "entrypoint model:build: found no function build, expected build() -> model"),
        ("def build(): raise OSError('x')", "entrypoint model:build: raised OSError: x"),
        (
            "import no_such_module",
            "entrypoint model:build: raised ModuleNotFoundError: No module named 'no_such_module'",
        ),
        (
            "def build(): return 3",
            "entrypoint model:build: build() returned int, expected a function (inputs) -> outputs as streams says",
        ),
        (
            "def build():\n    def f(inputs):\n        yield inputs\n    return f",
            "entrypoint model:build: build() returned a generator function, expected a function (inputs) -> outputs "
            "as streams says",
        ),
        (
            "def build(): return lambda inputs: {'z': inputs['x']}",
            "The model returned the outputs: z. Declared outputs: y",
        ),
        (
            "def build(): return lambda inputs: {'y': inputs['x'].astype('f8')}",
            "Output y is float64 (2, 4). Declared is float32 (batch, 4) with batch = 2",
        ),
        ("def build(): return lambda inputs: 1 / 0", "the first forward failed (ZeroDivisionError: division by zero)"),
    ],
)
def test_package_that_cannot_work_is_refused_when_loaded(models_root: Path, source: str, text: str):
    """A worker learns at its start, in one line, that a package builds nothing or answers something else."""
    folder = write_package(models_root, "broken", source)
    with pytest.raises(ConfigurationError) as refused:
        opened(load_package(folder))
    assert str(refused.value) == f"broken/1: {text}"


def test_packages_keep_their_modules_apart(models_root: Path):
    """Two packages may both have a model.py and import their own neighbours; sys.path stays as it was."""
    before = list(sys.path)
    source = "from .factor import FACTOR\ndef build(): return lambda inputs: {'y': inputs['x'] * FACTOR}"
    runtimes = []
    for name, factor in (("three", 3), ("five", 5)):
        folder = write_package(models_root, name, source)
        (folder / "factor.py").write_text(f"import numpy as np\nFACTOR = np.float32({factor})\n")
        runtimes.append(opened(load_package(folder)))
    one = {"x": np.ones((1, 4), np.float32)}
    assert [runtime.run(runtime.prepare([one]))["y"][0, 0] for runtime in runtimes] == [3, 5]
    assert sys.path == before
    for runtime in runtimes:
        runtime.close()
    assert not [name for name in sys.modules if name.startswith("penstock_package_") and "factor" in name]


def write_torch(root: Path, body: str) -> Path:
    folder = write_package(root, "module", f"import torch\n{dedent(body)}\ndef build():\n    return Module()\n")
    text = (folder / "model.yaml").read_text().replace("format: python", "format: pytorch")
    (folder / "model.yaml").write_text(text)
    return folder


MODULE = """
class Module(torch.nn.Module):
    def forward(self, x):
        {forward}
"""


@pytest.mark.parametrize("format_", ["python", "pytorch"])
def test_missing_rows_fail_the_batch_instead_of_shifting_answers(models_root: Path, format_: str):
    """A model that drops a row never gives a job its neighbour's answer."""
    if format_ == "python":
        source = "def build(): return lambda inputs: {'y': inputs['x'][inputs['x'][:, 0] >= 0]}"
        folder = write_package(models_root, "filter", source)
    else:
        folder = write_torch(models_root, MODULE.format(forward="return x[x[:, 0] >= 0]"))
    runtime = opened(load_package(folder))
    bad = {"x": np.full((1, 4), -1, np.float32)}
    with pytest.raises(ModelError, match="with batch = 2"):
        runtime.run(runtime.prepare([bad, {"x": np.ones((1, 4), np.float32)}]))


@pytest.mark.parametrize("forward", ["return x * 2", "return (x * 2,)", "return {'y': x * 2}"])
def test_module_may_return_a_tensor_a_sequence_or_a_mapping(models_root: Path, forward: str):
    """The three ways in which modules answer all reach the declared output."""
    runtime = opened(load_package(write_torch(models_root, MODULE.format(forward=forward))))
    assert runtime.run(runtime.prepare([{"x": np.ones((1, 4), np.float32)}]))["y"].tolist() == [[2.0] * 4]


@pytest.mark.parametrize(
    "error",
    [
        "torch.OutOfMemoryError('CUDA out of memory')",
        "MemoryError()",
        'RuntimeError("DefaultCPUAllocator: can\'t allocate memory: you tried to allocate 1 bytes")',
    ],
)
def test_device_out_of_memory_is_told_apart(models_root: Path, error: str):
    """The drain halves a batch on OutOfMemory; any other RuntimeError stays what it is."""
    forward = f"if len(x) > 2: raise {error}\n        if x.any(): raise RuntimeError('other')\n        return x"
    runtime = opened(load_package(write_torch(models_root, MODULE.format(forward=forward))))
    with pytest.raises(OutOfMemory, match="The batch does not fit cpu"):
        runtime.run(runtime.prepare([{"x": np.zeros((3, 4), np.float32)}]))
    with pytest.raises(RuntimeError, match=r"^other$"):
        runtime.run(runtime.prepare([{"x": np.ones((1, 4), np.float32)}]))


def test_pytorch_package_that_builds_no_module_is_refused(models_root: Path):
    """A bare function belongs into format python."""
    with pytest.raises(ConfigurationError, match=r"^module/1: found a function, expected a torch.nn.Module$"):
        opened(load_package(write_torch(models_root, "def Module(): return lambda x: x")))


def test_device_that_is_not_there_is_refused():
    """A worker for an absent GPU says so in one line."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigurationError, match=r"^Device 'cuda:0' cannot be used .* Expected cpu or cuda:N$"):
        open_runtime(load_package(SAMPLES / "mlp" / "1")).load("cuda:0", 1)


def test_opening_a_runtime_imports_no_framework():
    """Only `load` imports torch, so that a worker for Python packages starts without it."""
    program = (
        "import sys; from pathlib import Path; from registry.package import load_package; "
        "from workers.runtime import open_runtime; "
        f"[open_runtime(load_package(Path({str(SAMPLES)!r}) / name / '1')) for name in ('mlp', 'minilm', 'counter')]; "
        "sys.exit(bool({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=SAMPLES.parent).returncode == 0
