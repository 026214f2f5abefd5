"""The gateway inside of a program: official clients, keys that are shown once, an end without rests."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from penstock.compose.api_server import ApiServer
from penstock.registry.errors import ConfigurationError, InvalidInput
from penstock.registry.settings import Settings
from tests.producers.gateway.conftest import GatewayStack
from tests.servers import wait_until

PATIENCE_S = 180.0
TEXTS = ["abcd", "bcde"]


@pytest.fixture
def settings(stack: GatewayStack, tmp_path: Path) -> Settings:
    """With the broker of the stack, and a registry and an audit log of their own."""
    environ = {"PENSTOCK_HOME": str(tmp_path), "PENSTOCK_REDIS_URL": stack.server.url}
    return Settings.load(environ=environ)


@pytest.fixture
def server(settings: Settings) -> Iterator[ApiServer]:
    """It asks for keys."""
    with ApiServer(port=0, require_api_key=True, settings=settings) as server:
        yield server


def client_of(server: ApiServer, key: str) -> openai.OpenAI:
    """OpenAI's own client, which repeats nothing."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)


def test_openai_client_is_served_with_a_key(server: ApiServer):
    """ES-038, ES-040: 401 without a key; a new key is good at once, also after a request that read the keys."""
    with client_of(server, "pk_none") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.embeddings.create(model="embedder", input=TEXTS)
    for label in ("UI", "notebook"):
        with client_of(server, server.generate_api_key(label)) as client:
            found = client.embeddings.create(model="embedder", input=TEXTS, encoding_format="float")
            assert [each.embedding[0] for each in found.data] == pytest.approx([97 / 255, 98 / 255])


def test_key_is_shown_once(server: ApiServer, settings: Settings, tmp_path: Path):
    """ES-039: no file has its secret; the audit log has its id."""
    key = server.generate_api_key("UI", role="readonly")
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(key.split("_", 2)[2].encode() in content for content in files)
    log = "".join(path.read_text() for path in settings.inference.privacy.audit_log_path.glob("*.jsonl"))
    assert "create API key" in log
    assert key.split("_")[1] in log
    headers = {"X-API-Key": key}
    assert httpx.get(f"{server.url}/v1/models", headers=headers, timeout=PATIENCE_S).status_code == 200
    body = {"model": "embedder", "input": TEXTS}
    assert httpx.post(f"{server.url}/v1/embeddings", json=body, headers=headers, timeout=PATIENCE_S).status_code == 403
    with pytest.raises(InvalidInput, match="Expected 1 to 100 printable characters"):
        server.generate_api_key("")


def test_an_open_stream_ends_with_the_server(stack: GatewayStack, settings: Settings):
    """`stop` ends it with a hint, closes the port, and leaves no thread; the server can start again."""
    before = threading.active_count()
    server = ApiServer(port=0, require_api_key=False, settings=settings)
    stack.worker.freeze()
    try:
        with server, httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
            port = int(server.url.rpartition(":")[2])
            job = http.post("/v1/jobs", json={"model": "napper", "inputs": {"x": [[9, 9, 3, 1]]}})
            with http.stream("GET", f"{job.headers['location']}/events") as events:
                lines = events.iter_lines()
                assert next(lines)
                stopping = threading.Thread(target=server.stop)
                stopping.start()
                assert any(line.startswith("retry:") for line in lines)
                stopping.join(PATIENCE_S)
                assert not stopping.is_alive()
    finally:
        stack.worker.thaw()
    assert server.url == ""
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    with server:
        assert httpx.get(f"{server.url}/health/live", timeout=PATIENCE_S).status_code == 200
    wait_until(lambda: threading.active_count() <= before, 30, "its threads have ended")


def test_two_threads_start_one_gateway(settings: Settings):
    """One of two calls at once is refused, and `stop` leaves no gateway behind."""
    server, together = ApiServer(port=0, require_api_key=True, settings=settings), threading.Barrier(2)
    refused = list[str]()

    def start() -> None:
        together.wait(PATIENCE_S)
        try:
            server.start()
        except ConfigurationError as error:
            refused.append(str(error))

    with ThreadPoolExecutor(2) as pool:
        for started in [pool.submit(start) for _ in range(2)]:
            started.result(PATIENCE_S)
    server.stop()
    assert refused == ["The gateway runs. Expected one `start` before each `stop`"]
    assert not [thread for thread in threading.enumerate() if thread.name == "gateway"]


def test_what_cannot_be_is_refused(settings: Settings):
    """A port in use, a second start, no data key, no broker: what is expected, and nothing stays open."""
    with ApiServer(port=0, settings=settings) as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(ConfigurationError, match="Expected a free address of this machine"):
            ApiServer(port=port, settings=settings).start()
        with pytest.raises(ConfigurationError, match="Expected one `start` before each `stop`"):
            server.start()
    keyless = settings.changed({"privacy.seal_payloads": "on"})
    with pytest.raises(ConfigurationError, match="PENSTOCK_L2_ENCRYPTION_KEY"):
        ApiServer(port=0, settings=keyless).start()
    bare = Settings.load(environ={"PENSTOCK_HOME": str(settings.home)})
    with pytest.raises(ConfigurationError, match="PENSTOCK_REDIS_URL"):
        ApiServer(port=0, settings=bare)
