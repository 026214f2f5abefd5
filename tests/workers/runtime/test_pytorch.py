"""Torch modules that a package's Python builds: outputs, weights, precision, and the device's own errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file, save_model

from penstock.registry.errors import ConfigurationError, ModelError, OutOfMemory
from penstock.registry.package import load_package
from penstock.workers.runtime import open_runtime, pytorch
from penstock.workers.runtime.forms import WithProvenance, thread_copy_of
from penstock.workers.runtime.pytorch import PyTorchRuntime
from penstock.workers.runtime.torch_device import TorchDevice, module_bytes, sharing_weights
from tests.packages import write_package
from tests.servers import ROOT, leave_out
from tests.workers.runtime.formats import affine, answers, opened, write_pytorch

SAMPLES = ROOT / "models"


@pytest.fixture(scope="module")
def mlp() -> Iterator[PyTorchRuntime]:
    runtime = opened(SAMPLES / "mlp" / "1")
    assert isinstance(runtime, PyTorchRuntime)
    yield runtime
    runtime.close()


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
    """Two workers give equal outputs for any global seed."""
    torch.manual_seed(1)
    other = opened(SAMPLES / "mlp" / "1")
    x = {"x": np.ones((1, 384), np.float32)}
    np.testing.assert_array_equal(mlp.run(mlp.prepare([x]))["logits"], other.run(other.prepare([x]))["logits"])
    other.close()


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


def test_rows_that_are_missing_fail_the_batch_instead_of_shifting_answers(models_root: Path):
    """A model that drops a row never gives a job its neighbour's answer."""
    runtime = opened(write_torch(models_root, MODULE.format(forward="return x[x[:, 0] >= 0]")))
    bad = {"x": np.full((1, 4), -1, np.float32)}
    with pytest.raises(ModelError, match="with batch = 2"):
        runtime.run(runtime.prepare([bad, {"x": np.ones((1, 4), np.float32)}]))


@pytest.mark.parametrize("forward", ["return x * 2", "return (x * 2,)", "return {'y': x * 2}"])
def test_module_may_return_a_tensor_a_sequence_or_a_mapping(models_root: Path, forward: str):
    """The three ways in which modules answer all reach the declared output."""
    runtime = opened(write_torch(models_root, MODULE.format(forward=forward)))
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
    """The drain halves a batch on OutOfMemory; any other RuntimeError stays unchanged."""
    forward = f"if len(x) > 2: raise {error}\n        if x.any(): raise RuntimeError('other')\n        return x"
    runtime = opened(write_torch(models_root, MODULE.format(forward=forward)))
    with pytest.raises(OutOfMemory, match="The batch does not fit cpu"):
        runtime.run(runtime.prepare([{"x": np.zeros((3, 4), np.float32)}]))
    with pytest.raises(RuntimeError, match=r"^other$"):
        runtime.run(runtime.prepare([{"x": np.ones((1, 4), np.float32)}]))


def test_pytorch_package_that_builds_no_module_is_refused(models_root: Path):
    """A bare function belongs into format python."""
    with pytest.raises(ConfigurationError, match=r"^module/1: found a function, expected a torch.nn.Module$"):
        opened(write_torch(models_root, "def Module(): return lambda x: x"))


