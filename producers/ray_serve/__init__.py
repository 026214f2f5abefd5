"""Models in deployments of Ray Serve: a class and a decorator whose calls are jobs. Nothing here imports Ray.

    handle.remote(inputs) or HTTP -- replica of Ray Serve --> RayServeWrapper --> AsyncClient --> job --> outputs

The replica holds a client and no model: the workers of Penstock run it.
"""

from __future__ import annotations

from penstock.producers.ray_serve.config import RayServeConfig
from penstock.producers.ray_serve.decorator import SubmittedFunction, ray_serve
from penstock.producers.ray_serve.wrapper import RayServeWrapper

__all__ = ["RayServeConfig", "RayServeWrapper", "SubmittedFunction", "ray_serve"]
