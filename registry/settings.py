"""Every setting: its key, its variable, its default, and the source of its value. The sections: settings_sections.py.

    constructor > environment > --config YAML > [tool.penstock.inference] of pyproject.toml > default

The first source that has a key decides its value. An unknown name is an error in every source: a misspelt setting
must not be silently ignored. Secrets come from the environment or the constructor only, and are never shown.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, get_args, get_origin

from pydantic import AfterValidator, Field, SecretStr, ValidationError, field_validator

from penstock.registry.audit_keys import parse_audit_keys
from penstock.registry.data_keys import parse_data_keys
from penstock.registry.envelope import Keyring
from penstock.registry.errors import ConfigurationError, shown
from penstock.registry.queues import parse_name
from penstock.registry.settings_sections import InferenceConfig, WorkerSettings
from penstock.registry.settings_types import Folder, RedisUrl, Section
from penstock.registry.webhook_secrets import parse_secrets

__all__ = ["Setting", "Settings", "catalogue"]

CONFIG_VARIABLE: Final = "PENSTOCK_CONFIG"
_PREFIX: Final = "PENSTOCK_"


def _tenant(name: str) -> str:
    return parse_name("tenant", name)


class Settings(Section):
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
    webhook_secrets: SecretStr | None = Field(
        default=None, description="whsec_base64[,whsec_base64], each signs the webhooks; unset: none is delivered"
    )
    audit_key: SecretStr | None = Field(
        default=None, description="Keys of the audit log, hex or base64, the first writes; unset: audit.key in `home`"
    )
    l2_encryption_key: SecretStr | None = Field(
        default=None,
        description="key[,key], each 32 bytes as 64 hex digits or as base64: the data keys of the key source env; the "
        "first seals, all open",
    )
    pkcs11_pin: SecretStr | None = Field(default=None, description="PIN of the token of the key source hsm")

    @field_validator("signing_keys")
    @classmethod
    def _refuse_unusable_keys(cls, secret: SecretStr | None) -> SecretStr | None:
        try:
            Keyring.parse(secret.get_secret_value() if secret else None)
        except ConfigurationError as problem:
            raise ValueError(str(problem)) from None
        return secret

    @field_validator("audit_key")
    @classmethod
    def _refuse_unusable_audit_keys(cls, secret: SecretStr | None) -> SecretStr | None:
        try:
            parse_audit_keys(secret.get_secret_value() if secret else "")
        except ConfigurationError as problem:
            raise ValueError(str(problem)) from None
        return secret

    @field_validator("webhook_secrets")
    @classmethod
    def _refuse_unusable_secrets(cls, secret: SecretStr | None) -> SecretStr | None:
        try:
            parse_secrets(secret.get_secret_value() if secret else "")
        except ConfigurationError as problem:
            raise ValueError(str(problem)) from None
        return secret

    @field_validator("l2_encryption_key")
    @classmethod
    def _refuse_unusable_data_keys(cls, secret: SecretStr | None) -> SecretStr | None:
        try:
            parse_data_keys(secret.get_secret_value() if secret else "")
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
        by dotted key, nested, or as a section of which only the given values count: {"batching.max_wait_ms": 5},
        {"batching": {"max_wait_ms": 5}} or {"batching": BatchingConfig(max_wait_ms=5)}; None: not given.
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
        """The live signing keys; empty while signing is off. The data keys: safety.payload_keys.envelope_keys."""
        return Keyring.parse(self.signing_keys.get_secret_value() if self.signing_keys else None)

    @property
    def is_lane_open(self) -> bool:
        """Whether jobs may come through Celery's send_task, which are neither signed nor sealed."""
        lane = self.inference.celery.lane
        if self.inference.seals_payloads:
            return False
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
_UNDER_HOME: Final = {
    "batches.path": "files",
    "cache.l2_path": "inference_cache/cache.db",
    "compilation.cache_dir": "inference_cache",
    "privacy.audit_log_path": "audit",
    "privacy.encryption_key_file": "data.key",
}


def catalogue() -> Iterator[Setting]:
    """All settings, in the order of the sections."""
    yield from _settings_of(InferenceConfig, "", f"{_PREFIX}INFERENCE_")
    yield from (setting for setting in _settings_of(Settings, "", _PREFIX) if "." not in setting.key)
    yield from _settings_of(WorkerSettings, "worker.", f"{_PREFIX}WORKER_")


def _settings_of(section: type[Section], path: str, prefix: str) -> Iterator[Setting]:
    for name, field in section.model_fields.items():
        key, variable = path + name, prefix + name.upper()
        if isinstance(field.default, Section):
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
        if isinstance(value, Section):
            # A section that a program made: its values are those that it was given.
            value = value.model_dump(exclude_unset=True)
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
    is_shown = not _SETTINGS[key].is_secret and not key.endswith(("url", "alert_webhooks"))
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
