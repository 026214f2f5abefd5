"""model.yaml: what is accepted, and the one line that refuses the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from registry.errors import ConfigurationError, InvalidInput, UnknownModel
from registry.package import ModelSpec, discover, find, load_package

SAMPLES = Path(__file__).parents[2] / "models"

PLAIN: dict[str, Any] = {
    "name": "plain",
    "version": "1",
    "format": "python",
    "entrypoint": "model:build",
    "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 4]}],
    "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 4]}],
}
ENCODER: dict[str, Any] = {
    "name": "plain",
    "version": "1",
    "format": "transformers",
    "source": {"path": "weights"},
    "inputs": [{"name": "text", "dtype": "string", "shape": ["batch"]}],
    "outputs": [{"name": "embedding", "dtype": "float32", "shape": ["batch", 8]}],
}


def write(root: Path, document: object, folder: str = "plain/1") -> Path:
    path = root / folder
    path.mkdir(parents=True, exist_ok=True)
    (path / "model.yaml").write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    (path / "model.py").write_text("def build(): ...\n")
    return path


def test_sample_packages_are_valid_and_survive_the_broker():
    """What a client reads from the broker is what the worker read from the file."""
    found = discover(SAMPLES)
    assert [(ref.name, ref.version) for ref in found] == [("counter", "1"), ("minilm", "1"), ("mlp", "1")]
    for ref in found:
        spec = load_package(ref.path).spec
        assert ModelSpec.from_json(spec.to_json()) == spec


def test_keys_of_a_newer_worker_are_ignored_by_an_older_client(models_root: Path):
    """Rolling upgrades may put fields into the broker that a client does not know yet."""
    spec = load_package(write(models_root, PLAIN)).spec
    document = json.loads(spec.to_json())
    document["stages"] = {"canary": 1}
    document["batching"]["adaptive"] = True
    document["inputs"][0]["codec"] = "raw"
    assert ModelSpec.from_json(json.dumps(document).encode()) == spec


def test_stored_spec_that_is_none_is_one_clear_line():
    """A client that finds something else under the spec's key says so."""
    with pytest.raises(ConfigurationError, match=r"^Stored model spec: "):
        ModelSpec.from_json(b"not json")


