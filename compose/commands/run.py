"""`penstock up`, `worker`, `bench` and `demo`: they run a stack or workers in the foreground."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from penstock.compose.commands.options import app_option
from penstock.compose.terminal import (
    as_json_option,
    connected,
    console,
    load_settings,
    print_drawn,
    stop_signals,
    terminable,
)
from penstock.registry.errors import BrokerRefused, BrokerUnavailable, ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.registry.settings import Settings
    from penstock.registry.stack_file import RunningStack

__all__ = ["bench", "demo", "up", "worker"]

_FIRST_CONTACT_S: Final = 1.0
_device_option = click.option("--device", help="auto, cpu, cuda or cuda:N (default: the setting, auto).")
_models_option = click.option("--models", help="Comma-separated names (default: all under the models root).")


@click.command()
@_device_option
@_models_option
@app_option
@click.option("--flower/--no-flower", default=True, help="Whether to run Flower.")
@click.option("--flower-port", default=0, help="Flower's port on the loopback (default: any free one).")
@click.option("--gateway/--no-gateway", default=True, help="Whether to run the HTTP gateway.")
@click.option(
    "--gateway-port",
    type=click.IntRange(0, 65535),
    help="The gateway's port on the loopback; 0 takes any free one (default: the setting, 8000, if that is free).",
)
@click.pass_obj
def up(
    environ: Mapping[str, str],
    device: str | None,
    models: str | None,
    flower: bool,
    flower_port: int,
    gateway: bool,
    gateway_port: int | None,
) -> None:
    """Run the embedded stack until Ctrl-C: Redis, one worker per device, Flower, the HTTP gateway.

    Other commands and Client.from_env() of the same user find the stack without settings.

    \b
    penstock up
    penstock up --device cpu --models minilm
    penstock up --app my_models.py
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
        with_gateway=gateway,
        gateway_port=gateway_port,
        on_progress=screen.print,
    )
    with suppress(KeyboardInterrupt), terminable(), stack:
        running = stack.running
        screen.print(f"Redis    {running.redis_url}", soft_wrap=True)
        if running.flower_url:
            screen.print(
                f"Flower   {running.flower_url} (user {running.flower_user}, password {running.flower_password})",
                soft_wrap=True,
            )
        if running.gateway_url:
            grpc = f", gRPC on {running.gateway_grpc}" if running.gateway_grpc else ""
            screen.print(f"Gateway  {running.gateway_url}{grpc}")
        screen.print(f"Logs     {stack.log_folder}")
        _print_first_call(screen, running, environ.get("PENSTOCK_HOME", ""))
        screen.print("Ctrl-C stops everything. Waiting jobs are kept.")
        _wait_for_interrupt(lambda: stack.has_failed)
        if stack.has_failed:
            raise ConfigurationError(stack.failure_reason())


@click.command()
@_device_option
@_models_option
@app_option
@click.option("--index", type=click.IntRange(0), help="The number of a CPU worker, when one machine runs several.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning"]), default="warning", show_default=True)
@click.pass_obj
def worker(
    environ: Mapping[str, str], device: str | None, models: str | None, index: int | None, log_level: str
) -> None:
    """Run workers, one process per device, and restart them when they crash or hang.

    It needs a broker: PENSTOCK_REDIS_URL, or a stack that `penstock up` runs. After SIGTERM or Ctrl-C the running
    batch finishes; a second signal stops at once. A worker that cannot work with this configuration says why in one
    line, and the command exits with status 78; other crashes are followed by a restart, after longer and longer
    pauses, which `penstock status` shows. --log-level is that of libraries; debug also shows the traceback of a failed
    start.

    \b
    penstock worker
    penstock worker --device cuda:0 --models minilm,mlp
    penstock worker --app my_models.py
    penstock worker --device cpu --index 1
    """
    from penstock.compose.stack.fleet import choose, worker_program, worker_timeouts
    from penstock.compose.stack.restarts import RestartReport
    from penstock.compose.stack.supervisor import Supervisor
    from penstock.registry import logs

    settings = connected(environ, {"device": device, "worker.models": _names(models), "worker.index": index})
    _check_broker(settings)
    children = _child_environ(environ, settings)
    logs.configure()
    devices = choose(settings, environ)
    programs = [worker_program(each, settings, children, None, log_level=log_level) for each in devices]
    with RestartReport.open(settings.home) as report:
        supervisor = Supervisor(programs, worker_timeouts(settings), on_change=report.write)
        for number in stop_signals():
            signal.signal(number, lambda *_: supervisor.stop())
        status = supervisor.run()
    sys.exit(status)


@click.command()
@click.option("--model", help="The model (default: the first that is served).")
@click.option("--count", type=click.IntRange(1), help="Jobs to run at saturation (default: what ten seconds allow).")
@click.option("--in-flight", type=click.IntRange(1), default=256, show_default=True, help="Jobs in flight at a time.")
@as_json_option
@click.pass_obj
def bench(environ: Mapping[str, str], model: str | None, count: int | None, in_flight: int, as_json: bool) -> None:
    """Measure the running stack, or a private one when none runs: jobs/s, latency, CPU per job.

    The inputs are random values that fit the declaration of the model.

    \b
    penstock bench
    penstock bench --model minilm --count 1000 --in-flight 64
    """
    from penstock.compose import bench as measuring

    on_progress: Callable[[str], None] = (lambda line: None) if as_json else click.echo
    with terminable(), measuring.stack_for(environ, model, on_progress) as settings:
        report = measuring.measure(settings, model, count, in_flight)
    print_drawn(report.as_json(), as_json, lambda: measuring.draw(report))


