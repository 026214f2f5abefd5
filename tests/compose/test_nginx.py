"""The shipped configuration of nginx, in front of two real gateways: streams, limits of bodies, dead replicas, gRPC."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from websockets.asyncio.client import connect

from penstock.producers.gateway.request_headers import LONGEST_WAIT_S
from penstock.registry.queues import meter_key
from penstock.registry.settings_sections import InferenceConfig
from tests.gateway_process import GatewayProcess
from tests.packages import write_double, write_package
from tests.servers import (
    LEAST_PATIENCE_S,
    ROOT,
    Process,
    RedisServer,
    WorkerProcess,
    free_port,
    redis_binaries,
    require,
    require_module,
    wait_until,
)

SHIPPED = ROOT / "compose" / "nginx"
MIB = 1024 * 1024
ONES = {"inputs": {"x": [[1.0] * 4]}}
GATED = """
import time
from pathlib import Path

import numpy as np

def build():
    def stream(inputs, ctx):
        if inputs["count"][0]:
            yield {{"value": np.array([1])}}
            while not Path({gate!r}).exists() and not ctx.is_cancelled:
                time.sleep(0.01)
        return {{"total": inputs["count"]}}

    return stream
"""


def nginx() -> str:
    """Debian has it where only root looks."""
    return require(shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin"), "nginx (Debian: nginx-light)")


class Proxy(Process):
    """nginx with the files of compose/nginx, but for its addresses and the folder in which it writes."""

    def __init__(self, folder: Path, gateways: list[int], grpc: list[int]) -> None:
        super().__init__(folder)
        self.port, self.grpc_port = free_port(), free_port()
        (folder / "config").mkdir()
        for file in SHIPPED.glob("*.conf"):
            text = file.read_text().replace("/tmp/", f"{folder}/").replace("/etc/penstock/", f"{folder}/config/")
            text = re.sub(r"listen 8000\b", f"listen 127.0.0.1:{self.port}", text)
            text = re.sub(r"listen 50051\b", f"listen 127.0.0.1:{self.grpc_port}", text)
            (folder / "config" / file.name).write_text(text)
        # Docker's DNS is not here. The gateways' own request not to buffer is ignored, so that nginx decides.
        (folder / "config" / "upstreams.conf").write_text(
            "proxy_ignore_headers X-Accel-Buffering;\n"
            + upstream("gateways", gateways)
            + upstream("gateways_grpc", grpc)
        )
        # Its processes change their user where root starts it, and the folder of a test is root's.
        as_root = " user root;" if os.geteuid() == 0 else ""
        self.command = [nginx(), "-e", "stderr", "-c", f"{folder}/config/nginx.conf", "-g", f"daemon off;{as_root}"]

    def start(self) -> Proxy:
        """Starts it, and waits until a gateway answers through it."""
        self._spawn(self.command)
        wait_until(self._answers, 30, "nginx answers")
        return self

    def stop(self) -> None:
        """Kill it; its processes follow."""
        if self.is_running:
            self.signal(signal.SIGTERM)
            self.child.wait(180)

    def client(self) -> httpx.Client:
        """A client of its HTTP port. Close it."""
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=LEAST_PATIENCE_S, trust_env=False)

    def _answers(self) -> bool:
        assert self.is_running, self.output.read_text()
        try:
            with self.client() as client:
                return client.get("/health/live").status_code == 200
        except httpx.TransportError:
            return False


def upstream(name: str, ports: list[int]) -> str:
    """As the shipped ones, with these addresses."""
    shipped = re.search(rf"upstream {name} \{{.*?\n\}}", (SHIPPED / "upstreams.conf").read_text(), re.DOTALL)
    assert shipped is not None
    server = re.search(r"server \S+ resolve (.*);", shipped[0])
    assert server is not None
    servers = "\n".join(f"server 127.0.0.1:{port} {server[1]};" for port in ports)
    return shipped[0].replace(server[0], servers) + "\n"


class Fleet:
    """A server, a worker for `double` and the stream `gated`, two gateways and nginx before them."""

    def __init__(self, folder: Path) -> None:
        root = folder / "models"
        self.gate = folder / "gate"
        write_double(root)
        counter = yaml.safe_load((ROOT / "models" / "counter" / "1" / "model.yaml").read_text())
        gated = write_package(root, "gated", GATED.format(gate=str(self.gate)))
        (gated / "model.yaml").write_text(yaml.safe_dump({**counter, "name": "gated"}))
        self.server = RedisServer(require(next(iter(redis_binaries().values()), None), "redis-server"))
        self.worker = WorkerProcess(self.server, root, folder, name="proxied@test")
        self.ports = [free_port(), free_port()]
        self.grpc_ports = [free_port(), free_port()]
        # As compose.yaml has the header of the address; its limit is never reached.
        limits = {
            "PENSTOCK_INFERENCE_SERVER_ADDRESS_HEADER": "x-real-ip",
            "PENSTOCK_INFERENCE_SAFEGUARDS_RATE_LIMIT_ENABLED": "true",
            "PENSTOCK_INFERENCE_SAFEGUARDS_RATE_LIMIT_REQUESTS_PER_MINUTE": "1000000",
            "PENSTOCK_INFERENCE_SAFEGUARDS_RATE_LIMIT_ADDRESS_REQUESTS_PER_MINUTE": "1000000",
        }
        self.gateways = [
            GatewayProcess(
                self.server,
                folder / f"gateway{port}",
                *("--port", str(port)),
                environment={**limits, "PENSTOCK_INFERENCE_SERVER_GRPC_PORT": str(grpc_port)},
            )
            for port, grpc_port in zip(self.ports, self.grpc_ports, strict=True)
        ]
        (folder / "nginx").mkdir()
        self.proxy = Proxy(folder / "nginx", self.ports, self.grpc_ports)

    def start(self) -> Fleet:
        """Starts all of it, the gateways side by side."""
        self.server.start()
        with ThreadPoolExecutor() as beside:
            starts = [beside.submit(gateway.start) for gateway in self.gateways]
            self.worker.start()
            for each in starts:
                each.result()
        self.proxy.start()
        return self

    def stop(self) -> None:
        """Ends all of it."""
        self.gate.touch()
        self.proxy.stop()
        for gateway in self.gateways:
            gateway.stop()
        self.worker.stop()
        self.server.stop()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Shared: a test that kills a gateway starts it again."""
    nginx()
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    try:
        yield fleet.start()
    finally:
        fleet.stop()


