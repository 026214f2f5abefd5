"""Level 0: what each batch cost, and a few of its jobs as goldens. Nothing but numbers changes.

    drain, after a commit -> Profiler.observe(work) -> Profile: forwards, rows, tokens, seconds
                                     '--------------> GoldenStore: inputs and the answers they were given

A golden is what was served anyway: capturing it calls no model. `trace` is the opt-in look inside a forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.registry.envelope import Failure
from penstock.registry.tensors import STRING
from penstock.safety.golden_store import GoldenStore
from penstock.workers.batch_run import BatchRun
from penstock.workers.runtime.base import Prepared, Runtime

__all__ = ["Profile", "Profiler", "trace"]

_SMOOTHING: Final = 0.1
"""Weight of the newest batch in the moving averages: they follow the last ten or so."""
_TABLE_ROWS: Final = 20


@dataclass(frozen=True, slots=True)
class Profile:
    """What a version's batches added up to since it was loaded. Times are seconds of forwards, preparing included."""

    forwards: int = 0
    rows: int = 0
    texts: int = 0
    """Rows of models that tokenise."""
    tokens: int = 0
    seconds: float = 0.0
    recent_s: float = 0.0
    """A batch's forward, averaged over the last few."""
    recent_rows: float = 0.0
    """A batch's rows, likewise."""

    @property
    def rows_per_s(self) -> float:
        """Rows that one second of forwards answers, lately."""
        return self.recent_rows / self.recent_s if self.recent_s > 0 else 0.0


class Profiler:
    """Watches one version's batches. `observe` is for one thread, the rest for any.

    goldens: where samples of jobs are kept; None: no input is kept anywhere.
    """

    def __init__(self, runtime: Runtime, goldens: GoldenStore | None) -> None:
        self.goldens: Final = goldens
        self._has_text = any(one.dtype == STRING for one in runtime.spec.inputs)
        self._profile = Profile()

    @property
    def profile(self) -> Profile:
        """The numbers so far."""
        return self._profile

    def observe(self, work: BatchRun) -> None:
        """Notes a batch that has ended. Costs microseconds; copies nothing but the few jobs that become goldens."""
        before, rows = self._profile, work.batch.rows
        seconds = work.ended - work.started
        is_first = before.forwards == 0
        self._profile = Profile(
            before.forwards + 1,
            before.rows + rows,
            before.texts + rows * self._has_text,
            before.tokens + work.tokens,
            before.seconds + seconds,
            seconds if is_first else before.recent_s + _SMOOTHING * (seconds - before.recent_s),
            rows if is_first else before.recent_rows + _SMOOTHING * (rows - before.recent_rows),
        )
        if self.goldens is not None:
            self._capture(work, self.goldens)

    def _capture(self, work: BatchRun, goldens: GoldenStore) -> None:
        for item, answer in zip(work.batch.items, work.answers, strict=True):
            job_id = item.job.header.id
            if goldens.wants(job_id) and not isinstance(answer, Failure):
                goldens.offer(job_id, item.job.inputs, answer)


def trace(
    run: Callable[[Prepared], object],
    batches: Sequence[Prepared],
    *,
    is_cuda: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> str:
    """Where the forwards of these batches spend their time: torch.profiler's table, the dearest operations first.

    Runs each batch twice, the first time to warm up. On CUDA the device is waited for before the clock is read.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    synchronize: Callable[[], Any] = torch.cuda.synchronize if is_cuda else _nothing
    for batch in batches:
        run(batch)
    synchronize()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    begun = clock()
    with profile(activities=activities) as profiled:
        for batch in batches:
            run(batch)
        synchronize()
    seconds, rows = clock() - begun, sum(batch.rows for batch in batches)
    order = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    table = str(profiled.key_averages().table(sort_by=order, row_limit=_TABLE_ROWS))
    return f"{len(batches)} batches, {rows} rows, {seconds * 1e3:.1f} ms with the profiler\n{table}"


def _nothing() -> None:
    """A CPU has finished when it returns."""
