"""`penstock doctor`: each fault is found and printed with its fix, and no secret is shown."""

from __future__ import annotations

import base64
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result

from penstock.compose.doctor import Finding, examine
from penstock.registry.queues import dead_key
from penstock.safety.operator_key import OperatorKey
from tests.compose.conftest import penstock
from tests.packages import write_double, write_package
from tests.servers import RedisServer

SECRET = base64.b64encode(b"an operator's key, 32 bytes long").decode()
KEYS = f"k1:{SECRET}"


@pytest.fixture
def server(redis_server: RedisServer) -> RedisServer:
    """A broker that only this test uses, and may configure wrongly."""
    return redis_server


@pytest.fixture
def environ(server: RedisServer, tmp_path: Path) -> dict[str, str]:
    """The environment of a shell without a fault."""
    (tmp_path / "home").mkdir(mode=0o700)
    return {
        "PENSTOCK_REDIS_URL": server.url,
        "PENSTOCK_HOME": str(tmp_path / "home"),
        "PENSTOCK_SIGNING_KEYS": KEYS,
        "PENSTOCK_INFERENCE_REPO_ROOT": str(tmp_path / "models"),
    }


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Settings in the checkout's own pyproject.toml must not matter.
    monkeypatch.chdir(tmp_path)


def _found(environ: dict[str, str], part: str) -> Finding:
    """The one finding whose text has this part."""
    (finding,) = [each for each in examine(environ, Path.cwd()) if part in each.what]
    return finding


def _doctor(environ: dict[str, str], *arguments: str) -> Result:
    return penstock(Path(environ["PENSTOCK_HOME"]), "doctor", *arguments, **environ)


def test_a_healthy_shell_has_no_broken_finding(environ: dict[str, str]):
    """Without a fault the exit status is 0, and versions and persistence are shown, as lines and as JSON."""
    shown = _doctor(environ)
    assert shown.exit_code == 0
    assert "broken " not in shown.stdout
    assert "append-only persistence is on, appendfsync everysec" in shown.stdout
    assert "jobs and results are signed; live keys: k1" in shown.stdout
    data = json.loads(_doctor(environ, "--json").stdout)
    assert data["broken"] == 0
    assert {"area": "settings", "status": "ok", "what": "no unknown name, no contradiction", "fix": ""} in data[
        "findings"
    ]
    assert all(finding["fix"] for finding in data["findings"] if finding["status"] != "ok")


def test_stack_of_penstock_up_is_healthy(home: Path):
    """A stack of `penstock up` is signed, persistent, served and private: no finding is broken."""
    data = json.loads(penstock(home, "doctor", "--json").stdout)
    assert [finding for finding in data["findings"] if finding["status"] == "broken"] == []
    assert any(finding["what"].startswith("1 alive: cpu0@") for finding in data["findings"])
    assert any("jobs and results are signed" in finding["what"] for finding in data["findings"])


def test_a_broken_finding_ends_with_status_1(environ: dict[str, str], server: RedisServer):
    """The fix of a broken finding is printed as a line that can be typed."""
    with server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    shown = _doctor(environ)
    assert shown.exit_code == 1
    assert "maxmemory-policy is allkeys-lru" in shown.stdout
    assert "-> redis-cli CONFIG SET maxmemory-policy noeviction" in shown.stdout
    assert _doctor(environ, "--json").exit_code == 1


@pytest.mark.parametrize(
    ("option", "value", "status", "part"),
    [
        ("appendonly", "no", "warning", "append-only persistence is off"),
        ("appendfsync", "no", "warning", "appendfsync is no"),
        ("maxmemory", "1mb", "broken", "beyond 80 % no job is accepted"),
    ],
)
def test_brokers_that_lose_jobs_are_found(
    environ: dict[str, str], server: RedisServer, option: str, value: str, status: str, part: str
):
    """Missing persistence and short memory are found, each with the command that fixes it."""
    with server.client() as client:
        client.config_set(option, value)
    finding = _found(environ, part)
    assert (finding.area, finding.status) == ("broker", status)
    assert finding.fix.startswith("redis-cli CONFIG SET ")


def test_the_fix_removes_the_finding(environ: dict[str, str], server: RedisServer):
    """After the printed command the fault is no longer found."""
    with server.client() as client:
        client.config_set("appendonly", "no")
        fix = _found(environ, "append-only persistence is off").fix
        client.execute_command(*fix.partition("   ")[0].removeprefix("redis-cli ").split())
    assert _found(environ, "append-only persistence is on").status == "ok"