@click.command()
@click.option(
    "--ask",
    multiple=True,
    metavar="TEXT",
    help="A question of your own, with --generate the beginning of a text; may be repeated.",
)
@click.option("--count", type=click.IntRange(10), default=3_000, show_default=True, help="Docstrings to embed.")
@click.option("--stay", is_flag=True, help="Keep the stack running until Ctrl-C, for example to see Flower.")
@click.option("--generate", is_flag=True, help="Write texts instead; the first run makes their model in two minutes.")
@click.option("--safety", is_flag=True, help="Refuse, promote and break candidates instead; takes some minutes.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("penstock-demo-safety"),
    show_default=True,
    help="With --safety: the folder of its pictures, report and figures.",
)
@as_json_option
@click.pass_obj
def demo(
    environ: Mapping[str, str],
    ask: tuple[str, ...],
    count: int,
    stay: bool,
    generate: bool,
    safety: bool,
    output: Path,
    as_json: bool,
) -> None:
    """Embed the docstrings of your Python's standard library and search them by meaning.

    It starts a private stack (Redis, a worker, Flower), needs no network, and deletes everything at the end. With
    --generate a small model, trained once on those docstrings and kept in PENSTOCK_HOME, writes eight texts at once.
    With --safety it shows a canary, the gate and a circuit breaker on real candidates, and keeps its report.

    \b
    penstock demo --ask "how do I read a zip file?"
    penstock demo --generate --ask "def read_json("
    penstock demo --safety
    """
    if generate and safety:
        raise click.UsageError("Found --generate and --safety, expected one of them")
    screen = console(quiet=as_json)
    wait = _wait_for_interrupt if stay else None
    with terminable():
        if generate:
            from penstock.compose.generate_demo.show import show_generation

            facts = show_generation(screen, environ, ask=ask, stay=wait)
        elif safety:
            from penstock.compose.safety_demo.show import show_safety

            facts = show_safety(screen, environ, output)
        else:
            from penstock.compose.demo import demonstrate

            facts = demonstrate(screen, environ, count=count, ask=ask, stay=wait or (lambda: None)).as_json()
    if as_json:
        click.echo(json.dumps(facts))


def _check_broker(settings: Settings) -> None:
    """Asks the broker before a worker starts, which takes seconds, and Celery's one. Workers wait for one that is away.

    Raises BrokerRefused, or ConfigurationError for a database that the server does not have.
    """
    from penstock.registry.broker.redis_connection import check_broker

    for url in dict.fromkeys((settings.redis_url or "", settings.celery_url or "")):
        # Celery knows other brokers than Redis, and has another form for sockets.
        if not url.startswith(("redis://", "rediss://", "unix://")):
            continue
        try:
            check_broker(url, _FIRST_CONTACT_S)
        except BrokerRefused:
            raise
        except BrokerUnavailable as error:
            click.echo(f"{error}. Workers wait for it", err=True)


def _names(text: str | None) -> tuple[str, ...] | None:
    return tuple(filter(None, (name.strip() for name in text.split(",")))) if text else None


def _child_environ(environ: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """The environment of worker processes: the broker and the keys of these settings, which a file may name."""
    children = {**environ, "PENSTOCK_REDIS_URL": settings.redis_url or ""}
    if settings.signing_keys is not None:
        children["PENSTOCK_SIGNING_KEYS"] = settings.signing_keys.get_secret_value()
    if settings.operator_public_keys:
        children["PENSTOCK_OPERATOR_PUBLIC_KEYS"] = settings.operator_public_keys
    return children


def _print_first_call(screen: Console, running: RunningStack, home: str) -> None:
    """Lines of Python and of a shell that can be pasted, for the first model that is served."""
    from penstock.compose.samples import first_call, first_request
    from penstock.compose.views.overview import served
    from penstock.registry.broker.redis_streams import RedisStreams

    with closing(RedisStreams.from_url(running.redis_url)) as broker:
        found = served(broker)
    if not found:
        return
    where = f" where PENSTOCK_HOME={home}" if home else ""
    screen.print(f"\nFrom Python, in another terminal{where}:\n", soft_wrap=True)
    for line in first_call(found[0]):
        screen.print(line, soft_wrap=True)
    screen.print()
    if running.gateway_url:
        screen.print(f"From a shell:\n\n{first_request(found[0], running.gateway_url).as_curl}\n", soft_wrap=True)


def _wait_for_interrupt(is_over: Callable[[], bool] = lambda: False) -> None:
    """Wait for Ctrl-C, or until `is_over`."""
    try:
        while not is_over():
            time.sleep(0.2)
    except KeyboardInterrupt:
        click.echo()
