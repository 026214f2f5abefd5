"""A Python file with declared models -> their packages, without running the file.

    my_models.py -> read_models -> AppModel ... -> write_packages -> <folder>/<digest>/<name>/<version>/
                                                                        model.yaml, my_models.py

The arguments of `@penstock.model` are literals or constants of the file, so that its code runs in workers only. A
constant has its value of that line; a name that the file changes in any other way than by an assignment is none. The
packages hold the bytes that were read: a later change of the file has other packages. Problems name file and line.
"""

from __future__ import annotations

import ast
import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import yaml
from pydantic import ValidationError

from penstock.registry.errors import ConfigurationError, InvalidInput, shown
from penstock.registry.package.declaration import tensor_fields
from penstock.registry.package.file_constants import FileConstants
from penstock.registry.package.spec import SPEC_FILE, ModelSpec, first_problem

__all__ = ["AppFile", "AppModel", "read_models", "write_packages"]

_ARGUMENTS: Final = ("batching", "fields", "inputs", "name", "outputs", "streams", "version")
_OWN_FIELDS: Final = frozenset({"entrypoint", "files", "format", "name", "signature", "source", "version", "weights"})
"""Fields of model.yaml that `fields` cannot set."""
_Declared: TypeAlias = ast.FunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class AppModel:
    """One declared model. line: of its declaration. document: its model.yaml."""

    line: int
    document: Mapping[str, Any]

    @property
    def reference(self) -> str:
        """`name/version`."""
        return f"{self.document['name']}/{self.document['version']}"


@dataclass(frozen=True, slots=True)
class AppFile:
    """A file with models, as it was read."""

    path: Path
    data: bytes
    models: tuple[AppModel, ...]


