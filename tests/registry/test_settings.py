"""Settings: the table of keys, the precedence of their sources, and what is refused."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from penstock.registry.audit_keys import new_audit_key
from penstock.registry.data_keys import new_data_key
from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Setting, Settings, catalogue
from penstock.registry.settings_sections import METRICS_PORT, InferenceConfig, PrivacyConfig
from penstock.registry.webhook_secrets import new_secret

SETTINGS = {setting.key: setting for setting in catalogue()}
READABLE = [setting for setting in SETTINGS.values() if not setting.is_secret]
SECRETS = [setting for setting in SETTINGS.values() if setting.is_secret]
DATA_KEY = new_data_key()
AUDIT_KEY = "5eadbeef" * 8
SIGNING_KEY = "k1:c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3JldC0="

CF_KEYS = {
    "enabled": True,
    "max_level": 2,
    "frameworks": ("pytorch", "transformers", "onnxruntime"),
    "batching.enabled": True,
    "batching.max_batch_size": 0,
    "batching.max_queue_depth": 1024,
    "batching.max_wait_ms": 50.0,
    "batching.target_latency_ms": 100.0,
    "batching.gpu_headroom_pct": 20,
    "compilation.enabled": True,
    "compilation.backend": "auto",
    "compilation.cache_dir": Path("~/.penstock/inference_cache"),
    "compilation.warmup_requests": 3,
    "compilation.tolerance": 1e-5,
    "cache.enabled": True,
    "cache.l1_size": 10_000,
    "cache.ttl_seconds": 86_400.0,
    "cache.privacy_mode": "ephemeral",
    "cache.redis_url": "",
    "privacy.mode": "ephemeral",
    "privacy.redact_patterns": (),
    "privacy.cache_tenant_isolation": True,
    "privacy.audit_log_enabled": True,
    "privacy.audit_log_path": Path("~/.penstock/audit/"),
    "privacy.encrypt_at_rest": True,
    "privacy.encryption_key_source": "env",
}
OTHER_INFERENCE_KEYS = {
    "privacy.encryption_key_file": Path("~/.penstock/data.key"),
    "privacy.pkcs11_module": None,
    "privacy.pkcs11_token": "",
    "privacy.pkcs11_key": "penstock",
    "batching.max_queue_bytes": 1 << 28,
    "privacy.audit_cache_accesses": "counted",
    "privacy.audit_group_ms": 0.0,
    "device": "auto",
    "repo_root": Path("models"),
    "model_version": "latest",
    "preload": True,
    "load_timeout_s": 300.0,
    "model_memory_mb": 0,
    "precision": "auto",
    "uvicorn_access_log": False,
    "metrics_buckets": (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28),
    "state_redis_url": "",
    "state_prefix": "penstock:model_state",
    "state_reconcile_enabled": True,
    "state_reconcile_interval_s": 5.0,
    "timeout_seconds": 30.0,
    "max_request_size_mb": 10,
    "batching.single_flight": True,
    "cache.l1_max_bytes": 1 << 28,
    "cache.l2_max_bytes": 1 << 30,
    "cache.l2_path": Path("~/.penstock/inference_cache/cache.db"),
    "cache.lookup_timeout_ms": 50.0,
    "privacy.redact_detectors": (),
    "privacy.accept_shared_cache": False,
    "privacy.seal_payloads": "auto",
    "cache.key_prefix": "penstock:cache:",
    "cache.socket_timeout_s": 5.0,
    "cache.producer_lookup": False,
    "privacy.presidio_entities": (),
    "open_telemetry.traces": False,
    "open_telemetry.metrics": False,
    "queue.lease_s": 5.0,
    "queue.max_crashes": 3,
    "queue.progress_timeout_s": 45.0,
    "queue.drain_grace_s": 10.0,
    "queue.ageing_s": 2.0,
    "queue.max_depth": 100_000,
    "queue.tenant_max_in_flight": 0,
    "queue.job_ttl_s": 86_400.0,
    "queue.result_ttl_s": 3_600.0,
    "queue.max_event_bytes": 1 << 24,
    "queue.client_tracebacks": False,
    "celery.lane": "auto",
    "celery.default_queue": "celery",
    "celery.events": True,
    "celery.events_interval_ms": 50,
    "celery.remote_control": False,
    "server.host": "127.0.0.1",
    "server.port": 8000,
    "server.grpc_enabled": True,
    "server.grpc_port": 50_051,
    "server.workers": 1,
    "server.max_waiting": 1024,
    "server.max_streams": 4096,
    "server.client_timeout_s": 30.0,
    "server.stop_grace_s": 30.0,
    "server.api_keys": "auto",
    "server.address_header": "",
    "server.model_control": False,
    "server.metrics": True,
    "server.websocket_idle_s": 60.0,
    "server.websocket_requests": 64,
    "server.websocket_messages_per_s": 1000,
    "server.allowed_origins": (),
    "server.allowed_hosts": (),
    "batches.path": Path("~/.penstock/files"),
    "batches.max_file_mb": 200,
    "batches.max_stored_mb": 10_240,
    "batches.keep_s": 2_592_000.0,
    "batches.max_outstanding": 2048,
    "safeguards.rate_limit.enabled": False,
    "safeguards.rate_limit.requests_per_minute": 1000,
    "safeguards.rate_limit.tenant_requests_per_minute": 0,
    "safeguards.rate_limit.address_requests_per_minute": 0,
    "safeguards.rate_limit.routes": (),
    "safeguards.input_validation.enabled": True,
    "safeguards.input_validation.max_sequence_length": 0,
    "runtime_hosts": (),
    "webhooks.allow": (),
    "webhooks.timeout_s": 30.0,
    "webhooks.connect_timeout_s": 5.0,
    "webhooks.in_flight": 64,
    "webhooks.per_host": 4,
    "safety.spot_check_share": 0.01,
    "safety.alert_webhooks": (),
    "safety.min_off_s": 300.0,
    "safety.max_off_s": None,
    "safety.min_on_s": 60.0,
    "safety.min_passes": 3,
    "safety.breaker_failures": 3,
    "safety.breaker_window_s": 60.0,
    "safety.probe_lease_s": 600.0,
    "safety.drift_smoothing": 0.05,
    "safety.drift_width": 5.5,
    "safety.drift_reference_size": 200,
    "safety.drift_adwin_delta": 0.0,
    "cost.hourly_rate": None,
    "cost.gpu_name": "",
    "cost.hourly_rates": (),
    "cost.currency": "USD",
}
OTHER_VARIABLES = {
    "PENSTOCK_REDIS_URL",
    "PENSTOCK_CELERY_URL",
    "PENSTOCK_CELERY_RESULT_URL",
    "PENSTOCK_REGISTRY_URL",
    "PENSTOCK_HOME",
    "PENSTOCK_OPERATOR_KEY_FILE",
    "PENSTOCK_OPERATOR_PUBLIC_KEYS",
    "PENSTOCK_TENANT_ID",
    "PENSTOCK_SIGNING_KEYS",
    "PENSTOCK_WEBHOOK_SECRETS",
    "PENSTOCK_AUDIT_KEY",
    "PENSTOCK_L2_ENCRYPTION_KEY",
    "PENSTOCK_PKCS11_PIN",
    "PENSTOCK_TRUSTED_ROOTS",
    "PENSTOCK_WORKER_INDEX",
    "PENSTOCK_WORKER_MODELS",
    "PENSTOCK_HEARTBEAT_FD",
    "PENSTOCK_METRICS_HOST",
    "PENSTOCK_METRICS_PORT",
    "PENSTOCK_METRICS_BEARER_FILE",
}

# For each key whose type does not say it: four values, each different from its neighbour, the last from the default.
WALKS: dict[str, list[object]] = {
    "max_level": [0, 1, 3, 4],
    "max_request_size_mb": [9, 8, 7, 6],
    "frameworks": [["pytorch"], ["transformers"], ["onnxruntime"], ["pytorch", "onnxruntime"]],
    "device": ["cpu", "cuda", "cuda:0", "cuda:1"],
    "precision": ["fp32", "fp16", "fp32", "bf16"],
    "metrics_buckets": [[0.1, 1.0], [0.2, 1.0], [0.3, 1.0], [0.4, 1.0]],
    "compilation.tolerance": [1e-4, 2e-4, 3e-4, 4e-4],
    "compilation.backend": ["auto", "cudagraphs", "auto", "inductor"],
    "cache.privacy_mode": ["ephemeral", "persisted_encrypted", "ephemeral", "hashes_only"],
    "privacy.mode": ["ephemeral", "persisted_encrypted", "ephemeral", "hashes_only"],
    "privacy.seal_payloads": ["auto", "off", "auto", "on"],
    "safety.spot_check_share": [0.1, 0.2, 0.3, 0.4],
    "safety.max_off_s": [4000.0, 5000.0, 6000.0, 7000.0],
    "safety.drift_smoothing": [0.1, 0.2, 0.3, 0.4],
    "safety.drift_adwin_delta": [0.1, 0.2, 0.3, 0.4],
    "safety.alert_webhooks": [
        ["https://a.example/"],
        ["https://b.example/x", "https://c.example/"],
        [],
        ["https://d/"],
    ],
    "privacy.redact_patterns": [["a{1,2},b"], ["[0-9]+", "x"], ["c"], ["d"]],
    "privacy.redact_detectors": [["ssn"], ["email"], ["payment_card", "ssn"], ["email", "ssn"]],
    "privacy.audit_cache_accesses": ["counted", "off", "counted", "sampled"],
    "privacy.presidio_entities": [["IBAN_CODE"], ["UUID", "CRYPTO"], ["CRYPTO"], ["UUID"]],
    "privacy.encryption_key_source": ["env", "hsm", "env", "file"],
    "celery.lane": ["auto", "trusted", "auto", "off"],
    "server.api_keys": ["auto", "off", "auto", "required"],
    "server.address_header": ["x-a", "x-b", "x-c", "x-d"],
    "safeguards.rate_limit.routes": [["/a=1"], ["/b=2", "/c=3"], ["/d=4"], ["/e=5"]],
    "server.allowed_origins": [["https://a"], ["https://b", "*"], ["c"], ["d"]],
    "server.allowed_hosts": [["a.example"], ["b.example", "*"], ["c"], ["d"]],
    "runtime_hosts": [["10.0.0.0/8"], ["a.internal", "b"], ["c"], ["d"]],
    "webhooks.allow": [["10.0.0.0/8"], ["a.internal", "b"], ["c"], ["d"]],
    "cost.hourly_rate": [0.5, 1.5, 2.5, 3.5],
    "cost.hourly_rates": [["L4=0.8"], ["NVIDIA H200=4", "A100_80GB=2.5"], ["L4=1"], ["L4=2"]],
    "cost.currency": ["EUR", "GBP", "CHF", "JPY"],
    "trusted_roots": [["/r1"], ["/r2", "/r3"], ["/r4"], ["/r5"]],
    "worker.models": [["m1"], ["m2", "m3"], ["m4"], ["m5"]],
    "worker.index": [1, 2, 3, 4],
    "worker.heartbeat_fd": [3, 4, 5, 6],
    "worker.metrics_port": [0, 9001, 9002, 9003],
    "worker.metrics_host": ["127.0.0.2", "127.0.0.3", "127.0.0.4", "::1"],
}


def walk(setting: Setting) -> list[object]:
    """Values for constructor, environment, YAML and TOML."""
    if setting.key in WALKS:
        return WALKS[setting.key]
    if isinstance(setting.default, bool):
        return [setting.default, not setting.default] * 2
    if isinstance(setting.default, int | float):
        return [setting.default + step for step in (1, 2, 3, 4)]
    if setting.key.endswith("url"):
        return [f"redis://host{n}:6379/0" for n in range(4)]
    return [f"/place{n}" if setting.key != "tenant_id" else f"tenant{n}" for n in range(4)]


def nested(key: str, value: object) -> dict[str, object]:
    for name in reversed(key.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def write_yaml(folder: Path, table: Mapping[str, object]) -> Path:
    path = folder / "penstock.yaml"
    path.write_text(yaml.safe_dump(table))
    return path


def write_toml(folder: Path, key: str, value: object) -> None:
    section, _, name = key.rpartition(".")
    header = f"tool.penstock.inference.{section}".removesuffix(".")
    (folder / "pyproject.toml").write_text(f"[{header}]\n{name} = {json.dumps(value)}\n")


def write_toml_tables(folder: Path, table: Mapping[str, object]) -> None:
    """The table under [tool.penstock.inference], inline."""
    lines = [f"{name} = {inline(value)}" for name, value in table.items()]
    (folder / "pyproject.toml").write_text("\n".join(["[tool.penstock.inference]", *lines]))


def inline(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {inline(part)}" for name, part in value.items()) + "}"
    return json.dumps(value)


def as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def effective(settings: Settings, key: str) -> object:
    value: object = settings if key.startswith("worker.") or key in Settings.model_fields else settings.inference
    for name in key.split("."):
        value = getattr(value, name)
    return plain(value)


def plain(value: object) -> object:
    """Lists for tuples and text for paths, so that what was written compares with what was read."""
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return str(value.expanduser()) if isinstance(value, Path) else value


def refusal(environ: Mapping[str, str], folder: Path, config_file: Path | None = None) -> str:
    with pytest.raises(ConfigurationError) as refused:
        Settings.load(config_file, environ=environ, cwd=folder)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("setting", READABLE, ids=lambda setting: setting.key)
def test_sources_win_in_the_documented_order(setting: Setting, tmp_path: Path):
    """With a value in every source the constructor's holds; removing source after source walks to the default."""
    constructor, variable, in_yaml, in_toml = walk(setting)
    default = effective(Settings(), setting.key)
    overrides, environ = {setting.key: constructor}, {setting.variable: as_text(variable)}
    config_file = write_yaml(tmp_path, nested(setting.key, in_yaml))
    write_toml(tmp_path, setting.key, in_toml)

    def read(config_file: Path | None = None, environ: Mapping[str, str] = {}, overrides: Mapping = {}) -> object:
        settings = Settings.load(config_file, environ=environ, cwd=tmp_path, overrides=overrides)
        return effective(settings, setting.key)

    walked = [read(config_file, environ, overrides), read(config_file, environ), read(config_file), read()]
    (tmp_path / "pyproject.toml").unlink()
    assert walked == [plain(constructor), plain(variable), plain(in_yaml), plain(in_toml)]
    assert read() == default != plain(in_toml)


