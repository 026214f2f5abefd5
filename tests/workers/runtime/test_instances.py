"""Several instances of a model: side by side in processes or threads, and what the end of one of them means."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from penstock.registry.errors import ConfigurationError, ModelError, ModelNotReady
from penstock.registry.package import load_package
from penstock.registry.tensors import Array
from penstock.workers.runtime import Runtime, open_runtime
from penstock.workers.runtime.base import DeviceLost, InstanceLost
from penstock.workers.runtime.instances import ProcessInstances, ThreadInstances
from penstock.workers.runtime.loading import LoadOptions
from penstock.workers.runtime.torch_device import keeping_threads
from tests.packages import write_package
from tests.servers import ROOT, wait_until
from tests.workers.runtime.formats import answers, opened

_WHAT = (
    "meet",
    "raise",
    "memory",
    "exit",
    "wrong",
    "threads",
    "secrets",
    "die",
    "hang",
    "garble",
    "refuse",
    "interrupt",
)
ASKED = {what: number for number, what in enumerate(_WHAT, 1)}
"""The first number of a job, by what the model is to do."""
SOURCE = """
import contextlib, gc, os, pathlib, threading, time

HERE = pathlib.Path(__file__).parent.parent

class Model:
    def __init__(self):
        self.name = f"{os.getpid()}.{id(self)}"

    def meet(self):
        (HERE / f"{self.name}.inside").touch()
        give_up_at = time.monotonic() + 60
        while len(list(HERE.glob("*.inside"))) < 2:
            if time.monotonic() > give_up_at:
                raise TimeoutError("nobody came")
            time.sleep(0.01)
        return os.getpid()

    def __call__(self, inputs):
        x, answer = inputs["x"], 0
        asked = int(x[0, 0])
        if asked == 1:
            answer = self.meet()
        elif asked == 2:
            raise KeyError("k")
        elif asked == 3:
            raise MemoryError("too much")
        elif asked == 4:
            raise SystemExit(3)
        elif asked == 5:
            return {"z": x}
        elif asked == 6:
            answer = int(os.environ["OMP_NUM_THREADS"])
        elif asked == 7:
            answer = sum(name.startswith("PENSTOCK_") for name in os.environ)
        elif asked == 8:
            os.kill(os.getpid(), 9)
        elif asked == 9:
            (HERE / f"{os.getpid()}.hangs").touch()
            sum(range(10 ** 15))  # holds the lock of the interpreter
        elif asked == 10:
            for fd in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                        os.write(int(fd), bytes([8, 0, 0, 0]) + bytes(8) + b"garbage!")
        elif asked == 11:
            raise Refusal
        elif asked == 12:
            (channel,) = [each for each in gc.get_objects() if type(each).__name__ == "Channel"]
            channel.send("progress", {"fraction": 0.5})
        return {"y": x * 0 + answer}

class Refusal(BaseException):
    def __str__(self):
        raise KeyboardInterrupt

def build():
    return Model()
"""
COUNTS_THREADS = """
import torch
def counted(inputs):
    return {"y": inputs["x"] * 0 + torch.get_num_threads()}
class Counting(torch.nn.Module):
    def forward(self, x):
        return counted({"x": x})
def build():
    return Counting()
