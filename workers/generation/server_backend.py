"""A backend whose texts another server writes: vLLM, TGI, or one with OpenAI's routes, such as a gateway of Penstock.

    Wish -> request -> call -> events -> text -> sink, last output
               '<-- pause <-- the server is away, or ended the connection: it writes the text again, and what was
                              delivered is left out where it is the same

All of it happens on the thread of the job, in `Answer.next`, but for the connection: see server_address.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Final

from penstock.registry.backoff import backoff_delay_s
from penstock.registry.errors import ConfigurationError, InvalidInput, ModelError, ModelNotReady, shown
from penstock.registry.package.generation import Generation
from penstock.registry.package.text_server import check_obeyed
from penstock.workers.generation.backend import Wish
from penstock.workers.generation.chat import ChatPrompt
from penstock.workers.generation.outputs import ChatMessage, RequestOutput
from penstock.workers.generation.server_address import LookUp, ServerAddress, ServerAway, look_up
from penstock.workers.generation.server_call import Refusal, ServerCall
from penstock.workers.generation.server_request import request_of
from penstock.workers.generation.server_text import ServerText
from penstock.workers.observe.metrics import GenerationFigures

__all__ = ["ServerAnswer", "ServerBackend"]

_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0
_JITTER: Final = 0.5
_MOST_JSON: Final = 500
_REFUSED_INPUT: Final = (400, 413, 422)
_REFUSED_KEY: Final = (401, 403)


class ServerBackend:
    """name: of the package. environ: with the API key. clock: monotonic seconds. look_up: of the server's name.

    Raises ConfigurationError for an address that may not be called, and for a key that is missing.
    """

    def __init__(
        self,
        options: Generation,
        name: str,
        hosts: Sequence[str],
        environ: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
        look_up: LookUp = look_up,
    ) -> None:
        if options.runtime_url is None:
            raise ConfigurationError("generate.runtime_url: missing, expected the address of a server")
        self.options: Final = options
        self.model: Final = options.runtime_model or name
        self.address: Final = ServerAddress(options.runtime_url, hosts, look_up)
        self.headers: Final = {
            "content-type": "application/json",
            "accept": "text/event-stream",
            "user-agent": "Penstock",
            "connection": "close",
            **_authorization(options.runtime_key, environ),
        }
        self.clock: Final = clock
        self.stopped: Final = threading.Event()
        self.turns = 0
        """See Backend. A job that waits shows progress: each wait has a time-out of its own."""
        self.most_tokens: Final = None
        """See Backend. The server knows; the package may say so as max_model_len."""

    def open(self, wish: Wish) -> ServerAnswer:
        """See Backend. Raises InvalidInput for fields that the server does not obey."""
        if self.stopped.is_set():
            raise ModelNotReady("The engine was stopped")
        prompt = wish.prompt
        is_chat = isinstance(prompt, ChatPrompt)
        check_obeyed(
            wish.params,
            self.options,
            is_chat=is_chat,
            has_tools=isinstance(prompt, ChatPrompt) and bool(prompt.tools),
            has_token_ids=not is_chat and not isinstance(prompt, str),
        )
        return ServerAnswer(self, wish)

    def messages(self, output: RequestOutput, prompt: ChatPrompt) -> Sequence[ChatMessage]:
        """See Backend. The server has parsed the calls of tools."""
        return output.messages or ()

    def take_figures(self) -> GenerationFigures | None:
        """The server has figures of its own."""
        return None

    def stop(self) -> None:
        """See Backend."""
        self.stopped.set()


class ServerAnswer:
    """One request to the server, and further ones where the server was away meanwhile."""

    def __init__(self, backend: ServerBackend, wish: Wish) -> None:
        self._backend: Final = backend
        self._kind: Final = backend.options.runtime_kind
        self._text: Final = ServerText(wish, self._kind)
        self._call: ServerCall | None = None
        self._has_sent = False
        elapsed_s = 0.0 if wish.delivered is None else wish.delivered.elapsed_s
        limit_s = wish.params.timeout_s
        self._ends_at = None if limit_s is None else backend.clock() + limit_s - elapsed_s
        self._steps: Final = self._outputs()

    def next(self, timeout_s: float) -> RequestOutput | None:
        """See Answer. timeout_s: half a second or more; a look takes no longer."""
        self._backend.turns += 1
        return next(self._steps)

    def close(self) -> None:
        """Ends the connection, by which the server learns that nobody waits."""
        self._steps.close()
        if self._call is not None:
            self._call.close()

    def _outputs(self) -> Generator[RequestOutput | None, None, None]:
        backend, text = self._backend, self._text
        tries, away_at, furthest = 0, backend.clock(), 0
        while True:
            try:
                yield from self._asked()
                return
            except ServerAway as error:
                # A server that ends each connection before it wrote more than ever is away, too.
                if not tries or text.characters > furthest:
                    tries, away_at, furthest = 0, backend.clock(), text.characters
                if backend.clock() - away_at >= backend.options.runtime_timeout_s:
                    raise ModelError(f"The text server is away: {error}") from None
            tries += 1
            yield from self._pause(backoff_delay_s(tries, _FIRST_PAUSE_S, _LONGEST_PAUSE_S, _JITTER))
            if self._is_late:
                yield self._output(is_late=True)
                return

    def _asked(self) -> Iterator[RequestOutput | None]:
        """The outputs of one request. Raises ServerAway where the server may be asked again."""
        text, backend = self._text, self._backend
        text.begin()
        ends_with_done = text.ends_with_done
        self._call = ServerCall(backend.address, backend.options.runtime_timeout_s, ends_with_done=ends_with_done)
        try:
            for found in self._call.post(*self._request()):
                if isinstance(found, Refusal):
                    raise _refused(found, backend.options.runtime_key)
                if found is not None:
                    text.take(found)
                if self._is_late:
                    break
                yield self._news() if found is not None else None
        finally:
            self._call.close()
        if not (ends_with_done or text.is_whole or self._is_late):
            raise ServerAway("it ended its answer before the last token")
        # A text that was whole at its time has ended by itself, if it needs nothing more.
        yield self._output(is_late=self._is_late and not (text.is_whole and text.usage is not None))

    def _request(self) -> tuple[str, Mapping[str, str], bytes]:
        path, body = request_of(self._text.wish, self._backend.model, self._kind)
        return path, self._backend.headers, body

    def _news(self) -> RequestOutput | None:
        """Sends what is new. Returns an output at which the job is to look."""
        text, sink = self._text, self._text.wish.sink
        if sink is None:
            return None
        self._check_known(is_whole=False)
        if not text.has_news:
            return None
        self._begin()
        output = text.output(is_last=False)
        return output if sink(output) else None

    def _output(self, *, is_late: bool) -> RequestOutput:
        """The last output, which the sink gets, too."""
        text = self._text
        if not (is_late or text.is_whole):
            raise ModelError("The text server ended its answer without a finish_reason. Expected one for each text")
        if text.usage is None and not is_late:
            raise ModelError("The text server sent no usage. Expected one that obeys stream_options.include_usage")
        if is_late:
            text.catch_up()
        self._check_known(is_whole=True)
        if text.wish.sink is not None:
            self._begin()
        output = text.output(is_last=True, ends="timeout" if is_late else None)
        if text.wish.sink is not None:
            text.wish.sink(output)
        return output

    def _check_known(self, *, is_whole: bool) -> None:
        """What was delivered must begin the text. That of another run is given up; that of this run cannot be."""
        text = self._text
        if text.agrees(is_whole=is_whole):
            return
        if self._has_sent:
            raise ModelError("The text server was away, and then wrote another text. Expected the same for equal seeds")
        text.known = ""

    def _begin(self) -> None:
        if not self._has_sent and self._text.known:
            self._text.wish.resume()
        self._has_sent = True

    def _pause(self, seconds: float) -> Iterator[None]:
        until = self._backend.clock() + seconds
        while (left := until - self._backend.clock()) > 0 and not self._is_late:
            if self._backend.stopped.wait(min(left, _FIRST_PAUSE_S)):
                raise ModelNotReady("The engine was stopped")
            yield None

    @property
    def _is_late(self) -> bool:
        return self._ends_at is not None and self._backend.clock() >= self._ends_at


def _authorization(variable: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    if variable is None:
        return {}
    key = environ.get(variable, "")
    # A space would be refused by the HTTP library, whose message shows the whole field.
    if not key or not all("!" <= letter <= "~" for letter in key):
        raise ConfigurationError(
            f"generate.runtime_key: found no key in the variable {variable}, expected one of ASCII without spaces"
        )
    return {"authorization": f"Bearer {key}"}


def _refused(refusal: Refusal, variable: str | None) -> Exception:
    """The error of a job for an answer that is no success. It may repeat the text of the server, and never a key."""
    status, told = refusal.status, _message(refusal.body)
    if status in _REFUSED_INPUT:
        return InvalidInput(f"The text server refused the request ({status}): {told}")
    if status in _REFUSED_KEY:
        place = "the variable that generate.runtime_key names" if variable is None else variable
        return ModelError(f"The text server refused this worker ({status}). Expected its key in {place}")
    if 300 <= status < 400:
        return ModelError(f"The text server answered {status}: redirects are not followed")
    return ModelError(f"The text server answered {status}: {told}")


def _message(body: bytes) -> str:
    try:
        error = json.loads(body)
        error = error.get("error", error)
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, AttributeError, RecursionError):
        return "no reason"
    text = " ".join(str(text)[:_MOST_JSON].split())
    return text if text.isprintable() else shown(text)
