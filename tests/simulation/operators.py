"""An operator in a schedule: mends what killed the model, and puts dead letters back with the real command's code."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from penstock.compose.jobs import dead_letters
from penstock.registry.errors import BrokerUnavailable
from tests.simulation.broker import TTL_MS, UNSIGNED, Bystander, UnreliableEnd

if TYPE_CHECKING:
    from tests.simulation.checker import Simulation

__all__ = ["Operator"]


class Operator(Bystander):
    """Replays the first dead letter of each job, after a pause, and repeats the call until it is answered."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation.schedule, "operator")
        self._simulation = simulation
        self._seen: set[str] = set()
        self.end: UnreliableEnd = simulation.connect(self)
        simulation.truth.when_dead_lettered = self.on_record

    def on_record(self, slot: str, job_id: str) -> None:
        """A letter has come in."""
        if job_id not in self._seen:
            self._seen.add(job_id)
            self.schedule.awaited += 1
            self.schedule.after(self.schedule.rng.uniform(0.1, 2.0), partial(self._put_back, slot, job_id))

    def _put_back(self, slot: str, job_id: str) -> None:
        self._simulation.mend(job_id)
        try:
            for letter in self.end.dead_letters(slot):
                whole = self.end.read_dead_letter(slot, letter.entry) if letter.job_id == job_id else None
                if whole is not None:
                    self.schedule.inject("replay", job_id[-4:])
                    now_ms = self.end.now_ms()
                    dead_letters.replay(self.end, whole, UNSIGNED, job_ttl_ms=TTL_MS, now_ms=now_ms)
        except BrokerUnavailable:
            self.schedule.after(self.schedule.rng.uniform(0.1, 0.5), partial(self._put_back, slot, job_id))
            return
        self.schedule.awaited -= 1
