"""The four checks before a worker consumes: each bad input alone turns its check red, and the settings feed them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.registry.admission import JobBuilder
from penstock.registry.errors import ConfigurationError, InvalidInput
from penstock.registry.package import ModelSpec
from penstock.registry.settings import Settings, catalogue
from penstock.registry.settings_sections import CompilationConfig
from penstock.safety.security import (
    MAX_TOLERANCE,
    CacheScope,
    CheckResult,
    SecurityValidator,
    check_settings,
    has_data_key,
)
from penstock.workers.cache.memory import L1Cache

MIB = 1024 * 1024
KEY = "00" * 32
GOOD: Mapping[str, Any] = {
    "cache": CacheScope(isolates_tenants=True),
    "privacy_mode": "persisted_encrypted",
    "encryption_key_present": True,
    "redaction_patterns_configured": True,
    "config": {"canary_enabled": True, "tolerance": 1e-5},
}
NAMES = ["tenant isolation", "privacy configuration", "safety bypass resistance", "input size limits"]


def run(**changes: object) -> dict[str, CheckResult]:
    results = SecurityValidator().run_all_checks(**{**GOOD, **changes})
    return {result.name: result for result in results}


def statuses(**changes: object) -> list[str]:
    return [result.status for result in run(**changes).values()]


def checked(folder: Path, **variables: str) -> dict[str, CheckResult]:
    """The checks of a worker with these settings of `inference`."""
    environ = {f"PENSTOCK_INFERENCE_{name}": value for name, value in variables.items()}
    settings = Settings.load(environ=environ, cwd=folder)
    return {result.name: result for result in check_settings(settings, has_data_key=has_data_key(settings))}


def test_all_is_well():
    """CF-058: the four checks by their names, and no fix where there is no problem."""
    results = run()
    assert list(results) == NAMES
    assert all(result.passed and result.status == "ok" and not result.fix for result in results.values())


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"cache": CacheScope(isolates_tenants=False)}, "tenant isolation"),
        ({"privacy_mode": "open"}, "privacy configuration"),
        ({"encryption_key_present": False}, "privacy configuration"),
        (
            {"redaction_patterns_configured": False, "config": {"canary_enabled": True, "encrypt_at_rest": False}},
            "privacy configuration",
        ),
        ({"config": {"canary_enabled": False}}, "safety bypass resistance"),
        ({"config": {"canary_enabled": True, "max_request_size_bytes": 10 * MIB + 1}}, "input size limits"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_each_bad_input_alone_turns_one_check_red(changes: dict[str, object], name: str):
    """CF-058: that check fails with a reason and a fix, and the others do not."""
    results = run(**changes)
    assert [result.name for result in results.values() if not result.passed] == [name]
    assert results[name].reason
    assert results[name].fix


@pytest.mark.parametrize(
    "cache",
    [
        L1Cache(10, 1000),
        object(),
        CacheScope(False),
        SimpleNamespace(isolates_tenants="true"),
        {"isolates_tenants": True},
    ],
    ids=["plain cache", "object", "off", "text", "mapping"],
)
def test_cache_without_isolation_is_refused(cache: object):
    """AR-101: a default cache, and each that does not say with True itself that it isolates tenants."""
    assert run(cache=cache)["tenant isolation"].status == "failed"


def test_no_cache_needs_no_isolation():
    """AR-101: where no answer is cached, none crosses tenants."""
    assert run(cache=None)["tenant isolation"].status == "ok"


def test_sharing_that_was_accepted_is_a_warning():
    """CF-024, AR-101: the operator may accept that tenants share answers; the warning says what this means."""
    result = run(cache=CacheScope(False, is_sharing_accepted=True))["tenant isolation"]
    assert (result.status, result.passed) == ("warning", True)
    assert "learn what another one asked" in result.reason


@pytest.mark.parametrize(
    ("changes", "status", "part"),
    [
        ({"config": {"canary_enabled": True, "audit_log_enabled": False}}, "warning", "the audit log is off"),
        ({"config": {"canary_enabled": True, "encrypt_at_rest": False}}, "warning", "stored unencrypted"),
        ({"redaction_patterns_configured": False}, "warning", "no redact_patterns"),
        (
            {"config": {"canary_enabled": True, "encrypt_at_rest": False}, "encryption_key_present": False},
            "warning",
            "stored unencrypted",
        ),
        ({"encryption_key_present": False}, "failed", "no key for data at rest"),
        ({"privacy_mode": ""}, "failed", "expected one of: ephemeral, hashes_only, persisted_encrypted"),
    ],
)
def test_persisted_data_needs_key_redaction_and_audit(changes: dict[str, object], status: str, part: str):
    """AR-102: each lack in the mode persisted_encrypted has its reason."""
    result = run(**changes)["privacy configuration"]
    assert result.status == status
    assert part in result.reason


def test_worst_problem_decides_and_all_are_told():
    """AR-102: several lacks are one result."""
    config = {"canary_enabled": True, "audit_log_enabled": False}
    result = run(encryption_key_present=False, config=config)["privacy configuration"]
    assert result.status == "failed"
    assert "no key" in result.reason
    assert "audit log is off" in result.reason
    assert "KEY" in result.fix


@pytest.mark.parametrize("mode", ["ephemeral", "hashes_only"])
def test_modes_that_persist_nothing_need_nothing(mode: str):
    """AR-102: without data at rest there is no key to miss and no log to ask for."""
    config = {"canary_enabled": True, "audit_log_enabled": False, "encrypt_at_rest": False}
    found = statuses(
        privacy_mode=mode, encryption_key_present=False, redaction_patterns_configured=False, config=config
    )
    assert found == ["ok"] * 4


NOT_TRUE: tuple[object, ...] = (False, "false", "False", "off", "no", "true", 0, 1, 0.0, None, "", [], ())
NO_TOLERANCE: tuple[object, ...] = (1.01e-3, 1, 1e9, float("inf"), float("nan"), -1e-9, True, "1e-5", None)
BYPASSES: list[Mapping[str, object]] = [
    {},
    {"Canary_Enabled": True},
    {"canary_enabled": True, "canary": False},
    {"canary_enabled": True, "skip_gate": True},
    {"canary_enabled": True, "gate": "off"},
    *({"canary_enabled": value} for value in NOT_TRUE),
    *({"canary_enabled": True, "tolerance": value} for value in NO_TOLERANCE),
]


@pytest.mark.parametrize("config", BYPASSES, ids=str)
def test_no_spelling_turns_the_gate_off(config: Mapping[str, object]):
    """AR-103: false in every spelling, a missing or misspelt key, an unknown one, and a tolerance that is no gate."""
    results = run(config=config)
    assert [result.name for result in results.values() if not result.passed] == ["safety bypass resistance"]


@pytest.mark.parametrize("tolerance", [0, 0.0, 1e-5, 1e-3])
def test_tolerances_of_a_gate_are_accepted(tolerance: float):
    """AR-103: from equality to the bound of the setting."""
    assert run(config={"canary_enabled": True, "tolerance": tolerance})["safety bypass resistance"].passed


def test_bound_of_the_tolerance_is_that_of_the_setting():
    """AR-103: the check and the setting refuse the same values, and no setting has the gate in its name."""
    assert MAX_TOLERANCE == 1e-3
    assert CompilationConfig(tolerance=MAX_TOLERANCE).tolerance == MAX_TOLERANCE
    with pytest.raises(ValueError, match="less than or equal"):
        CompilationConfig(tolerance=MAX_TOLERANCE * 1.01)
    switches = [setting.key for setting in catalogue() if "canary" in setting.key or "gate" in setting.key]
    assert switches == []


@pytest.mark.parametrize("most", [0, -1, True, 1.5, "10", None, 10 * MIB + 1])
def test_limit_of_inputs_is_a_limit(most: Any):
    """AR-104: a validator without a usable limit fails its check instead of accepting everything."""
    results = SecurityValidator(most).run_all_checks(**GOOD)
    assert [result.name for result in results if not result.passed] == ["input size limits"]


@pytest.mark.parametrize(("accepted", "passes"), [(1, True), (MIB, True), (MIB + 1, False), (0, False), ("1", False)])
def test_accepted_inputs_are_within_the_limit(accepted: object, passes: bool):
    """CF-057, AR-104: the setting may lower the limit, and not raise it."""
    config = {"canary_enabled": True, "max_request_size_bytes": accepted}
    assert SecurityValidator(MIB).run_all_checks(**{**GOOD, "config": config})[3].passed == passes


def test_default_settings_pass(tmp_path: Path):
    """A worker without any setting starts without a warning."""
    assert [result.status for result in checked(tmp_path).values()] == ["ok"] * 4


@pytest.mark.parametrize(
    ("variables", "name", "status"),
    [
        ({"PRIVACY_CACHE_TENANT_ISOLATION": "false"}, "tenant isolation", "failed"),
        (
            {"PRIVACY_CACHE_TENANT_ISOLATION": "false", "PRIVACY_ACCEPT_SHARED_CACHE": "true"},
            "tenant isolation",
            "warning",
        ),
        ({"PRIVACY_CACHE_TENANT_ISOLATION": "false", "CACHE_ENABLED": "false"}, "tenant isolation", "failed"),
        (
            {
                "PRIVACY_CACHE_TENANT_ISOLATION": "false",
                "CACHE_ENABLED": "false",
                "BATCHING_SINGLE_FLIGHT": "false",
            },
            "tenant isolation",
            "ok",
        ),
        ({"PRIVACY_CACHE_TENANT_ISOLATION": "false", "ENABLED": "false"}, "tenant isolation", "ok"),
        ({"PRIVACY_MODE": "persisted_encrypted"}, "privacy configuration", "failed"),
        ({"CACHE_PRIVACY_MODE": "persisted_encrypted"}, "privacy configuration", "failed"),
        (
            {"PRIVACY_MODE": "persisted_encrypted", "PRIVACY_ENCRYPT_AT_REST": "false"},
            "privacy configuration",
            "failed",
        ),
        (
            {
                "PRIVACY_MODE": "persisted_encrypted",
                "PRIVACY_ENCRYPT_AT_REST": "false",
                "PRIVACY_REDACT_PATTERNS": "x",
            },
            "privacy configuration",
            "warning",
        ),
        (
            {"PRIVACY_MODE": "hashes_only", "CACHE_PRIVACY_MODE": "persisted_encrypted"},
            "privacy configuration",
            "ok",
        ),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_settings_feed_the_checks(variables: dict[str, str], name: str, status: str, tmp_path: Path):
    """AR-101, AR-102: what the environment says arrives; the other checks stay as they were."""
    results = checked(tmp_path, **variables)
    assert results[name].status == status
    assert all(result.status == "ok" for result in results.values() if result.name != name)


@pytest.mark.parametrize(("detectors", "audit"), [("", "true"), ("ssn", "false"), ("ssn", "true")])
def test_persisted_mode_with_a_key_starts(detectors: str, audit: str, tmp_path: Path):
    """AR-102: with warnings where redaction or the audit log is off."""
    environ = {
        "PENSTOCK_L2_ENCRYPTION_KEY": KEY,
        "PENSTOCK_INFERENCE_PRIVACY_MODE": "persisted_encrypted",
        "PENSTOCK_INFERENCE_PRIVACY_REDACT_DETECTORS": detectors,
        "PENSTOCK_INFERENCE_PRIVACY_AUDIT_LOG_ENABLED": audit,
    }
    settings = Settings.load(environ=environ, cwd=tmp_path)
    result = check_settings(settings, has_data_key=has_data_key(settings))[1]
    assert result.status == ("ok" if detectors and audit == "true" else "warning")


def test_unbounded_tolerance_is_refused_by_the_settings(tmp_path: Path):
    """AR-103: the first of the two bounds."""
    with pytest.raises(ConfigurationError, match="less than or equal to"):
        checked(tmp_path, COMPILATION_TOLERANCE="1")


def test_one_byte_too_many_is_refused_before_the_queue(tmp_path: Path):
    """CF-057, AR-104: 10 MiB of encoded inputs become a message, one byte more becomes none."""
    spec = ModelSpec.model_validate(
        {
            "name": "m",
            "version": "1",
            "format": "python",
            "entrypoint": "model:build",
            "inputs": [{"name": "x", "dtype": "uint8", "shape": ["batch", "n"]}],
            "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch"]}],
        }
    )
    settings = Settings.load(environ={}, cwd=tmp_path)
    builder = JobBuilder.of(settings, settings.keyring)
    most = SecurityValidator().max_input_size_bytes
    assert most == 10 * MIB
    assert len(builder.build(spec, {"x": np.zeros((1, most), np.uint8)}).sealed) > most
    with pytest.raises(InvalidInput, match=f"{most + 1} bytes. Expected at most {most}"):
        builder.build(spec, {"x": np.zeros((1, most + 1), np.uint8)})
