"""AR-035: a worker with a failed security check ends before it consumes; with a warning it starts."""

from __future__ import annotations

import pytest

from penstock.workers.process.exit_status import EXIT_CONFIGURATION
from tests.conftest import StartWorker
from tests.packages import write_double
from tests.servers import RedisServer

_PREFIX = "PENSTOCK_INFERENCE_"


@pytest.mark.parametrize(
    ("variables", "part"),
    [
        ({"PRIVACY_CACHE_TENANT_ISOLATION": "false"}, "tenant isolation: tenants share cached answers"),
        ({"PRIVACY_MODE": "persisted_encrypted"}, "privacy configuration: there is no key for data at rest"),
        ({"PRIVACY_MODE": "open"}, f"Bad value of {_PREFIX}PRIVACY_MODE"),
        ({"PRIVACY_REDACT_PATTERNS": "(?<=a)b"}, "RE2 has no look-ahead and no look-behind"),
        ({"COMPILATION_TOLERANCE": "1"}, f"Bad value of {_PREFIX}COMPILATION_TOLERANCE"),
        ({"COMPILATION_TOLERANCE": "inf"}, f"Bad value of {_PREFIX}COMPILATION_TOLERANCE"),
        ({"COMPILATION_TOLERANCE": "nan"}, f"Bad value of {_PREFIX}COMPILATION_TOLERANCE"),
        ({"CANARY_ENABLED": "false"}, f"Unknown variable {_PREFIX}CANARY_ENABLED"),
        ({"COMPILATION_CANARY_ENABLED": "0"}, f"Unknown variable {_PREFIX}COMPILATION_CANARY_ENABLED"),
        ({"MAX_REQUEST_SIZE_MB": "11"}, f"Bad value of {_PREFIX}MAX_REQUEST_SIZE_MB"),
        ({"MAX_REQUEST_SIZE_MB": "0"}, f"Bad value of {_PREFIX}MAX_REQUEST_SIZE_MB"),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_worker_with_a_failed_check_consumes_nothing(
    variables: dict[str, str], part: str, shared_redis: RedisServer, models_root, start_worker: StartWorker
):
    """AR-101 to AR-104: one line with the reason, the status of configuration errors, and nothing in the broker."""
    write_double(models_root, "never-served")
    environment = {f"{_PREFIX}{name}": value for name, value in variables.items()}
    worker = start_worker(shared_redis, models_root, environment=environment, wait=False)
    assert worker.wait(180) == EXIT_CONFIGURATION
    assert worker.tail(1).startswith("penstock: ")
    assert part in worker.tail(1)
    with shared_redis.client() as client:
        assert list(client.scan_iter("*never-served*")) == []


@pytest.mark.parametrize(
    ("variables", "check"),
    [
        (
            {f"{_PREFIX}PRIVACY_CACHE_TENANT_ISOLATION": "false", f"{_PREFIX}PRIVACY_ACCEPT_SHARED_CACHE": "true"},
            "tenant isolation",
        ),
        (
            {
                "PENSTOCK_L2_ENCRYPTION_KEY": "00" * 32,
                f"{_PREFIX}PRIVACY_MODE": "persisted_encrypted",
                f"{_PREFIX}PRIVACY_AUDIT_LOG_ENABLED": "false",
                f"{_PREFIX}PRIVACY_REDACT_DETECTORS": "ssn",
            },
            "privacy configuration",
        ),
    ],
    ids=["shared cache", "no audit log"],
)
def test_worker_with_a_warning_serves(
    variables: dict[str, str], check: str, shared_redis: RedisServer, models_root, start_worker: StartWorker, slot: str
):
    """AR-101, AR-102: the warning is one log line with the check, the reason and the fix."""
    write_double(models_root, slot)
    worker = start_worker(shared_redis, models_root, environment=variables)
    (warning,) = [line for line in worker.logs() if line["msg"] == "a security check warns"]
    assert (warning["level"], warning["check"]) == ("warning", check)
    assert warning["fix"].startswith(_PREFIX)
