"""F22: 32 jobs with results of 40 MB beside a model of small jobs: memory stays bounded, the other model goes on."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeAlias

import pytest

from penstock import Client, JobHandle
from penstock.registry.broker.redis_streams import RedisStreams
from tests.faults.conftest import OpenStage, Stage, Trial
from tests.faults.history import Effect, History
from tests.faults.load import row
from tests.faults.models import write_large
from tests.faults.rounds import is_full, seeds
from tests.packages import recorded_forwards, write_double

LARGE = "large"
COLUMNS = 10_000_000
RESULT = COLUMNS * 4
MIB = 1 << 20
CREDIT = 128 * MIB
TURN = max(16 * MIB, RESULT)
WITHIN_S = 2.0
"""A lease of a second, and one more."""
Note: TypeAlias = Callable[[str, object], None]
SLACK = 96 * MIB
"""For what the allocator keeps, and for the check of outputs, which takes a byte per number."""


class Pulse:
    """Small jobs one after another; `longest_s` is the longest time between two answers."""

    def __init__(self, client: Client) -> None:
        self.jobs = 0
        self.longest_s = 0.0
        self._client = client

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Submits inside the block; an error of a job is raised at its end."""
        errors: list[Exception] = []
        is_over = threading.Event()

        def beat() -> None:
            last = time.monotonic()
            while not is_over.wait(0.01):
                try:
                    self._client.submit("double", {"x": row(self.jobs + 1.0)}).result(180)
                except Exception as error:
                    errors.append(error)
                    return
                now = time.monotonic()
                self.jobs, self.longest_s, last = self.jobs + 1, max(self.longest_s, now - last), now

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(90)
        assert errors == []


def _memory(pid: int, name: str) -> int:
    """A line of /proc/PID/status in bytes: VmRSS, or its peak VmHWM."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _history(stage: Stage, handles: dict[float, JobHandle], digests: dict[float, bytes]) -> History:
    """What the clients were told, and what the broker keeps; a result stands for itself by its digest."""
    numbers = {handle.id.rpartition(".")[2]: number for number, handle in handles.items()}
    history = History(offered={*handles}, accepted={*handles})
    with closing(RedisStreams.from_url(stage.server.url)) as broker, stage.server.client() as client:
        for key in client.scan_iter(f"{{{LARGE}}}:reply:*"):
            for entry in broker.read({key.decode(): "0-0"}, 0, 1000):
                told = [numbers[local.decode()] for local in entry.fields[::2] if local]
                history.effects += [Effect(number, digests[number]) for number in told]
        for number, handle in handles.items():
            (record,) = broker.job_records([handle.id])
            assert record is not None
            history.records[number] = hashlib.sha256(record.result).digest()
    begun = [number for rows in recorded_forwards(stage.forward_log) for number in rows]
    history.forwards = [number for number in begun if number in handles]
    return history


def _digests(handles: dict[float, JobHandle]) -> dict[float, bytes]:
    """Every answer is the model's; the digests of the sealed results, without keeping them."""
    found: dict[float, bytes] = {}
    for number, handle in handles.items():
        fresh = handle._client.job(handle.id)
        y = fresh.result(300)["y"]
        assert (y.shape, y[0, 0], y[0, -1]) == ((1, COLUMNS), 2 * number, number)
        record = fresh._state.record
        assert record is not None
        found[number] = hashlib.sha256(record.result).digest()
    return found


def _check_memory(stage: Stage, count: int, before: int, note: Note) -> None:
    """The formula of docs/how-to/large-jobs.md for the worker; for Redis the results, and some of them on their way."""
    worker = stage.workers[0]
    peak = _memory(worker.pid, "VmHWM") - before
    bound = CREDIT + max(CREDIT // 2, RESULT) + 2 * TURN + SLACK
    with stage.server.client() as client:
        used = int(client.info("memory")["used_memory_peak"])
    note("worker_peak_mb", round(peak / 1e6))
    note("worker_bound_mb", round(bound / 1e6))
    note("redis_peak_mb", round(used / 1e6))
    note("redis_rss_peak_mb", round(_memory(stage.server.pid, "VmHWM") / 1e6))
    assert peak <= bound
    # On their way are answers and what waits for the disk, which Redis holds as long as the disk is busy.
    assert used <= count * RESULT + 12 * RESULT
    assert _memory(stage.server.pid, "VmHWM") <= count * RESULT + 16 * RESULT


def _submit(client: Client, numbers: Sequence[float]) -> dict[float, JobHandle]:
    handles = client.submit_many(LARGE, [{"x": row(number)} for number in numbers])
    return dict(zip(numbers, handles, strict=True))


@pytest.mark.parametrize("seed", seeds())
@pytest.mark.parametrize("count", [8, 32] if is_full() else [8])
def test_large_results_leave_room_and_time_for_others(
    seed: int, count: int, open_stage: OpenStage, trial: Trial, record_property: Note
):
    """No job is lost, the worker's memory stays within its formula, Redis holds little besides the results, no call
    exceeds its time-out, and the other model answers all the time."""
    stage = open_stage(model=LARGE)
    write_large(stage.models_root, stage.forward_log, LARGE, columns=COLUMNS)
    write_double(stage.models_root)
    worker = stage.start_worker(PENSTOCK_INFERENCE_BATCHING_MAX_QUEUE_BYTES=str(CREDIT))
    # On a busy machine the broker is slow, too; `recovery_s` tells how slow.
    with Client(stage.server.url, timeout_s=60) as client, Client(stage.server.url, timeout_s=60) as other:
        pulse = Pulse(other)
        other.submit("double", {"x": row(1.0)}).result(180)
        _forget_peak(worker.pid)
        before = _memory(worker.pid, "VmRSS")
        begun = time.monotonic()
        with pulse.beating():
            handles = _submit(client, [1000.0 * seed + number for number in range(1, count + 1)])
            next(iter(handles.values())).info(300)
            first_s = time.monotonic() - begun
            digests = _digests(handles)
        record_property("first_s", first_s)
        record_property("all_s", time.monotonic() - begun)
        trial.recovered(pulse.longest_s, within=WITHIN_S)
        trial.check(_history(stage, handles, digests), times=count)
        _check_memory(stage, count, before, record_property)
    assert pulse.jobs > 0
    assert [line for line in worker.logs() if "the broker is away" in line.get("event", line.get("message", ""))] == []
    stage.close()
