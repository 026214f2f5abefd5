"""The JSON Schema of model.yaml: committed, complete, and in agreement with the packages of this repository."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import yaml

from penstock.registry.package import FORMATS, ModelSpec, schema
from penstock.registry.package.schema import schema_text
from tests.servers import ROOT


def test_committed_schema_is_that_of_the_model():
    """Editors check model.yaml with what `python -m penstock.registry.package.schema` writes."""
    committed = Path(schema.__file__).with_name("model.schema.json").read_text()
    assert committed == schema_text(), (
        "run: python -m penstock.registry.package.schema > registry/package/model.schema.json"
    )


def test_the_module_writes_the_schema():
    """Run as a program, the module prints the text to its output."""
    run = subprocess.run([sys.executable, "-m", schema.__name__], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == schema_text()


def test_every_field_of_the_schema_is_described():
    """The schema describes every field for authors of packages."""
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


def test_the_schema_has_the_fields_of_a_package():
    """The schema has each field of ModelSpec, admits no other field, and names no Python class as its title."""
    schema = json.loads(schema_text())
    assert set(schema["properties"]) == {*ModelSpec.model_fields, "signature"}
    *signatures, own = schema["oneOf"]
    assert signatures == [{"required": ["signature"]}, {"required": ["inputs", "outputs"]}]
    assert own["properties"] == {"format": {"const": "generate"}}
    assert set(schema["$defs"]["Signature"]["properties"]) == {"inputs", "outputs"}
    assert schema["additionalProperties"] is False
    assert (schema["title"], schema["$schema"]) == ("model.yaml", "https://json-schema.org/draft/2020-12/schema")
    assert [name for name, field in schema["properties"].items() if "title" in field] == []


def test_sample_packages_use_fields_of_the_schema():
    """Each field of a sample's model.yaml is in the schema, and each required field is in the sample."""
    schema = json.loads(schema_text())
    samples = [yaml.safe_load(file.read_text()) for file in sorted((ROOT / "models").glob("*/*/model.yaml"))]
    assert len(samples) >= 2
    for sample in samples:
        assert set(sample) <= set(schema["properties"])
        assert set(schema["required"]) <= set(sample)
