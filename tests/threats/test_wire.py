"""S0.2 and S0.3: nothing on a wire is a program, workers know their own kinds only, and accept no other commands."""

from __future__ import annotations

import ast
import json
import os
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from celery import Celery
from celery.worker.control import Panel

from penstock.registry.envelope import JobHeader
from penstock.registry.errors import ModelError
from penstock.registry.queues import CELERY_QUEUE, Priority, dead_key, new_job_id, record_key, stream_key
from penstock.registry.tensors import DTYPES
from penstock.workers.celery_bridge.remote_control import OPEN_COMMANDS
from tests.flow.test_celery import celery_of, consumes, outcome, send
from tests.servers import ROOT, wait_until
from tests.sources import nodes
from tests.threats import hostile_load
from tests.threats.conftest import AttackedWorker

ROW = {"x": [[1.0, 2.0, 3.0, 4.0]]}
PACKAGES = ("compose", "producers", "registry", "safety", "testing", "workers")
FORBIDDEN_MODULES = {
    *(
        "pickle",
        "cPickle",
        "_pickle",
        "dill",
        "cloudpickle",
        "joblib",
        "shelve",
        "marshal",
        "copyreg",
        "code",
        "codeop",
    ),
    *("xmlrpc", "multiprocessing.connection", "multiprocessing.managers"),
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
FORBIDDEN_ATTRIBUTES = {
    *(
        "yaml.unsafe_load",
        "yaml.full_load",
        "yaml.load_all",
        "yaml.unsafe_load_all",
        "yaml.UnsafeLoader",
        "yaml.Loader",
    ),
    *(
        "yaml.FullLoader",
        "torch.load",
        "torch.package",
        "numpy.load",
        "np.load",
        "os.system",
        "os.popen",
        "pandas.read_pickle",
    ),
}


def programs_in(tree: Iterable[ast.AST]) -> list[str]:
    """What in a source could turn bytes into behaviour: imports, calls, loaders, shells, trusted remote code."""
    found = []
    for node in tree:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if _is_forbidden(alias.name)]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            found += [name for name in names if _is_forbidden(name)]
        elif isinstance(node, ast.Name) and node.id in FORBIDDEN_CALLS and isinstance(node.ctx, ast.Load):
            found.append(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in FORBIDDEN_ATTRIBUTES:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Call):
            found += _hostile_call(node)
    return found


def _is_forbidden(module: str) -> bool:
    return module in FORBIDDEN_MODULES or module.split(".")[0] in FORBIDDEN_MODULES


def _hostile_call(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name == "yaml.load" and given.get("Loader") not in _SAFE_LOADERS:
        yield name
    for argument in ("shell", "allow_pickle", "trust_remote_code"):
        if given.get(argument, "False") != "False":
            yield f"{argument}={given[argument]}"


_SAFE_LOADERS = {"_BoundedLoader"}
"""Subclasses of yaml.SafeLoader: see the test below."""


def test_no_package_can_turn_bytes_into_a_program():
    """No pickle, marshal, eval, exec, unsafe YAML, shell or remote code anywhere in the packages."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")] + [ROOT / "celeryconfig.py"]
    assert len(files) > 50
    found = {str(path.relative_to(ROOT)): programs_in(nodes(path)) for path in files}
    assert {path: what for path, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal as m",
        "eval('1')",
        "run = exec",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "np.load(file, allow_pickle=True)",
        "torch.load(file)",
        "subprocess.run(command, shell=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "from multiprocessing.connection import Client",
        "__import__(name)",
        "os.system(text)",
    ],
)
def test_programs_are_found(source: str):
    """The search itself: each of these is seen."""
    assert programs_in(ast.walk(ast.parse(source)))


def test_the_yaml_loader_is_a_safe_one():
    """It makes plain data only, for every tag that a document carries."""
    import yaml

    from penstock.registry.package import bounded_yaml

    (loader,) = [getattr(bounded_yaml, name) for name in _SAFE_LOADERS]
    assert issubclass(loader, yaml.SafeLoader)
    for tag in ("!!python/object/apply:os.getcwd []", "!!python/name:os.system ''", "!!python/tuple [1]"):
        with pytest.raises(bounded_yaml.BadDocument):
            bounded_yaml.read_yaml(f"x: {tag}".encode())


def test_exceptions_travel_as_plain_data(target: AttackedWorker, tmp_path: Path):
    """A model's hostile exception arrives as the text of a ModelError, and nothing of it ran on the way."""
    with target.client() as client, target.server.client() as overseer:
        job = client.submit("thrower", {"x": [[-1.0, 0, 0, 0]]})
        with pytest.raises(ModelError, match="Hostile: __import__"):
            job.result(180)
        record = overseer.get(record_key(job.id))
    size = int.from_bytes(record[6:10], "little")
    error = msgspec.msgpack.decode(record[10 : 10 + size])["error"]
    assert error.keys() == {"code", "message", "where"}
    assert {type(text) for text in error.values()} == {str}
    assert not list(target.worker.folder.rglob("trap"))
    app = celery_of(target.server)
    consumes(app, target.worker)
    failure = outcome(app, send(app, "thrower", [[-1.0, 0, 0, 0]]))
    assert isinstance(failure, Exception)
    assert not list(target.worker.folder.rglob("trap"))


class _Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (self._path,))


