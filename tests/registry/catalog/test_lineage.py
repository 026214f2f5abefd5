"""ModelLineage: the origin of a version, as an operator states it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from penstock.registry.catalog.lineage import ModelLineage
from penstock.registry.errors import InvalidInput

FIELDS = {
    "data_version": "reviews-2026-10",
    "code_hash": "3f2a91c",
    "hyperparameters": {"rate": 0.001, "layers": [128, 64], "name": "größer", "warm": True, "seed": None},
    "training_metrics": {"accuracy": 0.9731, "loss": 1e-7},
    "parent_model": "minilm/1",
}


def test_every_field_is_optional():
    """An operator may state nothing; a single field is a lineage, too."""
    assert ModelLineage.parse({}) == ModelLineage()
    assert ModelLineage.parse({"code_hash": "3f2a91c"}).data_version == ""


def test_a_lineage_is_what_was_stated():
    """Each field comes back unchanged, also through JSON, where the registry keeps it."""
    lineage = ModelLineage.parse(FIELDS)
    assert lineage.model_dump() == FIELDS
    assert ModelLineage.model_validate_json(lineage.model_dump_json()) == lineage


def test_a_lineage_does_not_change():
    """A registered value cannot be edited in memory."""
    lineage = ModelLineage.parse(FIELDS)
    with pytest.raises(ValidationError, match="frozen"):
        lineage.code_hash = "other"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"code": "3f2a91c"}, "Lineage: code: .*Expected one of: data_version, code_hash"),
        ({"code_hash": 7}, "Lineage: code_hash: "),
        ({"training_metrics": {"loss": float("nan")}}, "Lineage: training_metrics.loss: .*finite"),
        ({"training_metrics": {"loss": "low"}}, "Lineage: training_metrics.loss: "),
        ({"hyperparameters": {"rate": float("inf")}}, "Lineage"),
        ({"hyperparameters": {"words": ["x" * 70_000]}}, "Lineage: .*expected at most 65536"),
        ({"parent_model": "x" * 501}, "Lineage: parent_model: "),
        ({"a\nb" * 100: 1}, "Lineage: "),
    ],
)
def test_bad_lineage_is_refused_by_field(fields: dict[str, Any], told: str):
    """The error is one short line that names the field: JSON has no NaN, and a lineage has at most 64 KiB."""
    with pytest.raises(InvalidInput, match=told) as refused:
        ModelLineage.parse(fields)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500
