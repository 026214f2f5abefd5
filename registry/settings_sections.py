"""The sections of the settings: each key with its type, its default and its description; settings.py reads the values.

Settings (settings.py) --> InferenceConfig --> BatchingConfig, CacheConfig, PrivacyConfig and the others
                       '-> WorkerSettings
"""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, ValidationInfo, field_validator

from penstock.registry.broker.breakers import BreakerLimits
from penstock.registry.settings_types import (
    Currency,
    DeviceName,
    DiskBytes,
    Edges,
    Folder,
    HeaderName,
    HourlyRate,
    KeyLabel,
    ModelName,
    RedisUrl,
    Regex,
    RouteRate,
    Section,
    WebhookUrl,
)

__all__ = [
    "BatchesConfig",
    "BatchingConfig",
    "CacheConfig",
    "CeleryConfig",
    "CompilationConfig",
    "CostConfig",
    "InferenceConfig",
    "InputValidationConfig",
    "LATEST",
    "METRICS_PORT",
    "OpenTelemetryConfig",
    "PrivacyConfig",
    "PrivacyDetector",
    "PrivacyMode",
    "QueueConfig",
    "RateLimitConfig",
    "SafeguardsConfig",
    "SafetyConfig",
    "ServerConfig",
    "WebhooksConfig",
    "WorkerSettings",
]

LATEST: Final = "latest"
"""The value of model_version for the version in production, else the highest one under the models root."""
METRICS_PORT: Final = 9464
"""The metrics port of device 0; device N has METRICS_PORT + N."""

PrivacyMode = Literal["ephemeral", "hashes_only", "persisted_encrypted"]
PrivacyDetector = Literal["payment_card", "email", "ssn"]
_STRICTNESS: Final[dict[PrivacyMode, int]] = {"ephemeral": 0, "persisted_encrypted": 1, "hashes_only": 2}


class BatchingConfig(Section):
    """Batching of jobs."""

    enabled: bool = Field(default=True, description="Off: every forward has exactly one row")
    max_batch_size: int = Field(default=0, ge=0, description="Rows of one batch; 0: calibrated on a GPU, 32 on a CPU")
    max_queue_depth: int = Field(default=1024, ge=1, description="Jobs that one worker holds in memory")
    max_queue_bytes: int = Field(
        default=1 << 28,
        ge=1 << 20,
        description="Bytes of jobs that one worker holds in memory; a batch with its results takes at most half of it",
    )
    max_wait_ms: float = Field(
        default=50.0, ge=0, description="Batching delay: the longest wait for more jobs; an idle device does not wait"
    )
    target_latency_ms: float = Field(
        default=100.0,
        gt=0,
        description="Target for the p95 of latency, of jobs that find no backlog in their queue",
    )
    gpu_headroom_pct: int = Field(
        default=20, ge=0, lt=100, description="Device memory that calibration leaves free, in %"
    )
    single_flight: bool = Field(
        default=True, description="Request deduplication: equal jobs of one tenant in one worker share a forward"
    )


class CompilationConfig(Section):
    """torch.compile, and the gate for compiled models."""

    enabled: bool = Field(default=True, description="Compile models, if their optimization level allows it")
    backend: Literal["auto", "inductor", "cudagraphs"] = Field(default="auto", description="auto: by device")
    cache_dir: Folder = Field(
        default=Path("~/.penstock/inference_cache"), description="Folder of compiled artefacts; follows `home`"
    )
    warmup_requests: int = Field(default=3, ge=0, description="Forwards before a model counts as ready; 0: none")
    # The bound keeps the gate a gate: unit vectors of up to 2000 numbers, each changed by 1e-3, keep a cosine of 0.999,
    # which the gate also asks of forms in lower precision.
    tolerance: float = Field(
        default=1e-5,
        ge=0,
        le=1e-3,
        description="Largest change of an output, as atol + rtol * |y|; bounded, because no setting turns the gate off",
    )


