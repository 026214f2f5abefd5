"""Hostile messages and inputs, and what may become of them: a clear refusal in time, or a valid reading.

    corpus/ + a source of randomness -> one of KINDS -> Target.offer -> refused | read; anything else is a finding

The randomness is a `random.Random`: hypothesis's in tests, which finds small examples, a seeded one in the long run.
"""

from __future__ import annotations

import json
import math
import string
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import yaml

from penstock.registry.admission import JobBuilder, SpecCache, SubmitOptions
from penstock.registry.broker.base import Limits
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.envelope import EventHeader, JobHeader, Keyring, open_event, open_job, open_result, seal
from penstock.registry.errors import ConfigurationError, Corrupt, Rejected
from penstock.registry.event_body import EventPart, chunk_part, decode_parts, encode_parts
from penstock.registry.package import ModelSpec, load_package
from penstock.registry.queues import new_job_id
from penstock.registry.settings import Settings, catalogue
from penstock.registry.tensors import DTYPES, Tensor, decode, encode
from penstock.workers.celery_bridge.task_ingress import TaskIngress

LIMIT_S: Final = 0.05
"""Within this a refusal must be there."""
CORPUS: Final = Path(__file__).resolve().parent / "corpus"
KEYS: Final = "new:bm5ubm5ubm5ubm5ubm5ubm5ubm5ubm5ubm5ubm5ubm4=,old:b29vb29vb29vb29vb29vb29vb29vb29vb29vb29vb28="
STRANGERS_KEY: Final = "new:eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHg="
SIGNING: Final = Keyring.parse(KEYS)
STRANGER: Final = Keyring.parse(STRANGERS_KEY)
UNSIGNED: Final = Keyring.parse(None)
MODEL: Final = "double"
_LIVE: Final = ("critical", "high", "normal", "low")


class Finding(AssertionError):
    """A message that did something else than to be refused in time or read."""


def seeds(kind: str) -> list[bytes]:
    """The corpus of a kind: one item per line, JSON strings of Latin-1 text."""
    lines = (CORPUS / f"{kind}.jsonl").read_text("ascii").splitlines()
    return [json.loads(line).encode("latin-1") for line in lines if line]


# Numbers, text and documents that programs trip over.

_NUMBERS: Final = (
    *(0, -1, 1, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1),
    *(10**400, 0.0, -0.0, 1e-320, 1e308, math.inf, -math.inf, math.nan, True, False, None),
)
_WORDS: Final = (
    *("", " ", "x", "double", "normal", "high", "default", "float32", "string", "object", "float128", "\x00"),
    *("\n", "a\nb", "../../etc/passwd", "..", "/", "{double}", "}{", "%s", "${HOME}", "é", "\U0001f4a5"),
    *("A" * 65, "a" * 5_000, "__proto__", "null", "NaN", "1e999", "'; --", "<script>", "\u202e", "00-" + "f" * 54),
)


def any_number(random: Random) -> Any:
    """A number, a truth value or nothing."""
    return random.choice(_NUMBERS) if random.random() < 0.7 else random.randint(-(2**70), 2**70)


def any_text(random: Random) -> str:
    """A word that programs trip over, or noise."""
    if random.random() < 0.6:
        return random.choice(_WORDS)
    return "".join(random.choice(string.printable) for _ in range(random.randint(0, 40)))


def any_value(random: Random, depth: int = 4) -> Any:
    """A JSON-like value; now and then very deep."""
    kind = random.random()
    if depth == 0 or kind < 0.35:
        return any_number(random) if random.random() < 0.5 else any_text(random)
    if kind < 0.37:
        return _nested(random.choice((20, 70, 900)))
    if kind < 0.7:
        return [any_value(random, depth - 1) for _ in range(random.randint(0, 5))]
    return {any_text(random): any_value(random, depth - 1) for _ in range(random.randint(0, 5))}


def _nested(depth: int) -> Any:
    value: Any = 1.0
    for _ in range(depth):
        value = [value]
    return value