@pytest.mark.parametrize("setting", SECRETS, ids=lambda setting: setting.key)
def test_secrets_come_from_the_environment_or_the_constructor(setting: Setting, tmp_path: Path):
    """A secret is read from its variable and from the constructor, and refused in a file without being shown."""
    first, second = SIGNING_KEY, SIGNING_KEY.replace("k1", "k2")
    if setting.key == "webhook_secrets":
        first, second = new_secret(), new_secret()
    if setting.key == "audit_key":
        first, second = new_audit_key(), new_audit_key()
    elif setting.key == "l2_encryption_key":
        first, second = new_data_key(), new_data_key()
    by_variable = Settings.load(environ={setting.variable: first}, cwd=tmp_path)
    by_constructor = Settings.load(environ={setting.variable: first}, cwd=tmp_path, overrides={setting.key: second})
    assert getattr(by_variable, setting.key).get_secret_value() == first
    assert getattr(by_constructor, setting.key).get_secret_value() == second
    message = refusal({}, tmp_path, write_yaml(tmp_path, {setting.key: first}))
    assert setting.variable in message
    assert first not in message


def test_every_documented_key_exists_with_its_default():
    """The inference settings are exactly the documented ones, each with its documented default."""
    documented = CF_KEYS | OTHER_INFERENCE_KEYS
    found = {
        key: setting.default for key, setting in SETTINGS.items() if setting.variable.startswith("PENSTOCK_INFERENCE_")
    }
    assert found == documented
    assert len(CF_KEYS) == 26