class CacheConfig(Section):
    """The response cache and its tiers."""

    enabled: bool = Field(default=True, description="Off: a repeated input runs the model again")
    l1_size: int = Field(default=10_000, ge=1, description="Entries in memory")
    l1_max_bytes: int = Field(
        default=1 << 28, ge=1, description="Bytes in memory; one response takes at most an eighth"
    )
    l2_path: Folder = Field(
        default=Path("~/.penstock/inference_cache/cache.db"),
        description="File of the cache on disk, which the workers of this machine share; follows `home`",
    )
    l2_max_bytes: DiskBytes = Field(default=1 << 30, description="Bytes on disk, 4 MiB or more; 0: none on disk")
    ttl_seconds: float = Field(default=86_400.0, gt=0, description="Lifetime of an entry in every tier")
    lookup_timeout_ms: float = Field(
        default=50.0, gt=0, description="After this wait for the tiers on disk and in Redis a job runs instead"
    )
    privacy_mode: PrivacyMode = Field(
        default="ephemeral", description="The stricter one of this and privacy.mode applies"
    )
    redis_url: RedisUrl = Field(default="", repr=False, description="The shared tier; empty: none")
    key_prefix: str = Field(
        default="penstock:cache:", min_length=1, description="Prefix of the names of entries in the shared tier"
    )
    socket_timeout_s: float = Field(default=5.0, gt=0, description="Longest time of a call of the shared tier")
    producer_lookup: bool = Field(
        default=False, description="Clients look into the shared tier before they queue a job"
    )


class PrivacyConfig(Section):
    """Which data may be stored, where and how."""

    mode: PrivacyMode = Field(default="ephemeral", description="Which data may outlive the process")
    redact_patterns: tuple[Regex, ...] = Field(
        default=(), description="Regular expressions (RE2) of text that is removed before data is written or shown"
    )
    redact_detectors: tuple[PrivacyDetector, ...] = Field(
        default=(), description="Checked detectors of such text: payment_card (Luhn), email, ssn"
    )
    presidio_entities: tuple[str, ...] = Field(
        default=(),
        description="Entities that Presidio's recognisers find without a language model, such as IBAN_CODE; needs the "
        "extra presidio",
    )
    cache_tenant_isolation: bool = Field(
        default=True, description="Off: tenants share cached responses; a worker needs accept_shared_cache to start"
    )
    accept_shared_cache: bool = Field(
        default=False,
        description="Start without cache_tenant_isolation, although a tenant can learn what another one asked",
    )
    audit_log_enabled: bool = Field(default=True, description="Record gate decisions, cache accesses and state changes")
    audit_log_path: Folder = Field(
        default=Path("~/.penstock/audit"), description="Folder of the audit log; follows `home`"
    )
    seal_payloads: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Encrypt bodies of jobs, results and chunks in the broker; auto: except in the mode ephemeral",
    )
    audit_cache_accesses: Literal["counted", "sampled", "off"] = Field(
        default="counted",
        description="Look-ups in the cache: one audit entry a minute per model and tenant, every 100th one, or none",
    )
    audit_group_ms: float = Field(
        default=0.0, ge=0, le=1000, description="Audit entries of so many ms share one sync of the disk; 0: no wait"
    )
    encrypt_at_rest: bool = Field(
        default=True,
        description="Encrypt data that outlives the process; off: persisted_encrypted stores it unencrypted",
    )
    encryption_key_source: Literal["env", "file", "hsm"] = Field(
        default="env",
        description="Source of the data keys: PENSTOCK_L2_ENCRYPTION_KEY, encryption_key_file, or that file with keys "
        "that an HSM has wrapped",
    )
    encryption_key_file: Folder = Field(
        default=Path("~/.penstock/data.key"),
        description="File of the data keys (mode 0600), one on each line, the first seals; follows `home`",
    )
    pkcs11_module: Folder | None = Field(default=None, description="The PKCS#11 library of the HSM")
    pkcs11_token: str = Field(default="", description="Label of the token in the HSM; its PIN is PENSTOCK_PKCS11_PIN")
    pkcs11_key: KeyLabel = Field(
        default="penstock", description="Label of the AES key in the token that wraps new data keys"
    )


