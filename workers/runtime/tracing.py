"""A module -> one graph for all its shapes.

The compiled code checks no guards when it runs. So they are checked here, for every shape that the graph serves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.workers.runtime.compilable import Compilable, CompilationRefused, Shapes

if TYPE_CHECKING:
    import torch

__all__ = ["first_line", "trace"]


def trace(target: Compilable, shapes: Shapes) -> torch.export.ExportedProgram:
    """One graph for all shapes. Raises CompilationRefused where there is none."""
    import torch

    dynamic = tuple(
        {number: torch.export.Dim.DYNAMIC for number, span in enumerate(spans) if span.is_dynamic}
        for spans in shapes.spans
    )
    try:
        with torch.inference_mode():
            program = torch.export.export(target.module, shapes.traced(target.examples), dynamic_shapes=dynamic)
    except Exception as error:
        # The tracer raises its own exceptions and those of the model.
        raise CompilationRefused(f"The model cannot be traced as one graph ({first_line(error)})") from error
    _check_guards(program, shapes)
    return program


def _check_guards(program: torch.export.ExportedProgram, shapes: Shapes) -> None:
    """Without guards the compiled code gives wrong answers for shapes that the traced graph would refuse."""
    import torch

    guards = getattr(program.module(), "_guards_fn", None)
    if guards is None:
        return
    for extents in shapes.sweep():
        tensors = [
            torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(extents, shapes.dtypes, strict=True)
        ]
        try:
            guards(*tensors)
        except AssertionError as error:
            raise CompilationRefused(f"Shapes {extents} need a graph of their own ({error!s:.120})") from None


def first_line(error: BaseException) -> str:
    """The class of the error and the first line of its text."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
