"""Level 0: the cost of each batch, and a few of its jobs as goldens. Nothing about the model changes.

    drain, after a commit -> Profiler.observe(batch) -> Profile: forwards, rows, tokens, seconds
                                      |--------------> GoldenStore: inputs and the outputs that they were given
                                      '--------------> SpotSampler: whole batches, few, for spot checks of a form

A golden is a copy of a served job: capturing it calls no model. `trace` profiles a forward when an operator asks for
it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.registry.tensors import STRING
from penstock.safety.golden_store import GoldenStore
from penstock.workers.levels.spot_check import SpotSampler
from penstock.workers.runtime.base import Prepared, Runtime
from penstock.workers.versions.tuner import BatchObservation

__all__ = ["Profile", "Profiler", "trace"]

_SMOOTHING: Final = 0.1
"""Weight of the newest batch in the moving averages: they follow about the last ten batches."""
_TABLE_ROWS: Final = 20


@dataclass(frozen=True, slots=True)
class Profile:
    """Sums over a version's batches since it was loaded. Times are seconds of forwards, preparing included."""

    forwards: int = 0
    rows: int = 0
    texts: int = 0
    """Rows of models that tokenise."""
    tokens: int = 0
    seconds: float = 0.0
    recent_s: float = 0.0
    """Seconds of a forward, averaged over the last batches."""
    recent_rows: float = 0.0
    """Rows of a batch, averaged likewise."""

    @property
    def rows_per_s(self) -> float:
        """Rows per second of forwards, over the last batches."""
        return self.recent_rows / self.recent_s if self.recent_s > 0 else 0.0


class Profiler:
    """Observes one version's batches. `observe` is for one thread, the rest for any.

    goldens: keeps samples of jobs; None: no inputs are kept. spot: chooses batches for spot checks; None: there are
    none.
    """

    def __init__(self, runtime: Runtime, goldens: GoldenStore | None, spot: SpotSampler | None = None) -> None:
        self.goldens: Final = goldens
        self.spot: Final = spot
        self.row_limit = 0
        """See Observer."""
        self._has_text = any(one.dtype == STRING for one in runtime.spec.inputs)
        self._profile = Profile()

    @property
    def profile(self) -> Profile:
        """The numbers so far."""
        return self._profile

    def observe(self, batch: BatchObservation) -> None:
        """Adds a batch that has ended. Takes microseconds; copies nothing but the few jobs that become goldens."""
        before, rows, seconds = self._profile, batch.rows, batch.seconds
        is_first = before.forwards == 0
        self._profile = Profile(
            before.forwards + 1,
            before.rows + rows,
            before.texts + rows * self._has_text,
            before.tokens + batch.tokens,
            before.seconds + seconds,
            seconds if is_first else before.recent_s + _SMOOTHING * (seconds - before.recent_s),
            rows if is_first else before.recent_rows + _SMOOTHING * (rows - before.recent_rows),
        )
        if self.goldens is not None:
            for job in batch.answered(self.goldens.wants):
                self.goldens.offer(*job)
        if self.spot is not None:
            self.spot.offer(batch)


def trace(
    run: Callable[[Prepared], object],
    batches: Sequence[Prepared],
    *,
    is_cuda: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> str:
    """The table of torch.profiler for these batches, the most expensive operations first.

    Runs each batch twice, the first time to warm up. On CUDA, synchronises the device before it reads the clock.
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
    """A call on the CPU has finished when it returns."""
