"""The server of gRPC beside HTTP: its port, TLS, several processes, a broker that is away, and its end."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.producers.gateway.rpc.binding import RpcBinding, reserved
from penstock.producers.gateway.rpc.messages import message
from penstock.registry.errors import ConfigurationError
from tests.gateway_process import GatewayProcess
from tests.producers.gateway.conftest import GatewayStack, StartGateway
from tests.producers.gateway.rpc.conftest import (
    INFER,
    PATIENCE_S,
    PREDICT,
    TWICE,
    Caller,
    infer_request,
    predict_request,
)
from tests.producers.gateway.rpc.test_predict import stream
from tests.servers import RedisServer, free_port, redis_binaries, require, wait_until

PORT = "PENSTOCK_INFERENCE_SERVER_GRPC_PORT"


def test_a_reserved_port_is_shared_with_processes_of_ours_only():
    """Port 0 becomes a free one; a server without SO_REUSEPORT, and a second reservation, do not get it."""
    with reserved(RpcBinding("127.0.0.1", 0)) as binding:
        assert binding.port
        assert binding.address == f"127.0.0.1:{binding.port}"
        with pytest.raises(ConfigurationError, match="Expected a free address"), reserved(binding):
            pass
        with socket.socket() as ours:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            ours.bind((binding.host, binding.port))
    with reserved(binding) as again:
        assert again == binding


def test_settings_of_the_port(stack: GatewayStack, start_gateway: StartGateway, open_caller: Any):
    """server.grpc_port comes from the environment, and an option wins; a port in use is one line."""
    port, other = free_port(), free_port()
    gateway = start_gateway("--grpc-port", str(other), **{PORT: str(port)})
    assert gateway.rpc == f"127.0.0.1:{other}"
    assert list(open_caller(gateway.rpc).call(PREDICT, predict_request())[0].predictions) == TWICE
    refused = GatewayProcess(stack.server, stack.models_root.parent / "refused", environment={PORT: str(other)})
    with pytest.raises(
        AssertionError, match=rf"gRPC cannot listen on 127\.0\.0\.1:{other}: .* Expected a free address"
    ):
        refused.start()
    refused.stop()


def test_grpc_can_be_left_out(start_gateway: StartGateway):
    """server.grpc_enabled: HTTP is served alone."""
    assert start_gateway(PENSTOCK_INFERENCE_SERVER_GRPC_ENABLED="false").rpc == ""


@pytest.mark.slow
def test_options_leave_grpc_out(start_gateway: StartGateway, tmp_path: Path):
    """--no-grpc; and --uds, a socket in the file system, which only some users may open."""
    assert start_gateway("--no-grpc").rpc == ""
    assert start_gateway("--uds", str(tmp_path / "gateway.sock")).rpc == ""


@pytest.mark.slow
def test_tls_is_that_of_http(start_gateway: StartGateway, tmp_path: Path):
    """--tls-certificate and --tls-key: a client that trusts the certificate is answered, one without TLS is not."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    gateway = start_gateway("--tls-certificate", str(certificate), "--tls-key", str(key))
    trusted = grpc.ssl_channel_credentials(certificate.read_bytes())
    data = predict_request().SerializeToString()
    with grpc.secure_channel(gateway.rpc, trusted) as channel:
        answer = channel.unary_unary(PREDICT)(data, timeout=PATIENCE_S, wait_for_ready=True)
    assert list(message("PredictResponse").FromString(answer).predictions) == TWICE
    with grpc.insecure_channel(gateway.rpc) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(PREDICT)(data, timeout=PATIENCE_S)
    assert refused.value.code().name == "UNAVAILABLE"


