"""A program with a cluster of Ray Serve of its own: `python -m tests.producers.ray_serve.deployed URL MODEL PORT`.

It deploys the wrapper and a decorated function for a model that answers 2 x, calls both, and prints what came.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

import ray
from ray import serve

from penstock.producers.ray_serve import RayServeConfig, RayServeWrapper, ray_serve

URL, MODEL, PORT = sys.argv[1:]
CONFIG = RayServeConfig(timeout_s=180)
X = [[1.0, 2.0, 3.0, 4.5]]


class CountingWrapper(RayServeWrapper):
    """A wrapper that also tells what its replica has counted."""

    def counted(self) -> dict[str, float]:
        """The calls of this replica by priority."""
        # A class of a program is copied with its globals, and a registry cannot be.
        from prometheus_client import REGISTRY

        samples = [sample for family in REGISTRY.collect() for sample in family.samples]
        return {
            sample.labels["priority"]: sample.value
            for sample in samples
            if sample.name == "penstock_ray_serve_calls_total" and sample.labels["outcome"] == "completed"
        }


@ray_serve(MODEL, config=CONFIG, url=URL)
async def double(inputs: Any) -> Any:
    """Never runs here: a worker answers."""
    raise AssertionError


def main() -> None:
    """Everything in one cluster, which ends with the program."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(PORT)})
    cpu = {"num_cpus": 0.1}
    wrapped = serve.run(
        serve.deployment(CountingWrapper, ray_actor_options=cpu).bind(MODEL, CONFIG, url=URL),
        name="wrapped",
        route_prefix="/wrapped",
    )
    function: Any = double
    decorated = serve.run(
        serve.deployment(function, ray_actor_options=cpu).bind(), name="decorated", route_prefix="/decorated"
    )
    found: dict[str, Any] = {
        priority: wrapped.remote({"x": X}, priority=priority).result()["y"].tolist() for priority in ("high", "low")
    }
    found["decorated"] = decorated.remote({"x": X}).result()["y"].tolist()
    for name in ("wrapped", "decorated"):
        request = urllib.request.Request(f"http://127.0.0.1:{PORT}/{name}", json.dumps({"inputs": {"x": X}}).encode())
        with urllib.request.urlopen(request, timeout=180) as answer:  # noqa: S310 - loopback
            found[f"{name} over HTTP"] = json.load(answer)["outputs"]["y"]["data"]
    found["counted"] = wrapped.counted.remote().result()
    serve.shutdown()
    ray.shutdown()
    print(json.dumps(found))  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main()