@pytest.mark.parametrize("kind", ["pickle", "application/x-python-serialize", "yaml", "application/x-yaml"])
def test_messages_that_are_programs_are_refused(kind: str, target: AttackedWorker, tmp_path: Path):
    """Pickle and YAML on Celery's queue, and pickle in a queue of jobs: nothing is made of them, and work goes on."""
    trap = tmp_path / "trap"
    body = pickle.dumps([[], {"model": _Bomb(str(trap))}, {}])
    with target.server.client() as overseer, target.client() as client:
        frame = hostile_load._frame(Random(1))
        frame |= {"content-type": kind, "content-encoding": "binary"}
        frame["properties"]["body_encoding"] = "base64"
        frame["body"] = __import__("base64").b64encode(body).decode()
        overseer.lpush(CELERY_QUEUE, json.dumps(frame))
        before = overseer.xlen(dead_key("double"))
        overseer.xadd(stream_key("double", Priority.HIGH), {"e": body})
        wait_until(lambda: overseer.xlen(dead_key("double")) == before + 1, 10, "the job is dead-lettered")
        wait_until(lambda: not hostile_load._waiting(overseer), 10, "the message is taken")
        assert client.submit("double", ROW).result(180)["y"].tolist() == [[2, 4, 6, 8]]
    assert not trap.exists()


@pytest.mark.parametrize(
    "change", [{"body": 5}, {"body": None}, {"headers": {"task": "penstock.infer", "id": "x", "timelimit": 7}}], ids=str
)
def test_message_that_is_no_task_is_taken_once(change: dict[str, object], target: AttackedWorker):
    """One that kombu can read and Celery cannot is dropped: given back, it would come again for ever."""
    app = celery_of(target.server)
    consumes(app, target.worker)
    begun = target.worker.output.stat().st_size
    with target.server.client() as overseer:
        overseer.lpush(CELERY_QUEUE, json.dumps({**hostile_load._frame(Random(2)), **change}))
        done = send(app, "double")
        assert outcome(app, done)["outputs"] == {"y": [[2, 4, 6, 8]]}
        wait_until(lambda: not hostile_load._waiting(overseer), 5, "the message is gone")
    said = target.worker.output.read_text(errors="replace")[begun:]
    assert said.count("Connection to broker lost") <= 1


UNKNOWN_KINDS = {
    "another protocol's": b"\x93\x01\x02\x03",
    "kombu's": b'{"body": "W10=", "content-type": "application/json"}',
    "a task of another program": json.dumps({"task": "os.system", "args": ["true"]}).encode(),
    "a newer protocol's": b"PS\x02J" + bytes(40),
    "an unknown letter": b"PS\x01X" + bytes(40),
    "a result": b"PS\x01R" + bytes(40),
    "an event": b"PS\x01E" + bytes(40),
    "nothing": b"",
    "HTTP": b"POST /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    "RESP": b"*1\r\n$8\r\nFLUSHALL\r\n",
}


