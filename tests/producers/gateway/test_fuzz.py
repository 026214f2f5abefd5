"""Requests that nobody would write on purpose, over every route with a body: no 500, no job of a refused request."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import msgspec
import numpy as np
import pytest
from redis import Redis
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from penstock.registry.queues import record_key
from tests.benchmarks.meter import resident_bytes
from tests.producers.gateway.conftest import GatewayStack
from tests.producers.gateway.rpc.conftest import INFER, PATIENCE_S, PREDICT, Caller, infer_request, predict_request
from tests.producers.gateway.texts import Site
from tests.servers import wait_until

FUZZED_REQUESTS = int(os.environ.get("FUZZED_REQUESTS", "25000"))
"""Of the slow run. `make fuzz` sends 100,000."""
LONG = [pytest.mark.slow, pytest.mark.timeout(7200)]
ROW = [1.0, 2.0, 3.0, 4.5]
BYTES = np.array([ROW], "<f4").tobytes()
TENSOR = {"dtype": "float32", "shape": [1, 4], "data": [ROW]}
OIP = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": ROW}
TEXT = {
    "model": "writer",
    "max_tokens": 1,
    "max_output_tokens": 1,
    "stream": False,
    "n": 1,
    "seed": 1,
    "top_p": 0.5,
    "stop": ["x"],
    "logit_bias": {"7": 1},
    "stream_options": None,
    "temperature": 1,
    "presence_penalty": 0.5,
}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/jobs": {"model": "double", "inputs": {"x": TENSOR}, "priority": "low", "retry": {"attempts": 2}},
    "/v1/jobs:batch": {"model": "double", "inputs": [{"x": [ROW]}, {"x": TENSOR}], "idempotency_keys": [None, None]},
    "/v1/models/double:predict": {"inputs": {"x": TENSOR}, "outputs": ["y"], "timeout_ms": 60_000},
    "/predict?model=double": {"inputs": ROW, "model_version": "1"},
    "/v1/batches": {
        "input_file_id": "file-0",
        "endpoint": "/v1/embeddings",
        "completion_window": "24h",
        "metadata": {"k": "v"},
    },
    "/v1/batches/batch_0/cancel": {},
    "/v1/files": {"purpose": "batch"},
    "/v1/embeddings": {"model": "embedder", "input": ["abcd"], "encoding_format": "float"},
    "/v1/completions": {**TEXT, "prompt": "abcd", "logprobs": 2, "echo": False, "best_of": None, "suffix": None},
    "/v1/chat/completions": {
        **TEXT,
        "messages": [{"role": "user", "content": "abcd"}],
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
    },
    "/v1/responses": {
        **TEXT,
        "input": [{"role": "user", "content": "abcd"}],
        "instructions": "x",
        "store": True,
        "tools": [],
        "text": {"format": {"type": "text"}},
        "background": False,
        "truncation": "disabled",
    },
    "/v2/models/double/infer": {"inputs": [OIP], "outputs": [{"name": "y"}], "parameters": {"priority": 1}},
    "/v2/repository/index": {},
    # Off in this gateway: 403.
    "/v1/models:load": {"name": "double", "version": "1"},
    "/v1/models:unload": {"name": "double", "version": "1"},
}
TEXTS = {"/v1/completions", "/v1/chat/completions", "/v1/responses"}
WORDS = [
    "double",
    "napper",
    "nothing",
    "double.x",
    "1",
    "-1",
    "%00",
    "%ff",
    "..",
    "%2e%2e%2f",
    "a" * 300,
    "%C3%A9",
    "{}",
]
ODD: list[Any] = [
    *(None, True, 0, -1, 1.5, 1e308, -(1 << 70), 1 << 70, "", "x", "\x00", "\ud800", "é" * 300, [], {}, [[]], [None]),
    *({"dtype": "float32"}, {"dtype": "string", "shape": [1], "data": ["a"]}, {"nbytes": 16}, [[1, "a"]], [[[1.0]]]),
    *("float64", "BYTES", "double", [1 << 40] * 9, [-1], [0], [1, 4], {"binary_data_size": 16}, "AAAA", ["y", "y"]),
]
HEADERS = [
    ("Content-Type", ["application/json", "application/msgpack", "application/octet-stream", "text/html", "", "é"]),
    ("Inference-Header-Content-Length", ["0", "5", "40", "-1", "99999999999", "x", "¹"]),
    ("Prefer", ["wait=1", "wait", "respond-async", ",,", "wait=" + "9" * 40]),
    ("Idempotency-Key", ["k", '"k"', "", "x" * 300, "a b"]),
    ("Accept", ["*/*", "application/msgpack", "application/octet-stream", ";;", "text/html"]),
    ("Content-Encoding", ["gzip", "identity"]),
    ("traceparent", ["00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x"]),
    ("Last-Event-ID", ["1", "x"]),
]


def jobs_of(redis: Redis) -> set[bytes]:
    """The records of all jobs, without the streams of events that their subscribers have made."""
    return {key for key in redis.scan_iter("{*}:job:*") if not key.endswith(b":events")}


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a document."""
    yield path
    pairs = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in pairs:
        yield from places(value, (*path, key))


