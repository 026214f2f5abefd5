"""The token of those who read metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.registry.bearer_file import presents, read_bearer
from penstock.registry.errors import ConfigurationError


def test_a_header_has_the_token_or_not(tmp_path: Path):
    """The line end of the file does not count. Without a token no header is right."""
    file = tmp_path / "token"
    file.write_text("t0ken\n")
    token = read_bearer(file)
    assert presents("Bearer t0ken", token)
    wrong = ("", "Bearer ", "Bearer t0ke", "Bearer t0ken ", "Basic t0ken", "é")
    assert not any(presents(each, token) for each in wrong)
    assert read_bearer(None) == ""
    assert not any(presents(each, "") for each in ("", "Bearer ", "Bearer"))


@pytest.mark.parametrize("content", [b" \n", b"\xff", None], ids=["empty", "not ASCII", "missing"])
def test_a_file_without_a_token_is_refused(tmp_path: Path, content: bytes | None):
    """An empty token would open the page to everybody."""
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigurationError, match="No token in token"):
        read_bearer(file)
