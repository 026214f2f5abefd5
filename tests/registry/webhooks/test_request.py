"""One POST: time-outs, answers that are none, TLS, and the address that the connection goes to."""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from penstock.registry.webhooks.address import AddressRules
from penstock.registry.webhooks.request import Requests, host_of
from penstock.registry.webhooks.schedule import Answer, Failed
from tests.receiver import HANG, Receiver, Reply

LOOPBACK = AddressRules(["127.0.0.0/8"])


def post(url: str, rules: AddressRules = LOOPBACK, **options: object) -> Answer | Failed:
    """The answer to one POST."""
    requests = Requests(rules, **options)  # type: ignore[arg-type]  # the caller's
    return asyncio.run(requests.post(url, {"webhook-id": "evt_1"}, b"{}"))


@contextmanager
def raw_server(answer: bytes) -> Iterator[int]:
    """A port whose server sends these bytes to whoever connects, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ending = threading.Event()

        def serve() -> None:
            listener.settimeout(0.05)
            while not ending.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.settimeout(30)
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            ending.set()
            thread.join(10)


def test_post_arrives_whole():
    """Path, query, headers and body; the status and the header come back."""
    with Receiver(lambda call: Reply(429, {"Retry-After": "7"})) as receiver:
        assert post(receiver.url("/a/b?c=d")) == Answer(429, "7")
    (call,) = receiver.calls
    assert (call.path, call.body, call.id) == ("/a/b?c=d", b"{}", "evt_1")
    assert call.headers["host"] == f"127.0.0.1:{receiver.port}"


def test_hanging_receiver_is_left():
    """After the time-out of the whole try."""
    with Receiver(lambda call: HANG) as receiver:
        assert post(receiver.url(), timeout_s=0.2) == Failed("no answer within 0.2 s")
    assert len(receiver.calls) == 1


def test_receiver_that_drips_its_answer_is_left():
    """The time-out is for the whole answer: a byte now and then does not extend it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ending = threading.Event()

        def drip() -> None:
            connection, _ = listener.accept()
            with connection:
                while not ending.wait(0.02):
                    try:
                        connection.sendall(b"H")
                    except OSError:
                        return

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        result = post(f"http://127.0.0.1:{listener.getsockname()[1]}/", timeout_s=0.3)
        ending.set()
        thread.join(10)
    assert result == Failed("no answer within 0.3 s")


def test_look_up_that_hangs_is_left():
    """It counts, too."""

    async def look_up(host: str, port: int) -> Sequence[str]:
        await asyncio.sleep(60)
        return []

    assert post("https://example.com/", look_up=look_up, timeout_s=0.1) == Failed("no answer within 0.1 s")


@pytest.mark.parametrize(
    "answer",
    [b"", b"hello\r\n\r\n", b"HTTP/1.1 200", b"HTTP/1.1 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000],
    ids=["nothing", "no HTTP", "cut off", "no number", "endless headers"],
)
def test_answer_that_is_none_is_a_failure(answer: bytes):
    """Whatever comes, the deliverer goes on."""
    with raw_server(answer) as port:
        result = post(f"http://127.0.0.1:{port}/")
    assert isinstance(result, Failed)
    assert not result.is_final


def test_interim_answers_are_passed_over():
    """100 and 103 come before the answer."""
    with raw_server(b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n") as port:
        assert post(f"http://127.0.0.1:{port}/") == Answer(204)


def test_body_of_the_answer_is_not_read():
    """A receiver may send what it likes behind its status."""
    with raw_server(b"HTTP/1.1 200 OK\r\ncontent-length: 999999999999\r\n\r\n" + b"x" * 100_000) as port:
        assert post(f"http://127.0.0.1:{port}/") == Answer(200)


def test_nobody_listens():
    """A failure that says so."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    result = post(f"http://127.0.0.1:{port}/")
    assert isinstance(result, Failed)
    assert result.error.startswith("no connection: ")


def test_next_address_is_tried():
    """A host with several addresses is called at the first that takes the connection."""

    async def look_up(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.9", "127.0.0.1"]

    with Receiver() as receiver:
        assert post(receiver.url(host="localhost"), look_up=look_up) == Answer(200)


def test_redirect_is_not_followed():
    """The place that it names hears nothing."""
    with Receiver() as other, Receiver(lambda call: Reply(302, {"Location": other.url()})) as receiver:
        assert post(receiver.url()) == Answer(302)
    assert other.calls == []


def test_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch):
    """It would choose the address."""
    with Receiver() as proxy, Receiver() as receiver:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url("/"))
        assert post(receiver.url()) == Answer(200)
    assert (len(proxy.calls), len(receiver.calls)) == (0, 1)


def test_loopback_is_refused_without_the_operators_word():
    """At the look-up: nothing connects."""
    with Receiver() as receiver:
        result = post(receiver.url(), AddressRules())
    assert isinstance(result, Failed)
    assert result.is_final
    assert receiver.calls == []


def test_rebinding_reaches_nothing():
    """A resolver answers with an allowed address first and with the target of the attack then. One look-up decides for
    a try; the next try is refused."""
    looked_up = []

    async def look_up(host: str, port: int) -> Sequence[str]:
        looked_up.append(host)
        return ["127.0.0.2"] if len(looked_up) == 1 else ["127.0.0.1"]

    rules = AddressRules(["127.0.0.2"])
    with Receiver(host="127.0.0.2") as allowed, Receiver(port=allowed.port) as victim:
        url = allowed.url(host="localhost")
        assert post(url, rules, look_up=look_up) == Answer(200)
        assert looked_up == ["localhost"]
        assert isinstance(post(url, rules, look_up=look_up), Failed)
    assert (len(allowed.calls), len(victim.calls)) == (1, 0)


def test_address_is_checked_again_at_the_connection():
    """Even if the rules had let the look-up pass, no byte is sent to another address."""

    class Fooled(AddressRules):
        def select(self, host: str, found: Sequence[str]) -> list[str]:
            return list(found)

    with Receiver() as receiver:
        result = post(receiver.url(), Fooled())
    assert isinstance(result, Failed)
    assert "not public" in result.error
    assert receiver.calls == []


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    """A certificate for `hooks.test`, which signs itself, and its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "hooks.test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("hooks.test")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path / "certificate.pem"
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain)
    file.write_bytes(certificate.public_bytes(encoding) + private)
    return file


async def _to_loopback(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


def test_certificate_must_be_that_of_the_host(authority: Path):
    """The right name and authority: delivered. Another name, or an authority that is not trusted: nothing is sent."""
    with Receiver() as receiver:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(authority)
        receiver.wrap(server)
        trusting = ssl.create_default_context(cafile=str(authority))
        trusting.verify_flags &= ~ssl.VERIFY_X509_STRICT
        url = f"https://hooks.test:{receiver.port}/hook"
        assert post(url, tls=trusting, look_up=_to_loopback) == Answer(200)
        for result in (
            post(url.replace("hooks", "other"), tls=trusting, look_up=_to_loopback),
            post(url, look_up=_to_loopback),
        ):
            assert isinstance(result, Failed)
            assert result.error.startswith("TLS failed: ")
    assert [call.headers["host"] for call in receiver.calls] == [f"hooks.test:{receiver.port}"]


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://a.example/x", "a.example:443"),
        ("http://[::1]:81/", "::1:81"),
        ("https://A.example:8443", "a.example:8443"),
    ],
)
def test_receiver_is_host_and_port(url: str, host: str):
    """What limits and messages call it."""
    assert host_of(url) == host
