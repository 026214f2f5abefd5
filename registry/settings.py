"""Every setting: its key, its variable, its default, and the source of its value.

    constructor > environment > --config YAML > [tool.penstock.inference] of pyproject.toml > default

The first source that has a key decides its value. An unknown name is an error in every source: a misspelt setting
must not be silently ignored. Secrets come from the environment or the constructor only, and are never shown.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from penstock.registry.broker.broker_url import parse_broker_url
from penstock.registry.envelope import Keyring
from penstock.registry.errors import ConfigurationError, shown
from penstock.registry.queues import parse_name

__all__ = [
    "BatchingConfig",
    "CacheConfig",
    "CeleryConfig",
    "CompilationConfig",
    "InferenceConfig",
    "InputValidationConfig",
    "LATEST",
    "METRICS_PORT",
    "PrivacyConfig",
    "PrivacyMode",
    "QueueConfig",
    "RateLimitConfig",
    "SafeguardsConfig",
    "ServerConfig",
    "Setting",
    "Settings",
    "WorkerSettings",
    "catalogue",
]

LATEST: Final = "latest"
"""The value of model_version for the version in production, else the highest one under the models root."""
METRICS_PORT: Final = 9464
"""The metrics port of device 0; device N has METRICS_PORT + N."""
CONFIG_VARIABLE: Final = "PENSTOCK_CONFIG"
_PREFIX: Final = "PENSTOCK_"

PrivacyMode = Literal["ephemeral", "hashes_only", "persisted_encrypted"]


def _redis_url(url: str) -> str:
    if url:
        try:
            parse_broker_url(url)
        except ConfigurationError as problem:
            raise ValueError(str(problem)) from None
    return url


def _increasing(edges: tuple[float, ...]) -> tuple[float, ...]:
    if not edges or edges[0] <= 0 or any(low >= high for low, high in pairwise(edges)):
        raise ValueError("expected positive numbers of seconds in increasing order, such as 0.01,0.1,1")
    return edges


def _pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as problem:
        raise ValueError(f"expected a regular expression: {problem}") from None
    return pattern


def _tenant(name: str) -> str:
    return parse_name("tenant", name)


def _model(name: str) -> str:
    return parse_name("model", name)


def _device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ValueError("expected auto, cpu, cuda or cuda:N")
    return name


def _folder(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError("expected a folder; its ~ names an unknown user") from None


RedisUrl = Annotated[str, AfterValidator(_redis_url)]
Folder = Annotated[Path, AfterValidator(_folder)]
Regex = Annotated[str, AfterValidator(_pattern)]


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans_as_numbers(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise ValueError("expected something other than a boolean")
        return value


class BatchingConfig(_Section):
    """Batching of jobs."""

    enabled: bool = Field(default=True, description="Off: every forward has exactly one row")
    max_batch_size: int = Field(default=0, ge=0, description="Rows of one batch; 0: calibrated on a GPU, 32 on a CPU")
    max_queue_depth: int = Field(default=1024, ge=1, description="Jobs that one worker holds in memory")
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


class CompilationConfig(_Section):
    """torch.compile, and the gate for compiled models."""

    enabled: bool = Field(default=True, description="Compile models, if their optimization level allows it")
    backend: Literal["auto", "inductor", "cudagraphs"] = Field(default="auto", description="auto: by device")
    cache_dir: Folder = Field(
        default=Path("~/.penstock/inference_cache"), description="Folder of compiled artefacts; follows `home`"
    )
    warmup_requests: int = Field(default=3, ge=0, description="Forwards before a model counts as ready; 0: none")
    tolerance: float = Field(default=1e-5, ge=0, description="Largest change of an output, as atol + rtol * |y|")


class CacheConfig(_Section):
    """The response cache and its tiers."""

    enabled: bool = Field(default=True, description="Off: a repeated input runs the model again")
    l1_size: int = Field(default=10_000, ge=1, description="Entries in memory")
    l1_max_bytes: int = Field(
        default=1 << 28, ge=1, description="Bytes in memory; one response takes at most an eighth"
    )
    l2_max_bytes: int = Field(default=1 << 30, ge=1, description="Bytes on disk")
    ttl_seconds: float = Field(default=86_400.0, gt=0, description="Lifetime of an entry in every tier")
    privacy_mode: PrivacyMode = Field(
        default="ephemeral", description="The stricter one of this and privacy.mode applies"
    )
    redis_url: RedisUrl = Field(default="", repr=False, description="The shared tier; empty: none")


class PrivacyConfig(_Section):
    """Which data may be stored, where and how."""

    mode: PrivacyMode = Field(default="ephemeral", description="Which data may outlive the process")
    redact_patterns: tuple[Regex, ...] = Field(
        default=(), description="Regular expressions of text that is removed before data is written"
    )
    cache_tenant_isolation: bool = Field(default=True, description="Off: tenants share cached responses")
    audit_log_enabled: bool = Field(default=True, description="Record gate decisions, cache accesses and state changes")
    audit_log_path: Folder = Field(
        default=Path("~/.penstock/audit"), description="Folder of the audit log; follows `home`"
    )
    encrypt_at_rest: bool = Field(default=True, description="Encrypt data on disk")
    encryption_key_source: Literal["env", "file", "hsm"] = Field(default="env", description="Source of the key")


class QueueConfig(_Section):
    """Leases, limits and lifetimes of jobs in the broker."""

    lease_s: float = Field(
        default=5.0, gt=0, description="After this time without a renewal a worker loses its jobs to another one"
    )
    max_crashes: int = Field(
        default=3, ge=1, description="After so many crashes of its worker a job becomes a dead letter"
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
    client_tracebacks: bool = Field(
        default=False,
        description="Send the traceback of a failed model to its client, with code and paths of the worker",
    )


class CeleryConfig(_Section):
    """Permissions of Celery and Flower."""

    lane: Literal["auto", "trusted", "off"] = Field(
        default="auto", description="Accept tasks of Celery's send_task; auto: only while signing is off"
    )
    default_queue: str = Field(
        default="celery", min_length=1, description="Queue of callbacks, chain steps and chord bodies that name none"
    )
    events: bool = Field(default=True, description="Send task events, so that Flower shows every job")
    events_interval_ms: int = Field(default=50, ge=1, description="Interval at which collected events are sent")
    remote_control: bool = Field(default=False, description="Allow shutdown, pool and consumer commands over the wire")


class ServerConfig(_Section):
    """The address of the HTTP gateway."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to bind; read by the gateway")
    port: int = Field(default=8000, ge=0, le=65_535, description="0: any free port; read by the gateway")
    workers: int = Field(default=1, ge=1, description="Processes; read by the gateway")


