"""The metrics of a worker, read back with Prometheus's own parser."""

import threading
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from penstock.registry.broker.webhooks import WebhookCounts
from penstock.registry.metrics import METRICS
from penstock.workers.observe.cost import CostEstimator, CostLedger
from penstock.workers.observe.metrics import BatchStats, GenerationFigures, InferenceMetrics

BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)

FIGURES = GenerationFigures(
    waiting=1,
    running=2,
    preempted=3,
    prompt_tokens=40,
    generated_tokens=50,
    steps=20,
    rows=60,
    pages_used=6,
    pages_peak=7,
    pages_cached=8,
    pages=9,
    prefix_queried=90,
    prefix_found=10,
    drafted=12,
    drafts_accepted=11,
    seats=4,
    compute_s=0.2,
    step_s=0.01,
    seat_s=0.5,
    text_s=2.0,
    first_token_s=[0.5],
    inter_token_s=[0.01],
)


@pytest.fixture
def metrics() -> InferenceMetrics:
    return InferenceMetrics(BUCKETS)


def report(metrics: InferenceMetrics, seconds: Iterable[float], model: str = "mlp", version: str = "1") -> None:
    """One batch whose jobs took `seconds` in every part."""
    values = list(seconds)
    metrics.batch(stats(values, model=model, version=version))


def stats(
    seconds: list[float],
    *,
    model: str = "mlp",
    version: str = "1",
    rows: int | None = None,
    batch_s: float | None = None,
) -> BatchStats:
    """A batch with one job per value, each of which took these seconds; `batch_s`: of compute."""
    shared_s = seconds[0] if batch_s is None else batch_s
    return BatchStats(
        model=model,
        version=version,
        endpoint="queue",
        rows=len(seconds) if rows is None else rows,
        jobs=len(seconds),
        queue_s=seconds,
        batch_s=seconds,
        compute_s=shared_s,
        commit_s=shared_s,
        total_s=seconds,
    )


def page(metrics: InferenceMetrics) -> dict[str, Family]:
    """The families of /metrics as a Prometheus server reads them, by name."""
    registry = CollectorRegistry()
    registry.register(metrics)
    return {family.name: family for family in text_string_to_metric_families(generate_latest(registry).decode())}


def sample(metrics: InferenceMetrics, name: str, **labels: str) -> float:
    found = [
        each.value
        for family in page(metrics).values()
        for each in family.samples
        if each.name == name and labels.items() <= each.labels.items()
    ]
    assert len(found) == 1, f"{name} {labels}: {found}"
    return found[0]


def buckets_of(samples: Iterable[Sample], name: str) -> dict[str, float]:
    return {each.labels["le"]: each.value for each in samples if each.name == f"{name}_bucket"}


def priced() -> InferenceMetrics:
    """Metrics of a device that costs 3.6 an hour: 0.001 a second."""
    return InferenceMetrics(BUCKETS, CostLedger(CostEstimator(hourly_rate=3.6)))


def test_parser_sees_the_whole_table():
    """Counters, gauges and histograms appear under the table's names and kinds, each sample with its labels."""
    metrics = priced()
    report(metrics, [0.1, 0.2])
    metrics.padding("mlp", "1", "queue", 0.25)
    metrics.requests("mlp", "queue")
    metrics.exception("mlp", "ValueError")
    metrics.outcome("mlp", "1", "queue", "completed", 2)
    metrics.loaded("mlp", "1", True)
    metrics.ready(True)
    metrics.queue("mlp", "high", 7, 1.5)
    metrics.level("mlp", "1", "queue", 2)
    metrics.gate("mlp", "1", "queue", "accepted")
    metrics.breaker("mlp", "1", "compiled", is_open=True)
    metrics.breaker_tripped("mlp", "1", "compiled")
    metrics.fallback("mlp", "1", "queue", "plain")
    metrics.canary("mlp", "1", "compiled", "PASS")
    metrics.drift("mlp", "1", "compiled", 0.5)
    metrics.drift_alert("mlp", "1", "compiled")
    metrics.transition("mlp", "1", "compiled", "on")
    metrics.alert("pager", "sent")
    metrics.cache_lookups("mlp", "1", "queue", "l1", is_hit=True, count=3)
    metrics.cache_lookups("mlp", "1", "queue", "l1", is_hit=False)
    metrics.cache_size("l1", 2, 4096, 1)
    metrics.cache_faults("l2", {"error": 1})
    for of_jobs in (metrics.fenced, metrics.single_flight, metrics.dead_lettered, metrics.retried):
        of_jobs("mlp", "1", "queue")
    metrics.out_of_memory("mlp", "1")
    metrics.instances_lost("mlp", "1", 2)
    metrics.generation("mlp", "1", FIGURES, wait_s=1.5)
    metrics.taken_over("mlp")
    metrics.traffic_share("mlp", "1", 0.5)
    metrics.quarantined("mlp")
    metrics.audit_failed()
    metrics.shadow_pairs("mlp", "1", "mirrored", 1)
    metrics.shadow_compared("mlp", "2", "pass")
    metrics.rollout_decision("mlp", "2", "advance")
    metrics.webhook_tried("mlp", "delivered")
    metrics.webhooks_counted("mlp", WebhookCounts(1, 0, 2.5))
    families = page(metrics)
    assert {name: family.type for name, family in families.items()} == {
        metric.name.removesuffix("_total"): metric.kind for metric in METRICS
    }
    for metric in METRICS:
        samples = families[metric.name.removesuffix("_total")].samples
        assert samples, metric.name
        assert all(set(each.labels) - {"le"} == set(metric.labels) for each in samples)


