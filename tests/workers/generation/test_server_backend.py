"""The backend whose texts another server writes: what it asks, what it makes of answers, and what it refuses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.registry.chat_messages import checked_messages
from penstock.registry.errors import ConfigurationError, ForwardTimeout, InvalidInput, ModelError, ModelNotReady
from penstock.registry.package.generation import Generation
from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation import server_backend
from penstock.workers.generation.backend import Delivered, Wish
from penstock.workers.generation.chat import ChatPrompt
from penstock.workers.generation.outputs import RequestOutput, Usage
from penstock.workers.generation.prompts import Prompt
from penstock.workers.generation.server_address import ServerAddress, ServerAway
from penstock.workers.generation.server_backend import ServerBackend
from penstock.workers.generation.tool_calls import ToolCall
from tests.servers import wait_until
from tests.workers.generation.text_servers import Reply, TextServer, chat_event, event, usage

PATIENCE_S = 180.0
DONE = "[DONE]"
PARAMS = SamplingParams(max_tokens=8, temperature=0.5, seed=3)
HELLO = [event("hel"), event("lo", "stop"), usage(2, 5, 1), DONE]
OpenBackend = Callable[..., ServerBackend]


class Listener:
    """What a job's subscribers see."""

    def __init__(self) -> None:
        self.deltas: list[str] = []
        self.resumed_at: list[int] = []

    def sink(self, output: RequestOutput) -> bool:
        self.deltas.append(output.delta_text)
        return False

    def resume(self) -> None:
        self.resumed_at.append(len(self.deltas))


@contextmanager
def serving(*replies: Reply, **options: Any) -> Iterator[tuple[TextServer, ServerBackend]]:
    """A server that gives these replies in turn, the last one again and again, and a backend that asks it."""
    left = list(replies)
    with TextServer(lambda _: left.pop(0) if len(left) > 1 else left[0]) as server:
        yield server, backend_of(server.url, **options)


def backend_of(url: str, environ: Mapping[str, str] | None = None, **options: Any) -> ServerBackend:
    return ServerBackend(Generation(runtime_url=url, **options), "writer", (), environ or {})


def read(backend: ServerBackend, prompt: Prompt | ChatPrompt = "a", **wish: Any) -> RequestOutput:
    """The last output."""
    answer = backend.open(Wish("job", prompt, **{"params": PARAMS, **wish}))
    try:
        while (found := answer.next(1.0)) is None or not found.finished:
            pass
        return found
    finally:
        answer.close()


def test_outputs_are_those_of_an_engine():
    """Deltas as they come, the whole text, its end, its usage; and the request has the wishes."""
    listener = Listener()
    with serving(Reply(HELLO), runtime_fields=("top_k",), runtime_model="big") as (server, backend):
        params = SamplingParams(max_tokens=8, temperature=0.5, seed=2**64 - 1, top_k=4, stop=["x"])
        found = read(backend, params=params, sink=listener.sink, resume=listener.resume)
    assert "".join(listener.deltas) == found.outputs[0].text == "hello"
    assert (found.outputs[0].finish_reason, found.usage) == ("stop", Usage(2, 5, 1))
    assert listener.resumed_at == []
    assert server.asked[0].path == "/v1/completions"
    assert server.asked[0].body == {
        "model": "big",
        "prompt": "a",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 8,
        "temperature": 0.5,
        "top_k": 4,
        "stop": ["x"],
        "seed": 2**63 - 1,
    }
    assert "authorization" not in server.asked[0].headers


def test_several_texts_come_together():
    """Each has the number that the server gave it."""
    events = [event("b", "stop", 1), event("a", "length", 0), usage(), DONE]
    with serving(Reply(events)) as (server, backend):
        found = read(backend, [1, 2], params=SamplingParams(n=2, seed=1))
    assert [(one.text, one.finish_reason) for one in found.outputs] == [("a", "length"), ("b", "stop")]
    assert (server.asked[0].body["prompt"], server.asked[0].body["n"]) == ([1, 2], 2)


