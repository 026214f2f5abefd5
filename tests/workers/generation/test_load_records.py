"""What one load has proven is not proven again for the same folder on the same machine, and for nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.registry.errors import ConfigurationError
from penstock.workers.generation import Engine
from penstock.workers.generation.load_records import LoadRecords
from tests.workers.generation.architectures import decoder
from tests.workers.generation.engines import GREEDY, token_ids, write_model

OPTIONS: dict[str, Any] = {"kv_cache_mb": 4, "packed_linears": "off"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def _forwards(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    """Forwards of a load. Its engine writes what one writes that keeps no records."""
    counted: list[int] = []
    call = torch.nn.Module.__call__

    def count(module: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
        if type(module).__name__.endswith("ForCausalLM"):
            counted.append(1)
        return call(module, *arguments, **named)

    with monkeypatch.context() as watched:
        watched.setattr(torch.nn.Module, "__call__", count)
        engine = Engine.from_pretrained(folder, **{**OPTIONS, **options})
    plain = Engine.from_pretrained(folder, **OPTIONS)
    assert engine.pages.num_usable * engine.pages.page_size >= plain.pages.num_usable * plain.pages.page_size - 64
    assert token_ids(engine.generate([[5, 6, 7]], GREEDY)) == token_ids(plain.generate([[5, 6, 7]], GREEDY))
    return len(counted)


def test_a_proven_folder_is_not_probed_again(folder, tmp_path, monkeypatch):
    """A changed file, another size of pages or another folder of records is; without records each load is."""
    records = tmp_path / "records"
    first = _forwards(folder, monkeypatch, cache_dir=records)
    assert first > 0
    assert _forwards(folder, monkeypatch, cache_dir=str(records)) == 0
    assert _forwards(folder, monkeypatch, cache_dir=records, page_size=8) == first
    assert _forwards(folder, monkeypatch, cache_dir=records, max_model_len=100) == first
    assert _forwards(folder, monkeypatch, cache_dir=tmp_path / "others") == first
    assert _forwards(folder, monkeypatch) == first
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert _forwards(folder, monkeypatch, cache_dir=records) == first


def test_a_refused_folder_is_refused_again(tmp_path):
    """Only what was proven is kept."""
    decoder("GPT-J").save_pretrained(tmp_path / "model")
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="GPTJForCausalLM is not served"):
            Engine.from_pretrained(tmp_path / "model", cache_dir=tmp_path / "records", **OPTIONS)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"facts": {"a": 2}, "found": 1}'])
def test_an_unusable_record_is_as_none(content, tmp_path):
    """Another load may have been interrupted, or the folder may hold anything."""
    records = LoadRecords(tmp_path)
    records.write("kind", {"a": 1}, 1)
    assert records.read("kind", {"a": 1}) == 1
    assert records.read("kind", {"a": 2}) is None
    (path,) = tmp_path.iterdir()
    path.write_text(content)
    assert records.read("kind", {"a": 1}) is None


def test_a_folder_that_others_may_write_proves_nothing(tmp_path):
    """What another user put there must not stand in for a proof, and nothing is written there."""
    folder = tmp_path / "records"
    records = LoadRecords(folder)
    records.write("kind", {}, 1)
    assert records.read("kind", {}) == 1
    folder.chmod(0o777)
    assert records.read("kind", {}) is None
    records.write("other", {}, 1)
    assert len([*folder.iterdir()]) == 1


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path):
    """The load goes on without it."""
    (tmp_path / "file").write_text("")
    records = LoadRecords(tmp_path / "file")
    records.write("kind", {}, 1)
    assert records.read("kind", {}) is None
    with pytest.raises(ConfigurationError, match="cache_dir: found 1"):
        Engine.from_pretrained(tmp_path, cache_dir=1)