def mutated(random: Random, document: Any) -> Any:
    """A copy of a document with one to three of its places changed, removed, doubled or renamed."""
    document = json.loads(json.dumps(document))
    for _ in range(random.randint(1, 3)):
        _mutate(random, document)
    return document


def _mutate(random: Random, document: Any) -> None:
    if isinstance(document, dict) and document:
        name = random.choice(sorted(document, key=str))
        if isinstance(document[name], dict | list) and document[name] and random.random() < 0.6:
            _mutate(random, document[name])
            return
        change = random.random()
        if change < 0.15:
            del document[name]
        elif change < 0.3:
            document[any_text(random)] = document.pop(name)
        else:
            document[name] = any_value(random)
    elif isinstance(document, list) and document:
        place = random.randrange(len(document))
        if isinstance(document[place], dict | list) and document[place] and random.random() < 0.6:
            _mutate(random, document[place])
        elif random.random() < 0.2:
            document.extend(document[place:] * random.choice((1, 100)))
        else:
            document[place] = any_value(random)


def damaged(random: Random, data: bytes, other: bytes) -> bytes:
    """Bytes with some of them changed, cut, repeated, or spliced with another's."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 4)):
        place = random.randrange(len(changed) + 1)
        change = random.randrange(7)
        if change == 0 and changed:
            changed[place % len(changed)] ^= 1 << random.randrange(8)
        elif change == 1 and changed:
            changed[place % len(changed)] = random.choice((0, 1, 0x7F, 0x80, 0xC1, 0xDD, 0xDF, 0xFF))
        elif change == 2:
            del changed[place:]
        elif change == 3:
            changed[place:place] = random.randbytes(random.choice((1, 4, 32)))
        elif change == 4:
            changed[place:] = other[min(place, len(other)) :]
        elif change == 5:
            changed[place:place] = changed[place : place + random.choice((1, 8, 64))]
        else:
            changed[place : place + 4] = struct.pack("<I", random.choice((0, 1, 2**16, 2**31, 2**32 - 1)))
    return bytes(changed)


# Envelopes


def good_job(random: Random, *, model: str = MODEL, tenant: str = "default") -> tuple[JobHeader, bytes]:
    """(header, body) of a job that a worker of `double` runs."""
    values = np.array([[random.random() for _ in range(4)] for _ in range(random.randint(1, 3))], np.float32)
    content, body = encode({"x": values})
    header = JobHeader(
        id=new_job_id(model), tenant=tenant, model=model, priority=random.choice(_LIVE), content=content, key="new"
    )
    return header, body


def envelope(random: Random) -> bytes:
    """A sealed job that was changed: its bytes, its fields under a signature that holds, or one of the corpus."""
    header, body = good_job(random)
    kind = random.random()
    if kind < 0.35:
        other = seal("job", *good_job(random), SIGNING) if random.random() < 0.5 else random.choice(seeds("envelopes"))
        return damaged(random, seal("job", header, body, SIGNING), other)
    if kind < 0.45:
        return damaged(random, random.choice(seeds("envelopes")), body)
    if kind < 0.55:
        return framed(random, random.randbytes(random.randint(0, 300)), body)
    fields = msgspec.to_builtins(header)
    wild = {name: value for name, value in mutated(random, fields).items() if random.random() < 0.97}
    if random.random() < 0.5:
        wild = {**fields, random.choice(sorted(fields)): any_value(random)}
    if random.random() < 0.3:
        wild["content"] = _wild_content(random)
    try:
        head = msgspec.msgpack.encode(wild)
    except (OverflowError, ValueError, RecursionError, UnicodeEncodeError):
        head = random.randbytes(30)
    return framed(random, head, damaged(random, body, body) if random.random() < 0.5 else body, signs=True)


def _wild_content(random: Random) -> list[Any]:
    extents = (0, 1, 4, -1, 2**31, 2**62, 2**63 - 1)
    count = random.choice((0, 1, 2, 65, 1_000))
    dims = random.choice((0, 1, 2, 9, 500)) if count < 65 else 1
    dtypes = [*DTYPES, "object", "float128", ""]
    return [
        [random.choice(("x", "y", "")), random.choice(dtypes), [random.choice(extents) for _ in range(dims)]]
        for _ in range(count)
    ]


def framed(random: Random, head: bytes, body: bytes, *, signs: bool = False) -> bytes:
    """A frame around any header bytes; signed by the right key, by a stranger, or not at all."""
    size = len(head) if random.random() < 0.9 else random.choice((0, 7, 2**16, 2**32 - 1))
    sealed = b"PS" + bytes([1 if random.random() < 0.95 else random.randrange(256)])
    sealed += random.choice((b"J", b"J", b"J", b"J", b"R", b"E", b"\0")) + struct.pack("<I", size) + head + body
    if not signs:
        return sealed
    macs = random.choice((SIGNING.job_macs, SIGNING.job_macs, SIGNING.job_macs, SIGNING.result_macs, STRANGER.job_macs))
    return sealed + macs["new"].digest(sealed)


# What is offered, and what may become of it


class Outcome(NamedTuple):
    """What became of an offer; `refusal` is empty when it was read."""

    refusal: str
    seconds: float
    """By the clock on the wall."""
    cpu_seconds: float

    def is_later_than(self, limit_s: float) -> bool:
        """Whether it took longer; the time that other processes of this machine took does not count."""
        return bool(self.refusal) and self.seconds > limit_s and (self.cpu_seconds > limit_s or self.seconds > 1)


class Target:
    """One endpoint. `make` draws an offer, `take` gives it to the code; `refusals` are its answers."""

    def __init__(
        self,
        name: str,
        make: Callable[[Random], Any],
        take: Callable[[Any], object],
        refusals: tuple[type[BaseException], ...],
    ) -> None:
        self.name = name
        self.make = make
        self._take = take
        self._refusals = refusals

    def offer(self, offered: Any, limit_s: float = math.inf) -> Outcome:
        """What became of it. Raises Finding for another exception, an unclear text, or a refusal after `limit_s`.

        Only `python -m tests.threats` gives a limit: tests compare no clock times.
        """
        outcome = self._offer(offered)
        for _ in range(3):
            if not outcome.is_later_than(limit_s):
                return outcome
            # A collection of garbage, or the first use of something: what the code itself costs shows again.
            outcome = min(outcome, self._offer(offered), key=lambda found: found.cpu_seconds)
        if outcome.is_later_than(limit_s):
            raise Finding(f"{self.name}: refused after {outcome.cpu_seconds * 1000:.0f} ms of CPU: {offered!r:.500}")
        return outcome

    def _offer(self, offered: Any) -> Outcome:
        begun, cpu_begun = time.perf_counter(), time.thread_time()
        try:
            self._take(offered)
        except self._refusals as refusal:
            seconds, cpu_seconds, text = time.perf_counter() - begun, time.thread_time() - cpu_begun, str(refusal)
        except Exception as error:
            raise Finding(f"{self.name}: {type(error).__name__}({error!s:.200}): {offered!r:.500}") from error
        else:
            return Outcome("", time.perf_counter() - begun, time.thread_time() - cpu_begun)
        if not text or len(text) > 10_000 or text.count("\n"):
            raise Finding(f"{self.name}: an unclear refusal of {len(text)} characters: {text!r:.300}")
        return Outcome(f"{text:.80}", seconds, cpu_seconds)


def _read_events(body: memoryview | bytes) -> None:
    """As a subscriber would."""
    for part, content in decode_parts(body):
        if part.fraction is None:
            part.values(content)


def _open_all(sealed: bytes) -> None:
    """As a worker and a client would: each kind, signed or not."""
    errors = []
    for opener in (open_job, open_result, open_event):
        for keyring in (SIGNING, UNSIGNED):
            try:
                header, body = opener(sealed, keyring)
                if isinstance(header, EventHeader):
                    _read_events(body)
                else:
                    decode(header.content, body)
            except Corrupt as error:
                errors.append(error)
    if errors:
        raise errors[0]


_SPEC: Final[dict[str, Any]] = {
    "name": MODEL,
    "version": "1",
    "format": "python",
    "entrypoint": "model:build",
    "inputs": [
        {"name": "x", "dtype": "float32", "shape": ["batch", 4]},
        {"name": "text", "dtype": "string", "shape": ["batch"], "optional": True},
        {"name": "label", "dtype": "int64", "shape": ["batch"], "optional": True, "min": 0, "max": 9},
    ],
    "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 4]}],
    "batching": {"max_batch_size": 16, "max_wait_ms": 5},
}
MODEL_SPEC: Final = ModelSpec.model_validate(_SPEC)
_INPUTS: Final[dict[str, Any]] = {"x": [[1.0, 2.0, 3.0, 4.0]], "text": ["a"], "label": [3]}
_BUILDER: Final = JobBuilder(tenant="default", keyring=SIGNING, max_bytes=10 * 1024 * 1024)


def _request(random: Random) -> dict[str, Any]:
    """The arguments of a submit."""
    inputs: Any = mutated(random, _INPUTS)
    if random.random() < 0.3:
        inputs = any_value(random)
    elif random.random() < 0.3 and isinstance(inputs, dict):
        inputs["x"] = _any_array(random)
    options = ("priority", "deadline_s", "idempotency_key", "tenant", "version", "outputs", "traceparent")
    wild = {name: any_value(random, 2) for name in options if random.random() < 0.1}
    return {"inputs": inputs, "key": wild.pop("idempotency_key", None), "options": wild}


def _any_array(random: Random) -> Any:
    dtype = random.choice(("float32", "float64", "int8", "complex64", "U3", "S3", "O", "M8[s]", "V4", "bool", ">f4"))
    shape = [random.choice((0, 1, 2, 4)) for _ in range(random.choice((0, 1, 2, 2, 2, 3, 9)))]
    array = np.zeros(shape, dtype)
    if array.size and array.dtype.kind == "f":
        array.flat[0] = random.choice((math.nan, math.inf, 1e30, 0.0))
    return array


def _builder(request: Mapping[str, Any]) -> None:
    options = SubmitOptions(**request["options"])
    _BUILDER.build(MODEL_SPEC, request["inputs"], options, idempotency_key=request["key"])


def _spec(random: Random) -> bytes:
    kind = random.random()
    if kind < 0.5:
        try:
            return yaml.safe_dump(mutated(random, _SPEC), allow_unicode=True).encode("utf-8", "surrogatepass")
        except (yaml.YAMLError, RecursionError):
            return b"["
    known = random.choice(seeds("specs"))
    return known if kind < 0.6 else damaged(random, known, yaml.safe_dump(_SPEC).encode())


class SpecDoor:
    """A package folder whose model.yaml is written anew for every offer."""

    def __init__(self, root: Path) -> None:
        self._folder = root / MODEL / "1"
        self._folder.mkdir(parents=True)
        (self._folder / "model.py").write_text("def build():\n    return lambda inputs: {'y': inputs['x']}\n")

    def take(self, text: bytes) -> None:
        """Reads it as `penstock models register` and a worker do."""
        (self._folder / "model.yaml").write_bytes(text)
        load_package(self._folder)


_VARIABLES: Final = tuple(setting.variable for setting in catalogue())
_SETTING_KEYS: Final = tuple(setting.key for setting in catalogue())


def _settings(random: Random) -> tuple[dict[str, str], bytes]:
    """(environment, YAML file)."""
    environ = {
        random.choice(_VARIABLES): any_text(random) if random.random() < 0.7 else str(any_number(random))
        for _ in range(random.randint(0, 3))
    }
    if random.random() < 0.1:
        environ["PENSTOCK_" + random.choice(_WORDS)] = "x"
    table: Any = {random.choice(_SETTING_KEYS): any_value(random, 2) for _ in range(random.randint(0, 3))}
    kind = random.random()
    if kind < 0.2:
        text = random.choice(seeds("settings"))
        return environ, text if kind < 0.05 else damaged(random, text, b"queue: {lease_s: 1}\n")
    try:
        return environ, yaml.safe_dump(table if kind < 0.9 else any_value(random)).encode("utf-8", "surrogatepass")
    except (yaml.YAMLError, RecursionError):
        return environ, b"a: ["


class SettingsDoor:
    """A settings file and an environment, read as every process does at its start."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "settings.yaml"
        self._folder = folder

    def take(self, offered: tuple[Mapping[str, str], bytes]) -> None:
        """Raises ConfigurationError."""
        environ, text = offered
        self._file.write_bytes(text)
        Settings.load(self._file, environ=environ, cwd=self._folder)