def test_figures_of_an_engine_have_their_metrics(metrics: InferenceMetrics):
    """What vLLM counts, each under its name of the table: a figure that has none would be lost."""
    metrics.generation("mlp", "1", FIGURES, wait_s=1.5)
    found = {
        (sample.name, sample.labels.get("state") or sample.labels.get("kind", "")): sample.value
        for family in page(metrics).values()
        for sample in family.samples
        if sample.labels.get("model_name") == "mlp"
    }
    expected = {
        ("penstock_generation_requests", "waiting"): 1,
        ("penstock_generation_requests", "running"): 2,
        ("penstock_generation_preempted_total", ""): 3,
        ("penstock_generation_predicted_wait_seconds", ""): 1.5,
        ("penstock_generation_steps_total", ""): 20,
        ("penstock_generation_rows_total", ""): 60,
        ("penstock_tokens_total", "prompt"): 40,
        ("penstock_tokens_total", "generated"): 50,
        ("penstock_pages", "used"): 6,
        ("penstock_pages", "peak"): 7,
        ("penstock_pages", "cached"): 8,
        ("penstock_pages", "all"): 9,
        ("penstock_prefix_tokens_total", "queried"): 90,
        ("penstock_prefix_tokens_total", "found"): 10,
        ("penstock_draft_tokens_total", "drafted"): 12,
        ("penstock_draft_tokens_total", "accepted"): 11,
        ("penstock_first_token_seconds_count", ""): 1,
        ("penstock_inter_token_seconds_count", ""): 1,
    }
    assert {key: found.get(key) for key in expected} == expected


def test_an_unknown_wait_is_not_reported(metrics: InferenceMetrics):
    """A 0 would promise a seat at once."""
    metrics.generation("mlp", "1", FIGURES)
    assert page(metrics)["penstock_generation_predicted_wait_seconds"].samples == []


def test_latency_buckets_are_the_configured_ones(metrics: InferenceMetrics):
    """infer_latency_seconds has exactly the edges of the setting, and +Inf."""
    report(metrics, [0.1])
    edges = buckets_of(page(metrics)["infer_latency_seconds"].samples, "infer_latency_seconds")
    assert [float(edge) for edge in edges] == [*BUCKETS, float("inf")]


def test_a_value_on_an_edge_belongs_to_its_bucket(metrics: InferenceMetrics):
    """`le` means less or equal. A value above the last edge is in +Inf only."""
    report(metrics, [0.005, 0.0051, 1.28, 2.0])
    counted = buckets_of(page(metrics)["infer_latency_seconds"].samples, "infer_latency_seconds")
    assert (counted["0.005"], counted["0.01"], counted["1.28"], counted["+Inf"]) == (1, 2, 3, 4)


