"""A peer: the MLP in FastAPI, which calls the model once for each request. `python -m ...fastapi_mlp PORT`."""

from __future__ import annotations

import sys

import fastapi
import torch
import uvicorn
from pydantic import BaseModel

from tests.benchmarks import mlp

app = fastapi.FastAPI()
_model = mlp.module()


class Row(BaseModel):
    """One row."""

    x: list[float]


@app.post("/predict")  # type: ignore[untyped-decorator]  # FastAPI is skipped where it is not installed
async def predict(row: Row) -> dict[str, list[float]]:
    """On the event loop: with one thread for the model, a pool of threads only adds switches."""
    with torch.inference_mode():
        logits: list[float] = _model(torch.tensor([row.x]))[0].tolist()
    return {"logits": logits}


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", http="httptools", loop="uvloop")
