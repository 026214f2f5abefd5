"""What the documents say is so: links lead somewhere; commands, settings, metrics, files and messages exist."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

import penstock
from penstock.compose.cli import main
from penstock.registry.broker.base import State
from penstock.registry.metrics import ENGINE_METRICS, GATEWAY_METRICS, METRICS, RAY_SERVE_METRICS
from penstock.registry.package import ModelSpec
from penstock.registry.settings import CONFIG_VARIABLE, catalogue
from penstock.testing import plugin
from tests.architecture.documents import Document, documents, generated, script, written
from tests.architecture.threads import started_threads
from tests.servers import ROOT, require
from tests.sources import nodes

README_BYTES = 12_000
ON_THE_HOST = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
"""Read where the repository is hosted: the generated pages are not there."""
SETTINGS = {setting.key: setting for setting in catalogue()}
VARIABLES = {setting.variable: setting for setting in catalogue()}
ROOMS = ("compose", "docs", "models", "producers", "registry", "safety", "testing", "tests", "workers")
PRIVATE_WORDS = re.compile(
    r"\b(whoever|somebody|nobody|anybody|goldens|doors?|obey(?:s|ed)?|flips?|flipped|put aside|buried|bury|"
    r"believe[sd]?|to be had|kept answers?|wanted outputs|for company)\b",
    re.IGNORECASE,
)
"""Their common words: reference samples, endpoint, accept, cut over, dead-lettered, trust, cached, batching delay."""
MADE_BY_THE_READER = {"compose/.env", "models/flowers", "models/flowers/1", "models/minilm/2", "models/sentiment/2"}
every_document = pytest.mark.parametrize("path", sorted(written()))


@cache
def shipped_literals() -> str:
    """The string literals of the shipped code, with `{}` for what f-strings insert."""
    texts: list[str] = []
    for room in ("compose", "producers", "registry", "safety", "testing", "workers"):
        for source in sorted((ROOT / room).rglob("*.py")):
            for node in nodes(source):
                if isinstance(node, ast.JoinedStr):
                    texts.append("".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    return "\n".join(texts)


def test_readme_is_short():
    """A newcomer reads one screen after the other and reaches the end."""
    assert len((ROOT / "README.md").read_bytes()) <= README_BYTES


def resolve(document: Document, link: str) -> tuple[str, str]:
    """The path that a relative link leads to, from the repository's root, and the anchor."""
    target, _, anchor = link.partition("#")
    place = os.path.normpath(document.path.parent / target) if target else str(document.path)
    return place, anchor


@every_document
def test_links_lead_somewhere(path: str):
    """Each relative link names a document or a file that is there, and an anchor that its document has."""
    document, known = written()[path], written() if path in ON_THE_HOST else documents()
    broken = []
    for link in document.links:
        if "://" in link:
            continue
        place, anchor = resolve(document, link)
        is_there = place in known or (ROOT / place).is_file()
        if not is_there or (anchor and anchor not in known[place].anchors):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("path", sorted({*written()} - {"CONTRIBUTING.md"}))
def test_words_are_those_of_the_field(path: str):
    """No private word stands where the field has a common one; CONTRIBUTING.md quotes some."""
    assert PRIVATE_WORDS.findall(written()[path].prose) == []


def test_every_page_is_in_the_navigation():
    """The site shows each page of docs/ once, and no page that is not there."""
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"(?:- |: )([\w/-]+\.md)$", text, re.MULTILINE)
    assert sorted(f"docs/{page}" for page in listed) == sorted(each for each in documents() if each.startswith("docs/"))


def test_the_site_builds(tmp_path: Path):
    """MkDocs in strict mode: a warning is an error."""
    require(importlib.util.find_spec("material"), "mkdocs-material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site" / "reference" / "settings.html").is_file()
    pages = [page.read_text() for page in (tmp_path / "site").rglob("*.html")]
    assert [url for page in pages for url in re.findall(r'(?:src|href)="(https?:[^"]*)"', page)] == []


