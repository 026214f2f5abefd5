"""The thread that owns an engine: jobs join and leave between its steps, and a second thread hands their outputs over.

    model threads -- open: prepare -> incoming -> engine: add, step, step -> delivery thread -> Wish.sink: each output
                  -- close ---------> abort, before the next step                        '---> Ticket.next: the last one

A job's own thread sleeps until its request has ended. Waking each of them for each output would take the lock of
Python from the engine hundreds of times a second. It prepares the request before: templates, tokenizers and compilers
of forms may take longer than many steps.

Texts are decoded and handed over in intervals: the first token of each at once, later ones of all together. What the
model raises for one request ends that one. Any other exception of a step ends the requests of that moment, and no later
one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Final

import msgspec

from penstock.registry.errors import ModelNotReady
from penstock.workers.generation.backend import Wish
from penstock.workers.generation.chat import ChatPrompt, chat_output, parser_of
from penstock.workers.generation.engine import Engine
from penstock.workers.generation.engine_figures import figures_of
from penstock.workers.generation.engine_times import EngineTimes
from penstock.workers.generation.outputs import ChatMessage, RequestOutput
from penstock.workers.generation.request import GenerationRequest
from penstock.workers.generation.text_group import has_news, is_finished, output
from penstock.workers.observe.metrics import GenerationFigures

__all__ = ["EngineRunner", "Ticket"]

logger = logging.getLogger("penstock.runtime")

_DELIVER_S: Final = 0.06
"""Between two outputs of one request, at least: the eye reads no faster."""
_LONGEST_DELIVER_S: Final = 0.25
_DELIVERY_SHARE: Final = 1 / 32
"""Of the time, for the hand-over of outputs. It holds the interpreter's lock, for which the engine waits: with many
small requests, outputs every 60 ms took a tenth of its tokens."""
_MOST_UNDELIVERED: Final = 2
"""Outputs have the whole text so far: a broker that is away must not make them pile up."""
_JOIN_S: Final = 10.0


class Ticket:
    """The way of one request's end to the thread that waits for it."""

    def __init__(
        self, wish: Wish, request: GenerationRequest, opened_at: float, close: Callable[[Ticket], None]
    ) -> None:
        self.wish: Final = wish
        self.request: Final = request
        """The runner's thread owns it."""
        self.opened_at: Final = opened_at
        self.handed_at = 0.0
        """When the last output was handed over, in seconds of the runner's clock; 0: none was."""
        self.handed_tokens = 0
        self._close: Final = close
        self._outputs: Final[SimpleQueue[RequestOutput | BaseException]] = SimpleQueue()

    def next(self, timeout_s: float) -> RequestOutput | None:
        """The last output, or one at which to look; None after the time. Raises what ended the request instead."""
        try:
            found = self._outputs.get(timeout=timeout_s)
        except Empty:
            return None
        if isinstance(found, BaseException):
            raise found
        return found

    def put(self, found: RequestOutput | BaseException) -> None:
        """Hands an output over, or the error that ends the request."""
        self._outputs.put(found)

    def close(self) -> None:
        """Nobody waits any more: what is left of the request is aborted, and its pages are free for the next step."""
        self._close(self)


