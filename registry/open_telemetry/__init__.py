"""Spans and metrics for OpenTelemetry. Nothing of it is imported unless `inference.open_telemetry` asks for it.

contexts    W3C trace contexts, as text and as OpenTelemetry has them
providers   the tracer of this process; the exporters that the variables OTEL_* describe
metrics     the metrics of Prometheus -> OTLP, at an interval
"""

from __future__ import annotations

from penstock.registry.open_telemetry.providers import exported_metrics, exported_spans, tracer_of

__all__ = ["exported_metrics", "exported_spans", "tracer_of"]