def test_every_key_has_the_variable_that_its_name_says():
    """`batching.max_wait_ms` is PENSTOCK_INFERENCE_BATCHING_MAX_WAIT_MS; where things are has no INFERENCE_."""
    for key in CF_KEYS | OTHER_INFERENCE_KEYS:
        assert SETTINGS[key].variable == "PENSTOCK_INFERENCE_" + key.replace(".", "_").upper()
    others = {setting.variable for setting in SETTINGS.values()} - {
        SETTINGS[key].variable for key in CF_KEYS | OTHER_INFERENCE_KEYS
    }
    assert others == OTHER_VARIABLES


def test_every_setting_is_described():
    """The settings table has a text for every line."""
    assert [setting.key for setting in catalogue() if not setting.description] == []


def test_sources_are_merged_key_by_key(tmp_path: Path):
    """A source that sets one key of a section leaves the section's other keys to the sources below."""
    write_toml(tmp_path, "batching.max_wait_ms", 7.0)
    config_file = write_yaml(tmp_path, {"batching": {"max_batch_size": 16}})
    environ = {"PENSTOCK_INFERENCE_BATCHING_ENABLED": "false"}
    batching = Settings.load(config_file, environ=environ, cwd=tmp_path).inference.batching
    assert (batching.max_wait_ms, batching.max_batch_size, batching.enabled) == (7.0, 16, False)


