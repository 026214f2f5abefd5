"""`penstock keys` for API keys: what goes to stdout, what the registry and the audit log have, what is refused."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.registry.api_keys import digest_of, parse_api_key
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.catalog.api_keys import SqlApiKeys
from penstock.safety.audit import KEY_OPERATION
from penstock.safety.audit_reader import entries
from tests.compose.conftest import penstock
from tests.conformance.jobs import ROOMY, publication
from tests.servers import RedisServer


def listed(home: Path, *options: str) -> list[dict[str, Any]]:
    """What `list` prints for programs."""
    found: list[dict[str, Any]] = json.loads(penstock(home, "keys", "list", "--json", *options).stdout)
    return found


def made(home: Path, *options: str) -> dict[str, Any]:
    """What `create` prints for programs."""
    printed = penstock(home, "keys", "create", "--json", *options)
    assert printed.exit_code == 0, printed.output
    facts: dict[str, Any] = json.loads(printed.stdout)
    return facts


def test_the_key_alone_goes_to_stdout(tmp_path: Path):
    """A shell can take it; the line for the person goes to stderr, without the secret. It is never shown again."""
    printed = penstock(tmp_path, "keys", "create", "web shop")
    text = printed.stdout.strip()
    key_id = parse_api_key(text)
    assert printed.stderr.startswith(f"{key_id}  user of tenant default. Keep the key")
    assert text not in printed.stderr
    shown = [penstock(tmp_path, "keys", *words).output for words in (("list",), ("list", "--json"))]
    assert all("web shop" in each and text[-43:] not in each and digest_of(text) not in each for each in shown)


def test_a_key_has_what_the_options_say(tmp_path: Path):
    """Role, tenant, models, expiry and limits."""
    options = "ci --role readonly --tenant acme --model mlp --model minilm --expires 90d --requests-per-minute 600"
    options += " --tokens-per-minute 9000 --daily 1000 --monthly 20000"
    facts = made(tmp_path, *options.split())
    (key,) = SqlApiKeys(f"sqlite:///{tmp_path / 'registry.db'}").since(0)
    assert (key.role, key.tenant, key.models) == ("readonly", "acme", ("mlp", "minilm"))
    assert key.expires_at == key.created_at + 90 * 86_400
    assert facts["limits"] == {
        "requests_per_minute": 600,
        "tokens_per_minute": 9000,
        "requests_per_day": 1000,
        "requests_per_month": 20000,
    }
    assert key.digest == digest_of(facts["key"])
    assert listed(tmp_path) == [{name: value for name, value in facts.items() if name != "key"}]


def test_a_revoked_key_is_listed_with_all_only(tmp_path: Path):
    """And cannot be rotated."""
    first, second = made(tmp_path, "one")["id"], made(tmp_path, "two")["id"]
    assert penstock(tmp_path, "keys", "revoke", first).stdout == f"{first}  revoked (one)\n"
    assert [key["id"] for key in listed(tmp_path)] == [second]
    assert {key["id"]: key["status"] for key in listed(tmp_path, "--all")} == {first: "revoked", second: "active"}
    refused = penstock(tmp_path, "keys", "rotate", first)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "is revoked. Expected an active one" in refused.stderr


def test_rotate_with_an_id_is_of_that_api_key(tmp_path: Path):
    """A new text with the same id; the data keys are not touched."""
    before = made(tmp_path, "one", "--daily", "5")
    after = json.loads(penstock(tmp_path, "keys", "rotate", before["id"], "--json").stdout)
    assert after["key"] != before["key"]
    assert {**after, "key": ""} == {**before, "key": ""}
    (key,) = SqlApiKeys(f"sqlite:///{tmp_path / 'registry.db'}").since(0)
    assert key.digest == digest_of(after["key"])
    for words in ((before["id"], "--last"), (before["id"], "--to", "x"), ("--json",)):
        assert penstock(tmp_path, "keys", "rotate", *words).exit_code == 2


def test_every_change_is_in_the_audit_log(tmp_path: Path):
    """With the id, before and after it; a refused change too. No entry has a secret."""
    facts = made(tmp_path, "one")
    penstock(tmp_path, "keys", "rotate", facts["id"])
    penstock(tmp_path, "keys", "revoke", facts["id"])
    penstock(tmp_path, "keys", "revoke", "000000000000")
    found = entries([tmp_path / "audit"], 100).entries
    steps = [(entry.details["what"], entry.details["key"], entry.result) for entry in found]
    assert {entry.operation for entry in found} == {KEY_OPERATION}
    assert steps == [
        (f"{word} API key", key_id, result)
        for word, key_id, results in (
            ("create", facts["id"], ("begun", "done")),
            ("rotate", facts["id"], ("begun", "done")),
            ("revoke", facts["id"], ("begun", "done")),
            ("revoke", "000000000000", ("begun", "failed")),
        )
        for result in results
    ]
    assert facts["key"][-43:] not in "".join(path.read_text() for path in (tmp_path / "audit").rglob("*.jsonl"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("create", "x", "--expires", "soon"), "Expected a number and h, d, w or y, such as 90d"),
        (("create", "x", "--expires", "0d"), "Expected a number and h, d, w or y"),
        (("create", "x", "--daily", "0"), "0 is not in the range"),
        (("create", "x", "--role", "root"), "'root' is not one of"),
        (("create", "x", "--tenant", "No Tenant"), "Bad tenant name"),
        (("create", "a\nb"), "Expected 1 to 100 printable characters"),
        (("revoke", "nothing"), "Expected an id of `penstock keys list`"),
        (("rotate", "nothing"), "Expected an id of `penstock keys list`"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path: Path, words: tuple[str, ...], message: str):
    """Nothing is stored."""
    refused = penstock(tmp_path, "keys", *words)
    assert refused.exit_code in (1, 2)
    assert message in " ".join(refused.stderr.split())
    assert refused.stdout == ""
    assert listed(tmp_path, "--all") == []


def test_usage_is_by_key_month_and_model(redis_server: RedisServer, tmp_path: Path, slot: str):
    """The jobs of each key with its label; one key alone with its id."""
    environ = {"PENSTOCK_REDIS_URL": redis_server.url}
    key_id = made(tmp_path, "shop")["id"]
    with closing(RedisStreams.from_url(redis_server.url)) as broker:
        broker.put_spec(slot, b"{}")
        jobs = [replace(publication(slot), account=account) for account in (key_id, key_id, "ffffffffffff")]
        broker.publish(slot, jobs, ROOMY)
    shown = json.loads(penstock(tmp_path, "keys", "usage", "--json", **environ).stdout)
    month = time.strftime("%Y-%m", time.gmtime())
    no_tokens = {"prompt_tokens": 0, "generated_tokens": 0}
    ours = [line for line in shown if line["model"] == slot]
    assert ours == sorted(
        (
            {"id": key_id, "label": "shop", "month": month, "model": slot, "jobs": 2, **no_tokens},
            {"id": "ffffffffffff", "label": "", "month": month, "model": slot, "jobs": 1, **no_tokens},
        ),
        key=lambda line: str(line["id"]),
    )
    alone = json.loads(penstock(tmp_path, "keys", "usage", key_id, "--json", **environ).stdout)
    assert [line["jobs"] for line in alone] == [2]
    assert "shop" in penstock(tmp_path, "keys", "usage", **environ).stdout
