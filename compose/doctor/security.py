"""Checks of file modes, signing, the operator's key, data keys, Celery's settings and the way to the broker."""

from __future__ import annotations

import ipaddress
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from penstock.compose.doctor.findings import Finding, Status
from penstock.compose.rollout.operator_keys import operator_keys
from penstock.registry import stack_file
from penstock.registry.broker.broker_url import parse_broker_url
from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Settings
from penstock.safety.keys import needs_data_keys, read_data_keys
from penstock.safety.security import CheckStatus, check_settings, has_data_key

__all__ = ["check_data_keys", "check_operator", "check_security", "check_signing", "check_start", "check_transport"]

_STATUSES: Final[dict[CheckStatus, Status]] = {"ok": "ok", "warning": "warning", "failed": "broken"}


def check_security(settings: Settings) -> Iterator[Finding]:
    """Metrics, file modes and Celery's endpoints: all that needs no broker."""
    worker = settings.worker
    if not _is_loopback(worker.metrics_host) and worker.metrics_bearer_file is None:
        yield Finding(
            "security",
            "broken",
            f"metrics on {worker.metrics_host} would be open to the network, and the worker refuses to start",
            "PENSTOCK_METRICS_BEARER_FILE=<a file with a token>",
        )
    yield from _check_modes(settings)
    yield from _check_celery(settings)
    yield from _check_sealing(settings)


def check_start(settings: Settings) -> Iterator[Finding]:
    """The four checks of a worker at its start; with a broken one it refuses to start."""
    for check in check_settings(settings, has_data_key=has_data_key(settings)):
        yield Finding("security", _STATUSES[check.status], f"{check.name}: {check.reason}", check.fix)


def check_operator(settings: Settings) -> Iterator[Finding]:
    """The operator's key, and whether workers with these settings trust it."""
    try:
        keys = operator_keys(settings)
        if keys.sign is not None:
            operator_keys(settings, for_changes=True)
    except ConfigurationError as error:
        yield Finding("security", "broken", str(error), "PENSTOCK_OPERATOR_KEY_FILE=<the operator's key, mode 0600>")
        return
    if keys.sign is None:
        yield Finding("security", "ok", "no operator's key here; the first `penstock models register` makes one")
    else:
        what = f"workers accept commands of this operator with PENSTOCK_OPERATOR_PUBLIC_KEYS={keys.public_text}"
        yield Finding("security", "ok", what)


def check_data_keys(settings: Settings) -> Iterator[Finding]:
    """The keys that encrypt data, where these settings need them; reads them once, also from an HSM."""
    inference = settings.inference
    privacy = inference.privacy
    if inference.effective_mode == "persisted_encrypted" and not privacy.encrypt_at_rest:
        yield Finding(
            "security",
            "warning",
            "the mode persisted_encrypted stores data unencrypted, because privacy.encrypt_at_rest is off",
            "PENSTOCK_INFERENCE_PRIVACY_ENCRYPT_AT_REST=true",
        )
    if not needs_data_keys(settings):
        return
    source = privacy.encryption_key_source
    try:
        ids = read_data_keys(settings).ids
    except ConfigurationError as error:
        is_missing = source == "env" or not privacy.encryption_key_file.exists()
        fix = "penstock keys generate" if is_missing else f"correct the key source {source}"
        yield Finding("security", "broken", str(error), fix)
        return
    others = f"; these open, too: {', '.join(ids[1:])}" if ids[1:] else ""
    yield Finding("security", "ok", f"data is encrypted; key source {source}, the key {ids[0]} seals{others}")


def check_signing(settings: Settings) -> Iterator[Finding]:
    """Whether jobs and results are signed."""
    ids = settings.keyring.ids
    if ids:
        yield Finding("security", "ok", f"jobs and results are signed; live keys: {', '.join(ids)}")
        return
    yield Finding(
        "security",
        "warning",
        "signing is off: every client of the broker can write jobs and results",
        'export PENSTOCK_SIGNING_KEYS="k1:$(head -c 32 /dev/urandom | base64 -w 0)"   (the same on every machine)',
    )


def check_transport(url: str, settings: Settings) -> Iterator[Finding]:
    """Password and TLS of a broker on another machine; the loopback needs neither."""
    parts = urlsplit(url)
    if parts.scheme == "unix" or _is_loopback(parts.hostname or "localhost"):
        return
    shown = parse_broker_url(url)
    if not parts.password:
        yield Finding(
            "security",
            "broken",
            f"{shown} is off this machine and has no password: every host that reaches it can read and write every job",
            "requirepass or an ACL file for Redis, and PENSTOCK_REDIS_URL=rediss://user:password@host:6379/0",
        )
    if parts.scheme == "redis":
        readable = "the headers of jobs" if settings.inference.seals_payloads else "inputs, results"
        yield Finding(
            "security",
            "warning" if settings.inference.effective_mode == "ephemeral" else "broken",
            f"{shown} is off this machine and not encrypted: the network can read {readable} and the password",
            "PENSTOCK_REDIS_URL=rediss://... (TLS)",
        )


def _check_modes(settings: Settings) -> Iterator[Finding]:
    for what, path in (
        ("metrics token", settings.worker.metrics_bearer_file),
        ("signing keys of the stack", _stack_keys_file(settings)),
        ("operator's key", settings.operator_key_file),
        ("data keys", settings.inference.privacy.encryption_key_file),
    ):
        if path is not None and path.exists() and path.stat().st_mode & 0o077:
            yield Finding("security", "broken", f"other users can read the file of the {what}", f"chmod 600 {path}")
    for what, folder in (("home", settings.home), *(("trusted root", root) for root in settings.trusted_roots)):
        if folder.is_dir() and folder.stat().st_mode & stat.S_IWOTH:
            text = f"every user can write into the {what} {folder.name}"
            yield Finding("security", "broken", text, f"chmod o-w {folder}")


def _check_celery(settings: Settings) -> Iterator[Finding]:
    celery = settings.inference.celery
    if celery.remote_control:
        yield Finding(
            "security",
            "warning",
            "every client of Celery's broker can shut workers down",
            "PENSTOCK_INFERENCE_CELERY_REMOTE_CONTROL=false",
        )
    if celery.lane == "trusted" and settings.keyring.signs:
        yield Finding(
            "security",
            "warning",
            "jobs are signed, but every client of Celery's broker can send unsigned ones (celery.lane is trusted)",
            "PENSTOCK_INFERENCE_CELERY_LANE=auto",
        )


def _check_sealing(settings: Settings) -> Iterator[Finding]:
    """Whether inputs and results are encrypted in the broker, as the privacy mode promises."""
    inference = settings.inference
    if not inference.seals_payloads:
        if inference.is_private:
            yield Finding(
                "security",
                "warning",
                "the broker holds inputs and results in plaintext, although a privacy mode is set "
                "(privacy.seal_payloads is off)",
                "PENSTOCK_INFERENCE_PRIVACY_SEAL_PAYLOADS=auto, and PENSTOCK_L2_ENCRYPTION_KEY",
            )
        return
    # Their key: see check_data_keys.
    yield Finding("security", "ok", "privacy.seal_payloads: bodies of jobs and results leave a process sealed only")
    if inference.celery.lane == "trusted":
        yield Finding(
            "security",
            "broken",
            "celery.lane is trusted and payloads must be sealed: a worker refuses to start",
            "PENSTOCK_INFERENCE_CELERY_LANE=off",
        )


def _stack_keys_file(settings: Settings) -> Path | None:
    try:
        stack = stack_file.read(settings.home)
    except ConfigurationError:
        return None
    return Path(stack.keys_file) if stack is not None else None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