def test_chats_have_messages_with_calls():
    """The server has parsed the calls; their arguments come in pieces. A schema travels as OpenAI has it."""
    calls = [
        [{"index": 0, "id": "x", "function": {"name": "weather", "arguments": '{"ci'}}],
        [{"index": 0, "function": {"arguments": 'ty": 1}'}}, {"index": 1, "function": {"name": "time"}}],
    ]
    events = [
        chat_event(role="assistant", content="let me"),
        *(chat_event(tool_calls=call) for call in calls),
        chat_event("tool_calls"),
        usage(),
        DONE,
    ]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    prompt = ChatPrompt([{"role": "user", "content": "a"}], tools)
    with serving(Reply(events)) as (server, backend):
        found = read(backend, prompt, params=SamplingParams(json_schema={"type": "object"}))
        (message,) = backend.messages(found, prompt)
    assert (message.content, message.finish_reason) == ("let me", "tool_calls")
    assert message.tool_calls == (ToolCall("weather", '{"city": 1}'), ToolCall("time", ""))
    assert found.outputs[0].finish_reason == "stop"
    asked = server.asked[0]
    assert asked.path == "/v1/chat/completions"
    assert (asked.body["messages"], asked.body["tools"]) == (prompt.messages, tools)
    assert asked.body["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_calls_of_earlier_turns_have_their_arguments_as_json():
    """As clients send them. Templates get the values, so the chat has these."""
    call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "9"}]
    checked = checked_messages(messages)
    assert checked[0]["tool_calls"][0]["function"]["arguments"] == {"city": "Zürich"}
    with serving(Reply([chat_event("stop", content="a"), usage(), DONE])) as (server, backend):
        read(backend, ChatPrompt(checked))
        sent, *_ = server.asked[0].body["messages"]
    assert sent["tool_calls"] == [call]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"top_k": 3}, "top_k: found a value, expected none: the server of this model does not obey it. Expected fiel"),
        ({"logprobs": 1}, "logprobs: found a value"),
        ({"json_schema": {"type": "object"}}, "json_schema: found a value"),
        ({"ignore_eos": True}, "ignore_eos: found a value"),
        ({"n": 1, "best_of": 2}, "best_of: found a value"),
    ],
)
def test_what_the_server_does_not_obey_is_refused(params: dict[str, Any], expected: str):
    """Nothing is asked then."""
    with serving(Reply(HELLO), runtime_fields=("min_p",)) as (server, backend):
        with pytest.raises(InvalidInput, match=expected):
            backend.open(Wish("job", "a", SamplingParams(**params)))
        backend.open(Wish("job", "a", SamplingParams(min_p=0.1))).close()
        assert server.asked == []


@pytest.mark.parametrize(
    ("reply", "error", "expected"),
    [
        (
            Reply(status=400, body='{"error": {"message": "too\\nlong"}}'),
            InvalidInput,
            r"refused the request \(400\): too",
        ),
        (Reply(status=422, body="?"), InvalidInput, r"\(422\): no reason"),
        (Reply(status=401), ModelError, r"refused this worker \(401\). Expected its key in the variable that"),
        (Reply(status=404, body='{"error": "no such model"}'), ModelError, "answered 404: no such model"),
        (Reply(status=307), ModelError, "redirects are not followed"),
        (Reply(status=500, body="{}" * 9000), ModelError, "answered 500"),
        (Reply(['{"error": {"message": "CUDA"}}', DONE]), ModelError, "The text server failed: CUDA"),
        (Reply(["7", DONE]), ModelError, "none of a text"),
        (Reply(["{", DONE]), ModelError, "none of a text"),
        (Reply(['{"choices": [{"text": 7}]}', DONE]), ModelError, "none of a text"),
        (Reply([event("a", "stop", 5), DONE]), ModelError, "none of a text"),
        (Reply([event("a", "content_filter"), DONE]), ModelError, "ended a text with content_filter"),
        (Reply([event("a"), usage(), DONE]), ModelError, "without a finish_reason"),
        (Reply([event("a", "stop"), DONE]), ModelError, "sent no usage"),
        (Reply(["x" * (2 << 20)]), ModelError, "too large|none of a text"),
    ],
)
def test_bad_answers_are_clear_errors(reply: Reply, error: type[Exception], expected: str):
    """One request, one line; another try would give the same."""
    with serving(reply) as (server, backend):
        with pytest.raises(error, match=expected):
            read(backend)
        assert len(server.asked) == 1


def test_server_that_comes_back_goes_on_with_the_text():
    """It is busy, then it ends a connection in the middle: subscribers see one text without gap or repeat."""
    listener = Listener()
    replies = [Reply(status=503), Reply([event("hel")]), Reply([event("he")]), Reply(HELLO)]
    with serving(*replies) as (server, backend):
        found = read(backend, sink=listener.sink, resume=listener.resume)
    assert "".join(listener.deltas) == found.outputs[0].text == "hello"
    assert listener.resumed_at == []
    assert len(server.asked) == 4
    assert len({str(asked.body) for asked in server.asked}) == 1


