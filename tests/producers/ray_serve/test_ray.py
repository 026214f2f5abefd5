"""AR-004, AR-049: all of it imports and runs without Ray, and in deployments of the real one where it is there."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import StartWorker
from tests.packages import write_double
from tests.servers import ROOT, RedisServer, free_port, leave_out

_WITHOUT_RAY = """
import asyncio, sys
sys.modules["ray"] = None
from penstock import AsyncClient
from penstock.producers.ray_serve import RayServeConfig, RayServeWrapper, ray_serve

async def main():
    async with AsyncClient.in_memory({"double": lambda inputs: {"y": inputs["x"] * 2}}) as client:
        found = await RayServeWrapper("double", RayServeConfig(), client=client)({"x": [[1.0, 2.5]]})

        @ray_serve(client=client)
        async def double(inputs):
            return {"y": inputs["x"] * 2}

        again = await double({"x": [[1.0, 2.5]]})
        print(found["y"].tolist(), again["y"].tolist())

asyncio.run(main())
assert sys.modules["ray"] is None
assert not [name for name in sys.modules if name.startswith(("ray.", "starlette"))]
"""
_WITHOUT_PROMETHEUS = """
import sys
sys.modules["prometheus_client"] = None
from penstock import MissingRequirement
from penstock.producers.ray_serve import RayServeConfig, RayServeWrapper
try:
    RayServeWrapper("double")
except MissingRequirement as error:
    print(error)
RayServeWrapper("double", RayServeConfig(enable_telemetry=False))
"""


def printed(program: str) -> str:
    """What a program prints in a fresh interpreter."""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_all_of_it_runs_where_ray_cannot_be_imported():
    """AR-049: the wrapper and the decorator answer; neither Ray nor Starlette is imported."""
    assert printed(_WITHOUT_RAY) == "[[2.0, 5.0]] [[2.0, 5.0]]"


def test_telemetry_says_which_package_it_needs():
    """Without it a wrapper is refused where it is made, and one without telemetry is not."""
    assert printed(_WITHOUT_PROMETHEUS) == (
        "prometheus-client is not installed. Expected: pip install '.[worker]' in the checkout of Penstock, or "
        "RayServeConfig(enable_telemetry=False)"
    )


def test_deployments_of_a_real_cluster_answer(
    redis_server: RedisServer, models_root: Path, start_worker: StartWorker, tmp_path: Path, slot: str
):
    """CF-055, CF-056: by handle and by HTTP; the replica counts the calls under their priorities."""
    if importlib.util.find_spec("ray") is None:
        leave_out("needs Ray Serve")
    write_double(models_root, slot)
    start_worker(redis_server, models_root)
    command = [sys.executable, "-m", "tests.producers.ray_serve.deployed", redis_server.url, slot, str(free_port())]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(redis_server.folder)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found.pop("counted") == {"high": 1, "low": 1, "normal": 1}
    names = ("high", "low", "decorated", "wrapped over HTTP", "decorated over HTTP")
    assert found == {name: [[2.0, 4.0, 6.0, 9.0]] for name in names}