_LANE: Final[dict[str, Any]] = {
    "model": MODEL,
    "inputs": {"x": [[1, 2, 3, 4]]},
    "tenant": "acme",
    "priority": "high",
    "deadline_s": 5,
    "version": "1",
    "outputs": ["y"],
}


def lane_message(random: Random) -> bytes:
    """The JSON body of a `penstock.infer` task: its arguments, changed."""
    kind = random.random()
    if kind < 0.6:
        return json.dumps(mutated(random, _LANE)).encode()
    known = random.choice(seeds("lane"))
    return known if kind < 0.7 else damaged(random, known, json.dumps(_LANE).encode())


def arguments_of(message: bytes) -> Any:
    """What Celery reads of it, before anything of ours does; None for what is no JSON."""
    try:
        return json.loads(message)
    except (ValueError, RecursionError):
        return None


class LaneTarget:
    """Celery's task endpoint on a broker in memory, behind Celery, which checks the names of a task's arguments."""

    def __init__(self, root: Path) -> None:
        broker = MemoryBroker()
        broker.put_spec(MODEL, MODEL_SPEC.to_json())
        limits = Limits(10**9, 0, 60_000)
        self._ingress = TaskIngress(broker, _BUILDER, SpecCache(root), limits, self._keep, is_open=True)
        self._count = 0

    def take(self, arguments: Any) -> None:
        """Raises Rejected, or what stands for Celery's own refusal."""
        if not isinstance(arguments, dict) or not {"model", "inputs"} <= arguments.keys() <= _LANE.keys():
            raise _NoTask("no such arguments")
        self._count += 1
        self._ingress.admit(f"task-{self._count}", **arguments)

    def _keep(self, job_id: str, request: Mapping[str, object]) -> None:
        """These tasks have no followers."""


