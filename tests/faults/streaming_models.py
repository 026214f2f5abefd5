"""Stages with a streaming model that misbehaves as its inputs say, for fault tests; NumPy only.

stubborn  yields three chunks `n`, does what `kind` names in ENDLESS, RAISING or UNSENDABLE, and returns: any other
          kind is an ordinary stream
flood     yields `count` numbered chunks of `size` bytes; once its process ends before chunk `dies_at`
"""

from __future__ import annotations

from textwrap import indent
from typing import Final

import yaml

from tests.faults.conftest import OpenStage, Stage

__all__ = ["ENDLESS", "HANGS", "RAISING", "UNSENDABLE", "open_flood", "open_stubborn"]

_TRY: Final = 'try:\n    yield {"n": np.array([0])}\nexcept GeneratorExit:\n    '
HANGS: Final = "never returns"
"""The kind in ENDLESS that costs its process."""
ENDLESS: Final = {
    "never looks": 'yield {"n": np.array([0])}',
    "swallows GeneratorExit": f"{_TRY}pass",
    "catches everything": 'try:\n    yield {"n": np.array([0])}\nexcept:\n    pass',
    "raises when it is closed": f'{_TRY}raise ValueError("not now")',
    "interrupts when it is closed": f"{_TRY}raise KeyboardInterrupt",
    "exits when it is closed": f"{_TRY}raise SystemExit(3)",
    "raises its own when it is closed": f"{_TRY}raise Own",
    "reports when it is closed": f"{_TRY}ctx.progress(0.5)\n    raise",
    "raises when it looks": 'if ctx.is_cancelled:\n    raise RuntimeError("told to end")\nyield {"n": np.array([0])}',
    HANGS: f"{_TRY}time.sleep(3600)",
}
"""Done again and again."""
RAISING: Final = {
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "GeneratorExit": "raise GeneratorExit",
    "CancelledError": "raise asyncio.CancelledError",
    "SystemExit": "raise SystemExit(3)",
    "StopIteration": "raise StopIteration",
    "Own": "raise Own",
    "BaseExceptionGroup": 'raise BaseExceptionGroup("several", [KeyboardInterrupt(), Own()])',
}
UNSENDABLE: Final = {
    "160 MB": 'yield {"n": np.zeros(160_000_000, np.uint8)}',
    "lone surrogate": 'yield {"text": np.array(["\\udcff"], object)}',
    "object": 'yield {"n": np.array([object()])}',
    "complex": 'yield {"n": np.zeros(1, np.complex64)}',
    "no mapping": "yield 7",
    "name": 'yield {"\\udcff": np.zeros(1)}',
    "dimensions": 'yield {"n": np.zeros((1,) * 9)}',
    "tensors": 'yield {f"n{i}": np.zeros(1) for i in range(65)}',
    "NaN": 'yield {"share": np.array([np.nan], np.float32)}',
}
"""The model catches every exception of it, and goes on."""
_STUBBORN: Final = """\
import asyncio
import time

import numpy as np


class Own(BaseException):
    pass


def build():
    return stream


def stream(inputs, ctx):
    for number in range(3):
        yield {"n": np.array([number])}
    kind = KINDS.get(inputs["kind"][0])
    if kind is not None:
        yield from kind(ctx)
    return {"total": np.array([3]), "share": np.array([1.0], np.float32)}
"""


_FLOOD: Final = """\
import os

import numpy as np


def build():
    return flood


def flood(inputs, ctx):
    count, size, dies_at = (int(inputs[name][0]) for name in ("count", "size", "dies_at"))
    for number in range(count):
        if number == dies_at and not os.path.exists(DIED):
            open(DIED, "w").close()
            os._exit(9)
        chunk = np.zeros(size, np.uint8)
        chunk[:4] = np.frombuffer(number.to_bytes(4, "little"), np.uint8)
        yield {"n": chunk}
    return {"count": np.array([count])}
"""


def open_stubborn(open_stage: OpenStage, *, timeout_s: float = 30.0) -> Stage:
    """A stage with the model `stubborn`, without workers. timeout_s: the limit of a forward without progress."""
    stage = open_stage(model="stubborn")
    outputs = {"total": "int64", "share": "float32"}
    _write(stage, _stubborn_source(), inputs={"kind": "string"}, outputs=outputs, timeout_s=timeout_s)
    return stage


def open_flood(open_stage: OpenStage) -> Stage:
    """A stage with the model `flood`, without workers."""
    stage = open_stage(model="flood")
    source = _FLOOD.replace("DIED", repr(str(stage.models_root / "died")))
    _write(stage, source, inputs=dict.fromkeys(("count", "size", "dies_at"), "int64"), outputs={"count": "int64"})
    return stage


def _write(
    stage: Stage, source: str, *, inputs: dict[str, str], outputs: dict[str, str], timeout_s: float = 30.0
) -> None:
    """The package of the stage's model, version 1. inputs, outputs: the dtype of each, of shape [1]."""
    folder = stage.models_root / stage.model / "1"
    folder.mkdir(parents=True)
    spec = {
        "name": stage.model,
        "version": "1",
        "format": "python",
        "entrypoint": "model:build",
        "streams": True,
        "timeout_s": timeout_s,
        "inputs": [{"name": name, "dtype": dtype, "shape": [1]} for name, dtype in inputs.items()],
        "outputs": [{"name": name, "dtype": dtype, "shape": [1]} for name, dtype in outputs.items()],
    }
    (folder / "model.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    (folder / "model.py").write_text(source)


def _stubborn_source() -> str:
    bodies = {kind: f"while True:\n    time.sleep(0.02)\n{indent(body, '    ')}" for kind, body in ENDLESS.items()}
    bodies |= {kind: f"yield from ()\n{body}" for kind, body in RAISING.items()}
    bodies |= {kind: f"try:\n    {body}\nexcept BaseException:\n    pass" for kind, body in UNSENDABLE.items()}
    functions = [f"def kind_{number}(ctx):\n{indent(body, '    ')}\n" for number, body in enumerate(bodies.values())]
    kinds = ", ".join(f"{kind!r}: kind_{number}" for number, kind in enumerate(bodies))
    return "\n\n".join([_STUBBORN, *functions, f"KINDS = {{{kinds}}}\n"])