def test_server_that_writes_another_text_after_a_break_is_no_stream():
    """Subscribers have the beginning of the first one."""
    replies = [Reply([event("hel")]), Reply([event("h"), event("o"), usage(), DONE])]
    with serving(*replies) as (_, backend), pytest.raises(ModelError, match="then wrote another text"):
        read(backend, sink=Listener().sink)


@pytest.mark.parametrize(
    ("delivered", "resumes", "rest"),
    [("hel", [0], "lo"), ("hello", [0], ""), ("hex", [], "hello"), ("hello!", [], "hello")],
)
def test_text_of_another_run_is_continued_where_it_is_the_same(delivered: str, resumes: list[int], rest: str):
    """Else the stream begins anew."""
    listener = Listener()
    with serving(Reply([event("hel"), event("lo"), event("", "stop"), usage(), DONE])) as (_, backend):
        wish: dict[str, Any] = {"delivered": Delivered((), delivered), "sink": listener.sink, "resume": listener.resume}
        found = read(backend, **wish)
    assert found.outputs[0].text == "hello"
    assert "".join(listener.deltas) == rest
    assert listener.resumed_at == resumes


def test_server_that_stays_away_ends_the_job():
    """After the time that a job waits for it, and not at once."""
    with serving(Reply(status=503), runtime_timeout_s=0.3) as (server, backend):
        with pytest.raises(ModelError, match="The text server is away: it answered 503"):
            read(backend)
        assert len(server.asked) > 1
        url = server.url
    with pytest.raises(ModelError, match="The text server is away: Connection refused"):
        read(backend_of(url, runtime_timeout_s=0.1))


def test_silent_server_ends_the_job():
    """A server that hangs is given up: another try would wait as long."""
    with serving(Reply([event("a")], hangs=True), runtime_timeout_s=0.2) as (server, backend):
        with pytest.raises(ForwardTimeout, match=r"sent nothing for 0\.2 s"):
            read(backend)
        assert len(server.asked) == 1


def test_name_server_that_hangs_holds_no_job():
    """The job looks about itself meanwhile, which is progress, and ends with a clear error. Nothing is asked later."""
    is_over = threading.Event()

    def hangs(host: str, port: int) -> list[str]:
        is_over.wait(PATIENCE_S)
        return ["127.0.0.1"]

    with serving(Reply(HELLO)) as (server, _):
        url = server.url.replace("127.0.0.1", "localhost")
        backend = ServerBackend(Generation(runtime_url=url, runtime_timeout_s=1.2), "writer", (), {}, look_up=hangs)
        with pytest.raises(ModelError, match=r"The text server is away: its name was not resolved within 1\.2 s"):
            read(backend)
        # Two looks at each of two attempts, and at the pause between them.
        assert backend.turns >= 5
        is_over.set()
        wait_until(lambda: not _connecting(), PATIENCE_S, "the attempts have ended")
        assert server.asked == []
        assert read(backend).outputs[0].text == "hello"


def test_attempts_that_hang_are_bounded():
    """Each has a thread. When they have ended, others may begin."""
    is_over = threading.Event()

    def hangs(host: str, port: int) -> list[str]:
        is_over.wait(PATIENCE_S)
        return []

    address = ServerAddress("http://localhost:1", look_up=hangs)
    for _ in range(64):
        with pytest.raises(ServerAway, match="its name was not resolved"):
            next(address.connect(0.0))
    with pytest.raises(ServerAway, match="64 earlier attempts still wait"):
        next(address.connect(0.0))
    assert _connecting() == 64
    is_over.set()
    wait_until(lambda: not _connecting(), PATIENCE_S, "the attempts have ended")
    with pytest.raises(ConfigurationError, match="localhost"):
        next(address.connect(PATIENCE_S))


def test_connection_that_comes_too_late_is_closed():
    """Nobody would read from it."""
    is_over = threading.Event()

    def late(host: str, port: int) -> list[str]:
        is_over.wait(PATIENCE_S)
        return ["127.0.0.1"]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)
        with pytest.raises(ServerAway):
            next(ServerAddress(f"http://localhost:{listener.getsockname()[1]}", look_up=late).connect(0.0))
        is_over.set()
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(PATIENCE_S)
            assert connection.recv(1) == b""


def _connecting() -> int:
    return sum(thread.name == "text-server" for thread in threading.enumerate())