@given(st.lists(st.lists(st.floats(0, 3), min_size=1, max_size=64), min_size=1, max_size=40))
@settings(max_examples=30, deadline=None)
def test_counts_equal_the_reported_values(batches: list[list[float]]):
    """However the values are folded, buckets are cumulative, and counts and sums equal the reported jobs."""
    metrics = InferenceMetrics(BUCKETS)
    for batch in batches:
        report(metrics, batch)
    jobs = [value for batch in batches for value in batch]
    families = page(metrics)
    for name in ("infer_latency_seconds", "penstock_queue_wait_seconds", "penstock_batch_wait_seconds"):
        counted = buckets_of(families[name].samples, name)
        assert all(low <= high for low, high in pairwise(counted.values()))
        assert all(count == sum(value <= float(edge) for value in jobs) for edge, count in counted.items())
        assert sample(metrics, f"{name}_count") == len(jobs)
        assert sample(metrics, f"{name}_sum") == pytest.approx(sum(jobs))
    assert sample(metrics, "infer_batch_size_sum") == len(jobs)
    assert sample(metrics, "infer_batch_size_count") == len(batches)


def test_scraping_does_not_disturb_the_sums(metrics: InferenceMetrics):
    """Values before and after a scrape add up."""
    report(metrics, [0.1] * 5)
    assert sample(metrics, "infer_latency_seconds_count") == 5
    report(metrics, [0.1] * 3)
    assert sample(metrics, "infer_latency_seconds_count") == 8


def test_versions_are_distinguished_and_models_add_up(metrics: InferenceMetrics):
    """penstock_* metrics distinguish versions; infer_* metrics add up the versions of a model."""
    report(metrics, [0.1] * 3, version="1")
    report(metrics, [0.1] * 4, version="2")
    report(metrics, [0.1] * 5, model="minilm")
    assert sample(metrics, "penstock_queue_wait_seconds_count", model_name="mlp", model_version="2") == 4
    assert sample(metrics, "infer_latency_seconds_count", model="mlp") == 7
    assert sample(metrics, "infer_batch_size_sum", model="minilm") == 5


def test_waits_below_zero_count_as_zero(metrics: InferenceMetrics):
    """Two clocks measure a queue wait; a negative result must not lower the sum."""
    report(metrics, [-0.5, 0.25])
    assert sample(metrics, "penstock_queue_wait_seconds_sum") == 0.25


def test_counters_grow_and_gauges_follow(metrics: InferenceMetrics):
    """Counters add up, gauges show the last value."""
    metrics.requests("mlp", "queue", 3)
    metrics.requests("mlp", "queue", 2)
    metrics.queue("mlp", "low", 10, 2.0)
    metrics.queue("mlp", "low", 4, 0.0)
    assert sample(metrics, "infer_requests_total", model="mlp", route="queue") == 5
    assert sample(metrics, "penstock_queue_depth", model_name="mlp", priority="low") == 4


def test_exceptions_are_counted_by_class(metrics: InferenceMetrics):
    """Three exception types are three label values."""
    for error in (ValueError(), KeyError(), KeyError(), RuntimeError()):
        metrics.exception("mlp", type(error).__name__)
    counted = {
        each.labels["exception"]: each.value
        for each in page(metrics)["infer_exceptions"].samples
        if each.name == "infer_exceptions_total"
    }
    assert counted == {"ValueError": 1, "KeyError": 2, "RuntimeError": 1}


def test_ready_and_loaded_rise_and_fall(metrics: InferenceMetrics):
    """READY is 1 while ready, 0 while draining; an unloaded version shows 0. A process that is no worker has none."""
    assert not page(metrics)["READY"].samples
    metrics.ready(False)
    assert sample(metrics, "READY") == 0
    metrics.ready(True)
    metrics.loaded("mlp", "1", True)
    assert (sample(metrics, "READY"), sample(metrics, "model_loaded", model="mlp", version="1")) == (1, 1)
    metrics.ready(False)
    metrics.loaded("mlp", "1", False)
    assert (sample(metrics, "READY"), sample(metrics, "model_loaded", model="mlp", version="1")) == (0, 0)


def test_labels_are_escaped(metrics: InferenceMetrics):
    """A quote, a backslash and a newline in a label are read back unchanged."""
    metrics.exception("mlp", 'a"b\\c\nd')
    assert sample(metrics, "infer_exceptions_total", exception='a"b\\c\nd') == 1


