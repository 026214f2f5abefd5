"""The lineage of a version: training data, code, hyperparameters, metrics, parent.

The operator states it at registration. The registry stores it with the version; the first production freezes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from penstock.registry.errors import InvalidInput, shown

__all__ = ["ModelLineage"]

_MAX_BYTES: Final = 64 * 1024
Name = Annotated[str, Field(max_length=500)]


class ModelLineage(BaseModel):
    """The origin of a version. Every field is optional."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    data_version: Name = ""
    code_hash: Name = ""
    """Usually the commit of the training code."""
    hyperparameters: dict[str, JsonValue] = {}
    training_metrics: dict[str, float] = {}
    parent_model: Name | None = None
    """The version that this one was trained from, such as `minilm/1`."""

    @model_validator(mode="after")
    def _is_small(self) -> ModelLineage:
        if (size := len(self.model_dump_json())) > _MAX_BYTES:
            raise ValueError(f"found {size} bytes, expected at most {_MAX_BYTES}")
        return self

    @classmethod
    def parse(cls, fields: Mapping[str, object]) -> ModelLineage:
        """From plain data. Raises InvalidInput, in one line, for the first unusable field."""
        try:
            return cls.model_validate(dict(fields))
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(shown, problem["loc"]))
            expected = (
                f". Expected one of: {', '.join(cls.model_fields)}" if problem["type"] == "extra_forbidden" else ""
            )
            raise InvalidInput(f"Lineage{': ' * bool(field)}{field}: {problem['msg']}{expected}") from None
