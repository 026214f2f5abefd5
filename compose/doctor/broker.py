"""Checks of the broker's server: version, latency, clock, role, persistence and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import Any, Final

import redis

from penstock.compose.doctor.findings import Finding
from penstock.compose.doctor.installed import version_numbers
from penstock.registry.broker.broker_url import BrokerAddress, parse_broker_url
from penstock.registry.broker.limits import MEMORY_HIGH_WATER_PCT
from penstock.registry.broker.redis_connection import diagnosed, open_redis
from penstock.registry.broker.redis_refusals import lost
from penstock.registry.errors import ConfigurationError

__all__ = ["check_server"]

_PINGS: Final = 20
_SLOW_MS: Final = 5.0
_SKEW_S: Final = 1.0
_REDIS_VERSION: Final = (6, 2)
_URL: Final = "PENSTOCK_REDIS_URL=redis://user:password@host:6379/0"


def check_server(url: str, timeout_s: float) -> Generator[Finding, None, bool]:
    """The server of the broker. Returns whether further checks can ask it."""
    try:
        client, shown = open_redis(url, timeout_s), parse_broker_url(url)
    except ConfigurationError as error:
        yield Finding("broker", "broken", str(error), _URL)
        return False
    with closing(client):
        try:
            yield from _check_info(client, str(shown))
        except redis.exceptions.NoPermissionError:
            what = f"{shown}: this user may not run INFO, so the server's configuration is not checked"
            yield Finding("broker", "warning", what, "use the operator role; see compose/redis/operator.acl")
        except (redis.RedisError, OSError) as error:
            yield _unusable(error, shown)
            return False
    return True


def _unusable(error: Exception, address: BrokerAddress) -> Finding:
    if refused := diagnosed(error, address):
        return Finding("broker", "broken", str(refused), _URL)
    if isinstance(error, redis.ResponseError):
        return Finding("broker", "broken", f"{address} refuses INFO", "read the broker's log")
    fix = "start it, or correct PENSTOCK_REDIS_URL; `penstock up` starts one"
    return Finding("broker", "broken", str(lost(error, address)), fix)


def _check_info(client: redis.Redis, shown: str) -> Iterator[Finding]:
    info: dict[str, Any] = client.info()
    version = str(info.get("redis_version", "0"))
    if version_numbers(version) < _REDIS_VERSION:
        yield Finding("broker", "broken", f"{shown}: Redis {version}; expected 6.2 or later", "upgrade Redis")
        return
    ms = statistics.median(_ping_ms(client) for _ in range(_PINGS))
    slow = "move this process closer to the broker, or find the load that slows it down" if ms > _SLOW_MS else ""
    yield Finding("broker", "warning" if slow else "ok", f"{shown}: Redis {version} answers in {ms:.1f} ms", slow)
    yield from _check_clock(client)
    yield from _check_role(info)
    yield from _check_persistence(client, info)
    yield from _check_memory(info)


def _ping_ms(client: redis.Redis) -> float:
    begun = time.perf_counter()
    client.ping()
    return (time.perf_counter() - begun) * 1000


def _check_clock(client: redis.Redis) -> Iterator[Finding]:
    begun = time.time()
    seconds, micros = client.time()
    skew_s = seconds + micros / 1e6 - (begun + time.time()) / 2
    if abs(skew_s) > _SKEW_S:
        what = f"the clocks of this machine and of the broker differ by {abs(skew_s):.1f} s: times in logs do not match"
        yield Finding("broker", "warning", what, "run an NTP client on both machines")
    else:
        yield Finding("broker", "ok", f"clocks agree within {abs(skew_s) * 1000:.0f} ms")


def _check_role(info: Mapping[str, Any]) -> Iterator[Finding]:
    if info.get("role") != "master":
        yield Finding("broker", "broken", "it is a replica, which accepts no jobs", "PENSTOCK_REDIS_URL of the primary")
    if info.get("cluster_enabled"):
        what = "it is a node of a Redis Cluster, which this client does not support"
        yield Finding("broker", "broken", what, "PENSTOCK_REDIS_URL of a standalone Redis")
    if info.get("loading"):
        yield Finding("broker", "broken", "it is still loading its data", "wait until it has loaded")


def _check_persistence(client: redis.Redis, info: Mapping[str, Any]) -> Iterator[Finding]:
    if not info.get("aof_enabled"):
        # A Redis for development has none, and works.
        yield Finding(
            "broker",
            "warning",
            "append-only persistence is off: accepted jobs are lost when Redis ends",
            "redis-cli CONFIG SET appendonly yes   (and `appendonly yes` in redis.conf; needed in production)",
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
            "appendfsync is no: a power cut loses the last half minute or more",
            "redis-cli CONFIG SET appendfsync everysec",
        )
    else:
        yield Finding("broker", "ok", f"append-only persistence is on, appendfsync {fsync or 'unknown to this user'}")


def _configured(client: redis.Redis, name: str) -> str | None:
    """One configuration value of the server; None when this user may not read it."""
    try:
        found = client.config_get(name)
    except redis.ResponseError:
        return None
    return next((value.decode() if isinstance(value, bytes) else str(value) for value in found.values()), None)


def _check_memory(info: Mapping[str, Any]) -> Iterator[Finding]:
    policy, limit, used = str(info.get("maxmemory_policy", "")), int(info.get("maxmemory", 0)), int(info["used_memory"])
    if policy != "noeviction":
        yield Finding(
            "broker",
            "broken",
            f"maxmemory-policy is {policy}: Redis deletes jobs and results when its memory is full",
            "redis-cli CONFIG SET maxmemory-policy noeviction   (and in redis.conf)",
        )
    if not limit:
        yield Finding("broker", "ok", f"{_mib(used)} used, no memory limit")
    elif used > limit * MEMORY_HIGH_WATER_PCT / 100:
        yield Finding(
            "broker",
            "broken",
            f"{_mib(used)} of {_mib(limit)} used: beyond {MEMORY_HIGH_WATER_PCT} % no job is accepted",
            f"redis-cli CONFIG SET maxmemory {limit * 2}",
        )
    else:
        yield Finding("broker", "ok", f"{_mib(used)} of {_mib(limit)} used")


def _mib(size: int) -> str:
    return f"{size / 1048576:,.0f} MiB"