def changed(document: Any, choice: random.Random) -> Any:
    """The document with one value replaced, removed or added."""
    copy = json.loads(json.dumps(document))
    path = choice.choice(list(places(copy)))
    if not path:
        return choice.choice(ODD)
    holder = copy
    for key in path[:-1]:
        holder = holder[key]
    action = choice.randrange(3)
    if action == 0 and isinstance(holder, dict):
        del holder[path[-1]]
    elif action == 1 and isinstance(holder, dict):
        holder[choice.choice(["inputs", "x", "base64", "nbytes", "", "é", "model"])] = choice.choice(ODD)
    else:
        holder[path[-1]] = choice.choice(ODD)
    return copy


def body(document: Any, choice: random.Random) -> bytes:
    """A document as bytes, which may then be broken."""
    try:
        raw = msgspec.msgpack.encode(document) if choice.random() < 0.2 else json.dumps(document).encode()
    except (OverflowError, ValueError):
        raw = json.dumps(document).encode()
    if choice.random() < 0.2:
        raw += BYTES
    if choice.random() < 0.3 and raw:
        place = choice.randrange(len(raw))
        broken = [raw[:place], raw[:place] + bytes([choice.randrange(256)]) + raw[place + 1 :], b"[" * 5000 + raw, b""]
        raw = choice.choice(broken)
    return raw


def routes(document: dict[str, Any]) -> list[tuple[str, str]]:
    """(method, path) of all routes of an OpenAPI document."""
    return [(method.upper(), path) for path, operations in document["paths"].items() for method in operations]


def ids_of_ended_things(http: httpx.Client) -> list[str]:
    """The ids of a job, a file and a batch that have ended: event streams of the job end at once."""
    job = http.post("/v1/jobs", json=GOOD["/v1/jobs"], headers={"Prefer": "wait=60"})
    line = {"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": GOOD["/v1/embeddings"]}
    files = {"file": ("lines.jsonl", json.dumps(line))}
    file_id = http.post("/v1/files", files=files, data={"purpose": "batch"}).json()["id"]
    batch = http.post("/v1/batches", json={**GOOD["/v1/batches"], "input_file_id": file_id}).json()
    wait_until(lambda: http.get(f"/v1/batches/{batch['id']}").json()["status"] == "completed", 60, "the batch ended")
    assert job.json()["status"] == "completed"
    return [job.json()["id"], file_id, batch["id"]]


def multipart(choice: random.Random) -> httpx.Request:
    """An upload: fields that are missing, twice or odd, and bytes that may be cut or changed anywhere."""
    parts: list[tuple[str, Any]] = [("purpose", (None, "batch")), ("file", ("lines.jsonl", b"{}"))]
    odd = [("purpose", (None, "x" * 300)), ("file", ("é\x00.jsonl", b"\xff" * 70_000)), ("", (None, "")), parts[1]]
    parts = choice.sample([*parts, *odd], choice.randrange(1, 5))
    made = httpx.Request("POST", "http://gateway/v1/files", files=parts)
    content, kind = made.read(), made.headers["Content-Type"]
    if choice.random() < 0.5:
        place = choice.randrange(len(content))
        content = choice.choice([content[:place], content[:place] + b"\r\n--" + content[place:], content * 2, b""])
    kinds = [kind, kind[:-5], "multipart/form-data", "multipart/form-data; boundary=", f"{kind}; boundary=x"]
    kind = choice.choice(kinds) if choice.random() < 0.3 else kind
    return httpx.Request("POST", "http://gateway/v1/files", headers={"Content-Type": kind}, content=content)