"""


def write(root: Path, name: str, source: str = SOURCE, **fields: Any) -> Path:
    """A package of two instances."""
    folder = write_package(root, name, source)
    file = folder / "model.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"instances": 2} | fields))
    return folder


def ask(runtime: Runtime, what: str, rows: int = 1) -> Array:
    """The answer to one job."""
    return answers(runtime, x=np.full((rows, 4), ASKED.get(what, 0), np.float32))["y"]


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """The thread that does it, and what came of it: a result or an exception."""
    ends: list[object] = []

    def run() -> None:
        try:
            ends.append(work())
        except BaseException as error:
            ends.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ends


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pids(runtime: ProcessInstances) -> set[int]:
    return {process.pid for process in runtime._processes}


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessInstances]:
    """Two processes that every test of this module may use and none may end."""
    os.environ["PENSTOCK_SIGNING_KEYS"] = "a secret"
    try:
        runtime = opened(write(tmp_path_factory.mktemp("models"), "shared"), threads=4)
    finally:
        del os.environ["PENSTOCK_SIGNING_KEYS"]
    assert isinstance(runtime, ProcessInstances)
    yield runtime
    runtime.close()


@pytest.fixture
def own(models_root: Path) -> Iterator[Callable[..., Any]]:
    """Loads instances that the test may end."""
    runtimes: list[Runtime] = []

    def load(source: str = SOURCE, *, count: int = 1, **fields: Any) -> ProcessInstances:
        package = load_package(write(models_root, "own", source, instances=count, **fields))
        runtime = ProcessInstances(package, LoadOptions())
        runtimes.append(runtime)
        runtime.load("cpu", 1)
        return runtime

    yield load
    for runtime in runtimes:
        runtime.close()


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_two_instances_are_inside_the_model_at_the_same_time(kind: str, models_root: Path):
    """Each waits for the other one: with one instance, or one lock, both would give up."""
    runtime = opened(write(models_root, "pair", instance_kind=kind))
    both = [in_thread(lambda: int(ask(runtime, "meet")[0, 0])) for _ in range(2)]
    for thread, _ in both:
        thread.join(120)
    inside = [end for _, ends in both for end in ends]
    assert all(isinstance(pid, int) for pid in inside), inside
    assert len(set(inside)) == (2 if kind == "process" else 1)
    assert (os.getpid() in inside) is (kind == "thread")
    assert len(list((models_root / "pair").glob("*.inside"))) == 2
    runtime.close()


def test_instances_have_no_secrets_and_share_the_threads(processes: ProcessInstances):
    """Four threads for two instances are two for each; nothing of PENSTOCK_* is in their environment."""
    assert ask(processes, "threads")[0, 0] == 2
    assert ask(processes, "secrets")[0, 0] == 0


def test_other_models_keep_their_threads_beside_thread_instances(models_root: Path):
    """Two instances have half of them each; a module and a function of own code have them all, on any thread."""
    declared = {"format": "pytorch", "entrypoint": "model:build", "batching": {}}
    plain = write(models_root, "plain", COUNTS_THREADS, instances=1, **declared)
    shared = write(models_root, "shared", COUNTS_THREADS, instance_kind="thread", **declared)
    function = write(models_root, "function", COUNTS_THREADS.replace("Counting()", "counted"), instances=1)
    with keeping_threads():
        runtimes = [opened(folder, threads=6) for folder in (plain, shared, function)]

        def counts() -> list[float]:
            return [ask(runtime, "nothing")[0, 0] for runtime in (*runtimes, runtimes[0])]

        assert counts() == [6, 3, 6, 6]
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(counts).result(180) == [6, 3, 6, 6]
    for runtime in runtimes:
        runtime.close()


def test_load_of_thread_instances_leaves_the_process_its_threads(models_root: Path):
    """New threads have all of them, whether torch was imported before or by the load."""
    declared = {"format": "pytorch", "entrypoint": "model:build", "batching": {}}
    folder = write(models_root, "shared", COUNTS_THREADS, instance_kind="thread", **declared)
    program = f"""
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from penstock.registry.package import load_package
from penstock.workers.runtime.open import open_runtime
for threads in (6, 4):
    open_runtime(load_package(Path({str(folder)!r}))).load("cpu", threads)
    with ThreadPoolExecutor(1) as pool:
        print(pool.submit(sys.modules["torch"].get_num_threads).result(180))
