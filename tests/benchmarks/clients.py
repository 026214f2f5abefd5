"""The client's side of a measurement, in a process of its own: `python -m tests.benchmarks.clients KIND URL`.

    order (a line of JSON on stdin) -> inputs from the seed -> KIND's client runs them -> figures (a line on stdout)
                                                                                        + answers in a file

Time and CPU are taken around the jobs only: inputs are made before, answers are kept and compared by the caller.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec
import numpy as np
import numpy.typing as npt
import redis
from celery import Celery
from celery.result import AsyncResult

from penstock import AsyncClient, Client, PriorityName
from tests.benchmarks import meter, mlp
from tests.benchmarks.celery_mlp import CLASSIFY
from tests.benchmarks.grpc_load import Connection
from tests.benchmarks.mlp import Float32Array
from tests.benchmarks.raw_worker import ECHO, JOBS, REPLIES

__all__ = ["KINDS", "MODELS_OF_SHAPES", "SHAPES", "STREAMING_MODEL", "TEXT_MODEL", "Answers", "Shape"]

_TIMEOUT_S: Final = 60.0
_PARTS: Final = 4
"""Bare Redis is sent new jobs when so large a part of those in flight has been answered."""
_CLASSES: Final = 10
MODELS_OF_SHAPES: Final = ("mlp", "mlp-b", "mlp-c", "mlp-d")
"""The benchmark's model under several names; see shapes.py."""
STREAMING_MODEL: Final = "mlp-stream"
"""The same model, whose answer comes as a chunk, too."""
TEXT_MODEL: Final = "mlp-text"
"""The same model, whose row is a text with a character for each byte."""


class Answers(NamedTuple):
    """`logits` (jobs, 10) float32, and `latencies_s`, from a job's submission until its result was read."""

    logits: Float32Array
    latencies_s: npt.NDArray[np.float64]


class ClientKind(Protocol):
    """One way to get jobs done."""

    def prepare(self, rows: Float32Array) -> Any:
        """What `run` takes; made before the clock starts."""

    def run(self, jobs: Any, in_flight: int) -> Answers:
        """One job per row, at most `in_flight` of them at a time."""


class TakesRows:
    """A client that is given arrays, as users have them: encoding them is part of the cost."""

    def prepare(self, rows: Float32Array) -> Float32Array:
        """See ClientKind.prepare."""
        return rows


class PenstockAsync(TakesRows):
    """AsyncClient, with as many coroutines as jobs may be in flight; each submits one and awaits its result."""

    def __init__(self, url: str) -> None:
        self._runner = asyncio.Runner()
        self._client = self._runner.run(_opened(url))

    def run(self, rows: Float32Array, in_flight: int) -> Answers:
        """See ClientKind.run."""
        return self._runner.run(self._run(rows, in_flight))

    async def _run(self, rows: Float32Array, in_flight: int) -> Answers:
        answers = _blank(len(rows))
        todo = iter(range(len(rows)))

        async def caller() -> None:
            for index in todo:
                begun = time.perf_counter()
                job = await self._client.submit("mlp", {"x": rows[index : index + 1]})
                answers.logits[index] = (await job.result(timeout=_TIMEOUT_S))["logits"][0]
                answers.latencies_s[index] = time.perf_counter() - begun

        await asyncio.gather(*(caller() for _ in range(in_flight)))
        return answers


async def _opened(url: str) -> AsyncClient:
    return AsyncClient(url)


class Shape(NamedTuple):
    """How jobs differ: each takes the next of these, in turn."""

    title: str
    models: tuple[str, ...] = MODELS_OF_SHAPES[:1]
    tenants: int = 1
    rows: tuple[int, ...] = (1,)
    priorities: tuple[PriorityName, ...] = ("normal",)
    is_traced: bool = False
    """Each job has a trace of its own, so that no two headers are alike."""
    is_keyed: bool = False
    """Each job has an idempotency key of its own."""
    is_text: bool = False
    """The inputs are those of TEXT_MODEL."""