class QueueConfig(Section):
    """Leases, limits and lifetimes of jobs in the broker."""

    lease_s: float = Field(
        default=5.0, gt=0, description="After this time without a renewal a worker loses its jobs to another one"
    )
    max_crashes: int = Field(
        default=3, ge=1, description="After so many crashes of its worker a job becomes a dead letter"
    )
    progress_timeout_s: float = Field(
        default=45.0,
        gt=0,
        description="A worker whose drain makes no progress for so long is replaced; at least timeout_seconds + 1",
    )
    drain_grace_s: float = Field(
        default=10.0, ge=0, description="The time that a stopping worker has to finish its batch"
    )
    ageing_s: float = Field(default=2.0, ge=0, description="After this wait a lower priority gets its share of a batch")
    max_depth: int = Field(default=100_000, ge=1, description="Jobs in one queue, per model and priority")
    tenant_max_in_flight: int = Field(
        default=0, ge=0, description="Unfinished jobs of one tenant and model; 0: no limit"
    )
    job_ttl_s: float = Field(default=86_400.0, gt=0, description="Lifetime of a job that has not run")
    result_ttl_s: float = Field(default=3_600.0, gt=0, description="Lifetime of results and idempotency keys")
    max_event_bytes: int = Field(
        default=1 << 24,
        ge=1 << 16,
        description="Bytes of the chunks of one job that are kept; older ones are deleted, a larger one is refused",
    )
    client_tracebacks: bool = Field(
        default=False,
        description="Send the traceback of a failed model to its client, with code and paths of the worker",
    )


class CeleryConfig(Section):
    """Permissions of Celery and Flower."""

    lane: Literal["auto", "trusted", "off"] = Field(
        default="auto",
        description="Accept tasks of Celery's send_task; auto: only while signing and privacy.seal_payloads are off",
    )
    default_queue: str = Field(
        default="celery", min_length=1, description="Queue of callbacks, chain steps and chord bodies that name none"
    )
    events: bool = Field(default=True, description="Send task events, so that Flower shows every job")
    events_interval_ms: int = Field(default=50, ge=1, description="Interval at which collected events are sent")
    remote_control: bool = Field(default=False, description="Allow shutdown, pool and consumer commands over the wire")


class ServerConfig(Section):
    """The gateway of `penstock serve`: HTTP, and gRPC beside it."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to bind")
    port: int = Field(default=8000, ge=0, le=65_535, description="Port; 0: any free one")
    grpc_enabled: bool = Field(default=True, description="Serve gRPC, too; never with a socket in the file system")
    grpc_port: int = Field(default=50_051, ge=0, le=65_535, description="Port of gRPC; 0: any free one")
    workers: int = Field(default=1, ge=1, description="Processes")
    max_waiting: int = Field(
        default=1024, ge=1, description="Requests of one process that wait for a job; further ones are refused with 503"
    )
    max_streams: int = Field(
        default=4096,
        ge=1,
        description="Event streams and WebSockets of one process; a further stream is refused with 503, a further "
        "WebSocket closed with 1013",
    )
    client_timeout_s: float = Field(
        default=30.0, gt=0, description="Time in which a client sends a head or a body, takes an answer, or stays idle"
    )
    stop_grace_s: float = Field(default=30.0, gt=0, description="Time that requests have to end when the gateway stops")
    api_keys: Literal["auto", "required", "off"] = Field(
        default="auto",
        description="Ask callers for an API key; auto: once a key exists, and wherever host is not the loopback",
    )
    address_header: HeaderName = Field(
        default="",
        description="Header in which a trusted proxy names the address of the caller, such as x-real-ip; empty: the "
        "connection's",
    )
    model_control: bool = Field(
        default=False, description="Let clients of the gateway load and unload versions, where operators do not sign"
    )
    metrics: bool = Field(default=True, description="Serve the page /metrics; off: 404")
    websocket_idle_s: float = Field(
        default=60.0, gt=0, description="Longest time without a message and without an open request on a WebSocket"
    )
    websocket_requests: int = Field(
        default=64, ge=1, description="Open requests of one WebSocket; further ones are refused with an error message"
    )
    websocket_messages_per_s: int = Field(
        default=1000, ge=1, description="Messages of one WebSocket in a second; a faster one is closed with 1008"
    )
    allowed_origins: tuple[str, ...] = Field(
        default=(),
        description="Origins beside the gateway's own whose pages may send requests and open a WebSocket, or *",
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Names beside localhost and host that Host may have without API keys, or *; empty: those are "
        "checked on the loopback only",
    )

    @property
    def is_exposed(self) -> bool:
        """Whether other machines can connect to the host."""
        try:
            return not ip_address(self.host).is_loopback
        except ValueError:
            return self.host != "localhost"


class BatchesConfig(Section):
    """Files and batches of the HTTP gateway's OpenAI routes."""

    path: Folder = Field(
        default=Path("~/.penstock/files"),
        description="Folder of the files, which the gateway processes of this machine share; follows `home`",
    )
    max_file_mb: int = Field(default=200, ge=1, le=4096, description="Largest file of an upload, in MiB")
    max_stored_mb: int = Field(
        default=10_240, ge=1, description="MiB of stored files, of all tenants, from which on uploads are refused"
    )
    keep_s: float = Field(default=30 * 86_400.0, gt=0, description="Lifetime of files")
    max_outstanding: int = Field(default=2048, ge=1, description="Jobs of one batch in the queue at a time")