def test_a_process_reads_its_own_environment_and_folder(tmp_path: Path):
    """Without arguments the sources are the process's variables, its working directory and PENSTOCK_CONFIG's file."""
    write_toml(tmp_path, "device", "cpu")
    config_file = write_yaml(tmp_path, {"preload": False})
    shown = subprocess.run(
        [
            sys.executable,
            "-c",
            "from penstock.registry.settings import Settings; settings = Settings.load();"
            "print(settings.inference.device, settings.inference.preload, settings.tenant_id)",
        ],
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "PENSTOCK_CONFIG": str(config_file),
            "PENSTOCK_TENANT_ID": "acme",
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
    )
    assert shown.stdout.split() == ["cpu", "False", "acme"]


def test_the_given_config_file_wins_over_the_named_one(tmp_path: Path):
    """`config_file` is read instead of PENSTOCK_CONFIG's file."""
    named = write_yaml(tmp_path, {"device": "cuda"}).rename(tmp_path / "named.yaml")
    given = write_yaml(tmp_path, {"device": "cpu"})
    environ = {"PENSTOCK_CONFIG": str(named)}
    assert Settings.load(environ=environ, cwd=tmp_path).inference.device == "cuda"
    assert Settings.load(given, environ=environ, cwd=tmp_path).inference.device == "cpu"


def test_overrides_may_be_nested_and_skip_what_was_not_given(tmp_path: Path):
    """The constructor's part reads like a YAML file, and None there changes nothing."""
    overrides = {"batching": {"max_wait_ms": 5}, "device": None}
    settings = Settings.load(environ={}, cwd=tmp_path, overrides=overrides)
    assert settings.inference.batching.max_wait_ms == 5.0
    assert settings.inference.device == "auto"


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ({"performance": {"max_batch_size": 64}}, "batching.max_batch_size", 64),
        ({"performance": {"batch_timeout_ms": 40}}, "batching.max_wait_ms", 40.0),
        ({"performance": {"inference_timeout_s": 20}}, "timeout_seconds", 20.0),
        ({"batching": {"max_batch_latency_ms": 30}}, "batching.max_wait_ms", 30.0),
        ({"batching": {"batch_timeout_ms": 20}}, "batching.max_wait_ms", 20.0),
        ({"inference_timeout_s": 10}, "timeout_seconds", 10.0),
        ({"safeguards": {"max_request_size_mb": 5}}, "max_request_size_mb", 5),
        ({"model": {"device": "cuda"}}, "device", "cuda"),
        ({"model": {"path": "/srv/models"}}, "repo_root", "/srv/models"),
        ({"model": {"version": "v1.2.0"}}, "model_version", "v1.2.0"),
        ({"model": {"precision": "fp16"}}, "precision", "fp16"),
    ],
)
def test_other_names_of_a_setting_are_understood_in_files(table, key, value, tmp_path: Path):
    """A profile written with the names of other servers loads to the same settings."""
    settings = Settings.load(write_yaml(tmp_path, table), environ={}, cwd=tmp_path)
    assert effective(settings, key) == value


PROFILE = {
    "server": {"host": "192.0.2.1", "port": 8080, "workers": 4},
    "model": {"path": "/srv/models", "version": "v1.2.0", "device": "cuda", "precision": "fp16"},
    "performance": {"max_batch_size": 64, "batch_timeout_ms": 50, "inference_timeout_s": 30},
    "safeguards": {
        "max_request_size_mb": 10,
        "rate_limit": {"enabled": True, "requests_per_minute": 1000},
        "input_validation": {"enabled": True, "max_sequence_length": 512},
    },
}
PROFILE_VARIABLES = {
    "SERVER_HOST": "192.0.2.1",
    "SERVER_PORT": "8080",
    "SERVER_WORKERS": "4",
    "REPO_ROOT": "/srv/models",
    "MODEL_VERSION": "v1.2.0",
    "DEVICE": "cuda",
    "PRECISION": "fp16",
    "BATCHING_MAX_BATCH_SIZE": "64",
    "BATCHING_MAX_WAIT_MS": "50",
    "TIMEOUT_SECONDS": "30",
    "MAX_REQUEST_SIZE_MB": "10",
    "SAFEGUARDS_RATE_LIMIT_ENABLED": "true",
    "SAFEGUARDS_RATE_LIMIT_REQUESTS_PER_MINUTE": "1000",
    "SAFEGUARDS_INPUT_VALIDATION_ENABLED": "true",
    "SAFEGUARDS_INPUT_VALIDATION_MAX_SEQUENCE_LENGTH": "512",
}