class RateLimitConfig(_Section):
    """Rate limit of one caller."""

    enabled: bool = Field(default=False, description="Refuse callers above the rate; read by the gateway")
    requests_per_minute: int = Field(default=1000, ge=1, description="Rate of one caller; read by the gateway")


class InputValidationConfig(_Section):
    """Limits of inputs besides those of the model."""

    enabled: bool = Field(default=True, description="Off: only the model's limits apply")
    max_sequence_length: int = Field(
        default=0, ge=0, description="Longest input of models whose inputs have a length; 0: the model's limit"
    )


class SafeguardsConfig(_Section):
    """Requests that are refused before they reach a model."""

    rate_limit: RateLimitConfig = RateLimitConfig()
    input_validation: InputValidationConfig = InputValidationConfig()

    @property
    def max_sequence_length(self) -> int | None:
        """The longest input of every model; None: the model's limit."""
        return (self.input_validation.enabled and self.input_validation.max_sequence_length) or None


class InferenceConfig(_Section):
    """How models are served: `PENSTOCK_INFERENCE_*`, one section per concern."""

    enabled: bool = Field(default=True, description="Off: models run without cache, batching and compilation")
    max_level: int = Field(default=2, ge=0, le=4, description="Highest optimization level of models")
    frameworks: tuple[Literal["pytorch", "transformers", "onnxruntime"], ...] = Field(
        default=("pytorch", "transformers", "onnxruntime"), description="Frameworks that models may use"
    )
    device: Annotated[str, AfterValidator(_device)] = Field(default="auto", description="auto, cpu, cuda or cuda:N")
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
    metrics_buckets: Annotated[tuple[float, ...], AfterValidator(_increasing)] = Field(
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
    safeguards: SafeguardsConfig = SafeguardsConfig()

    def as_shown(self) -> dict[str, Any]:
        """The values as plain data, without URLs, which may hold passwords."""
        return self.model_dump(mode="json", exclude={"state_redis_url": True, "cache": {"redis_url"}})


class WorkerSettings(_Section):
    """The settings of one worker process, from its supervisor."""

    index: int | None = Field(default=None, ge=0, description="Device index; unset: the first that is free")
    models: tuple[Annotated[str, AfterValidator(_model)], ...] = Field(default=(), description="Models; empty: all")
    heartbeat_fd: int | None = Field(default=None, ge=0, description="Pipe on which the supervisor reads heartbeats")
    metrics_host: str = Field(
        default="127.0.0.1", min_length=1, description="Address of metrics; other than loopback only with a bearer file"
    )
    metrics_port: int | None = Field(default=None, ge=0, le=65_535, description="Unset: 9464 + index; 0: any free port")
    metrics_bearer_file: Folder | None = Field(default=None, description="File with the bearer token for readers")

    def probe_port(self, index: int) -> int:
        """The port of the metrics and health probe of the worker on device `index`; 0 means any free one."""
        return METRICS_PORT + index if self.metrics_port is None else self.metrics_port


class Settings(_Section):
    """All settings: addresses and keys, models (`inference`), this worker process (`worker`)."""

    inference: InferenceConfig = InferenceConfig()
    worker: WorkerSettings = WorkerSettings()
    redis_url: RedisUrl | None = Field(default=None, repr=False, description="The broker; unset: the embedded stack's")
    celery_url: str | None = Field(
        default_factory=lambda known: known["redis_url"],
        repr=False,
        description="Celery's broker; unset: the same as redis_url",
    )
    celery_result_url: str | None = Field(
        default=None,
        repr=False,
        description="Celery's result backend; unset: Celery's broker, or redis_url where that is not Redis",
    )
    home: Folder = Field(default=Path("~/.penstock"), description="Folder of Penstock's files")
    registry_url: str = Field(
        default_factory=lambda known: f"sqlite:///{known['home'] / 'registry.db'}",
        repr=False,
        description="Database of the model registry; unset: SQLite in `home`",
    )
    operator_key_file: Folder = Field(
        default_factory=lambda known: known["home"] / "operator.pem",
        description="Ed25519 key that signs registry records and control commands; unset: operator.pem in `home`",
    )
    operator_public_keys: str = Field(
        default="",
        description="id:base64[,id:base64] of the operators that workers trust; empty: signatures are not required",
    )
    tenant_id: Annotated[str, AfterValidator(_tenant)] = Field(
        default="default", description="Tenant of callers that name none"
    )
    trusted_roots: tuple[Folder, ...] = Field(
        default_factory=lambda known: (known["inference"].repo_root,),
        description="Folders whose packages may run code; unset: the models root",
    )
    signing_keys: SecretStr | None = Field(
        default=None, description="id:base64[,id:base64], the first signs; unset: signing is off"
    )
    audit_key: SecretStr | None = Field(default=None, description="Key of the audit log's chain")
    l2_encryption_key: SecretStr | None = Field(default=None, description="Key of the cache on disk")

    @field_validator("signing_keys")
    @classmethod
    def _refuse_unusable_keys(cls, secret: SecretStr | None) -> SecretStr | None:
        try:
            Keyring.parse(secret.get_secret_value() if secret else None)
        except ConfigurationError as problem:
            raise ValueError(str(problem)) from None
        return secret

    @classmethod
    def load(
        cls,
        config_file: Path | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        overrides: Mapping[str, object] | None = None,
    ) -> Settings:
        """The effective settings of this process.

        config_file: YAML, instead of the file that PENSTOCK_CONFIG names. overrides: the values of the constructor,
        by dotted key or nested: {"batching.max_wait_ms": 5} or {"batching": {"max_wait_ms": 5}}; None: not given.
        Raises ConfigurationError, in one line, for an unknown name or an unusable value.
        """
        environ = os.environ if environ is None else environ
        config_file = config_file or _named_config(environ)
        found: dict[str, _Found] = {}
        for layer in (
            _from_pyproject((cwd or Path.cwd()) / "pyproject.toml"),
            _from_yaml(config_file) if config_file else (),
            _from_environment(environ),
            _from_overrides(overrides or {}),
        ):
            found.update((each.key, each) for each in layer)
        return _build(found)

    def changed(self, overrides: Mapping[str, object]) -> Settings:
        """These settings with `overrides`, as for `load`. Defaults that follow another setting are set again.

        Raises ConfigurationError, in one line.
        """
        found = {each.key: each for each in _from_overrides(overrides)}
        return _validated(_placed(self.model_dump(exclude_unset=True), found), found)

    @property
    def keyring(self) -> Keyring:
        """The live signing keys; empty while signing is off."""
        return Keyring.parse(self.signing_keys.get_secret_value() if self.signing_keys else None)

    @property
    def is_lane_open(self) -> bool:
        """Whether jobs may come through Celery's send_task, which are not signed."""
        lane = self.inference.celery.lane
        return lane == "trusted" or (lane == "auto" and not self.keyring.signs)


class Setting(NamedTuple):
    """One setting. `default` is None if it is unset or follows another setting."""

    key: str
    variable: str
    default: object
    description: str
    is_list: bool
    is_secret: bool


class _Found(NamedTuple):
    key: str
    value: object
    origin: str


_WORKER_VARIABLES: Final = {
    "worker.heartbeat_fd": "PENSTOCK_HEARTBEAT_FD",
    "worker.metrics_host": "PENSTOCK_METRICS_HOST",
    "worker.metrics_port": "PENSTOCK_METRICS_PORT",
    "worker.metrics_bearer_file": "PENSTOCK_METRICS_BEARER_FILE",
}
_ALIASES: Final = {
    "batching.max_batch_latency_ms": "batching.max_wait_ms",
    "batching.batch_timeout_ms": "batching.max_wait_ms",
    "inference_timeout_s": "timeout_seconds",
    "model.device": "device",
    "model.path": "repo_root",
    "model.precision": "precision",
    "model.version": "model_version",
    "performance.max_batch_size": "batching.max_batch_size",
    "performance.max_batch_latency_ms": "batching.max_wait_ms",
    "performance.batch_timeout_ms": "batching.max_wait_ms",
    "performance.inference_timeout_s": "timeout_seconds",
    "safeguards.max_request_size_mb": "max_request_size_mb",
}
_UNDER_HOME: Final = {"compilation.cache_dir": "inference_cache", "privacy.audit_log_path": "audit"}


def catalogue() -> Iterator[Setting]:
    """All settings, in the order of the sections."""
    yield from _settings_of(InferenceConfig, "", f"{_PREFIX}INFERENCE_")
    yield from (setting for setting in _settings_of(Settings, "", _PREFIX) if "." not in setting.key)
    yield from _settings_of(WorkerSettings, "worker.", f"{_PREFIX}WORKER_")


def _settings_of(section: type[_Section], path: str, prefix: str) -> Iterator[Setting]:
    for name, field in section.model_fields.items():
        key, variable = path + name, prefix + name.upper()
        if isinstance(field.default, _Section):
            yield from _settings_of(type(field.default), f"{key}.", f"{variable}_")
            continue
        default = None if field.default_factory else field.default
        yield Setting(
            key,
            _WORKER_VARIABLES.get(key, variable),
            default,
            field.description or "",
            is_list=get_origin(field.annotation) is tuple,
            is_secret=SecretStr in get_args(field.annotation),
        )


_SETTINGS: Final = {setting.key: setting for setting in catalogue()}
_KEYS_BY_VARIABLE: Final = {setting.variable: setting.key for setting in _SETTINGS.values()}
_SECTIONS: Final = frozenset(
    name[:end] for name in (*_SETTINGS, *_ALIASES) for end, letter in enumerate(name) if letter == "."
)


def _from_environment(environ: Mapping[str, str]) -> Iterator[_Found]:
    for variable, text in environ.items():
        if not variable.startswith(_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        key = _KEYS_BY_VARIABLE.get(variable)
        if key is None:
            raise _unknown("variable", variable, (*_KEYS_BY_VARIABLE, CONFIG_VARIABLE))
        # Compose files pass `${NAME:-}`, so an empty variable counts as unset.
        if text:
            yield _Found(key, _split(text) if _SETTINGS[key].is_list else text, variable)


def _from_overrides(overrides: Mapping[str, object]) -> Iterator[_Found]:
    for key, value in _flat(overrides):
        if key not in _SETTINGS:
            raise _unknown("setting", key, _SETTINGS)
        if value is not None:
            yield _Found(key, value, key)


def _from_yaml(path: Path) -> list[_Found]:
    # A client seldom reads a file of settings, and the packages of models are much to import.
    from penstock.registry.package.bounded_yaml import BadDocument, read_yaml

    try:
        document = read_yaml(_read(path).encode())
    except BadDocument as problem:
        raise ConfigurationError(f"{path.name}{problem}") from None
    return _from_table({} if document is None else document, path.name)


def _from_pyproject(path: Path) -> list[_Found]:
    if not path.is_file():
        return []
    try:
        tools = tomllib.loads(_read(path)).get("tool")
    except tomllib.TOMLDecodeError as problem:
        raise ConfigurationError(f"{path.name} is not valid TOML: {problem}") from None
    penstock = tools.get("penstock") if isinstance(tools, dict) else None
    if not isinstance(penstock, dict):
        return []
    for table in penstock:
        if table != "inference":
            raise _unknown("table", f"tool.penstock.{table} in {path.name}", ("tool.penstock.inference",))
    return _from_table(penstock.get("inference", {}), path.name)


def _from_table(table: object, source: str) -> list[_Found]:
    if not isinstance(table, Mapping):
        raise ConfigurationError(f"{source} holds {type(table).__name__}. Expected a table of settings")
    found: dict[str, _Found] = {}
    for name, value in _flat(table):
        key, origin = _ALIASES.get(name, name), f"{name} in {source}"
        if key not in _SETTINGS:
            raise _unknown("setting", origin, _SETTINGS)
        if _SETTINGS[key].is_secret:
            raise ConfigurationError(f"{origin} is a secret. Expected it in {_SETTINGS[key].variable} only")
        if key in found:
            raise ConfigurationError(f"{origin} and {found[key].origin} are the same setting. Expected one of them")
        found[key] = _Found(key, value, origin)
    return list(found.values())


def _flat(table: Mapping[Any, object], path: str = "") -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        key = f"{path}{name}"
        if isinstance(value, Mapping) and (value or key in _SECTIONS):
            yield from _flat(value, f"{key}.")
        elif value is not None or key not in _SECTIONS:
            yield key, value


def _split(text: str) -> list[object]:
    """The items of a list in a variable: separated by commas, or as JSON if they contain commas."""
    if text.startswith("["):
        try:
            items = json.loads(text)
        except json.JSONDecodeError:
            pass  # A single pattern such as `[0-9]+` also begins like this.
        else:
            return list(items)
    return [item for item in map(str.strip, text.split(",")) if item]


def _build(found: dict[str, _Found]) -> Settings:
    values: dict[str, Any] = {"inference": {}, "worker": {}}
    if home := found.get("home"):
        for key, folder in _UNDER_HOME.items():
            found.setdefault(key, _Found(key, Path(str(home.value)) / folder, home.origin))
    return _validated(_placed(values, found), found)


def _placed(values: dict[str, Any], found: Mapping[str, _Found]) -> dict[str, Any]:
    """`values` by section, with the found values in their places."""
    for key, value, _ in found.values():
        *path, name = _place(key)
        section = values
        for step in path:
            section = section.setdefault(step, {})
        section[name] = value
    return values


def _validated(values: dict[str, Any], found: Mapping[str, _Found]) -> Settings:
    try:
        return Settings.model_validate(values)
    except ValidationError as problem:
        raise _misfit(problem, found) from None


def _place(key: str) -> list[str]:
    path = key.split(".")
    return path if path[0] == "worker" or key in Settings.model_fields else ["inference", *path]


def _misfit(problem: ValidationError, found: Mapping[str, _Found]) -> ConfigurationError:
    first = problem.errors(include_url=False, include_context=False, include_input=False)[0]
    path = [str(step) for step in first["loc"] if step != "inference"]
    key = next(key for length in (3, 2, 1) if (key := ".".join(path[:length])) in found)
    expectation = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    value = found[key].value
    # URLs may carry a password.
    is_shown = not _SETTINGS[key].is_secret and not key.endswith("url")
    shown = f"; found {value!r:.80}" if is_shown else ""
    return ConfigurationError(f"Bad value of {found[key].origin}: {expectation.replace('tuple', 'list')}{shown}")


def _unknown(kind: str, name: str, known: Iterable[str]) -> ConfigurationError:
    nearest = difflib.get_close_matches(name.partition(" in ")[0], known, n=1, cutoff=0.0)
    return ConfigurationError(f"Unknown {kind} {shown(name)}. The nearest that exists is {nearest[0]}")


def _named_config(environ: Mapping[str, str]) -> Path | None:
    name = environ.get(CONFIG_VARIABLE)
    return Path(name) if name else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as problem:
        raise ConfigurationError(f"Cannot read {path.name}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path.name} is not UTF-8 text") from None