class PenstockShaped(PenstockAsync):
    """AsyncClient, as PenstockAsync, with jobs of one shape. Job number n begins with row n."""

    def __init__(self, url: str, shape: Shape) -> None:
        super().__init__(url)
        self._shape = shape
        self._runs = 0

    async def _run(self, rows: Float32Array, in_flight: int) -> Answers:
        shape, answers = self._shape, _blank(len(rows))
        self._runs += 1
        inputs = _inputs_of(shape, rows)
        todo = iter(range(len(rows)))

        async def caller() -> None:
            for index in todo:
                begun = time.perf_counter()
                job = await self._client.submit(
                    shape.models[index % len(shape.models)],
                    {"x": inputs[index : index + shape.rows[index % len(shape.rows)]]},
                    idempotency_key=f"{self._runs}-{index}" if shape.is_keyed else None,
                    tenant=f"tenant-{index % shape.tenants}",
                    priority=shape.priorities[index % len(shape.priorities)],
                    traceparent=f"00-{index + 1:032x}-{index + 1:016x}-01" if shape.is_traced else "",
                )
                answers.logits[index] = (await job.result(timeout=_TIMEOUT_S))["logits"][0]
                answers.latencies_s[index] = time.perf_counter() - begun

        await asyncio.gather(*(caller() for _ in range(in_flight)))
        return answers


def _inputs_of(shape: Shape, rows: Float32Array) -> npt.NDArray[Any]:
    """The rows of all jobs; the first ones once more behind the last."""
    if shape.is_text:
        return np.array([row.tobytes().decode("latin-1") for row in rows], object)
    return np.concatenate([rows, rows[: max(shape.rows)]])


SHAPES: Final = {
    "plain": Shape("one shape"),
    "mixed": Shape(
        "four models, eight tenants, one or two rows, two priorities",
        MODELS_OF_SHAPES,
        tenants=8,
        rows=(1, 2),
        priorities=("normal", "high", "normal", "normal", "normal"),
    ),
    "models": Shape("four models on one worker", MODELS_OF_SHAPES),
    "tenants": Shape("64 tenants", tenants=64),
    "rows": Shape("four rows a job", rows=(4,)),
    "traced": Shape("a trace for each job", is_traced=True),
    "keyed": Shape("an idempotency key for each job", is_keyed=True),
    "texts": Shape("texts of 1,536 characters", (TEXT_MODEL,), is_text=True),
    "streams": Shape("jobs of a model that streams one chunk", (STREAMING_MODEL,)),
}
"""By name: the plain one, and those that shapes.py measures against it."""


class PenstockMany(TakesRows):
    """Client.submit_many in windows: submit so many, read them all; Client.submit when only one may be in flight."""

    def __init__(self, url: str) -> None:
        self._client = Client(url)

    def run(self, rows: Float32Array, in_flight: int) -> Answers:
        """See ClientKind.run."""
        if in_flight == 1:
            return self._run_alone(rows)
        answers = _blank(len(rows))
        for start in range(0, len(rows), in_flight):
            window = range(start, min(start + in_flight, len(rows)))
            begun = time.perf_counter()
            jobs = self._client.submit_many("mlp", [{"x": rows[index : index + 1]} for index in window])
            for index, job in zip(window, jobs, strict=True):
                answers.logits[index] = job.result(timeout=_TIMEOUT_S)["logits"][0]
                answers.latencies_s[index] = time.perf_counter() - begun
        return answers

    def _run_alone(self, rows: Float32Array) -> Answers:
        answers = _blank(len(rows))
        for index in range(len(rows)):
            begun = time.perf_counter()
            job = self._client.submit("mlp", {"x": rows[index : index + 1]})
            answers.logits[index] = job.result(timeout=_TIMEOUT_S)["logits"][0]
            answers.latencies_s[index] = time.perf_counter() - begun
        return answers


