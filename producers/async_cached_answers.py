"""Look-ups in the shared cache from an event loop: those of one turn travel together, on a thread of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from penstock.producers.cached_answers import CachedAnswer, CachedAnswers, Question

__all__ = ["LookupCoalescer"]

_AT_ONCE: Final = 256


class LookupCoalescer:
    """Joins the look-ups of one event loop into calls. One call is out at a time; the next one takes all that waits."""

    def __init__(self, answers: CachedAnswers) -> None:
        self.answers: Final = answers
        # Not the loop's: a program that blocks its threads would hold up the look-ups.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-lookup")
        self._asked: list[tuple[Question, asyncio.Future[CachedAnswer | None]]] = []
        self._is_asking = False

    def find(self, question: Question) -> asyncio.Future[CachedAnswer | None]:
        """The answer, or None. A caller that is cancelled does not stop the call for the others."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[CachedAnswer | None] = loop.create_future()
        self._asked.append((question, answer))
        if not self._is_asking:
            self._is_asking = True
            # At the end of this turn of the loop, with all jobs that the turn submits.
            loop.call_soon(self._ask_next, loop)
        return answer

    async def find_all(self, questions: Sequence[Question]) -> list[CachedAnswer | None]:
        """The answers in order."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.answers.find, questions)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False)

    def _ask_next(self, loop: asyncio.AbstractEventLoop) -> None:
        asked, self._asked = self._asked[:_AT_ONCE], self._asked[_AT_ONCE:]
        if not asked:
            self._is_asking = False
            return
        call = loop.run_in_executor(self._thread, self.answers.find, [question for question, _ in asked])

        def receive(call: asyncio.Future[list[CachedAnswer | None]]) -> None:
            failed = call.cancelled() or call.exception() is not None
            found = [None] * len(asked) if failed else call.result()
            for (_, answer), each in zip(asked, found, strict=True):
                if not answer.done():
                    answer.set_result(each)
            self._ask_next(loop)

        call.add_done_callback(receive)
