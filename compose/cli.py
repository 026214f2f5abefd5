"""The `penstock` command.

    up, worker, bench, demo                run things
    submit, status                         talk to what runs
    models                                 which version of a model answers (compose/commands/models.py)
    dead, queue, workers, top, doctor      operate it (compose/commands/operators.py)

Frameworks, NumPy and the terminal library are imported by the commands that need them, so that --help is quick.
A refusal is one line on stderr: exit status 1, or EXIT_CONFIGURATION for a setting or a machine that cannot work;
compose/terminal.py sees to that.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.compose.commands.models import models
from penstock.compose.commands.operators import dead, doctor, queue, top, workers
from penstock.compose.stack.supervisor import Supervisor
from penstock.compose.terminal import (
    Commands,
    as_json_option,
    connected,
    console,
    load_settings,
    open_broker,
    terminable,
)
from penstock.registry.errors import ConfigurationError

if TYPE_CHECKING:
    from penstock.registry.queues import PriorityName

__all__ = ["main"]

_PRIORITIES: Final = click.Choice(["critical", "high", "normal", "low"])


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", type=click.Path(path_type=Path), help="A YAML file of settings.")
@click.version_option(package_name="penstock")
@click.pass_context
def main(context: click.Context, config: Path | None) -> None:
    """Queue-based inference: submit jobs, drain them in micro-batches, stream the results.

    \b
    penstock demo                                 see it work on this machine
    penstock up                                   run Redis, workers and Flower in the foreground
    penstock submit minilm -i text="a sentence" --wait
    """
    # Children read it too: the file travels in the environment.
    context.obj = {**os.environ, **({"PENSTOCK_CONFIG": str(config.absolute())} if config else {})}


@main.command()
@click.option("--device", help="auto, cpu, cuda or cuda:N (default: the setting, auto).")
@click.option("--models", help="Comma-separated names (default: all under the models root).")
@click.option("--flower/--no-flower", default=True, help="Whether to run Flower.")
@click.option("--flower-port", default=0, help="Flower's port on the loopback (default: any free one).")
@click.pass_obj
def up(environ: Mapping[str, str], device: str | None, models: str | None, flower: bool, flower_port: int) -> None:
    """Run the embedded stack until Ctrl-C: Redis, one worker per device, Flower.

    Other commands and Client.from_env() of this user find it by themselves.

    \b
    penstock up
    penstock up --device cpu --models minilm
    """
    from penstock.compose.stack.fleet import choose
    from penstock.compose.stack.local import LocalStack

    settings = load_settings(environ, {"device": device, "worker.models": _names(models)})
    screen = console()
    stack = LocalStack(
        settings,
        choose(settings, environ),
        environ=environ,
        with_flower=flower,
        flower_port=flower_port,
        on_progress=screen.print,
    )
    with suppress(KeyboardInterrupt), terminable(), stack:
        running = stack.running
        screen.print(f"Redis    {running.redis_url}")
        if running.flower_url:
            screen.print(
                f"Flower   {running.flower_url} (user {running.flower_user}, password {running.flower_password})"
            )
        screen.print(f"Logs     {stack.log_folder}\nCtrl-C stops everything; jobs that wait are kept.")
        _until_interrupted(lambda: stack.has_failed)
        if stack.has_failed:
            raise ConfigurationError(stack.complaint())


@main.command()
@click.option("--device", help="auto, cpu, cuda or cuda:N (default: the setting, auto).")
@click.option("--models", help="Comma-separated names (default: all under the models root).")
@click.option("--index", type=click.IntRange(0), help="Number of a CPU worker, when one machine runs several.")
@click.pass_obj
def worker(environ: Mapping[str, str], device: str | None, models: str | None, index: int | None) -> None:
    """Run workers, one process per device, restarted when they crash or hang.

    Needs a broker: PENSTOCK_REDIS_URL, or a stack that `penstock up` runs. SIGTERM and Ctrl-C let the running
    batch finish; a second one does not wait.

    \b
    penstock worker
    penstock worker --device cuda:0 --models minilm,mlp
    penstock worker --device cpu --index 1
    """
    from penstock.compose.stack.fleet import choose, worker_patience, worker_program
    from penstock.registry import logs

    settings = connected(environ, {"device": device, "worker.models": _names(models), "worker.index": index})
    children = {**environ, "PENSTOCK_REDIS_URL": settings.redis_url or ""}
    if settings.signing_keys is not None:
        children["PENSTOCK_SIGNING_KEYS"] = settings.signing_keys.get_secret_value()
    if settings.operator_public_keys:
        children["PENSTOCK_OPERATOR_PUBLIC_KEYS"] = settings.operator_public_keys
    logs.configure()
    programs = [worker_program(each, settings, children, None) for each in choose(settings, environ)]
    supervisor = Supervisor(programs, worker_patience(settings))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: supervisor.stop())
    sys.exit(supervisor.run())


@main.command()
@click.argument("model")
@click.option(
    "-i", "--input", "inputs", multiple=True, metavar="NAME=VALUE", help="One input; a JSON list, or one row."
)
@click.option("--inputs", "file", type=click.File(), help="A file with all inputs as one JSON object; - for stdin.")
@click.option("--priority", type=_PRIORITIES, default="normal", show_default=True)
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
    """Submit one job; prints its id, and with --wait its result.

    With --json the outputs are written as the model's package says: lists, or {"dtype", "shape", "base64"} where its
    codecs.default is base64. Inputs may be either.

    \b
    penstock submit minilm --input text="a sentence" --wait
    penstock submit minilm --input text='["two", "sentences"]' --priority high
    penstock submit mlp --inputs batch.json --wait --json
    """
    from penstock import Client
    from penstock.compose import tensors

    given = tensors.read({**_read_inputs(file), **dict(map(_parse_input, inputs))})
    settings = load_settings(environ)
    with Client.from_env(settings=settings) as client:
        job = client.submit(model, given, priority=priority, deadline_s=deadline_s, version=version)
        if not wait:
            click.echo(json.dumps({"job_id": job.id}) if as_json else job.id)
            return
        if as_json:
            # Before the result: a broker that goes away afterwards cannot keep it from being written.
            with open_broker(connected(environ)) as broker:
                codec = tensors.codec_of(broker, settings.inference.repo_root, model, version or "")
        outputs = job.result(timeout=timeout)
        info = job.info()
    if as_json:
        answered = {"version": info.version, "content_hash": info.content_hash, "is_cached": info.is_cached}
        click.echo(json.dumps({"job_id": job.id, **answered, "outputs": tensors.written(outputs, codec)}))
        return
    for name, values in outputs.items():
        click.echo(f"{name} {values.dtype} {values.shape}\n{values}")


@main.command()
@as_json_option
@click.pass_obj
def status(environ: Mapping[str, str], as_json: bool) -> None:
    """Show the queues with depth and age, the workers and the models.

    \b
    penstock status
    penstock status --json
    """
    from penstock.compose.views import overview

    with open_broker(connected(environ)) as broker:
        state = overview.status(broker)
    if as_json:
        click.echo(json.dumps(state))
    else:
        console().print(overview.draw_status(state))


@main.command()
@click.option("--model", default="mlp", show_default=True)
@click.option("--count", type=click.IntRange(1), default=20_000, show_default=True, help="Jobs to run at saturation.")
@click.option("--outstanding", type=click.IntRange(1), default=256, show_default=True, help="Jobs in flight at a time.")
@as_json_option
@click.pass_obj
def bench(environ: Mapping[str, str], model: str, count: int, outstanding: int, as_json: bool) -> None:
    """Measure the running stack, or a private one when none runs: jobs/s, latency, CPU per job.

    \b
    penstock bench
    penstock bench --model minilm --count 1000 --outstanding 64
    """
    from penstock.compose import bench as measuring

    with terminable(), measuring.stack_for(environ, model, _steps(as_json)) as settings:
        figures = measuring.measure(settings, model, count, outstanding)
    if as_json:
        click.echo(json.dumps(figures.as_json()))
    else:
        console().print(measuring.draw(figures))


@main.command()
@click.option("--ask", multiple=True, metavar="TEXT", help="A question of your own; may be repeated.")
@click.option("--count", type=click.IntRange(10), default=3_000, show_default=True, help="Docstrings to embed.")
@click.option("--stay", is_flag=True, help="Keep everything running until Ctrl-C, to look at Flower.")
@as_json_option
@click.pass_obj
def demo(environ: Mapping[str, str], ask: tuple[str, ...], count: int, stay: bool, as_json: bool) -> None:
    """Embed the docstrings of your Python's standard library and search them by meaning.

    Starts a private stack (Redis, a worker, Flower), needs no network, and leaves nothing behind.

    \b
    penstock demo
    penstock demo --ask "how do I read a zip file?"
    """
    from penstock.compose.demo import demonstrate

    screen = console(quiet=as_json)
    wait = _until_interrupted if stay else lambda: None
    with terminable():
        shown = demonstrate(screen, environ, count=count, ask=ask, stay=wait)
    if as_json:
        click.echo(json.dumps(shown.as_json()))


def _steps(as_json: bool) -> Callable[[str], None]:
    return (lambda step: None) if as_json else click.echo


def _names(text: str | None) -> tuple[str, ...] | None:
    return tuple(filter(None, (name.strip() for name in text.split(",")))) if text else None


def _parse_input(text: str) -> tuple[str, object]:
    """`x=[[1, 2]]` as it is; a bare value is one row: `text=hello` is ["hello"], `count=3` is [3]."""
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


def _until_interrupted(is_over: Callable[[], bool] = lambda: False) -> None:
    """Wait for Ctrl-C, or until `is_over`."""
    try:
        while not is_over():
            time.sleep(0.2)
    except KeyboardInterrupt:
        click.echo()


for operating in (models, dead, queue, workers, top, doctor):
    main.add_command(operating)
