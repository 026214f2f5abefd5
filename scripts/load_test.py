"""A load test of a gateway with Locust: predictions of one model, on the JSON that the model's signature asks for.

    locust -f scripts/load_test.py --headless -u 50 -r 10 --run-time 2m --host http://127.0.0.1:8000 --model-name mlp
    python scripts/load_test.py --headless -u 10 -r 10 --requests 1000 --host http://127.0.0.1:8000 --model-name mlp

    [--load-model] -> sample or --payload-file -> --warmup requests -> the users' requests -> Locust's table

The exit status is not 0 when a request failed: an error status, a time-out, or, with --verify-response, no output.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any, Final

import gevent
from locust import FastHttpUser, constant, events, task
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import DistributedRunner

_SAMPLES: Final[dict[str, Any]] = {"string": "a sentence", "bool": True}
_LOAD_TIMEOUT_S: Final = 310
_SIGNATURE_TIMEOUT_S: Final = 30


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise ArgumentTypeError(f"{text!r:.40} is no positive number. Expected seconds, such as 2.5")
    return number


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ArgumentTypeError(f"{text!r:.40} is no count. Expected a whole number, 0 or more")
    return int(text)


def _document(text: str) -> bytes:
    """The content of a file with one JSON object."""
    try:
        body = Path(text).read_bytes()
        is_object = isinstance(json.loads(body), dict)
    except (OSError, ValueError):
        is_object = False
    if not is_object:
        raise ArgumentTypeError(
            f"{text!r:.80} holds no JSON object. Expected a file with a body such as {{'inputs': ...}}"
        )
    return body


def _key(text: str) -> str:
    """The API key in a file."""
    try:
        key = Path(text).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        key = ""
    if not key or any(letter.isspace() for letter in key):
        raise ArgumentTypeError(f"{text!r:.80} holds no API key. Expected a file with a key of `penstock keys create`")
    return key


@events.init_command_line_parser.add_listener
def _add_options(parser: Any) -> None:
    group = parser.add_argument_group("Penstock")
    group.add_argument("--model-name", required=True, help="The model that is asked")
    group.add_argument("--model-version", default="", help="Its version (default: the active one)")
    group.add_argument("--load-model", action="store_true", help="Ask the gateway to load the version first")
    group.add_argument("--warmup", type=_count, default=0, help="Requests before the users begin; they are not counted")
    group.add_argument(
        "--payload-file", dest="payload", type=_document, help="A JSON file with the body (default: a sample)"
    )
    # Not the key itself: other users of the machine can read the arguments of a program.
    group.add_argument(
        "--api-key-file",
        dest="api_key",
        type=_key,
        default=None,
        help="A file with an API key (default: no key is sent)",
    )
    group.add_argument("--request-timeout", type=_positive, default=30.0, help="Seconds of one request (default: 30)")
    group.add_argument("--verify-response", action="store_true", help="Fail answers without at least one output tensor")
    group.add_argument("--requests", type=_count, default=0, help="End after so many requests (default: --run-time)")


class ModelUser(FastHttpUser):
    """One client, which asks again as soon as it has its answer."""

    wait_time = constant(0)
    body: bytes = b""
    begun: int = 0
    ended: int = 0

    def __init__(self, environment: Environment) -> None:
        self.host = (environment.host or "").rstrip("/")
        self.network_timeout = self.connection_timeout = environment.parsed_options.request_timeout
        super().__init__(environment)

    @task
    def predict(self) -> None:
        """One prediction."""
        options = self.environment.parsed_options
        if options.requests and ModelUser.begun >= options.requests:
            raise StopUser
        ModelUser.begun += 1
        path = _path(options)
        with self.client.post(
            path, data=ModelUser.body, headers=_headers(options), name=path, catch_response=True
        ) as answer:
            if answer.status_code == 0:
                answer.failure(f"no answer: {answer.error!r:.200}")
            elif answer.status_code != 200:
                answer.failure(f"status {answer.status_code}: {answer.text:.200}")
            elif options.verify_response and not _has_output(answer.text):
                answer.failure("No output tensor. Expected at least one")
        ModelUser.ended += 1
        if ModelUser.ended == options.requests:
            _quit(self.environment)


@events.test_start.add_listener
def _prepare(environment: Environment, **_: Any) -> None:
    options = environment.parsed_options
    try:
        if options.requests and isinstance(environment.runner, DistributedRunner):
            raise ValueError("--requests counts those of one process. Expected --run-time for several processes")
        if options.load_model:
            fields = {"name": options.model_name, "version": options.model_version or None}
            _ask(environment, "/v1/models:load", json.dumps(fields).encode(), _LOAD_TIMEOUT_S)
        ModelUser.body = options.payload or _sample(environment)
        ModelUser.begun = ModelUser.ended = 0
        for _number in range(options.warmup):
            _ask(environment, _path(options), ModelUser.body, options.request_timeout)
    except (OSError, ValueError, KeyError) as problem:
        sys.stderr.write(f"The load test cannot begin: {_reason(problem)}\n")
        environment.process_exit_code = 2
        _quit(environment)


def _quit(environment: Environment) -> None:
    # In a greenlet of its own: it ends all others, the caller's included.
    gevent.spawn(environment.runner.quit)


def _path(options: Any) -> str:
    version = f"/versions/{options.model_version}" if options.model_version else ""
    return f"/v1/models/{options.model_name}{version}:predict"


def _headers(options: Any) -> dict[str, str]:
    key = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    return {"Content-Type": "application/json", **key}


def _ask(environment: Environment, path: str, body: bytes | None, timeout_s: float) -> Any:
    """The JSON of an answer. Raises OSError and ValueError."""
    url = f"{(environment.host or '').rstrip('/')}{path}"
    if not url.startswith(("http://", "https://")):
        raise ValueError("no --host. Expected the URL of a gateway, such as http://127.0.0.1:8000")
    request = urllib.request.Request(url, body, _headers(environment.parsed_options))  # noqa: S310 - checked above
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
        return json.load(answer)


def _sample(environment: Environment) -> bytes:
    """A body with one row: ones, or a sentence, in each input that the signature requires.

    A model that requires none, such as one that generates text, gets its first input.
    """
    name = environment.parsed_options.model_name
    signature = _ask(environment, f"/v1/models/{name}", None, _SIGNATURE_TIMEOUT_S)
    required = [tensor for tensor in signature["inputs"] if not tensor["optional"]]
    inputs = {
        tensor["name"]: _filled(tensor["shape"], _SAMPLES.get(tensor["dtype"], 1))
        for tensor in required or signature["inputs"][:1]
    }
    return json.dumps({"inputs": inputs}).encode()


def _filled(shape: list[int | str], value: Any) -> Any:
    for extent in reversed(shape):
        value = [value] * (extent if isinstance(extent, int) else 1)
    return value


def _has_output(text: str) -> bool:
    try:
        outputs = json.loads(text).get("outputs")
    except (ValueError, AttributeError):
        return False
    return isinstance(outputs, dict) and any(
        isinstance(tensor, dict) and {"dtype", "shape"} <= tensor.keys() for tensor in outputs.values()
    )


def _reason(problem: Exception) -> str:
    if isinstance(problem, urllib.error.HTTPError):
        return f"status {problem.code}: {problem.read(300).decode(errors='replace')}"
    return str(problem)


if __name__ == "__main__":
    # Locust loads this file again, as a module of its own.
    os.execv(sys.executable, [sys.executable, "-m", "locust", "-f", __file__, *sys.argv[1:]])  # noqa: S606 - no shell