"""
    command = [sys.executable, "-c", program]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    # The second load finds the number of the first one.
    assert shown.stdout == "6\n6\n"


def test_rows_of_all_jobs_come_back_in_order(processes: ProcessInstances):
    """In memory that is not written to again."""
    first = ask(processes, "nothing", rows=5)
    ask(processes, "threads")
    assert first.tolist() == [[0.0] * 4] * 5


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("raise", Exception, "KeyError: 'k'"),
        ("memory", MemoryError, "MemoryError: too much"),
        ("exit", Exception, "SystemExit: 3"),
        ("refuse", Exception, "Refusal: (its message cannot be read)"),
        ("wrong", ModelError, "ModelError: The model returned the outputs: z. Declared outputs: y"),
    ],
)
def test_an_exception_of_the_model_is_raised_here_as_it_was_there(
    what: str, kind: type[Exception], text: str, processes: ProcessInstances
):
    """With its class, its text, and the traceback of the model; the instance answers the next job."""
    with pytest.raises(kind) as raised:
        ask(processes, what)
    assert f"{type(raised.value).__name__}: {raised.value}" == text
    if what != "wrong":
        assert 'model.py", line' in str(raised.value.__cause__)
    ask(processes, "nothing")
    assert processes.counts() == {"instances": 2, "instances_lost": 0}


def test_a_process_that_dies_in_a_forward_loses_it_and_is_replaced(own: Callable[..., ProcessInstances]):
    """The caller hears which process it was; the other instance answers meanwhile."""
    runtime = own(count=2)
    before = pids(runtime)
    incidents = set()
    for _ in range(2):
        with pytest.raises(InstanceLost, match=r"^an instance was ended by SIGKILL$") as lost:
            ask(runtime, "die")
        incidents.add(lost.value.incident)
        ask(runtime, "nothing")
    assert len(incidents) == 2
    wait_until(lambda: runtime.counts() == {"instances": 2, "instances_lost": 2}, 60, "both are replaced")
    wait_until(lambda: not any(is_running(pid) for pid in before - pids(runtime)), 60, "the others are gone")


def test_a_process_that_dies_between_two_forwards_costs_no_job(own: Callable[..., ProcessInstances]):
    """Nobody is at fault: the next job waits for the replacement."""
    runtime = own()
    (pid,) = pids(runtime)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid), 60, "it is dead")
    ask(runtime, "nothing")
    assert runtime.counts() == {"instances": 1, "instances_lost": 1}


@pytest.mark.slow
def test_an_instance_that_sends_no_message_is_killed(own: Callable[..., ProcessInstances]):
    """Its bytes are not read any further: the forward is lost, and another process takes its place."""
    runtime = own()
    (pid,) = pids(runtime)
    with pytest.raises(InstanceLost, match=r"^an instance was killed: bytes that cannot be read"):
        ask(runtime, "garble")
    wait_until(lambda: not is_running(pid), 60, "it is gone")
    assert ask(runtime, "nothing").tolist() == [[0.0] * 4]


def test_an_instance_that_sends_another_message_than_outputs_is_killed(own: Callable[..., ProcessInstances]):
    """A batch is never answered with the message of something else."""
    runtime = own()
    with pytest.raises(InstanceLost, match=r"^an instance was killed: found the message progress, expected outputs$"):
        ask(runtime, "interrupt")
    assert ask(runtime, "nothing").tolist() == [[0.0] * 4]


@pytest.mark.slow
def test_without_any_instance_left_the_device_is_lost(own: Callable[..., ProcessInstances], models_root: Path):
    """When no replacement can be loaded, the worker must be replaced: also for a forward that waits already."""
    runtime = own(f"import pathlib\nassert not pathlib.Path({str(models_root)!r}, 'broken').exists(){SOURCE}")
    (models_root / "broken").touch()
    with pytest.raises(InstanceLost):
        ask(runtime, "die")
    for _ in range(2):
        with pytest.raises(DeviceLost, match=r"^own/1 has no instance left$"):
            ask(runtime, "nothing")


def test_close_ends_every_process_and_every_wait(own: Callable[..., ProcessInstances], models_root: Path):
    """Also a forward that holds the interpreter's lock for ever, and the next one behind it."""
    runtime = own()
    (pid,) = pids(runtime)
    hanging = in_thread(lambda: ask(runtime, "hang"))
    wait_until(lambda: (models_root / "own" / f"{pid}.hangs").exists(), 60, "the forward runs")
    waiting = in_thread(lambda: ask(runtime, "nothing"))
    runtime.close()
    for thread, ends in (hanging, waiting):
        thread.join(60)
        assert [type(end) for end in ends] == [ModelNotReady]
    # It was killed; a busy machine may let it go later.
    wait_until(lambda: not is_running(pid), 60, "it is gone")


