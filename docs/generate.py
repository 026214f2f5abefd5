"""The code -> the reference pages: settings, metrics, errors, commands, model.yaml.

    python docs/generate.py FOLDER    writes the pages into FOLDER
    mkdocs build                      takes them from `pages`, through docs/hooks.py

A page is text that the code already contains: a description, a default, a help text. Nothing here adds facts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import click

from penstock.compose.cli import main as command_line
from penstock.registry import errors
from penstock.registry.metrics import ENGINE_METRICS, GATEWAY_METRICS, METRICS, RAY_SERVE_METRICS
from penstock.registry.package.schema import schema_text
from penstock.registry.settings import Setting, Settings, catalogue
from penstock.registry.settings_sections import InferenceConfig, WorkerSettings

__all__ = ["commands_page", "errors_page", "main", "metrics_page", "model_page", "pages", "settings_page"]

_DISPOSITIONS: Final = {
    "reject": "refused before anything is written",
    "retry": "the job goes back to the queue",
    "dead-letter": "the bytes go to the dead letters",
    "fail": "the job, or the question for its result, has failed",
    "stop": "the process exits with one line and status 78",
}
_BOUNDS: Final = (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))
_TYPES: Final = {bool: "true or false", int: "whole number", float: "number"}


def settings_page() -> str:
    """Every setting, one table for each section."""
    sections: dict[str, list[Setting]] = {}
    for setting in catalogue():
        section = setting.key.rpartition(".")[0] or ("inference" if "_INFERENCE_" in setting.variable else "process")
        sections.setdefault(section, []).append(setting)
    parts = [_SETTINGS_INTRO]
    for section, settings in sections.items():
        rows = [
            (f"`{each.variable}`", f"`{each.key}`", _values(each), _default(each), each.description)
            for each in settings
        ]
        parts.append(f"## {section}\n\n" + _table(("variable", "key", "values", "default", "meaning"), rows))
    return _page("Settings", parts)


_SETTINGS_INTRO: Final = (
    "Settings come from the constructor, then the environment, then the YAML file that `--config` or "
    "`PENSTOCK_CONFIG` names, then `[tool.penstock.inference]` in `pyproject.toml`, then the default. Each key is "
    "decided by itself. A misspelt name is an error at start, which names the nearest setting. Lists are separated "
    "by commas. Secrets come from the environment or the constructor only."
)


def _default(setting: Setting) -> str:
    value = setting.default
    if value is None or value in ("", ()):
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{','.join(map(str, value))}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _values(setting: Setting) -> str:
    """The type of a setting's field, with its bounds."""
    field = _field(setting)
    kind = "secret" if setting.is_secret else _kind(field.annotation)
    bounds = [
        f"{words} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, words in _BOUNDS
        if getattr(rule, name, None) is not None and not isinstance(getattr(rule, name), str)
    ]
    return ", ".join([kind, *bounds])


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is tuple:
        return "list"
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    known = [_TYPES[each] for each in (annotation, *get_args(annotation)) if each in _TYPES]
    return known[0] if known else "text"


def _field(setting: Setting) -> Any:
    """The pydantic field behind a line of the catalogue."""
    *sections, name = setting.key.split(".")
    model: Any = InferenceConfig if "_INFERENCE_" in setting.variable else Settings
    if sections and sections[0] == "worker":
        model, sections = WorkerSettings, sections[1:]
    for section in sections:
        model = model.model_fields[section].annotation
    return model.model_fields[name]


