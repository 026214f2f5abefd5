"""`penstock shadow`: run a candidate beside the active version, on a sample of answered jobs."""

from __future__ import annotations

from collections.abc import Mapping

import click

from penstock.compose.commands.metrics_page import metrics_port_option, served_metrics
from penstock.compose.commands.options import form_option
from penstock.compose.terminal import as_json_option, connected, counted, open_broker, print_data, print_drawn

__all__ = ["shadow"]

_MIB = 1024 * 1024


@click.group()
def shadow() -> None:
    """Compare a candidate with the active version, on a sample of answered jobs. No answer changes.

    Workers mirror sampled jobs to the shadow queue after their commit. A shadow worker runs the candidate on them.
    """


@shadow.command("start")
@click.argument("model")
@click.option("--candidate", required=True, metavar="VERSION", help="The version that runs on the sample.")
@click.option("--sample", "share", type=float, default=0.01, show_default=True, help="The share of answered jobs.")
@click.option("--hours", type=float, default=168.0, show_default=True, help="The shadow ends by itself after these.")
@click.option("--max-pairs", type=int, default=10_000, show_default=True, help="Pairs in the queue.")
@click.option("--max-mb", type=click.FloatRange(0, min_open=True), default=64.0, show_default=True, help="MiB in it.")
@click.option(
    "--pair-ttl", type=click.FloatRange(1), default=600.0, show_default=True, help="Seconds that a pair may wait."
)
@form_option
@click.option(
    "--canary-pairs",
    type=click.IntRange(0),
    default=1500,
    show_default=True,
    help="Pairs that the canary needs; 0: no canary.",
)
@as_json_option
@click.pass_obj
def start(
    environ: Mapping[str, str],
    model: str,
    candidate: str,
    share: float,
    hours: float,
    max_pairs: int,
    max_mb: float,
    pair_ttl: float,
    form: str,
    canary_pairs: int,
    as_json: bool,
) -> None:
    """Mirror a share of the answered jobs of MODEL from now on, for the candidate.

    Every worker of the model follows within about a second. Pairs beyond the limits of the queue are dropped. The
    candidate must have the inputs and outputs of the active version. With --form it may be the active version itself.
    A model has one shadow at a time. A canary judges the pairs: its FAIL ends the shadow.

    \b
    penstock shadow start minilm --candidate 2
    penstock shadow start minilm --candidate 2 --sample 0.1 --hours 24
    penstock shadow start minilm --candidate 1 --form int8
    """
    from penstock.compose import shadow as shadows

    settings = connected(environ)
    with open_broker(settings) as broker:
        order = shadows.start(
            settings,
            broker,
            model,
            candidate,
            share,
            hours=hours,
            max_pairs=max_pairs,
            max_bytes=int(max_mb * _MIB),
            pair_ttl_s=pair_ttl,
            form=form,
            canary_pairs=canary_pairs,
        )
    data = {"id": order.id, "model": model, "candidate": order.candidate, "form": form, "share": order.share}
    told = f"{order.share:.3%} of the answered jobs of {model} are mirrored for {order.label}"
    print_data(data, as_json, f"{told}. Run `penstock shadow run {model}` where the candidate is to run")


@shadow.command("stop")
@click.argument("model")
@as_json_option
@click.pass_obj
def stop(environ: Mapping[str, str], model: str, as_json: bool) -> None:
    """Stop the shadow of MODEL and delete its pairs. The report stays for 30 days.

    \b
    penstock shadow stop minilm
    """
    from penstock.compose import shadow as shadows

    stopped = shadows.stop(connected(environ), model)
    print_data(stopped, as_json, f"The shadow of {model} has ended. {counted(stopped['discarded'], 'pair')} deleted.")


@shadow.command("status")
@click.argument("model", required=False, default="")
@as_json_option
@click.pass_obj
def status(environ: Mapping[str, str], model: str, as_json: bool) -> None:
    """Show the shadow of MODEL, or all that run: queue, counts of the mirror, the shadow worker.

    \b
    penstock shadow status
    penstock shadow status minilm --json
    """
    from penstock.compose import shadow as shadows
    from penstock.compose.views.shadow import draw_status

    settings = connected(environ)
    with open_broker(settings) as broker:
        found = shadows.status(settings, broker, model)
    print_drawn(found, as_json, lambda: draw_status(found))


@shadow.command("report")
@click.argument("model")
@as_json_option
@click.pass_obj
def report(environ: Mapping[str, str], model: str, as_json: bool) -> None:
    """Show what the shadow of MODEL has shown: agreement with its interval, each figure, drift, the worst pairs.

    Texts of the worst pairs are redacted; in a private mode they are left out.

    \b
    penstock shadow report minilm
    penstock shadow report minilm --json
    """
    from penstock.compose import shadow as shadows
    from penstock.compose.views.shadow import draw_report

    found = shadows.report(connected(environ), model)
    print_drawn(found, as_json, lambda: draw_report(found))


@shadow.command("run")
@click.argument("model")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option(
    "--priority",
    type=click.Choice(["idle", "normal"]),
    default="idle",
    show_default=True,
    help="Of its processes. idle: workers on the same machine always go first. normal: for a machine of its own.",
)
@metrics_port_option
@click.pass_obj
def run(environ: Mapping[str, str], model: str, device: str, priority: str, metrics_port: int | None) -> None:
    """Run the candidate of MODEL on mirrored jobs until Ctrl-C. Several such processes share the work.

    It waits while the model has no shadow. The candidate has a process of its own: one that hangs or crashes is
    started again, and the pair counts as a failure.

    \b
    penstock shadow run minilm
    penstock shadow run minilm --priority normal
    penstock shadow run minilm --metrics-port 9462
    """
    from penstock.compose.shadow import serve_shadow
    from penstock.registry import logs
    from penstock.workers.observe.metrics import InferenceMetrics

    settings = connected(environ)
    logs.configure()
    metrics = InferenceMetrics(settings.inference.metrics_buckets)
    with served_metrics(metrics, settings, metrics_port, "shadow"):
        serve_shadow(settings, model, metrics, device=device, gives_way=priority == "idle")
