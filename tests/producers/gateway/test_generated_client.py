"""A client that openapi-python-client generates from our OpenAPI document submits a job and reads its outputs."""

from __future__ import annotations

import importlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.producers.gateway.conftest import GatewayStack
from tests.servers import require_module

ROW = [1.0, 2.0, 3.0, 4.5]
PACKAGE = "generated_penstock_client"


@pytest.fixture
def generated(http: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the generated package by its name."""
    require_module("openapi_python_client")
    (tmp_path / "openapi.json").write_bytes(http.get("/openapi.json").content)
    command = [sys.executable, "-m", "openapi_python_client", "generate", "--path", "openapi.json"]
    more = ["--output-path", PACKAGE, "--meta", "none", "--config", "config.json"]
    # It would run ruff on the files that it wrote. Without the override it leaves MessagePack out, with a warning.
    overrides = {"application/msgpack": "application/octet-stream"}
    (tmp_path / "config.json").write_text(json.dumps({"post_hooks": [], "content_type_overrides": overrides}))
    done = subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stdout + done.stderr, done.stdout + done.stderr
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name: importlib.import_module(f"{PACKAGE}.{name}")


@pytest.mark.slow
def test_a_generated_client_works(stack: GatewayStack, generated: Any):
    """Submit, wait, read and cancel; a refusal comes as a problem with its fields."""
    with generated("client").Client(base_url=stack.gateway.url, timeout=httpx.Timeout(60)) as client:
        fields = generated("models").JobFields.from_dict({"model": "double", "inputs": {"x": [ROW]}})
        submit = generated("api.default.post_v1_jobs")
        accepted = submit.sync(client=client, body=fields)
        assert accepted.status == "queued"
        ended = generated("api.default.get_v1_jobs_id").sync(accepted.id, client=client, wait="60")
        assert (ended.status, ended.outputs["y"]["data"]) == ("completed", [[2.0, 4.0, 6.0, 9.0]])
        at_once = submit.sync(client=client, body=fields, prefer="wait=60")
        assert (at_once.status, at_once.outputs["y"]["data"]) == ("completed", [[2.0, 4.0, 6.0, 9.0]])
        cancelled = generated("api.default.delete_v1_jobs_id").sync(accepted.id, client=client)
        assert cancelled.status == "too_late"
        predict = generated("api.default.post_v1_models_name_predict")
        asked = generated("models").PredictFields.from_dict({"inputs": {"x": [ROW]}})
        assert predict.sync("double", client=client, body=asked).outputs["y"]["shape"] == [1, 4]
        refused = predict.sync("nothing", client=client, body=asked)
        assert (refused.status, refused.title) == (404, "model not found or not loaded")
        models = generated("api.default.get_v1_models").sync(client=client)
        assert "double" in [model.id for model in models.data]
        lines = b'{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {}}'
        content = generated("types").File(io.BytesIO(lines), "lines.jsonl", "application/jsonl")
        names = generated("models")
        anchor = names.PostV1FilesUploadExpiresAfteranchor.CREATED_AT
        form = names.PostV1FilesUpload(names.PostV1FilesUploadPurpose.BATCH, content, anchor, 3600)
        file = generated("api.default.post_v1_files").sync(client=client, body=form)
        assert (file.bytes_, file.filename, file.expires_at - file.created_at) == (len(lines), "lines.jsonl", 3600)
        stored = generated("api.default.get_v1_files_id_content").sync_detailed(file.id, client=client)
        assert stored.content == lines
