"""A seed -> one schedule's plan: what is published and asked for, and which faults strike when. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final, Literal

from penstock.registry.queues import PriorityName

__all__ = [
    "LEASE_S",
    "MOST_AT_ONCE",
    "POINTS",
    "Fault",
    "Kind",
    "Making",
    "Order",
    "Plan",
    "Promotion",
    "draw_experiment",
    "draw_promotions",
    "draw_replay",
    "plan_of",
]

LEASE_S: Final = 1.0
MOST_AT_ONCE: Final = 6
"""Jobs of the largest order."""
POINTS: Final = (
    *("before-claim", "after-claim", "before-batch", "mid-forward"),
    *("after-forward", "before-commit", "after-commit", "mid-drain"),
)
"""Every checkpoint that a drain passes."""

Making = Literal["good", "bad", "flaky", "poison", "hung", "rude"]
"""What jobs do to the model: it answers, raises, raises once (a retry is asked for), dies, never comes back, raises
what is no Exception or cannot be told."""
Kind = Literal["crash", "kill", "freeze", "partition", "outage", "jump", "drain", "pause", "instance", "loss"]
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
    is_mixed: bool = False
    """Every second job of the order names no version."""
    version: str = ""
    """The one that its jobs name: 1 and 2 lie on every worker's disk, 3 on some, 4 on none."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong at `at` seconds. `worker` counts round the living ones; `seconds` is how long it
    lasts, for a jump how far the broker's clock moves, for a loss how long the broker is down before it comes back
    empty."""

    kind: Kind
    at: float
    worker: int = 0
    seconds: float = 0.0
    point: str = ""
    """For a crash, a freeze or the death of an instance: the checkpoint at which it strikes, the `nth` time; empty:
    between two steps."""
    nth: int = 1
    """For a drain, more than 1 means all workers, one after the other."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """An operator's decision, made in the order of epochs, which reaches the broker at `at` seconds."""

    at: float
    model: int
    epoch: int
    version: str
    arms: tuple[tuple[str, float], ...] = ()
    """Of an experiment: versions with their shares of the jobs that name none. Empty: all are for `version`."""


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
    has_tier: bool
    """Workers share their answers through a tier of the cache, which answers after a while."""
    has_operator: bool
    """An operator puts dead letters back, once each."""
    device_rows: int
    """Rows that fit the device; 0: all."""
    max_depth: int
    orders: tuple[Order, ...]
    faults: tuple[Fault, ...] = field(default=())
    further_threads: int = 0
    """How many more forwards at a time version 2 may run than version 1."""
    looks_often: bool = False
    """Clients ask for overdue jobs many times a second."""
    credit_bytes: int = 0
    """Bytes of jobs that a worker may hold; 0: as in the settings."""
    has_instances: bool = False
    """Models run in processes of their own: a poisonous job ends its instance, and the worker goes on."""
    has_forger: bool = False
    """Strangers put other results in the place of those that clients read."""
    has_short_forwards: bool = False
    """Forwards are that short, and may run on any thread: an idle worker runs them on its I/O thread."""
    seats: int = 0
    """Each model has an engine with so many, and takes as many urgent jobs beyond them; 0: none has an engine."""

    @property
    def is_calm(self) -> bool:
        """Whether nothing goes wrong at all."""
        return not (self.faults or self.loss or self.device_rows) and {each.making for each in self.orders} == {"good"}


_EXPERIMENTS: Final = 0.03
"""The share of schedules with an experiment."""


def plan_of(seed: int, rng: Random) -> Plan:
    """The plan of a seed: the generator's next numbers, and what was added to schedules later.

    Each addition draws numbers of its own and changes a few schedules: the others stay as they were.
    """
    plan = _versions(Random(f"versions of {seed}"), _draw(rng))
    for change, share in _CHANGES:
        if plan.is_calm:
            break
        own = Random(f"{change.__name__} of {seed}")
        if own.random() < share:
            plan = change(own, plan)
    return plan