class EngineRunner:
    """Computes an engine's steps while there are requests. For any thread.

    begin: called on the runner's thread before its first step. clock: monotonic seconds. cpu_clock: seconds that the
    calling thread has computed.
    """

    def __init__(
        self,
        engine: Engine,
        begin: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.engine: Final = engine
        self.turns = 0
        """How often a step has ended: a runner whose number stands still while requests run hangs."""
        self._begin: Final = begin
        self._clock: Final = clock
        self._cpu_clock: Final = cpu_clock
        self._tickets: dict[str, Ticket] = {}
        """Those whose requests the engine has."""
        self._incoming: deque[Ticket] = deque()
        self._leaving: deque[Ticket] = deque()
        self._has_news: Final = threading.Condition()
        self._deliver_at = 0.0
        """When the next outputs are handed over. Together, their events are one write."""
        self._hand_over_s = 0.0
        """What a hand-over of late takes. Its thread sets it."""
        self._stats = engine.stats()
        """After the last step: the engine's lock is held while a step runs."""
        self._times: Final = EngineTimes(engine.config.scheduler)
        self._num_joined = 0
        self._room_of = (0, 0, 0, 0)
        """The counts at which `room` was computed: only requests that come, move or go change it."""
        self.room = self._times.room(engine.pages, (), engine.most_tokens)
        """For how many requests the pages have room at a time, those that are here included. For any thread."""
        self._is_stopping = False
        self._deliveries: Final[SimpleQueue[list[tuple[Ticket, RequestOutput]] | None]] = SimpleQueue()
        self._delivery = threading.Thread(target=self._hand_over, name="delivery", daemon=True)
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._delivery.start()
        self._thread.start()

    @property
    def most_tokens(self) -> int:
        """See Backend."""
        return self.engine.most_tokens

    def open(self, wish: Wish) -> Ticket:
        """Prepares the request on this thread; it joins before the next step.

        Raises InvalidInput for a request that cannot run, and ModelNotReady after `stop`.
        """
        opened_at = self._clock()
        request = self.engine.prepare(wish.request_id, wish.prompt, wish.params, wish.delivered, wish.left_s)
        if wish.delivered is not None:
            wish.resume()
        ticket = Ticket(wish, request, opened_at, self._leave)
        with self._has_news:
            if self._is_stopping:
                raise ModelNotReady("The engine was stopped")
            self._incoming.append(ticket)
            self._has_news.notify()
        return ticket

    def messages(self, output: RequestOutput, prompt: ChatPrompt) -> Sequence[ChatMessage]:
        """See Backend."""
        return chat_output(output, parser_of(self.engine.decoder.tokenizer, prompt), prompt.tool_names).messages

    def stop(self) -> None:
        """Ends the thread after the step that runs. Requests that are left end with ModelNotReady."""
        with self._has_news:
            self._is_stopping = True
            self._has_news.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def take_figures(self) -> GenerationFigures:
        """The counts of the engine, and the times since the last call."""
        stats, measured = self._stats, self._times.measured
        first_token_s, inter_token_s = self._times.take()
        return msgspec.structs.replace(
            figures_of(stats, self.engine.config.scheduler.max_num_seqs),
            compute_s=self._times.compute_s,
            step_s=measured.step_s,
            seat_s=measured.seat_s,
            text_s=measured.text_s,
            first_token_s=first_token_s,
            inter_token_s=inter_token_s,
        )

    def _leave(self, ticket: Ticket) -> None:
        with self._has_news:
            self._leaving.append(ticket)
            self._has_news.notify()

    def _serve(self) -> None:
        self._begin()
        while self._take_in():
            began = self._clock()
            try:
                self.engine.advance()
            except BaseException as error:  # a model may raise anything
                logger.warning("a step of generation failed", extra={"requests": len(self._tickets)}, exc_info=True)
                self._fail_all(error)
            self.turns += 1
            before, self._stats = self._stats, self.engine.stats()
            now = self._clock()
            if self._stats.steps > before.steps:
                self._times.stepped(now - began)
            self._look_for_room()
            self._deliver(now)
            requests = [ticket.request for ticket in self._tickets.values() if ticket.request is not None]
            self._times.measure(self.engine.scheduler, requests, now)
        self._fail_all(ModelNotReady("The engine was stopped"))
        self._deliveries.put(None)

    def _take_in(self) -> bool:
        """Let requests join and leave; waits while there are none. Returns False to end."""
        with self._has_news:
            while not (self._incoming or self._leaving or self._tickets or self._is_stopping):
                self._has_news.wait()
            incoming, leaving = [*self._incoming], [*self._leaving]
            self._incoming.clear()
            self._leaving.clear()
            if self._is_stopping:
                for ticket in incoming:
                    ticket.put(ModelNotReady("The engine was stopped"))
                return False
        for ticket in incoming:
            self._join(ticket)
        for ticket in leaving:
            if self._tickets.get(ticket.wish.request_id) is ticket:
                del self._tickets[ticket.wish.request_id]
                self.engine.abort(ticket.wish.request_id)
        return True

    def _join(self, ticket: Ticket) -> None:
        wish = ticket.wish
        if (earlier := self._tickets.get(wish.request_id)) is not None:
            # The job came back before its earlier run here was closed.
            self._fail(earlier, ModelNotReady("Another run of the job has begun"))
        try:
            self.engine.admit(ticket.request, priority=wish.priority, tenant=wish.tenant)
        except BaseException as error:  # such as InvalidInput: this request alone cannot run
            ticket.put(error)
            return
        self._tickets[wish.request_id] = ticket
        self._num_joined += 1

    def _look_for_room(self) -> None:
        stats = self._stats
        counts = (self._num_joined, stats.running, stats.waiting, stats.preemptions)
        if counts != self._room_of:
            self._room_of = counts
            requests = [ticket.request for ticket in self._tickets.values()]
            self.room = self._times.room(self.engine.pages, requests, self.engine.most_tokens)

    def _deliver(self, now: float) -> None:
        # While the delivery thread waits for the broker, what is new comes together.
        if is_due := now >= self._deliver_at and self._deliveries.qsize() < _MOST_UNDELIVERED:
            self._deliver_at = now + min(max(_DELIVER_S, self._hand_over_s / _DELIVERY_SHARE), _LONGEST_DELIVER_S)
        outputs: list[tuple[Ticket, RequestOutput]] = []
        for ticket in [*self._tickets.values()]:
            request = ticket.request
            if not has_news(request):
                continue
            has_ended = is_finished(request)
            if request.failure is not None:
                self._fail(ticket, request.failure)
                continue
            if is_due or has_ended or not ticket.handed_at:
                self._time(ticket, request.num_generated, now)
                try:
                    outputs.append((ticket, output(request)))
                except BaseException as error:  # a tokenizer may raise anything; only this request is concerned
                    self._fail(ticket, error)
                    continue
            if has_ended:
                self._times.ended(request)
                del self._tickets[ticket.wish.request_id]
        if outputs:
            self._deliveries.put(outputs)

    def _time(self, ticket: Ticket, tokens: int, now: float) -> None:
        if not ticket.handed_at:
            self._times.first_token(now - ticket.opened_at)
        elif (new := tokens - ticket.handed_tokens) > 0:
            self._times.later_tokens(now - ticket.handed_at, new)
        ticket.handed_at, ticket.handed_tokens = now, tokens

    def _hand_over(self) -> None:
        while (outputs := self._deliveries.get()) is not None:
            began_s = self._cpu_clock()
            wakes: list[tuple[Ticket, RequestOutput | BaseException]] = []
            with outputs[0][0].wish.together():
                for ticket, found in outputs:
                    sink = ticket.wish.sink
                    try:
                        has_to_look = sink(found) if sink is not None else False
                    except BaseException as error:  # only this request is concerned
                        wakes.append((ticket, error))
                        continue
                    if has_to_look or found.finished:
                        wakes.append((ticket, found))
            for ticket, reached in wakes:
                ticket.put(reached)
            # The outputs of single requests, between those of all, cost less.
            self._hand_over_s = max(self._cpu_clock() - began_s, self._hand_over_s / 2)

    def _fail_all(self, error: BaseException) -> None:
        for ticket in [*self._tickets.values()]:
            self._fail(ticket, error)

    def _fail(self, ticket: Ticket, error: BaseException) -> None:
        del self._tickets[ticket.wish.request_id]
        self.engine.abort(ticket.wish.request_id)
        ticket.put(error)
