"""ModelSpec -> the JSON Schema of model.yaml, for editors and other programs that write packages.

    python -m penstock.registry.package.schema > registry/package/model.schema.json

It says what each field means and may be; what fields mean for each other is checked by `load_package` alone.
"""

from __future__ import annotations

import json
import sys

from pydantic.json_schema import GenerateJsonSchema

from penstock.registry.package import SPEC_FILE, ModelSpec

__all__ = ["schema_text"]


class _WithoutTitles(GenerateJsonSchema):
    """A field's title would only repeat its name."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False


def schema_text() -> str:
    """The schema as it is committed in registry/package/model.schema.json."""
    schema = ModelSpec.model_json_schema(schema_generator=_WithoutTitles)
    named = {"$schema": GenerateJsonSchema.schema_dialect} | schema | {"title": SPEC_FILE}
    return json.dumps(named, indent=2) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