def test_one_profile_loads_alike_from_yaml_toml_and_the_environment(tmp_path: Path):
    """The profile of another server, with every section of it, gives equal settings (CX-019 to CX-022)."""
    from_yaml = Settings.load(write_yaml(tmp_path, PROFILE), environ={}, cwd=tmp_path)
    environ = {f"PENSTOCK_INFERENCE_{name}": text for name, text in PROFILE_VARIABLES.items()}
    from_environment = Settings.load(environ=environ, cwd=tmp_path)
    write_toml_tables(tmp_path, PROFILE)
    from_toml = Settings.load(environ={}, cwd=tmp_path)
    assert from_yaml == from_toml == from_environment != Settings()
    assert (from_yaml.inference.server.host, from_yaml.inference.server.port) == ("192.0.2.1", 8080)
    assert from_yaml.inference.model_version == "v1.2.0"
    assert from_yaml.inference.batching.max_wait_ms == 50.0
    assert from_yaml.inference.safeguards.max_sequence_length == 512


@pytest.mark.parametrize(
    ("table", "limit"),
    [({}, None), ({"max_sequence_length": 512}, 512), ({"enabled": False, "max_sequence_length": 512}, None)],
)
def test_sequences_are_limited_only_where_a_limit_is_set(table, limit, tmp_path: Path):
    """Without a setting, or with the check off, a model's own limit holds (CX-022)."""
    config_file = write_yaml(tmp_path, {"safeguards": {"input_validation": table}})
    settings = Settings.load(config_file, environ={}, cwd=tmp_path)
    assert settings.inference.safeguards.max_sequence_length == limit


def test_two_names_of_one_setting_in_a_file_are_refused(tmp_path: Path):
    """A file that sets a setting twice does not say which value is meant."""
    config_file = write_yaml(tmp_path, {"batching": {"max_wait_ms": 5, "batch_timeout_ms": 6}})
    message = refusal({}, tmp_path, config_file)
    assert "batching.max_wait_ms in penstock.yaml" in message
    assert "batching.batch_timeout_ms in penstock.yaml" in message


def test_misspelt_variable_is_refused_with_the_nearest_name(tmp_path: Path):
    """An unknown variable with our prefix is an error that names it and the nearest variable."""
    message = refusal({"PENSTOCK_INFERENCE_BATCHNG_MAX_WAIT_MS": "5"}, tmp_path)
    assert "PENSTOCK_INFERENCE_BATCHNG_MAX_WAIT_MS" in message
    assert "PENSTOCK_INFERENCE_BATCHING_MAX_WAIT_MS" in message


@pytest.mark.parametrize(
    ("table", "named", "nearest"),
    [
        ({"batching": {"max_wait": 5}}, "batching.max_wait in penstock.yaml", "batching.max_wait_ms"),
        ({"batchng": {"enabled": True}}, "batchng.enabled in penstock.yaml", "batching.enabled"),
        ({"celry": {}}, "celry in penstock.yaml", "celery"),
        ({"batching": 5}, "batching in penstock.yaml", "batching.enabled"),
        ({"safeguards": {"rate_limit": {"enabld": True}}}, "safeguards.rate_limit.enabld", "rate_limit.enabled"),
    ],
)
def test_misspelt_key_is_refused_with_the_nearest_name(table, named, nearest, tmp_path: Path):
    """An unknown key is an error that names it, its file and the nearest key."""
    message = refusal({}, tmp_path, write_yaml(tmp_path, table))
    assert named in message
    assert nearest in message


def test_misspelt_pyproject_table_is_refused(tmp_path: Path):
    """[tool.penstock.inferense] is not silently ignored; tables of other tools are."""
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text("[tool.other]\nx = 1\n[tool.penstock.inferense]\nmax_level = 1\n")
    assert "tool.penstock.inferense in pyproject.toml" in refusal({}, tmp_path)


def test_unknown_setting_in_the_constructor_is_refused(tmp_path: Path):
    """The constructor's part is held to the same names."""
    with pytest.raises(ConfigurationError, match="nearest that exists is device"):
        Settings.load(environ={}, cwd=tmp_path, overrides={"devize": "cpu"})


def test_foreign_variables_are_ignored(tmp_path: Path):
    """Only our prefix is looked at."""
    environ = {"INFERENCE_MAX_LEVEL": "9", "PENSTOCKS": "1", "CELERY_BROKER_URL": "x"}
    assert Settings.load(environ=environ, cwd=tmp_path) == Settings()


def test_empty_variable_counts_as_unset(tmp_path: Path):
    """A Compose file may pass on variables that are not set."""
    environ = {setting.variable: "" for setting in catalogue()} | {"PENSTOCK_CONFIG": ""}
    assert Settings.load(environ=environ, cwd=tmp_path) == Settings()