def requests(seed: int, count: int, described: list[tuple[str, str]], ids: list[str]) -> Iterator[httpx.Request]:
    """So many requests: those of GOOD, changed, one in four of a described route with any words or ids, and uploads."""
    choice = random.Random(seed)
    for _ in range(count):
        if choice.random() < 0.04:
            yield multipart(choice)
            continue
        if choice.random() < 0.25:
            method, path = choice.choice(described)
            path = re.sub(r"\{\w+\}", lambda _: choice.choice([*WORDS, *ids, *ids]), path)
            if choice.random() < 0.3:
                path += choice.choice(
                    ["?wait=1", "?wait=-1", "?wait=" + "9" * 40, "?model=%ff", "?" + "a&" * 40, "?loaded=x"]
                )
            document = choice.choice([*GOOD.values(), *(value for value in ODD if isinstance(value, dict))])
            yield _request(method, path, document, choice)
            continue
        path, good = choice.choice(list(GOOD.items()))
        document = good
        for _ in range(choice.randrange(3)):
            document = changed(document, choice) if isinstance(document, dict) else document
        if choice.random() < 0.05:
            path = choice.choice(
                ["/v1/jobs/x", "/v2/models/%00/infer", "/v1/models/double:predict?%ff", "/v1//jobs", path]
            )
        method = "POST" if choice.random() < 0.95 else choice.choice(["GET", "PUT", "DELETE", "HEAD", "OPTIONS"])
        yield _request(method, path, document, choice)


def _request(method: str, path: str, document: Any, choice: random.Random) -> httpx.Request:
    """A request with odd headers, and with a body that may be broken."""
    headers = {"Content-Type": "application/json"}
    headers |= {name: choice.choice(values) for name, values in HEADERS if choice.random() < 0.15}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    content = body(document, choice) if method == "POST" or choice.random() < 0.2 else b""
    return httpx.Request(method, f"http://gateway{path}", headers=raw, content=content)


@pytest.mark.parametrize(("seed", "count"), [(1, 600), pytest.param(2, FUZZED_REQUESTS, marks=LONG)])
def test_no_request_breaks_the_gateway(stack: GatewayStack, site: Site, seed: int, count: int):
    """IN-035: 0 answers of 500, a reason in each refusal, no job of a refused request, memory that does not grow."""
    gateways = (stack.gateway, site.gateway)
    with stack.server.client() as redis, stack.gateway.client() as http:
        described = routes(http.get("/openapi.json").json())
        statuses: Counter[int] = Counter()
        further = 0
        ids = ids_of_ended_things(http)
        before = jobs_of(redis)
        jobs, answered = set[str](), set[str]()
        memory = 0
        for number, request in enumerate(requests(seed, count, described, ids)):
            # The other gateway has the tokenizer.
            gateway = site.gateway if request.url.path in TEXTS else stack.gateway
            request.url = httpx.URL(gateway.url).copy_with(raw_path=request.url.raw_path)
            request.headers["Host"] = "gateway"
            found = http.send(request)
            assert found.status_code != 500, (request.method, request.url, request.headers, request.content)
            statuses[found.status_code] += 1
            is_refused = found.status_code in (400, 403, 404, 405, 413, 415, 422)
            if is_refused:
                # Only the worker knows the tokens of a model: it refuses the first of so many texts.
                is_of_worker = "penstock-job-id" in found.headers
                assert not is_of_worker or request.url.path in TEXTS
                further += 127 * is_of_worker
                assert request.method == "HEAD" or re.search("[Ee]xpected|Declared", found.text), found.text
            if "penstock-job-id" in found.headers:
                jobs.add(found.headers["penstock-job-id"])
            if request.url.path == "/v1/jobs:batch" and found.status_code == 202:
                jobs |= {each["id"] for each in found.json()["jobs"] if each["status"] == "accepted"}
            if found.status_code == 200 and request.url.path in TEXTS:
                answered.add(request.url.path)
                # Each text is a job, and the answer names the first; a response has one, and a number for each event.
                is_one = request.url.path == "/v1/responses"
                further += 0 if is_one else len({*re.findall(r'"index":(\d+)', found.text)}) - 1
            if number == count // 2:
                memory = sum(resident_bytes(each.pid) for each in gateways)
        # An idempotency key may be that of a job of an earlier test, whose record may expire. No refused request has a
        # job. Only of texts, the answer names the first job alone, and one that was late may name none.
        late = statuses[503] + statuses[504]
        after = jobs_of(redis)
        named = {f"{{{name}}}:job:{local}".encode() for name, _, local in (job.partition(".") for job in jobs)}
        assert named <= after | before
        unnamed = after - before - named
        of_texts = {job for job in unnamed if job.startswith(b"{writer}:")}
        assert unnamed == of_texts, statuses
        assert len(of_texts) <= late + further, statuses
        assert jobs, "some requests are good"
        assert answered == TEXTS
        grown = sum(resident_bytes(each.pid) for each in gateways) - memory
        # Shown with `-s`, and where the test fails.
        sys.stdout.write(f"\n{count} requests: {dict(sorted(statuses.items()))}, {len(jobs)} jobs, {grown:+} bytes\n")
        assert grown < 32 * 1024 * 1024
        assert all(each.answers() for each in gateways)
    assert not [each.url for each in gateways if "request failed" in each.output.read_text()]


