"""The seam between a job that generates text and what writes it.

    served: job -> Wish -> Backend.open -> Answer.next: the last output, others go to Wish.sink
                           |- runner: our engine
                           `- server: another server, of one of three kinds

Importing this module imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from penstock.registry.queues import PriorityName
from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation.chat import ChatPrompt
from penstock.workers.generation.outputs import ChatMessage, RequestOutput
from penstock.workers.generation.prompts import Prompt
from penstock.workers.observe.metrics import GenerationFigures

__all__ = ["Answer", "Backend", "Delivered", "Wish"]


@dataclass(frozen=True, slots=True)
class Delivered:
    """What another run generated and delivered of a request. logprobs: at each token, where the request asks for them.

    text: may be behind or before the tokens. elapsed_s: since the request began there; its time-out counts from then.
    """

    token_ids: Sequence[int] = ()
    text: str = ""
    logprobs: Sequence[dict[int, float]] = ()
    elapsed_s: float = 0.0


def _ignore() -> None:
    """Nothing was delivered."""


@dataclass(frozen=True, slots=True)
class Wish:
    """One request, as a job asks for it."""

    request_id: str
    prompt: Prompt | ChatPrompt
    params: SamplingParams
    priority: PriorityName = "normal"
    tenant: str = ""
    delivered: Delivered | None = None
    resume: Callable[[], None] = _ignore
    """Called once, before the first output, where the outputs to come continue what was delivered. Else they begin
    anew."""
    left_s: float | None = None
    """Seconds from now until the deadline of the job; None: it has none. An engine then ends the request with
    DeadlinePassed, whether it waits or runs."""
    sink: Callable[[RequestOutput], bool] | None = None
    """Called with each output. It returns whether the job's own thread is to look, and its error ends the request."""
    together: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered around the calls of the sinks of several requests: those of one worker write together."""


class Answer(Protocol):
    """The way of one request's end to the thread that waits for it."""

    def next(self, timeout_s: float) -> RequestOutput | None:
        """The last output, or one at which to look; None after about this time. Raises what ended the request."""

    def close(self) -> None:
        """Nobody waits any more: what is left of the request is given up."""


class Backend(Protocol):
    """Writes the texts of one loaded model. For any thread."""

    @property
    def turns(self) -> int:
        """How often it showed progress: one whose number stands still while requests run hangs."""

    @property
    def most_tokens(self) -> int | None:
        """Of a prompt and its text together: so many have room; None: it is not known."""

    def open(self, wish: Wish) -> Answer:
        """The request begins. Raises InvalidInput for one that cannot run, and ModelNotReady after `stop`."""

    def messages(self, output: RequestOutput, prompt: ChatPrompt) -> Sequence[ChatMessage]:
        """The messages of the assistant in the last output of a chat. Raises InvalidInput."""

    def take_figures(self) -> GenerationFigures | None:
        """Its counts, and the times since the last call; None where it has none."""

    def stop(self) -> None:
        """Ends what runs, with ModelNotReady."""
