"""Another model of the worker under test, asked without a pause: how long it left its client waiting at most."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from penstock import Client
from tests.faults.load import row
from tests.servers import RedisServer, wait_until

__all__ = ["Companion"]

_ANSWER_S = 60.0


class Companion:
    """Asks a doubling model one question after another inside the block of `asked`.

    Attributes:
        answered: questions so far.
        longest_s: the longest time from a question to its answer.
    """

    def __init__(self) -> None:
        self.answered = 0
        self.longest_s = 0.0
        self._problems: list[BaseException] = []

    @contextmanager
    def asked(self, server: RedisServer, model: str) -> Iterator[None]:
        """Ask from a thread; fails the test if an answer was wrong or did not come."""
        is_over = threading.Event()
        thread = threading.Thread(target=self._ask, args=(server, model, is_over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(2 * _ANSWER_S)
        self._check()
        assert not thread.is_alive()

    def await_answers(self, count: int) -> None:
        """Returns after so many more answers to questions from now on."""
        # One question may be under way.
        wanted = self.answered + count + 1
        wait_until(lambda: self.answered >= wanted or self._problems, _ANSWER_S, "the other model answers")
        self._check()

    def _check(self) -> None:
        if self._problems:
            raise AssertionError(f"the other model did not answer: {self._problems[0]!r}") from self._problems[0]

    def _ask(self, server: RedisServer, model: str, is_over: threading.Event) -> None:
        try:
            with Client(server.url, tenant="companion") as client:
                while not is_over.is_set():
                    begun = time.monotonic()
                    question = float(self.answered % 1000 + 1)
                    answer = client.submit(model, {"x": row(question)}).result(_ANSWER_S)
                    assert answer["y"][0, 0] == 2 * question
                    self.longest_s = max(self.longest_s, time.monotonic() - begun)
                    self.answered += 1
        except BaseException as error:
            self._problems.append(error)