def test_unknown_kinds_are_dead_lettered(target: AttackedWorker):
    """Bytes that are no job of this protocol become dead letters; the worker asks no questions."""
    with target.server.client() as overseer, target.client() as client:
        before = overseer.xlen(dead_key("double"))
        for foreign in UNKNOWN_KINDS.values():
            overseer.xadd(stream_key("double", Priority.NORMAL), {"e": foreign})
        count = len(UNKNOWN_KINDS)
        wait_until(lambda: overseer.xlen(dead_key("double")) == before + count, 10, "all are dead-lettered")
        letters = overseer.xrevrange(dead_key("double"), count=count)
        kept = [dict(fields)[b"e"] for _, fields in letters]
        assert sorted(kept) == sorted(UNKNOWN_KINDS.values())
        assert client.submit("double", ROW).result(180)["y"].tolist() == [[2, 4, 6, 8]]


COMMANDS_THAT_CHANGE = {
    "shutdown": {},
    "pool_grow": {"n": 1},
    "pool_shrink": {"n": 1},
    "pool_restart": {"modules": ["os"]},
    "autoscale": {"max": 9, "min": 9},
    "add_consumer": {"queue": "celery"},
    "cancel_consumer": {"queue": CELERY_QUEUE},
    "rate_limit": {"task_name": "penstock.infer", "rate_limit": "1/h"},
    "time_limit": {"task_name": "penstock.infer", "hard": 1},
    "terminate": {"task_id": "x", "signal": "KILL"},
    "revoke_by_stamped_headers": {"headers": {"a": "b"}},
    "terminate_by_stamped_headers": {"headers": {"a": "b"}, "signal": "KILL"},
    "election": {"id": "x", "topic": "x", "action": "x"},
    "objgraph": {"num": 1, "max_depth": 1, "type": "dict"},
    "memdump": {"samples": 1},
    "import_module": {"module": "os"},
}


def test_commands_that_change_a_worker_are_refused(target: AttackedWorker):
    """No command over the wire stops, resizes, re-routes or reconfigures it, or loads anything into it."""
    app: Celery = celery_of(target.server)
    consumes(app, target.worker)
    assert not COMMANDS_THAT_CHANGE.keys() & OPEN_COMMANDS
    name = target.worker.name

    def asked(question: str) -> Any:
        def answer() -> Any:
            return (getattr(app.control.inspect([name], timeout=60), question)() or {}).get(name)

        return wait_until(answer, 10, "the worker answers")

    before = asked("stats")
    for command, arguments in COMMANDS_THAT_CHANGE.items():
        app.control.broadcast(command, arguments=arguments)
    # Commands are taken in their order: this answer comes after all of them.
    after = asked("stats")
    steady = ("pool", "prefetch_count", "pid", "inference", "broker")
    assert [after[part] for part in steady] == [before[part] for part in steady]
    assert [queue["name"] for queue in asked("active_queues")] == [CELERY_QUEUE]
    said = target.worker.output.read_text()
    refusals = [f'"command":"{command}"' for command in COMMANDS_THAT_CHANGE.keys() & Panel.data.keys()]
    unknown = [f"KeyError('{command}')" for command in COMMANDS_THAT_CHANGE.keys() - Panel.data.keys()]
    assert [text for text in (*refusals, *unknown) if text not in said] == []
    assert target.worker.is_running
    assert outcome(app, send(app, "double"))["outputs"] == {"y": [[2, 4, 6, 8]]}


def test_revoke_does_not_kill(target: AttackedWorker):
    """`revoke` with `terminate` withdraws a job that waits; it sends no signal to anything."""
    app = celery_of(target.server)
    consumes(app, target.worker)
    app.control.revoke("double.nothing", terminate=True, signal="SIGKILL")
    with target.client() as client:
        assert client.submit("double", ROW).result(180)["y"].tolist() == [[2, 4, 6, 8]]
    assert target.worker.is_running


def test_job_headers_hold_plain_data_only():
    """The schema of what crosses: text, numbers, truth values and lists of them; no open mapping, no extension type."""
    schema = msgspec.json.schema(JobHeader)
    kinds = {kind for kind in _types(schema)}
    assert kinds <= {"string", "integer", "boolean", "array", "object", "number", "null"}
    closed = [part for part in schema["$defs"].values() if part.get("type") == "object"]
    assert all("additionalProperties" not in part for part in closed)
    assert np.dtype(object) not in [dtype for name, dtype in DTYPES.items() if name != "string"]
    assert new_job_id("double").startswith("double.")


def _types(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(kind := schema.get("type"), str):
            yield kind
        for part in schema.values():
            yield from _types(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _types(part)
