"""A peer: as mosec_mlp.py, with bytes in msgpack in and out. `python -m ...mosec_msgpack_mlp --port PORT`."""

from __future__ import annotations

from typing import Any

import mosec
import msgspec
import numpy as np
import torch

from tests.benchmarks import mlp


class BinaryMlp(mosec.Worker):  # type: ignore[misc]  # follow_imports skips mosec
    """{"x": bytes of one row} in, {"logits": bytes} out. msgspec is faster than the msgpack of mosec's own mixin."""

    def __init__(self) -> None:
        self.model = mlp.module()

    def deserialize(self, data: bytes) -> Any:
        """One request."""
        return msgspec.msgpack.decode(data)

    def serialize(self, data: Any) -> bytes:
        """One answer."""
        return msgspec.msgpack.encode(data)

    def forward(self, data: list[dict[str, bytes]]) -> list[dict[str, bytes]]:
        """One answer per request of the batch."""
        rows = np.frombuffer(b"".join(request["x"] for request in data), np.float32).reshape(-1, mlp.WIDTH)
        with torch.inference_mode():
            logits = self.model(torch.from_numpy(rows.copy())).numpy()
        return [{"logits": row.tobytes()} for row in logits]


if __name__ == "__main__":
    server = mosec.Server()
    server.append_worker(BinaryMlp, num=1, max_batch_size=mlp.BATCH, max_wait_time=5)
    server.run()