def read_models(file: Path) -> AppFile:
    """The models of a file, in the order of its lines. Raises ConfigurationError with file and line."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{shown(file.name)}: cannot be read ({error.strerror}), expected a file") from None
    if file.suffix != ".py" or not file.stem.isidentifier():
        raise ConfigurationError(f"{shown(file.name)}: expected the name of a Python module, such as my_models.py")
    try:
        tree = ast.parse(data)
    except SyntaxError as error:
        raise ConfigurationError(f"{file.name}, line {error.lineno or 1}: not valid Python ({error.msg})") from None
    except (ValueError, RecursionError, MemoryError):
        raise ConfigurationError(f"{file.name}: not valid Python") from None
    models = tuple(_Reader(file, tree).models())
    if not models:
        raise ConfigurationError(
            f"{file.name}: found no model, expected @penstock.model(inputs=..., outputs=...) over a function or class"
        )
    lines: dict[str, int] = {}
    for each in models:
        if (first := lines.setdefault(each.reference, each.line)) != each.line:
            raise ConfigurationError(f"{file.name}, line {each.line}: {each.reference} is also on line {first}")
    return AppFile(file, data, models)


def write_packages(app: AppFile, folder: Path) -> Path:
    """Writes a package for each model below `folder`; returns their models root, whose name is that of the content.

    Raises ConfigurationError when it cannot be written.
    """
    texts = {each.reference: yaml.safe_dump(dict(each.document), sort_keys=False) for each in app.models}
    files = {f"{reference}/{SPEC_FILE}": text.encode() for reference, text in texts.items()}
    files |= {f"{reference}/{app.path.name}": app.data for reference in texts}
    digest = hashlib.sha256(b"".join(b"%s\n%d\n%s" % (path.encode(), len(each), each) for path, each in files.items()))
    root = folder / digest.hexdigest()[:16]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if all((root / path).is_file() and (root / path).read_bytes() == each for path, each in files.items()):
            return root
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as beside:
            fresh = Path(beside) / "root"
            for path, each in files.items():
                (fresh / path).parent.mkdir(parents=True, exist_ok=True)
                (fresh / path).write_bytes(each)
            if root.exists():
                root.rename(Path(beside) / "old")
            fresh.rename(root)
    except OSError as error:
        raise ConfigurationError(
            f"{app.path.name}: its packages cannot be written ({error.strerror}), expected a folder under PENSTOCK_HOME"
        ) from None
    return root


class _Reader:
    """Finds the declared models of one file."""

    def __init__(self, file: Path, tree: ast.Module) -> None:
        self._file = file
        self._tree = tree
        self._constants = FileConstants()
        self._decorators: set[str] = set()
        """The names by which the file calls `penstock.model`."""

    def models(self) -> Iterator[AppModel]:
        """Each declared function or class. Raises ConfigurationError."""
        for node in self._tree.body:
            match node:
                case ast.Import(names=names):
                    found = (alias.asname or alias.name for alias in names if alias.name == "penstock")
                    self._decorators.update(f"{name}.model" for name in found)
                case ast.ImportFrom(module="penstock", names=names, level=0):
                    self._decorators.update(alias.asname or alias.name for alias in names if alias.name == "model")
                case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
                    for decorator in node.decorator_list:
                        called = decorator.func if isinstance(decorator, ast.Call) else decorator
                        if ast.unparse(called) in self._decorators:
                            yield self._model(node, decorator)
            self._constants.read(node)

    def _model(self, node: _Declared | ast.AsyncFunctionDef, decorator: ast.expr) -> AppModel:
        if not isinstance(decorator, ast.Call) or decorator.args:
            self._refuse(decorator, "expected @penstock.model(inputs=..., outputs=...), with names for all arguments")
        if isinstance(node, ast.AsyncFunctionDef):
            self._refuse(node, f"{node.name}: found an async function, expected def")
        given = {str(keyword.arg): self._literal(keyword) for keyword in decorator.keywords}
        if unknown := given.keys() - set(_ARGUMENTS):
            self._refuse(decorator, f"{min(unknown)}: unknown argument, expected one of: {', '.join(_ARGUMENTS)}")
        document = self._document(node, decorator, given)
        try:
            spec = ModelSpec.model_validate(document)
        except ValidationError as error:
            self._refuse(decorator, f"{node.name}: {first_problem(error)}")
        self._check_arguments(node, spec)
        return AppModel(node.lineno, document)

    def _document(self, node: _Declared, decorator: ast.Call, given: dict[str, Any]) -> dict[str, Any]:
        fields = given.get("fields") or {}
        if not isinstance(fields, Mapping) or (own := _OWN_FIELDS.intersection(fields)):
            found = f"found {min(own)}" if isinstance(fields, Mapping) else f"found {type(fields).__name__}"
            self._refuse(decorator, f"{node.name}: fields: {found}, expected further fields of model.yaml")
        try:
            signature = {kind: tensor_fields(kind, given[kind]) for kind in ("inputs", "outputs")}
        except KeyError as missing:
            self._refuse(decorator, f"{node.name}: {missing.args[0]}: missing, expected a value")
        except InvalidInput as error:
            self._refuse(decorator, f"{node.name}: {error}")
        version = given.get("version", 1)
        streamed = {"streams": True, "batching": {"max_batch_size": 1}} if given.get("streams") else {}
        return {
            "name": given.get("name") or node.name.lower(),
            "version": str(version) if isinstance(version, int) else version,
            "format": "python",
            "entrypoint": f"{self._file.stem}:{node.name}",
            "signature": signature,
            **streamed,
            **({"batching": given["batching"]} if given.get("batching") else {}),
            **fields,
        }

    def _check_arguments(self, node: _Declared, spec: ModelSpec) -> None:
        """Refuses a function that does not take the declared inputs by name."""
        function: ast.AST = node
        if isinstance(node, ast.ClassDef):
            found = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "predict"]
            if not found and node.bases:
                # A base class may have it.
                return
            if not found:
                self._refuse(node, f"{node.name}: found no method predict, expected predict(self, ...) with the inputs")
            function = found[-1]
        if not isinstance(function, ast.FunctionDef) or function.args.kwarg:
            return
        takes, with_default = _arguments(function)
        takes = takes[1:] if isinstance(node, ast.ClassDef) else takes
        if spec.streams and "ctx" in takes:
            takes.remove("ctx")
        declared = [one.name for one in spec.inputs]
        if set(takes) != set(declared):
            self._refuse(
                function, f"{node.name}: takes {', '.join(takes) or 'nothing'}, expected {', '.join(declared)}"
            )
        for one in spec.inputs:
            if one.optional and one.name not in with_default:
                self._refuse(function, f"{node.name}: found no default for {one.name}, expected one: it is optional")

    def _literal(self, keyword: ast.keyword) -> Any:
        """The value of an argument. Names stand for constants that the file assigned above."""
        changed = self._constants.changed_in(keyword.value)
        try:
            return self._constants.value(keyword.value)
        except (ValueError, TypeError, SyntaxError, RecursionError):
            found = "an expression" if changed is None else f"{changed}, whose value is not certain here"
            self._refuse(
                keyword.value,
                f"{keyword.arg or '**'}: found {found}, expected literals, or constants of this file",
            )

    def _refuse(self, node: ast.expr | ast.stmt, problem: str) -> NoReturn:
        raise ConfigurationError(f"{self._file.name}, line {node.lineno}: {problem}")


def _arguments(function: ast.FunctionDef) -> tuple[list[str], set[str]]:
    """(the arguments that can be given by name, those of them with a default)."""
    by_position, by_name = function.args.args, function.args.kwonlyargs
    count = len(function.args.defaults)
    with_default = {one.arg for one in by_position[len(by_position) - count :]} if count else set()
    with_default |= {
        one.arg for one, default in zip(by_name, function.args.kw_defaults, strict=True) if default is not None
    }
    return [one.arg for one in (*by_position, *by_name)], with_default