@pytest.fixture
def http(fleet: Fleet) -> Iterator[httpx.Client]:
    """A client that knows nginx only."""
    with fleet.proxy.client() as client:
        yield client


def test_nginx_accepts_its_configuration(tmp_path: Path):
    """CX-050: `nginx -t` finds no fault, and warns of nothing."""
    proxy = Proxy(tmp_path, [1, 2], [3, 4])
    proxy._spawn([*proxy.command, "-t"])
    assert proxy.child.wait(180) == 0, proxy.output.read_text()
    assert "warn" not in proxy.output.read_text()


def test_times_and_addresses_fit_the_gateways():
    """nginx waits longer than the longest wait for a job, keeps connections shorter than a gateway, and finds the
    service of compose.yaml where it listens."""
    text = "\n".join(file.read_text() for file in sorted(SHIPPED.glob("*.conf")))

    def seconds(directive: str) -> list[int]:
        return [int(each) for each in re.findall(rf"^ *{directive} (\d+)s;", text, re.MULTILINE)]

    server = InferenceConfig().server
    assert min([*seconds("proxy_read_timeout"), *seconds("grpc_read_timeout")]) > LONGEST_WAIT_S
    assert max(seconds("keepalive_timeout")) < server.client_timeout_s
    assert min(seconds("worker_shutdown_timeout")) > server.stop_grace_s
    services: dict[str, Any] = yaml.safe_load((ROOT / "compose" / "compose.yaml").read_text())["services"]
    assert f"server gateway:{services['gateway']['command'][-1]} resolve" in text
    assert set(re.findall(r"listen (\d+)", text)) == {port.rpartition(":")[2] for port in services["nginx"]["ports"]}
    assert int(re.findall(r"client_max_body_size (\d+)m", text)[0]) == InferenceConfig().max_request_size_mb
    for service, least_s in (("gateway", server.stop_grace_s), ("nginx", seconds("worker_shutdown_timeout")[0])):
        assert int(services[service]["stop_grace_period"].removesuffix("s")) > least_s


def test_a_prediction_passes(http: httpx.Client):
    """With the headers of the gateway."""
    found = http.post("/v1/models/double:predict", json=ONES)
    assert (found.status_code, found.json()["outputs"]["y"]["data"]) == (200, [[2.0] * 4])
    assert found.headers["penstock-job-id"].startswith("double.")


def test_events_pass_as_they_come(fleet: Fleet, http: httpx.Client):
    """A chunk reaches the client while the model, which waits for that client, makes no further one."""
    fleet.gate.unlink(missing_ok=True)
    location = http.post("/v1/jobs", json={"model": "gated", "inputs": {"count": [1]}}).headers["location"]
    names = []
    with http.stream("GET", f"{location}/events") as stream:
        for line in stream.iter_lines():
            names += [line.removeprefix("event: ")] if line.startswith("event: ") else []
            if line == "event: chunk":
                fleet.gate.touch()
    assert names.index("chunk") < names.index("completed") == len(names) - 1


def test_messages_pass_in_both_directions(fleet: Fleet):
    """A WebSocket: a chunk arrives while the model, which waits for that client, makes no further one; then another
    request on the same connection is answered."""
    fleet.gate.unlink(missing_ok=True)

    async def run() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        address = f"ws://127.0.0.1:{fleet.proxy.port}/predict/stream"
        async with asyncio.timeout(120), connect(address, proxy=None) as connection:
            await connection.send(json.dumps({"id": 1, "model": "gated", "inputs": {"count": [1]}}))
            while not found or found[-1]["type"] != "chunk":
                found.append(json.loads(await connection.recv()))
            await connection.send(json.dumps({"id": 2, "model": "double", **ONES}))
            fleet.gate.touch()
            while [each["type"] for each in found].count("completed") < 2:
                found.append(json.loads(await connection.recv()))
        return found

    ends = {each["id"]: each for each in asyncio.run(run()) if each["type"] == "completed"}
    assert ends[1]["outputs"]["total"]["data"] == [1]
    assert ends[2]["outputs"]["y"]["data"] == [[2.0] * 4]