@pytest.mark.parametrize(
    ("variable", "text", "expectation"),
    [
        ("PENSTOCK_INFERENCE_MAX_LEVEL", "5", "less than or equal to 4; found '5'"),
        ("PENSTOCK_INFERENCE_MAX_LEVEL", "-1", "greater than or equal to 0"),
        ("PENSTOCK_INFERENCE_BATCHING_MAX_WAIT_MS", "soon", "a valid number"),
        ("PENSTOCK_INFERENCE_BATCHING_MAX_WAIT_MS", "nan", "a finite number"),
        ("PENSTOCK_INFERENCE_BATCHING_ENABLED", "maybe", "a valid boolean"),
        ("PENSTOCK_INFERENCE_COMPILATION_BACKEND", "fast", "'auto', 'inductor' or 'cudagraphs'"),
        ("PENSTOCK_INFERENCE_CACHE_PRIVACY_MODE", "open", "'ephemeral', 'hashes_only' or 'persisted_encrypted'"),
        ("PENSTOCK_INFERENCE_FRAMEWORKS", "pytorch,jax", "'pytorch', 'transformers' or 'onnxruntime'"),
        ("PENSTOCK_INFERENCE_METRICS_BUCKETS", "0.1,0.1", "increasing order"),
        ("PENSTOCK_INFERENCE_METRICS_BUCKETS", "0.1,x", "a valid number"),
        ("PENSTOCK_INFERENCE_METRICS_BUCKETS", ",", "increasing order"),
        ("PENSTOCK_INFERENCE_PRIVACY_REDACT_PATTERNS", "(", "a regular expression of RE2: '(' cannot be compiled"),
        ("PENSTOCK_INFERENCE_PRIVACY_REDACT_PATTERNS", "x,(?<=a)b", "'(?<=a)b' cannot be compiled: RE2 has no look"),
        ("PENSTOCK_INFERENCE_PRIVACY_REDACT_PATTERNS", r"(a)\1", "RE2 has no back-references"),
        ("PENSTOCK_INFERENCE_PRIVACY_REDACT_PATTERNS", "x*", "'x*' matches the empty text"),
        ("PENSTOCK_INFERENCE_PRIVACY_REDACT_DETECTORS", "iban", "'payment_card', 'email' or 'ssn'"),
        ("PENSTOCK_INFERENCE_COMPILATION_TOLERANCE", "0.01", "less than or equal to 0.001"),
        ("PENSTOCK_INFERENCE_DEVICE", "tpu", "auto, cpu, cuda or cuda:N"),
        ("PENSTOCK_INFERENCE_PRECISION", "fp8", "'auto', 'fp32', 'bf16' or 'fp16'"),
        ("PENSTOCK_INFERENCE_SERVER_PORT", "65536", "less than or equal to 65535"),
        ("PENSTOCK_INFERENCE_SERVER_WORKERS", "0", "greater than or equal to 1"),
        ("PENSTOCK_INFERENCE_SAFEGUARDS_RATE_LIMIT_REQUESTS_PER_MINUTE", "0", "greater than or equal to 1; found '0'"),
        ("PENSTOCK_INFERENCE_SAFETY_MIN_OFF_S", "0.5", "greater than or equal to 1"),
        ("PENSTOCK_INFERENCE_SAFETY_MIN_OFF_S", "700000", "less than or equal to 604800"),
        ("PENSTOCK_INFERENCE_SAFETY_MAX_OFF_S", "299", "at least min_off_s, which is 300; found '299'"),
        ("PENSTOCK_INFERENCE_SAFETY_MIN_PASSES", "0", "greater than or equal to 1"),
        ("PENSTOCK_INFERENCE_SAFETY_BREAKER_WINDOW_S", "0", "greater than or equal to 1"),
        ("PENSTOCK_INFERENCE_SAFETY_DRIFT_SMOOTHING", "0", "greater than 0"),
        ("PENSTOCK_INFERENCE_SAFETY_DRIFT_WIDTH", "inf", "a finite number"),
        ("PENSTOCK_INFERENCE_SAFETY_DRIFT_REFERENCE_SIZE", "2001", "less than or equal to 2000"),
        ("PENSTOCK_INFERENCE_SAFETY_DRIFT_ADWIN_DELTA", "1", "less than 1"),
        ("PENSTOCK_TENANT_ID", "Acme Inc", "Bad tenant name"),
        ("PENSTOCK_WORKER_MODELS", "mlp,../x", "Bad model name"),
        ("PENSTOCK_METRICS_PORT", "70000", "less than or equal to 65535"),
        ("PENSTOCK_REDIS_URL", "http://host", "has the scheme 'http'. Expected redis://host:6379/0"),
        ("PENSTOCK_REDIS_URL", "redis://host/abc", "names a database that is no whole number"),
        ("PENSTOCK_REDIS_URL", "redis://host:port/0", "has a port that is no number from 1 to 65535"),
        ("PENSTOCK_INFERENCE_STATE_REDIS_URL", "memory://", "has the scheme 'memory'"),
    ],
)
def test_bad_value_is_refused_in_one_line(variable, text, expectation, tmp_path: Path):
    """The line names the variable and what was expected of it."""
    message = refusal({variable: text}, tmp_path)
    assert message.startswith(f"Bad value of {variable}: ")
    assert expectation in message


