"""Packages under a models root: which there are, and which version a name means."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.registry.errors import ConfigurationError, InvalidInput, UnknownModel
from penstock.registry.package import discover, find
from tests.registry.package.test_package import PLAIN, write


def test_highest_version_is_found_by_number(models_root: Path):
    """10 is above 9, and a release above its candidate."""
    for version in ("9", "10", "2.0-rc1", "11-rc1"):
        write(models_root, PLAIN | {"version": version}, f"plain/{version}")
    assert [ref.version for ref in discover(models_root)] == ["2.0-rc1", "9", "10", "11-rc1"]
    write(models_root, PLAIN | {"version": "11"}, "plain/11")
    assert find(models_root, "plain").version == "11"
    assert find(models_root, "plain", "9").path == models_root / "plain" / "9"


def test_unknown_model_says_which_versions_exist(models_root: Path):
    """Neither a missing model nor a missing version is an empty answer; a name that climbs is refused."""
    write(models_root, PLAIN)
    with pytest.raises(UnknownModel, match=r"^Unknown model 'absent'\. It has no package$"):
        find(models_root, "absent")
    with pytest.raises(UnknownModel, match=r"^Unknown model 'plain/2'\. Expected version: 1$"):
        find(models_root, "plain", "2")
    with pytest.raises(InvalidInput, match="Bad model name"):
        find(models_root, "../plain")


def test_missing_models_root_is_a_configuration_error(tmp_path: Path):
    """A worker that is pointed at no folder does not start empty."""
    with pytest.raises(ConfigurationError, match="Models root 'absent' is not a folder"):
        discover(tmp_path / "absent")


def test_versions_lie_side_by_side_and_a_root_lists_only_its_own(models_root: Path, tmp_path: Path):
    """Another models root has other models, each with its versions (IN-013, IN-022)."""
    for version in ("1", "2"):
        write(models_root, PLAIN | {"version": version}, f"plain/{version}")
    write(tmp_path / "other", PLAIN | {"name": "else"}, "else/1")
    assert [(ref.name, ref.version) for ref in discover(models_root)] == [("plain", "1"), ("plain", "2")]
    assert [(ref.name, ref.version) for ref in discover(tmp_path / "other")] == [("else", "1")]