def test_openmetrics_is_accepted_by_its_strict_parser(metrics: InferenceMetrics):
    """The same page in OpenMetrics, units included, passes the stricter parser."""
    report(metrics, [0.1])
    metrics.outcome("mlp", "1", "queue", "completed")
    registry = CollectorRegistry()
    registry.register(metrics)
    families = {family.name: family for family in parse_openmetrics(generate_openmetrics(registry).decode())}
    assert families["infer_latency_seconds"].unit == "seconds"
    assert families["penstock_jobs"].type == "counter"


def exemplars(metrics: InferenceMetrics) -> dict[str, tuple[dict[str, str], float, float]]:
    """The exemplar of each bucket of infer_latency_seconds, by its upper edge, as OpenMetrics has them."""
    registry = CollectorRegistry()
    registry.register(metrics)
    families = {family.name: family for family in parse_openmetrics(generate_openmetrics(registry).decode())}
    return {
        sample.labels["le"]: (sample.exemplar.labels, sample.exemplar.value, float(sample.exemplar.timestamp))
        for sample in families["infer_latency_seconds"].samples
        if sample.exemplar is not None
    }


def test_exemplars_name_the_last_trace_of_each_bucket(metrics: InferenceMetrics):
    """AR-096: the trace id of a job is visible in OpenMetrics only; plain text 0.0.4 cannot carry it."""
    report(metrics, [0.004, 0.1, 0.12, 30.0])
    assert exemplars(metrics) == {}
    metrics.traced("mlp", "1", "queue", [("a" * 32, 0.1), ("b" * 32, 0.12), ("c" * 32, 30.0)], 1000.5)
    assert exemplars(metrics) == {
        "0.16": ({"trace_id": "b" * 32}, 0.12, 1000.5),
        "+Inf": ({"trace_id": "c" * 32}, 30.0, 1000.5),
    }
    registry = CollectorRegistry()
    registry.register(metrics)
    assert "trace_id" not in generate_latest(registry).decode()


def test_exemplars_of_many_models_are_bounded(metrics: InferenceMetrics):
    """Models beyond the bound of series share one set of exemplars."""
    for number in range(100):
        report(metrics, [0.1], model=f"m{number}")
        metrics.traced(f"m{number}", "1", "queue", [(f"{number:032x}", 0.1)], 1.0)
    registry = CollectorRegistry()
    registry.register(metrics)
    assert generate_openmetrics(registry).decode().count("trace_id") == 65


def test_cardinality_is_bounded(metrics: InferenceMetrics):
    """Ten thousand versions and exception names share a bounded number of series, and no count is lost."""
    for number in range(10_000):
        report(metrics, [0.1], version=str(number))
        metrics.exception("mlp", f"Error{number}")
    families = page(metrics)
    counts = [each for each in families["penstock_compute_seconds"].samples if each.name.endswith("_count")]
    exceptions = [each for each in families["infer_exceptions"].samples if each.name.endswith("_total")]
    assert len(counts) <= 65
    assert len(exceptions) <= 513
    assert sum(each.value for each in counts) == sum(each.value for each in exceptions) == 10_000


def test_snapshot_shows_sizes_and_quantiles(metrics: InferenceMetrics):
    """The snapshot has the exact batch sizes, and p50 and p99 of every part in milliseconds."""
    seconds = [number / 1000 for number in range(1, 100)]
    metrics.ready(True)
    metrics.batch(stats(seconds, rows=64, batch_s=0.002))
    metrics.batch(stats([0.05], version="2", rows=3, batch_s=0.002))
    metrics.outcome("mlp", "1", "queue", "completed", 60)
    metrics.outcome("mlp", "2", "queue", "completed", 3)
    metrics.outcome("mlp", "1", "queue", "failed", 4)
    metrics.outcome("minilm", "1", "queue", "failed", 9)
    snapshot = metrics.snapshot()
    model = snapshot["models"]["mlp"]
    assert snapshot["ready"] is True
    assert model["batch_sizes"] == {3: 1, 64: 1}
    assert model["batches"] == 2
    assert model["outcomes"] == {"completed": 63, "failed": 4}
    assert model["latency_ms"]["queue"] == {"p50": 50.0, "p99": 98.01}
    assert model["latency_ms"]["compute"] == {"p50": 2.0, "p99": 2.0}
    assert set(model["latency_ms"]) == {"queue", "batch", "compute", "commit", "total"}


