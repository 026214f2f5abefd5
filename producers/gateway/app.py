"""The application for a server of your choice: `uvicorn producers.gateway.app:app`.

It reads its settings from the environment when the server starts it. `penstock serve` adds what a server must do
itself: time-outs of silent connections, TLS, several processes with one page of metrics.
"""

from __future__ import annotations

from penstock.producers.gateway.application import Gateway

__all__ = ["app"]

app = Gateway()
