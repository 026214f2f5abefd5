"""Compute seconds of jobs -> what they cost, as served and as the model as built would have cost. Pure.

    settings -> CostEstimator: the rate of one hour of this worker's device
    a version changes its form -> CostLedger.change: its jobs and seconds count from here
    a scrape -> CostLedger.values --> cost of all seconds
                                  '-> cost of 1,000 jobs in the form in use; times the gain of the form: the baseline

The gain is the measurement of the gate: the same batches by the form and by the model as built, in turns. Jobs that
were served before and after a change are not compared, because their batches differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias

from penstock.registry import metrics as table
from penstock.registry.errors import ConfigurationError, InvalidInput, shown
from penstock.registry.settings_sections import CostConfig

__all__ = [
    "HOURS_PER_MONTH",
    "Computed",
    "CostEntry",
    "CostEstimator",
    "CostForm",
    "CostLedger",
    "FormCost",
    "Savings",
    "cost_per_1000",
    "per_1000_by_form",
    "projected_savings",
]

CostForm: TypeAlias = Literal["baseline", "optimized"]
"""baseline: the model as built. optimized: the form in use."""

HOURS_PER_MONTH: Final = 730
"""8760 hours of a year over 12 months."""
_SECONDS_PER_HOUR: Final = 3600
_OTHER: Final = ("other",) * 3
"""Label sets beyond the bound of InferenceMetrics, added up: they have no form in common."""


class CostEstimator:
    """Prices the compute seconds of one device.

    gpu_name: the device's name in hourly_rates. hourly_rate: of one hour, in units of the currency; None: the one of
    gpu_name. currency: a code of ISO 4217, which is shown; nothing is converted. No rate is built in: prices differ
    by provider and by day. Raises ConfigurationError without a rate above 0.

    >>> CostEstimator(gpu_name="A100_80GB", hourly_rates={"A100_80GB": 3.6}).cost(50.0)
    0.05
    """

    def __init__(
        self,
        gpu_name: str = "",
        *,
        hourly_rate: float | None = None,
        hourly_rates: Mapping[str, float] | None = None,
        currency: str = "USD",
    ) -> None:
        rates = hourly_rates or {}
        rate = rates.get(gpu_name) if hourly_rate is None else hourly_rate
        if rate is None:
            raise ConfigurationError(
                f"There is no hourly rate for the device {shown(gpu_name)!r}. Expected cost.hourly_rate, or one of the "
                f"names in cost.hourly_rates: {', '.join(map(shown, sorted(rates))) or 'it has none'}"
            )
        if not (isfinite(rate) and rate > 0):
            raise ConfigurationError(f"The hourly rate is {rate:g}. Expected a number above 0")
        self.gpu_name: Final = gpu_name
        self.hourly_rate: Final = rate
        self.currency: Final = currency

    @classmethod
    def of(cls, config: CostConfig, device_name: str) -> Self | None:
        """The estimator of a worker; None where the settings name no rate and no GPU.

        device_name: the device's own name, which counts where the settings name no GPU. Raises ConfigurationError for
        a device without a rate.
        """
        if config.hourly_rate is None and not config.hourly_rates and not config.gpu_name:
            return None
        return cls(
            config.gpu_name or device_name,
            hourly_rate=config.hourly_rate,
            hourly_rates=config.rates_by_name,
            currency=config.currency,
        )

    def cost(self, compute_s: float) -> float:
        """The cost of so many seconds of the device, in units of the currency. Raises InvalidInput below 0."""
        if compute_s < 0:
            raise InvalidInput(f"compute_s is {compute_s:g}. Expected 0 seconds or more")
        return self.hourly_rate * compute_s / _SECONDS_PER_HOUR

    def per_1000_requests(self, compute_s: float, requests: int) -> float:
        """The mean cost of 1,000 requests that took these seconds together.

        Raises InvalidInput without a request, and for seconds below 0.
        """
        return cost_per_1000(self.cost(compute_s), requests)


def cost_per_1000(cost: float, requests: int) -> float:
    """The mean cost of 1,000 requests that cost so much together. Raises InvalidInput without a request."""
    if requests < 1:
        raise InvalidInput(f"requests is {requests}. Expected 1 or more")
    return cost / requests * 1000


class Savings(NamedTuple):
    """In units of the currency. A loss is below 0."""

    per_hour: float
    per_month: float


def projected_savings(by_form: Mapping[CostForm, float], requests_per_hour: float) -> Savings | None:
    """The difference of baseline and optimized at this rate of requests; a month has 730 hours.

    by_form: see per_1000_by_form. None where one of the two is not known.

    >>> projected_savings({"baseline": 0.5, "optimized": 0.2}, 10_000)
    Savings(per_hour=3.0, per_month=2190.0)
    """
    if "baseline" not in by_form or "optimized" not in by_form:
        return None
    per_hour = (by_form["baseline"] - by_form["optimized"]) * requests_per_hour / 1000
    return Savings(per_hour, per_hour * HOURS_PER_MONTH)


class FormCost(NamedTuple):
    """Jobs that one form answered, and their cost. form: empty for the model as built. gain: how many times as fast as
    that the form was in its trial; None: the gate has no measurement of the whole forward."""

    jobs: int
    cost: float
    form: str
    gain: float | None


def per_1000_by_form(parts: Iterable[FormCost]) -> dict[CostForm, float]:
    """The cost of 1,000 of these jobs as they were served, and as the model as built would have served them.

    Without an optimized form there is a baseline only. Without a measured gain of each form there is no baseline.
    Empty without a job.
    """
    parts = [part for part in parts if part.jobs]
    jobs = sum(part.jobs for part in parts)
    if not jobs:
        return {}
    by_form: dict[CostForm, float] = {}
    gains = [part.gain for part in parts if part.gain is not None]
    if len(gains) == len(parts):
        by_form["baseline"] = cost_per_1000(
            sum(part.cost * gain for part, gain in zip(parts, gains, strict=True)), jobs
        )
    if any(part.form for part in parts):
        by_form["optimized"] = cost_per_1000(sum(part.cost for part in parts), jobs)
    return by_form


class Computed(NamedTuple):
    """Sums of one (model, version, endpoint) since the process began. jobs: those that a batch answered."""

    labels: tuple[str, ...]
    jobs: int
    compute_s: float


@dataclass(frozen=True, slots=True)
class CostEntry:
    """Sums of one (model, version, endpoint), in units of the currency.

    in_form: of the jobs since the version has its form. A batch that was under way then counts for the new form.
    """

    labels: tuple[str, ...]
    jobs: int
    compute_s: float
    cost: float
    in_form: FormCost

    def as_report(self) -> dict[str, Any]:
        """The entry as plain data."""
        model, version, endpoint = self.labels
        sums = {"jobs": self.jobs, "compute_s": self.compute_s, "cost": self.cost}
        return {"model": model, "version": version, "endpoint": endpoint, **sums, "in_form": self.in_form._asdict()}


class _Form(NamedTuple):
    name: str = ""
    gain: float | None = 1.0


class CostLedger:
    """The costs of one worker. The caller holds a lock."""

    def __init__(self, estimator: CostEstimator) -> None:
        self.estimator: Final = estimator
        """The rate of this worker."""
        self._forms: dict[tuple[str, ...], _Form] = {}
        """By (model, version): those that are, or were, not as built."""
        self._since: dict[tuple[str, ...], Computed] = {}
        """The sums of each label set when its version got its form."""
        self._engines: dict[tuple[str, ...], tuple[float, float]] = {}
        """By (model, version, endpoint): the seconds of earlier engines, and of the present one."""

    def change(self, model: str, version: str, form: str, gain: float | None, computed: Iterable[Computed]) -> None:
        """The version runs in this form from now on. gain: see FormCost. computed: all sums so far."""
        key = (model, version)
        if self._forms.get(key, _Form()) == (form, gain):
            return
        self._forms[key] = _Form(form, gain)
        self._since |= {sums.labels: sums for sums in self._merged(computed) if sums.labels[:2] == key}

    def engine_ran(self, model: str, version: str, endpoint: str, compute_s: float | None) -> None:
        """The engine of a version has computed for so many seconds since it was loaded; None: no engine is loaded.

        endpoint: whose engine it is. Endpoints with different policies may have engines of their own.

        Its texts share steps, so their own compute seconds overlap, and do not count. Those of a text server are waits
        for another machine, and have no cost here.
        """
        before, last = self._engines.get((model, version, endpoint), (0.0, 0.0))
        now = compute_s or 0.0
        self._engines[model, version, endpoint] = (before + last if now < last else before), now

    def values(self, computed: Iterable[Computed]) -> dict[str, dict[tuple[str, ...], float]]:
        """Metric -> label set -> value. computed: all sums so far.

        A version that runs as built again has no optimized form any more.
        """
        entries = self._entries(computed)
        per_1000 = {
            (*entry.labels, form): cost for entry in entries for form, cost in per_1000_by_form([entry.in_form]).items()
        }
        return {table.COST.name: {entry.labels: entry.cost for entry in entries}, table.COST_PER_1000.name: per_1000}

    def as_report(self, computed: Iterable[Computed]) -> dict[str, Any]:
        """{"currency": str, "hourly_rate": float, "gpu_name": str, "entries": [CostEntry.as_report()]}, plain data.

        computed: all sums so far.
        """
        rate = self.estimator
        entries = [entry.as_report() for entry in self._entries(computed)]
        return {
            "currency": rate.currency,
            "hourly_rate": rate.hourly_rate,
            "gpu_name": rate.gpu_name,
            "entries": entries,
        }

    def _entries(self, computed: Iterable[Computed]) -> list[CostEntry]:
        return [self._entry(sums) for sums in self._merged(computed)]

    def _entry(self, sums: Computed) -> CostEntry:
        labels, jobs, compute_s = sums
        form = _Form(gain=None) if labels == _OTHER else self._forms.get(labels[:2], _Form())
        _, jobs_before, before_s = self._since.get(labels, Computed(labels, 0, 0.0))
        in_form = FormCost(jobs - jobs_before, self.estimator.cost(compute_s - before_s), form.name, form.gain)
        return CostEntry(labels, jobs, compute_s, self.estimator.cost(compute_s), in_form)

    def _merged(self, computed: Iterable[Computed]) -> list[Computed]:
        """The sums, with those of the engines of a version under one label set."""
        compute_s: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for (model, version, _), seconds in self._engines.items():
            compute_s[model, version] += sum(seconds)
        merged, jobs = [], dict.fromkeys(compute_s, 0)
        for sums in computed:
            if (key := sums.labels[:2]) in jobs:
                jobs[key] += sums.jobs
            else:
                merged.append(sums)
        engines = [Computed((*key, ""), jobs[key], seconds) for key, seconds in compute_s.items()]
        return [*merged, *(engine for engine in engines if engine.compute_s)]
