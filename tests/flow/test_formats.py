"""IN-006, IN-024, CF-005: packages of every format, served from their folders by real workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from penstock import Client
from tests.conftest import StartWorker
from tests.servers import RedisServer, wait_until
from tests.workers.runtime.formats import LABELS, WRITERS, affine

EXIT_CONFIGURATION = 78


def test_one_worker_serves_packages_of_every_format(
    shared_redis: RedisServer, models_root: Path, start_worker: StartWorker, slot: str
):
    """The same function as Python, PyTorch, TorchScript and ONNX gives the same answers, and pipelines theirs."""
    for format_, write in WRITERS.items():
        write(models_root, name=f"{slot}-{format_}")
    start_worker(shared_redis, models_root)
    x = np.random.default_rng(4).standard_normal((3, 4), np.float32)
    texts = np.array(["abc", "zz top"], object)
    with Client(shared_redis.url) as client:
        jobs = {
            format_: client.submit(
                f"{slot}-{format_}", {"text": texts} if format_ in ("encoder", "pipeline") else {"x": x}
            )
            for format_ in WRITERS
        }
        answers = {format_: job.result(180) for format_, job in jobs.items()}
    for format_ in ("python", "pytorch", "torchscript", "onnx"):
        np.testing.assert_allclose(answers[format_]["y"], affine(x), rtol=1e-5, atol=1e-6, err_msg=format_)
    assert set(answers["pipeline"]["label"].tolist()) <= set(LABELS)
    np.testing.assert_allclose(np.linalg.norm(answers["encoder"]["embedding"], axis=1), 1, atol=1e-5)


def test_worker_without_a_framework_refuses_its_models_and_never_loads_it(
    shared_redis: RedisServer, models_root: Path, start_worker: StartWorker, slot: str
):
    """frameworks = onnxruntime: a graph is served without torch, a torch model is refused by the name of its format."""
    graph, module = f"{slot}-graph", f"{slot}-module"
    WRITERS["onnx"](models_root, name=graph)
    WRITERS["pytorch"](models_root, name=module)
    only_onnx = {"PENSTOCK_INFERENCE_FRAMEWORKS": "onnxruntime"}
    worker = start_worker(shared_redis, models_root, models=[graph], environment=only_onnx)
    x = np.ones((1, 4), np.float32)
    with Client(shared_redis.url) as client:
        np.testing.assert_allclose(client.submit(graph, {"x": x}).result(180)["y"], affine(x), rtol=1e-5, atol=1e-6)
    mapped = Path(f"/proc/{worker.pid}/maps").read_text()
    assert "onnxruntime" in mapped
    assert "libtorch" not in mapped
    refused = start_worker(shared_redis, models_root, models=[module], environment=only_onnx, wait=False)
    wait_until(lambda: not refused.is_running, 30, "the other worker ended")
    assert refused.child.returncode == EXIT_CONFIGURATION
    assert f"{module}/1: format pytorch needs the framework pytorch, expected one of the setting" in refused.tail()
