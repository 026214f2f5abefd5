"""Settings that say how versions are loaded and run, and packages that cannot be served: followed into a drain."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.registry.admission import JobBuilder
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.envelope import Failure, ResultHeader, open_result
from penstock.registry.errors import ConfigurationError
from penstock.registry.package import find, load_package
from penstock.registry.settings import Settings
from penstock.registry.tensors import decode
from penstock.workers.assembly import DrainOptions, build_drain
from penstock.workers.observe.listener import NullListener
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.runtime.base import Runtime
from penstock.workers.versions.repository import DiskRepository
from tests.packages import recorded_forwards, write_double, write_package, write_recorder
from tests.servers import wait_until
from tests.workers.batching.test_calibrate import GIB, Device
from tests.workers.test_drain import ROOMY, UNSIGNED

WARM_UP_S = 0.1
"""What a forward takes that is among the first three."""


class SettingsHarness:
    """A drain over the broker in memory that serves the highest version of these models, and a producer."""

    def __init__(self, root: Path, models: Sequence[str], device: str, settings: dict[str, Any]) -> None:
        packages = {name: load_package(find(root, name).path) for name in models}
        self._specs = {name: package.spec for name, package in packages.items()}
        self._broker = MemoryBroker()
        self._builder = JobBuilder(tenant="acme", keyring=UNSIGNED, max_bytes=1 << 20)
        self._end = self._broker.connect()
        self.drain = build_drain(
            Settings.load(overrides={"home": str(root.parent / "home"), **settings}, environ={}, cwd=root),
            self._broker.connect(),
            list(packages.values()),
            DrainOptions(
                name="followed",
                device=device,
                threads=1,
                listener=NullListener(),
                metrics=InferenceMetrics((0.1, 1.0)),
                repository=DiskRepository(root, [root]),
            ),
        )

    def submit(self, model: str, *numbers: float) -> list[str]:
        """One job per number; their ids."""
        jobs = [self._builder.build(self._specs[model], {"x": [[each, 0, 0, 0]]}) for each in numbers]
        assert {receipt.outcome for receipt in self._end.publish(model, jobs, ROOMY)} == {"accepted"}
        return [job.job_id for job in jobs]

    def result(self, job_id: str) -> tuple[ResultHeader, float | Failure]:
        """How the job ended, once it has: its header, and the first number of `y` or the failure."""

        def sealed() -> bytes:
            job_record = self._end.job_record(job_id)
            return job_record.result if job_record else b""

        header, body = open_result(wait_until(sealed, 10, "the job ends"), UNSIGNED)
        return header, header.error or float(decode(header.content, body)["y"][0, 0])


StartHarness = Callable[..., SettingsHarness]


@pytest.fixture
def start(models_root: Path) -> Iterator[StartHarness]:
    """Starts a drain for these models of `models_root`, with these settings."""
    harnesses: list[SettingsHarness] = []

    def start(*models: str, device: str = "cpu", **settings: Any) -> SettingsHarness:
        harnesses.append(SettingsHarness(models_root, models, device, settings))
        harnesses[-1].drain.load()
        harnesses[-1].drain.start()
        return harnesses[-1]

    yield start
    for harness in harnesses:
        harness.drain.stop(1.0)


@pytest.mark.parametrize(
    ("settings", "forwards"), [({}, 3), *(({"compilation": {"warmup_requests": asked}}, asked) for asked in (0, 5))]
)
def test_model_is_run_so_often_before_the_worker_is_ready(
    start: StartHarness, models_root: Path, tmp_path: Path, settings: dict[str, Any], forwards: int
):
    """Three forwards by default, and as many as the setting says, also none: counted before the first job (CF-015)."""
    forward_log = tmp_path / "forward_log"
    write_recorder(models_root, forward_log, "counted")
    harness = start("counted", **settings)
    assert harness.drain.health.readiness[0]
    assert len(recorded_forwards(forward_log)) == forwards
    harness.result(*harness.submit("counted", 7.0))
    assert len(recorded_forwards(forward_log)) == forwards + 1


def test_the_first_job_is_as_fast_as_any_later_one(start: StartHarness, models_root: Path):
    """What a model has to do only once it has done when its worker is ready: its first three forwards are slow here,
    and the first job's is no slower than the p99 of the next fifty, but for the clock's noise (CF-015)."""
    source = f"""
    import itertools, time
    forwards = itertools.count()

    def build():
        def forward(inputs):
            time.sleep({WARM_UP_S} if next(forwards) < 3 else 0.002)
            return {{"y": inputs["x"]}}
        return forward
    """

    def begins_as_fast(name: str) -> bool:
        write_package(models_root, name, source, max_batch_size=1)
        harness = start(name)

        def compute_ms(number: float) -> float:
            (job_id,) = harness.submit(name, number)
            return float(harness.result(job_id)[0].timings.compute_ms)

        first, *later = (compute_ms(float(number)) for number in range(51))
        return first < max(later) + WARM_UP_S * 1000 / 2

    # A busy machine delays a first job now and then; a worker that does not warm up delays each.
    assert any(begins_as_fast(f"slow-to-begin-{attempt}") for attempt in range(3))


@pytest.mark.parametrize(("headroom_pct", "rows"), [(0, 380), (20, 300), (50, 180)])
def test_calibration_leaves_the_headroom_that_is_set(
    start: StartHarness, models_root: Path, monkeypatch: pytest.MonkeyPatch, headroom_pct: int, rows: int
):
    """`gpu_headroom_pct` reaches the batches of a worker, here on a device of 80 GiB that is simulated: 4 GiB of
    weights and 0.2 GiB a row (CF-011)."""
    device = Device(4 * GIB, GIB // 5)

    def probe(runtime: Runtime, name: str, concurrency: int) -> Callable[[int], object]:
        assert (runtime.spec.name, name, concurrency) == ("double", "cuda:0", 1)
        return device.probe

    monkeypatch.setattr("penstock.workers.versions.loader.forward_probe", probe)
    monkeypatch.setattr("penstock.workers.versions.loader.total_bytes", lambda _: device.total_bytes)
    package = write_double(models_root)
    spec = yaml.safe_load((package / "model.yaml").read_text())
    (package / "model.yaml").write_text(yaml.safe_dump(spec | {"batching": {}}))
    harness = start("double", device="cuda:0", batching={"gpu_headroom_pct": headroom_pct})
    assert harness.drain.lifecycle.models["double"].versions["1"].queue.max_rows == rows


def test_loading_has_a_limit_at_start_too(start: StartHarness, models_root: Path):
    """A model that never ends loading keeps no worker waiting for ever: the worker says so and does not start, and
    one that is quick enough loads within the same limit (CX-026)."""
    write_package(models_root, "hangs", "import time\n\ndef build():\n    time.sleep(600)\n")
    write_double(models_root)
    with pytest.raises(ConfigurationError, match=r"^hangs/1: loading took longer than 0\.3 s$"):
        start("hangs", load_timeout_s=0.3)
    harness = start("double", load_timeout_s=60.0)
    assert harness.result(*harness.submit("double", 4.0))[1] == 8.0


def _unloadable() -> dict[str, tuple[dict[str, Any], dict[str, str], str]]:
    """How a version is wrong: (fields of its model.yaml, files, what the refusal says)."""
    answers = "def build():\n    return lambda inputs: {{'y': {}}}\n"
    y = {"name": "y", "dtype": "float32", "shape": ["batch", 4]}
    encoder = {
        "entrypoint": None,
        "format": "transformers",
        "source": {"path": "."},
        "inputs": [{"name": "text", "dtype": "string", "shape": ["batch"]}],
    }
    return {
        "another dtype": ({}, {"model.py": answers.format("inputs['x'].astype('int64')")}, "y"),
        "another shape": ({}, {"model.py": answers.format("inputs['x'][:, :2]")}, "y"),
        "another output": ({"outputs": [{**y, "name": "z"}]}, {"model.py": answers.format("inputs['x']")}, "z"),
        "it cannot be built": ({}, {"model.py": "def build():\n    raise SystemExit(3)\n"}, "SystemExit"),
        "unknown format": ({"format": "tensorflow"}, {}, "format: "),
        "unknown field": ({"trust_remote_code": True}, {}, "trust_remote_code"),
        "pickled weights": (encoder, {"config.json": "{}", "pytorch_model.bin": "\x80"}, "pickle"),
        "foreign code": (encoder, {"config.json": '{"auto_map": {"AutoModel": "m.M"}}'}, "auto_map"),
        "it climbs": ({"entrypoint": "../../evil:build"}, {}, "entrypoint: "),
    }


@pytest.mark.parametrize(("fields", "files", "text"), _unloadable().values(), ids=list(_unloadable()))
def test_the_worker_goes_on_serving_beside_a_version_that_is_wrong(
    start: StartHarness, models_root: Path, fields: dict[str, Any], files: dict[str, str], text: str
):
    """Whatever is wrong with a version that an operator wants loaded: one line says what, the version that answered
    goes on answering, and the worker stays well (bad input)."""
    write_double(models_root)
    harness = start("double")
    package = write_package(models_root, "double", files.get("model.py", "def build(): ...\n"), version="2")
    for name, content in files.items():
        (package / name).write_text(content)
    spec = {**yaml.safe_load((package / "model.yaml").read_text()), **fields}
    (package / "model.yaml").write_text(yaml.safe_dump({name: value for name, value in spec.items() if value}))

    def problem() -> str:
        described = harness.drain.lifecycle.described()["double"].get("2", {})
        return str(described.get("problem", "")) if described.get("state") == "failed" else ""

    harness.drain.lifecycle.request_load("double", "2")
    line = wait_until(problem, 5, "the version has failed")
    assert text in line
    assert "\n" not in line
    assert str(models_root) not in line
    assert harness.result(*harness.submit("double", 4.0))[1] == 8.0
    assert harness.drain.health.unhealthy_reason() is None


def test_models_of_one_worker_keep_to_their_own_concurrency(start: StartHarness, models_root: Path, tmp_path: Path):
    """Under one load a model with concurrency 3 has three forwards at work and its neighbour one (IN-026)."""
    for name, concurrency in (("wide", 3), ("narrow", 1)):
        source = f"""
        import os, threading, time

        forward_log = os.open({str(tmp_path / name)!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        running, lock = [], threading.Lock()

        def build():
            def forward(inputs):
                with lock:
                    running.append(1)
                    os.write(forward_log, f"{{len(running)}}\\n".encode())
                time.sleep(0.02)
                with lock:
                    running.pop()
                return {{"y": inputs["x"]}}
            return forward
        """
        package = write_package(models_root, name, source, max_batch_size=2)
        with (package / "model.yaml").open("a") as spec:
            spec.write(f"concurrency: {concurrency}\n")
    harness = start("wide", "narrow")
    jobs = [job for name in ("wide", "narrow") for job in harness.submit(name, *map(float, range(40)))]
    for job_id in jobs:
        harness.result(job_id)
    most = {name: max(map(json.loads, (tmp_path / name).read_text().split())) for name in ("wide", "narrow")}
    assert most == {"wide": 3, "narrow": 1}