@every_document
def test_commands_exist(path: str):
    """Each `penstock` command that a document shows is one, with the options that it shows."""
    for command in written()[path].commands():
        words = shlex.split(command.replace("...", ""), comments=True)[1:]
        shown = CliRunner().invoke(main, [*words, "--help"])
        assert shown.exit_code == 0, f"{command}\n{shown.output}"


@every_document
def test_make_targets_exist(path: str):
    """Each `make` target that a document shows is one."""
    known = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [line for block in written()[path].blocks for line in block.text.splitlines()]
    shown = [words.split()[1] for words in (*written()[path].spans, *lines) if words.startswith("make ")]
    assert [target for target in shown if target not in known] == []


@every_document
def test_variables_exist(path: str):
    """Each PENSTOCK_ variable that a document names is a setting."""
    named = set(re.findall(r"PENSTOCK_[A-Z0-9_]+\b(?!_?\.\.\.)", written()[path].text)) - {"PENSTOCK_INFERENCE_"}
    assert named - {*VARIABLES, CONFIG_VARIABLE} == set()


@every_document
def test_setting_keys_exist(path: str):
    """Each dotted key that a document names is a setting, or a field of model.yaml."""
    sections = {key.partition(".")[0] for key in SETTINGS if "." in key}
    fields = {f"{name}.{field}" for name in ("batching", "codecs") for field in fields_of(name)}
    shown = [span.split()[0] for span in written()[path].spans if re.match(r"[a-z_]+\.[a-z_.]+(\*)?( |$)", span)]
    missing = [
        key
        for key in shown
        if key.partition(".")[0] in sections
        and not any(each == key or (key.endswith("*") and each.startswith(key[:-1])) for each in {*SETTINGS, *fields})
    ]
    assert missing == []


def fields_of(name: str) -> set[str]:
    """The fields of one mapping of model.yaml."""
    return set(getattr(ModelSpec.model_fields[name].annotation, "model_fields", {}))


def test_defaults_are_those_of_the_code():
    """Tables of settings say the defaults that hold, where they say a value."""
    rows = re.compile(r"^\| ((?:`[A-Z0-9_]+`(?:, )?)+) \| ([^|]*) \|", re.MULTILINE)
    compared = 0
    for names, said in (row for document in written().values() for row in rows.findall(document.text)):
        variables = [name if name in VARIABLES else f"PENSTOCK_INFERENCE_{name}" for name in re.findall(r"\w+", names)]
        if not all(variable in VARIABLES and VARIABLES[variable].default is not None for variable in variables):
            continue
        for variable, text in zip(variables, re.split(r", (?=\d)", said), strict=True):
            if value := re.match(r"`?([\w.]+)`?(:|$)", text.strip()):
                assert value[1] == shown(VARIABLES[variable].default), variable
                compared += 1
    assert compared >= 20


def shown(default: object) -> str:
    """A default as documents write it."""
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:.12g}" if isinstance(default, float) else str(default) or "empty"


@every_document
def test_metrics_exist(path: str):
    """Each metric that a document names is in the table; the fixtures for pytest have the same prefix."""
    spans = [span for span in written()[path].spans if re.fullmatch(r"(penstock|infer)_[a-z_]+", span)]
    known = {metric.name for metric in (*METRICS, *GATEWAY_METRICS, *ENGINE_METRICS, *RAY_SERVE_METRICS)}
    assert [span for span in spans if span not in {*known, *plugin.__all__}] == []


@every_document
def test_files_exist(path: str):
    """Each file or folder of the repository that a document names is there."""
    document = written()[path]
    spans = [span for span in document.spans if re.fullmatch(rf"({'|'.join(ROOMS)})(/[\w.-]+)+/?", span)]
    titles = {block.file for each in written().values() for block in each.blocks}
    promised = {*titles, *(str(Path(title).parent) for title in titles), *generated(), *MADE_BY_THE_READER}
    assert [span for span in spans if not (ROOT / span).exists() and span.rstrip("/") not in promised] == []


