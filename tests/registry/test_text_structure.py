"""Forms of a text: what can be refused without a compiler is refused before anything is queued."""

from __future__ import annotations

import pytest

from penstock.registry.errors import InvalidInput
from penstock.registry.text_structure import check_choice, check_schema, check_source


def test_a_schema_is_a_mapping_or_its_json():
    """Both give the mapping; JSON that nests without end is refused and not followed."""
    assert check_schema('{"type": "integer"}') == check_schema({"type": "integer"}) == {"type": "integer"}
    with pytest.raises(InvalidInput, match="expected a schema in JSON"):
        check_schema('{"a":' * 9_000)
    endless: dict[str, object] = {}
    endless["properties"] = endless
    with pytest.raises(InvalidInput, match="expected a schema in JSON"):
        check_schema(endless)


def test_sizes_are_bounded():
    """A form is compiled for each request, so its size has a limit."""
    with pytest.raises(InvalidInput, match="choice: found 1025 texts, expected at most 1024"):
        check_choice(["a"] * 1_025)
    with pytest.raises(InvalidInput, match="regex: found 65537 characters, expected at most 65536 bytes"):
        check_source("regex", "a" * 65_537)
    check_source("regex", "a" * 65_536)
