"""The metrics of a worker. The drain reports once per batch; a scrape of /metrics reads the sums.

prometheus_client's own histograms cost a lock and a search for every value, which is too much for every job of a
batch. Here a report only appends to lists. NumPy folds the lists into the buckets, about a thousand values at a time
and before each read.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.registry import metrics as table
from penstock.registry.broker.webhooks import WebhookCounts
from penstock.registry.metrics import Metric
from penstock.workers.observe.cost import Computed, CostLedger

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family
    from prometheus_client.registry import Collector
else:
    # A worker in memory has no /metrics, and the base install has no prometheus_client: `collect` imports it.
    Collector = object

__all__ = ["BatchStats", "GenerationFigures", "InferenceMetrics"]

Labels: TypeAlias = tuple[str, ...]
_Bucket: TypeAlias = tuple[str, int]
"""Its upper edge, and how many values lie below it."""

_FOLD_AT: Final = 1024
"""A series folds its lists when they hold this many values."""
_RECENT: Final = 8192
"""Quantiles cover this many of the latest values."""
_MAX_SERIES: Final = 64
"""Combinations of model, version and endpoint. Later ones count as "other", so that the memory is bounded."""
_MAX_LABEL_SETS: Final = 512
"""The same bound for the label sets of one counter or gauge."""
_MAX_EXACT_SIZE: Final = 1024
"""Larger batch sizes are rounded up to a power of two, for the same reason."""
_SPLITS: Final = {
    "queue": table.QUEUE_WAIT,
    "batch": table.BATCH_WAIT,
    "compute": table.COMPUTE,
    "commit": table.COMMIT,
    "total": table.LATENCY,
}


class BatchStats(msgspec.Struct, frozen=True, gc=False):
    """One committed batch. Times are in seconds; `queue_s`, `batch_s` and `total_s` have one value per job.

    queue_s: from acceptance to claim. batch_s: from claim to forward. total_s: from acceptance to commit.
    """

    model: str
    version: str
    endpoint: str
    rows: int
    jobs: int
    queue_s: Sequence[float]
    batch_s: Sequence[float]
    compute_s: float
    commit_s: float
    total_s: Sequence[float]


class GenerationFigures(msgspec.Struct, frozen=True, gc=False):
    """What an engine has counted since it was loaded, and its present state. first_token_s, inter_token_s: the times
    since the last report. compute_s: of all steps. step_s: of late; seat_s, text_s: see predicted_wait; None: not known
    yet."""

    waiting: int
    running: int
    preempted: int
    prompt_tokens: int
    generated_tokens: int
    steps: int
    rows: int
    pages_used: int
    pages_peak: int
    pages_cached: int
    pages: int
    prefix_queried: int
    prefix_found: int
    drafted: int
    drafts_accepted: int
    seats: int
    compute_s: float
    step_s: float | None
    seat_s: float | None
    text_s: float | None
    first_token_s: Sequence[float]
    inter_token_s: Sequence[float]

    def by_kind(self) -> dict[Metric, dict[str, float]]:
        """The values of the metrics that have one more label."""
        return {
            table.GENERATING: {"waiting": self.waiting, "running": self.running},
            table.TOKENS: {"prompt": self.prompt_tokens, "generated": self.generated_tokens},
            table.PAGES: {
                "used": self.pages_used,
                "peak": self.pages_peak,
                "cached": self.pages_cached,
                "all": self.pages,
            },
            table.PREFIX_TOKENS: {"queried": self.prefix_queried, "found": self.prefix_found},
            table.DRAFT_TOKENS: {"drafted": self.drafted, "accepted": self.drafts_accepted},
        }

    def as_report(self) -> dict[str, Any]:
        """The figures without the times of tokens, as the worker's report has them."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if name not in _TIMES}


_TIMES: Final = ("first_token_s", "inter_token_s")


class _Histogram:
    """Values of one metric under one label set. Reports append to `fresh`; `fold` counts these in the buckets."""

    __slots__ = ("counts", "edges", "fresh", "recent", "total")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges: Final = np.asarray(edges, dtype=np.float64)
        self.counts = np.zeros(len(edges) + 1, dtype=np.int64)
        self.total = 0.0
        self.fresh: list[float] = []
        self.recent: npt.NDArray[np.float64] = np.empty(0)

    def fold(self) -> None:
        if not self.fresh:
            return
        # A wait between the broker's clock and ours can be slightly negative.
        values = np.maximum(np.array(self.fresh, dtype=np.float64), 0.0)
        self.fresh.clear()
        self.counts += np.bincount(self.edges.searchsorted(values), minlength=len(self.counts))
        self.total += float(values.sum())
        self.recent = np.concatenate((self.recent, values))[-_RECENT:]


