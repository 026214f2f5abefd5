"""Signing keys that differ: which pairs work, which side a text names, and that no key leaves its process."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest

from penstock.registry.envelope import Keyring
from penstock.registry.errors import Unauthorized
from penstock.registry.key_reports import check_keys, key_report


def _key(name: str, letter: str = "") -> str:
    return f"{name}:{base64.b64encode((letter or name[0]).encode() * 32).decode()}"


A, B, OTHER_A = _key("a"), _key("b"), _key("a", "x")


def _check(own: str, *workers: str) -> None:
    reports = [key_report(f"cpu{index}@vm", Keyring.parse(keys)) for index, keys in enumerate(workers)]
    check_keys(Keyring.parse(own), reports)


@pytest.mark.parametrize(
    ("own", "workers"),
    [
        ("", ()),
        (A, ()),
        ("", ("",)),
        (A, (A,)),
        (f"{A},{B}", (f"{B},{A}",)),
        (f"{B},{A}", (A, B)),
        (A, ("", A)),
        (A, (B, f"{A},{B}")),
        (f"{A},{OTHER_A.replace('a:', 'c:', 1)}", (f"{A},{_key('c', 'z')}",)),
    ],
    ids=[
        "nothing is known",
        "no live worker",
        "unsigned",
        "the same",
        "an exchange in progress",
        "two of three steps",
        "one worker fits",
        "one of two fits",
        "a spare key differs",
    ],
)
def test_keys_that_fit_are_accepted(own: str, workers: tuple[str, ...]):
    """A worker verifies what signs here, and its results are verified here: one such worker is enough."""
    _check(own, *workers)


BOTH = "This process and worker cpu0@vm have different PENSTOCK_SIGNING_KEYS: "


@pytest.mark.parametrize(
    ("own", "worker", "text"),
    [
        ("", A, "none here, 'a' there. Expected the worker's keys in this process; Client.from_env() has those of"),
        (A, "", "'a' here, none there. Expected them on the worker, too, or none here"),
        (A, B, "the worker lacks 'a', which signs here; it has 'b'. Expected 'a' on the worker, too, or a key of the"),
        (A, f"{B},{A}", "this process lacks 'b', which signs there; it has 'a'. Expected 'b' here, too"),
        (A, OTHER_A, "'a' is another key here (fingerprint "),
    ],
)
def test_keys_that_differ_name_worker_and_side(own: str, worker: str, text: str):
    """Each text says which side lacks which id, and what to change."""
    with pytest.raises(Unauthorized) as refused:
        _check(own, worker)
    assert str(refused.value).startswith(BOTH + text)


def test_several_workers_are_counted():
    """The first one is named."""
    with pytest.raises(Unauthorized, match=r"worker cpu0@vm have different .* \(and 2 other workers, too\)\Z"):
        _check(A, B, B, "")


def test_a_report_holds_no_key():
    """Its 8 digits are the beginning of an HMAC under the key: neither the key nor what signs with it is in them."""
    secret = b"a" * 32
    (name,) = Keyring.parse(A).names
    digests = {hmac.digest(secret, f"penstock {purpose} v1".encode(), "sha256").hex() for purpose in ("job", "result")}
    report = key_report("cpu0@vm", Keyring.parse(A)).decode()
    assert report == f'["cpu0@vm",[["a","{name.fingerprint}"]]]'
    assert len(name.fingerprint) == 8
    assert name.fingerprint == hmac.digest(secret, b"penstock name v1", "sha256").hex()[:8]
    assert not any(digest.startswith(name.fingerprint) for digest in {*digests, hashlib.sha256(secret).hexdigest()})
    assert Keyring.parse(OTHER_A).names != Keyring.parse(A).names


@pytest.mark.parametrize("foreign", [b"", b"{}", b"[1,2]", b"\xff", b'["w",[["a"]]]'])
def test_reports_of_other_programs_refuse_nothing(foreign: bytes):
    """They are not signed: what cannot be read is as good as none."""
    check_keys(Keyring.parse(A), [foreign])


def test_a_name_from_the_broker_stays_on_its_line():
    """A worker's name and ids are text of another process: a message shows them escaped and shortened."""
    report = key_report("w\n\x1b[2J", Keyring.parse(_key("b\t" + "b" * 60)))
    with pytest.raises(Unauthorized) as refused:
        check_keys(Keyring.parse(A), [report])
    assert str(refused.value).isprintable()
