"""An application of FastAPI with a model and the middleware, for uvicorn in a process of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, WebSocket

from penstock.producers.asgi import ASGIMiddleware, Model, close_client, model

events: list[str] = []


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """The client of the models ends with the application."""
    events.append("started")
    yield
    await close_client()


app = FastAPI(lifespan=lifespan)
app.add_middleware(
    ASGIMiddleware,
    max_in_flight=2,
    requests_per_minute=30,
    caller=lambda scope: dict(scope["headers"]).get(b"x-caller", b"").decode(),
)


async def double(row: list[float], double: Annotated[Model, Depends(model("double"))]) -> list[float]:
    """Twice the row."""
    outputs = await double.predict({"x": [row]})
    return list(outputs["y"][0].tolist())


async def nap(row: list[float], napper: Annotated[Model, Depends(model("napper", "1"))]) -> str:
    """The id of a job that takes 0.3 s, once it has ended."""
    job = await napper.submit({"x": [row]})
    await job.result(180)
    return job.id


async def unknown(nothing: Annotated[Model, Depends(model("nothing"))]) -> None:
    """A model that nobody serves."""
    await nothing.predict({"x": [[0]]})


async def echo(socket: WebSocket) -> None:
    """What passes through the middleware."""
    await socket.accept()
    await socket.send_json({"events": events, "said": await socket.receive_text()})
    await socket.close()


def plain() -> Any:
    """A route without a model."""
    return {"plain": True}


for _path, _route in (("/double", double), ("/nap", nap), ("/unknown", unknown)):
    app.add_api_route(_path, _route, methods=["POST"])
app.add_api_route("/plain", plain)
app.add_api_websocket_route("/echo", echo)