class RateLimitConfig(Section):
    """Rate limits of the gateway, over all its processes. An API key may have limits of its own."""

    enabled: bool = Field(default=False, description="Refuse callers above these rates; off: only limits of keys apply")
    requests_per_minute: int = Field(
        default=1000, ge=1, description="Rate of an API key that has none of its own; without keys, of an address"
    )
    tenant_requests_per_minute: int = Field(default=0, ge=0, description="Rate of a tenant; 0: no limit")
    address_requests_per_minute: int = Field(default=0, ge=0, description="Rate of an address; 0: no limit")
    routes: tuple[RouteRate, ...] = Field(
        default=(), description="Rates of single routes for each caller: PATH=REQUESTS a minute, as in /v1/jobs=100"
    )

    @property
    def by_route(self) -> dict[str, int]:
        """The rates of single routes, by path."""
        return {path: int(rate) for path, _, rate in (each.rpartition("=") for each in self.routes)}


class InputValidationConfig(Section):
    """Limits of inputs besides those of the model."""

    enabled: bool = Field(default=True, description="Off: only the model's limits apply")
    max_sequence_length: int = Field(
        default=0, ge=0, description="Longest input of models whose inputs have a length; 0: the model's limit"
    )


class SafeguardsConfig(Section):
    """Requests that are refused before they reach a model."""

    rate_limit: RateLimitConfig = RateLimitConfig()
    input_validation: InputValidationConfig = InputValidationConfig()

    @property
    def max_sequence_length(self) -> int | None:
        """The longest input of every model; None: the model's limit."""
        return (self.input_validation.enabled and self.input_validation.max_sequence_length) or None


class WebhooksConfig(Section):
    """The delivery of webhooks."""

    allow: tuple[str, ...] = Field(
        default=(), description="Hosts, addresses and networks that are called although they are not public"
    )
    timeout_s: float = Field(default=30.0, gt=0, le=300, description="Time-out of one try")
    connect_timeout_s: float = Field(default=5.0, gt=0, le=300, description="Time-out of its connection")
    in_flight: int = Field(default=64, ge=1, le=1024, description="Tries at a time in one deliverer")
    per_host: int = Field(default=4, ge=1, le=1024, description="Tries at a time at one receiver")


class SafetyConfig(Section):
    """Checks of optimizations at serving, and alerts."""

    spot_check_share: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Share of the batches that an optimized form answered that the model as built runs again, on a "
        "thread beside the traffic and in at most this share of its time; 0: none",
    )
    alert_webhooks: tuple[WebhookUrl, ...] = Field(
        default=(),
        repr=False,
        description="URLs that get each safety alert as a signed webhook; they may hold secrets",
    )
    min_off_s: float = Field(
        default=300.0, ge=1, le=604_800, description="Shortest time off of an optimized form whose breaker has opened"
    )
    max_off_s: float = Field(
        default_factory=lambda known: max(3600.0, known["min_off_s"]),
        le=604_800,
        description="Longest time off: it doubles when a form goes off again soon after its return, and is this long "
        "after a canary has refused the form; unset: 3600, or min_off_s if that is more",
    )
    min_on_s: float = Field(
        default=60.0, ge=0, le=604_800, description="Shortest time on of a form before failed spot checks switch it off"
    )
    min_passes: int = Field(
        default=3, ge=1, le=100, description="PASS trials in a row that a form needs to come back after its time off"
    )
    breaker_failures: int = Field(
        default=3, ge=1, le=1000, description="Failures of a form without a fallback that open its breaker"
    )
    breaker_window_s: float = Field(
        default=60.0, ge=1, le=86_400, description="Time within which these failures have to be"
    )
    probe_lease_s: float = Field(
        default=600.0,
        ge=1,
        le=86_400,
        description="Time that a worker has for the trials of a form that may come back; then another worker tries it",
    )
    drift_smoothing: float = Field(
        default=0.05, gt=0, le=1, description="Weight of the newest comparison in the chart (EWMA) that looks for drift"
    )
    drift_width: float = Field(
        default=5.5, gt=0, le=100, description="Control limit of the chart in standard deviations: lower finds more"
    )
    drift_reference_size: int = Field(
        default=200, ge=20, le=2000, description="Comparisons of the reference window; before its end no drift is found"
    )
    drift_adwin_delta: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Confidence of ADWIN, which finds small lasting changes that the chart misses, such as 0.002; 0: "
        "without ADWIN",
    )

    @field_validator("max_off_s")
    @classmethod
    def _refuse_less_than_the_shortest_time(cls, value: float, info: ValidationInfo) -> float:
        if value < (least := info.data.get("min_off_s", 0.0)):
            raise ValueError(f"expected at least min_off_s, which is {least:g}")
        return value

    @property
    def breaker_limits(self) -> BreakerLimits:
        """Those of the breakers of forms and of candidates."""
        times_s = (self.breaker_window_s, self.min_off_s, self.probe_lease_s)
        window_ms, open_ms, probe_ms = (int(seconds * 1000) for seconds in times_s)
        return BreakerLimits(self.breaker_failures, window_ms, open_ms, probe_ms)