def test_a_client_cannot_forge_its_address(fleet: Fleet, http: httpx.Client):
    """nginx writes the header that the gateways believe: the limit of the address is that of the connection."""
    forged = "203.0.113.7"
    for name in ("X-Real-IP", "X-Forwarded-For", "x_real_ip"):
        assert http.get("/v1/models", headers={name: forged}).status_code == 200
    prefix = meter_key("", "address")
    with fleet.server.client() as redis:
        charged = {key.decode().removeprefix(prefix) for key in redis.scan_iter(f"{prefix}*")}
    assert charged == {"127.0.0.1"}


def test_a_body_is_refused_where_its_answer_arrives(http: httpx.Client):
    """The longest one that a gateway takes passes; nginx refuses a longer one, in the shape of the gateway's errors."""
    limit = InferenceConfig().max_request_size_mb * MIB
    taken, refused = (
        http.post("/v1/jobs", content=b" " * length, headers={"Content-Type": "application/json"})
        for length in (limit, limit + 1)
    )
    assert (taken.status_code, refused.status_code) == (422, 413)
    assert [each.headers["content-type"] for each in (taken, refused)] == ["application/problem+json"] * 2
    assert (taken.json()["status"], refused.json()["status"]) == (422, 413)


def test_figures_of_replicas_are_not_shown(fleet: Fleet, http: httpx.Client):
    """/metrics is Prometheus's, which reads each gateway itself."""
    assert http.get("/metrics").status_code == 404
    with fleet.gateways[0].client() as inside:
        assert inside.get("/metrics").status_code == 200


def test_a_dead_replica_is_passed_over(fleet: Fleet, http: httpx.Client):
    """While one gateway lives every request has its answer; without any it is 502 with Retry-After, until one is
    back."""
    first, second = fleet.gateways
    first.kill()
    predicted = [http.post("/v1/models/double:predict", json=ONES).status_code for _ in range(20)]
    assert predicted == [200] * 20
    second.kill()
    refused = http.post("/v1/models/double:predict", json=ONES)
    assert (refused.status_code, refused.headers["content-type"]) == (502, "application/problem+json")
    assert (refused.json()["status"], refused.headers["retry-after"]) == (502, "1")
    for gateway in (first, second):
        gateway.start()
    wait_until(
        lambda: http.post("/v1/models/double:predict", json=ONES).status_code == 200, 30, "a gateway is found again"
    )


def given(triton: Any, value: float) -> Any:
    """One row of `double` for Triton's client."""
    tensor = triton.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.full((1, 4), value, np.float32))
    return tensor


@pytest.fixture
def triton(fleet: Fleet) -> Iterator[Any]:
    """Triton's client, which knows nginx only."""
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    module = require_module("tritonclient.grpc")
    with module.InferenceServerClient(f"127.0.0.1:{fleet.proxy.grpc_port}", channel_args=options) as client:
        yield client


def test_grpc_passes(triton: Any):
    """Triton's client: its calls, and a stream whose answers come while it is open."""
    module = require_module("tritonclient.grpc")
    assert triton.is_server_live()
    assert triton.is_model_ready("double")
    assert triton.infer("double", [given(module, 1.5)]).as_numpy("y").tolist() == [[3.0] * 4]
    found: queue.Queue[Any] = queue.Queue()
    triton.start_stream(lambda result, error: found.put(result or error))
    for number in range(3):
        triton.async_stream_infer("double", [given(module, number)], request_id=str(number))
        answer = found.get(timeout=LEAST_PATIENCE_S)
        assert answer.get_response().id == str(number)
        assert answer.as_numpy("y").tolist() == [[2.0 * number] * 4]
    triton.stop_stream()


def test_a_client_of_grpc_cannot_forge_its_address(fleet: Fleet, triton: Any):
    """As over HTTP: nginx writes the metadata that the gateways believe."""
    module, forged = require_module("tritonclient.grpc"), "203.0.113.8"
    with fleet.server.client() as redis:
        for meter in redis.scan_iter(f"{meter_key('', 'address')}*"):
            redis.delete(meter)
        for name in ("x-real-ip", "x-forwarded-for"):
            assert triton.infer("double", [given(module, 1)], headers={name: forged}) is not None
        charged = {meter.decode() for meter in redis.scan_iter(f"{meter_key('', 'address')}*")}
    assert charged == {meter_key("127.0.0.1", "address")}


def test_a_dead_replica_of_grpc_is_passed_over(fleet: Fleet, triton: Any):
    """While one gateway lives every call has its answer."""
    module = require_module("tritonclient.grpc")
    first, _ = fleet.gateways
    first.kill()
    try:
        for number in range(20):
            assert triton.infer("double", [given(module, number)]).as_numpy("y").tolist() == [[2.0 * number] * 4]
    finally:
        first.start()
