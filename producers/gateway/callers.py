"""The one place that says for whom a request is: its tenant."""

from __future__ import annotations

from penstock.producers.gateway.exchange import Exchange
from penstock.producers.gateway.fleet import GatewayClient

__all__ = ["tenant_of"]


def tenant_of(exchange: Exchange, client: GatewayClient) -> str:
    """The tenant whose files, batches and jobs a request may see: that of the gateway, where clients have no keys."""
    return client.tenant
