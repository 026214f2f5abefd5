"""A peer: the MLP in mosec, one worker, batches of up to 64, 5 ms wait. `python -m ...mosec_mlp --port PORT`."""

from __future__ import annotations

from typing import Any

import mosec
import torch

from tests.benchmarks import mlp


class Mlp(mosec.Worker):  # type: ignore[misc]  # follow_imports skips mosec
    """JSON lists in and out, which is mosec's default."""

    def __init__(self) -> None:
        self.model = mlp.module()

    def forward(self, data: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One answer per request of the batch."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([request["x"] for request in data])).tolist()
        return [{"logits": row} for row in logits]


if __name__ == "__main__":
    server = mosec.Server()
    server.append_worker(Mlp, num=1, max_batch_size=mlp.BATCH, max_wait_time=5)
    server.run()
