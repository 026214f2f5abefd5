"""The metrics of the commands that run until they are stopped: `--metrics-port` for Prometheus, and OpenTelemetry."""

from __future__ import annotations

import os
import socket
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
    metrics: InferenceMetrics,
    settings: Settings,
    port: int | None,
    name: str,
    is_ready: Callable[[], bool] = lambda: True,
) -> Iterator[None]:
    """Serves the metrics inside of the block, if a port was named, and sends them to OpenTelemetry, if that is on.

    name: of the command, which becomes part of the name of the service. is_ready: for /health/ready.
    """
    from penstock.registry.open_telemetry import exported_metrics

    instance, config = f"{socket.gethostname()}:{os.getpid()}", settings.inference.open_telemetry
    with (
        exported_metrics(config, metrics, lambda: metrics.ready_now(is_ready()), f"penstock-{name}", instance),
        _page(metrics, settings, port, is_ready),
    ):
        yield


@contextmanager
def _page(
    metrics: InferenceMetrics, settings: Settings, port: int | None, is_ready: Callable[[], bool]
) -> Iterator[None]:
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
