"""`penstock ab`: versions answer their shares of the jobs side by side, and are compared at any time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from penstock.compose.commands.experiment_access import opened, via_option
from penstock.compose.commands.options import reason_option, timeout_option
from penstock.compose.commands.registry_access import RegistryAccess
from penstock.compose.terminal import as_json_option, print_data, print_drawn

if TYPE_CHECKING:
    from penstock.registry.catalog.tables import Experiment
    from penstock.safety.ab_testing import Metric

__all__ = ["ab"]


@click.group()
@via_option
@click.pass_context
def ab(context: click.Context, via: str) -> None:
    """Compare versions of a model on live jobs: each version answers its share.

    The report may be read at any time: its intervals hold for all looks together.
    """
    context.obj = RegistryAccess(context.obj, via)


@ab.command("start")
@click.argument("model")
@click.option("--arms", required=True, metavar="LIST", help="VERSION=WEIGHT, ...; one of them is in production.")
@click.option("--sticky", is_flag=True, help="All jobs of one sticky key, or else of one tenant, have one version.")
@click.option(
    "--metric",
    type=click.Choice(["latency_ms", "error_rate", "quality"]),
    default="latency_ms",
    show_default=True,
    help="The metric of the verdict.",
)
@click.option(
    "--samples", type=click.IntRange(4), default=10_000, show_default=True, help="Jobs at which Welch's test is due."
)
@click.option("--alpha", type=float, default=0.05, show_default=True, help="Chance to call equal versions different.")
@click.option(
    "--smallest-effect",
    "effects",
    multiple=True,
    metavar="METRIC=VALUE",
    help="The smallest difference that matters, such as latency_ms=2 or error_rate=0.01. May be repeated.",
)
@click.option(
    "--power", type=float, default=0.8, show_default=True, help="Chance that Welch's test finds the smallest effect."
)
@click.option(
    "--min-samples", type=click.IntRange(2), default=100, show_default=True, help="Jobs of each version for a verdict."
)
@click.option("--quality-of-error", type=float, help="The quality of a failed job (default: it has none).")
@click.option("--lower-quality-is-better", is_flag=True, help="The reported quality is a cost or an error.")
@reason_option
@timeout_option
@as_json_option
@click.pass_obj
def start(
    access: RegistryAccess,
    model: str,
    arms: str,
    sticky: bool,
    metric: Metric,
    samples: int,
    alpha: float,
    effects: tuple[str, ...],
    power: float,
    min_samples: int,
    quality_of_error: float | None,
    lower_quality_is_better: bool,
    reason: str,
    timeout: float | None,
    as_json: bool,
) -> None:
    """Let versions of MODEL share its jobs, once every live worker has them in memory.

    Jobs that name a version are not part of the experiment. Clients give the sticky key as `sticky_key`, and report
    the quality of an answer with `job.rate(0.8)` or `client.report_quality(job_id, 0.8)`.

    With a smallest effect of its metric, the verdict may be `equivalent`: the difference is surely smaller. The report
    has the power for it, and the jobs that it needs. The unit is that of the metric: milliseconds, a share of jobs, or
    the quality's.

    \b
    penstock ab start minilm --arms 1=0.9,2=0.1
    penstock ab start minilm --arms 1=0.5,2=0.25,3=0.25 --sticky
    penstock ab start minilm --arms 1=0.5,2=0.5 --metric quality --quality-of-error 0
    penstock ab start minilm --arms 1=0.5,2=0.5 --smallest-effect latency_ms=2 --power 0.9
    """
    from penstock.compose.experiments.comparison import begin_comparison, parse_arms, parse_effects
    from penstock.safety.ab_testing import ExperimentPlan

    plan = ExperimentPlan(
        primary=metric,
        planned_samples=samples,
        alpha=alpha,
        power=power,
        min_samples=min_samples,
        smallest_effects=parse_effects(effects),
        is_higher_quality_better=not lower_quality_is_better,
        quality_of_error=quality_of_error,
    )
    weights = parse_arms(arms)
    with opened(access) as experiments:
        begun = begin_comparison(experiments, model, weights, plan, is_sticky=sticky, reason=reason, timeout_s=timeout)
    _print_begun(begun, as_json)


def _print_begun(begun: Experiment, as_json: bool) -> None:
    shares = {arm.version: arm.weight for arm in begun.arms}
    data = {
        "model": begun.name,
        "experiment": begun.experiment,
        "arms": shares,
        "epoch": begun.epoch,
        "plan": begun.plan["comparison"],
    }
    text = ", ".join(f"{version}={weight:g}" for version, weight in shares.items())
    print_data(data, as_json, f"{begun.name}: {begun.experiment} divides the jobs: {text} (epoch {begun.epoch})")


@ab.command("stop")
@click.argument("model")
@reason_option
@as_json_option
@click.pass_obj
def stop(access: RegistryAccess, model: str, reason: str, as_json: bool) -> None:
    """End the A/B experiment of MODEL: the version in production answers all jobs from the next claim on.

    \b
    penstock ab stop minilm
    """
    with opened(access) as experiments:
        found = experiments.running(model, "ab")
        experiments.record(model, "stop", {"experiment": found.experiment})
        stopped = experiments.stop(found, reason=reason or "the A/B experiment is stopped")
        production = experiments.registry.find(model).version
    data = {"model": model, "experiment": stopped.experiment, "status": stopped.status, "production": production}
    print_data(data, as_json, f"{model}: {stopped.experiment} is stopped; {production} answers all jobs")


@ab.command("report")
@click.argument("model")
@as_json_option
@click.pass_obj
def report(access: RegistryAccess, model: str, as_json: bool) -> None:
    """Show the A/B experiment of MODEL, or the last one: each arm, each pair, and the verdict so far.

    The last table has the power of Welch's test for the smallest effects of `ab start`, the jobs that they need, and
    the difference that the jobs so far can detect.

    \b
    penstock ab report minilm --json
    """
    from penstock.compose.experiments.comparison import comparison_report
    from penstock.compose.views.experiments import draw_comparison

    with opened(access) as experiments:
        data = comparison_report(experiments, experiments.last(model, "ab"))
    print_drawn(data, as_json, lambda: draw_comparison(data))