def test_job_that_ends_early_ends_the_connection():
    """The server learns of it, so that it need not write for nobody."""
    with serving(Reply([event("a")], hangs=True)) as (server, backend):
        listener = Listener()
        answer = backend.open(Wish("job", "a", PARAMS, sink=listener.sink))
        while not listener.deltas:
            assert answer.next(1.0) is None
        answer.close()
        wait_until(lambda: server.gone == 1, 30, "the server sees the end of the connection")


def test_time_of_a_job_ends_its_text_as_it_is():
    """Also before the server has written anything."""
    with serving(Reply([event("a")], hangs=True)) as (_, backend):
        found = read(backend, params=SamplingParams(timeout_s=0.1))
    assert (found.outputs[0].text, found.outputs[0].finish_reason) == ("a", "timeout")
    with serving(Reply(status=503)) as (_, backend):
        wish: dict[str, Any] = {"delivered": Delivered((), "hel"), "params": SamplingParams(timeout_s=0.1)}
        late = read(backend, **wish).outputs[0]
    assert (late.text, late.finish_reason) == ("hel", "timeout")


def test_text_that_ends_just_behind_its_time(monkeypatch: pytest.MonkeyPatch):
    """The last token is late, and the usage that follows is not awaited: the text ends as it is."""
    now = [0.0]

    class Call:
        """A server whose last token comes 10 ms behind the time."""

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def post(self, *_: Any) -> Iterator[bytes]:
            yield event("hel").encode()
            now[0] = 1.01
            yield event("lo", "stop").encode()
            yield usage(2, 5).encode()

        def close(self) -> None: ...

    monkeypatch.setattr(server_backend, "ServerCall", Call)
    backend = ServerBackend(
        Generation(runtime_url="http://127.0.0.1:9", runtime_kind="vllm"), "writer", (), {}, clock=lambda: now[0]
    )
    found = read(backend, params=SamplingParams(max_tokens=8, temperature=0, timeout_s=1.0))
    assert (found.finished, found.outputs[0].text, found.outputs[0].finish_reason) == (True, "hello", "stop")


def test_stopped_backend_waits_for_no_server():
    """A version that is unloaded ends its jobs."""
    with serving(Reply(status=503)) as (_, backend):
        answer = backend.open(Wish("job", "a", PARAMS))
        assert answer.next(1.0) is None
        backend.stop()
        with pytest.raises(ModelNotReady):
            answer.next(1.0)
        with pytest.raises(ModelNotReady):
            backend.open(Wish("job", "a", PARAMS))


def test_key_comes_from_the_environment():
    """From the variable that the package names, and it is in no error."""
    secret = {"BIG_RUNTIME_KEY": "s3cret"}
    with (
        serving(Reply(status=403), environ=secret, runtime_key="BIG_RUNTIME_KEY") as (server, backend),
        pytest.raises(ModelError, match="Expected its key in BIG_RUNTIME_KEY") as refused,
    ):
        read(backend)
    assert server.asked[0].headers["authorization"] == "Bearer s3cret"
    assert "s3cret" not in str(refused.value)
    for environ in ({}, {"BIG_RUNTIME_KEY": "two\nlines"}, {"BIG_RUNTIME_KEY": "sk-1 "}):
        with pytest.raises(ConfigurationError, match="found no key in the variable BIG_RUNTIME_KEY"):
            backend_of("http://127.0.0.1:1", environ, runtime_key="BIG_RUNTIME_KEY")


@pytest.mark.parametrize(
    "url", ["http://10.0.0.1", "http://169.254.169.254", "https://93.184.216.34", "http://[::2]:8"]
)
def test_address_that_the_operator_has_not_named_is_not_called(url: str):
    """Neither a private nor a public one; the version is not loaded."""
    with pytest.raises(ConfigurationError, match="is not on the loopback, and runtime_hosts does not name it"):
        backend_of(url)


def test_name_is_called_where_the_operator_names_it_or_its_network():
    """A name that leads elsewhere is refused when it is called."""
    assert ServerBackend(Generation(runtime_url="http://10.0.0.1"), "writer", ["10.0.0.0/8"], {}).model == "writer"
    with serving(Reply(HELLO)) as (server, _):
        url = server.url.replace("127.0.0.1", "localhost")
        assert read(backend_of(url)).outputs[0].text == "hello"
    with pytest.raises(ConfigurationError, match="runtime_hosts has a/b"):
        ServerBackend(Generation(runtime_url=url), "writer", ["a/b"], {})
