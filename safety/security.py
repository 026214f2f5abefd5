"""Checks at the start of a worker: settings --> four named checks --> a worker with a failed one does not consume.

    tenant isolation           each tenant has cached answers of its own
    privacy configuration      the privacy mode has the key, the redaction and the audit log that it needs
    safety bypass resistance   nothing turns the gate for optimized models off, or makes it accept everything
    input size limits          no larger message is accepted than the worker is made for

`penstock doctor` shows the same checks. A warning is logged, and the worker starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from penstock.registry.settings import Settings
from penstock.registry.settings_sections import CompilationConfig, InferenceConfig, PrivacyMode
from penstock.registry.tensors import MAX_BYTES

__all__ = [
    "MAX_TOLERANCE",
    "CacheScope",
    "CheckName",
    "CheckResult",
    "CheckStatus",
    "SecurityValidator",
    "check_settings",
    "has_data_key",
]

CheckName: TypeAlias = Literal[
    "tenant isolation", "privacy configuration", "safety bypass resistance", "input size limits"
]
CheckStatus: TypeAlias = Literal["ok", "warning", "failed"]
MAX_TOLERANCE: Final[float] = next(
    limit.le for limit in CompilationConfig.model_fields["tolerance"].metadata if hasattr(limit, "le")
)
"""The largest compilation.tolerance; settings refuse a larger one."""
_MODES: Final[tuple[str, ...]] = get_args(PrivacyMode)
_GATE_KEYS: Final = frozenset({"canary_enabled", "tolerance"})
_OTHER_KEYS: Final = frozenset({"audit_log_enabled", "encrypt_at_rest", "max_request_size_bytes"})
_ORDER: Final[tuple[CheckStatus, ...]] = ("ok", "warning", "failed")


class CheckResult(NamedTuple):
    """One check. fix: the line to type or the setting to make; empty when all is well."""

    name: CheckName
    status: CheckStatus
    reason: str
    fix: str = ""

    @property
    def passed(self) -> bool:
        """Whether a worker may start."""
        return self.status != "failed"


@dataclass(frozen=True, slots=True)
class CacheScope:
    """Who shares the cached answers of a worker."""

    isolates_tenants: bool
    is_sharing_accepted: bool = False
    """Whether the operator has stated that tenants may share answers."""


class _Problem(NamedTuple):
    status: CheckStatus
    reason: str
    fix: str


class SecurityValidator:
    """Judges what a worker is about to start with. max_input_size_bytes: of the encoded inputs of one job."""

    def __init__(self, max_input_size_bytes: int = 10 * 1024 * 1024) -> None:
        self.max_input_size_bytes: Final = max_input_size_bytes

    def run_all_checks(
        self,
        *,
        cache: object | None,
        privacy_mode: str,
        encryption_key_present: bool,
        redaction_patterns_configured: bool,
        config: Mapping[str, object],
    ) -> list[CheckResult]:
        """The four checks, in the order of the module.

        cache: what holds answers, None where nothing is cached; it is isolated if its `isolates_tenants` is True, see
        CacheScope. config: `canary_enabled`, which must be there and True; `tolerance`, of the gate;
        `audit_log_enabled`, `encrypt_at_rest` and `max_request_size_bytes`. An unknown name is a failure: a misspelt
        one must not be ignored.
        """
        privacy = _privacy_problems(privacy_mode, encryption_key_present, redaction_patterns_configured, config)
        return [
            _result("tenant isolation", _isolation_problems(cache), "no cached answer crosses tenants"),
            _result("privacy configuration", privacy, f"privacy mode {privacy_mode!r:.40} has what it needs"),
            _result("safety bypass resistance", _bypass_problems(config), "nothing turns the gate off"),
            _result("input size limits", self._size_problems(config), f"at most {self.max_input_size_bytes} bytes"),
        ]

    def _size_problems(self, config: Mapping[str, object]) -> Iterator[_Problem]:
        most, fix = self.max_input_size_bytes, "PENSTOCK_INFERENCE_MAX_REQUEST_SIZE_MB=10"
        if type(most) is not int or not 0 < most <= MAX_BYTES:
            yield _Problem("failed", f"the limit is {most!r:.40}, expected 1 to {MAX_BYTES} bytes", fix)
            return
        accepted = config.get("max_request_size_bytes", most)
        if type(accepted) is not int or not 0 < accepted <= most:
            yield _Problem("failed", f"inputs may have {accepted!r:.40} bytes, expected 1 to {most}", fix)


def check_settings(settings: Settings, *, has_data_key: bool) -> list[CheckResult]:
    """The checks of a worker with these settings. has_data_key: whether there is a key for data at rest."""
    inference = settings.inference
    privacy = inference.privacy
    return SecurityValidator().run_all_checks(
        cache=_cache_scope(inference),
        privacy_mode=inference.effective_mode,
        encryption_key_present=has_data_key,
        redaction_patterns_configured=bool(
            privacy.redact_patterns or privacy.redact_detectors or privacy.presidio_entities
        ),
        config={
            # The gate has no switch: workers/levels/trials.py asks it about every form.
            "canary_enabled": True,
            "tolerance": inference.compilation.tolerance,
            "audit_log_enabled": privacy.audit_log_enabled,
            "encrypt_at_rest": privacy.encrypt_at_rest,
            "max_request_size_bytes": inference.max_request_size_mb * 1024 * 1024,
        },
    )


def has_data_key(settings: Settings) -> bool:
    """Whether these settings name a key for data at rest. A file and an HSM are read, and refused, by the tiers."""
    key = settings.l2_encryption_key
    is_elsewhere = settings.inference.privacy.encryption_key_source != "env"
    return is_elsewhere or bool(key and key.get_secret_value())


def _cache_scope(inference: InferenceConfig) -> CacheScope | None:
    """None where no job gets the answer of another one. Equal jobs share a forward under the same keys as the cache."""
    shares = inference.enabled and (inference.cache.enabled or inference.batching.single_flight)
    privacy = inference.privacy
    return CacheScope(privacy.cache_tenant_isolation, privacy.accept_shared_cache) if shares else None


def _result(name: CheckName, problems: Iterator[_Problem], all_well: str) -> CheckResult:
    found = sorted(problems, key=lambda problem: _ORDER.index(problem.status), reverse=True)
    if not found:
        return CheckResult(name, "ok", all_well)
    worst = found[0]
    return CheckResult(name, worst.status, "; ".join(problem.reason for problem in found), worst.fix)


def _isolation_problems(cache: object | None) -> Iterator[_Problem]:
    if cache is None or getattr(cache, "isolates_tenants", False) is True:
        return
    reason = "tenants share cached answers: one can learn what another one asked"
    if getattr(cache, "is_sharing_accepted", False) is True:
        yield _Problem("warning", reason, "PENSTOCK_INFERENCE_PRIVACY_CACHE_TENANT_ISOLATION=true")
    else:
        fix = (
            "PENSTOCK_INFERENCE_PRIVACY_CACHE_TENANT_ISOLATION=true, or, to accept this, "
            "PENSTOCK_INFERENCE_PRIVACY_ACCEPT_SHARED_CACHE=true"
        )
        yield _Problem("failed", reason, fix)


def _privacy_problems(
    mode: str, has_key: bool, has_redaction: bool, config: Mapping[str, object]
) -> Iterator[_Problem]:
    if mode not in _MODES:
        yield _Problem(
            "failed",
            f"the mode {mode!r:.40} is unknown, expected one of: {', '.join(_MODES)}",
            "PENSTOCK_INFERENCE_PRIVACY_MODE=ephemeral",
        )
        return
    if mode != "persisted_encrypted":
        return
    is_encrypted = config.get("encrypt_at_rest", True) is True
    if is_encrypted and has_key is not True:
        yield _Problem(
            "failed", "there is no key for data at rest", "PENSTOCK_L2_ENCRYPTION_KEY=<32 random bytes, hex or base64>"
        )
    if not is_encrypted:
        reason = "privacy.encrypt_at_rest is off: answers are stored unencrypted"
        yield _Problem("warning", reason, "PENSTOCK_INFERENCE_PRIVACY_ENCRYPT_AT_REST=true")
    if has_redaction is not True:
        reason = "no redact_patterns and no redact_detectors: answers with personal data are stored, too"
        fix = "PENSTOCK_INFERENCE_PRIVACY_REDACT_DETECTORS=payment_card,email,ssn"
        yield _Problem("warning" if is_encrypted else "failed", reason, fix)
    if config.get("audit_log_enabled", True) is not True:
        reason = "data is persisted, and the audit log is off"
        yield _Problem("warning", reason, "PENSTOCK_INFERENCE_PRIVACY_AUDIT_LOG_ENABLED=true")


def _bypass_problems(config: Mapping[str, object]) -> Iterator[_Problem]:
    canary = config.get("canary_enabled")
    if canary is not True:
        found = f"{canary!r:.40}" if "canary_enabled" in config else "missing"
        yield _Problem("failed", f"canary_enabled is {found}, expected True", "remove it from the settings")
    for name in sorted(map(str, config.keys() - _GATE_KEYS - _OTHER_KEYS)):
        yield _Problem("failed", f"{name!r:.60} is unknown: it could be meant to turn the gate off", "remove it")
    tolerance = config.get("tolerance", 0.0)
    # A value that is not a number is in no range.
    if not isinstance(tolerance, int | float) or not 0 <= tolerance <= MAX_TOLERANCE:
        reason = f"a tolerance of {tolerance!r:.40} is no gate, expected 0 to {MAX_TOLERANCE:g}"
        yield _Problem("failed", reason, "PENSTOCK_INFERENCE_COMPILATION_TOLERANCE=1e-5")
