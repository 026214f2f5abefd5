"""Every metric in one table: name, kind, unit, labels, help. Nothing else spells a metric's name.

`infer_*`, `model_loaded` and `READY` have the names and labels that dashboards of other servers use. The `penstock_*`
metrics of a model have the labels model_name, model_version and endpoint.

    endpoint, route   queue: from a client; celery: from `send_task`; mixed: a batch with jobs of both
    model_version     empty while it is unknown: the version of a job is decided after its claim
    endpoint          empty for figures that are not about jobs, and for bytes that cannot be read as a job
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = [
    "ALERTS",
    "API_KEY_JOBS",
    "API_KEY_REQUESTS",
    "API_KEY_TOKENS",
    "AUDIT_FAILURES",
    "BATCH_ROWS",
    "BATCH_SIZE",
    "BATCH_WAIT",
    "CACHE_BYTES",
    "CACHE_ENTRIES",
    "CACHE_EVICTED",
    "CACHE_FAULTS",
    "CACHE_HITS",
    "CACHE_MISSES",
    "CANARY",
    "COMMIT",
    "COMPUTE",
    "COST",
    "COST_PER_1000",
    "DEAD_LETTERED",
    "DRAFT_TOKENS",
    "DRIFT",
    "DRIFT_ALERTS",
    "ENGINE_DEVICE_MEMORY",
    "ENGINE_FINISHED",
    "ENGINE_METRICS",
    "EXCEPTIONS",
    "FALLBACKS",
    "FENCED",
    "BREAKERS",
    "BREAKER_TRIPS",
    "GATES",
    "FIRST_TOKEN",
    "GATEWAY_METRICS",
    "GRPC_CALLS",
    "GRPC_SECONDS",
    "GENERATING",
    "HTTP_REQUESTS",
    "HTTP_SECONDS",
    "HTTP_STREAMS",
    "HTTP_WAITING",
    "INSTANCES_LOST",
    "INTER_TOKEN",
    "JOBS",
    "LATENCY",
    "LEVEL",
    "METRICS",
    "MODEL_LOADED",
    "OUT_OF_MEMORY",
    "PAGES",
    "PADDING",
    "PREDICTED_WAIT",
    "PREEMPTED",
    "PREFIX_TOKENS",
    "QUARANTINED",
    "QUEUE_AGE",
    "QUEUE_DEPTH",
    "QUEUE_WAIT",
    "RAY_SERVE_CALLS",
    "RAY_SERVE_METRICS",
    "RAY_SERVE_SECONDS",
    "READY",
    "REQUESTS",
    "RETRIED",
    "ROLLOUT_DECISIONS",
    "ROWS",
    "SHADOW_COMPARED",
    "SHADOW_PAIRS",
    "SINGLE_FLIGHT",
    "STEPS",
    "TAKEN_OVER",
    "TOKENS",
    "TRAFFIC_SHARE",
    "TRANSITIONS",
    "WEBHOOKS",
    "WEBHOOKS_AGE",
    "WEBHOOKS_DEAD",
    "WEBHOOKS_WAITING",
    "Metric",
]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `buckets`: upper edges of a histogram; empty: those of the setting metrics_buckets."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


_MODEL: Final = ("model_name", "model_version", "endpoint")
_SIZES: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
_DURATIONS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""From a fast forward to the limit of a slow one, in seconds."""
_WAITS: Final = (*_DURATIONS, 300.0, 1800.0, 3600.0, 21600.0, 86400.0)
"""Up to the lifetime of a queued job."""

REQUESTS: Final = Metric(
    "infer_requests_total",
    "counter",
    "requests",
    ("model", "route"),
    "Requests, including failed ones, by the way they came",
)
LATENCY: Final = Metric(
    "infer_latency_seconds", "histogram", "seconds", ("model",), "From a job's acceptance to its committed result"
)
BATCH_SIZE: Final = Metric("infer_batch_size", "histogram", "jobs", ("model",), "Jobs of one forward", _SIZES)
EXCEPTIONS: Final = Metric(
    "infer_exceptions_total", "counter", "exceptions", ("model", "exception"), "Exceptions by class"
)
MODEL_LOADED: Final = Metric("model_loaded", "gauge", "", ("model", "version"), "1 while the version is loaded")
READY: Final = Metric("READY", "gauge", "", (), "1 while the worker claims jobs")