class _NoTask(Exception):
    """Celery refuses it before the endpoint."""


def targets(folder: Path) -> list[Target]:
    """Every endpoint but the worker's, whose loop needs a real worker; `folder` is empty and keeps what they read."""
    return [
        Target("envelope", envelope, _open_all, (Corrupt,)),
        Target("tensors", _tensors, lambda offered: decode(*offered), (Corrupt,)),
        Target("events", _events, _read_events, (Corrupt,)),
        Target("inputs", _request, _builder, (Rejected,)),
        Target("spec", _spec, SpecDoor(folder / "models").take, (ConfigurationError,)),
        Target("settings", _settings, SettingsDoor(folder).take, (ConfigurationError,)),
        Target("lane", lambda random: arguments_of(lane_message(random)), LaneTarget(folder).take, (Rejected, _NoTask)),
    ]


def _events(random: Random) -> bytes:
    """The body of some events: good ones, changed bytes, or chunks with wild descriptions."""
    good = encode_parts(
        [*(chunk_part({"t": np.array([number])}, None, 1000) for number in range(3)), EventPart(fraction=0.5)]
    )
    kind = random.random()
    if kind < 0.1:
        return good
    if kind < 0.7:
        return damaged(random, good, random.randbytes(30))
    return msgspec.msgpack.encode([[random.randbytes(8), _wild_content(random), None] for _ in range(3)])


def _tensors(random: Random) -> tuple[tuple[Tensor, ...], bytes]:
    described = [
        Tensor(str(name), str(dtype), tuple(min(extent, 2**63 - 1) for extent in shape))
        for name, dtype, shape in _wild_content(random)
    ]
    if random.random() < 0.5:
        described = [Tensor("x", random.choice(("string", "float32", "bool")), (random.choice((1, 4, 70_000)),))]
    body = random.choice((b"", b"\0" * 16, random.randbytes(64), struct.pack("<II", 1, 2**32 - 1), b"\0" * 300_000))
    return tuple(described), body
