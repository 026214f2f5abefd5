"""A model in memory -> a package under the models root, loaded once before it takes its place.

    torch.nn.Module        -> model.pt, as TorchScript: a worker needs no code
    torch.nn.Module, build -> model.safetensors, and the file of `build`, which makes the module again
    ONNX ModelProto        -> model.onnx
    transformers           -> model.safetensors with configuration and tokenizer
    function               -> the file of the module that defines it

Nothing is pickled. A framework is imported only by the caller who has a model of it. The package is complete or absent.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from penstock.compose.authoring.saved_torch import save_built, save_script
from penstock.registry.errors import ConfigurationError, InvalidInput, shown
from penstock.registry.package import SPEC_FILE, load_package
from penstock.registry.package.declaration import Tensors, tensor_fields
from penstock.registry.package.signature import TensorSpec
from penstock.registry.package.spec import first_problem
from penstock.registry.queues import parse_name
from penstock.registry.tensors import DTYPES
from penstock.workers.runtime.open import open_runtime
from penstock.workers.runtime.torch_device import keeping_threads

__all__ = ["save"]

_ENTRY: Final = "penstock_entry"
"""The module that returns a saved function."""
_is_saving: ContextVar[bool] = ContextVar("is_saving", default=False)
_EXPECTED: Final = (
    "a function of a module's top level, a torch.nn.Module, an ONNX ModelProto, or a model or pipeline of "
    "transformers. Other objects would need a pickle, which can run code: load them in a function"
)


def save(
    model: object,
    *,
    path: str | os.PathLike[str],
    signature: Mapping[str, Tensors] | None = None,
    build: Callable[[], object] | None = None,
    tokenizer: Any = None,
    fields: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a model as the package `path`, which is <models root>/<name>/<version>, and returns that folder.

    signature: {"inputs": ..., "outputs": ...}, each as {"x": ("float32", ["batch", 4])} or as in model.yaml; None for
    an ONNX model, whose graph has it, and for a sentence encoder. build: a function that makes a torch module without
    its weights; with it the package has safetensors and this function's file instead of TorchScript. tokenizer: that of
    a transformers model. fields: further fields of model.yaml, such as {"batching": {"max_batch_size": 64}}.

    The package is loaded once on the CPU. Raises InvalidInput for an argument, a path that is taken or a model of
    another kind, and ConfigurationError when the model cannot be saved or does not fit its signature.
    """
    if _is_saving.get():
        raise ConfigurationError("save() was called while its own file was loaded. Expected it below a __main__ guard")
    target = Path(path).absolute()
    name, version = parse_name("model", target.parent.name), parse_name("version", target.name)
    if target.exists():
        raise InvalidInput(f"{name}/{version} is there already. Expected a path that is not")
    try:
        root = target.parent.parent
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=root) as beside:
            folder = Path(beside) / name / version
            folder.mkdir(parents=True)
            content = _Content(model, folder, dict(signature or {}), build, tokenizer)
            document = {"name": name, "version": version, **content.write(), **(fields or {})}
            (folder / SPEC_FILE).write_text(yaml.safe_dump(document, sort_keys=False))
            _load_once(folder)
            target.parent.mkdir(exist_ok=True)
            folder.rename(target)
    except OSError as error:
        raise ConfigurationError(f"The package cannot be written ({error.strerror}). Expected a folder") from None
    return target


