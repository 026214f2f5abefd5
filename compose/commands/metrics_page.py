"""`--metrics-port` of the commands that run until they are stopped: their metrics as a page for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from penstock.registry.settings import Settings
    from penstock.workers.observe.metrics import InferenceMetrics

__all__ = ["metrics_port_option", "served_metrics"]

metrics_port_option: Final = click.option(
    "--metrics-port", type=click.IntRange(0, 65535), help="Serve /metrics on this port (default: none)."
)


@contextmanager
def served_metrics(
    metrics: InferenceMetrics, settings: Settings, port: int | None, is_ready: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Serves the metrics inside of the block, if a port was named. is_ready: for /health/ready."""
    if port is None:
        yield
        return
    from penstock.workers.observe.probe import Probe

    worker = settings.worker
    probe = Probe(
        metrics, lambda: (is_ready(), {}), host=worker.metrics_host, port=port, bearer_file=worker.metrics_bearer_file
    )
    probe.start()
    try:
        yield
    finally:
        probe.stop()
