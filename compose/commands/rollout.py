"""`penstock rollout`: replace the version in production step by step, and only while the candidate is healthy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from penstock.compose.commands.experiment_access import opened, progress, via_option
from penstock.compose.commands.metrics_page import metrics_port_option, served_metrics
from penstock.compose.commands.options import reason_option, timeout_option
from penstock.compose.commands.registry_access import RegistryAccess
from penstock.compose.terminal import as_json_option, load_settings, print_data, print_drawn
from penstock.registry.errors import InvalidInput

if TYPE_CHECKING:
    from penstock.compose.experiments.changes import Experiments
    from penstock.registry.catalog.tables import Experiment
    from penstock.workers.observe.metrics import InferenceMetrics

__all__ = ["rollout"]


@click.group()
@via_option
@click.pass_context
def rollout(context: click.Context, via: str) -> None:
    """Replace the version in production step by step: 1, 5, 10, 25, 50 and 100 percent of the jobs.

    After each dwell a gate compares errors and latency of both versions. A healthy candidate advances; an unhealthy one
    goes back a step, or is rolled back. Each decision is in the registry and in the audit log.
    """
    context.obj = RegistryAccess(context.obj, via)


@rollout.command("start")
@click.argument("model")
@click.option("--to", required=True, metavar="VERSION", help="The candidate. It must be in staging.")
@click.option("--steps", metavar="LIST", help="Percentages, the last one 100 (default: 1,5,10,25,50,100).")
@click.option("--dwell", type=click.FloatRange(0), default=300.0, show_default=True, help="Seconds in each step.")
@click.option(
    "--min-samples", type=click.IntRange(2), default=100, show_default=True, help="Jobs per version and step."
)
@click.option(
    "--max-error-increase", type=float, default=0.01, show_default=True, help="Share of jobs that may fail in addition."
)
@click.option("--max-mean-ratio", type=float, default=1.25, show_default=True, help="Limit of the mean latency.")
@click.option("--max-p95-ratio", type=float, default=1.5, show_default=True, help="Limit of the 95th percentile.")
@click.option("--sticky", is_flag=True, help="All jobs of one sticky key, or else of one tenant, have one version.")
@click.option("--detach", is_flag=True, help="Only begin the first step; `rollout resume` drives it.")
@metrics_port_option
@reason_option
@timeout_option
@as_json_option
@click.pass_obj
def start(
    access: RegistryAccess,
    model: str,
    to: str,
    steps: str | None,
    dwell: float,
    min_samples: int,
    max_error_increase: float,
    max_mean_ratio: float,
    max_p95_ratio: float,
    sticky: bool,
    detach: bool,
    metrics_port: int | None,
    reason: str,
    timeout: float | None,
    as_json: bool,
) -> None:
    """Roll VERSION of MODEL out, and drive it to its end.

    Every live worker of the model loads the candidate first. The first step is `rollout_percent` of the endpoint
    `infer`, if it has one, or else 1 percent. With --sticky a key that has the candidate keeps it while the share
    grows. This command may be interrupted at any time: `rollout resume` goes on from the
    recorded step. Exit status 1 when the candidate was rolled back.

    \b
    penstock models promote minilm 2 --to staging
    penstock rollout start minilm --to 2
    penstock rollout start minilm --to 2 --steps 10,50,100 --dwell 60
    penstock rollout start minilm --to 2 --sticky
    """
    from penstock.compose.experiments.gradual import begin_rollout
    from penstock.safety.rollout import STEPS, HealthGate, RolloutPlan

    gate = HealthGate(min_samples, max_error_increase, max_mean_ratio, max_p95_ratio)
    plan = RolloutPlan(STEPS if steps is None else _parse_steps(steps), dwell, gate)
    plan.check()
    if detach and metrics_port is not None:
        raise click.UsageError("--metrics-port is of a process that drives. Expected it with `rollout resume`")
    with _opened(access, metrics_port) as (experiments, metrics):
        begun = begin_rollout(
            experiments,
            model,
            to,
            plan,
            now=time.time(),
            takes_own_steps=steps is None,
            is_sticky=sticky,
            reason=reason,
            timeout_s=timeout,
        )
        _finish(experiments, begun if detach else _driven(experiments, model, metrics), as_json)


@rollout.command("resume")
@click.argument("model")
@metrics_port_option
@reason_option
@as_json_option
@click.pass_obj
def resume(access: RegistryAccess, model: str, metrics_port: int | None, reason: str, as_json: bool) -> None:
    """Drive the rollout of MODEL on from its recorded step: after a pause, or after its driver was stopped.

    \b
    penstock rollout resume minilm
    penstock rollout resume minilm --metrics-port 9465
    """
    from dataclasses import replace

    with _opened(access, metrics_port) as (experiments, metrics):
        found = experiments.last(model, "rollout")
        if found.status == "paused":
            experiments.record(model, "resume", {"experiment": found.experiment})
            experiments.change(found, replace(found, status="running"), reason=reason or "the rollout is resumed")
        _finish(experiments, _driven(experiments, model, metrics), as_json)


@rollout.command("pause")
@click.argument("model")
@reason_option
@as_json_option
@click.pass_obj
def pause(access: RegistryAccess, model: str, reason: str, as_json: bool) -> None:
    """Keep the present share of the rollout of MODEL, whatever the gate says. Its driver ends.

    \b
    penstock rollout pause minilm --reason "the weekend"
    """
    from dataclasses import replace

    with opened(access) as experiments:
        found = experiments.running(model, "rollout")
        experiments.record(model, "pause", {"experiment": found.experiment})
        paused = experiments.change(found, replace(found, status="paused"), reason=reason or "the rollout is paused")
        _print(experiments, paused, as_json)


@rollout.command("stop")
@click.argument("model")
@reason_option
@as_json_option
@click.pass_obj
def stop(access: RegistryAccess, model: str, reason: str, as_json: bool) -> None:
    """End the rollout of MODEL: the version in production answers all jobs from the next claim on.

    \b
    penstock rollout stop minilm --reason "wrong answers"
    """
    with opened(access) as experiments:
        found = experiments.running(model, "rollout")
        experiments.record(model, "stop", {"experiment": found.experiment})
        stopped = experiments.stop(found, reason=reason or "the rollout is stopped")
        _print(experiments, stopped, as_json)


@rollout.command("status")
@click.argument("model")
@as_json_option
@click.pass_obj
def status(access: RegistryAccess, model: str, as_json: bool) -> None:
    """Show where the rollout of MODEL stands, in one line.

    \b
    penstock rollout status minilm
    """
    with opened(access) as experiments:
        _print(experiments, experiments.last(model, "rollout"), as_json)


@rollout.command("report")
@click.argument("model")
@as_json_option
@click.pass_obj
def report(access: RegistryAccess, model: str, as_json: bool) -> None:
    """Show the rollout of MODEL: the step, the gate's verdict now, and the figures of both versions.

    \b
    penstock rollout report minilm --json
    """
    from penstock.compose.experiments.gradual import rollout_report
    from penstock.compose.views.experiments import draw_rollout

    with opened(access) as experiments:
        data = rollout_report(experiments, experiments.last(model, "rollout"), time.time())
    print_drawn(data, as_json, lambda: draw_rollout(data))


def _parse_steps(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(step) for step in text.split(","))
    except ValueError:
        raise InvalidInput(f"Bad --steps {text!r:.80}. Expected percentages such as 1,10,50,100") from None


@contextmanager
def _opened(access: RegistryAccess, metrics_port: int | None) -> Iterator[tuple[Experiments, InferenceMetrics]]:
    """The experiments for a process that drives, and its metrics, which are served if a port was named."""
    from penstock.workers.observe.metrics import InferenceMetrics

    settings = load_settings(access.environ)
    metrics = InferenceMetrics(settings.inference.metrics_buckets)
    with served_metrics(metrics, settings, metrics_port, "rollout"), opened(access, metrics.alert) as experiments:
        yield experiments, metrics


def _driven(experiments: Experiments, model: str, metrics: InferenceMetrics) -> Experiment:
    from penstock.compose.experiments.gradual import RolloutDriver

    try:
        driver = RolloutDriver(experiments, model, on_progress=progress, on_decision=metrics.rollout_decision)
        return driver.run()
    except (KeyboardInterrupt, SystemExit):
        progress(f"The present share of {model} stays. `penstock rollout resume {model}` goes on, `stop` ends it")
        raise


def _finish(experiments: Experiments, experiment: Experiment, as_json: bool) -> None:
    _print(experiments, experiment, as_json)
    if experiment.status == "stopped":
        raise SystemExit(1)


def _print(experiments: Experiments, experiment: Experiment, as_json: bool) -> None:
    from penstock.compose.experiments.gradual import rollout_report
    from penstock.compose.views.experiments import rollout_line

    data = rollout_report(experiments, experiment, time.time())
    print_data(data, as_json, rollout_line(data))