def test_device_that_is_not_there_is_refused():
    """A worker for an absent GPU says so in one line."""
    if torch.cuda.is_available():
        leave_out("this machine has a GPU")
    with pytest.raises(ConfigurationError, match=r"^Device 'cuda:0' cannot be used .* Expected cpu or cuda:N$"):
        open_runtime(load_package(SAMPLES / "mlp" / "1")).load("cuda:0", 1)


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ({"weight": torch.ones(4, 4)}, "lacks bias; has beyond the module's none"),
        (
            {"weight": torch.ones(4, 4), "bias": torch.ones(4), "head.weight": torch.ones(1)},
            "lacks none; has beyond the module's head.weight",
        ),
        ({f"layer{number}": torch.ones(1) for number in range(9)}, "layer0, layer1, layer2, layer3, and 5 more"),
        ({"weight": torch.ones(3, 4), "bias": torch.ones(4)}, "size mismatch for weight"),
    ],
)
def test_weights_that_are_not_exactly_the_modules_are_refused(
    models_root: Path, weights: dict[str, torch.Tensor], text: str
):
    """The error names a weight that stayed at its random start, and one that the module does not use."""
    folder = write_pytorch(models_root)
    save_file(weights, folder / "weights.safetensors")
    with pytest.raises(ConfigurationError, match=r"^affine/1: weights: weights\.safetensors: ") as refused:
        opened(folder)
    assert text in str(refused.value)
    assert "\n" not in str(refused.value)


TIED = """
import torch
class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Linear(4, 4)
        self.two = torch.nn.Linear(4, 4)
        self.two.weight = self.one.weight
    def forward(self, x):
        return self.two(self.one(x))
def build():
    return Tied()
"""


def test_weights_that_two_layers_share_are_stored_and_counted_once(models_root: Path):
    """safetensors keeps one name of a shared weight; the module has it in both places."""
    folder = write_pytorch(models_root, TIED)
    scope: dict = {}
    exec(TIED, scope)  # noqa: S102 - the package's own source, to have its module outside of it
    module = scope["build"]()
    save_model(module, str(folder / "weights.safetensors"))
    runtime = opened(folder)
    x = np.random.default_rng(2).standard_normal((3, 4), np.float32)
    with torch.inference_mode():
        np.testing.assert_array_equal(answers(runtime, x=x)["y"], module(torch.from_numpy(x)).numpy())
    assert runtime.memory_bytes == module_bytes(module) == (16 + 4 + 4) * 4


DROPOUT = """
import torch
def build():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.9)).train()
"""


def test_module_in_training_mode_is_set_to_evaluation(models_root: Path):
    """A module with dropout during training gives equal outputs twice (IN-028)."""
    folder = write_pytorch(models_root, DROPOUT)
    linear = torch.nn.Linear(4, 4)
    save_file({"0.weight": linear.weight.detach(), "0.bias": linear.bias.detach()}, folder / "weights.safetensors")
    x = np.ones((8, 4), np.float32)
    with torch.inference_mode():
        expected = linear(torch.from_numpy(x)).numpy()
    np.testing.assert_array_equal(answers(opened(folder), x=x)["y"], expected)


PRECISION = """
import torch
class Module(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        assert y.dtype == x.dtype == torch.{dtype}
        return y
def build():
    return Module(4, 4)
"""


@pytest.mark.parametrize(
    ("precision", "dtype"), [("auto", "float32"), ("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")]
)
@pytest.mark.parametrize("where", ["package", "setting"])
def test_model_computes_in_the_precision_asked_for(models_root: Path, precision: str, dtype: str, where: str):
    """The module sees its floats in that precision; callers see the declared dtype (CX-020, ES-018)."""
    source = PRECISION.format(dtype=dtype)
    if where == "package":
        runtime = opened(write_pytorch(models_root, source, precision=precision), precision="fp32")
    else:
        runtime = opened(write_pytorch(models_root, source), precision=precision)
    x = np.random.default_rng(8).standard_normal((16, 4), np.float32)
    y = answers(runtime, x=x)["y"]
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, affine(x), atol={"fp16": 1e-2, "bf16": 1e-1}.get(precision, 1e-6), rtol=0)


