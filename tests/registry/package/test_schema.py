"""The schema of model.yaml, as the package has it and as editors read it."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.registry.package import FORMATS, schema
from penstock.registry.package.schema import schema_text


def test_committed_schema_is_that_of_the_model():
    """Editors check model.yaml with what `python -m penstock.registry.package.schema` writes."""
    committed = Path(schema.__file__).with_name("model.schema.json").read_text()
    assert committed == schema_text(), (
        "run: python -m penstock.registry.package.schema > registry/package/model.schema.json"
    )


def test_every_field_of_the_schema_is_described():
    """Whoever writes a package reads there what a field means."""
    schema = json.loads(schema_text())
    tables = {"model.yaml": schema, **schema["$defs"]}
    bare = [
        f"{table}.{name}"
        for table, definition in tables.items()
        for name, field in definition.get("properties", {}).items()
        if "description" not in field
    ]
    assert bare == []
    assert schema["properties"]["format"]["enum"] == list(FORMATS)
