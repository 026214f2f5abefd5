"""`penstock submit`: one job from the shell."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from penstock.compose.commands.options import priority_choice
from penstock.compose.terminal import as_json_option, connected, load_settings, open_broker, print_data

if TYPE_CHECKING:
    from penstock.registry.queues import PriorityName

__all__ = ["submit"]


@click.command()
@click.argument("model")
@click.option(
    "-i", "--input", "inputs", multiple=True, metavar="NAME=VALUE", help="One input; a JSON list, or one row."
)
@click.option("--inputs", "file", type=click.File(), help="A file with all inputs as one JSON object; - for stdin.")
@click.option("--priority", type=priority_choice, default="normal", show_default=True)
@click.option("--deadline-s", type=click.FloatRange(0, min_open=True), help="Seconds after which it must not start.")
@click.option("--version", help="A fixed version of the model.")
@click.option("--wait", is_flag=True, help="Wait for the result and print it.")
@click.option("--timeout", default=60.0, show_default=True, help="How long --wait waits, in seconds.")
@as_json_option
@click.pass_obj
def submit(
    environ: Mapping[str, str],
    model: str,
    inputs: tuple[str, ...],
    file: Any,
    priority: PriorityName,
    deadline_s: float | None,
    version: str | None,
    wait: bool,
    timeout: float,
    as_json: bool,
) -> None:
    """Submit one job. Print its id, or with --wait its result.

    With --json the field codecs.default of the model's package decides the format of outputs: nested lists, or
    {"dtype", "shape", "base64"}. Inputs may have either format.

    \b
    penstock submit minilm --input text="a sentence" --wait
    penstock submit minilm --input text='["two", "sentences"]' --priority high
    penstock submit mlp --inputs batch.json --wait --json
    """
    from penstock import Client
    from penstock.compose.jobs import json_tensors

    parsed = json_tensors.read({**_read_inputs(file), **dict(map(_parse_input, inputs))})
    settings = load_settings(environ)
    with Client.from_env(settings=settings) as client:
        job = client.submit(model, parsed, priority=priority, deadline_s=deadline_s, version=version)
        if not wait:
            print_data({"job_id": job.id}, as_json, job.id)
            return
        if as_json:
            # Before the result: a broker that goes away afterwards cannot keep the result from being printed.
            with open_broker(connected(environ)) as broker:
                codec = json_tensors.codec_of(broker, settings.inference.repo_root, model, version or "")
        outputs = job.result(timeout=timeout)
        info = job.info()
    if as_json:
        facts = {"version": info.version, "content_hash": info.content_hash, "is_cached": info.is_cached}
        click.echo(json.dumps({"job_id": job.id, **facts, "outputs": json_tensors.written(outputs, codec)}))
        return
    for name, values in outputs.items():
        click.echo(f"{name} {values.dtype} {values.shape}\n{values}")


def _parse_input(text: str) -> tuple[str, object]:
    """The name and the value: `x=[[1, 2]]` as it is; a bare value is one row: `text=hello` is ["hello"]."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{text!r:.80}. Expected NAME=VALUE", param_hint="--input")
    try:
        read = json.loads(value)
    except ValueError:
        read = value
    return name, read if isinstance(read, list | dict) else [read]


def _read_inputs(file: Any) -> dict[str, object]:
    if file is None:
        return {}
    try:
        read = json.load(file)
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise click.BadParameter("not a JSON object. Expected {name: nested lists}", param_hint="--inputs")
    return read