def test_quantiles_of_the_snapshot_cover_recent_values(metrics: InferenceMetrics):
    """A slow start leaves the quantiles after a while, and stays in the sums."""
    report(metrics, [9.0] * 100)
    for _ in range(130):
        report(metrics, [0.001] * 64)
    assert metrics.snapshot()["models"]["mlp"]["latency_ms"]["total"]["p99"] == 1.0
    assert sample(metrics, "infer_latency_seconds_count") == 100 + 130 * 64


def test_huge_batches_share_a_size(metrics: InferenceMetrics):
    """Sizes are exact up to 1024 rows; larger ones are rounded up to a power of two."""
    for rows in (1024, 1025, 1999, 2048):
        metrics.batch(stats([0.1], rows=rows))
    assert metrics.snapshot()["models"]["mlp"]["batch_sizes"] == {1024: 1, 2048: 3}


def test_threads_lose_no_counts(metrics: InferenceMetrics):
    """Reports from several threads add up exactly, also while another thread scrapes."""

    def work() -> None:
        for _ in range(300):
            report(metrics, [0.1] * 16)
            metrics.requests("mlp", "queue", 16)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        metrics.snapshot()
    for thread in threads:
        thread.join()
    assert sample(metrics, "infer_latency_seconds_count") == 4 * 300 * 16
    assert sample(metrics, "infer_requests_total") == 4 * 300 * 16


def test_the_sums_of_jobs_and_their_waits_are_of_the_same_jobs(metrics: InferenceMetrics):
    """A job that shares the forward of an equal one waits, too: the mean wait is a sum over its number."""
    waits = [0.25] * 5
    metrics.batch(structs.replace(stats([0.5], model="mlp"), queue_s=waits, batch_s=waits, total_s=waits))
    metrics.cache_lookups("mlp", "1", "queue", "l1", is_hit=True, count=3)
    sums = metrics.totals()["mlp"]
    assert (sums["jobs"], sums["queue_s"], sums["batches"], sums["cached"]) == (5, 1.25, 1, 3)


def test_costs_are_those_of_the_compute_seconds():
    """AR-097, CF-064: at each scrape, with the labels of a model, which are escaped; two values for an optimized one.

    Jobs of before the change of form count in the sum, and not in the price of 1,000 jobs.
    """
    metrics, model = priced(), 'a"b\nc'
    metrics.batch(stats([9.0] * 4, model=model, batch_s=5.0))
    assert sample(metrics, "penstock_cost_total", model_name=model) == pytest.approx(0.005)
    metrics.form(model, "1", "int8", 4.0)
    metrics.batch(stats([9.0] * 8, model=model, batch_s=2.0))
    labels = {"model_name": model, "model_version": "1", "endpoint": "queue"}
    assert sample(metrics, "penstock_cost_total", **labels) == pytest.approx(0.007)
    cost = {
        form: sample(metrics, "penstock_cost_per_1000_requests", form=form, **labels)
        for form in ("baseline", "optimized")
    }
    assert cost == {"baseline": pytest.approx(4 * 0.25), "optimized": pytest.approx(0.25)}
    metrics.form(model, "1", "", 1.0)
    metrics.batch(stats([9.0] * 2, model=model, batch_s=1.0))
    assert sample(metrics, "penstock_cost_per_1000_requests", **labels) == pytest.approx(0.5), "a baseline alone"


def test_the_report_has_the_costs_of_the_page():
    """`penstock cost` reads it."""
    metrics = priced()
    metrics.form("mlp", "1", "int8", 4.0)
    report(metrics, [2.0, 2.0])
    assert metrics.costs() == {
        "currency": "USD",
        "hourly_rate": 3.6,
        "gpu_name": "",
        "entries": [
            {
                "model": "mlp",
                "version": "1",
                "endpoint": "queue",
                "jobs": 2,
                "compute_s": 2.0,
                "cost": pytest.approx(0.002),
                "in_form": {"jobs": 2, "cost": pytest.approx(0.002), "form": "int8", "gain": 4.0},
            }
        ],
    }


def test_without_a_rate_there_are_no_costs(metrics: InferenceMetrics):
    """The default: an estimate with an invented price would mislead."""
    metrics.form("mlp", "1", "int8", 4.0)
    metrics.engine_ran("mlp", "1", "infer", 1.0)
    report(metrics, [2.0])
    assert metrics.costs() is None
    assert page(metrics)["penstock_cost"].samples == page(metrics)["penstock_cost_per_1000_requests"].samples == []