def metrics_page() -> str:
    """Every metric, with its labels; histograms with their buckets."""
    rows = [
        (f"`{each.name}`", each.kind, each.unit, ", ".join(f"`{label}`" for label in each.labels), each.help)
        for each in (*METRICS, *GATEWAY_METRICS, *ENGINE_METRICS, *RAY_SERVE_METRICS)
    ]
    buckets = [
        (f"`{each.name}`", ", ".join(f"{edge:g}" for edge in each.buckets) or "those of the setting `metrics_buckets`")
        for each in (*METRICS, *GATEWAY_METRICS, *ENGINE_METRICS, *RAY_SERVE_METRICS)
        if each.kind == "histogram"
    ]
    return _page(
        "Metrics",
        [
            "Each worker serves these at `/metrics`, on `127.0.0.1` and port 9464 plus its index. "
            "Those that begin with `penstock_http` are the gateway's, at `/metrics` of its own port. "
            f"{' and '.join(f'`{each.name}`' for each in ENGINE_METRICS)} are those of an "
            "[engine without a worker](../how-to/generate.md#the-engine-alone). "
            "Those that begin with `penstock_ray_serve` are in the process of a "
            "[replica of Ray Serve](../how-to/applications.md#ray-serve). "
            "`penstock shadow run`, `penstock webhooks run`, `penstock rollout start` and `penstock rollout resume` "
            "serve their own figures with `--metrics-port`. Commands that end at once have none.",
            _table(
                ("label", "values"),
                [
                    (
                        "`endpoint`, `route`",
                        "the way by which the job came: `queue` from a client, `celery` from Celery's `send_task`; "
                        "`mixed` for a batch with jobs of both",
                    ),
                    (
                        "`model_version`",
                        "the label of the version; empty for jobs that wait, because the version of a job is decided "
                        "after its claim",
                    ),
                    (
                        "`endpoint`, empty",
                        "for figures that are not about jobs that came, such as the level of a version, and for bytes "
                        "that cannot be read as a job",
                    ),
                ],
            ),
            _table(("metric", "kind", "unit", "labels", "meaning"), rows),
            "## Buckets of the histograms\n\n" + _table(("metric", "upper edges"), buckets),
        ],
    )


def errors_page() -> str:
    """The tree of errors, and a table with the disposition of each class."""
    tree = list(_tree(errors.PenstockError))
    drawn = "\n".join("  " * depth + error.__name__ for depth, error in tree)
    rows = [
        (f"`{error.__name__}`", _standard_bases(error), error.disposition, _first_paragraph(error.__doc__ or ""))
        for _, error in tree
    ]
    meanings = [(name, meaning) for name, meaning in _DISPOSITIONS.items()]
    return _page(
        "Errors",
        [
            "Import every error from `penstock`: `from penstock import QueueFull`.",
            f"```text\n{drawn}\n```",
            _table(("error", "is also a", "disposition", "meaning"), rows),
            "## Dispositions\n\n" + _table(("disposition", "meaning"), meanings),
        ],
    )


def _tree(error: type[errors.PenstockError], depth: int = 0) -> Iterator[tuple[int, type[errors.PenstockError]]]:
    yield depth, error
    for child in error.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _tree(child, depth + 1)


def _standard_bases(error: type[errors.PenstockError]) -> str:
    bases = [base for base in error.__bases__ if base.__module__ == "builtins" and base is not Exception]
    return ", ".join(f"`{base.__name__}`" for base in bases)


def commands_page() -> str:
    """Every command, with its help, options and examples."""
    intro = (
        "Every command has `--help`. A refusal is one line on stderr with exit status 1, a misspelt option has status "
        "2, a configuration that cannot work has status 78."
    )
    return _page("Commands", [intro, *_described("penstock", command_line)])


def _described(path: str, command: click.Command) -> Iterator[str]:
    arguments = " ".join(_metavar(each) for each in command.params if isinstance(each, click.Argument))
    yield f"## {path}"
    yield f"```text\n{path}{' ' + arguments if arguments else ''}{' [OPTION]...' if _options(command) else ''}\n```"
    yield from _help(command.help or "")
    if rows := [_option(each) for each in _options(command)]:
        yield _table(("option", "default", "meaning"), rows)
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from _described(f"{path} {name}", child)