class _Traced(NamedTuple):
    """A job with a trace. at: unix seconds."""

    trace_id: str
    seconds: float
    at: float


_TOTALS: Final = ("jobs", "batches", "rows", "queue_s", "batch_s", "compute_s", "commit_s", "cached")


class _Series:
    """The histograms of one (model, version, endpoint)."""

    __slots__ = (
        "all",
        "batch",
        "commit",
        "compute",
        "first_token",
        "inter_token",
        "jobs",
        "latency",
        "padding",
        "queue",
        "rows",
        "sizes",
        "unfolded",
    )

    def __init__(self, latency_edges: Sequence[float]) -> None:
        self.queue = _Histogram(table.QUEUE_WAIT.buckets)
        self.batch = _Histogram(table.BATCH_WAIT.buckets)
        self.compute = _Histogram(table.COMPUTE.buckets)
        self.commit = _Histogram(table.COMMIT.buckets)
        self.latency = _Histogram(latency_edges)
        self.jobs = _Histogram(table.BATCH_SIZE.buckets)
        self.rows = _Histogram(table.BATCH_ROWS.buckets)
        self.padding = _Histogram(table.PADDING.buckets)
        self.first_token = _Histogram(table.FIRST_TOKEN.buckets)
        self.inter_token = _Histogram(table.INTER_TOKEN.buckets)
        self.sizes: Counter[int] = Counter()
        self.unfolded = 0
        self.all: Final = {
            table.QUEUE_WAIT.name: self.queue,
            table.BATCH_WAIT.name: self.batch,
            table.COMPUTE.name: self.compute,
            table.COMMIT.name: self.commit,
            table.LATENCY.name: self.latency,
            table.BATCH_SIZE.name: self.jobs,
            table.BATCH_ROWS.name: self.rows,
            table.PADDING.name: self.padding,
            table.FIRST_TOKEN.name: self.first_token,
            table.INTER_TOKEN.name: self.inter_token,
        }

    def fold(self) -> None:
        self.unfolded = 0
        for histogram in self.all.values():
            histogram.fold()


