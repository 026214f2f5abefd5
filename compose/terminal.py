"""Shared by the commands: the settings of this shell, a connection to its broker, and output.

Importing this module imports no framework, no NumPy and no terminal library.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from penstock.registry.errors import BrokerRefused, ConfigurationError, PenstockError
from penstock.workers.process.exit_status import EXIT_CONFIGURATION

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from penstock.registry.broker.redis_streams import RedisStreams
    from penstock.registry.settings import Settings

__all__ = [
    "Commands",
    "as_json_option",
    "connected",
    "console",
    "counted",
    "load_settings",
    "open_broker",
    "print_data",
    "print_drawn",
    "printable",
    "stop_signals",
    "terminable",
]

_PIPE_WIDTH: Final = 200
_REPEAT_S: Final = 0.05
as_json_option = click.option("--json", "as_json", is_flag=True, help="Print data for programs.")


class _Misconfigured(click.ClickException):
    exit_code = EXIT_CONFIGURATION


class Commands(click.Group):
    """Prints an error of Penstock as one line and exits with its status, for every command."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except PenstockError as error:
            refusal = _Misconfigured if isinstance(error, ConfigurationError | BrokerRefused) else click.ClickException
            raise refusal(str(error)) from error


def load_settings(environ: Mapping[str, str], overrides: Mapping[str, object] | None = None) -> Settings:
    """The settings of this shell. Raises ConfigurationError."""
    from penstock.registry.settings import Settings

    return Settings.load(environ=environ, overrides=overrides)


def connected(environ: Mapping[str, str], overrides: Mapping[str, object] | None = None) -> Settings:
    """The settings with a broker: the configured URL, or that of the running stack. Raises ConfigurationError."""
    from penstock.registry.stack_file import with_broker

    return with_broker(load_settings(environ, overrides))


@contextmanager
def open_broker(settings: Settings, *, timeout_s: float = 5.0) -> Iterator[RedisStreams]:
    """Connects to the broker of `connected` settings; closes the connection at the end of the block."""
    from penstock.registry.broker.redis_streams import RedisStreams

    result_ttl_ms = int(settings.inference.queue.result_ttl_s * 1000)
    url = settings.redis_url or ""
    with closing(RedisStreams.from_url(url, timeout_s=timeout_s, result_ttl_ms=result_ttl_ms)) as broker:
        yield broker


def console(*, quiet: bool = False) -> Console:
    """The console for tables. It interprets no markup: brackets and colons may be part of names and folders.

    A pipe has no width; it gets a large one, so that little is cut off.
    """
    from rich.console import Console

    screen = Console(quiet=quiet, highlight=False, markup=False, emoji=False, soft_wrap=False)
    if not screen.is_terminal and "COLUMNS" not in os.environ:
        screen.width = _PIPE_WIDTH
    return screen


def print_data(data: Any, as_json: bool, text: str) -> None:
    """Print `data` as JSON, or `text` for a person."""
    click.echo(json.dumps(data) if as_json else text)


def print_drawn(data: Any, as_json: bool, draw: Callable[[], RenderableType]) -> None:
    """Print `data` as JSON, or as `draw` shows it to a person."""
    if as_json:
        click.echo(json.dumps(data))
    else:
        console().print(draw())


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun.

    >>> counted(1, "job"), counted(2000, "job"), counted(0, "crash", "crashes")
    ('1 job', '2,000 jobs', '0 crashes')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def printable(text: str) -> str:
    """`text` with escaped control characters: text from outside must not move the cursor or end a line.

    >>> printable("plain \\x1b[2J text")
    'plain \\\\x1b[2J text'
    """
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def stop_signals() -> list[signal.Signals]:
    """The signals that end a command in order. SIGHUP is none of them where it is ignored: `nohup` asks for that."""
    closed_terminal = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *closed_terminal]


class _Terminated(SystemExit):
    """Raised by the signal `number`."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM and a closed terminal end the block as Ctrl-C does, so that started processes are stopped in order.

    A signal that comes inside a finalizer is repeated, also Ctrl-C: Python drops an exception that a finalizer raises,
    and the block would go on.
    """

    def leave(number: int, _frame: object) -> NoReturn:
        raise _Terminated(number)

    def repeat(dropped: sys.UnraisableHookArgs) -> None:
        error = dropped.exc_value
        if isinstance(error, _Terminated | KeyboardInterrupt):
            number = error.number if isinstance(error, _Terminated) else signal.SIGINT
            # Later: an exception in this hook would be dropped as well.
            threading.Timer(_REPEAT_S, os.kill, (os.getpid(), number)).start()
        else:
            hook(dropped)

    before = {number: signal.signal(number, leave) for number in stop_signals() if number != signal.SIGINT}
    hook, sys.unraisablehook = sys.unraisablehook, repeat
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)
