"""The bound: a worker that does with Redis what must be done and nothing else. `python -m ...raw_worker URL`.

    XREADGROUP a batch -> forward -> XADD the replies, XACK and XDEL the jobs, in one pipeline

No record, signature, lease, fence, priority, event or retry. Jobs on ECHO are answered without a forward.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np
import redis

from tests.benchmarks import mlp

__all__ = ["ECHO", "GROUP", "JOBS", "REPLIES"]

JOBS: Final = "raw:jobs"
ECHO: Final = "raw:echo"
REPLIES: Final = "raw:replies"
GROUP: Final = "raw"
_NO_LOGITS: Final = bytes(40)


def main(url: str) -> None:
    """Serves until it is killed."""
    import torch

    broker = redis.Redis.from_url(url)
    for key in (JOBS, ECHO):
        broker.xgroup_create(key, GROUP, id="0", mkstream=True)
    model = mlp.module()
    print("ready", flush=True)
    while True:
        found: Any = broker.xreadgroup(GROUP, "worker", {JOBS: ">", ECHO: ">"}, count=mlp.BATCH, block=1000)
        for key, entries in found:
            answers = [_NO_LOGITS] * len(entries)
            if key == JOBS.encode():
                rows = np.stack([np.frombuffer(fields[b"x"], np.float32) for _, fields in entries])
                with torch.inference_mode():
                    answers = [row.tobytes() for row in model(torch.from_numpy(rows)).numpy()]
            _reply(broker, key, entries, answers)


def _reply(broker: redis.Redis, key: bytes, entries: list[Any], answers: list[bytes]) -> None:
    pipeline = broker.pipeline(transaction=False)
    for (_, fields), answer in zip(entries, answers, strict=True):
        pipeline.xadd(REPLIES, {"n": fields[b"n"], "y": answer})
    ids = [entry_id for entry_id, _ in entries]
    pipeline.xack(key, GROUP, *ids)
    pipeline.xdel(key, *ids)
    pipeline.execute()


if __name__ == "__main__":
    main(sys.argv[1])