def _options(command: click.Command) -> list[click.Option]:
    return [each for each in command.params if isinstance(each, click.Option)]


def _metavar(argument: click.Argument) -> str:
    shown = argument.metavar or (argument.name or "").upper()
    return shown if argument.required or argument.metavar else f"[{shown}]"


def _option(option: click.Option) -> tuple[str, str, str]:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    choices = f" One of {', '.join(option.type.choices)}." if isinstance(option.type, click.Choice) else ""
    default = option.default
    is_plain = isinstance(default, str | int | float) and not isinstance(default, bool) and default != ""
    return names, f"`{default}`" if is_plain and option.show_default else "", (option.help or "") + choices


def _help(text: str) -> Iterator[str]:
    """Paragraphs as they are; those that click may not wrap are examples."""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if paragraph.lstrip().startswith("\b"):
            lines = paragraph.lstrip().removeprefix("\b").strip("\n").splitlines()
            yield "```text\n" + "\n".join(line.strip() for line in lines) + "\n```"
        else:
            yield _plain(" ".join(paragraph.split()))


def model_page() -> str:
    """Every field of model.yaml, one table for each mapping."""
    schema = json.loads(schema_text())
    parts = [
        "A model config is `models/<name>/<version>/model.yaml`. Unknown fields are refused.",
        "## Fields\n\n" + _fields(schema),
    ]
    parts += [
        f"## {name}\n\n{_plain(each['description'])}\n\n{_fields(each)}" for name, each in schema["$defs"].items()
    ]
    return _page("model.yaml", parts)


def _fields(schema: Mapping[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = [
        (f"`{name}`", _schema_type(field), "required" if name in required else _schema_default(field),
         " ".join(field.get("description", "").split()))
        for name, field in schema["properties"].items()
    ]  # fmt: skip
    return _table(("field", "type", "default", "meaning"), rows)


def _schema_type(field: Mapping[str, Any]) -> str:
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in field:
        return " or ".join(_schema_type(each) for each in field["anyOf"] if each.get("type") != "null")
    if "enum" in field:
        return ", ".join(f"`{choice}`" for choice in field["enum"])
    if field["type"] == "array":
        return f"list of {_schema_type(field['items'])}"
    if field["type"] == "object":
        values = field.get("additionalProperties")
        return f"mapping to {_schema_type(values)}" if values else "mapping"
    bounds = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}
    limits = [f"{words} {field[name]:,}" for name, words in bounds.items() if name in field]
    return ", ".join([str(field["type"]), *limits])


def _schema_default(field: Mapping[str, Any]) -> str:
    default = field.get("default")
    return "" if isinstance(default, dict) else f"`{json.dumps(default)}`"


def _page(title: str, parts: Iterable[str]) -> str:
    return "\n\n".join([f"# {title}", "*This page is generated from the code.*", *parts]) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return _plain(" ".join(text.split())).replace("|", "\\|")


def _plain(text: str) -> str:
    """Text in which angle brackets outside of code are no HTML."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if piece.startswith("`") else piece.replace("<", "&lt;") for piece in pieces)


def _first_paragraph(docstring: str) -> str:
    return " ".join(docstring.strip().split("\n\n")[0].split())


_PAGES: Final[dict[str, Callable[[], str]]] = {
    "reference/settings.md": settings_page,
    "reference/metrics.md": metrics_page,
    "reference/errors.md": errors_page,
    "reference/commands.md": commands_page,
    "reference/model-yaml.md": model_page,
}


def pages() -> dict[str, str]:
    """The generated pages: path below docs/ -> Markdown."""
    return {path: make() for path, make in _PAGES.items()}


@click.command(epilog="Example:\n\n  python docs/generate.py build/reference\n")
@click.argument("folder", type=click.Path(file_okay=False))
def main(folder: str) -> None:
    """Write the reference pages into FOLDER."""
    for path, text in pages().items():
        file = Path(folder) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


if __name__ == "__main__":
    main()
