"""The tracer of a process, and the exporters to a collector.

    a provider that the program has made (also `opentelemetry-instrument`) -> used as it is
    none, in a process of Penstock's own                                   -> one that sends to a collector

Everything else is said by OpenTelemetry's own variables: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_HEADERS,
OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_BSP_*, OTEL_METRIC_EXPORT_INTERVAL.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from penstock.registry.errors import ConfigurationError
from penstock.registry.extras import not_installed
from penstock.registry.open_telemetry.ending import ended_soon

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.trace import Tracer
    from prometheus_client.registry import Collector

    from penstock.registry.settings_sections import OpenTelemetryConfig

__all__ = ["exported_metrics", "exported_spans", "tracer_of"]

_SCOPE: Final = "penstock"
_PROTOCOL: Final = "http/protobuf"
_PROTOCOL_VARIABLES: Final = (
    "OTEL_EXPORTER_OTLP_PROTOCOL",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL",
)

logger = logging.getLogger("penstock.server")


def tracer_of() -> Tracer:
    """The tracer of this process.

    A program that submits jobs decides where its spans go: without a provider they go nowhere. For Penstock's own
    processes see exported_spans. Raises ConfigurationError without the package.
    """
    try:
        from opentelemetry import trace
    except ImportError:
        raise ConfigurationError(not_installed("opentelemetry-api", "otel")) from None
    return trace.get_tracer(_SCOPE)


@contextmanager
def exported_spans(config: OpenTelemetryConfig, service: str, instance: str) -> Iterator[None]:
    """Inside of the block, the spans of this process are sent to a collector; its end sends the last ones, in seconds.

    A process has one provider for good: a second block of it sends nothing. service: the name of the service, where the
    variables OTEL_* give none. instance: tells processes of it apart.
    Raises ConfigurationError without the packages, and for a protocol that is not there.
    """
    if not config.traces:
        yield
        return
    _check_exporters(os.environ)
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        yield
        return
    provider = TracerProvider(resource=_resource(service, instance), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        if not ended_soon(provider.shutdown):
            logger.warning("the last spans were not sent: the collector does not answer")


@contextmanager
def exported_metrics(
    config: OpenTelemetryConfig,
    metrics: Collector,
    refresh: Callable[[], object],
    service: str,
    instance: str,
) -> Iterator[None]:
    """Inside of the block, what a collector of Prometheus has is sent at an interval, and once more at its end.

    refresh: brings it up to date before it is read. service, instance: see exported_spans. Raises as that does.
    """
    # Of spans, the library itself asks for it.
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if is_off or not config.metrics:
        yield
        return
    _check_exporters(os.environ)
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    from penstock.registry.open_telemetry.metrics import OTelExporter, interval_s

    every_s = interval_s(os.environ)
    exporter = OTelExporter(metrics, refresh, OTLPMetricExporter(), _resource(service, instance), interval_s=every_s)
    exporter.start()
    try:
        yield
    finally:
        exporter.stop()


def _check_exporters(environ: Mapping[str, str]) -> None:
    """Raises ConfigurationError without the packages of the extra, and for another protocol than theirs."""
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk  # noqa: F401
    except ImportError as problem:
        missing = (problem.name or "").removeprefix("opentelemetry.").partition(".")[0]
        name = "opentelemetry-exporter-otlp-proto-http" if missing == "exporter" else "opentelemetry-sdk"
        raise ConfigurationError(not_installed(name, "otel")) from None
    for variable in _PROTOCOL_VARIABLES:
        # OpenTelemetry: an empty variable is one that is not set.
        if (environ.get(variable) or _PROTOCOL) != _PROTOCOL:
            raise ConfigurationError(
                f"{variable} is {environ[variable]!r:.40}. Expected {_PROTOCOL}, which collectors take at port 4318"
            )


def _resource(service: str, instance: str) -> Resource:
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    ours = Resource.create({"service.name": service, "service.instance.id": instance})
    return ours.merge(OTELResourceDetector().detect())
