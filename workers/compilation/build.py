"""The child process of a compilation: a package -> the code of its compiled form, without its weights.

    request -> load the package, as the worker did -> compilable(form) -> explain -> export -> check the guards
            -> AOTInductor -> <folder>/library.part, constants.part, findings.part

`BuildProcess` runs it as `python -m penstock.workers.compilation.build`. It may be killed at any moment. Its guard
ends it after the worker has ended.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from penstock.registry.errors import PenstockError
from penstock.registry.package import load_package
from penstock.workers import children
from penstock.workers.compilation.aot_library import load_library, state_of
from penstock.workers.compilation.build_process import FINDINGS, PART_SUFFIX
from penstock.workers.compilation.safety_monitor import TorchCompileSafetyMonitor
from penstock.workers.runtime.compilable import CompilableRuntime, CompilationRefused, Shapes
from penstock.workers.runtime.open import open_runtime
from penstock.workers.runtime.tracing import first_line, trace

if TYPE_CHECKING:
    import torch

__all__ = ["main"]

_NICENESS: Final = 5
"""Forwards of the worker come first."""
_COMPILER_CONFIG: Final = {
    "aot_inductor.package_constants_in_so": False,
    # A precompiled header pays from the second file on. It took 9 of 23 s for a model with one file.
    "aot_inductor.precompile_headers": False,
    "cpp_cache_precompile_headers": False,
    # The CPU reports its features. Three programs that test them took a third of the time.
    "cpp.vec_isa_ok": True,
    # Worker processes of the compiler gain nothing for a single model.
    "compile_threads": 1,
}


def main() -> None:
    """Reads the request from stdin and writes the parts into the folder that it names."""
    request = json.loads(sys.stdin.readline())
    folder = Path(request["folder"])
    # The worker keeps the pipe open while it waits for the parts.
    children.start_guard(sys.stdin.fileno(), folder)
    os.nice(_NICENESS)
    try:
        parts = _build(request, folder)
    except (CompilationRefused, PenstockError) as error:
        parts = _refusal(str(error))
    except Exception as error:
        # The stderr of this process is not read.
        parts = _refusal(f"The compiler failed ({first_line(error)})")
    for name, data in parts.items():
        (folder / f"{name}{PART_SUFFIX}").write_bytes(data)


def _refusal(reason: str) -> dict[str, bytes]:
    return {FINDINGS: json.dumps({"refused": reason}).encode()}


def _build(request: Mapping[str, Any], folder: Path) -> dict[str, bytes]:
    package = load_package(Path(request["package"]))
    runtime = open_runtime(package, request["content_hash"], precision=request["precision"])
    runtime.load(request["device"], request["threads"])
    if not _is_compilable(runtime):
        raise CompilationRefused(f"Models of format {package.spec.format} have no compiled form")
    target = runtime.compilable(request["form"])
    shapes = Shapes.of(target.examples)
    check = TorchCompileSafetyMonitor(request["max_graph_breaks"]).pre_compile_check(
        target.module, shapes.traced(target.examples)
    )
    if not check:
        raise CompilationRefused("; ".join(check.reasons))
    program = trace(target, shapes)
    library = _compile(program, folder / "model.pt2")
    findings = {"graph_breaks": check.graph_breaks, "graphs": 1}
    return {
        FINDINGS: json.dumps(findings).encode(),
        "library": library,
        "constants": _own_constants(program, library, target.module, shapes.device),
    }


def _is_compilable(runtime: object) -> TypeGuard[CompilableRuntime]:
    return hasattr(runtime, "compilable")


def _compile(program: torch.export.ExportedProgram, path: Path) -> bytes:
    import torch

    try:
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=_COMPILER_CONFIG)
    except Exception as error:
        raise CompilationRefused(f"The model cannot be compiled ({first_line(error)})") from error
    return path.read_bytes()


def _own_constants(
    program: torch.export.ExportedProgram, library: bytes, module: torch.nn.Module, device: torch.device
) -> bytes:
    """The tensors that tracing made: the library needs them, and the module has none of their names."""
    from safetensors.torch import save

    own = set(load_library(library, device).constant_names()) - set(state_of(module))
    return save({name: program.constants[name].detach().cpu().contiguous() for name in own})


if __name__ == "__main__":
    main()