class PlainCelery(TakesRows):
    """A Celery task per job, with JSON lists in and out; results by AsyncResult.get, oldest first."""

    def __init__(self, url: str) -> None:
        self._app = Celery("client", broker=url, backend=url)

    def run(self, rows: Float32Array, in_flight: int) -> Answers:
        """See ClientKind.run."""
        answers = _blank(len(rows))
        waiting: deque[tuple[int, float, AsyncResult]] = deque()

        def finish_one() -> None:
            index, begun, result = waiting.popleft()
            answers.logits[index] = result.get(timeout=_TIMEOUT_S)
            answers.latencies_s[index] = time.perf_counter() - begun

        for index, row in enumerate(rows):
            if len(waiting) == in_flight:
                finish_one()
            begun = time.perf_counter()
            waiting.append((index, begun, self._app.send_task(CLASSIFY, args=[row.tolist()])))
        while waiting:
            finish_one()
        return answers


class RawRedis(TakesRows):
    """Two streams and nothing else: pipelined XADD there, XREAD here; the bound of what Redis allows.

    With one job in flight the worker only echoes: the bound of one round trip.
    """

    def __init__(self, url: str) -> None:
        self._redis = redis.Redis.from_url(url)
        self._last = b"$"

    def run(self, rows: Float32Array, in_flight: int) -> Answers:
        """See ClientKind.run."""
        key = ECHO if in_flight == 1 else JOBS
        answers, part = _blank(len(rows)), max(1, in_flight // _PARTS)
        begun = np.empty(len(rows))
        sent = done = 0
        self._last = self._newest()
        while done < len(rows):
            while sent < len(rows) and sent - done <= in_flight - part:
                begun[sent : sent + part] = time.perf_counter()
                sent = self._send(key, rows, sent, part)
            entries: Any = self._redis.xread({REPLIES: self._last}, block=1000, count=in_flight)
            for entry_id, fields in entries[0][1] if entries else ():
                index = int(fields[b"n"])
                answers.logits[index] = np.frombuffer(fields[b"y"], np.float32)
                answers.latencies_s[index] = time.perf_counter() - begun[index]
                self._last, done = entry_id, done + 1
        self._redis.xtrim(REPLIES, minid=self._last)
        return answers

    def _newest(self) -> bytes:
        newest: Any = self._redis.xrevrange(REPLIES, count=1)
        return newest[0][0] if newest else b"0"

    def _send(self, key: str, rows: Float32Array, start: int, count: int) -> int:
        stop = min(start + count, len(rows))
        pipeline = self._redis.pipeline(transaction=False)
        for index in range(start, stop):
            pipeline.xadd(key, {"n": index, "x": rows[index].tobytes()})
        pipeline.execute()
        return stop


class JsonOverHttp:
    """One kept-alive connection per job in flight, JSON lists in and out: what a model server's clients do.

    The requests are made before the clock starts, so that the load generator is not what is measured. The user in the
    URL is the API key.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname, parts.port)
        host = parts.netloc.rpartition("@")[2]
        self._head = f"POST {parts.path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        if parts.username:
            self._head += f"Authorization: Bearer {parts.username}\r\n"
        self._runner = asyncio.Runner()

    def prepare(self, rows: Float32Array) -> list[bytes]:
        """See ClientKind.prepare."""
        bodies = [self._body_of(row) for row in rows]
        return [f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body for body in bodies]

    def _body_of(self, row: Float32Array) -> bytes:
        return json.dumps({"x": row.tolist()}).encode()

    def _logits(self, body: bytes) -> Any:
        return json.loads(body)["logits"]

    def run(self, jobs: list[bytes], in_flight: int) -> Answers:
        """See ClientKind.run."""
        return self._runner.run(self._run(jobs, in_flight))

    async def _run(self, jobs: list[bytes], in_flight: int) -> Answers:
        answers = _blank(len(jobs))
        todo = iter(range(len(jobs)))

        async def caller() -> None:
            reader, writer = await asyncio.open_connection(*self._address)
            for index in todo:
                begun = time.perf_counter()
                writer.write(jobs[index])
                answers.logits[index] = self._logits(await _body(reader))
                answers.latencies_s[index] = time.perf_counter() - begun
            writer.close()

        await asyncio.gather(*(caller() for _ in range(in_flight)))
        return answers


class GatewayJson(JsonOverHttp):
    """The gateway's :predict, with one row as nested lists."""

    def _body_of(self, row: Float32Array) -> bytes:
        return json.dumps({"inputs": {"x": [row.tolist()]}}).encode()

    def _logits(self, body: bytes) -> Any:
        return json.loads(body)["outputs"]["logits"]["data"][0]


class GatewayOip(JsonOverHttp):
    """The gateway's Open Inference Protocol, with the bytes of one row behind the JSON, both ways."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        tensor: dict[str, Any] = {"name": "x", "shape": [1, mlp.WIDTH], "datatype": "FP32"}
        tensor["parameters"] = {"binary_data_size": 4 * mlp.WIDTH}
        request = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
        self._json = json.dumps(request).encode()
        self._head += f"Inference-Header-Content-Length: {len(self._json)}\r\n"

    def _body_of(self, row: Float32Array) -> bytes:
        return self._json + row.tobytes()

    def _logits(self, body: bytes) -> Any:
        return np.frombuffer(body[-4 * _CLASSES :], "<f4")


class GatewayBatch:
    """A file through /v1/batches: upload, create, wait for the end, download. A line has its row as base64."""

    _ENDPOINT: Final = "/v1/models/mlp:predict"
    _BOUNDARY: Final = b"boundary-of-the-benchmark"

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port)

    def prepare(self, rows: Float32Array) -> bytes:
        """See ClientKind.prepare."""
        lines = []
        for index, row in enumerate(rows):
            tensor = {"dtype": "float32", "shape": [1, mlp.WIDTH], "base64": base64.b64encode(row.tobytes()).decode()}
            body = {"inputs": {"x": tensor}}
            lines.append({"custom_id": str(index), "method": "POST", "url": self._ENDPOINT, "body": body})
        content = b"\n".join(map(msgspec.json.encode, lines))
        field = b'--%s\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
        file = field % (self._BOUNDARY, b"file", b'; filename="rows.jsonl"', content)
        return b"".join((field % (self._BOUNDARY, b"purpose", b"", b"batch"), file, b"--%s--\r\n" % self._BOUNDARY))

    def run(self, form: bytes, in_flight: int) -> Answers:
        """See ClientKind.run. `in_flight` is the gateway's."""
        with closing(HTTPConnection(*self._address, timeout=_TIMEOUT_S)) as http:
            kind = f"multipart/form-data; boundary={self._BOUNDARY.decode()}"
            file = json.loads(_asked(http, "POST", "/v1/files", form, kind))
            fields = {"input_file_id": file["id"], "endpoint": self._ENDPOINT, "completion_window": "24h"}
            batch = json.loads(_asked(http, "POST", "/v1/batches", json.dumps(fields).encode()))
            while batch["status"] not in ("completed", "failed"):
                time.sleep(0.05)
                batch = json.loads(_asked(http, "GET", f"/v1/batches/{batch['id']}"))
            content = _asked(http, "GET", f"/v1/files/{batch['output_file_id']}/content")
        answers = _blank(batch["request_counts"]["total"])
        for line in map(msgspec.json.decode, content.splitlines()):
            answers.logits[int(line["custom_id"])] = line["response"]["body"]["outputs"]["logits"]["data"][0]
        return answers


def _asked(http: HTTPConnection, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> bytes:
    http.request(method, path, body, {"Content-Type": kind})
    response = http.getresponse()
    found = response.read()
    if response.status != HTTPStatus.OK:
        raise ConnectionError(f"The gateway answered {response.status}: {found[:200]!r}")
    return found


class MsgpackOverHttp(JsonOverHttp):
    """The bytes of one row in msgpack, both ways."""

    def _body_of(self, row: Float32Array) -> bytes:
        return msgspec.msgpack.encode({"x": row.tobytes()})

    def _logits(self, body: bytes) -> Any:
        return np.frombuffer(msgspec.msgpack.decode(body)["logits"], "<f4")


class GatewayGrpc:
    """The gateway's Open Inference Protocol over gRPC, with the raw bytes of one row, both ways; one connection.

    url: host:port. The requests are made before the clock starts, as those of JsonOverHttp.
    """

    def __init__(self, url: str) -> None:
        # The memory of the other kinds is measured, too.
        from penstock.producers.gateway.rpc.messages import message

        self._address = url
        self._runner = asyncio.Runner()
        self._new_request: Any = message("ModelInferRequest")
        self._parse: Any = message("ModelInferResponse").FromString

    def prepare(self, rows: Float32Array) -> list[bytes]:
        """See ClientKind.prepare."""
        request = self._new_request(model_name="mlp")
        request.inputs.add(name="x", datatype="FP32", shape=[1, mlp.WIDTH])
        request.raw_input_contents.append(b"")
        jobs = []
        for row in rows:
            request.raw_input_contents[0] = row.tobytes()
            jobs.append(request.SerializeToString())
        return jobs

    def run(self, jobs: list[bytes], in_flight: int) -> Answers:
        """See ClientKind.run."""
        return self._runner.run(self._run(jobs, in_flight))

    async def _run(self, jobs: list[bytes], in_flight: int) -> Answers:
        answers = _blank(len(jobs))
        todo = iter(range(len(jobs)))
        connection = await Connection.open(self._address, "/inference.GRPCInferenceService/ModelInfer")

        async def caller() -> None:
            for index in todo:
                begun = time.perf_counter()
                answer = self._parse(await connection.call(jobs[index]))
                answers.logits[index] = np.frombuffer(answer.raw_output_contents[0], "<f4")
                answers.latencies_s[index] = time.perf_counter() - begun

        await asyncio.gather(*(caller() for _ in range(in_flight)))
        connection.close()
        return answers


async def _body(reader: asyncio.StreamReader) -> bytes:
    status, *headers = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
    if status.split()[1] != b"200":
        raise ConnectionError(f"The model server answered {status!r}")
    length = next(int(line.partition(b":")[2]) for line in headers if line.startswith(b"content-length:"))
    return await reader.readexactly(length)


KINDS: Final[dict[str, Callable[[str], ClientKind]]] = {
    "async": PenstockAsync,
    "submit_many": PenstockMany,
    "celery": PlainCelery,
    "raw": RawRedis,
    "http": JsonOverHttp,
    "gateway-json": GatewayJson,
    "gateway-grpc": GatewayGrpc,
    "gateway-oip": GatewayOip,
    "gateway-batch": GatewayBatch,
    "msgpack": MsgpackOverHttp,
    **{name: partial(PenstockShaped, shape=shape) for name, shape in SHAPES.items()},
}


def _blank(jobs: int) -> Answers:
    return Answers(np.full((jobs, _CLASSES), np.nan, np.float32), np.full(jobs, np.nan))


def serve(kind: ClientKind) -> None:
    """Carries out orders until stdin ends: {"jobs", "in_flight", "seed", "answers": file to write}."""
    for line in sys.stdin:
        order = json.loads(line)
        jobs = kind.prepare(mlp.inputs(order["jobs"], order["seed"]))
        gc.collect()
        cpu_s, begun = time.process_time(), time.perf_counter()
        answers = kind.run(jobs, order["in_flight"])
        seconds, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_s
        np.savez(order["answers"], logits=answers.logits, latencies_s=answers.latencies_s)
        del jobs, answers
        figures = {"seconds": seconds, "cpu_s": cpu_s, "resident_bytes": meter.resident_bytes(os.getpid())}
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    serve(KINDS[sys.argv[1]](sys.argv[2]))