def _draw(rng: Random) -> Plan:
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
        keeps_answers=(keeps_answers := Random(f"answers of {until}").random() < 0.5),
        has_tier=keeps_answers and Random(f"tier of {until}").random() < 0.5,
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


def draw_experiment(rng: Random, plan: Plan, promotions: tuple[Promotion, ...]) -> tuple[Promotion, ...]:
    """The same, but that in a few schedules versions share the jobs of a model for a while, in changing shares.

    Version 4 is an arm that no worker has: its jobs wait until the experiment is over.
    """
    if plan.is_calm or rng.random() >= _EXPERIMENTS:
        return promotions
    model, epoch = rng.randrange(plan.models), max((each.epoch for each in promotions), default=0)
    production = next((each.version for each in reversed(promotions) if each.model == model), "1")
    other = rng.choice([label for label in ("1", "2", "3", "3", "4") if label != production])
    begins = max([rng.uniform(0.0, plan.until / 2), *(each.at for each in promotions)])
    steps = []
    for number in range(rng.randint(1, 3)):
        share = rng.choice((0.0, 0.2, 0.5, 1.0))
        arms = ((other, share), (production, 1 - share))
        steps.append(Promotion(begins + 0.4 * number, model, epoch + number + 1, production, arms))
    end = Promotion(begins + plan.until + rng.uniform(0.0, 2.0), model, epoch + len(steps) + 1, production)
    return (*promotions, *steps, end)


def _versions(rng: Random, plan: Plan) -> Plan:
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


def _overdue(rng: Random, plan: Plan) -> Plan:
    """The same, but that the broker pauses twice, with a moment in between, while overdue jobs run."""
    # Workers tell the length of their leases after their first one.
    first_at, lasts = rng.uniform(1.5, 2.5), rng.uniform(1.1, 1.6)
    first = Fault("outage", first_at, seconds=lasts)
    second = Fault("outage", first_at + lasts + rng.uniform(0.02, 0.15), seconds=rng.uniform(1.0, 1.4))
    return replace(
        plan,
        orders=tuple(_urgent(rng, order, first_at) for order in plan.orders),
        faults=(first, second),
        forward_s=1.4,
        has_long_forwards=False,
        loss=0.0,
        delay=0.0,
        looks_often=True,
    )


def _urgent(rng: Random, order: Order, before: float) -> Order:
    """The same, with a short deadline, and placed in the last second before that time."""
    deadline_s = rng.choice((0.1, 0.5))
    return replace(order, at=before - rng.random(), making="good", deadline_s=deadline_s, again_after=None)


def _loss(rng: Random, plan: Plan) -> Plan:
    """The same, but that the broker comes back empty once, and that more jobs are offered a second time."""
    # After a clock that went back, new entries can have the ids of lost ones.
    faults = [fault for fault in plan.faults if fault.kind != "jump" or fault.seconds > 0]
    loss = Fault("loss", rng.uniform(0.1, plan.until), seconds=rng.choice((0.0, rng.uniform(0.1, 2.5))))
    orders = tuple(_keyed(rng, order) if rng.random() < 0.4 else order for order in plan.orders)
    return replace(plan, orders=orders, faults=(*faults, loss))


def _keyed(rng: Random, order: Order) -> Order:
    """The same, offered again under an idempotency key."""
    return replace(order, has_key=True, is_twin=False, again_after=rng.uniform(0.5, 3.0))


def _instances(rng: Random, plan: Plan) -> Plan:
    """The same, but that models run in instances, some of which die in a forward."""
    deaths = [
        Fault(
            "instance", rng.uniform(0.0, plan.until), rng.randrange(3), point="mid-forward", nth=rng.choice((1, 1, 2))
        )
        for _ in range(rng.randint(1, 3))
    ]
    return replace(plan, has_instances=True, faults=(*plan.faults, *deaths))


def _rudeness(rng: Random, plan: Plan) -> Plan:
    """The same, but that some jobs make the model rude."""
    orders = [replace(order, making="rude") if rng.random() < 0.3 else order for order in plan.orders]
    return replace(plan, orders=tuple(orders))


