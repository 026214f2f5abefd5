"""A file of lines through `/v1/batches` beside `Client.submit_many` of the same rows, and how many lines a run has.

From the upload of the file to the download of the answers. Gateway, worker and Redis are separate processes, and the
two take turns.
"""

from __future__ import annotations

from typing import Final

from tests.benchmarks.harness import Harness
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale

__all__ = ["measure"]

_MOST_LINES: Final = 50_000
_IN_FLIGHT: Final = 2048
"""The default of batches.max_outstanding."""
_REQUIRED_RATIO: Final = 0.8


def measure(scale: Scale, say: Progress) -> list[Row]:
    """Lines a second, the ratio, and the CPU of the gateway for a line."""
    lines = min(_MOST_LINES, scale.batch_lines)
    with Harness() as harness:
        server = harness.redis()
        worker = harness.worker(server, "mlp")
        url, gateway = harness.gateway(server)
        contenders = {
            "batches": harness.client("gateway-batch", url, worker=gateway, broker=None),
            "submit_many": harness.client("submit_many", server.url, worker=worker, broker=server),
        }
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        costs: list[float] = []
        for number in range(scale.rounds + 1):
            for name, client in contenders.items():
                sample = client.run(lines, _IN_FLIGHT)
                say(f"batches {number}/{scale.rounds}: {name}: {sample.jobs_per_s:,.0f}/s")
                # The first round warms up.
                if number:
                    rates[name].append(sample.jobs_per_s)
                    costs += [sample.worker_us] if name == "batches" else []
    rate, peer = median(rates["batches"]), median(rates["submit_many"])
    return [
        Row(
            f"/v1/batches of {lines:,} lines of 384 floats, against Client.submit_many of the same",
            f"{rate / peer:.2f}x ({rate:,.0f} and {peer:,.0f} jobs/s; {median(costs):,.0f} us of the gateway a line)",
            f">= {_REQUIRED_RATIO}x",
            "",
            verdict(required=rate / peer >= _REQUIRED_RATIO),
            {"ratio": rate / peer, "lines_per_s": rate, "jobs_per_s": peer, "gateway_us": median(costs)},
        )
    ]
