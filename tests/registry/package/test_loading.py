"""Packages on the disk: found, read, and refused in one line. ModelSpec itself is in test_spec.py."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from penstock.registry.errors import ConfigurationError, InvalidInput, UnknownModel
from penstock.registry.package import discover, find, load_package
from tests.registry.package.documents import ENCODER, PLAIN, SCRIPTED, changed, nested, write
from tests.servers import ROOT


def test_broken_yaml_names_the_line(models_root: Path):
    """A syntax error points at its line, and YAML tags build no objects."""
    with pytest.raises(ConfigurationError, match=r"^plain/1/model.yaml, line 2: not valid YAML$"):
        load_package(write(models_root, "name: plain\nversion: ]\n"))
    with pytest.raises(ConfigurationError, match="not valid YAML"):
        load_package(write(models_root, "name: !!python/object/apply:os.getcwd []\n"))


def test_field_that_is_there_twice_is_refused(models_root: Path):
    """YAML's parser would take the last one without a word (IN-024); what a merge key brings may be said again."""
    text = "\n".join(f"{field}: {json.dumps(value)}" for field, value in PLAIN.items())
    for more, problem in (
        ("concurrency: 2\nconcurrency: 3\n", "line 8: found concurrency twice, expected distinct names"),
        ("batching: {max_bytes: 1, max_bytes: 2}\n", "line 7: found max_bytes twice, expected distinct names"),
    ):
        with pytest.raises(ConfigurationError) as refused:
            load_package(write(models_root, f"{text}\n{more}"))
        assert str(refused.value) == f"plain/1/model.yaml, {problem}"
    merged = f"{text}\npolicy: {{default: &d {{window_ms: 1}}, endpoints: {{e: {{<<: *d, window_ms: 2}}}}}}\n"
    assert load_package(write(models_root, merged)).spec.policy_for("e").window_ms == 2


def test_folder_without_a_spec_is_refused(models_root: Path):
    """A worker that is pointed at nothing says which file it misses, and where it belongs."""
    with pytest.raises(ConfigurationError) as refused:
        load_package(models_root / "absent" / "1")
    assert str(refused.value) == (
        "absent/1/model.yaml: cannot be read (No such file or directory), expected it in <models root>/<name>/<version>"
    )


def test_folder_may_be_named_by_a_detour(models_root: Path):
    """Name and version are those of the folder that a path with `..` in it leads to."""
    folder = write(models_root, PLAIN)
    assert load_package(folder / ".." / "1").spec.reference == "plain/1"


def test_source_in_a_module_that_was_not_imported_is_refused(models_root: Path):
    """`__main__` is no installed package, and neither is a single file: one line, no traceback."""
    for module in ("__main__", "json_without_a_folder", "this"):
        package = load_package(write(models_root, changed(ENCODER, source={"package": module})))
        with pytest.raises(ConfigurationError, match=rf"source\.package: {module} is not installed, expected an inst"):
            package.manifest()


def test_code_outside_the_trusted_roots_is_refused(models_root: Path, tmp_path: Path):
    """A package that runs code counts only under a trusted root, wherever a link pretends it lies."""
    real = write(tmp_path / "elsewhere", PLAIN)
    (models_root / "plain").mkdir()
    link = models_root / "plain" / "1"
    link.symlink_to(real)
    with pytest.raises(ConfigurationError, match="outside the trusted roots"):
        load_package(link)
    assert load_package(link, [tmp_path / "elsewhere"]).spec.name == "plain"


def test_entry_point_that_leads_out_of_the_package_is_refused(models_root: Path):
    """A package's code is what lies in its folder, not what a link in it points at."""
    folder = write(models_root, PLAIN)
    (models_root / "shared.py").write_text("def build(): ...\n")
    (folder / "model.py").unlink()
    (folder / "model.py").symlink_to(models_root / "shared.py")
    with pytest.raises(ConfigurationError, match="expected a module inside the package"):
        load_package(folder)


def test_weights_outside_the_package_are_refused(models_root: Path, tmp_path: Path):
    """A link inside the package must not lead out of it."""
    folder = write(models_root, ENCODER)
    (tmp_path / "elsewhere").mkdir()
    (folder / "weights").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        ConfigurationError, match=r"source\.path: found 'weights', expected a folder inside the package"
    ):
        load_package(folder).source_folder()


