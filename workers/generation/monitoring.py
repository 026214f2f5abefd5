"""The figures of an engine that runs without a worker: a page for Prometheus, and a line for a person.

    engine.stats() -> figures --> /metrics, at each request of a monitor
                              '-> requests/s, tokens/s, memory, cache hits, active texts; a line each few seconds

    with start_monitoring(engine, prometheus_port=9101, enable_console=True) as monitoring:
        engine.generate(...)            # http://127.0.0.1:9101/metrics

The page is empty until the engine has computed a step. A worker has its own page: see docs/how-to/operate.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from penstock.registry.errors import ConfigurationError, MissingRequirement, described
from penstock.registry.extras import missing_package, not_installed
from penstock.registry.metrics import ENGINE_DEVICE_MEMORY, ENGINE_FINISHED
from penstock.workers.generation.engine_figures import figures_of
from penstock.workers.generation.outputs import EngineStats
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.observe.process_memory import device_bytes, host_bytes

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

    from penstock.workers.generation.engine import Engine

__all__ = ["Monitoring", "console_line", "start_monitoring"]

_HOST: Final = "127.0.0.1"
_INTERVAL_S: Final = 5.0
_MOST_PORT: Final = 65_535


def start_monitoring(
    engine: Engine,
    *,
    prometheus_port: int = 0,
    enable_console: bool = False,
    interval_s: float = _INTERVAL_S,
    write: Callable[[str], object] | None = None,
) -> Monitoring:
    """Serves the engine's figures on the loopback until `stop`. Port 0 takes a free port, which `port` holds.

    enable_console: also writes a line each `interval_s`, by `write`; None writes to the standard error. Raises
    ConfigurationError for a port that cannot be used, and MissingRequirement without the extra [worker].
    """
    if not isinstance(prometheus_port, int) or not 0 <= prometheus_port <= _MOST_PORT:
        raise ConfigurationError(f"prometheus_port: found {described(prometheus_port)}, expected 0 to {_MOST_PORT}")
    if not interval_s > 0:
        raise ConfigurationError(f"interval_s: found {described(interval_s)}, expected a number of seconds above 0")
    if missing := missing_package("worker"):
        raise MissingRequirement(not_installed(missing, "worker"))
    monitoring = Monitoring(engine, prometheus_port)
    if enable_console:
        monitoring.write_lines(interval_s, _standard_error() if write is None else write)
    return monitoring


class Monitoring:
    """What `start_monitoring` has started. Leaving a `with` block stops it."""

    def __init__(self, engine: Engine, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._engine: Final = engine
        self._stopped: Final = threading.Event()
        self._writer: threading.Thread | None = None
        registry = CollectorRegistry()
        registry.register(_Figures(engine))
        try:
            self._server, self._thread = start_http_server(port, _HOST, registry)
        except OSError as error:
            raise ConfigurationError(
                f"prometheus_port: {port} cannot be used: {error.strerror}. Expected a free one; 0 takes any"
            ) from None
        self.port: Final = int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """Of the page."""
        return f"http://{_HOST}:{self.port}/metrics"

    def write_lines(self, interval_s: float, write: Callable[[str], object]) -> None:
        """Begins to write a line each `interval_s`, on a thread of its own."""
        self._writer = threading.Thread(
            target=self._write, args=(interval_s, write), name="generation-console", daemon=True
        )
        self._writer.start()

    def stop(self) -> None:
        """The port is free, and no line is written, when this returns."""
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        if self._writer is not None:
            self._writer.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _write(self, interval_s: float, write: Callable[[str], object]) -> None:
        before, before_at = self._engine.stats(), time.monotonic()
        while not self._stopped.wait(interval_s):
            after, now = self._engine.stats(), time.monotonic()
            write(console_line(before, after, now - before_at))
            before, before_at = after, now


def console_line(before: EngineStats, after: EngineStats, span_s: float) -> str:
    """What has happened between two readings, so many seconds apart, and what is in use now."""
    requests = (after.requests_finished - before.requests_finished) / span_s
    tokens = (after.tokens_generated - before.tokens_generated) / span_s
    queried = after.prefix_tokens_queried - before.prefix_tokens_queried
    found = after.prefix_tokens_found - before.prefix_tokens_found
    memory = " + ".join(
        f"{size / 1e6:,.0f} MB{place}" for size, place in ((host_bytes(), ""), (device_bytes(), " GPU")) if size
    )
    hits = f"{found / queried:.0%}" if queried else "-"
    return (
        f"{requests:,.1f} requests/s  {tokens:,.0f} tokens/s  memory {memory or '-'}, "
        f"pages {after.pages_used:,}/{after.pages_total:,}  cache hits {hits}  "
        f"active {after.running:,}, waiting {after.waiting:,}"
    )


class _Figures:
    """A collector of prometheus_client: the metrics of a worker's engine, of the process, and of this engine alone."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Final = engine
        self._metrics: Final = InferenceMetrics(())

    def collect(self) -> Iterator[Family]:
        """The metrics that have a value; none before the first step."""
        from prometheus_client import ProcessCollector
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stats = self._engine.stats()
        if not stats.steps:
            return
        name = self._engine.decoder.name
        self._metrics.generation(name, "", figures_of(stats, self._engine.config.scheduler.max_num_seqs))
        yield from (family for family in self._metrics.collect() if family.samples)
        yield from ProcessCollector(registry=None).collect()
        labels = (name, "", "")
        finished = CounterMetricFamily(ENGINE_FINISHED.name, ENGINE_FINISHED.help, labels=ENGINE_FINISHED.labels)
        finished.add_metric(labels, stats.requests_finished)
        yield finished
        if (size := device_bytes()) is not None:
            memory = ENGINE_DEVICE_MEMORY
            family = GaugeMetricFamily(memory.name, memory.help, labels=memory.labels)
            family.add_metric(labels, size)
            yield family


def _standard_error() -> Callable[[str], Any]:
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False).print
