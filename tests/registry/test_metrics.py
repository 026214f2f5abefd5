"""The metrics table keeps its promises about names and labels."""

from itertools import pairwise

from penstock.registry import metrics
from penstock.registry.metrics import ENGINE_METRICS, GATEWAY_METRICS, METRICS, RAY_SERVE_METRICS, Metric

PROMISED = {
    "infer_requests_total": ("counter", ("model", "route")),
    "infer_latency_seconds": ("histogram", ("model",)),
    "infer_batch_size": ("histogram", ("model",)),
    "infer_exceptions_total": ("counter", ("model", "exception")),
    "model_loaded": ("gauge", ("model", "version")),
    "READY": ("gauge", ()),
}
PER_MODEL = ("model_name", "model_version", "endpoint")


def test_promised_metrics_have_their_names_kinds_and_labels():
    """Dashboards that know these names find them unchanged."""
    found = {metric.name: (metric.kind, metric.labels) for metric in METRICS}
    assert {name: found[name] for name in PROMISED} == PROMISED


def test_our_metrics_say_model_version_and_endpoint():
    """Every penstock_* metric of a model begins with the same three labels; that of the audit log is of none."""
    ours = [metric for metric in METRICS if metric.name not in PROMISED and metric is not metrics.AUDIT_FAILURES]
    assert len(ours) == 54
    assert all(metric.name.startswith("penstock_") and metric.labels[:3] == PER_MODEL for metric in ours)


def test_table_is_whole_and_without_repeats():
    """Every constant of the module is in one of the tables once, and nothing else is."""
    constants = [value for value in vars(metrics).values() if isinstance(value, Metric)]
    listed = [*METRICS, *GATEWAY_METRICS, *ENGINE_METRICS, *RAY_SERVE_METRICS]
    assert sorted(metric.name for metric in listed) == sorted(metric.name for metric in constants)
    assert len({metric.name for metric in listed}) == len(listed)


def test_names_follow_prometheus():
    """Names are valid, counters end in _total, durations in _seconds, and each line has a help text."""
    for metric in (*METRICS, *GATEWAY_METRICS, *ENGINE_METRICS, *RAY_SERVE_METRICS):
        assert metric.help
        assert metric.name.endswith("_total") is (metric.kind == "counter")
        assert metric.name.endswith("_seconds") is (metric.unit == "seconds")


def test_histograms_have_increasing_edges():
    """Buckets are strictly increasing; only infer_latency_seconds takes its edges from the settings."""
    for metric in (*METRICS, *GATEWAY_METRICS, *ENGINE_METRICS, *RAY_SERVE_METRICS):
        assert all(low < high for low, high in pairwise(metric.buckets))
        assert bool(metric.buckets) is (metric.kind == "histogram" and metric is not metrics.LATENCY)