class OpenTelemetryConfig(Section):
    """What goes to an OpenTelemetry collector: `PENSTOCK_INFERENCE_OPEN_TELEMETRY_*`. Its own variables OTEL_* say the
    rest: the collector's address, the name of the service, the sampler.
    """

    traces: bool = Field(default=False, description="Spans of submits, requests and jobs; needs the extra otel")
    metrics: bool = Field(default=False, description="The metrics of /metrics, sent by OTLP; needs the extra otel")


class CostConfig(Section):
    """Estimates of cost. No price is built in: prices differ by provider and by day."""

    hourly_rate: float | None = Field(
        default=None,
        gt=0,
        description="Price of one hour of a worker's device; unset: that of its name in hourly_rates",
    )
    gpu_name: str = Field(
        default="", description="The device's name in hourly_rates; empty: as nvidia-smi lists it, or cpu"
    )
    hourly_rates: tuple[HourlyRate, ...] = Field(
        default=(), description="NAME=PRICE of one hour for each device; without any price costs are not estimated"
    )
    currency: Currency = Field(
        default="USD", description="Currency of the prices, by its code of ISO 4217; nothing is converted"
    )

    @property
    def rates_by_name(self) -> dict[str, float]:
        """The prices of one hour by the name of the device."""
        return {name: float(price) for name, _, price in (rate.rpartition("=") for rate in self.hourly_rates)}


