"""A peer: the MLP in LitServe, one worker, batches of up to 64, 5 ms wait. `python -m ...litserve_mlp PORT`."""

from __future__ import annotations

import sys

import litserve
import torch

from tests.benchmarks import mlp


class MlpApi(litserve.LitAPI):  # type: ignore[misc]  # LitServe is untyped
    """Lists in, lists out."""

    def setup(self, device: str) -> None:
        """Loads the model."""
        self.model = mlp.module()

    # LitServe hands the annotation to FastAPI, which would look for a query parameter.
    def decode_request(self, request):
        """One row."""
        row: list[float] = request["x"]
        return row

    def batch(self, inputs: list[list[float]]) -> torch.Tensor:
        """Rows -> (batch, 384)."""
        return torch.tensor(inputs)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 384) -> (batch, 10)."""
        with torch.inference_mode():
            logits: torch.Tensor = self.model(x)
        return logits

    def unbatch(self, output: torch.Tensor) -> list[list[float]]:
        """(batch, 10) -> rows."""
        rows: list[list[float]] = output.tolist()
        return rows

    def encode_response(self, output: list[float]) -> dict[str, list[float]]:
        """One answer."""
        return {"logits": output}


if __name__ == "__main__":
    api = MlpApi(max_batch_size=mlp.BATCH, batch_timeout=0.005)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="warning")