def test_inputs_that_are_not_floats_keep_their_dtype(models_root: Path):
    """Token ids stay integers in every precision."""
    source = """
    import torch
    class Module(torch.nn.Embedding):
        def forward(self, ids):
            return super().forward(ids).sum(1)
    def build():
        return Module(4, 4)
    """
    inputs = [{"name": "ids", "dtype": "int64", "shape": ["batch", "length"], "min": 0, "max": 3}]
    folder = write_pytorch(models_root, source, inputs=inputs, precision="bf16")
    save_file({"weight": torch.eye(4)}, folder / "weights.safetensors")
    assert answers(opened(folder), ids=np.array([[0, 2, 2]]))["y"].tolist() == [[1.0, 0.0, 2.0, 0.0]]


FP16_DELTA = 1e-3
BF16_DELTA = 2e-2
"""Largest differences of the sample classifier's logits, which are of about 0.3, from fp32."""


@pytest.mark.parametrize(("precision", "delta"), [("fp16", FP16_DELTA), ("bf16", BF16_DELTA)])
def test_logits_in_half_precision_are_those_of_fp32_within_the_stated_delta(
    mlp: PyTorchRuntime, precision: str, delta: float
):
    """fp16 is within 1e-3 of fp32 (CX-020), bf16 within 2e-2 (ES-018), and either does differ."""
    half = opened(SAMPLES / "mlp" / "1", precision=precision)
    x = np.random.default_rng(9).standard_normal((64, 384), np.float32)
    difference = np.abs(answers(half, x=x)["logits"] - answers(mlp, x=x)["logits"]).max()
    assert 0 < difference <= delta
    half.close()


def test_output_in_bfloat16_reaches_callers_as_float32(models_root: Path):
    """NumPy has no bfloat16: outputs in it are converted without loss."""
    runtime = opened(write_torch(models_root, MODULE.format(forward="return (x * 2).bfloat16()")))
    assert answers(runtime, x=np.full((1, 4), 1.5, np.float32))["y"].tolist() == [[3.0] * 4]


def test_optional_input_is_none_where_a_job_has_none(models_root: Path):
    """`forward` gets every declared input in its place."""
    source = """
    import torch
    class Module(torch.nn.Linear):
        def forward(self, x, offset=None):
            return super().forward(x) if offset is None else super().forward(x) + offset
    def build():
        return Module(4, 4)
    """
    numbers = {"dtype": "float32", "shape": ["batch", 4]}
    inputs = [{"name": "x", **numbers}, {"name": "offset", "optional": True, **numbers}]
    runtime = opened(write_pytorch(models_root, source, inputs=inputs))
    x = np.ones((2, 4), np.float32)
    np.testing.assert_allclose(answers(runtime, x=x)["y"] + 1, answers(runtime, x=x, offset=x)["y"], rtol=1e-6)


KEEPS_A_BUFFER = """
class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(64, 4))
        self.weight = torch.nn.Parameter(torch.ones(4))
    def forward(self, x):
        return self.last[: len(x)].copy_(x * self.weight)
"""


def test_answers_stay_what_they_were_when_the_next_batch_runs(models_root: Path):
    """A module may write all outputs into one buffer: the outputs of earlier jobs stay unchanged."""
    runtime = opened(write_torch(models_root, KEEPS_A_BUFFER))
    first = answers(runtime, x=np.full((2, 4), 1, np.float32))["y"]
    answers(runtime, x=np.full((2, 4), 2, np.float32))
    assert first.tolist() == [[1.0] * 4] * 2


def test_trial_beside_the_traffic_has_an_instance_of_its_own(models_root: Path):
    """A package's module may support one call at a time: the copy for another thread shares only the weights."""
    runtime = opened(write_torch(models_root, KEEPS_A_BUFFER))
    assert isinstance(runtime, PyTorchRuntime)
    module = runtime.model
    assert module is not None
    reduced = runtime.candidates(None).get("bf16")
    for forward in (runtime.forms.reference, *([reduced()] if reduced else [])):
        runtime.forms.use("form in use", forward)
        prepared = runtime.prepare([{"x": np.full((2, 4), 5, np.float32)}])
        before = module.get_buffer("last").clone()
        assert thread_copy_of(forward)(prepared)["y"].tolist() == [[5.0] * 4] * 2
        assert torch.equal(module.get_buffer("last"), before)
    thread_copy = sharing_weights(module)
    assert thread_copy.get_parameter("weight") is module.get_parameter("weight")


