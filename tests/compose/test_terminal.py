"""The console of the commands prints text unchanged."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator

import pytest

from penstock.compose.terminal import console, stop_signals, terminable


@pytest.mark.parametrize("text", ["/srv/[prod]/logs", "/srv/[/prod]/logs", "worker :smile: [bold]1[/]"])
def test_brackets_and_colons_are_text(capsys: pytest.CaptureFixture[str], text: str):
    """A folder or a name that looks like markup is printed unchanged, in lines and in tables."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row(text)
    console().print(text)
    console().print(table)
    assert capsys.readouterr().out.split("\n")[:2] == [text, text]


class _Finalized:
    """Gets a signal in its finalizer, as an object of a library does that is dropped at the wrong moment."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __del__(self) -> None:
        signal.raise_signal(self._number)


@pytest.fixture
def attended() -> Iterator[None]:
    """A closed terminal ends the process, also where `nohup` has started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def _wait_in_the_block(number: int) -> None:
    with terminable():
        _Finalized(number)
        for _ in range(6000):
            time.sleep(0.01)


@pytest.mark.usefixtures("attended")
@pytest.mark.parametrize(
    ("number", "ended"),
    [(signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit), (signal.SIGINT, KeyboardInterrupt)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_signal_inside_a_finalizer_still_ends_the_block(number: signal.Signals, ended: type[BaseException]):
    """Python drops the exception that the finalizer raises; the signal comes again, and the block ends."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    hook = sys.unraisablehook
    with pytest.raises(ended) as left:
        _wait_in_the_block(number)
    if isinstance(left.value, SystemExit):
        assert left.value.code == 128 + number
    assert {each: signal.getsignal(each) for each in handlers} == handlers
    assert sys.unraisablehook is hook


def test_a_closed_terminal_does_not_end_what_nohup_started():
    """`nohup` starts a program with SIGHUP ignored: it stays so, inside and outside of the block."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminable():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert stop_signals() == [signal.SIGTERM, signal.SIGINT]
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert stop_signals() == [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_errors_of_finalizers_are_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """The hook that was there before gets them."""
    heard: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: heard.append(dropped.exc_value))

    class Broken:
        def __del__(self) -> None:
            raise ValueError("broken")

    with terminable():
        Broken()
    assert [str(error) for error in heard] == ["broken"]
