"""`penstock keys create|list|revoke|usage`: the API keys of the gateway's callers. `keys rotate ID` ends here, too."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.compose.api_keys import change_api_key
from penstock.compose.terminal import as_json_option, connected, load_settings, open_broker, print_drawn, printable

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.registry.api_keys import ApiKey, KeyRole, ShownKey

__all__ = ["create", "list_keys", "revoke", "rotate_api_key", "usage"]

_UNITS_S: Final = {"h": 3600, "d": 86_400, "w": 604_800, "y": 31_536_000}
_count = click.IntRange(1, 10**12)


class _Duration(click.ParamType[int]):
    name = "duration"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> int:
        """Seconds from now."""
        count, unit = str(value)[:-1], str(value)[-1:]
        if not (count.isascii() and count.isdigit() and len(count) < 7 and int(count)) or unit not in _UNITS_S:
            self.fail(f"{value!r}. Expected a number and h, d, w or y, such as 90d", parameter, context)
        return int(count) * _UNITS_S[unit]


@click.command("create")
@click.argument("label")
@click.option(
    "--role",
    type=click.Choice(["admin", "user", "readonly"]),
    default="user",
    show_default=True,
    help="readonly: look at jobs and models; user: also submit and cancel; admin: also metrics and operations.",
)
@click.option("--tenant", help="The tenant that its jobs belong to (default: the setting tenant_id).")
@click.option("--model", "models", multiple=True, help="A model that it may use; repeatable (default: all).")
@click.option("--expires", type=_Duration(), metavar="DURATION", help="When it ends, such as 12h, 90d or 1y.")
@click.option("--requests-per-minute", type=_count, help="Its rate (default: safeguards.rate_limit).")
@click.option("--tokens-per-minute", type=_count, help="Its rate in tokens (default: none).")
@click.option("--daily", type=_count, help="Requests in one day of UTC (default: no limit).")
@click.option("--monthly", type=_count, help="Requests in one month of UTC (default: no limit).")
@as_json_option
@click.pass_obj
def create(
    environ: Mapping[str, str],
    label: str,
    role: KeyRole,
    tenant: str | None,
    models: tuple[str, ...],
    expires: int | None,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    daily: int | None,
    monthly: int | None,
    as_json: bool,
) -> None:
    """Make an API key, and print it once: the registry keeps its hash only.

    Send it as `Authorization: Bearer KEY` or `X-API-Key: KEY`. From the first key on, the gateways ask for one.

    \b
    penstock keys create "web shop"
    penstock keys create ci --role readonly --expires 90d --json
    penstock keys create acme --tenant acme --model minilm --requests-per-minute 600 --monthly 100000
    """
    from penstock.registry.api_keys import KeyLimits, new_api_key

    settings, now = load_settings(environ), int(time.time())
    made = new_api_key(
        label,
        now=now,
        role=role,
        tenant=tenant or settings.tenant_id,
        models=models,
        expires_at=None if expires is None else now + expires,
        limits=KeyLimits(
            requests_per_minute=requests_per_minute or 0,
            tokens_per_minute=tokens_per_minute or 0,
            requests_per_day=daily or 0,
            requests_per_month=monthly or 0,
        ),
    )
    change_api_key(settings, "create API key", made.key.id, lambda keys: keys.add(made.key))
    _print_secret(made, as_json)


@click.command("list")
@click.option("--all", "every", is_flag=True, help="Also revoked and expired keys.")
@as_json_option
@click.pass_obj
def list_keys(environ: Mapping[str, str], every: bool, as_json: bool) -> None:
    """List the API keys: id, label, role, tenant, models, limits. No secret is shown.

    \b
    penstock keys list
    penstock keys list --all --json
    """
    from penstock.registry.catalog.api_keys import SqlApiKeys

    now = time.time()
    keys = sorted(SqlApiKeys(load_settings(environ).registry_url).since(0), key=lambda key: key.created_at)
    shown = [_facts(key, now) for key in keys if every or key.status(now) == "active"]
    print_drawn(shown, as_json, lambda: _table(shown))


@click.command("revoke")
@click.argument("key_id", metavar="API_KEY_ID")
@as_json_option
@click.pass_obj
def revoke(environ: Mapping[str, str], key_id: str, as_json: bool) -> None:
    """Make an API key invalid for good. The gateways refuse it within a second; jobs that it submitted go on.

    \b
    penstock keys revoke 3f9a0c2b7d41
    """
    settings, now = load_settings(environ), int(time.time())
    key = change_api_key(settings, "revoke API key", key_id, lambda keys: keys.revoke(key_id, now))
    if as_json:
        click.echo(json.dumps(_facts(key, now)))
    else:
        click.echo(f"{key.id}  revoked ({printable(key.label)})")


@click.command("usage")
@click.argument("key_id", metavar="[API_KEY_ID]", required=False)
@as_json_option
@click.pass_obj
def usage(environ: Mapping[str, str], key_id: str | None, as_json: bool) -> None:
    """Print the jobs that each API key has submitted, and the tokens of its texts, by month of UTC and model.

    A job counts once, and so do its tokens, when the text is whole. A repeated request with the same Idempotency-Key,
    or one that the shared cache answers, adds no job.

    \b
    penstock keys usage
    penstock keys usage 3f9a0c2b7d41 --json
    """
    from penstock.registry.catalog.api_keys import SqlApiKeys

    settings = connected(environ)
    labels = {key.id: key.label for key in SqlApiKeys(settings.registry_url).since(0)}
    with open_broker(settings) as broker:
        lines = [
            {"id": account, "label": labels.get(account, ""), "month": month, "model": model, **used._asdict()}
            for model in broker.models()
            for (account, month), used in broker.usage(model).items()
            if key_id in (None, account)
        ]
    lines.sort(key=lambda line: (line["month"], line["id"], line["model"]))
    print_drawn(lines, as_json, lambda: _usage_table(lines))


def rotate_api_key(environ: Mapping[str, str], key_id: str, as_json: bool) -> None:
    """`penstock keys rotate ID`: prints the new secret."""
    settings = load_settings(environ)
    _print_secret(
        change_api_key(settings, "rotate API key", key_id, lambda keys: keys.replace_secret(key_id, time.time())),
        as_json,
    )


def _print_secret(made: ShownKey, as_json: bool) -> None:
    """Only the key goes to stdout, so that a shell can take it."""
    if as_json:
        click.echo(json.dumps({**_facts(made.key, made.key.created_at), "key": made.text}))
        return
    click.echo(
        f"{made.key.id}  {made.key.role} of tenant {made.key.tenant}. Keep the key: it is not shown again", err=True
    )
    click.echo(made.text)


def _facts(key: ApiKey, now: float) -> dict[str, Any]:
    from msgspec import structs

    return {
        "id": key.id,
        "label": key.label,
        "status": key.status(now),
        "role": key.role,
        "tenant": key.tenant,
        "models": list(key.models),
        "created_at": _utc(key.created_at),
        "expires_at": _utc(key.expires_at),
        "revoked_at": _utc(key.revoked_at),
        "limits": {name: limit for name, limit in structs.asdict(key.limits).items() if limit},
    }


def _utc(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _table(shown: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table("id", "label", "status", "role", "tenant", "models", "expires", "limits", box=None)
    for facts in shown:
        limits = ", ".join(f"{name} {limit}" for name, limit in facts["limits"].items())
        models = " ".join(facts["models"]) or "all"
        about = (facts["status"], facts["role"], facts["tenant"], models, facts["expires_at"] or "never", limits)
        table.add_row(facts["id"], printable(facts["label"]), *about)
    return table


def _usage_table(lines: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table("month", "id", "label", "model", "jobs", "prompt tokens", "generated tokens", box=None)
    for line in lines:
        counts = (f"{line[name]:,}" for name in ("jobs", "prompt_tokens", "generated_tokens"))
        table.add_row(line["month"], printable(line["id"]), printable(line["label"]), line["model"], *counts)
    return table