def test_links_that_lead_in_a_circle_are_refused(models_root: Path):
    """A broken copy is one line about the package: its code, its weights, their folder, any other file."""
    for name, document, link, text in (
        ("code", PLAIN, "model.py", "entrypoint: found 'model:build', expected a module inside the package"),
        ("scripted", SCRIPTED, "model.pt", "weights: found 'model.pt', expected a file of the package"),
        ("encoder", ENCODER, "weights", "source.path: found 'weights', expected a folder inside the package"),
    ):
        folder = write(models_root, document | {"name": name}, f"{name}/1")
        (folder / link).unlink(missing_ok=True)
        (folder / link).symlink_to(link)
        with pytest.raises(ConfigurationError) as refused:
            load_package(folder).source_folder()
        assert str(refused.value) == f"{name}/1/model.yaml: {text}"
    folder = write(models_root, PLAIN)
    (folder / "notes").symlink_to("notes")
    with pytest.raises(ConfigurationError, match=r"^plain/1: file notes: cannot be read \("):
        load_package(folder).manifest()


def test_a_file_system_that_does_not_answer_is_one_line(models_root: Path):
    """Here a name that is too long for it."""
    folder = write(models_root, SCRIPTED | {"weights": f"{'x' * 300}.pt"})
    with pytest.raises(ConfigurationError, match=r"^plain/1: x{80}: cannot be read \(File name too long\)$"):
        load_package(folder)
    with pytest.raises(ConfigurationError, match=r"^Models root 'x{300}' cannot be read \(File name too long\)$"):
        discover(models_root / ("x" * 300))


def test_weights_in_an_installed_package_are_found_without_importing_it(models_root: Path):
    """A `source.package` that is missing is named."""
    assert (load_package(ROOT / "models" / "minilm" / "1").source_folder() / "model.safetensors").is_file()
    folder = write(models_root, changed(ENCODER, source={"package": "no_such_package", "path": "model"}))
    with pytest.raises(ConfigurationError, match=r"source\.package: no_such_package is not installed"):
        load_package(folder).source_folder()


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


def test_folders_that_begin_with_a_dot_are_no_packages(models_root: Path):
    """A program that is killed leaves its unfinished package there."""
    write(models_root, PLAIN)
    for folder in (".new-a1b2/package", "plain/.unfinished"):
        write(models_root, PLAIN, folder)
    assert [(ref.name, ref.version) for ref in discover(models_root)] == [("plain", "1")]
    assert [ref.version for ref in discover(models_root, "plain")] == ["1"]


def test_a_pipe_or_a_flood_in_the_place_of_a_model_yaml_is_refused(tmp_path: Path):
    """Neither is waited for, nor read into memory."""
    folder = tmp_path / "piped" / "1"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "model.yaml")
    with pytest.raises(ConfigurationError, match="regular file"):
        load_package(folder)
    flood = tmp_path / "flood" / "1"
    flood.mkdir(parents=True)
    with (flood / "model.yaml").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigurationError, match="flood/1"):
        load_package(flood)


def test_signature_is_a_section_or_its_fields_stand_alone(models_root: Path):
    """`signature` with inputs and outputs below it means the same as the two fields beside the others (IN-025)."""
    flat = load_package(write(models_root, PLAIN)).spec
    section = load_package(write(models_root, nested(PLAIN))).spec
    assert section == flat
    assert section.to_json() == flat.to_json()


def test_files_of_the_usual_names_need_not_be_named(models_root: Path):
    """model.ts, model.pt, model.onnx and model.safetensors are found; two of one format are ambiguous (IN-022)."""
    for kind, file in (("torchscript", "model.ts"), ("torchscript", "model.pt"), ("onnx", "model.onnx")):
        folder = write(models_root, changed(SCRIPTED, format=kind, weights=None, name=f"{kind}"), f"{kind}/1")
        for old in folder.glob("model.[tp][st]"):
            old.unlink()
        (folder / file).touch()
        assert load_package(folder).spec.weights == file
    folder = write(models_root, PLAIN | {"format": "pytorch"})
    assert load_package(folder).spec.weights is None
    (folder / "model.safetensors").touch()
    assert load_package(folder).spec.weights == "model.safetensors"
    encoder = write(models_root, changed(ENCODER, source=None))
    assert load_package(encoder).source_folder() == encoder
    (models_root / "torchscript" / "1" / "model.ts").touch()
    with pytest.raises(ConfigurationError) as refused:
        load_package(models_root / "torchscript" / "1")
    assert str(refused.value) == (
        "torchscript/1/model.yaml: weights: found model.ts and model.pt, expected one, or weights: model.ts"
    )


def test_file_that_is_named_comes_before_the_usual_one(models_root: Path):
    """`weights` decides, whatever else is in the package."""
    folder = write(models_root, changed(SCRIPTED, weights="best.pt"))
    for name in ("best.pt", "model.pt", "model.ts"):
        (folder / name).touch()
    assert load_package(folder).spec.weights == "best.pt"
