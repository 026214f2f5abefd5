"""ModelSpec -> the JSON Schema of model.yaml, for editors and other programs that write packages.

    python -m penstock.registry.package.schema > registry/package/model.schema.json

It describes each field by itself. Only `load_package` checks fields against each other.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from penstock.registry.package import SPEC_FILE, ModelSpec
from penstock.registry.package.signature import TensorSpec
from penstock.registry.package.spec_sections import Section

__all__ = ["schema_text"]


class _WithoutTitles(GenerateJsonSchema):
    """Leaves out the titles of fields, which repeat their names."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False


def schema_text() -> str:
    """The text of registry/package/model.schema.json."""
    schema = ModelSpec.model_json_schema(schema_generator=_WithoutTitles)
    _describe(schema, ModelSpec)
    sections: list[type[BaseModel]] = [TensorSpec, *Section.__subclasses__()]
    for section in sections:
        if section is not ModelSpec:
            _describe(schema["$defs"][section.__name__], section)
    _add_signature(schema)
    named = {"$schema": GenerateJsonSchema.schema_dialect} | schema | {"title": SPEC_FILE}
    return json.dumps(named, indent=2) + "\n"


def _add_signature(schema: dict[str, Any]) -> None:
    """The section `signature`, or its two fields beside the others."""
    fields = {name: schema["properties"][name] for name in ("inputs", "outputs")}
    schema["$defs"]["Signature"] = {
        "additionalProperties": False,
        "description": "The inputs and outputs of the model.",
        "properties": fields,
        "required": list(fields),
        "title": "Signature",
        "type": "object",
    }
    section = {"$ref": "#/$defs/Signature", "description": "The inputs and outputs of the model."}
    beside = {
        name: field | {"description": f"{field['description']} Only without `signature`."}
        for name, field in fields.items()
    }
    properties = schema["properties"]
    before = [name for name in properties if name not in fields]
    place = list(properties).index("inputs")
    schema["properties"] = {
        **{name: properties[name] for name in before[:place]},
        "signature": section,
        **beside,
        **{name: properties[name] for name in before[place:]},
    }
    schema["required"] = [name for name in schema["required"] if name not in fields]
    # A package of format `generate` declares neither.
    own = {"properties": {"format": {"const": "generate"}}, "required": ["format"]}
    schema["oneOf"] = [{"required": ["signature"]}, {"required": list(fields)}, own]


def _describe(schema: dict[str, Any], model: type[BaseModel]) -> None:
    for name, text in _docstrings(model).items():
        described = {**schema["properties"][name], "description": text}
        # The generator's order.
        schema["properties"][name] = dict(sorted(described.items()))


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The string below each field of a class. pydantic could read these strings, too, in every process that submits."""
    body = ast.parse(inspect.getsource(model)).body[0]
    statements = body.body if isinstance(body, ast.ClassDef) else []
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in pairwise(statements)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


if __name__ == "__main__":
    sys.stdout.write(schema_text())
