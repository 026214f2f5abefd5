"""`penstock submit`: one job from the shell."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from penstock.compose.commands.options import priority_choice
from penstock.compose.terminal import as_json_option, connected, load_settings, open_broker, print_data

if TYPE_CHECKING:
    from penstock import JobHandle
    from penstock.registry.codecs import Codec
    from penstock.registry.queues import PriorityName
    from penstock.registry.settings import Settings

__all__ = ["print_events", "submit"]


@click.command()
@click.argument("model")
@click.option(
    "-i", "--input", "inputs", multiple=True, metavar="NAME=VALUE", help="One input; a JSON list, or one row."
)
@click.option("--inputs", "file", type=click.File(), help="A file with all inputs as one JSON object; - for stdin.")
@click.option("--priority", type=priority_choice, default="normal", show_default=True)
@click.option("--deadline-s", type=click.FloatRange(0, min_open=True), help="Seconds after which it must not start.")
@click.option("--version", help="A fixed version of the model.")
@click.option("--endpoint", help="The endpoint of the model, whose policy the job has (default: infer).")
@click.option("--wait", is_flag=True, help="Wait for the result and print it.")
@click.option("--stream", is_flag=True, help="Print the events of the job as they come, until its end.")
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
    endpoint: str | None,
    wait: bool,
    stream: bool,
    timeout: float,
    as_json: bool,
) -> None:
    """Submit one job. Print its id, or with --wait its result, or with --stream its events.

    --stream prints one line for each event, with --json one JSON object; the exit status is 1 when the job failed.

    With --json the field codecs.default of the model's package decides the format of outputs: nested lists, or
    {"dtype", "shape", "base64"}. Inputs may have either format.

    \b
    penstock submit minilm --input text="a sentence" --wait
    penstock submit minilm --input text='["two", "sentences"]' --priority high
    penstock submit mlp --inputs batch.json --wait --json
    penstock submit counter --input count=5 --stream
    """
    from penstock import Client
    from penstock.compose.jobs import json_tensors

    parsed = json_tensors.read({**_read_inputs(file), **dict(map(_parse_input, inputs))})
    settings = load_settings(environ)
    with Client.from_env(settings=settings) as client:
        job = client.submit(model, parsed, priority=priority, deadline_s=deadline_s, version=version, endpoint=endpoint)
        if not (wait or stream):
            print_data({"job_id": job.id}, as_json, job.id)
            return
        # Before the end: a broker that goes away afterwards cannot keep the result from being printed.
        codec = _codec(environ, settings, model, version) if as_json else None
        if stream:
            sys.exit(print_events(job, codec))
        outputs = job.result(timeout=timeout)
        info = job.info()
    if codec is not None:
        facts = {"version": info.version, "content_hash": info.content_hash, "is_cached": info.is_cached}
        click.echo(json.dumps({"job_id": job.id, **facts, "outputs": json_tensors.written(outputs, codec)}))
        return
    for name, values in outputs.items():
        click.echo(f"{name} {values.dtype} {values.shape}\n{values}")


def print_events(job: JobHandle, codec: Codec | None) -> int:
    """Print each event when it comes, as JSON where there is a codec. The exit status: 0 for a job that completed."""
    from penstock.compose.views import events

    if codec is None:
        click.echo(job.id)
    last = ""
    for event in job.stream():
        line = events.as_text(event) if codec is None else json.dumps(events.as_json(job.id, event, codec))
        click.echo(line)
        last = event.type
    return 0 if last == "completed" else 1


def _codec(environ: Mapping[str, str], settings: Settings, model: str, version: str | None) -> Codec:
    from penstock.compose.jobs import json_tensors

    with open_broker(connected(environ)) as broker:
        return json_tensors.codec_of(broker, settings.inference.repo_root, model, version or "")


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
