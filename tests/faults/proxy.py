"""A TCP proxy that breaks the connections between clients and a broker, each direction by itself.

    client --- requests ---> Proxy ---> broker
           <-- answers -----       <---

It runs on a thread of its own. Faults hit the connections that are open at that moment, but for a delay and a
partition, which new ones meet too. Where an answer is cut follows from the seed.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Literal, TypeVar

__all__ = ["Direction", "Proxy"]

Direction = Literal["requests", "answers"]
T = TypeVar("T")

_BOTH: Final[tuple[Direction, ...]] = ("requests", "answers")
_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER with no time left: closing sends RST instead of FIN."""


class Proxy:
    """Listens on a free port of the loopback for the broker on `port`; use it as a context.

    Attributes:
        cuts: answers that were cut short so far.
        port: where it listens, once it does.
    """

    def __init__(self, port: int, seed: int = 1) -> None:
        self.cuts = 0
        self.port = 0
        self._target = port
        self._random = random.Random(seed)
        self._delay_s: dict[Direction, float] = dict.fromkeys(_BOTH, 0.0)
        self._answers_to_cut = 0
        self._links: set[_Link] = set()
        self._loop = asyncio.new_event_loop()
        self._is_open = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """What clients connect to."""
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._await(self._listen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._await(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def delay(self, seconds: float, *directions: Direction) -> None:
        """From now on every byte arrives that much later, in the order in which it was sent; 0 ends it."""
        for direction in directions or _BOTH:
            self._delay_s[direction] = seconds

    def silence(self, *directions: Direction, that_sent: bytes = b"") -> int:
        """Half-open: the connections of this moment stay open, and nothing arrives on them any more. How many.

        that_sent: only those whose last request contains this.
        """

        def act() -> int:
            hit = [link for link in self._links if that_sent in link.last_request]
            for link in hit:
                link.silent.update(directions or _BOTH)
            return len(hit)

        return self._on_loop(act)

    def partition(self) -> None:
        """Nothing arrives on any connection, new ones included, until `heal`; what was sent meanwhile follows then."""
        self._on_loop(self._is_open.clear)

    def heal(self) -> None:
        """Ends a partition."""
        self._on_loop(self._is_open.set)

    def reset(self) -> int:
        """Resets every connection, on both sides; how many there were."""

        def act() -> int:
            links = list(self._links)
            for link in links:
                link.end()
            return len(links)

        return self._on_loop(act)

    def cut(self, answers: int = 1) -> None:
        """The next answers end somewhere in the middle, and their connections with them."""

        def act() -> None:
            self._answers_to_cut += answers

        self._on_loop(act)

    def kept(self, link: _Link, direction: Direction, data: bytes) -> bytes:
        """What of `data` the fault of this moment lets through; resets the link when that is not all."""
        if direction == "requests":
            link.last_request = data
        if direction in link.silent:
            return b""
        if direction == "answers" and self._answers_to_cut and len(data) > 1:
            self._answers_to_cut -= 1
            self.cuts += 1
            link.ends = True
            return data[: self._random.randrange(1, len(data))]
        return data

    async def passage(self, direction: Direction, sent: float) -> None:
        """Returns when what was sent at that time of the loop may arrive."""
        await self._is_open.wait()
        if (left := sent + self._delay_s[direction] - self._loop.time()) > 0:
            await asyncio.sleep(left)

    async def _listen(self) -> None:
        self._is_open.set()
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_broker = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            # As if the broker itself refused.
            writer.transport.abort()
            return
        link = _Link(self, (reader, writer), to_broker)
        self._links.add(link)
        try:
            await link.run()
        finally:
            self._links.discard(link)
            link.end()

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._is_open.set()
        self.delay(0)
        for link in list(self._links):
            link.end()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=5)

    def _await(self, step: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(step, self._loop).result(180)

    def _on_loop(self, act: Callable[[], T]) -> T:
        done: Future[T] = Future()
        self._loop.call_soon_threadsafe(lambda: done.set_result(act()))
        return done.result(180)


_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Link:
    """One client's connection and its counterpart to the broker."""

    def __init__(self, proxy: Proxy, client: _Ends, broker: _Ends) -> None:
        self.silent: set[Direction] = set()
        self.last_request = b""
        self.ends = False
        """What arrives now is the last."""
        self._proxy = proxy
        self._client = client
        self._broker = broker

    async def run(self) -> None:
        """Carries bytes until either side or a fault ends the connection."""
        ways = [
            asyncio.create_task(self._carry("requests", self._client[0], self._broker[1])),
            asyncio.create_task(self._carry("answers", self._broker[0], self._client[1])),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    def end(self) -> None:
        """Closes both connections: with RST, but for a client that is to see half an answer first."""
        for _, writer in (self._broker,) if self.ends else (self._broker, self._client):
            connection: socket.socket = writer.get_extra_info("socket")
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()
        self._client[1].close()

    async def _carry(self, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        reading = asyncio.create_task(_take_in(reader, under_way))
        try:
            with suppress(OSError):
                while not self.ends:
                    sent, data = await under_way.get()
                    if not data:
                        return
                    await self._proxy.passage(direction, sent)
                    writer.write(self._proxy.kept(self, direction, data))
                    await writer.drain()
        finally:
            reading.cancel()


async def _take_in(reader: asyncio.StreamReader, under_way: asyncio.Queue[tuple[float, bytes]]) -> None:
    """Everything that is sent, with its time, and nothing at the end."""
    data = b" "
    while data:
        try:
            data = await reader.read(65_536)
        except OSError:
            data = b""
        under_way.put_nowait((asyncio.get_running_loop().time(), data))
