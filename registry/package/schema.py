"""ModelSpec -> the JSON Schema of model.yaml, for editors and other programs that write packages.

    python -m penstock.registry.package.schema > registry/package/model.schema.json

It describes each field by itself. Only `load_package` checks fields against each other.
"""

from __future__ import annotations

import json
import sys

from pydantic.json_schema import GenerateJsonSchema

from penstock.registry.package import SPEC_FILE, ModelSpec

__all__ = ["schema_text"]


class _WithoutTitles(GenerateJsonSchema):
    """Leaves out the titles of fields, which repeat their names."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False


def schema_text() -> str:
    """The text of registry/package/model.schema.json."""
    schema = ModelSpec.model_json_schema(schema_generator=_WithoutTitles)
    named = {"$schema": GenerateJsonSchema.schema_dialect} | schema | {"title": SPEC_FILE}
    return json.dumps(named, indent=2) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
