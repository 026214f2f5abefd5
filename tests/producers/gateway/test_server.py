"""What a server must withstand: long bodies, slow and silent clients, too many that wait; and how it is started."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from penstock.producers.gateway.server import Binding, listening
from penstock.registry.errors import ConfigurationError
from penstock.registry.settings_sections import ServerConfig
from tests.gateway_process import GatewayProcess
from tests.producers.gateway.conftest import GatewayStack, StartGateway
from tests.producers.gateway.naps import naps_before
from tests.servers import free_port, wait_until

ROW = [1.0, 2.0, 3.0, 4.5]
PREDICT = "/v1/models/double:predict"


def connect(gateway: GatewayProcess) -> socket.socket:
    """A plain connection."""
    url = httpx.URL(gateway.url)
    return socket.create_connection((url.host, url.port or 80), 30)


def test_a_long_body_is_refused_by_its_length(stack: GatewayStack):
    """CX-017: 413 from the declared length, before a byte of the body was sent; then the connection is closed."""
    with connect(stack.gateway) as client:
        head = f"POST {PREDICT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {10 * 1024 * 1024 + 1}\r\n\r\n".encode())
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"Expected at most 10485760 bytes" in answer


def test_a_body_without_a_length_is_counted(http: httpx.Client):
    """Chunks are refused once they are too many."""
    part = b" " * (1024 * 1024)
    try:
        found = http.post(PREDICT, content=(part for _ in range(12)), headers={"Content-Type": "application/json"})
    except httpx.WriteError:
        # The gateway has closed the connection already.
        return
    assert found.status_code == 413


def test_slow_and_silent_clients_are_disconnected(start_gateway: StartGateway):
    """A head, a body and a kept connection have a time; a client that says nothing holds nothing."""
    gateway = start_gateway(PENSTOCK_INFERENCE_SERVER_CLIENT_TIMEOUT_S="0.5")
    head = f"POST {PREDICT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    with connect(gateway) as silent, connect(gateway) as half, connect(gateway) as late, connect(gateway) as idle:
        half.sendall(b"GET /health/live HT")
        late.sendall(f"{head}{{".encode())
        idle.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        for client in (silent, half):
            assert _received(client) == b""
        assert _received(late).startswith(b"HTTP/1.1 408 ")
        assert _received(idle).startswith(b"HTTP/1.1 200 ")
        assert gateway.answers()


def test_what_comes_behind_an_answer_has_a_time(start_gateway: StartGateway):
    """An empty line, or a part of a body that nobody reads, keeps no connection. A 408 says that it is closed."""
    gateway = start_gateway(PENSTOCK_INFERENCE_SERVER_CLIENT_TIMEOUT_S="0.5")
    get = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    unread = b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nhello"
    head = f"POST {PREDICT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for sent, behind, status in ((get, b"\r\n", b"200"), (unread, b"!", b"404")):
        with connect(gateway) as client:
            client.sendall(sent)
            assert client.recv(65536).startswith(b"HTTP/1.1 " + status)
            client.sendall(behind)
            assert not _received(client).startswith(b"HTTP/1.1")
    with connect(gateway) as late:
        late.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n5\r\n".encode())
        answer = _received(late)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in answer.lower()
    assert gateway.answers()


def test_more_requests_than_may_wait_are_503(start_gateway: StartGateway):
    """server.max_waiting: the others are refused at once, with Retry-After, and their jobs are not submitted."""
    gateway = start_gateway(PENSTOCK_INFERENCE_SERVER_MAX_WAITING="2")
    found: list[httpx.Response] = []

    def wait(number: int) -> None:
        with gateway.client() as http:
            document = {"inputs": {"x": [[number, 8, 8, 8]]}}
            found.append(http.post("/v1/models/napper:predict", json=document))

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {each.status_code for each in found} == {200, 503}
    refused = next(each for each in found if each.status_code == 503)
    assert refused.headers["retry-after"] == "1"
    assert "penstock-job-id" not in refused.headers
    assert refused.json()["detail"] == "2 requests wait in this process. Expected a retry after 1 s"


def test_requests_beyond_the_grace_are_cut_off(stack: GatewayStack, start_gateway: StartGateway):
    """server.stop_grace_s: a gateway ends, and cancels the job of a request that nobody can answer any more."""
    gateway = start_gateway(PENSTOCK_INFERENCE_SERVER_STOP_GRACE_S="0.2")
    with naps_before(stack) as client:
        url = httpx.URL(gateway.url)
        with connect(gateway) as waiting:
            body = json.dumps({"inputs": {"x": [[9, 6, 6, 6]]}}).encode()
            head = f"POST /v1/models/napper:predict HTTP/1.1\r\nHost: {url.host}\r\nContent-Length: {len(body)}\r\n\r\n"
            before = _jobs(stack)
            waiting.sendall(head.encode() + body)
            wait_until(lambda: _jobs(stack) > before, 30, "the job is accepted")
            (job_id,) = _jobs(stack) - before
            gateway.terminate()
            gateway.wait(180)
        assert client.job(job_id).status() == "cancelled"


def test_two_processes_share_port_and_figures(start_gateway: StartGateway):
    """server.workers: the page of either process counts the requests of both."""
    gateway = start_gateway("--workers", "2")
    for _ in range(20):
        with gateway.client() as http:
            assert http.post(PREDICT, json={"inputs": {"x": [ROW]}}).status_code == 200
    children = Path(f"/proc/{gateway.pid}/task/{gateway.pid}/children").read_text().split()
    assert len(children) >= 2

    def counted() -> float:
        with gateway.client() as http:
            lines = http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if ":predict" in line and "requests_total" in line)

    assert counted() == 20
    gateway.kill()
    # Otherwise they would hold the port.
    wait_until(lambda: not any(Path(f"/proc/{child}/cwd").exists() for child in children), 60, "its processes end, too")


def test_gauges_of_a_dead_process_end_with_it(stack: GatewayStack, start_gateway: StartGateway):
    """The supervisor replaces processes that were killed: the streams that they had open are not counted any more."""
    gateway = start_gateway("--workers", "2")

    def streams() -> float | None:
        """What the page says; None while no process answers."""
        try:
            with gateway.client() as http:
                lines = http.get("/metrics").text.splitlines()
        except httpx.TransportError:
            return None
        return sum(float(line.split()[-1]) for line in lines if line.startswith("penstock_http_streams"))

    with naps_before(stack) as client, gateway.client() as http:
        job = client.submit("napper", {"x": [[3, 8, 8, 8]]})
        with http.stream("GET", f"/v1/jobs/{job.id}/events"):
            wait_until(lambda: streams() == 1, 60, "the stream is counted")
            for child in _serving(gateway):
                os.kill(child, signal.SIGKILL)
            wait_until(lambda: streams() == 0, 60, "the streams of dead processes are not counted")
        job.cancel()


@pytest.mark.slow
def test_a_process_that_is_silent_for_some_seconds_is_kept(start_gateway: StartGateway):
    """A busy machine may leave a process without time, most of all while it starts."""
    gateway = start_gateway("--workers", "2")
    serving = _serving(gateway)
    os.kill(serving[0], signal.SIGSTOP)
    # The supervisor of uvicorn kills after 5 s by itself.
    time.sleep(8)
    os.kill(serving[0], signal.SIGCONT)
    assert _serving(gateway) == serving


def _serving(gateway: GatewayProcess) -> list[int]:
    """The processes that serve; the supervisor has another one, which tracks resources."""
    children = Path(f"/proc/{gateway.pid}/task/{gateway.pid}/children").read_text().split()
    found = [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
    assert len(found) == 2
    return found


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("notes.txt", "Address already in use"),
        ("folder", "Address already in use"),
        ("folder/" + "x" * 120, "AF_UNIX path too long"),
        ("nowhere/gateway.sock", "No such file or directory"),
    ],
)
def test_a_path_that_is_no_place_for_a_socket_is_one_line(tmp_path: Path, name: str, reason: str):
    """Another file, a folder, a path that is too long, a folder that is not there. Nothing is deleted."""
    path = tmp_path / name
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("precious")
    with pytest.raises(ConfigurationError, match=rf"The gateway cannot listen on .*: {reason}\. Expected a free"):
        listening(Binding("127.0.0.1", 0, uds=path)).__enter__()
    assert (tmp_path / "notes.txt").read_text() == "precious"


def test_a_socket_that_was_left_is_replaced(tmp_path: Path):
    """One that answers is not."""
    path = tmp_path / "gateway.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with listening(Binding("127.0.0.1", 0, uds=path)) as (listener, _, url):
        assert url == f"unix:{path}"
        listener.listen()
        with pytest.raises(ConfigurationError):
            listening(Binding("127.0.0.1", 0, uds=path)).__enter__()
        assert path.is_socket()
    assert not path.exists()


def test_files_that_are_no_use_for_tls_are_one_line(tmp_path: Path):
    """A key of another certificate, text that is no PEM, a file that is not there. The message names no path."""
    (certificate, key), (_, other_key) = (_certificate(tmp_path, name) for name in ("one", "other"))
    text = tmp_path / "notes.txt"
    text.write_text("no PEM")
    for files, reason in (
        ((certificate, other_key), "key values mismatch"),
        ((text, key), "a file is not in PEM"),
        ((certificate, text), "a file is not in PEM"),
        ((tmp_path / "nothing.pem", key), "No such file or directory"),
    ):
        with pytest.raises(ConfigurationError, match=reason) as e:
            listening(Binding("127.0.0.1", 0, None, *files)).__enter__()
        assert str(tmp_path) not in str(e.value)
    locked = tmp_path / "locked.key"
    command = ["openssl", "rsa", "-aes256", "-passout", "pass:secret", "-in", str(key), "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    # The server asks for a passphrase: it is asked for once.
    for usable in (key, locked):
        with listening(Binding("127.0.0.1", 0, None, certificate, usable)) as (_, _, url):
            assert url.startswith("https://")


@pytest.mark.slow
def test_a_unix_socket(stack: GatewayStack, tmp_path: Path):
    """--uds: the socket goes with the gateway; one that a killed gateway left does not stop the next."""
    path = tmp_path / "gateway.sock"
    for end in ("kill", "terminate"):
        gateway = GatewayProcess(stack.server, tmp_path / end, "--uds", str(path))
        try:
            gateway.start()
            wait_until(lambda: _listens(path), 60, "it listens")
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://gateway") as http:
                assert http.post(PREDICT, json={"inputs": {"x": [ROW]}}).status_code == 200
            getattr(gateway, end)()
            gateway.wait(180)
        finally:
            gateway.stop()
    assert not path.exists()


@pytest.mark.slow
def test_tls(start_gateway: StartGateway, tmp_path: Path):
    """--tls-certificate and --tls-key: https only."""
    certificate, key = _certificate(tmp_path, "localhost")
    gateway = start_gateway("--tls-certificate", str(certificate), "--tls-key", str(key))
    assert gateway.url.startswith("https://")
    trusted = ssl.create_default_context(cafile=str(certificate))
    with httpx.Client(base_url=gateway.url, verify=trusted) as http:
        assert http.get("/health/live").status_code == 200
    with pytest.raises(httpx.TransportError):
        httpx.get(gateway.url.replace("https", "http") + "/health/live")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["uvicorn", "producers.gateway.app:app", "--port", "{port}"],
        ["uvicorn", "penstock.producers.gateway.app:app", "--port", "{port}"],
        [
            "gunicorn",
            "-k",
            "uvicorn.workers.UvicornWorker",
            "-w",
            "2",
            "-b",
            "127.0.0.1:{port}",
            "producers.gateway.app:app",
        ],
    ],
)
def test_the_servers_of_the_documents(stack: GatewayStack, tmp_path: Path, command: list[str]):
    """IN-010, CX-033: the application runs under the servers that people know."""
    port = free_port()
    gateway = GatewayProcess(stack.server, tmp_path / "served")
    gateway.url = f"http://127.0.0.1:{port}"
    try:
        gateway.launch(sys.executable, "-m", *(word.format(port=port) for word in command))
        wait_until(gateway.answers, 60, "it answers")
        with gateway.client() as http:
            assert http.post(PREDICT, json={"inputs": {"x": [ROW]}}).status_code == 200
        gateway.terminate()
        gateway.wait(180)
    finally:
        gateway.stop()


@pytest.mark.slow
def test_gunicorn_sums_its_processes(stack: GatewayStack, tmp_path: Path):
    """IN-056: with PROMETHEUS_MULTIPROC_DIR the page of either worker of gunicorn counts the requests of both."""
    port, folder = free_port(), tmp_path / "figures"
    folder.mkdir()
    gateway = GatewayProcess(stack.server, tmp_path / "served", environment={"PROMETHEUS_MULTIPROC_DIR": str(folder)})
    gateway.url = f"http://127.0.0.1:{port}"
    command = ["gunicorn", "-k", "uvicorn.workers.UvicornWorker", "-w", "2", "-b", f"127.0.0.1:{port}"]
    try:
        gateway.launch(sys.executable, "-m", *command, "producers.gateway.app:app")
        wait_until(gateway.answers, 60, "it answers")
        for _ in range(20):
            with gateway.client() as http:
                assert http.post(PREDICT, json={"inputs": {"x": [ROW]}}).status_code == 200
        with gateway.client() as http:
            lines = http.get("/metrics").text.splitlines()
        assert sum(float(line.split()[-1]) for line in lines if ":predict" in line and "requests_total" in line) == 20
        # Its children outlive a killed parent.
        gateway.terminate()
        gateway.wait(180)
    finally:
        gateway.stop()


def test_access_lines_are_written_where_the_setting_says(start_gateway: StartGateway):
    """IN-015: none by default; one for each request with UVICORN_ACCESS_LOG."""
    for value, lines in (("false", 0), ("true", 3)):
        gateway = start_gateway(PENSTOCK_INFERENCE_UVICORN_ACCESS_LOG=value)
        with gateway.client() as http:
            for _ in range(3):
                http.get("/v1/models/double")
        assert gateway.output.read_text().count("/v1/models/double") == lines


def test_a_port_in_use_is_one_line(stack: GatewayStack, tmp_path: Path):
    """Exit status 78, with the address."""
    port = stack.gateway.url.rpartition(":")[2]
    gateway = GatewayProcess(stack.server, tmp_path / "second")
    gateway.launch(sys.executable, "-m", "penstock", "serve", "--port", port)
    assert gateway.wait(180) == 78
    assert f"The gateway cannot listen on 127.0.0.1:{port}" in gateway.tail()


def test_settings_of_the_server(stack: GatewayStack, tmp_path: Path):
    """CX-010, CX-011: server.host and server.port come from the environment. It listens there and nowhere else."""
    port = free_port()
    environment = {"PENSTOCK_INFERENCE_SERVER_HOST": "127.0.0.2", "PENSTOCK_INFERENCE_SERVER_PORT": str(port)}
    gateway = GatewayProcess(stack.server, tmp_path / "set", environment=environment)
    try:
        gateway.launch(sys.executable, "-m", "penstock", "serve")
        gateway.url = f"http://127.0.0.2:{port}"
        wait_until(gateway.answers, 60, "it answers there")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}/health/live")
    finally:
        gateway.stop()
    assert (ServerConfig().host, ServerConfig().port) == ("127.0.0.1", 8000)


def _certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """(a certificate of 127.0.0.1, its key)."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *more], check=True, capture_output=True)
    return certificate, key


def _received(client: socket.socket) -> bytes:
    """All that comes until the other side closes the connection."""
    try:
        return b"".join(iter(lambda: client.recv(65536), b""))
    except ConnectionResetError:
        return b""


def _jobs(stack: GatewayStack) -> set[str]:
    with stack.server.client() as redis:
        return {f"napper.{key.decode().rpartition(':')[2]}" for key in redis.scan_iter("{napper}:job:*")}


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return path.exists() and probe.connect_ex(str(path)) == 0
