"""What `penstock demo --generate` refuses before it trains anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compose.conftest import penstock


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--safety"], "Found --generate and --safety, expected one of them"),
        (["--ask", "x"] * 9, "--ask: found 9 texts, expected at most 8 with --generate"),
        (["--ask", "x" * 101], "--ask: found a text of 101 characters, expected at most 100"),
        (["--ask", " "], "--ask: found an empty text, expected the beginning of one"),
    ],
    ids=["two demos", "too many texts", "too long", "empty text"],
)
def test_wrong_options_are_refused_at_once(tmp_path: Path, arguments: list[str], expected: str):
    """In one line, and the home stays empty."""
    ended = penstock(tmp_path, "demo", "--generate", *arguments)
    assert ended.exit_code != 0
    assert expected in ended.output
    assert list(tmp_path.iterdir()) == []


def test_a_home_that_is_a_file_is_refused_at_once(tmp_path: Path):
    """Before the docstrings are read."""
    home = tmp_path / "home"
    home.write_text("")
    ended = penstock(home, "demo", "--generate")
    assert ended.exit_code != 0
    assert "PENSTOCK_HOME is a file" in ended.output
    assert "Once:" not in ended.output
