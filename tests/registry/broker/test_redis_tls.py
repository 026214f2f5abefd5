"""TLS on one side only, and certificates that are not trusted: both clients are told after one or two connections."""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from penstock import AsyncClient, Client
from penstock.registry.broker import redis_tls
from penstock.registry.broker.redis_async import AsyncRedisStreams
from penstock.registry.broker.redis_connection import check_broker
from penstock.registry.broker.redis_tls import answers_plainly, answers_tls
from penstock.registry.errors import BrokerRefused, BrokerUnavailable
from tests.servers import LEAST_PATIENCE_S, RedisServer, free_port

INPUTS = {"x": [[1.0]]}


def _submit(url: str) -> None:
    # With retries until the time-out the test would not end.
    with Client(url, timeout_s=3600) as client:
        client.submit("any", INPUTS)


def _submit_async(url: str) -> None:
    async def submit() -> None:
        async with AsyncClient(url, timeout_s=3600) as client:
            await client.submit("any", INPUTS)

    asyncio.run(submit())


SUBMITS = pytest.mark.parametrize("submit", [_submit, _submit_async], ids=["Client", "AsyncClient"])


class TlsListener:
    """A port that does a TLS handshake and then says nothing. `accepted` counts the connections.

    ignored: so many connections get no handshake, as from a server that stands still for a moment.
    speaks: it answers each command with OK. cuts: so many connections end at their first command instead.
    """

    def __init__(self, folder: Path) -> None:
        self.accepted = self.ignored = self.cuts = 0
        self.speaks = False
        self.certificate = folder / "certificate.pem"
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(_write_certificate(self.certificate, folder / "key.pem"), folder / "key.pem")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port of the loopback."""
        return int(self._listener.getsockname()[1])

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.accepted += 1
                if self.accepted <= self.ignored:
                    self._open.append(connection)
                    continue
                try:
                    self._open.append(self._context.wrap_socket(connection, server_side=True))
                except OSError:
                    connection.close()
                    continue
                if self.speaks:
                    self._answer(self._open[-1])

    def _answer(self, connection: socket.socket) -> None:
        while received := connection.recv(4096):
            if self.cuts:
                self.cuts -= 1
                # Without TLS's own farewell, as when the server is killed.
                connection.close()
                return
            connection.sendall(b"+OK\r\n" * received.count(b"*"))

    def close(self) -> None:
        """Ends the listener and its connections."""
        # `close` alone would leave the thread in `accept`.
        self._listener.shutdown(socket.SHUT_RDWR)
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        # A connection whose handshake ends now is among the open ones then.
        self._thread.join(60)
        for each in (self._listener, *self._open):
            each.close()


def _write_certificate(path: Path, key_path: Path) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return path


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[TlsListener]:
    """A port with TLS."""
    with closing(TlsListener(tmp_path)) as listener:
        yield listener


@pytest.fixture
def asks_patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that answers the question what it speaks has more time than a busy machine needs."""
    monkeypatch.setattr(redis_tls, "_PROBE_S", LEAST_PATIENCE_S)


