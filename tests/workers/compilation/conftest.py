"""One compilation for all tests: it takes a C++ compiler some ten seconds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from penstock.registry.settings_sections import CompilationConfig
from penstock.workers.compilation import CompiledForward, TorchCompiler
from penstock.workers.runtime.pytorch import PyTorchRuntime
from tests.workers.compilation.packages import loaded, write_module

LONG_FORWARD = """
h = x.repeat(1, 64)
for _ in range(30):
    h = torch.tanh(h @ h.T @ h / 1024)
for _ in range(120):
    h = h * 1.001 + 0.001
return self.linear(x).relu() + h[:, :16] * 0
"""
"""Long enough to see whether other threads run meanwhile; what takes the time adds nothing to the answer. The many
small steps are one when it is compiled, which makes it faster on whatever machine."""


@dataclass
class Served:
    """What a thread that served all the while saw."""

    forwards: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass
class Compiled:
    """A runtime, its compiled form, and where both came from."""

    runtime: PyTorchRuntime
    forward: CompiledForward
    package: Path
    home: Path
    served: Served

    @property
    def config(self) -> CompilationConfig:
        """The settings that it was compiled with."""
        return CompilationConfig(cache_dir=self.home / "cache")

    @property
    def key_file(self) -> Path:
        """The key that sealed the artefact."""
        return self.home / "compilation.key"

    @property
    def artifact(self) -> Path:
        """The file that was stored."""
        (file,) = (self.home / "cache").glob("*.artifact")
        return file


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    """Compiled while another thread of this process serves the same model eagerly."""
    home = tmp_path_factory.mktemp("compilation")
    folder = write_module(home / "models", LONG_FORWARD)
    runtime = loaded(folder)
    compiler = TorchCompiler(CompilationConfig(cache_dir=home / "cache"), home / "compilation.key")
    served, is_over = Served(), threading.Event()
    thread = threading.Thread(target=_serve, args=(runtime, served, is_over))
    thread.start()
    try:
        forward = compiler.compile(runtime, "compiled")
    finally:
        is_over.set()
        thread.join()
    yield Compiled(runtime, forward, folder, home, served)
    runtime.close()


def _serve(runtime: PyTorchRuntime, served: Served, is_over: threading.Event) -> None:
    """One forward after another with a pause of 20 ms, compared with what the weights say."""
    module = runtime.model
    assert isinstance(module, torch.nn.Module)
    weight, bias = (parameter.detach().clone() for parameter in module.parameters())
    inputs = torch.arange(48.0).reshape(3, 16)
    expected = torch.relu(inputs @ weight.T + bias).numpy()
    while not is_over.wait(0.02):
        try:
            found = runtime.run(runtime.prepare([{"x": inputs.numpy()}]))["y"]
            if abs(found - expected).max() > 1e-4:
                served.wrong.append("other numbers")
        except Exception as error:  # whatever a trace on another thread may do to a forward
            served.wrong.append(f"{type(error).__name__}: {error}")
        served.forwards += 1
