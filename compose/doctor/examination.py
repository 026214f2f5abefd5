"""The order of the checks. A check that the next ones need ends the examination when it fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Final

import redis

from penstock.compose.doctor.broker import check_server
from penstock.compose.doctor.configuration import check_contradictions, check_home, check_packages
from penstock.compose.doctor.deployments import check_deployments
from penstock.compose.doctor.findings import Finding
from penstock.compose.doctor.foreign_keys import check_foreign_keys
from penstock.compose.doctor.installed import check_installed
from penstock.compose.doctor.security import (
    check_data_keys,
    check_operator,
    check_security,
    check_signing,
    check_start,
    check_transport,
)
from penstock.compose.doctor.workers import check_restarts, check_workers
from penstock.compose.storage import home_problem
from penstock.registry import stack_file
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.errors import BrokerUnavailable, ConfigurationError
from penstock.registry.settings import Settings

__all__ = ["examine"]

_TIMEOUT_S: Final = 2.0


def examine(environ: Mapping[str, str], cwd: Path) -> list[Finding]:
    """The findings about this shell, this machine, and the broker and registry that the settings name."""
    return list(_examine(environ, cwd))


def _examine(environ: Mapping[str, str], cwd: Path) -> Iterator[Finding]:
    yield from check_installed()
    try:
        settings = Settings.load(environ=environ, cwd=cwd)
    except ConfigurationError as error:
        yield Finding("settings", "broken", str(error), "correct that name or value")
        return
    yield from check_contradictions(settings)
    yield from check_home(settings)
    yield from check_security(settings)
    yield from check_data_keys(settings)
    yield from check_start(settings)
    yield from check_packages(settings)
    yield from check_restarts(settings.home)
    try:
        settings = stack_file.with_broker(settings)
    except ConfigurationError as error:
        yield from check_operator(settings)
        fix = "correct PENSTOCK_HOME, or set PENSTOCK_REDIS_URL" if home_problem(settings.home) else "penstock up"
        yield Finding("broker", "broken", str(error), fix)
        return
    yield from check_operator(settings)
    yield from check_signing(settings)
    yield from _examine_broker(settings, settings.redis_url or "")


def _examine_broker(settings: Settings, url: str) -> Iterator[Finding]:
    yield from check_transport(url, settings)
    is_reachable = yield from check_server(url, _TIMEOUT_S)
    if not is_reachable:
        return
    try:
        with closing(RedisStreams.from_url(url, timeout_s=_TIMEOUT_S)) as broker:
            yield from check_workers(broker, settings.keyring)
            yield from check_deployments(settings, broker)
            yield from check_foreign_keys(broker)
    except (BrokerUnavailable, redis.ResponseError) as error:
        what = str(error) if isinstance(error, BrokerUnavailable) else "the broker refuses a command of an operator"
        yield Finding("broker", "broken", what, "read the broker's log, or use the operator role")
