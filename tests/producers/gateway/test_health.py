"""The page of metrics while the broker is away."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.producers.gateway.exchange import Exchange, Limits
from penstock.producers.gateway.figures import GatewayFigures
from penstock.producers.gateway.fleet import GatewayClient
from penstock.producers.gateway.health import HealthRoutes
from penstock.registry.settings import Settings
from tests.servers import RedisServer


def test_the_page_of_metrics_waits_little_for_the_broker(redis_server: RedisServer):
    """A scrape ends early. The figures of the gateway matter most while the broker hangs."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def ask() -> None:
        client = GatewayClient(redis_server.url, timeout_s=3600, settings=Settings.load(environ={}))
        figures = GatewayFigures()
        figures.count("/v1/jobs", "POST", 503, 5.0)
        scope = {"type": "http", "method": "GET", "path": "/metrics", "headers": [], "query_string": b""}
        exchange = Exchange(scope, receive, send, Limits(1024, 60))
        async with client, asyncio.timeout(60):
            await client.usage()
            redis_server.freeze()
            try:
                await HealthRoutes(client, figures, has_metrics=True).show_metrics(exchange)
            finally:
                redis_server.thaw()

    asyncio.run(ask())
    assert sent[0]["status"] == 200
    assert b'penstock_http_requests_total{method="POST",route="/v1/jobs",status="503"} 1.0' in sent[1]["body"]