@dataclass(slots=True)
class _Content:
    """The files of one package, and the fields of model.yaml that follow from the model."""

    model: object
    folder: Path
    signature: dict[str, Any]
    build: Callable[[], object] | None
    tokenizer: Any
    _families: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self._families = frozenset(kind.__module__.partition(".")[0] for kind in type(self.model).__mro__)

    def write(self) -> dict[str, Any]:
        """Writes the files; returns the format, the signature and what the format needs."""
        if inspect.isfunction(self.model):
            return self._write_function()
        if "transformers" in self._families and hasattr(self.model, "save_pretrained"):
            return self._write_transformers()
        if "onnx" in self._families and hasattr(self.model, "SerializeToString"):
            return self._write_onnx()
        if "torch" in self._families and hasattr(self.model, "state_dict"):
            return self._write_torch()
        raise InvalidInput(f"model: found {type(self.model).__name__}, expected {_EXPECTED}")

    def _declared(self) -> dict[str, Any]:
        if unknown := self.signature.keys() ^ {"inputs", "outputs"}:
            raise InvalidInput(f"signature: {', '.join(sorted(unknown))}: expected exactly inputs and outputs")
        declared = {kind: tensor_fields(kind, self.signature[kind]) for kind in ("inputs", "outputs")}
        for kind, entries in declared.items():
            for entry in entries:
                try:
                    TensorSpec.model_validate(entry)
                except ValidationError as error:
                    raise InvalidInput(f"{kind}: {shown(entry.get('name'))}: {first_problem(error)}") from None
        return {"signature": declared}

    def _write_function(self) -> dict[str, Any]:
        function: Any = self.model
        module = _copy_source(function, self.folder)
        text = f"from .{module} import {function.__name__}\n\n\ndef build():\n    return {function.__name__}\n"
        (self.folder / f"{_ENTRY}.py").write_text(text)
        return {"format": "python", "entrypoint": f"{_ENTRY}:build", **self._declared()}

    def _write_torch(self) -> dict[str, Any]:
        declared = self._declared()
        if self.build is None:
            save_script(self.model, declared["signature"], self.folder)
            return {"format": "torchscript", **declared}
        module = _copy_source(self.build, self.folder)
        save_built(self.model, self.folder)
        return {"format": "pytorch", "entrypoint": f"{module}:{self.build.__name__}", **declared}

    def _write_onnx(self) -> dict[str, Any]:
        model: Any = self.model
        (self.folder / "model.onnx").write_bytes(model.SerializeToString())
        if not self.signature:
            initial = {one.name for one in model.graph.initializer}
            inputs = [one for one in model.graph.input if one.name not in initial]
            self.signature = {"inputs": _of_graph(inputs), "outputs": _of_graph(model.graph.output)}
        return {"format": "onnx", **self._declared()}

    def _write_transformers(self) -> dict[str, Any]:
        model: Any = self.model
        task = getattr(model, "task", None) if hasattr(model, "tokenizer") else None
        tokenizer = self.tokenizer or getattr(model, "tokenizer", None)
        model = model.model if task is not None else model
        if tokenizer is None:
            raise InvalidInput("tokenizer: found none, expected the tokenizer of the transformers model")
        model.save_pretrained(self.folder)
        tokenizer.save_pretrained(self.folder)
        if not self.signature and task is None:
            width = int(model.config.hidden_size)
            self.signature = {
                "inputs": {"text": ("string", ["batch"])},
                "outputs": {"embedding": ("float32", ["batch", width])},
            }
        named = {} if task is None else {"task": task}
        return {"format": "transformers", "source": {"path": "."}, **named, **self._declared()}


def _copy_source(function: Any, folder: Path) -> str:
    """Copies the file of a function's module; returns the module's name there. Raises InvalidInput."""
    if function.__qualname__ != function.__name__ or not function.__name__.isidentifier():
        raise InvalidInput(
            f"{function.__qualname__}: found a function inside another, expected one of a module's top level"
        )
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    if file is None or not file.endswith(".py"):
        raise InvalidInput(
            f"{function.__name__}: found a function without a file, expected one of a module in a .py file"
        )
    source = Path(file)
    name = source.parent.name if source.stem == "__init__" else source.stem
    if not name.isidentifier() or name == _ENTRY:
        raise InvalidInput(f"{function.__name__}: found the file {source.name}, expected the name of a Python module")
    (folder / f"{name}.py").write_bytes(source.read_bytes())
    return name


def _of_graph(values: Any) -> dict[str, tuple[str, list[int | str]]]:
    """The tensors of an ONNX graph. The first dimension is `batch`, unless the graph has a number there."""
    from onnx import helper

    found = {}
    for value in values:
        tensor = value.type.tensor_type
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
        shape: list[int | str] = []
        for axis, extent in enumerate(tensor.shape.dim):
            symbol = extent.dim_param if extent.dim_param.isidentifier() else f"dim_{axis}"
            shape.append(extent.dim_value or ("batch" if axis == 0 else symbol))
        found[value.name] = (dtype if dtype in DTYPES else "string", shape)
    return found


def _load_once(folder: Path) -> None:
    """Raises ConfigurationError for a package that a worker would refuse."""
    # The caller may go on with a training.
    with _saving(), keeping_threads(), closing(open_runtime(load_package(folder))) as runtime:
        runtime.load("cpu", 1)


@contextlib.contextmanager
def _saving() -> Iterator[None]:
    token = _is_saving.set(True)
    try:
        yield
    finally:
        _is_saving.reset(token)
