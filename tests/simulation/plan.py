"""A seed -> one schedule's plan: what is published and asked for, and which faults strike when. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Final, Literal

from penstock.registry.queues import PriorityName

__all__ = [
    "LEASE_S",
    "POINTS",
    "Fault",
    "Kind",
    "Making",
    "Order",
    "Plan",
    "Promotion",
    "draw",
    "draw_promotions",
    "draw_replay",
    "draw_versions",
]

LEASE_S: Final = 1.0
POINTS: Final = (
    *("before-claim", "after-claim", "before-batch", "mid-forward"),
    *("after-forward", "before-commit", "after-commit", "mid-drain"),
)
"""Every checkpoint that a drain passes."""

Making = Literal["good", "bad", "flaky", "poison", "hung"]
"""What jobs do to the model: it answers, raises, raises once (a retry is asked for), dies, never comes back."""
Kind = Literal["crash", "kill", "freeze", "partition", "outage", "jump", "drain", "pause"]
_MAKINGS: Final[tuple[Making, ...]] = (*("bad",) * 5, *("flaky",) * 5, *("poison",) * 3, "hung")
_PRIORITIES: Final[tuple[PriorityName, ...]] = ("critical", "high", "normal", "normal", "low")


@dataclass(frozen=True, slots=True)
class Order:
    """What one client does at `at` seconds: publish `count` jobs in one call, all of the same making."""

    at: float
    client: int
    model: int
    count: int
    priority: PriorityName
    rows: int = 1
    making: Making = "good"
    deadline_s: float | None = None
    has_key: bool = False
    """With an idempotency key."""
    again_after: float | None = None
    """Offered a second time so much later: as a job of its own under the same key, else as the very same bytes."""
    is_twin: bool = False
    """All jobs of the order ask the same question."""
    cancel_after: float | None = None
    version: str = ""
    """The one that its jobs name: 1 and 2 lie on every worker's disk, 3 on some, 4 on none."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong at `at` seconds. `worker` counts round the living ones; `seconds` is how long it
    lasts, for a jump how far the broker's clock moves."""

    kind: Kind
    at: float
    worker: int = 0
    seconds: float = 0.0
    point: str = ""
    """For a crash or freeze: the checkpoint at which it strikes, the `nth` time; empty: between two steps."""
    nth: int = 1
    """For a drain, more than 1 means all workers, one after the other."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """An operator's decision, made in the order of epochs, which reaches the broker at `at` seconds."""

    at: float
    model: int
    epoch: int
    version: str


@dataclass(frozen=True, slots=True)
class Plan:
    """One schedule. After `until` seconds nothing goes wrong any more, and everything has to come to its end."""

    workers: int
    models: int
    max_rows: int
    concurrency: int
    """Model threads of each worker."""
    until: float
    forward_s: float
    """The typical time of a forward; a few take as long as leases."""
    has_long_forwards: bool
    loss: float
    """The share of calls that fail in one way or another."""
    delay: float
    """The share of calls that take their time, while everything else goes on."""
    single_flight: bool
    keeps_answers: bool
    has_operator: bool
    """An operator puts dead letters back, once each."""
    device_rows: int
    """Rows that fit the device; 0: all."""
    max_depth: int
    orders: tuple[Order, ...]
    faults: tuple[Fault, ...] = field(default=())
    further_threads: int = 0
    """How many more forwards at a time version 2 may run than version 1."""

    @property
    def is_calm(self) -> bool:
        """Whether nothing goes wrong at all."""
        return not (self.faults or self.loss or self.device_rows) and {each.making for each in self.orders} == {"good"}


def draw(rng: Random) -> Plan:
    """The plan that the generator's next numbers make."""
    until = rng.uniform(0.5, 3.0)
    models = rng.choice((1, 1, 1, 2))
    is_calm = rng.random() < 0.12
    orders = tuple(_order(rng, until, models) for _ in range(rng.randint(2, 10)))
    plan = Plan(
        workers=rng.choice((1, 2, 2, 3)),
        models=models,
        max_rows=rng.choice((1, 2, 4, 16)),
        concurrency=rng.choice((1, 1, 2)),
        until=until,
        forward_s=rng.choice((0.001, 0.01, 0.05, 0.3)),
        has_long_forwards=rng.random() < 0.25,
        loss=0.0 if is_calm or rng.random() < 0.6 else rng.uniform(0.01, 0.2),
        delay=0.0 if rng.random() < 0.6 else rng.uniform(0.05, 0.4),
        single_flight=rng.random() < 0.7,
        keeps_answers=Random(f"answers of {until}").random() < 0.5,
        has_operator=rng.random() < 0.5,
        device_rows=rng.choice((1, 2, 3)) if not is_calm and rng.random() < 0.1 else 0,
        max_depth=rng.choice((100_000, 100_000, 100_000, 3)),
        orders=orders,
        faults=() if is_calm else tuple(_fault(rng, until) for _ in range(rng.choice((0, 1, 1, 2, 3, 5)))),
    )
    return _pause(rng, plan) if not is_calm and rng.random() < 0.12 else plan