def test_a_development_redis_passes(environ: dict[str, str], server: RedisServer):
    """Without append-only persistence it works: a warning, and exit status 0."""
    with server.client() as client:
        client.config_set("appendonly", "no")
    assert _doctor(environ).exit_code == 0


def test_a_home_that_is_a_file_is_named_first(environ: dict[str, str], tmp_path: Path):
    """The line that explains why no stack is found comes before that one, and its fix is no `penstock up`."""
    (tmp_path / "file").touch()
    del environ["PENSTOCK_REDIS_URL"]
    found = [each for each in examine({**environ, "PENSTOCK_HOME": str(tmp_path / "file")}, tmp_path) if each.fix]
    broken = [each for each in found if each.status == "broken"]
    assert [each.what.partition(".")[0] for each in broken] == [
        "PENSTOCK_HOME is a file",
        "PENSTOCK_HOME cannot be read (Not a directory)",
    ]
    assert broken[1].fix == "correct PENSTOCK_HOME, or set PENSTOCK_REDIS_URL"


def test_replica_is_no_broker(environ: dict[str, str], server: RedisServer):
    """A server that accepts no writes is broken."""
    with server.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
    assert _found(environ, "it is a replica").status == "broken"


def test_broker_away_is_broken(environ: dict[str, str], tmp_path: Path):
    """A broker that does not listen is broken, and the finding shows no password."""
    url = f"redis://user:hunter2@127.0.0.1:{_closed_port()}/0"
    shown = _doctor({**environ, "PENSTOCK_REDIS_URL": url})
    assert shown.exit_code == 1
    assert "nothing listens at redis://127.0.0.1:" in shown.stdout
    assert "hunter2" not in shown.stdout + shown.stderr


def test_silent_broker_is_broken(environ: dict[str, str], server: RedisServer):
    """A frozen server, which accepts connections and answers nothing, is broken; the command ends."""
    server.freeze()
    finding = _found(environ, "timed out")
    server.thaw()
    assert (finding.area, finding.status) == ("broker", "broken")


def test_a_wrong_password_is_named(environ: dict[str, str], server: RedisServer):
    """The finding names user and password of the URL as the fault, and shows neither."""
    with server.client() as client:
        client.config_set("requirepass", "right")
    shown = _doctor({**environ, "PENSTOCK_REDIS_URL": server.tcp_url.replace("//", "//:hunter2@")})
    assert shown.exit_code == 1
    assert "refuses the user or the password" in shown.stdout
    assert "hunter2" not in shown.stdout


def _closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_a_missing_data_key_is_broken(environ: dict[str, str]):
    """A mode that encrypts, without a key, ends with status 1; the key that the fix makes is found, and not shown."""
    environ["PENSTOCK_INFERENCE_PRIVACY_MODE"] = "persisted_encrypted"
    assert _doctor(environ).exit_code == 1
    fix = _found(environ, "There is no data key").fix.removeprefix("penstock ").split()
    name, _, key = penstock(Path(environ["PENSTOCK_HOME"]), *fix).stdout.strip().removeprefix("export ").partition("=")
    assert _found(environ | {name: key}, "data is encrypted; key source env").status == "ok"
    shown = _doctor(environ | {name: key})
    assert (shown.exit_code, key in shown.stdout) == (0, False)


def test_no_broker_at_all_is_broken(environ: dict[str, str]):
    """Without a URL and a stack, `penstock up` is the fix."""
    del environ["PENSTOCK_REDIS_URL"]
    finding = _found(environ, "No broker is configured")
    assert (finding.status, finding.fix) == ("broken", "penstock up")


@pytest.mark.parametrize(
    ("variable", "value", "part"),
    [
        ("PENSTOCK_REDIS_ULR", "redis://x", "The nearest that exists is PENSTOCK_REDIS_URL"),
        ("PENSTOCK_INFERENCE_QUEUE_LEASE_S", "soon", "PENSTOCK_INFERENCE_QUEUE_LEASE_S"),
        ("PENSTOCK_SIGNING_KEYS", f"k1:{SECRET[:20]}", "PENSTOCK_SIGNING_KEYS"),
    ],
)
def test_settings_that_do_not_load_are_broken(environ: dict[str, str], variable: str, value: str, part: str):
    """A misspelt name or a bad value is a finding without secrets."""
    shown = _doctor({**environ, variable: value})
    assert shown.exit_code == 1
    assert part in shown.stdout
    assert SECRET[:20] not in shown.stdout