@pytest.mark.slow
def test_processes_share_the_port(start_gateway: StartGateway, open_caller: Any):
    """--workers: the kernel gives connections to both processes."""
    gateway = start_gateway("--workers", "2")
    children = Path(f"/proc/{gateway.pid}/task/{gateway.pid}/children").read_text().split()

    def listeners() -> list[int]:
        return [int(child) for child in children if _lines(int(child), gateway.rpc, "0A")]

    def both() -> bool:
        return all(_lines(child, gateway.rpc, "01") for child in listeners())

    wait_until(lambda: len(listeners()) == 2, 60, "both processes listen")
    for _ in range(64):
        assert list(open_caller(gateway.rpc).call(PREDICT, predict_request())[0].predictions) == TWICE
        if both():
            break
    assert both()


def test_a_broker_that_is_away_is_unavailable(tmp_path: Path, open_caller: Any):
    """UNAVAILABLE with a hint, no mistake of the gateway; not ready, but alive."""
    binary = require(next(iter(redis_binaries().values()), None), "redis-server")
    server = RedisServer(binary).start()
    gateway = GatewayProcess(server, tmp_path / "gateway")
    try:
        gateway.start()
        server.kill()
        rpc = open_caller(gateway.rpc)
        error = rpc.refusal(INFER, infer_request())
        trailing = dict(error.trailing_metadata())
        assert error.code().name == "UNAVAILABLE"
        assert error.details() == "service unavailable: The broker does not answer. Expected a retry"
        assert (trailing["penstock-problem"], trailing["retry-after"]) == ("broker-unavailable", "1")
        assert trailing["grpc-retry-pushback-ms"] == "1000"
        ready = rpc.channel.unary_unary("/inference.GRPCInferenceService/ServerReady")(b"", timeout=PATIENCE_S)
        live = rpc.channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=PATIENCE_S)
        assert (ready, live) == (b"", b"\x08\x01")
    finally:
        gateway.stop()
        server.stop()


def test_a_gateway_that_stops_answers_what_runs_and_ends_streams_with_a_hint(
    stack: GatewayStack, start_gateway: StartGateway, open_caller: Any
):
    """SIGTERM: the running call is answered, an open stream ends with UNAVAILABLE, and the process ends in order."""
    gateway = start_gateway()
    rpc: Caller = open_caller(gateway.rpc)
    held = iter([predict_request([1.0, 3, 3, 3], "double")])

    def requests() -> Any:
        yield next(held)
        wait_until(lambda: gateway.child.poll() is not None, PATIENCE_S, "the gateway has ended")

    streaming = stream(rpc, requests())
    assert next(streaming).predictions[0] == 2.0
    stack.worker.freeze()
    try:
        before = _count(stack)
        running = rpc.channel.unary_unary(INFER).future(
            infer_request("napper", [[1, 3, 3, 3]]).SerializeToString(), timeout=PATIENCE_S
        )
        wait_until(lambda: _count(stack) > before, 60, "the call waits for its job")
        gateway.terminate()
        with pytest.raises(grpc.RpcError):
            next(streaming)
    finally:
        stack.worker.thaw()
    trailing = dict(streaming.trailing_metadata())
    assert streaming.code().name == "UNAVAILABLE"
    assert (trailing["penstock-problem"], trailing["retry-after"]) == ("stopping", "1")
    answer = message("ModelInferResponse").FromString(running.result())
    assert list(answer.outputs[0].contents.fp32_contents) == [2.0, 6.0, 6.0, 6.0]
    assert gateway.wait(180) == 0


def _count(stack: GatewayStack) -> int:
    with stack.server.client() as redis:
        return len(set(redis.scan_iter("{napper}:job:*", count=10_000)))


def _sockets(pid: int) -> set[str]:
    links = (str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink())
    return {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:[")}


def _lines(pid: int, address: str, state: str) -> list[list[str]]:
    port = f":{int(address.rpartition(':')[2]):04X}"
    # grpc.aio listens on an address of IPv4 with a socket of IPv6.
    tables = (Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6"))
    lines = [line.split() for table in tables for line in table.splitlines()[1:]]
    own = _sockets(pid)
    return [line for line in lines if line[1].endswith(port) and line[3] == state and line[9] in own]
