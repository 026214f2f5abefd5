"""An application of FastAPI with the gateway below a path, for uvicorn in a process of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from penstock.producers.gateway.application import Gateway

gateway = Gateway()


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """The gateway ends with the application."""
    yield
    await gateway.aclose()


app = FastAPI(lifespan=lifespan)
app.mount("/inference", gateway)