@pytest.mark.parametrize(
    ("variables", "part", "fix"),
    [
        ({"QUEUE_LEASE_S": "0.2"}, "a lease of 0.2 s", "PENSTOCK_INFERENCE_QUEUE_LEASE_S=5"),
        (
            {"QUEUE_JOB_TTL_S": "10"},
            "jobs live 10 s, less than one forward may take (30 s)",
            "PENSTOCK_INFERENCE_QUEUE_JOB_TTL_S=86400",
        ),
        (
            {"BATCHING_MAX_WAIT_MS": "500"},
            "the batching delay may be 500 ms",
            "PENSTOCK_INFERENCE_BATCHING_MAX_WAIT_MS=50",
        ),
        (
            {"BATCHING_MAX_BATCH_SIZE": "64", "BATCHING_MAX_QUEUE_DEPTH": "32"},
            "batches of 64 rows can never fill",
            "PENSTOCK_INFERENCE_BATCHING_MAX_QUEUE_DEPTH=128",
        ),
        (
            {"PRIVACY_MODE": "hashes_only"},
            "two privacy modes",
            "PENSTOCK_INFERENCE_CACHE_PRIVACY_MODE=hashes_only",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_contradictory_settings_are_found(environ: dict[str, str], variables: dict[str, str], part: str, fix: str):
    """Each contradiction is a warning, and its fix removes it."""
    environ |= {f"PENSTOCK_INFERENCE_{name}": value for name, value in variables.items()}
    finding = _found(environ, part)
    assert (finding.area, finding.status, finding.fix) == ("settings", "warning", fix)
    name, _, value = fix.partition("=")
    assert _found({**environ, name: value}, "no contradiction").status == "ok"


def test_insecure_settings_are_found(environ: dict[str, str]):
    """Unsigned jobs, an unsigned Celery endpoint beside signed jobs, remote control and open metrics are found."""
    unsigned = {name: value for name, value in environ.items() if name != "PENSTOCK_SIGNING_KEYS"}
    assert _found(unsigned, "signing is off").status == "warning"
    assert "PENSTOCK_SIGNING_KEYS" in _found(unsigned, "signing is off").fix
    assert _found({**environ, "PENSTOCK_INFERENCE_CELERY_LANE": "trusted"}, "unsigned ones").status == "warning"
    assert _found({**environ, "PENSTOCK_INFERENCE_CELERY_REMOTE_CONTROL": "true"}, "shut workers down")
    opened = {**environ, "PENSTOCK_METRICS_HOST": "192.0.2.1"}
    assert _found(opened, "open to the network").status == "broken"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://broker.invalid:6379/0", {"has no password": "broken", "not encrypted": "warning"}),
        ("rediss://broker.invalid:6379/0", {"has no password": "broken"}),
        ("redis://:hunter2@broker.invalid:6379/0", {"not encrypted": "warning"}),
        ("rediss://:hunter2@broker.invalid:6379/0", {}),
        ("redis://127.0.0.1:1/0", {}),
    ],
)
def test_way_to_the_broker_is_judged(environ: dict[str, str], url: str, expected: dict[str, str]):
    """A broker on another machine needs a password and TLS; on the loopback it needs neither."""
    findings = examine({**environ, "PENSTOCK_REDIS_URL": url}, Path.cwd())
    judged = [finding for finding in findings if "off this machine" in finding.what]
    assert [finding.status for finding in judged] == list(expected.values())
    assert all(part in finding.what for part, finding in zip(expected, judged, strict=True))
    assert "hunter2" not in str(findings)


def test_open_files_are_found(environ: dict[str, str], tmp_path: Path):
    """A token that others can read and a home that others can write are found; chmod fixes both."""
    token = tmp_path / "token"
    token.write_text("hunter2")
    token.chmod(0o644)
    home = Path(environ["PENSTOCK_HOME"])
    home.chmod(0o777)
    environ["PENSTOCK_METRICS_BEARER_FILE"] = str(token)
    assert _found(environ, "the file of the metrics token").fix == f"chmod 600 {token}"
    assert _found(environ, "every user can write into the home").fix == f"chmod o-w {home}"
    assert "hunter2" not in str(examine(environ, Path.cwd()))


def test_packages_that_do_not_load_are_broken(environ: dict[str, str], tmp_path: Path):
    """Each invalid package is named with its problem; the valid ones are listed."""
    root = tmp_path / "models"
    write_double(root)
    bad = write_package(root, "bad", "def build(): ...") / "model.yaml"
    bad.write_text(bad.read_text().replace("entrypoint", "entrypiont"))
    finding = _found(environ, "bad/1/model.yaml")
    assert (finding.area, finding.status) == ("models", "broken")
    assert "double/1" in _found(environ, "packages that load").what


def test_stranded_jobs_are_found(environ: dict[str, str], server: RedisServer, tmp_path: Path):
    """Jobs that no worker serves, dead letters and a pause are found, each with the command that helps."""
    home = Path(environ["PENSTOCK_HOME"])
    package = str(write_double(tmp_path / "models"))
    assert penstock(home, "models", "register", package, **environ).exit_code == 0
    assert _found(environ, "no worker is alive").fix == "penstock worker"
    assert penstock(home, "submit", "double", "-i", "x=[[1, 2, 3, 4]]", **environ).exit_code == 0
    finding = _found(environ, "no worker serves double; jobs waiting: 1")
    assert (finding.status, finding.fix) == ("broken", "penstock worker --models double")
    with server.client() as client:
        client.xadd(dead_key("double"), {"reason": "why", "e": b"x"})
    assert _found(environ, "double has dead letters").fix == "penstock dead list double"
    penstock(home, "queue", "pause", "double", **environ)
    assert _found(environ, "double is paused; jobs waiting: 1").fix == "penstock queue resume double"


def test_a_role_without_config_gets_findings(environ: dict[str, str], server: RedisServer):
    """A user without CONFIG gets all other findings."""
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "plain", "on", ">pw", "~*", "&*", "+@all", "-config")
    url = server.tcp_url.replace("//", "//plain:pw@")
    finding = _found({**environ, "PENSTOCK_REDIS_URL": url}, "append-only persistence is on")
    assert finding.what.endswith("unknown to this user")


