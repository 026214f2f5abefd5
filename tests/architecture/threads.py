"""The threads that the modules of workers/ start, as their source says: by name, with the module that starts each."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.servers import ROOT
from tests.sources import nodes

__all__ = ["UNNAMED", "started_threads"]

UNNAMED = "without a name"
_NAME_OF = {
    "Thread": ("name", 2),
    "Timer": ("name", 9),
    "ThreadPoolExecutor": ("thread_name_prefix", 1),
    "SharedBreakers": ("thread", 2),
}
"""By class: the argument with the thread's name, and its place among positional arguments."""
_NAMED_BY_CALLERS = {"levels/shared_breakers.py"}
"""Their classes start a thread whose name is an argument, which is read at each call."""
_CHILD_PROCESSES = {"compilation/build.py", "runtime/exporter.py", "runtime/instance.py", "shadow/candidate.py"}
"""Programs that a worker starts as processes of their own, and a part of the shadow worker, which is another one."""
_WITHOUT_WORKERS = {"generation/monitoring.py"}
"""Of an engine that a program runs without a worker."""


def started_threads() -> set[tuple[str, str]]:
    """(Name, module) of each thread and thread pool of a worker's process; of a name with a variable end its begin."""
    folder = ROOT / "workers"
    modules = {source.relative_to(folder).as_posix(): source for source in folder.rglob("*.py")}
    return {
        (name, module)
        for module, source in modules.items()
        if module not in _CHILD_PROCESSES | _NAMED_BY_CALLERS | _WITHOUT_WORKERS
        for name in _thread_names(nodes(source))
    }


def _thread_names(tree: list[ast.AST]) -> Iterator[str]:
    assigned = {
        target.id: node.value
        for node in tree
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for call in tree:
        if not isinstance(call, ast.Call) or (kind := ast.unparse(call.func).rpartition(".")[2]) not in _NAME_OF:
            continue
        keyword, place = _NAME_OF[kind]
        given = {each.arg: each.value for each in call.keywords}
        name = given.get(keyword) or (call.args[place] if len(call.args) > place else None)
        if isinstance(name, ast.Name):
            name = assigned.get(name.id)
        if isinstance(name, ast.JoinedStr):
            name = name.values[0]
        yield str(name.value).strip() if isinstance(name, ast.Constant) else UNNAMED