COUNTS = pytest.mark.parametrize(("seed", "count"), [(1, 200), pytest.param(2, FUZZED_REQUESTS // 5, marks=LONG)])


@COUNTS
def test_no_call_of_grpc_breaks_the_gateway(stack: GatewayStack, seed: int, count: int):
    """Requests with bytes that are cut, changed or added: no unknown error, no job of a refused call."""
    choice, caller = random.Random(seed), Caller(stack.gateway.rpc)
    good = [(PREDICT, predict_request()), (INFER, infer_request()), (PREDICT, predict_request(model_version="1"))]
    # Twice a large number is infinite.
    ran = {grpc.StatusCode.OK, grpc.StatusCode.OUT_OF_RANGE}
    codes: Counter[grpc.StatusCode] = Counter()
    jobs: set[str] = set()
    with stack.server.client() as redis:
        before = jobs_of(redis)
        for _ in range(count):
            method, request = choice.choice(good)
            data = broken(request.SerializeToString(), choice)
            call = caller.channel.unary_unary(method).future(data, PATIENCE_S)
            codes[call.code()] += 1
            trailing = dict(call.trailing_metadata() or ())
            assert ("penstock-job-id" in trailing) == (call.code() in ran), call.details()
            jobs |= {trailing[name] for name in trailing if name == "penstock-job-id"}
        made = jobs_of(redis) - before
    caller.channel.close()
    assert codes[grpc.StatusCode.OK] > 0
    refusals = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED}
    assert sum(codes[code] for code in refusals) > 0
    assert codes.keys() <= {*ran, *refusals}
    assert made == {record_key(job_id).encode() for job_id in jobs}


@COUNTS
def test_no_message_of_a_websocket_breaks_the_gateway(stack: GatewayStack, seed: int, count: int):
    """Each message has an answer, or ends the connection; none has a problem of 500, and no refused one has a job."""
    choice = random.Random(seed)
    good = {"model": "double", "inputs": {"x": TENSOR}, "priority": "low", "timeout_ms": 60_000, "stream": False}
    kinds: Counter[str] = Counter()
    jobs: set[str] = set()
    closes: set[int] = set()

    def frame() -> str | bytes:
        document: Any = good
        for _ in range(choice.randrange(3)):
            document = changed(document, choice) if isinstance(document, dict) else document
        raw = body(document, choice)
        try:
            return raw.decode() if choice.random() < 0.7 else raw
        except UnicodeDecodeError:
            return raw

    def read(message: str | bytes) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(message) if isinstance(message, str) else msgspec.msgpack.decode(message)
        return found

    async def send_all() -> None:
        address = f"{stack.gateway.url.replace('http', 'ws')}/predict/stream"
        left = count
        while left:
            async with connect(address) as socket:
                try:
                    while left:
                        left -= 1
                        await socket.send(frame())
                        answer: dict[str, Any] = {"type": ""}
                        while answer["type"] not in ("completed", "failed", "cancelled", "expired", "error"):
                            answer = read(await asyncio.wait_for(socket.recv(), 60))
                        kinds[answer["type"]] += 1
                        assert answer.get("error", {}).get("status") != 500, answer
                        # Twice a large number is infinite.
                        ran = answer["type"] == "completed" or answer["error"]["code"] == "non-finite-output"
                        assert ("job_id" in answer) == ran, answer
                        jobs.update([answer["job_id"]] if ran else [])
                except ConnectionClosed as closed:
                    closes.add(closed.rcvd.code if closed.rcvd else 0)

    with stack.server.client() as redis:
        before = jobs_of(redis)
        asyncio.run(send_all())
        made = jobs_of(redis) - before
    assert kinds["completed"] > 0
    assert kinds["error"] > 0
    assert closes <= {1003, 1007, 1008, 1009}
    assert made == {record_key(job_id).encode() for job_id in jobs}
    assert "request failed" not in stack.gateway.output.read_text()


def broken(data: bytes, choice: random.Random) -> bytes:
    """The bytes of a message, which may be cut, changed or followed by others."""
    place = choice.randrange(len(data))
    other = bytes([choice.randrange(256)])
    return choice.choice([data, data[:place], data[:place] + other + data[place + 1 :], data + other * 9, b"\xff" * 9])
