"""ES-066, ES-067: the roadmap says of each item whether it is done, and the licence and the sources are named."""

from __future__ import annotations

import re
from hashlib import sha256

import pytest

from tests.servers import ROOT

ROADMAP = (ROOT / "docs" / "roadmap.md").read_text()
STATES = dict(re.findall(r"^\| ([^|]+?) \| (not done|done)\b", ROADMAP, re.MULTILINE))
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""SHA-256 of the licence's text as its authors publish it."""


@pytest.mark.parametrize(
    ("asked", "state"),
    [
        ("hot swap", "done"),
        ("request caching", "done"),
        ("speculative decoding", "done"),
        ("LoRA", "not done"),
        ("tensor parallel", "not done"),
        ("pipeline parallel", "not done"),
        ("AWQ and GPTQ", "not done"),
        ("Ray Serve", "done"),
        ("OpenTelemetry", "done"),
        ("estimates of cost", "done"),
    ],
)
def test_roadmap_tells_done_from_not_done(asked: str, state: str):
    """Each item that other engines list has a line of its own, with its state."""
    assert [found for item, found in STATES.items() if asked in item] == [state]


@pytest.mark.parametrize("name", ["TensorFlow", "TPU", "JAX"])
def test_roadmap_names_what_is_out_of_scope(name: str):
    """ES-006, ES-017, CX-008: hardware and frameworks that other engines have are named, with what is there instead."""
    _, _, rest = ROADMAP.partition("## Out of scope")
    assert name in rest.partition("\n## ")[0]


def test_readme_leads_to_the_roadmap_and_the_licence():
    """A reader of the README finds both."""
    readme = (ROOT / "README.md").read_text()
    assert "(docs/roadmap.md)" in readme
    assert "[Apache-2.0](LICENSE)" in readme


def test_licence_is_apache_2():
    """The text is the published one, word for word."""
    assert sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2


def test_sources_of_ideas_are_named():
    """The projects whose features were collected are named, and that only ideas were taken."""
    _, _, attribution = ROADMAP.partition("## Licence and attribution")
    assert "Inferno" in attribution
    assert "eSurge" in attribution
    assert "none of their code" in attribution