@pytest.mark.parametrize("denied", [("-info",), ("-info", "-evalsha"), ("-xadd", "-xinfo", "-xlen")], ids=" ".join)
def test_a_role_with_few_rights_gets_findings(environ: dict[str, str], server: RedisServer, denied: tuple[str, ...]):
    """A user with few rights gets findings that name the operator role."""
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "plain", "on", ">pw", "~*", "&*", "+@all", *denied)
        client.sadd("penstock:models", "double")
    url = server.tcp_url.replace("//", "//plain:pw@")
    shown = _doctor({**environ, "PENSTOCK_REDIS_URL": url})
    assert shown.exit_code in (0, 1)
    assert "operator role" in shown.stdout
    assert shown.stderr == ""


def test_doctor_changes_nothing(environ: dict[str, str], server: RedisServer):
    """It writes no key of Redis and no file."""
    with server.client() as client:
        before = client.dbsize()
        _doctor(environ)
        assert client.dbsize() == before == 0
    assert os.listdir(environ["PENSTOCK_HOME"]) == []


def test_every_requirement_is_checked(environ: dict[str, str]):
    """Each required package is listed with a version within its bounds."""
    findings = [finding for finding in examine(environ, Path.cwd()) if finding.area == "packages"]
    named = {finding.what.partition(" ")[0] for finding in findings}
    assert {"celery", "kombu", "redis", "numpy", "msgspec", "pydantic", "torch", "flower"} <= named
    assert all(finding.status == "ok" for finding in findings)


@pytest.fixture(autouse=True)
def _thawed(server: RedisServer) -> Iterator[None]:
    yield
    server.thaw()


def test_an_operator_key_that_no_worker_trusts_is_found(home: Path, tmp_path: Path):
    """When the workers of the running stack trust another operator, the key of this one is broken."""
    OperatorKey.generate(tmp_path / "other.pem")
    shown = penstock(home, "doctor", "--json", PENSTOCK_OPERATOR_KEY_FILE=str(tmp_path / "other.pem"))
    (finding,) = [each for each in json.loads(shown.stdout)["findings"] if "other.pem" in each["what"]]
    assert (finding["status"], "none of the operators' keys" in finding["what"]) == ("broken", True)
