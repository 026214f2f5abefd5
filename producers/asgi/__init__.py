"""Inference in an ASGI application of your own, such as one of FastAPI or Starlette.

middleware.py  ASGIMiddleware: admission, a rate for each caller, times, and errors as answers
dependency.py  Depends(model("minilm")): a model as an argument of a route
"""

from __future__ import annotations

from penstock.producers.asgi.dependency import Model, ModelDependency, close_client, model
from penstock.producers.asgi.middleware import ASGIMiddleware

__all__ = ["ASGIMiddleware", "Model", "ModelDependency", "close_client", "model"]
