"""Functions that test_saving.py saves: a package gets this file."""

from __future__ import annotations

from collections.abc import Callable


def double(inputs):
    """2 x."""
    return {"y": inputs["x"] * 2}


def forgetful(inputs):
    """Another output than the one that is declared."""
    return {"z": inputs["x"]}


def build():
    """The module of the tests, without its weights."""
    import torch

    return torch.nn.Linear(4, 4)


def inner() -> Callable[[object], object]:
    """A function of this function."""

    def within(inputs):
        return inputs

    return within
