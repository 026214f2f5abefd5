"""The console of the commands prints text unchanged."""

from __future__ import annotations

import pytest

from penstock.compose.terminal import console


@pytest.mark.parametrize("text", ["/srv/[prod]/logs", "/srv/[/prod]/logs", "worker :smile: [bold]1[/]"])
def test_brackets_and_colons_are_text(capsys: pytest.CaptureFixture[str], text: str):
    """A folder or a name that looks like markup is printed unchanged, in lines and in tables."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row(text)
    console().print(text)
    console().print(table)
    assert capsys.readouterr().out.split("\n")[:2] == [text, text]
