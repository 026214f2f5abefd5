"""CF-001: the sources of settings have one order, for every key, in a process that has all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml

from penstock.registry.settings import Settings
from tests.registry.test_settings import READABLE, as_text, effective, nested, plain, walk
from tests.servers import ROOT

WALK = """
import json, os, sys
from pathlib import Path
from penstock.registry.settings import Settings
from tests.registry.test_settings import READABLE, effective

def walked(**arguments):
    settings = Settings.load(**arguments)
    steps.append({setting.key: effective(settings, setting.key) for setting in READABLE})

steps = []
walked(overrides=json.load(sys.stdin))
walked()
for setting in READABLE:
    del os.environ[setting.variable]
walked()
del os.environ["PENSTOCK_CONFIG"]
walked()
Path("pyproject.toml").unlink()
walked()
print(json.dumps(steps))
"""


def _merged(tables: list[dict[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for table in tables:
        for name, value in table.items():
            section = whole.get(name)
            if isinstance(section, dict) and isinstance(value, dict):
                whole[name] = _merged([section, value])
            else:
                whole[name] = value
    return whole


def _pyproject(values: dict[str, object]) -> str:
    sections: defaultdict[str, list[str]] = defaultdict(list)
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        sections[f"tool.penstock.inference.{section}".removesuffix(".")].append(f"{name} = {json.dumps(value)}")
    return "\n".join(f"[{section}]\n" + "\n".join(lines) for section, lines in sections.items())


def test_every_key_walks_from_the_constructor_to_its_default(tmp_path: Path):
    """A process has a value of each key in each source. Each removed source uncovers the next one, for all keys."""
    values = {setting.key: walk(setting) for setting in READABLE}
    constructor, environment, in_yaml, in_toml = (
        {key: four[source] for key, four in values.items()} for source in range(4)
    )
    (tmp_path / "pyproject.toml").write_text(_pyproject(in_toml))
    config = tmp_path / "penstock.yaml"
    config.write_text(yaml.safe_dump(_merged([nested(key, value) for key, value in in_yaml.items()])))
    variables = {setting.variable: as_text(environment[setting.key]) for setting in READABLE}
    ended = subprocess.run(
        [sys.executable, "-c", WALK],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PENSTOCK_CONFIG": str(config), **variables},
        input=json.dumps(constructor),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    by_source = [{key: plain(four[source]) for key, four in values.items()} for source in range(4)]
    defaults = {setting.key: effective(Settings(), setting.key) for setting in READABLE}
    assert json.loads(ended.stdout) == [*by_source, defaults]