def test_rooms_of_the_readme_exist():
    """The folders that the README draws are there."""
    rooms = re.findall(r"^(\w+)/ {2,}", written()["README.md"].text, re.MULTILINE)
    assert [room for room in rooms if not (ROOT / room).is_dir()] == []
    assert len(rooms) >= 7


def test_imports_from_penstock_exist():
    """Each name that a document imports from the package is one of its public names."""
    text = "\n".join(document.text for document in written().values())
    names = {name.strip() for line in re.findall(r"from penstock import ([\w, ]+)", text) for name in line.split(",")}
    assert names - {*penstock.__all__, ""} == set()


def test_error_texts_are_those_of_the_code():
    """The texts by which troubleshooting is sorted are spelt as the code spells them."""
    table = written()["docs/how-to/troubleshooting.md"].prose
    texts = re.findall(r"^\| `([^`]+)`(?: \(`\w+`\))? \|", table, re.MULTILINE)
    ours = [text for text in texts if not re.match(r"(\w+Error|ModelError\b.*|[A-Z]\w+)(:|$)", text)]
    assert len(ours) >= 20
    pieces = [piece for text in ours for part in text.split("…") for piece in re.split(r" s: ", part)]
    assert [piece for piece in pieces if len(piece) > 5 and piece.strip() not in shipped_literals()] == []


def test_generated_pages_are_complete():
    """Each setting, metric, error, command and field stands on its page."""
    text = {Path(path).stem: document.text for path, document in generated().items()}
    assert [name for name in VARIABLES if f"`{name}`" not in text["settings"]] == []
    assert [metric.name for metric in METRICS if f"`{metric.name}`" not in text["metrics"]] == []
    errors = [name for name in penstock.__all__ if isinstance(getattr(penstock, name), type)]
    raised = [name for name in errors if issubclass(getattr(penstock, name), Exception)]
    assert [name for name in raised if f"`{name}`" not in text["errors"]] == []
    assert [name for name in main.commands if f"## penstock {name}\n" not in text["commands"]] == []
    assert [name for name in ModelSpec.model_fields if f"`{name}`" not in text["model-yaml"]] == []


def test_generated_tables_are_tables():
    """Each line of a table has as many cells as its head."""
    for document in generated().values():
        for table in re.findall(r"(?:^\|.*\|\n)+", document.text, re.MULTILINE):
            widths = {len(re.split(r"(?<!\\)\|", line)) for line in table.splitlines()}
            assert len(widths) == 1, table


def test_threads_of_a_worker_are_listed():
    """The table of threads has one row for each kind of thread that a worker's process starts."""
    page = written()["docs/architecture.md"].text
    table = page.partition("| thread | number |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `([\w-]+)[^`]*`", table, re.MULTILINE)
    assert sorted(rows) == sorted(name for name, _ in started_threads())
    assert len(rows) == 26
    assert "there are twenty-six kinds of threads" in page


def test_states_of_a_job_are_listed():
    """The architecture's table and picture have each state of a job's record."""
    table = written()["docs/architecture.md"].text
    picture = (ROOT / "docs" / "pictures" / "job-states.txt").read_text()
    assert [state.name for state in State if f"| {state.name}" not in table or f" {state.name}" not in picture] == []


def test_pictures_show_their_sources():
    """The charts show the figures of the benchmarks, and the diagrams their text."""
    drawn = script("pictures").pictures()
    stale = [name for name, svg in drawn.items() if (ROOT / "docs" / "pictures" / name).read_text() != svg]
    assert stale == [], "run python docs/pictures.py"


def test_site_is_configured_strictly():
    """Broken links and anchors are errors, and nothing is fetched for a reader."""
    text = re.sub(r"!!\S+", "", (ROOT / "mkdocs.yml").read_text())
    config = yaml.safe_load(text)
    assert config["strict"] is True
    assert config["theme"]["font"] is False
    assert config["validation"]["links"]["anchors"] == "warn"
    assert config["validation"]["nav"]["omitted_files"] == "warn"
