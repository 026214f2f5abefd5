"""What a soak run showed: the tables, and whether the promises held. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from tests.soak.client import Tally
from tests.soak.resources import Level, Resources

__all__ = ["JUDGED_FROM", "Report"]

JUDGED_FROM: Final = 200_000
"""With fewer jobs a run is over before memory has reached its level."""
_WARM: Final = 1
"""The part of the run that is compared with the last one: the first is the warm-up."""
_GROWTH: Final = 1.15
_SLACK_BYTES: Final = 16 * 2**20
"""What an allocator may keep, and how far expired keys may lag behind."""
_MIB: Final = 2**20


@dataclass(slots=True)
class Report:
    """One run. kills: done and planned, by what was killed."""

    jobs: int
    seed: int
    minutes: float
    tally: Tally
    kills: dict[str, tuple[int, int]]
    resources: Resources
    left_over: int
    rates: Sequence[float]
    """Jobs a second in each part of the run; 0 for a part that was too short."""
    facts: dict[str, str] = field(default_factory=dict)
    cores: int = 1

    @property
    def unfinished(self) -> int:
        """Jobs that had not ended when the time was up."""
        return self.jobs - self.tally.ended

    def broken(self) -> list[str]:
        """The promises that did not hold, in words."""
        tally = self.tally
        found = {
            "lost": tally.lost,
            "answered wrongly": tally.wrong,
            "repeated": tally.repeated,
            "not ended in time": self.unfinished,
            "left in queues or dead letters": self.left_over,
        }
        broken = [f"{count:,} jobs {what}" for what, count in found.items() if count]
        short = {what: kills for what, kills in self.kills.items() if kills[0] != kills[1]}
        broken += [f"{done} of {planned} kills of {what}" for what, (done, planned) in short.items()]
        return broken + [f"the memory of {role} grows" for role in self.growing()]

    def growing(self) -> list[str]:
        """The roles whose memory in the last part of the run is above that after the warm-up."""
        if self.jobs < JUDGED_FROM:
            return []
        return [role for role, levels in self.resources.memory.items() if _grows(levels)]

    def markdown(self) -> str:
        """The tables of the documents."""
        return f"{self._summary()}\n{self._memory()}\n{self._bounds()}"

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return {
            "jobs": self.jobs,
            "seed": self.seed,
            "minutes": self.minutes,
            "jobs_per_s": self.jobs_per_s,
            "rates": [*self.rates],
            "tally": asdict(self.tally),
            "kills": {what: {"done": done, "planned": planned} for what, (done, planned) in self.kills.items()},
            "left_over": self.left_over,
            "memory_mean_bytes": {
                role: [round(level.mean) for level in levels] for role, levels in self.resources.memory.items()
            },
            "memory_most_bytes": {
                role: [level.most for level in levels] for role, levels in self.resources.memory.items()
            },
            "cpu_s": {role: round(seconds, 1) for role, seconds in self.resources.cpu_s.items()},
            "broken": self.broken(),
            "facts": self.facts,
        }

    @property
    def jobs_per_s(self) -> float:
        """Over the whole run."""
        return self.tally.ended / max(self.minutes * 60, 1e-9)

    def _summary(self) -> str:
        tally = self.tally
        rows = {
            "jobs": f"{tally.ended:,} in {self.minutes:.1f} minutes: {self.jobs_per_s:,.0f} a second",
            "jobs a second in each tenth of the run": ", ".join(f"{rate:,}" if rate else "-" for rate in self.rates),
            **{f"kill -9 of {what}": f"{done:,}" for what, (done, _) in self.kills.items()},
            "lost": f"{tally.lost:,}",
            "answered wrongly": f"{tally.wrong:,}",
            "repeated (told twice, or two jobs for one key)": f"{tally.repeated:,}",
            "left in queues or dead letters": f"{self.left_over:,}",
            "answered by a second or later delivery (allowed)": f"{tally.ran_again:,}",
            "submitted again with their keys (allowed)": f"{tally.resubmitted:,}",
            **self.facts,
        }
        return _table(("", "measured"), rows.items())

    def _memory(self) -> str:
        rows = []
        for role, levels in sorted(self.resources.memory.items()):
            warm, last = levels[_WARM].mean, levels[-1].mean
            change = f"{last / warm - 1:+.0%}" if warm and last else ""
            most = max(level.most for level in levels)
            rows.append((role, *(f"{value / _MIB:,.1f}" for value in (warm, last, most)), change))
        head = ("memory in MiB", "second tenth of the run, mean", "last tenth, mean", "most", "change")
        return _table(head, rows)

    def _bounds(self) -> str:
        """Where the CPU went, by kind of process: the busiest kind bounds the rate."""
        kinds: dict[str, float] = {}
        for role, seconds in self.resources.cpu_s.items():
            kind = role.split()[0]
            kinds[kind] = kinds.get(kind, 0.0) + seconds
        ended, available = max(1, self.tally.ended), max(self.minutes * 60 * self.cores, 1e-9)
        rows = [
            (kind, f"{seconds / ended * 1e6:,.0f} us", f"{seconds / available:.0%}")
            for kind, seconds in sorted(kinds.items(), key=lambda item: -item[1])
        ]
        return _table(("CPU", "per job", f"of {self.cores} cores"), rows)


def _grows(levels: Sequence[Level]) -> bool:
    warm, last = levels[_WARM].mean, levels[-1].mean
    return bool(warm) and last > warm * _GROWTH + _SLACK_BYTES


def _table(head: Sequence[str], rows: Any) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"
