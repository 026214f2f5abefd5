"""The door: which credentials open it, in which mode, and that a wrong key costs the same work as an unknown one."""

from __future__ import annotations

import ast
import asyncio
import hmac
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.producers.gateway import callers
from penstock.producers.gateway.callers import Access, Caller, Credentials, entered
from penstock.producers.gateway.key_copy import KeyCopy
from penstock.producers.gateway.limits import RateLimits
from penstock.registry import api_keys
from penstock.registry.api_keys import ApiKey, ShownKey, new_api_key
from penstock.registry.errors import BadApiKey, NotPermitted
from penstock.registry.settings import Settings

MADE = new_api_key("test", now=0, tenant="acme", role="user", expires_at=1000)


async def _never(requests: Any, _lines: Any) -> Any:
    raise AssertionError("nothing limits these callers")


def access(
    tmp_path: Path, keys: list[ApiKey], now: float = 500.0, settings: Mapping[str, object] | None = None
) -> Access:
    """A door with these keys."""
    found = Settings.load(environ={}, cwd=tmp_path, overrides=settings)
    copy = KeyCopy(lambda revision: [] if revision else keys)
    return Access(found, copy, RateLimits(found.inference.safeguards.rate_limit, _never), lambda: now)


def opened(door: Access, **sent: str) -> Caller:
    """Who the sender of these credentials is."""
    return asyncio.run(door.authenticate(Credentials(**sent)))


@pytest.mark.parametrize(
    "sent",
    [
        {"authorization": f"Bearer {MADE.text}"},
        {"authorization": f"bearer  {MADE.text} "},
        {"api_key": MADE.text},
        {"query_key": MADE.text},
        {"authorization": f"Bearer {MADE.text}", "api_key": "another"},
    ],
)
def test_a_key_opens(tmp_path: Path, sent: dict[str, str]):
    """The caller has the tenant and the role of the key; the first credential counts."""
    caller = opened(access(tmp_path, [MADE.key]), **sent)
    assert (caller.key_id, caller.tenant, caller.role) == (MADE.key.id, "acme", "user")


@pytest.mark.parametrize(
    "sent",
    [
        {},
        {"authorization": MADE.text},
        {"authorization": f"Basic {MADE.text}"},
        {"authorization": f"Basic {MADE.text}", "api_key": MADE.text},
        {"api_key": MADE.text[:-1]},
        {"api_key": MADE.text + "x"},
        {"api_key": MADE.text.upper()},
        {"api_key": f"pk_{MADE.key.id}_{'A' * 43}"},
        {"api_key": new_api_key("unknown", now=0).text},
        {"api_key": MADE.key.digest},
        {"query_key": "\udcff"},
    ],
)
def test_nothing_else_opens(tmp_path: Path, sent: dict[str, str]):
    """Not the digest that the database has, either."""
    with pytest.raises(BadApiKey, match="Expected `Authorization: Bearer KEY` or `X-API-Key: KEY`"):
        opened(access(tmp_path, [MADE.key]), **sent)


def test_an_expired_key_opens_no_more(tmp_path: Path):
    """It ends at its time, not after it."""
    assert opened(access(tmp_path, [MADE.key], now=999.9), api_key=MADE.text)
    with pytest.raises(BadApiKey):
        opened(access(tmp_path, [MADE.key], now=1000.0), api_key=MADE.text)


@pytest.mark.parametrize(
    ("settings", "keys", "is_open"),
    [
        ({}, [], True),
        ({}, [MADE.key], False),
        ({"server.host": "0.0.0.0"}, [], False),  # noqa: S104 - the case of the test
        ({"server.host": "gateway.example"}, [], False),
        ({"server.host": "::1"}, [], True),
        ({"server.host": "localhost"}, [], True),
        ({"server.api_keys": "required"}, [], False),
        ({"server.api_keys": "off", "server.host": "0.0.0.0"}, [MADE.key], True),  # noqa: S104 - the case of the test
    ],
)
def test_who_needs_a_key(tmp_path: Path, settings: dict[str, object], keys: list[ApiKey], is_open: bool):
    """CX-049: server.api_keys: auto asks once a key exists, and wherever other machines can connect."""
    door = access(tmp_path, keys, settings=settings)
    if is_open:
        assert opened(door) == Caller("", "default", "admin", (), MADE.key.limits)
    else:
        with pytest.raises(BadApiKey):
            opened(door)


def test_an_entry_ends_with_the_request(tmp_path: Path):
    """Without an entry there is no caller; a refused request leaves none, also not that of the request before it."""

    async def scenario() -> None:
        door = access(tmp_path, [MADE.key])
        with pytest.raises(BadApiKey):
            entered()
        await door.enter(Credentials(api_key=MADE.text), "submit", "127.0.0.1", "/v1/jobs")
        assert entered().tenant == "acme"
        with pytest.raises(NotPermitted, match=r"the role user may not do this\. Expected the role admin"):
            await door.enter(Credentials(api_key=MADE.text), "admin", "127.0.0.1", "/metrics")
        with pytest.raises(BadApiKey):
            entered()
        await door.enter(Credentials(api_key=MADE.text), "look", "127.0.0.1", "/v1/models")
        door.leave()
        with pytest.raises(BadApiKey):
            entered()

    asyncio.run(scenario())


# Constant time


class _Counted:
    """Counts the work of one look: digests and comparisons with the lengths of both sides."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.work: list[tuple[object, ...]] = []
        compare, digest = hmac.compare_digest, api_keys.digest_of
        monkeypatch.setattr(hmac, "compare_digest", lambda *sides: self._note(compare, *sides))
        monkeypatch.setattr(callers, "digest_of", lambda text: self._digest(digest, text))

    def _note(self, compare: Any, *sides: str) -> bool:
        self.work.append(("compare", *map(len, sides)))
        return bool(compare(*sides))

    def _digest(self, digest: Any, text: str) -> str:
        self.work.append(("digest", len(text)))
        return str(digest(text))


def test_every_look_costs_the_same_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A right secret, a wrong one from the first letter on or in the last one, an unknown id: one digest of the whole
    text, and one comparison in constant time of two digests of 64 digits."""
    counted = _Counted(monkeypatch)
    door = access(tmp_path, [MADE.key])
    secret = MADE.text.rpartition(f"pk_{MADE.key.id}_")[2]
    last = "A" if secret[-1] != "A" else "B"
    texts = [MADE.text, f"pk_{MADE.key.id}_{'-' * 43}", MADE.text[:-1] + last, f"pk_{'0' * 12}_{secret}"]
    works = []
    for text in texts:
        counted.work.clear()
        try:
            opened(door, api_key=text)
        except BadApiKey:
            assert text != MADE.text
        works.append(tuple(counted.work))
    assert works == [(("digest", len(MADE.text)), ("compare", 64, 64))] * 4


def test_secrets_meet_in_no_other_comparison():
    """Neither module compares a digest or a text with == or in: the only comparison is hmac.compare_digest."""
    for module in (api_keys, callers):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Compare):
                text = ast.unparse(node)
                assert not any(word in text for word in ("digest", "secret", "text")), text
    assert "hmac.compare_digest(digest, self.digest)" in inspect.getsource(ApiKey)


def test_a_shown_key_is_nowhere_else():
    """The record has neither the text nor the secret."""
    made: ShownKey = new_api_key("one", now=0)
    assert made.text not in repr(made.key)
    assert made.text.split("_", 2)[2] not in repr(made.key)