@pytest.fixture
def shakes_hands_patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for the first handshake with a port that speaks TLS."""
    monkeypatch.setattr(redis_tls, "_FIRST_HANDSHAKE_S", LEAST_PATIENCE_S)


@SUBMITS
@pytest.mark.usefixtures("asks_patiently")
def test_redis_url_for_a_tls_port(listener: TlsListener, submit: Callable[[str], None]):
    """One connection that the server ends, and one that asks the port for TLS."""
    text = rf"redis://127\.0\.0\.1:{listener.port}/0: this port speaks TLS\. Expected rediss:// in the URL"
    with pytest.raises(BrokerRefused, match=text) as told:
        submit(f"redis://:hunter2@127.0.0.1:{listener.port}/0")
    assert listener.accepted == 2
    assert "hunter2" not in str(told.value)


@SUBMITS
@pytest.mark.usefixtures("asks_patiently")
def test_rediss_url_for_a_plain_port(redis_server: RedisServer, submit: Callable[[str], None]):
    """One handshake without an answer, and one question without TLS."""
    with redis_server.client() as observer:
        before = observer.info("stats")["total_connections_received"]
        with pytest.raises(
            BrokerRefused, match=r"rediss://.*: this port does not speak TLS\. Expected redis:// in the"
        ):
            submit(redis_server.tcp_url.replace("redis://", "rediss://"))
        assert observer.info("stats")["total_connections_received"] - before == 2


@SUBMITS
@pytest.mark.usefixtures("shakes_hands_patiently")
def test_a_certificate_that_is_not_trusted(listener: TlsListener, submit: Callable[[str], None]):
    """One connection. The text says where its authority goes."""
    with pytest.raises(
        BrokerRefused, match=r"is not trusted here \(.*\)\. Expected its authority in ssl_ca_certs=FILE"
    ):
        submit(f"rediss://127.0.0.1:{listener.port}/0")
    assert listener.accepted == 1


@SUBMITS
def test_a_certificate_for_another_host(listener: TlsListener, submit: Callable[[str], None]):
    """Its authority is trusted, and the name is another one."""
    with pytest.raises(BrokerRefused, match=r"is not trusted here \(Hostname mismatch.*or another certificate"):
        submit(f"rediss://localhost:{listener.port}/0?ssl_ca_certs={listener.certificate}")


def test_a_port_is_asked_what_it_speaks(listener: TlsListener, redis_server: RedisServer):
    """A TLS port, a plain port, and a port where nothing listens."""
    host, plain, closed = "127.0.0.1", redis_server.port, free_port()
    assert [answers_tls(host, port) for port in (listener.port, plain, closed)] == [True, False, False]
    assert [answers_plainly(host, port) for port in (listener.port, plain, closed)] == [False, True, False]


def test_a_silent_port_is_no_refusal(listener: TlsListener):
    """A handshake that works and a server that does not answer afterwards: a time-out, as for any broker."""
    url = f"rediss://127.0.0.1:{listener.port}/0?ssl_ca_certs={listener.certificate}"
    with Client(url, timeout_s=0.1) as client, pytest.raises(BrokerUnavailable, match="timed out") as away:
        client.submit("any", INPUTS)
    assert not isinstance(away.value, BrokerRefused)


def test_a_slow_handshake_has_the_whole_time_out(listener: TlsListener):
    """The first try ends early, to ask the port without TLS; the next one may take as long as any connection."""
    listener.ignored, listener.speaks = 2, True
    check_broker(f"rediss://127.0.0.1:{listener.port}/0?ssl_ca_certs={listener.certificate}", 30)
    assert listener.accepted == 3


def test_a_slow_handshake_has_the_whole_time_out_in_asyncio(listener: TlsListener):
    """As above."""
    listener.ignored, listener.speaks = 2, True
    _nudge(f"rediss://127.0.0.1:{listener.port}/0?ssl_ca_certs={listener.certificate}")
    assert listener.accepted == 3


def _nudge(url: str) -> None:
    async def nudge() -> None:
        broker = AsyncRedisStreams.from_url(url, timeout_s=30)
        await broker.nudge("{any}:reply:x")
        await broker.aclose()

    asyncio.run(nudge())


def test_a_tls_connection_that_ends_is_made_again(listener: TlsListener):
    """As after a restart of the server: it is no refusal."""
    listener.speaks, listener.cuts = True, 2
    check_broker(f"rediss://127.0.0.1:{listener.port}/0?ssl_ca_certs={listener.certificate}", 30)
    assert listener.accepted == 3


def test_a_tls_connection_that_ends_is_made_again_in_asyncio(listener: TlsListener):
    """As above."""
    listener.speaks, listener.cuts = True, 2
    _nudge(f"rediss://127.0.0.1:{listener.port}/0?ssl_ca_certs={listener.certificate}")
    assert listener.accepted == 3
