"""What the commands share: settings of this shell, a connection to its broker, and how they print.

Nothing here imports a framework, NumPy or the terminal library before it is called.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from penstock.registry.errors import ConfigurationError, PenstockError
from penstock.workers.process.exit_status import EXIT_CONFIGURATION

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.registry.broker.redis_streams import RedisStreams
    from penstock.registry.settings import Settings

__all__ = [
    "Commands",
    "as_json_option",
    "connected",
    "console",
    "load_settings",
    "open_broker",
    "printable",
    "terminable",
]

_PIPE_WIDTH: Final = 200
as_json_option = click.option("--json", "as_json", is_flag=True, help="Print data for programs.")


class _Misconfigured(click.ClickException):
    exit_code = EXIT_CONFIGURATION


class Commands(click.Group):
    """Turns Penstock's errors into one line and an exit status, for every command."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except PenstockError as error:
            refusal = _Misconfigured if isinstance(error, ConfigurationError) else click.ClickException
            raise refusal(str(error)) from error


def load_settings(environ: Mapping[str, str], overrides: Mapping[str, object] | None = None) -> Settings:
    """The settings of this shell. Raises ConfigurationError."""
    from penstock.registry.settings import Settings

    return Settings.load(environ=environ, overrides=overrides)


def connected(environ: Mapping[str, str], overrides: Mapping[str, object] | None = None) -> Settings:
    """The settings with a broker in them: a URL that was given, or the running stack's. Raises ConfigurationError."""
    from penstock.registry.stack_file import with_broker

    return with_broker(load_settings(environ, overrides))


@contextmanager
def open_broker(settings: Settings, *, timeout_s: float = 5.0) -> Iterator[RedisStreams]:
    """The broker of `connected` settings, closed at the end of the block."""
    from penstock.registry.broker.redis_streams import RedisStreams

    result_ttl_ms = int(settings.inference.queue.result_ttl_s * 1000)
    url = settings.redis_url or ""
    with closing(RedisStreams.from_url(url, timeout_s=timeout_s, result_ttl_ms=result_ttl_ms)) as broker:
        yield broker


def console(*, quiet: bool = False) -> Console:
    """Where tables go; brackets and colons in what it prints are text, as folders and names may have them.

    A pipe has no width of its own: it gets one at which little is cut off.
    """
    from rich.console import Console

    screen = Console(quiet=quiet, highlight=False, markup=False, emoji=False, soft_wrap=False)
    if not screen.is_terminal and "COLUMNS" not in os.environ:
        screen.width = _PIPE_WIDTH
    return screen


def printable(text: str) -> str:
    """`text` without the power to move a terminal's cursor or to end a line: it may come from anybody.

    >>> printable("plain \\x1b[2J text")
    'plain \\\\x1b[2J text'
    """
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM and a closed terminal end the block as Ctrl-C does: what was started is stopped in order."""

    def leave(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