def changed(base: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {key: value for key, value in (base | fields).items() if value is not None}


BATCHED = {"length_input": "text", "max_length": 16}
TENSOR = {"name": "x", "dtype": "float32", "shape": ["batch", 4]}

REFUSED: list[tuple[str, object, str]] = [
    ("missing format", changed(PLAIN, format=None), "format: missing, expected a value"),
    (
        "unknown format",
        changed(PLAIN, format="pickle"),
        "format: found \"pickle\", expected 'pytorch', 'transformers' or 'python'",
    ),
    ("misspelt field", changed(PLAIN, entrypont="m:b"), "entrypont: unknown field, expected entrypoint"),
    (
        "misspelt section field",
        changed(PLAIN, batching={"max_batchsize": 1}),
        "batching.max_batchsize: unknown field, expected max_batch_size",
    ),
    (
        "negative",
        changed(PLAIN, batching={"max_batch_size": -1}),
        "batching.max_batch_size: found -1, expected greater than or equal to 0",
    ),
    (
        "string for a number",
        changed(PLAIN, concurrency="2"),
        'concurrency: found "2", expected a valid integer',
    ),
    (
        "python without entry point",
        changed(PLAIN, entrypoint=None),
        "entrypoint: found None, expected module:build and no source for format python",
    ),
    (
        "entry point that climbs",
        changed(PLAIN, entrypoint="../evil:build"),
        "entrypoint: found '../evil:build', expected module:build and no source for format python",
    ),
    (
        "entry point that is not there",
        changed(PLAIN, entrypoint="absent:build"),
        "entrypoint: found 'absent:build', expected a module inside the package",
    ),
    ("other name", changed(PLAIN, name="other"), "name: found 'other', expected 'plain' as the folder says"),
    ("other version", changed(PLAIN, version=2), "version: found '2', expected '1' as the folder says"),
    ("number that lost digits", changed(PLAIN, version=1.1), "version: found 1.1, expected a valid string"),
    (
        "dtype",
        changed(PLAIN, inputs=[TENSOR | {"dtype": "float"}]),
        "inputs[0].dtype: found 'float', expected one of: bool, int8, int16, int32, int64, uint8, uint16, uint32, "
        "uint64, float16, float32, float64, string",
    ),
    (
        "extent",
        changed(PLAIN, inputs=[TENSOR | {"shape": ["batch", 0]}]),
        "inputs[0].shape[1]: found 0, expected an extent of at least 1 or a symbolic name such as batch",
    ),
    (
        "batch elsewhere",
        changed(PLAIN, inputs=[TENSOR | {"shape": [4, "batch"]}]),
        "inputs[0]: shape: found (4, batch), expected batch as the first dimension only",
    ),
    (
        "no batch",
        changed(PLAIN, outputs=[TENSOR | {"shape": [4]}]),
        "shape of x: expected batch as the first dimension unless streams is true",
    ),
    ("two of a name", changed(PLAIN, inputs=[TENSOR, TENSOR]), "inputs: found x, x, expected distinct names"),
    (
        "nothing required",
        changed(PLAIN, inputs=[TENSOR | {"optional": True}]),
        "inputs: found optional ones only, expected one that is required",
    ),
    (
        "range",
        changed(PLAIN, inputs=[TENSOR | {"min": 2, "max": 1}]),
        "inputs[0]: min, max: found 2 > 1, expected min <= max",
    ),
    (
        "length of nothing",
        changed(PLAIN, batching={"length_input": "x"}),
        "batching.length_input: found 'x', expected an input of text or with a symbolic dimension besides batch",
    ),
    (
        "limit without length",
        changed(PLAIN, batching={"max_tokens": 9}),
        "batching.length_input: missing, expected with max_length and max_tokens",
    ),
    (
        "tokens that clients cannot count",
        changed(ENCODER, batching=BATCHED),
        "batching.truncate: found false, expected true exactly for format transformers with a max_length",
    ),
    (
        "source outside",
        changed(ENCODER, source={"path": "../other"}),
        "source: path: found '../other', expected a relative path inside the package",
    ),
    (
        "encoder of numbers",
        changed(ENCODER, inputs=[TENSOR]),
        "inputs: expected one string input of shape (batch,) for format transformers",
    ),
    (
        "streams elsewhere",
        changed(PLAIN, format="pytorch", streams=True),
        "streams: found true, expected it for format python only, with max_batch_size 1",
    ),
    ("a list", [1, 2], "found list, expected a mapping of fields"),
]


@pytest.mark.parametrize(("document", "text"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_refusal_names_the_file_the_field_what_was_found_and_expected(models_root: Path, document: object, text: str):
    """A package that cannot work is refused in one line (IN-023, IN-024, IN-025)."""
    with pytest.raises(ConfigurationError) as refused:
        load_package(write(models_root, document))
    assert str(refused.value) == f"plain/1/model.yaml: {text}"


def test_broken_yaml_names_the_line(models_root: Path):
    """A syntax error points at its line, and YAML tags build no objects."""
    with pytest.raises(ConfigurationError, match=r"^plain/1/model.yaml, line 2: not valid YAML$"):
        load_package(write(models_root, "name: plain\nversion: ]\n"))
    with pytest.raises(ConfigurationError, match="not valid YAML"):
        load_package(write(models_root, "name: !!python/object/apply:os.getcwd []\n"))


def test_folder_without_a_spec_is_refused(models_root: Path):
    """A worker that is pointed at nothing says which file it misses."""
    with pytest.raises(ConfigurationError, match=r"^absent/1/model.yaml: cannot be read"):
        load_package(models_root / "absent" / "1")


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


def test_weights_in_an_installed_package_are_found_without_importing_it(models_root: Path):
    """A `source.package` that is missing is named."""
    assert (load_package(SAMPLES / "minilm" / "1").source_folder() / "model.safetensors").is_file()
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
