"""Arrays that modules keep outside of their model: which of them forwards change."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch

from penstock.workers.runtime.module_arrays import ModuleArrays


def module_of(**names: object) -> ModuleType:
    """A module with these globals."""
    module = ModuleType("package.model")
    vars(module).update(names)
    return module


def test_what_stays_is_no_change():
    """Also an array without elements, one of objects, and one that is not contiguous."""
    module = module_of(
        table=np.arange(4),
        words=np.array(["a", None], object),
        turned=torch.arange(6).reshape(2, 3).T,
        none=np.zeros(0),
    )
    assert ModuleArrays([module]).changed() == []


def test_each_array_that_changes_is_named():
    """Globals, attributes of the module's classes, and what lists, tuples and dicts hold; not what others own."""

    class Layer:
        scratch = torch.zeros(2)

    class Foreign:
        scratch = torch.zeros(2)

    Layer.__module__ = "package.model"
    module = module_of(
        kept=np.zeros(2),
        changed=np.zeros(2),
        Layer=Layer,
        Foreign=Foreign,
        pair=(torch.zeros(1), 1),
        by={"a": np.zeros(1)},
    )
    arrays = ModuleArrays([module])
    for array in (module.changed, Layer.scratch, Foreign.scratch, module.pair[0], module.by["a"]):
        array[0] = 1
    vars(module)["later"] = torch.zeros(1)
    assert arrays.changed() == ["Layer.scratch", "by['a']", "changed", "later", "pair[0]"]


def test_what_cannot_be_read_fails_no_load():
    """Sparse, nested and meta tensors have no bytes of their own here. Dates and times have."""
    days = np.array(["2026-11-28"], "datetime64[D]")
    module = module_of(sparse=torch.eye(3).to_sparse(), meta=torch.empty(2, device="meta"), days=days)
    arrays = ModuleArrays([module])
    assert arrays.changed() == []
    days[0] = np.datetime64("2026-11-29")
    assert arrays.changed() == ["days"]