def test_longest_time_off_follows_the_shortest_one(tmp_path: Path):
    """Nobody has to set both: it is an hour, or the shortest time where that is more."""

    def max_off_s(**environ: str) -> float:
        variables = {f"PENSTOCK_INFERENCE_SAFETY_{name}": text for name, text in environ.items()}
        return Settings.load(environ=variables, cwd=tmp_path).inference.safety.max_off_s

    assert (max_off_s(), max_off_s(MIN_OFF_S="10"), max_off_s(MIN_OFF_S="5000")) == (3600, 3600, 5000)
    assert max_off_s(MIN_OFF_S="10", MAX_OFF_S="20") == 20


def test_bad_value_in_a_file_names_key_and_file(tmp_path: Path):
    """A value that does not fit is traced to the source that it came from."""
    config_file = write_yaml(tmp_path, {"batching": {"max_batch_size": True}})
    assert refusal({}, tmp_path, config_file).startswith("Bad value of batching.max_batch_size in penstock.yaml: ")


@pytest.mark.parametrize("content", [b"a: [", b"- 1\n", b"\xff\xfe"])
def test_config_file_that_is_no_table_is_refused(content, tmp_path: Path):
    """Broken YAML, YAML that is not a mapping and bytes that are not text: one line that names the file."""
    path = tmp_path / "penstock.yaml"
    path.write_bytes(content)
    message = refusal({}, tmp_path, path)
    assert "penstock.yaml" in message
    assert str(tmp_path) not in message


def test_missing_config_file_is_refused(tmp_path: Path):
    """A --config file that is not there is an error, not an empty one."""
    assert refusal({"PENSTOCK_CONFIG": str(tmp_path / "gone.yaml")}, tmp_path).startswith("Cannot read gone.yaml")


def test_empty_config_file_and_empty_sections_change_nothing(tmp_path: Path):
    """A file whose lines are all commented out is a valid one."""
    path = tmp_path / "penstock.yaml"
    path.write_text("batching:\n  # max_wait_ms: 5\n")
    assert Settings.load(path, environ={}, cwd=tmp_path) == Settings()


def test_patterns_with_commas_travel_as_json(tmp_path: Path):
    """A list variable is JSON or comma-separated; a lone pattern may begin with a bracket."""
    variable = "PENSTOCK_INFERENCE_PRIVACY_REDACT_PATTERNS"

    def read(text: str) -> tuple[str, ...]:
        return Settings.load(environ={variable: text}, cwd=tmp_path).inference.privacy.redact_patterns

    assert read('["a{1,2}", "b"]') == ("a{1,2}", "b")
    assert read("a, b") == ("a", "b")
    assert read("[0-9]+") == ("[0-9]+",)


def test_secrets_are_never_shown(tmp_path: Path):
    """Neither keys nor passwords in URLs appear in repr, str, a dump, or an error."""
    hidden = "hunter2hunter2hunter2hunter2hunter2"
    environ = {
        "PENSTOCK_SIGNING_KEYS": SIGNING_KEY,
        "PENSTOCK_AUDIT_KEY": AUDIT_KEY,
        "PENSTOCK_L2_ENCRYPTION_KEY": DATA_KEY,
        "PENSTOCK_PKCS11_PIN": hidden,
        "PENSTOCK_REDIS_URL": f"redis://:{hidden}@host/0",
        "PENSTOCK_CELERY_URL": f"redis://:{hidden}@host/1",
        "PENSTOCK_REGISTRY_URL": f"postgresql://me:{hidden}@host/db",
        "PENSTOCK_INFERENCE_CACHE_REDIS_URL": f"redis://:{hidden}@host/2",
        "PENSTOCK_INFERENCE_STATE_REDIS_URL": f"redis://:{hidden}@host/3",
    }
    settings = Settings.load(environ=environ, cwd=tmp_path)
    shown = repr(settings) + str(settings) + repr(settings.model_dump()["signing_keys"])
    for variable, text in environ.items():
        if variable.endswith("URL"):
            shown += refusal({variable: f"?{text}"}, tmp_path) if "REDIS" in variable else ""
    shown += refusal({"PENSTOCK_SIGNING_KEYS": hidden}, tmp_path)
    shown += refusal({"PENSTOCK_L2_ENCRYPTION_KEY": hidden}, tmp_path)
    assert hidden not in shown
    assert DATA_KEY not in shown
    shown += refusal({"PENSTOCK_AUDIT_KEY": f"{AUDIT_KEY}?"}, tmp_path)
    assert SIGNING_KEY.partition(":")[2] not in shown
    assert AUDIT_KEY not in shown


def test_keyring_holds_the_signing_keys(tmp_path: Path):
    """Signing is off without keys; with keys the first one signs."""
    assert not Settings().keyring.signs
    settings = Settings.load(environ={"PENSTOCK_SIGNING_KEYS": SIGNING_KEY}, cwd=tmp_path)
    assert settings.keyring.signing_id == "k1"


@pytest.mark.parametrize(
    ("lane", "keys", "is_open"),
    [
        ("auto", "", True),
        ("auto", SIGNING_KEY, False),
        ("trusted", SIGNING_KEY, True),
        ("off", "", False),
    ],
)
def test_lane_is_open_only_where_unsigned_jobs_are_acceptable(lane, keys, is_open, tmp_path: Path):
    """send_task jobs are unsigned: `auto` takes them only while nothing is signed."""
    environ = {"PENSTOCK_INFERENCE_CELERY_LANE": lane, "PENSTOCK_SIGNING_KEYS": keys}
    assert Settings.load(environ=environ, cwd=tmp_path).is_lane_open is is_open