def test_processes_end_with_their_worker(models_root: Path):
    """When the worker is killed: one is idle, in the other one a forward holds the interpreter's lock."""
    folder = write(models_root, "orphan")
    program = f"""
import numpy as np
from pathlib import Path
from penstock.registry.package import load_package
from penstock.workers.runtime.open import open_runtime
runtime = open_runtime(load_package(Path({str(folder)!r})))
runtime.load("cpu", 1)
print(*[process.pid for process in runtime._processes], flush=True)
runtime.run(runtime.prepare([{{"x": np.full((1, 4), {ASKED["hang"]}, np.float32)}}]))
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        started = [int(pid) for pid in worker.stdout.readline().split()]
        assert len(started) == 2
        wait_until(lambda: list(folder.parent.glob("*.hangs")), 60, "the forward runs")
        assert all(is_running(pid) for pid in started)
        worker.kill()
    wait_until(lambda: not any(is_running(pid) for pid in started), 60, "both are gone")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "def build():\n    return 1 / 0",
            r"^own/1: entrypoint model:build: raised ZeroDivisionError: division by zero",
        ),
        ("import os\nos.kill(os.getpid(), 11)", r"^own/1: an instance was ended by SIGSEGV$"),
        (
            "import gc\n[each.send('outputs') for each in gc.get_objects() if type(each).__name__ == 'Channel']",
            r"^own/1: an instance was killed: found the message outputs, expected loaded$",
        ),
    ],
)
def test_a_package_that_cannot_be_loaded_ends_only_its_instance(
    source: str, text: str, own: Callable[..., ProcessInstances]
):
    """A load that kills its process is one clear line, and nothing of it stays."""
    with pytest.raises(ConfigurationError, match=text):
        own(source)


@pytest.mark.slow
def test_a_load_that_is_given_up_ends(models_root: Path):
    """`close` may come at any time; the load then ends with ModelNotReady and leaves no process."""
    folder = write(
        models_root, "slow", f"import time{SOURCE}\nif True:\n    (HERE / 'loads').touch()\n    time.sleep(600)"
    )
    runtime = open_runtime(load_package(folder))
    assert isinstance(runtime, ProcessInstances)
    thread, ends = in_thread(lambda: runtime.load("cpu", 1))
    wait_until(lambda: (folder.parent / "loads").exists(), 60, "the package is being loaded")
    started = pids(runtime)
    runtime.close()
    thread.join(60)
    assert [type(end) for end in ends] == [ModelNotReady]
    wait_until(lambda: not any(is_running(pid) for pid in started), 60, "both are gone")


def test_unloaded_instances_say_so(models_root: Path):
    """Before `load` and after `close`, in the words of every runtime."""
    runtime = open_runtime(load_package(write(models_root, "cold", instance_kind="thread")))
    assert isinstance(runtime, ThreadInstances)
    for _ in range(2):
        with pytest.raises(ModelNotReady, match=r"^Model not loaded: cold/1$"):
            ask(runtime, "nothing")
        assert runtime.memory_bytes == 0
        runtime.load("cpu", 1)
        ask(runtime, "nothing")
        runtime.close()
        runtime = open_runtime(load_package(models_root / "cold" / "1"))


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_instances_are_for_the_cpu(kind: str, models_root: Path):
    """A worker on a GPU loads them only if the package says `device: cpu`."""
    folder = write(models_root, "gpu", instance_kind=kind)
    with pytest.raises(ConfigurationError, match=r"^gpu/1: instances: found 2, expected 1 on a GPU, or device: cpu$"):
        open_runtime(load_package(folder)).load("cuda:0", 1)


@pytest.mark.parametrize("what", ["pipe", "socket"])
def test_an_instance_whose_descriptor_a_model_closed_is_replaced(what: str, own: Callable[..., ProcessInstances]):
    """It ends. That its descriptor cannot be closed again costs neither the job nor the instance."""
    runtime = own()
    (process,) = runtime._processes
    assert process._child.stdin is not None
    os.close(process._child.stdin.fileno() if what == "pipe" else process._channel._connection.fileno())
    wait_until(lambda: not is_running(process.pid), 60, "it is dead")
    ask(runtime, "nothing")
    assert runtime.counts() == {"instances": 1, "instances_lost": 1}