def _sizes(rng: Random, plan: Plan) -> Plan:
    """The same, but that jobs have many sizes, and that few of them fit into a worker."""
    orders = [replace(order, rows=rng.choice((1, 5, 20, 100))) for order in plan.orders]
    return replace(plan, orders=tuple(orders), credit_bytes=rng.choice((1000, 3000, 6000)))


def _mixed(rng: Random, plan: Plan) -> Plan:
    """The same, but that equal jobs wait for several versions at a time."""

    def mixed(order: Order) -> Order:
        several = replace(order, count=MOST_AT_ONCE, is_twin=True, has_key=False, making="good")
        return replace(several, is_mixed=True, version=rng.choice(("1", "2")))

    orders = tuple(mixed(order) if rng.random() < 0.5 else order for order in plan.orders)
    return replace(plan, orders=orders, single_flight=True, max_rows=1, forward_s=0.3)


def _independently(rng: Random, plan: Plan) -> Plan:
    """The same, but that no job shares an answer: a worker handles the jobs of one claim or batch together."""

    def independent(order: Order) -> Order:
        count = MOST_AT_ONCE if order.making == "good" and rng.random() < 0.8 else order.count
        has_key = order.has_key and order.again_after is not None
        return replace(order, count=count, has_key=has_key, is_twin=False, version="")

    if plan.credit_bytes or any(order.is_mixed for order in plan.orders):
        return plan
    orders = [independent(order) if rng.random() < 0.9 else order for order in plan.orders]
    max_rows = max(plan.max_rows, rng.choice((1, 4)))
    return replace(
        plan, orders=tuple(orders), single_flight=False, keeps_answers=False, has_tier=False, max_rows=max_rows
    )


def _forged(rng: Random, plan: Plan) -> Plan:
    """The same, but that strangers forge results. They have no part in what happens else."""
    return replace(plan, has_forger=True)


def _hung(rng: Random, order: Order) -> Order:
    """The same, with jobs that hang, few of them: each takes a process with it."""
    return replace(order, making="hung", count=rng.choice((1, 2)), deadline_s=None)


def _short_forwards(rng: Random, plan: Plan) -> Plan:
    """The same, but that forwards are short, and that each worker has one model thread."""
    orders = [_hung(rng, order) if rng.random() < 0.05 else order for order in plan.orders]
    return replace(
        plan,
        orders=tuple(orders),
        has_short_forwards=True,
        has_long_forwards=rng.random() < 0.1,
        concurrency=1,
        further_threads=0,
        forward_s=rng.choice((0.0001, 0.0002)),
        max_rows=rng.choice((1, 4, 16)),
    )


def _engines(rng: Random, plan: Plan) -> Plan:
    """The same, but that a worker takes no more jobs than its engines have seats, but for urgent ones."""
    return plan if plan.has_short_forwards else replace(plan, seats=rng.choice((1, 2, 3)))


_CHANGES: Final[tuple[tuple[Callable[[Random, Plan], Plan], float], ...]] = (
    (_overdue, 0.06),
    (_loss, 0.06),
    (_instances, 0.04),
    (_rudeness, 0.05),
    (_sizes, 0.05),
    (_mixed, 0.03),
    (_independently, 0.5),
    (_forged, 0.1),
    (_short_forwards, 0.08),
    (_engines, 0.08),
)
"""Each with its share of the schedules. Which ones, its name decides: those of FOUND in test_simulation.py must not be
among those that an addition changes."""


def _order(rng: Random, until: float, models: int) -> Order:
    is_twin = rng.random() < 0.15
    making: Making = rng.choice(_MAKINGS) if rng.random() < 0.1 else "good"
    return Order(
        at=rng.uniform(0.0, until * 0.9),
        client=rng.randrange(2),
        model=rng.randrange(models),
        # Each of these takes three lives, one after the other.
        count=rng.choice((1, 2) if making in ("poison", "hung") else (1, 1, 2, 3, MOST_AT_ONCE)),
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