JOBS: Final = Metric("penstock_jobs_total", "counter", "jobs", (*_MODEL, "outcome"), "Jobs by outcome")
QUEUE_WAIT: Final = Metric(
    "penstock_queue_wait_seconds", "histogram", "seconds", _MODEL, "From a job's acceptance to its claim", _WAITS
)
BATCH_WAIT: Final = Metric(
    "penstock_batch_wait_seconds", "histogram", "seconds", _MODEL, "From a job's claim to its forward", _DURATIONS
)
COMPUTE: Final = Metric(
    "penstock_compute_seconds", "histogram", "seconds", _MODEL, "The forward of a batch", _DURATIONS
)
COMMIT: Final = Metric(
    "penstock_commit_seconds",
    "histogram",
    "seconds",
    _MODEL,
    "The commit of a batch, with the short forward that ran meanwhile",
    _DURATIONS,
)
COST: Final = Metric(
    "penstock_cost_total",
    "counter",
    "currency",
    _MODEL,
    "Cost of the compute seconds at the hourly rate of the device; absent without a rate",
)
COST_PER_1000: Final = Metric(
    "penstock_cost_per_1000_requests",
    "gauge",
    "currency",
    (*_MODEL, "form"),
    "Cost of 1,000 jobs since the last change of form: optimized is the form in use, baseline the same jobs by the "
    "model as built, by the gain that the gate measured",
)
BATCH_ROWS: Final = Metric("penstock_batch_rows", "histogram", "rows", _MODEL, "Rows of a batch", _SIZES)
PADDING: Final = Metric(
    "penstock_padding_ratio",
    "histogram",
    "ratio",
    _MODEL,
    "Share of a batch's tokens that are padding",
    (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
)
QUEUE_DEPTH: Final = Metric("penstock_queue_depth", "gauge", "jobs", (*_MODEL, "priority"), "Jobs waiting or running")
QUEUE_AGE: Final = Metric(
    "penstock_queue_age_seconds", "gauge", "seconds", (*_MODEL, "priority"), "Age of the oldest waiting job"
)
FENCED: Final = Metric(
    "penstock_fenced_total", "counter", "jobs", _MODEL, "Late commits of lost jobs, which had no effect"
)
TAKEN_OVER: Final = Metric("penstock_taken_over_total", "counter", "jobs", _MODEL, "Jobs claimed from another worker")
QUARANTINED: Final = Metric(
    "penstock_quarantined_total",
    "counter",
    "jobs",
    _MODEL,
    "Foreign bytes moved to the dead letters, and keys of another type quarantined",
)
DEAD_LETTERED: Final = Metric(
    "penstock_dead_lettered_total",
    "counter",
    "jobs",
    _MODEL,
    "Jobs in the dead letters after crashes of their workers",
)
RETRIED: Final = Metric("penstock_retried_total", "counter", "jobs", _MODEL, "Failed forwards of jobs that run again")
OUT_OF_MEMORY: Final = Metric(
    "penstock_out_of_memory_total", "counter", "batches", _MODEL, "Batches that did not fit the device and were split"
)
INSTANCES_LOST: Final = Metric(
    "penstock_instances_lost_total", "counter", "instances", _MODEL, "Instances whose process ended before it was to"
)
SINGLE_FLIGHT: Final = Metric(
    "penstock_single_flight_total", "counter", "jobs", _MODEL, "Jobs that shared the forward of an equal job"
)
CACHE_HITS: Final = Metric(
    "penstock_cache_hits_total",
    "counter",
    "jobs",
    (*_MODEL, "tier"),
    "Jobs answered from this tier of the response cache",
)
CACHE_MISSES: Final = Metric(
    "penstock_cache_misses_total", "counter", "jobs", (*_MODEL, "tier"), "Jobs whose response this tier did not have"
)
CACHE_ENTRIES: Final = Metric("penstock_cache_entries", "gauge", "", (*_MODEL, "tier"), "Responses in this tier")
CACHE_BYTES: Final = Metric(
    "penstock_cache_bytes", "gauge", "bytes", (*_MODEL, "tier"), "Bytes of the responses in this tier"
)
CACHE_EVICTED: Final = Metric(
    "penstock_cache_evicted_total",
    "counter",
    "answers",
    (*_MODEL, "tier"),
    "Responses evicted from this tier for want of room",
)
CACHE_FAULTS: Final = Metric(
    "penstock_cache_faults_total",
    "counter",
    "faults",
    (*_MODEL, "tier", "fault"),
    "Faults of this tier: errors, calls skipped while it was broken, entries refused, look-ups that took too long",
)
TRAFFIC_SHARE: Final = Metric(
    "penstock_traffic_share",
    "gauge",
    "",
    _MODEL,
    "Share of the jobs without a named version, 0 to 1, for the arms of an experiment",
)
LEVEL: Final = Metric("penstock_level", "gauge", "", _MODEL, "Optimization level of the version")
BREAKERS: Final = Metric(
    "penstock_breaker_open",
    "gauge",
    "",
    (*_MODEL, "optimization"),
    "1 while the circuit breaker of the optimization is not closed",
)
BREAKER_TRIPS: Final = Metric(
    "penstock_breaker_trips_total",
    "counter",
    "",
    (*_MODEL, "optimization"),
    "Circuit breakers that a report of this process opened",
)
FALLBACKS: Final = Metric(
    "penstock_fallback_answers_total",
    "counter",
    "jobs",
    (*_MODEL, "level"),
    "Jobs that this level of the fallback chain answered, because an earlier one had failed or was stopped",
)
CANARY: Final = Metric(
    "penstock_canary_verdicts_total",
    "counter",
    "",
    (*_MODEL, "optimization", "verdict"),
    "Verdicts on a candidate beside the model as built: on reference samples, in spot checks, and each new one of a "
    "shadow worker's canary",
)
ROLLOUT_DECISIONS: Final = Metric(
    "penstock_rollout_decisions_total",
    "counter",
    "decisions",
    (*_MODEL, "action"),
    "Decisions about a rollout that the driver in this process made: hold, advance, step_back, roll_back or complete",
)
DRIFT: Final = Metric(
    "penstock_drift_ratio",
    "gauge",
    "ratio",
    (*_MODEL, "optimization"),
    "The largest smoothed score of a figure over its control limit, by spot checks or shadow pairs; above 1: it drifts",
)
DRIFT_ALERTS: Final = Metric(
    "penstock_drift_alerts_total",
    "counter",
    "alerts",
    (*_MODEL, "optimization"),
    "Drift alerts that this process raised; each opens a circuit breaker",
)
TRANSITIONS: Final = Metric(
    "penstock_hysteresis_transitions_total",
    "counter",
    "",
    (*_MODEL, "optimization", "to"),
    "Times that an optimization went on or off here",
)
ALERTS: Final = Metric(
    "penstock_alerts_total",
    "counter",
    "alerts",
    (*_MODEL, "hook", "outcome"),
    "Alerts by hook: sent, failed, or dropped because too many waited",
)
GATES: Final = Metric(
    "penstock_gate_verdicts_total",
    "counter",
    "candidates",
    (*_MODEL, "verdict"),
    "Candidates by the gate's verdict",
)
AUDIT_FAILURES: Final = Metric(
    "penstock_audit_failures_total",
    "counter",
    "",
    (),
    "Failures to record cache accesses; they are tried again",
)
WEBHOOKS: Final = Metric(
    "penstock_webhooks_total",
    "counter",
    "tries",
    (*_MODEL, "outcome"),
    "Tries of webhooks: delivered, failed (another one follows) or dead",
)
WEBHOOKS_WAITING: Final = Metric("penstock_webhooks_waiting", "gauge", "", _MODEL, "Webhooks that are not delivered")
WEBHOOKS_DEAD: Final = Metric("penstock_webhooks_dead", "gauge", "", _MODEL, "Webhooks that were given up")
WEBHOOKS_AGE: Final = Metric(
    "penstock_webhooks_age_seconds",
    "gauge",
    "seconds",
    _MODEL,
    "Since the job of the oldest waiting webhook ended",
)

SHADOW_PAIRS: Final = Metric(
    "penstock_shadow_pairs_total",
    "counter",
    "pairs",
    (*_MODEL, "outcome"),
    "Sampled jobs of a shadow: mirrored, or dropped because the mirror is behind, the queue is full, the pair is too "
    "large or cannot be sent, the broker failed or the shadow is over",
)
SHADOW_COMPARED: Final = Metric(
    "penstock_shadow_compared_total",
    "counter",
    "pairs",
    (*_MODEL, "outcome"),
    "Pairs that a shadow worker settled: pass or fail by the validator, failures of the candidate, or not compared",
)

GENERATING: Final = Metric(
    "penstock_generation_requests", "gauge", "requests", (*_MODEL, "state"), "Texts that wait for a seat, or run"
)
PREEMPTED: Final = Metric(
    "penstock_generation_preempted_total", "counter", "requests", _MODEL, "Texts that lost their seat for a while"
)
FIRST_TOKEN: Final = Metric(
    "penstock_first_token_seconds", "histogram", "seconds", _MODEL, "From a text's beginning to its first token", _WAITS
)
INTER_TOKEN: Final = Metric(
    "penstock_inter_token_seconds",
    "histogram",
    "seconds",
    _MODEL,
    "Between two tokens of a text, as the mean of those that were handed over together",
    _DURATIONS,
)
TOKENS: Final = Metric(
    "penstock_tokens_total", "counter", "tokens", (*_MODEL, "kind"), "Tokens that were computed: prompt or generated"
)
STEPS: Final = Metric(
    "penstock_generation_steps_total", "counter", "steps", _MODEL, "Steps of the engine that computed something"
)
ROWS: Final = Metric(
    "penstock_generation_rows_total",
    "counter",
    "texts",
    _MODEL,
    "Texts in the steps of the engine, added up; over the steps, it is the mean batch",
)
PREDICTED_WAIT: Final = Metric(
    "penstock_generation_predicted_wait_seconds",
    "gauge",
    "seconds",
    _MODEL,
    "Until a text that comes now has a seat, by what is ahead of it and the measured time of a step",
)
PAGES: Final = Metric(
    "penstock_pages",
    "gauge",
    "pages",
    (*_MODEL, "kind"),
    "Pages of keys and values: used, the most that were used in a step (peak), cached, or all of them",
)
PREFIX_TOKENS: Final = Metric(
    "penstock_prefix_tokens_total",
    "counter",
    "tokens",
    (*_MODEL, "kind"),
    "Tokens of prompts that were looked up in the prefix cache: queried or found",
)

DRAFT_TOKENS: Final = Metric(
    "penstock_draft_tokens_total",
    "counter",
    "tokens",
    (*_MODEL, "kind"),
    "Tokens that were guessed: drafted, and of those accepted, which are part of the text",
)

METRICS: Final = (
    *(REQUESTS, LATENCY, BATCH_SIZE, EXCEPTIONS, MODEL_LOADED, READY),
    *(JOBS, QUEUE_WAIT, BATCH_WAIT, COMPUTE, COMMIT, BATCH_ROWS, PADDING, QUEUE_DEPTH, QUEUE_AGE),
    *(COST, COST_PER_1000),
    *(FENCED, TAKEN_OVER, QUARANTINED, DEAD_LETTERED, RETRIED, OUT_OF_MEMORY, INSTANCES_LOST, SINGLE_FLIGHT),
    *(TRAFFIC_SHARE, LEVEL, FALLBACKS, GATES, BREAKERS, BREAKER_TRIPS, AUDIT_FAILURES),
    *(CANARY, ROLLOUT_DECISIONS, DRIFT, DRIFT_ALERTS, TRANSITIONS, ALERTS),
    *(CACHE_HITS, CACHE_MISSES, CACHE_ENTRIES, CACHE_BYTES, CACHE_EVICTED, CACHE_FAULTS),
    *(SHADOW_PAIRS, SHADOW_COMPARED),
    *(GENERATING, PREEMPTED, PREDICTED_WAIT, FIRST_TOKEN, INTER_TOKEN, TOKENS, DRAFT_TOKENS, STEPS, ROWS),
    *(PAGES, PREFIX_TOKENS),
    *(WEBHOOKS, WEBHOOKS_WAITING, WEBHOOKS_DEAD, WEBHOOKS_AGE),
)
"""The whole table, in the order of display."""

HTTP_REQUESTS: Final = Metric(
    "penstock_http_requests_total",
    "counter",
    "requests",
    ("route", "method", "status"),
    "Answered requests of the HTTP gateway; the route has names in braces",
)
HTTP_SECONDS: Final = Metric(
    "penstock_http_seconds",
    "histogram",
    "seconds",
    ("route",),
    "From the head of a request to the end of its answer",
    _DURATIONS,
)
GRPC_CALLS: Final = Metric(
    "penstock_grpc_calls_total", "counter", "calls", ("method", "code"), "Ended calls of the gateway's gRPC side"
)
GRPC_SECONDS: Final = Metric(
    "penstock_grpc_seconds", "histogram", "seconds", ("method",), "From the beginning of a call to its end", _DURATIONS
)
HTTP_WAITING: Final = Metric(
    "penstock_http_waiting", "gauge", "requests", (), "Requests that wait for the end of a job"
)
HTTP_STREAMS: Final = Metric("penstock_http_streams", "gauge", "", (), "Open event streams and WebSockets")
API_KEY_REQUESTS: Final = Metric(
    "penstock_api_key_requests_total",
    "counter",
    "requests",
    ("key", "outcome"),
    "Requests by the id of their API key: admitted, limited or denied; keys beyond the first 1,000 are `other`",
)
API_KEY_JOBS: Final = Metric(
    "penstock_api_key_jobs_total",
    "counter",
    "jobs",
    ("key",),
    "Accepted jobs by the id of the API key that pays, as the broker has counted them for all gateways",
)
API_KEY_TOKENS: Final = Metric(
    "penstock_api_key_tokens_total",
    "counter",
    "tokens",
    ("key", "kind"),
    "Tokens of whole texts by the id of the API key that pays, as the broker has counted them: prompt or generated",
)

GATEWAY_METRICS: Final = (
    *(HTTP_REQUESTS, HTTP_SECONDS, HTTP_WAITING, HTTP_STREAMS, GRPC_CALLS, GRPC_SECONDS),
    *(API_KEY_REQUESTS, API_KEY_JOBS, API_KEY_TOKENS),
)
"""The metrics of the gateway, which are of no model."""

ENGINE_FINISHED: Final = Metric(
    "penstock_generation_finished_total", "counter", "requests", _MODEL, "Requests of an engine that have ended"
)
ENGINE_DEVICE_MEMORY: Final = Metric(
    "penstock_generation_device_memory_bytes", "gauge", "bytes", _MODEL, "Memory of GPUs that the engine's process took"
)
ENGINE_METRICS: Final = (ENGINE_FINISHED, ENGINE_DEVICE_MEMORY)
"""The metrics of an engine without a worker, beside those of generation: see workers/generation/monitoring.py."""

RAY_SERVE_CALLS: Final = Metric(
    "penstock_ray_serve_calls_total",
    "counter",
    "calls",
    ("model_name", "priority", "outcome"),
    "Calls of a deployment of Ray Serve by outcome, and by the priority of their job",
)
RAY_SERVE_SECONDS: Final = Metric(
    "penstock_ray_serve_seconds",
    "histogram",
    "seconds",
    ("model_name", "priority", "outcome"),
    "From the beginning of such a call to its end",
    _DURATIONS,
)
RAY_SERVE_METRICS: Final = (RAY_SERVE_CALLS, RAY_SERVE_SECONDS)
"""The metrics of a replica of Ray Serve, in its own process: see producers/ray_serve/telemetry.py."""