def test_reduced_copy_is_the_module_in_another_precision(models_root: Path):
    """Tied weights stay tied, integers stay integers, and the serving module stays unchanged."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    module[1].weight = module[0].weight
    reduced = TorchDevice("cpu", 1).converted(module, "bf16")
    assert {one.dtype for one in module.parameters()} == {torch.float32}
    assert {one.dtype for one in reduced.parameters()} == {torch.bfloat16}
    assert reduced[1].weight is reduced[0].weight  # type: ignore[index]
    assert {name: one.dtype for name, one in reduced.named_buffers()} == {
        "2.running_mean": torch.bfloat16,
        "2.running_var": torch.bfloat16,
        "2.num_batches_tracked": torch.int64,
    }
    assert type(reduced) is torch.nn.Sequential


class _Blank:
    """A graph of ONNX that answers zeros, whatever it gets."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        """The outputs, in order."""
        self.rows.append(len(inputs["x"]))
        return [np.zeros((len(inputs["x"]), 4), np.float32)]


def test_an_exported_graph_answers_no_shape_that_was_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A graph has no guards: for other lengths and dtypes the module runs itself, and that is counted."""
    folder = write_torch(
        tmp_path,
        """
        class Module(torch.nn.Module):
            def forward(self, x):
                return x[:, -600:].sum(1, keepdim=True).expand(-1, 4)
        """,
    )
    spec = yaml.safe_load((folder / "model.yaml").read_text())
    spec["inputs"][0]["shape"] = ["batch", "n"]
    (folder / "model.yaml").write_text(yaml.safe_dump(spec))
    runtime, graph = opened(folder), _Blank()
    assert isinstance(runtime, PyTorchRuntime)
    monkeypatch.setattr(pytorch, "open_exported", lambda *_, **__: graph)
    form = runtime.candidates(None)["onnx"]()
    assert isinstance(form, WithProvenance)
    found = {}
    for length in (4, 512, 513, 700):
        prepared = runtime.prepare([{"x": np.ones((2, length), np.float32)}])
        found[length] = form(prepared)["y"][:, 0].tolist()
    assert found == {4: [0, 0], 512: [0, 0], 513: [513, 513], 700: [600, 600]}
    assert graph.rows == [2, 2]
    assert form.counts() == {"uncovered_calls": 2}
    copy = thread_copy_of(form)
    assert isinstance(copy, WithProvenance)
    assert isinstance(form.forward, pytorch._Exported)
    assert isinstance(copy.forward, pytorch._Exported)
    assert copy.forward._others.module is not form.forward._others.module
    assert copy(prepared)["y"][:, 0].tolist() == [600, 600]
    runtime.close()


def test_a_module_that_writes_to_a_global_has_no_second_instance(tmp_path: Path):
    """A trial beside the traffic would mix the answers of both. A table that is only read is no reason."""
    folder = write_torch(
        tmp_path,
        """
        SCRATCH, WEIGHTS, TABLE = torch.empty(64, 4), torch.eye(4), torch.arange(3)

        class Module(torch.nn.Module):
            def forward(self, x):
                return torch.mm(x, WEIGHTS, out=SCRATCH[: len(x)]) + TABLE[0]
        """,
    )
    runtime = opened(folder)
    assert isinstance(runtime, PyTorchRuntime)
    thread_copy_of(runtime.forms.reference)
    runtime.run(runtime.prepare([{"x": np.full((3, 4), 7, np.float32)}]))
    with pytest.raises(ConfigurationError, match="its forwards change SCRATCH, which all instances share"):
        thread_copy_of(runtime.forms.reference)
    runtime.close()
