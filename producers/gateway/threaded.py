"""A gateway in a thread of a program that does other things, too.

    start: settings -> Gateway -> uvicorn in a thread --- listens ---> url
    stop:  open streams end with a hint -> requests that run are answered -> the thread ends

It sets no signal handler and no logging of its own. `penstock serve` is for a process that does nothing else: it can
run several processes, and start one again that has died.
"""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, suppress

import uvicorn

from penstock.producers.gateway.application import Gateway
from penstock.producers.gateway.server import Binding, listening, uvicorn_options
from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Settings

__all__ = ["ThreadedGateway"]


class ThreadedGateway:
    """The gateway for HTTP and gRPC, in a thread. Call start, then stop. settings: with a broker."""

    def __init__(self, settings: Settings, binding: Binding) -> None:
        self._settings = settings
        self._binding = binding
        self._opened = ExitStack()
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        # A signal may call `stop` inside of `start`, in the same thread.
        self._changing = threading.RLock()
        self.url = ""
        """Where it listens, with the port that was chosen for port 0; empty before `start` and after `stop`."""
        self.rpc = ""
        """The address of gRPC; empty without it."""

    def start(self) -> None:
        """Serve, once a request would be answered.

        Raises ConfigurationError for an address that cannot be used, for settings that no gateway can have, and for a
        gateway that runs already.
        """
        with self._changing:
            if self._thread is not None:
                raise ConfigurationError("The gateway runs. Expected one `start` before each `stop`")
            self._start()

    def _start(self) -> None:
        with ExitStack() as opened:
            listener, rpc, url = opened.enter_context(listening(self._binding))
            gateway = Gateway(self._settings, rpc=rpc, exports_spans=False)
            options = {**uvicorn_options(self._settings.inference, self._binding), "workers": 1, "log_config": None}
            server = _Server(uvicorn.Config(gateway, **options), gateway)
            thread = threading.Thread(target=server.serve_on, args=(listener,), name="gateway", daemon=True)
            thread.start()
            server.has_begun.wait()
            if not server.started:
                thread.join()
                raise ConfigurationError(gateway.start_error or "The gateway did not start; its log says why")
            self._server, self._thread, self._opened = server, thread, opened.pop_all()
        self.url, self.rpc = url, "" if rpc is None else rpc.address

    def stop(self) -> None:
        """Answer the requests that run, for up to the setting server.stop_grace_s, and end. Again: nothing."""
        with self._changing:
            if self._server is None or self._thread is None:
                return
            self._server.stop()
            self._thread.join()
            self._opened.close()
            self._server = self._thread = None
            self.url = self.rpc = ""

    def read_keys_again(self) -> None:
        """The next request sees the API keys that were made until now."""
        if self._server is not None:
            self._server.gateway.read_keys_again()

    def wait(self) -> None:
        """Sleep until it has ended."""
        if self._thread is not None:
            self._thread.join()


class _Server(uvicorn.Server):
    """uvicorn that tells when it has begun. A thread of its own gets no signals."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self.gateway = gateway
        self.has_begun = threading.Event()
        """It serves, or it has failed: then `started` is false."""

    def serve_on(self, listener: socket.socket) -> None:
        """Serves until `stop`."""
        try:
            # uvicorn ends its process when the startup fails: here, only the thread.
            with suppress(SystemExit):
                self.run([listener])
        finally:
            self.has_begun.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        self.has_begun.set()

    def stop(self) -> None:
        """For any thread."""
        self.gateway.stop_soon()
        self.should_exit = True
