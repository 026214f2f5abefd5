"""A predict function whose calls are jobs: `@ray_serve("double")`. The function itself stays reachable as `.direct`.

def               -> a function with a blocking client
async def         -> a coroutine function with a RayServeWrapper
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

from penstock.producers.async_client import AsyncClient
from penstock.producers.client import Client
from penstock.producers.core import Inputs
from penstock.producers.ray_serve.config import RayServeConfig
from penstock.producers.ray_serve.requests import is_request
from penstock.producers.ray_serve.telemetry import telemetry_of
from penstock.producers.ray_serve.wrapper import DEFAULT_CONFIG, RayServeWrapper
from penstock.registry.errors import ConfigurationError, InvalidInput, PenstockError, ResultTimeout, described
from penstock.registry.queues import PriorityName, parse_name
from penstock.registry.tensors import Array

__all__ = ["SubmittedFunction", "ray_serve"]

Returned = TypeVar("Returned", covariant=True)
Kind = TypeVar("Kind", Client, AsyncClient)


class SubmittedFunction(Protocol[Returned]):
    """A function whose calls are jobs. Ray Serve takes it as a deployment: it is a function in its eyes, too."""

    direct: Callable[[Any], Any]
    """The function that was decorated: it runs here, without a job. A worker serves it."""
    close: Callable[[], Any]
    """Closes the client; awaited for a coroutine function. A later call connects anew."""

    def __call__(self, inputs: Any, *, priority: PriorityName = "normal", tenant: str | None = None) -> Returned:
        """What `direct` returns, computed by a worker. Arguments and errors are those of RayServeWrapper."""


def ray_serve(
    model: str | None = None,
    *,
    config: RayServeConfig = DEFAULT_CONFIG,
    version: str | None = None,
    url: str | None = None,
    client: Client | AsyncClient | None = None,
) -> Callable[[Callable[[Any], Returned]], SubmittedFunction[Returned]]:
    """Turns `predict(inputs) -> outputs` into a function that submits a job, and returns the outputs of the job.

    model: the name under which workers serve it; None for the name of the function. client: an AsyncClient for a
    coroutine function, a Client for another one; the other arguments are those of RayServeWrapper.
    Raises ConfigurationError for what is no such function, and as RayServeWrapper does.
    """
    if callable(model):
        raise ConfigurationError("ray_serve got a function in place of a model. Expected @ray_serve() with parentheses")

    def decorate(function: Callable[[Any], Returned]) -> SubmittedFunction[Returned]:
        _check(function)
        name = model or function.__name__
        submitted = (
            _awaited(function, RayServeWrapper(name, config, version=version, url=url, client=_of(AsyncClient, client)))
            if inspect.iscoroutinefunction(function)
            else _blocking(function, BlockingCalls(name, config, version, url, _of(Client, client)))
        )
        # Its signature is that of the job.
        del submitted.__wrapped__
        submitted.direct = function
        return cast(SubmittedFunction[Returned], submitted)

    return decorate


def _awaited(function: Callable[..., Any], wrapper: RayServeWrapper) -> Any:
    @wraps(function)
    async def submitted(inputs: Any, *, priority: PriorityName = "normal", tenant: str | None = None) -> Any:
        return await wrapper(inputs, priority=priority, tenant=tenant)

    vars(submitted)["close"] = wrapper.close
    return submitted


def _blocking(function: Callable[..., Any], calls: BlockingCalls) -> Any:
    @wraps(function)
    def submitted(inputs: Any, *, priority: PriorityName = "normal", tenant: str | None = None) -> Any:
        return calls.run(inputs, priority, tenant)

    vars(submitted)["close"] = calls.close
    return submitted


class BlockingCalls:
    """The calls of a plain function. Its client connects with the first one, in any thread; a copy connects anew."""

    _own: Client | None = None
    """Made by the first call. Not the one that was given."""

    def __init__(
        self, model: str, config: RayServeConfig, version: str | None, url: str | None, client: Client | None
    ) -> None:
        """The arguments are those of RayServeWrapper, with a blocking client."""
        self._model = parse_name("model", model)
        self._config = config
        self._version = version
        self._url = url
        self._given = client
        self._lock = threading.Lock()
        telemetry_of(config)

    def run(self, inputs: Inputs, priority: PriorityName, tenant: str | None) -> dict[str, Array]:
        """The outputs by name. The job is cancelled when the time of the call is up."""
        with telemetry_of(self._config).counted(self._model) as call:
            if is_request(inputs):
                raise InvalidInput(
                    "Found a request of HTTP, whose body is awaited. Expected a decorated coroutine function for it"
                )
            call.priority = self._config.priority(priority)
            job = self._client().submit(
                self._model, inputs, version=self._version, priority=call.priority, tenant=tenant
            )
            try:
                return job.result(self._config.timeout_s)
            except ResultTimeout:
                with suppress(PenstockError):
                    job.cancel()
                raise self._config.late() from None

    def close(self) -> None:
        """Closes the client of these calls, and not a given one. A later call connects anew."""
        with self._lock:
            client, self._own = self._own, None
        if client is not None:
            client.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_own", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def _client(self) -> Client:
        if self._given is not None:
            return self._given
        with self._lock:
            if self._own is None:
                self._own = Client(self._url) if self._url is not None else Client.from_env()
            return self._own


def _check(function: Callable[..., Any]) -> None:
    """Raises ConfigurationError for what is no `predict(inputs) -> outputs`."""
    if not inspect.isfunction(function):
        raise ConfigurationError(f"ray_serve decorates a {type(function).__name__}. Expected a function")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(f"{function.__name__} yields its outputs. Expected a function that returns them")
    try:
        inspect.signature(function).bind({})
    except TypeError:
        raise ConfigurationError(
            f"{function.__name__} cannot be called with one argument. Expected a function (inputs) -> outputs"
        ) from None


def _of(kind: type[Kind], client: object) -> Kind | None:
    """The given client, if any. Raises ConfigurationError for one of the other kind."""
    if client is None or isinstance(client, kind):
        return client
    raise ConfigurationError(
        f"The client is {described(client)}. Expected an AsyncClient for a coroutine function, a Client for another one"
    )
