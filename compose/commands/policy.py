"""`penstock policy`: the knobs of a model's endpoints, changed while its workers run."""

from __future__ import annotations

import json
from typing import Any

import click

from penstock.compose.commands.experiment_access import via_option
from penstock.compose.commands.options import reason_option
from penstock.compose.commands.registry_access import RegistryAccess
from penstock.compose.terminal import as_json_option, print_data, print_drawn
from penstock.registry.errors import InvalidInput
from penstock.registry.queues import DEFAULT_ENDPOINT

__all__ = ["policy"]


@click.group()
@via_option
@click.pass_context
def policy(context: click.Context, via: str) -> None:
    """Change the policy of a model's endpoints at run time: batching window, precision, concurrency and more.

    What is set here is over the model.yaml of every version of the model. Workers follow with their next claim, and
    idle ones within a second. Each change is in the registry and in the audit log.
    """
    context.obj = RegistryAccess(context.obj, via)


@policy.command("set")
@click.argument("model")
@click.argument("knobs", nargs=-1, required=True, metavar="KNOB=VALUE...")
@click.option("--endpoint", default=DEFAULT_ENDPOINT, show_default=True, help="One of the model's endpoints.")
@reason_option
@as_json_option
@click.pass_obj
def set_knobs(
    access: RegistryAccess, model: str, knobs: tuple[str, ...], endpoint: str, reason: str, as_json: bool
) -> None:
    """Set knobs of an endpoint of MODEL over those of its model.yaml.

    window_ms, concurrency and cache_ttl_s hold from the next batch on. precision and fallback_runtime load the version
    once more, and the new load takes the place of the old one when it is ready. rollout_percent is the first step of
    the next rollout, and at another endpoint than infer the least share of the candidate in any rollout.

    \b
    penstock policy set minilm window_ms=5
    penstock policy set minilm --endpoint bulk concurrency=2 cache_ttl_s=0
    """
    parsed = dict(map(_parse, knobs))
    with access.deployer() as deployer:
        record = deployer.set_policy(model, endpoint, parsed, reason=reason)
    changed = ", ".join(f"{name}={value}" for name, value in record.endpoints[endpoint].items())
    data = {"model": model, "epoch": record.epoch, "endpoints": dict(record.endpoints)}
    print_data(data, as_json, f"{model}: {endpoint} has {changed} (epoch {record.epoch})")


@policy.command("reset")
@click.argument("model")
@click.option("--endpoint", default="", help="One of the model's endpoints (default: all of them).")
@reason_option
@as_json_option
@click.pass_obj
def reset(access: RegistryAccess, model: str, endpoint: str, reason: str, as_json: bool) -> None:
    """Remove what `set` has set: the model.yaml of each version decides again.

    \b
    penstock policy reset minilm
    penstock policy reset minilm --endpoint bulk
    """
    with access.deployer() as deployer:
        record = deployer.set_policy(model, endpoint, None, reason=reason)
    data = {"model": model, "epoch": record.epoch, "endpoints": dict(record.endpoints)}
    told = f"{model}: {endpoint or 'every endpoint'} has the policy of model.yaml (epoch {record.epoch})"
    print_data(data, as_json, told)


@policy.command("show")
@click.argument("model")
@as_json_option
@click.pass_obj
def show(access: RegistryAccess, model: str, as_json: bool) -> None:
    """Show the policy of each endpoint of MODEL: what operators have set, and what its model.yaml says.

    \b
    penstock policy show minilm
    penstock policy show minilm --json
    """
    from penstock.compose.views.policies import described_policies, draw_policies

    with access.records(model) as registry:
        data = described_policies(registry.find(model), registry.policy(model))
    print_drawn(data, as_json, lambda: draw_policies(data))


def _parse(text: str) -> tuple[str, Any]:
    """`window_ms=5` -> the name and the value."""
    name, sign, value = text.partition("=")
    if not sign or not name or not value:
        raise InvalidInput(f"Bad knob {text!r:.80}. Expected KNOB=VALUE, such as window_ms=5")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
