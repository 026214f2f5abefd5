"""CF-031: in the mode `hashes_only` a worker keeps digests of inputs, and the inputs nowhere."""

from __future__ import annotations

import gc
import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import yaml

from penstock.registry.admission import JobBuilder
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.envelope import open_job
from penstock.registry.package import load_package
from penstock.registry.settings import Settings
from penstock.safety.cache_entry import key_of
from penstock.workers.assembly import DrainOptions, build_drain
from penstock.workers.drain import Drain
from penstock.workers.levels.optimizer import InferenceOptimizer
from penstock.workers.observe.listener import NullListener
from penstock.workers.observe.metrics import InferenceMetrics
from tests.packages import write_package
from tests.workers.stepped import LIMITS, UNSIGNED, MemoryJournal

LENGTHS = """
    import numpy as np

    def build():
        return lambda inputs: {"y": np.array([[len(text)] * 4 for text in inputs["text"]], np.float32)}
"""


class Asked:
    """One job of a random text. The text itself is not kept, so that only the worker can."""

    def __init__(self, drain: Drain, broker: MemoryBroker, folder: Path) -> None:
        text = f"my number is {secrets.token_hex(16)}"
        self.reversed = text[::-1]
        spec = load_package(folder).spec
        job = JobBuilder(tenant="acme", keyring=UNSIGNED, max_bytes=1 << 20).build(spec, {"text": [text]})
        header, body = open_job(job.sealed, UNSIGNED)
        self.digest = key_of(header, bytes(body), "1", tenant="acme")
        assert {receipt.outcome for receipt in broker.publish("lengths", [job], LIMITS)} == {"accepted"}
        drain.step(0.0)
        executor = drain.parts.executor
        while (work := executor.begin("a")) is None:
            drain.step(0.0)
        executor.run(work)
        executor.finish("a", work)
        for _ in range(3):
            drain.step(0.0)

    @property
    def text(self) -> str:
        return self.reversed[::-1]


def _heap() -> Iterator[str | bytes]:
    """Every text that this process holds, in objects that the collector knows and in those that it does not."""
    # By type: isinstance asks an object for its class, and some objects of torch then warn.
    gc.unfreeze()
    gc.collect()
    seen: set[int] = set()
    waiting = list(gc.get_objects())
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if issubclass(type(found), str | bytes):
            yield found
        elif issubclass(type(found), bytearray | memoryview):
            yield bytes(found)
        elif type(found) is np.ndarray:
            waiting.extend(found.ravel().tolist() if found.dtype == object else [found.tobytes()])
        elif issubclass(type(found), msgspec.Struct):
            waiting.extend(getattr(found, name) for name in found.__struct_fields__)
        else:
            waiting.extend(gc.get_referents(found))


def _is_held(asked: Asked) -> bool:
    """Whether the heap has the text that was asked, in whatever surrounding."""
    part = asked.text[-24:]
    raw = part.encode()
    # The two searched texts themselves are on the heap, too.
    return any(
        held != part and part in held if isinstance(held, str) else held != raw and raw in held for held in _heap()
    )


@pytest.mark.parametrize(
    ("mode", "keeps"), [pytest.param("ephemeral", True, marks=pytest.mark.slow), ("hashes_only", False)]
)
def test_inputs_are_kept_as_digests_only(mode: str, keeps: bool, models_root: Path, tmp_path: Path):
    """Heap and disk have no input after its job, and L1 has its digest. In `ephemeral` a reference sample has both."""
    folder = write_package(models_root, "lengths", LENGTHS)
    file = folder / "model.yaml"
    spec = yaml.safe_load(file.read_text())
    spec["inputs"] = [{"name": "text", "dtype": "string", "shape": ["batch"]}]
    file.write_text(yaml.safe_dump(spec))
    home = tmp_path / "home"
    # The producer has no data key.
    chosen = {"privacy.mode": mode, "privacy.seal_payloads": "off", "home": str(home)}
    settings = Settings.load(environ={}, cwd=tmp_path, overrides=chosen)
    metrics, broker = InferenceMetrics((0.1, 1.0)), MemoryBroker()
    optimizer = InferenceOptimizer(
        settings.inference, home=home, device="cpu", audit=lambda _: None, metrics=metrics, compiler=None
    )
    options = DrainOptions(
        name="scanned",
        device="cpu",
        threads=1,
        listener=NullListener(),
        metrics=metrics,
        journal=lambda _consumer, _seats: MemoryJournal(),
        tuner=optimizer,
    )
    drain = build_drain(settings, broker.connect(), [load_package(folder)], options)
    drain.load()
    asked = Asked(drain, broker, folder)
    assert drain.parts.answers.memory.get(asked.digest) is not None
    assert _is_held(asked) == keeps
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(asked.text.encode() in content for content in written)
    broker.close()
