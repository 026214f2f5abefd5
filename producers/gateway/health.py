"""Whether this process lives, whether jobs would be answered, and the figures of this gateway.

/health/live                                           200 while the process answers
/health/ready, /ready, /healthz, /health, /v2/health   503 until the broker answers and a worker claims jobs
/metrics                                               Prometheus text; of all processes of one `penstock serve`
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from penstock.producers.gateway.exchange import Exchange
from penstock.producers.gateway.figures import GatewayFigures
from penstock.producers.gateway.fleet import GatewayClient
from penstock.producers.gateway.routing import Route
from penstock.registry.errors import BrokerUnavailable

__all__ = ["HealthRoutes"]

_USAGE_S: Final = 2.0


class Readiness(msgspec.Struct):
    """Whether jobs are answered now. workers: those that claim jobs."""

    ready: bool
    broker: bool
    workers: int


class HealthRoutes:
    """The routes for monitors."""

    def __init__(self, client: GatewayClient, figures: GatewayFigures, *, has_metrics: bool) -> None:
        """has_metrics: whether the page of metrics is served."""
        self._client = client
        self._figures = figures
        self._has_metrics = has_metrics

    @property
    def routes(self) -> list[Route]:
        """The routes, for the table of the application."""
        ready = (self.show_ready, "Whether jobs are answered")
        return [
            Route("GET", "/health/live", self.show_live, "Whether the process answers", needs="nothing"),
            *(
                Route("GET", path, *ready, gives=Readiness, other_statuses=(503,), needs="nothing")
                for path in ("/health/ready", "/ready", "/health")
            ),
            Route(
                "GET", "/healthz", self.show_models, "Whether models are loaded, and which versions", needs="nothing"
            ),
            *(
                [
                    Route(
                        "GET",
                        "/metrics",
                        self.show_metrics,
                        "Figures for Prometheus",
                        needs="admin",
                        also_gives=(b"text/plain",),
                    )
                ]
                if self._has_metrics
                else []
            ),
        ]

    async def show_live(self, exchange: Exchange) -> None:
        """GET /health/live."""
        await exchange.answer(200, b'{"live":true}')

    async def show_ready(self, exchange: Exchange) -> None:
        """GET /health/ready."""
        readiness = await self.readiness()
        await exchange.answer(200 if readiness.ready else 503, msgspec.json.encode(readiness))

    async def show_models(self, exchange: Exchange) -> None:
        """GET /healthz. model_version: that of the only model; null while there are several."""
        try:
            models = await self._client.models()
        except BrokerUnavailable:
            models = []
        versions = {model.spec.name: model.spec.version for model in models if model.is_loaded}
        only = next(iter(versions.values())) if len(versions) == 1 else None
        facts: dict[str, Any] = {"status": "ok" if versions else "unavailable", "model_version": only}
        await exchange.answer(200 if versions else 503, msgspec.json.encode({**facts, "models": versions}))

    async def show_metrics(self, exchange: Exchange) -> None:
        """GET /metrics. Without the usage of API keys when the broker does not answer soon: a scrape ends after 5 s."""
        try:
            async with asyncio.timeout(_USAGE_S):
                usage = await self._client.usage()
        except (BrokerUnavailable, TimeoutError):
            usage = {}
        kind, page = self._figures.page(usage)
        await exchange.answer(200, page, kind)

    async def readiness(self) -> Readiness:
        """Whether the broker answers at once, and a worker claims jobs."""
        try:
            workers = await self._client.ready_workers()
        except BrokerUnavailable:
            return Readiness(ready=False, broker=False, workers=0)
        return Readiness(bool(workers), broker=True, workers=len(workers))