def test_places_follow_the_home(tmp_path: Path):
    """Another home moves the caches, the audit log and the registry, but not what was set on its own."""
    environ = {"PENSTOCK_HOME": "/srv/p", "PENSTOCK_INFERENCE_COMPILATION_CACHE_DIR": "/fast"}
    settings = Settings.load(environ=environ, cwd=tmp_path)
    assert settings.inference.privacy.audit_log_path == Path("/srv/p/audit")
    assert settings.inference.privacy.encryption_key_file == Path("/srv/p/data.key")
    assert settings.inference.compilation.cache_dir == Path("/fast")
    assert settings.inference.cache.l2_path == Path("/srv/p/inference_cache/cache.db")
    assert settings.registry_url == "sqlite:////srv/p/registry.db"


def test_unset_values_follow_their_neighbour(tmp_path: Path):
    """Celery uses the broker's Redis, and Python packages may come from the models root."""
    environ = {"PENSTOCK_REDIS_URL": "redis://host/0", "PENSTOCK_INFERENCE_REPO_ROOT": "/models"}
    settings = Settings.load(environ=environ, cwd=tmp_path)
    assert settings.celery_url == "redis://host/0"
    assert settings.trusted_roots == (Path("/models"),)


def test_each_device_has_its_own_port(tmp_path: Path):
    """The probe listens on 9464 + index unless a port is set; 0 stays 0."""
    assert Settings().worker.probe_port(3) == METRICS_PORT + 3 == 9467
    assert Settings.load(environ={"PENSTOCK_METRICS_PORT": "0"}, cwd=tmp_path).worker.probe_port(3) == 0


def test_sections_can_be_constructed_alone():
    """Embedding programs build a section as a value; the environment has no say in it."""
    config = InferenceConfig(privacy=PrivacyConfig(mode="hashes_only"))
    assert config.privacy.mode == "hashes_only"
    assert config.batching.max_wait_ms == 50.0


def test_a_section_of_a_program_wins_over_the_environment(tmp_path: Path):
    """CF-033: PrivacyConfig is given to the constructor; the environment decides what it leaves out."""
    environ = {
        "PENSTOCK_INFERENCE_PRIVACY_MODE": "hashes_only",
        "PENSTOCK_INFERENCE_PRIVACY_AUDIT_LOG_ENABLED": "false",
    }
    given = PrivacyConfig(mode="persisted_encrypted", redact_patterns=("a+",))
    settings = Settings.load(environ=environ, cwd=tmp_path, overrides={"privacy": given})
    privacy = settings.inference.privacy
    assert (privacy.mode, privacy.redact_patterns, privacy.audit_log_enabled) == ("persisted_encrypted", ("a+",), False)
    assert settings.changed({"privacy": PrivacyConfig(mode="ephemeral")}).inference.privacy.mode == "ephemeral"


MODES = {
    ("ephemeral", "ephemeral"): "ephemeral",
    ("ephemeral", "persisted_encrypted"): "persisted_encrypted",
    ("ephemeral", "hashes_only"): "hashes_only",
    ("persisted_encrypted", "ephemeral"): "persisted_encrypted",
    ("persisted_encrypted", "persisted_encrypted"): "persisted_encrypted",
    ("persisted_encrypted", "hashes_only"): "hashes_only",
    ("hashes_only", "ephemeral"): "hashes_only",
    ("hashes_only", "persisted_encrypted"): "hashes_only",
    ("hashes_only", "hashes_only"): "hashes_only",
}


@pytest.mark.parametrize(
    ("modes", "applies"), MODES.items(), ids=lambda value: "-".join(value) if len(value) == 2 else ""
)
def test_the_stricter_privacy_mode_applies(modes: tuple[str, str], applies: str):
    """CF-022: of privacy.mode and cache.privacy_mode the one that leaves less readable outside of the process."""
    config = InferenceConfig.model_validate({"privacy": {"mode": modes[0]}, "cache": {"privacy_mode": modes[1]}})
    assert config.effective_mode == applies
    assert config.withholds_texts == (applies != "ephemeral")


def test_patterns_need_their_package_and_other_settings_do_not():
    """A program without google-re2 loads settings without patterns, and gets an error with them."""
    code = (
        "import sys; sys.modules['re2'] = None\n"
        "from penstock.registry.settings import Settings\n"
        "print(Settings.load(environ={}).inference.privacy.redact_patterns)\n"
        "try: Settings.load(environ={'PENSTOCK_INFERENCE_PRIVACY_REDACT_PATTERNS': 'a'})\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=180)
    first, second = shown.stdout.splitlines()
    assert first == "()"
    assert second.startswith("ConfigurationError")
    assert "google-re2 is not installed" in second


def test_a_drain_may_always_take_longer_than_a_forward():
    """The limit of a drain without progress is never shorter than that of a forward and a second."""
    assert InferenceConfig().progress_limit_s == 45
    assert InferenceConfig(timeout_seconds=60).progress_limit_s == 61
    assert InferenceConfig.model_validate({"queue": {"progress_timeout_s": 90}}).progress_limit_s == 90


def test_importing_settings_loads_no_framework():
    """A backend that only submits jobs pays neither for torch nor for Celery."""
    code = "import penstock.registry.settings, sys; print(sorted({'torch', 'celery', 'redis'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=180)
    assert shown.stdout.strip() == "[]"
