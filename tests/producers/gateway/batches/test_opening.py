"""The settings of the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.producers.gateway.batches.file_store import FileStore
from penstock.producers.gateway.batches.opening import open_store
from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Settings


def opened(home: Path, **environment: str) -> FileStore | None:
    """The store of these settings."""
    return open_store(Settings.load(environ={"PENSTOCK_HOME": str(home), **environment}))


def test_files_live_as_long_as_the_setting_says(tmp_path: Path):
    """PENSTOCK_INFERENCE_BATCHES_KEEP_S is the time from the upload to the deletion."""
    store = opened(tmp_path, PENSTOCK_INFERENCE_BATCHES_KEEP_S="90")
    assert store is not None
    upload = store.upload()
    upload.append(b"{}")
    file = store.keep(upload, "a", "name", "batch")
    assert file.expires_at - file.created_at == 90


def test_nothing_is_made_before_the_first_upload(tmp_path: Path):
    """A gateway that nobody sends files to needs no folder."""
    store = opened(tmp_path)
    assert store is not None
    assert list(tmp_path.iterdir()) == []
    store.upload().discard()
    assert (tmp_path / "files" / "index.db").exists()


@pytest.mark.parametrize("mode", ["ephemeral", "persisted_encrypted", "hashes_only"])
def test_the_privacy_mode_decides(tmp_path: Path, mode: str):
    """Plain files, sealed ones that need a key, or none at all."""
    settings = {"PENSTOCK_INFERENCE_PRIVACY_MODE": mode, "PENSTOCK_INFERENCE_PRIVACY_SEAL_PAYLOADS": "off"}
    if mode == "persisted_encrypted":
        with pytest.raises(ConfigurationError, match="PENSTOCK_L2_ENCRYPTION_KEY"):
            opened(tmp_path, **settings)
    else:
        assert (opened(tmp_path, **settings) is None) == (mode == "hashes_only")