class InferenceMetrics(Collector):
    """The counters, gauges and histograms of one worker, for Prometheus and for `penstock status`.

    Any thread may call it. `buckets` are the upper edges of infer_latency_seconds, in seconds, increasing. costs: None
    where the device has no rate.
    """

    def __init__(self, buckets: Sequence[float], costs: CostLedger | None = None) -> None:
        self._buckets: Final = tuple(buckets)
        self._costs: Final = costs
        self._lock: Final = threading.Lock()
        self._series: Final[dict[Labels, _Series]] = {}
        self._traced: Final[dict[str, dict[int, _Traced]]] = {}
        """The last job with a trace of each model and bucket of infer_latency_seconds."""
        self._values: Final[dict[str, dict[Labels, float]]] = {
            metric.name: {} for metric in table.METRICS if metric.kind != "histogram"
        }

    def batch(self, stats: BatchStats) -> None:
        """Report one committed batch."""
        rows = stats.rows
        with self._lock:
            series = self._series_of((stats.model, stats.version, stats.endpoint))
            series.queue.fresh.extend(stats.queue_s)
            series.batch.fresh.extend(stats.batch_s)
            series.latency.fresh.extend(stats.total_s)
            series.compute.fresh.append(stats.compute_s)
            series.commit.fresh.append(stats.commit_s)
            series.jobs.fresh.append(stats.jobs)
            series.rows.fresh.append(rows)
            series.sizes[rows if rows <= _MAX_EXACT_SIZE else 1 << (rows - 1).bit_length()] += 1
            series.unfolded += stats.jobs + 1
            if series.unfolded >= _FOLD_AT:
                series.fold()

    def latency(self, model: str, version: str, endpoint: str, total_s: Sequence[float]) -> None:
        """Report jobs that were answered without a batch: seconds from acceptance to commit, one value per job."""
        with self._lock:
            series = self._series_of((model, version, endpoint))
            series.latency.fresh.extend(total_s)
            series.unfolded += len(total_s)
            if series.unfolded >= _FOLD_AT:
                series.fold()

    def traced(self, model: str, version: str, endpoint: str, jobs: Iterable[tuple[str, float]], at: float) -> None:
        """Name jobs whose latency was reported: (trace id, seconds). at: unix seconds.

        The last one in each bucket is an exemplar of infer_latency_seconds. OpenMetrics carries it, plain text cannot.
        """
        with self._lock:
            # A model beyond the bound of series is "other" here, too.
            name, *_ = _bounded(self._series, (model, version, endpoint), _MAX_SERIES)
            buckets = self._traced.setdefault(name, {})
            for trace_id, total_s in jobs:
                seconds = max(0.0, total_s)
                buckets[bisect_left(self._buckets, seconds)] = _Traced(trace_id, seconds, at)

    def totals(self) -> dict[str, dict[str, float]]:
        """The sums of each model since the process began, over all its versions; times in seconds.

        jobs, queue_s and batch_s add up jobs that a batch answered, with those that shared the forward of an equal job;
        batches, rows, compute_s and commit_s add up batches; cached counts the jobs that the cache answered.
        """
        totals: dict[str, dict[str, float]] = {}
        with self._lock:
            for (model, _, _), series in self._series.items():
                series.fold()
                sums = totals.setdefault(model, dict.fromkeys(_TOTALS, 0.0))
                sums["jobs"] += float(series.queue.counts.sum())
                sums["batches"] += float(series.jobs.counts.sum())
                sums["rows"] += series.rows.total
                sums["queue_s"] += series.queue.total
                sums["batch_s"] += series.batch.total
                sums["compute_s"] += series.compute.total
                sums["commit_s"] += series.commit.total
            for (model, *_), hits in self._values[table.CACHE_HITS.name].items():
                totals.setdefault(model, dict.fromkeys(_TOTALS, 0.0))["cached"] += hits
        return totals

    def form(self, model: str, version: str, form: str, gain: float | None) -> None:
        """Note the form in which a version runs from now on. form, gain: see FormCost."""
        if self._costs is not None:
            with self._lock:
                self._costs.change(model, version, form, gain, self._computed())

    def engine_ran(self, model: str, version: str, endpoint: str, compute_s: float | None) -> None:
        """Set the seconds of all steps of a version's engine since it was loaded; see CostLedger.engine_ran."""
        if self._costs is not None:
            with self._lock:
                self._costs.engine_ran(model, version, endpoint, compute_s)

    def costs(self) -> dict[str, Any] | None:
        """The costs since the process began; see CostLedger.as_report. None without a rate."""
        if self._costs is None:
            return None
        with self._lock:
            return self._costs.as_report(self._computed())

    def padding(self, model: str, version: str, endpoint: str, ratio: float) -> None:
        """Report the share of one batch's tokens that was padding, 0 to 1."""
        with self._lock:
            series = self._series_of((model, version, endpoint))
            series.padding.fresh.append(ratio)

    def requests(self, model: str, route: str, count: int = 1) -> None:
        """Count jobs that came by `route`, however they ended."""
        self._add(table.REQUESTS, (model, route), count)

    def shadow_pairs(self, model: str, version: str, outcome: str, count: int) -> None:
        """Count sampled jobs of a shadow by outcome. version: the one that answered; empty: of several."""
        if count:
            self._add(table.SHADOW_PAIRS, (model, version, "", outcome), count)

    def shadow_compared(self, model: str, version: str, outcome: str, count: int = 1) -> None:
        """Count settled pairs by outcome. version: the candidate."""
        self._add(table.SHADOW_COMPARED, (model, version, "", outcome), count)

    def canary(self, model: str, version: str, optimization: str, verdict: str) -> None:
        """Count a verdict on a candidate: PASS, MARGINAL, FAIL or INSUFFICIENT. optimization: its form, or
        `candidate` for a version as its author built it."""
        self._add(table.CANARY, (model, version, "", optimization, str(verdict)), 1)

    def rollout_decision(self, model: str, version: str, action: str) -> None:
        """Count a decision about the rollout of a version; see safety/rollout.py."""
        self._add(table.ROLLOUT_DECISIONS, (model, version, "", str(action)), 1)

    def drift(self, model: str, version: str, optimization: str, ratio: float) -> None:
        """Set the largest smoothed score of a figure, as a share of its control limit."""
        self._set(table.DRIFT, (model, version, "", optimization), ratio)

    def drift_alert(self, model: str, version: str, optimization: str) -> None:
        """Count a drift alert."""
        self._add(table.DRIFT_ALERTS, (model, version, "", optimization), 1)

    def transition(self, model: str, version: str, optimization: str, to: str) -> None:
        """Count that an optimization went on or off: `to` is `on` or `off`."""
        self._add(table.TRANSITIONS, (model, version, "", optimization, to), 1)

    def alert(self, hook: str, outcome: str) -> None:
        """Count an alert of one hook: sent, failed or dropped."""
        self._add(table.ALERTS, ("", "", "", hook, outcome), 1)

    def fallback(self, model: str, version: str, endpoint: str, level: str, count: int = 1) -> None:
        """Count jobs that this level of the fallback chain answered. version: the one on which earlier levels failed,
        or were stopped."""
        self._add(table.FALLBACKS, (model, version, endpoint, level), count)

    def exception(self, model: str, exception_class: str, count: int = 1) -> None:
        """Count exceptions of a model by the name of their class."""
        self._add(table.EXCEPTIONS, (model, exception_class), count)

    def outcome(self, model: str, version: str, endpoint: str, outcome: str, count: int = 1) -> None:
        """Count jobs that ended, by outcome: completed, failed, cancelled, expired or dead."""
        self._add(table.JOBS, (model, version, endpoint, outcome), count)

    def fenced(self, model: str, version: str, endpoint: str) -> None:
        """Count a commit that was discarded because another worker had taken over the job."""
        self._add(table.FENCED, (model, version, endpoint), 1)

    def taken_over(self, model: str) -> None:
        """Count a job claimed after another worker's lease had lapsed or was released."""
        self._add(table.TAKEN_OVER, (model, "", ""), 1)

    def quarantined(self, model: str) -> None:
        """Count an entry that could not be read as a job and was dead-lettered, or a key that was quarantined."""
        self._add(table.QUARANTINED, (model, "", ""), 1)

    def dead_lettered(self, model: str, version: str, endpoint: str) -> None:
        """Count a job that was dead-lettered because processes died while it ran."""
        self._add(table.DEAD_LETTERED, (model, version, endpoint), 1)

    def retried(self, model: str, version: str, endpoint: str) -> None:
        """Count a failed forward of a job that will run again."""
        self._add(table.RETRIED, (model, version, endpoint), 1)

    def out_of_memory(self, model: str, version: str) -> None:
        """Count a batch that did not fit the memory of the device."""
        self._add(table.OUT_OF_MEMORY, (model, version, ""), 1)

    def instances_lost(self, model: str, version: str, count: int) -> None:
        """Set how many instances of a version were lost so far."""
        self._set(table.INSTANCES_LOST, (model, version, ""), count)

    def generation(self, model: str, version: str, figures: GenerationFigures, wait_s: float | None = None) -> None:
        """Set the figures of a version's engine, and report the times since the last call. wait_s: the predicted wait;
        None: not known."""
        labels = (model, version, "")
        for metric, kinds in figures.by_kind().items():
            for kind, value in kinds.items():
                self._set(metric, (*labels, kind), value)
        self._set(table.PREEMPTED, labels, figures.preempted)
        self._set(table.STEPS, labels, figures.steps)
        self._set(table.ROWS, labels, figures.rows)
        if wait_s is not None:
            self._set(table.PREDICTED_WAIT, labels, wait_s)
        if not (figures.first_token_s or figures.inter_token_s):
            return
        with self._lock:
            series = self._series_of(labels)
            series.first_token.fresh.extend(figures.first_token_s)
            series.inter_token.fresh.extend(figures.inter_token_s)
            series.fold()

    def single_flight(self, model: str, version: str, endpoint: str, count: int = 1) -> None:
        """Count jobs that were answered by the forward of an equal job."""
        self._add(table.SINGLE_FLIGHT, (model, version, endpoint), count)

    def audit_failed(self) -> None:
        """Count a failure to record cache accesses in the audit log."""
        self._add(table.AUDIT_FAILURES, (), 1)

    def cache_lookups(
        self, model: str, version: str, endpoint: str, tier: str, *, is_hit: bool, count: int = 1
    ) -> None:
        """Count look-ups of a job's answer in one tier of the cache."""
        self._add(table.CACHE_HITS if is_hit else table.CACHE_MISSES, (model, version, endpoint, tier), count)

    def cache_size(self, tier: str, entries: int, nbytes: int, evicted: int) -> None:
        """Set the size of one tier of the cache, and how many answers it has evicted so far."""
        self._set(table.CACHE_ENTRIES, ("", "", "", tier), entries)
        self._set(table.CACHE_BYTES, ("", "", "", tier), nbytes)
        self._set(table.CACHE_EVICTED, ("", "", "", tier), evicted)

    def cache_faults(self, tier: str, faults: Mapping[str, int]) -> None:
        """Set how often one tier of the cache has failed so far, by what happened."""
        for fault, count in faults.items():
            self._set(table.CACHE_FAULTS, ("", "", "", tier, fault), count)

    def level(self, model: str, version: str, endpoint: str, level: int) -> None:
        """Set the optimization level of a version."""
        self._set(table.LEVEL, (model, version, endpoint), level)

    def gate(self, model: str, version: str, endpoint: str, verdict: str) -> None:
        """Count a verdict on an optimized form: accepted or refused."""
        self._add(table.GATES, (model, version, endpoint, verdict), 1)

    def breaker(self, model: str, version: str, optimization: str, *, is_open: bool) -> None:
        """Set whether the circuit breaker of an optimization is open."""
        self._set(table.BREAKERS, (model, version, "", optimization), int(is_open))

    def breaker_tripped(self, model: str, version: str, optimization: str) -> None:
        """Count a circuit breaker that this worker opened."""
        self._add(table.BREAKER_TRIPS, (model, version, "", optimization), 1)

    def webhook_tried(self, model: str, outcome: str) -> None:
        """Count a try of a webhook: delivered, failed or dead."""
        self._add(table.WEBHOOKS, (model, "", "", outcome), 1)

    def webhooks_counted(self, model: str, counts: WebhookCounts) -> None:
        """Set how many webhooks wait and are dead, and how old the oldest waiting one is."""
        self._set(table.WEBHOOKS_WAITING, (model, "", ""), counts.waiting)
        self._set(table.WEBHOOKS_DEAD, (model, "", ""), counts.dead)
        self._set(table.WEBHOOKS_AGE, (model, "", ""), counts.oldest_s)

    def loaded(self, model: str, version: str, is_loaded: bool) -> None:
        """Set whether a version is loaded."""
        self._set(table.MODEL_LOADED, (model, version), float(is_loaded))

    def traffic_share(self, model: str, version: str, share: float) -> None:
        """Set the share of an experiment's arm; 0 for a version that is an arm no more."""
        self._set(table.TRAFFIC_SHARE, (model, version, ""), share)

    def ready(self, is_ready: bool) -> None:
        """Set whether the worker takes jobs. A process that never does says nothing of it."""
        self._set(table.READY, (), float(is_ready))

    def ready_now(self, is_ready: bool) -> None:
        """As `ready`, for a process that has said something of it."""
        with self._lock:
            if values := self._values[table.READY.name]:
                values[()] = float(is_ready)

    def queue(self, model: str, priority: str, depth: int, oldest_s: float) -> None:
        """Set the state of one queue: jobs that wait or run, and the age of the oldest waiting job."""
        self._set(table.QUEUE_DEPTH, (model, "", "", priority), depth)
        self._set(table.QUEUE_AGE, (model, "", "", priority), oldest_s)

    def collect(self) -> Iterator[Family]:
        """Return every metric of the table, for a prometheus_client registry. Counters and buckets are cumulative."""
        with self._lock:
            self._fold()
            if self._costs is not None:
                self._values.update(self._costs.values(self._computed()))
            families = [self._family(metric) for metric in table.METRICS]
        return iter(families)

    def snapshot(self) -> dict[str, Any]:
        """Return the worker's figures as plain data. A model without a batch so far is left out.

        {"ready": bool, "models": {name: {"jobs": int, "batches": int, "batch_sizes": {rows: batches},
        "outcomes": {outcome: jobs}, "latency_ms": {part: {"p50": ms, "p99": ms}}}}}, where the parts are queue,
        batch, compute, commit and total, over the last 8192 values of each version and endpoint.
        """
        with self._lock:
            self._fold()
            by_model = groupby(sorted(self._series), key=lambda labels: labels[0])
            models = {model: self._model_snapshot(model, labels) for model, labels in by_model}
            return {"ready": bool(self._values[table.READY.name].get((), 0.0)), "models": models}

    def _add(self, metric: Metric, labels: Labels, count: float) -> None:
        with self._lock:
            values = self._values[metric.name]
            labels = _bounded(values, labels, _MAX_LABEL_SETS)
            values[labels] = values.get(labels, 0.0) + count

    def _set(self, metric: Metric, labels: Labels, value: float) -> None:
        with self._lock:
            values = self._values[metric.name]
            values[_bounded(values, labels, _MAX_LABEL_SETS)] = value

    def _series_of(self, labels: Labels) -> _Series:
        series = self._series.get(labels)
        if series is None:
            labels = _bounded(self._series, labels, _MAX_SERIES)
            series = self._series.get(labels) or _Series(self._buckets)
            self._series[labels] = series
        return series

    def _fold(self) -> None:
        for series in self._series.values():
            series.fold()

    def _family(self, metric: Metric) -> Family:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
        from prometheus_client.utils import floatToGoString

        unit = metric.unit if metric.name.endswith(f"_{metric.unit}") else ""
        if metric.kind == "histogram":
            histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels, unit=unit)
            for labels, (counts, total, edges) in self._histograms(metric).items():
                names = [*map(floatToGoString, edges), "+Inf"]
                buckets = list(zip(names, counts.cumsum().tolist(), strict=True))
                histogram.add_metric(labels, self._with_exemplars(metric, labels, buckets), total)
            return histogram
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=metric.labels, unit=unit)
        for labels, value in self._values[metric.name].items():
            family.add_metric(labels, value)
        return family

    def _computed(self) -> list[Computed]:
        self._fold()
        return [
            Computed(labels, int(series.queue.counts.sum()), series.compute.total)
            for labels, series in self._series.items()
        ]

    def _with_exemplars(self, metric: Metric, labels: Labels, buckets: list[_Bucket]) -> list[Any]:
        from prometheus_client.samples import Exemplar

        traced = self._traced.get(labels[0], {}) if metric is table.LATENCY else {}
        return [
            (*bucket, Exemplar({"trace_id": traced[at].trace_id}, traced[at].seconds, traced[at].at))
            if at in traced
            else bucket
            for at, bucket in enumerate(buckets)
        ]

    def _histograms(self, metric: Metric) -> dict[Labels, tuple[npt.NDArray[np.int64], float, list[float]]]:
        """Counts, sum and edges by label set; series that differ only in labels the metric lacks are added up."""
        added: dict[Labels, tuple[npt.NDArray[np.int64], float, list[float]]] = {}
        for labels, series in self._series.items():
            histogram = series.all[metric.name]
            key = labels[: len(metric.labels)]
            counts, total, edges = added.get(key, (0, 0.0, histogram.edges.tolist()))
            added[key] = (histogram.counts + counts, histogram.total + total, edges)
        return added

    def _model_snapshot(self, model: str, labels: Iterable[Labels]) -> dict[str, Any]:
        series = [self._series[each] for each in labels]
        sizes = sum((each.sizes for each in series), Counter[int]())
        outcomes: Counter[str] = Counter()
        for (name, _, _, outcome), count in self._values[table.JOBS.name].items():
            if name == model:
                outcomes[outcome] += int(count)
        return {
            "jobs": sum(int(each.latency.counts.sum()) for each in series),
            "batches": sizes.total(),
            "batch_sizes": dict(sorted(sizes.items())),
            "outcomes": dict(outcomes),
            "latency_ms": {
                part: _quantiles_ms([each.all[metric.name].recent for each in series])
                for part, metric in _SPLITS.items()
            },
        }


def _bounded(known: Mapping[Labels, object], labels: Labels, limit: int) -> Labels:
    if labels in known or len(known) < limit:
        return labels
    return ("other",) * len(labels)


def _quantiles_ms(recent: Sequence[npt.NDArray[np.float64]]) -> dict[str, float]:
    values = np.concatenate(recent)
    if not values.size:
        return {}
    p50, p99 = np.percentile(values, (50, 99)) * 1e3
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3)}