class InferenceConfig(Section):
    """How models are served: `PENSTOCK_INFERENCE_*`, one section per concern."""

    enabled: bool = Field(default=True, description="Off: models run without cache, batching and compilation")
    max_level: int = Field(default=2, ge=0, le=4, description="Highest optimization level of models")
    frameworks: tuple[Literal["pytorch", "transformers", "onnxruntime"], ...] = Field(
        default=("pytorch", "transformers", "onnxruntime"), description="Frameworks that models may use"
    )
    runtime_hosts: tuple[str, ...] = Field(
        default=(),
        description="Hosts, addresses and networks of servers that packages may name as generate.runtime_url; the "
        "loopback needs no entry",
    )
    device: DeviceName = Field(default="auto", description="auto, cpu, cuda or cuda:N")
    repo_root: Folder = Field(default=Path("models"), description="The models root: <name>/<version>/model.yaml")
    model_version: str = Field(
        default=LATEST, min_length=1, description="Version served; latest: the one in production, else the highest"
    )
    preload: bool = Field(default=True, description="Load models at start; off: with their first job")
    load_timeout_s: float = Field(default=300.0, gt=0, description="Time-out of loading a version")
    model_memory_mb: int = Field(
        default=0,
        ge=0,
        description="Memory of all loaded versions; beyond it the least recently used are unloaded; 0: no limit",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto", description="Precision of torch models whose package has none; auto: as built"
    )
    timeout_seconds: float = Field(default=30.0, gt=0, description="Time-out of one forward")
    max_request_size_mb: int = Field(default=10, ge=1, le=10, description="Largest request, in MiB")
    uvicorn_access_log: bool = Field(default=False, description="One line per HTTP request")
    metrics_buckets: Edges = Field(
        default=(0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28),
        description="Upper edges of infer_latency_seconds, in seconds",
    )
    state_redis_url: RedisUrl = Field(default="", repr=False, description="Store of model states; empty: the broker")
    state_prefix: str = Field(default="penstock:model_state", min_length=1, description="Prefix of its keys")
    state_reconcile_enabled: bool = Field(
        default=True, description="Check regularly for versions that operators want loaded"
    )
    state_reconcile_interval_s: float = Field(default=5.0, gt=0, description="Time between two checks")
    batching: BatchingConfig = BatchingConfig()
    compilation: CompilationConfig = CompilationConfig()
    cache: CacheConfig = CacheConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    queue: QueueConfig = QueueConfig()
    celery: CeleryConfig = CeleryConfig()
    server: ServerConfig = ServerConfig()
    batches: BatchesConfig = BatchesConfig()
    safeguards: SafeguardsConfig = SafeguardsConfig()
    webhooks: WebhooksConfig = WebhooksConfig()
    safety: SafetyConfig = SafetyConfig()
    open_telemetry: OpenTelemetryConfig = OpenTelemetryConfig()
    cost: CostConfig = CostConfig()

    @property
    def progress_limit_s(self) -> float:
        """After so many seconds without progress of its drain a worker is replaced: always more than of a forward."""
        return max(self.queue.progress_timeout_s, self.timeout_seconds + 1.0)

    @property
    def effective_mode(self) -> PrivacyMode:
        """The privacy mode that applies: the stricter one of privacy.mode and cache.privacy_mode.

        The stricter mode leaves less that can be read outside of the process. `ephemeral` persists no cache, and has
        plain texts in the broker; `persisted_encrypted` seals all that leaves the process; `hashes_only` keeps digests
        of inputs at most.
        """
        mode, of_cache = self.privacy.mode, self.cache.privacy_mode
        return mode if _STRICTNESS[mode] >= _STRICTNESS[of_cache] else of_cache

    @property
    def persists_answers(self) -> bool:
        """Whether cached answers are stored on disk and in Redis, too."""
        return self.enabled and self.cache.enabled and self.effective_mode == "persisted_encrypted"

    @property
    def persists_goldens(self) -> bool:
        """Whether reference samples are stored in the registry's database, too."""
        return self.enabled and self.effective_mode == "persisted_encrypted"

    @property
    def is_private(self) -> bool:
        """Whether a privacy mode other than `ephemeral` applies."""
        return self.effective_mode != "ephemeral"

    @property
    def seals_payloads(self) -> bool:
        """Whether bodies of jobs, results and events are encrypted before they leave the process."""
        wanted = self.privacy.seal_payloads
        return wanted == "on" or (wanted == "auto" and self.is_private)

    @property
    def withholds_texts(self) -> bool:
        """Whether texts of a model's exceptions, which may repeat inputs, must not leave the process."""
        return self.is_private or self.seals_payloads

    def as_shown(self) -> dict[str, Any]:
        """The values as plain data, without URLs, which may hold passwords."""
        return self.model_dump(
            mode="json", exclude={"state_redis_url": True, "cache": {"redis_url"}, "safety": {"alert_webhooks"}}
        )


class WorkerSettings(Section):
    """The settings of one worker process, from its supervisor."""

    index: int | None = Field(default=None, ge=0, description="Device index; unset: the first that is free")
    models: tuple[ModelName, ...] = Field(default=(), description="Models; empty: all")
    heartbeat_fd: int | None = Field(default=None, ge=0, description="Pipe on which the supervisor reads heartbeats")
    metrics_host: str = Field(
        default="127.0.0.1", min_length=1, description="Address of metrics; other than loopback only with a bearer file"
    )
    metrics_port: int | None = Field(default=None, ge=0, le=65_535, description="Unset: 9464 + index; 0: any free port")
    metrics_bearer_file: Folder | None = Field(default=None, description="File with the bearer token for readers")

    def probe_port(self, index: int) -> int:
        """The port of the metrics and health probe of the worker on device `index`; 0 means any free one."""
        return METRICS_PORT + index if self.metrics_port is None else self.metrics_port