def draw_promotions(rng: Random, plan: Plan) -> tuple[Promotion, ...]:
    """What operators decide while the plan's jobs come in; some decisions overtake others on their way."""
    if rng.random() < 0.5:
        return ()
    count = rng.randint(1, 4)
    decided = sorted(rng.uniform(0.0, plan.until) for _ in range(count))
    return tuple(
        Promotion(
            at + (rng.uniform(0.0, 1.0) if rng.random() < 0.2 else 0.0),
            rng.randrange(plan.models),
            epoch,
            rng.choice(("1", "2")),
        )
        for epoch, at in enumerate(decided, 1)
    )


def draw_versions(rng: Random, plan: Plan) -> Plan:
    """The same, but that in half of all schedules some jobs name their version, and version 2 may run more forwards."""
    if rng.random() < 0.5:
        return plan
    orders = tuple(_naming(rng, order) if rng.random() < 0.4 else order for order in plan.orders)
    return replace(plan, orders=orders, further_threads=rng.choice((0, 1, 2)))


def _naming(rng: Random, order: Order) -> Order:
    """The same, for a version that not every worker has; some come late, when workers have heard of each other."""
    version = rng.choice(("1", "2", "3", "3", "3", "4"))
    return replace(order, version=version, at=order.at + rng.choice((0.0, rng.uniform(0.0, 4.0))))


def draw_replay(rng: Random, plan: Plan) -> float | None:
    """When a client puts a model's older record back into the broker; None: never."""
    return rng.uniform(plan.until * 0.3, plan.until + 2.0) if rng.random() < 0.8 else None


def _pause(rng: Random, plan: Plan) -> Plan:
    """The same, but that its only fault is one pause of the broker, while jobs run that outlive their leases."""
    outage = Fault("outage", rng.uniform(0.0, plan.until), seconds=rng.uniform(0.4, 2.0))
    return replace(
        plan, workers=rng.choice((2, 3)), forward_s=1.0, has_long_forwards=True, loss=0.0, delay=0.0, faults=(outage,)
    )


def _order(rng: Random, until: float, models: int) -> Order:
    is_twin = rng.random() < 0.15
    making: Making = rng.choice(_MAKINGS) if rng.random() < 0.1 else "good"
    return Order(
        at=rng.uniform(0.0, until * 0.9),
        client=rng.randrange(2),
        model=rng.randrange(models),
        # Each of these takes three lives, one after the other.
        count=rng.choice((1, 2) if making in ("poison", "hung") else (1, 1, 2, 3, 6)),
        priority=rng.choice(_PRIORITIES),
        rows=rng.choice((1, 1, 1, 1, 2, 5)),
        making=making,
        deadline_s=rng.choice((0.02, 0.1, 0.5, 2.0)) if rng.random() < 0.2 else None,
        has_key=not is_twin and rng.random() < 0.25,
        again_after=rng.uniform(0.0, 2.0) if rng.random() < 0.2 else None,
        is_twin=is_twin,
        cancel_after=rng.uniform(0.0, 0.8) if rng.random() < 0.2 else None,
    )


def _fault(rng: Random, until: float) -> Fault:
    at, worker = rng.uniform(0.0, until), rng.randrange(3)
    kinds: tuple[Kind, ...] = (
        "crash",
        "crash",
        "kill",
        "freeze",
        "freeze",
        "partition",
        "outage",
        "jump",
        "drain",
        "pause",
    )
    kind = rng.choice(kinds)
    point = rng.choice(POINTS) if kind == "crash" or (kind == "freeze" and rng.random() < 0.7) else ""
    seconds = 0.0
    if kind in ("freeze", "partition", "outage", "pause"):
        seconds = rng.choice((0.2, 0.6, 0.8, 0.9, 1.0, 1.5, 3.0)) * rng.uniform(0.9, 1.1)
    elif kind == "jump":
        seconds = rng.choice((-1.0, -0.2, 0.5, 2.0, 3600.0))
    elif kind == "drain":
        seconds = rng.choice((0.0, 0.05, 1.0))
    return Fault(kind, at, worker, seconds, point, rng.choice((1, 1, 1, 2, 3)))
