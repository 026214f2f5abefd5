"""The `penstock` command: options of all commands, and the list of commands (compose/commands/).

    up, worker, bench, demo        run a stack or workers in the foreground
    serve                          the HTTP gateway
    submit, job                    submit one job, or look at one
    new                            write a model package to begin with
    models                         versions of models, and the active one
    shadow                         a candidate on a sample of answered jobs, beside the active version
    rollout, ab                    versions that share the jobs: step by step, or side by side
    status, workers, top, doctor   inspect a running stack
    cost                           costs of jobs, and projected savings
    dead, queue, webhooks          dead letters, pauses and purges, webhooks of ended jobs
    audit                          entries of the audit log, and their verification
    cache                          cached answers on this machine's disk
    keys                           API keys of the gateway, and the keys that encrypt data

Frameworks, NumPy and the terminal library are imported by the commands that need them, so that --help is quick.
A refusal is one line on stderr: exit status 1, or EXIT_CONFIGURATION for settings or a machine that cannot work;
compose/terminal.py sees to that.
"""

from __future__ import annotations

import os
from pathlib import Path

import click

from penstock.compose.commands.ab import ab
from penstock.compose.commands.audit import audit
from penstock.compose.commands.cache import cache
from penstock.compose.commands.canary import canary
from penstock.compose.commands.cost import cost
from penstock.compose.commands.dead import dead
from penstock.compose.commands.doctor import doctor
from penstock.compose.commands.job import job
from penstock.compose.commands.keys import keys
from penstock.compose.commands.models import models
from penstock.compose.commands.new import new
from penstock.compose.commands.policy import policy
from penstock.compose.commands.queue import queue
from penstock.compose.commands.rollout import rollout
from penstock.compose.commands.run import bench, demo, up, worker
from penstock.compose.commands.serve import serve
from penstock.compose.commands.shadow import shadow
from penstock.compose.commands.status import status, top, workers
from penstock.compose.commands.submit import submit
from penstock.compose.commands.webhooks import webhooks
from penstock.compose.terminal import Commands

__all__ = ["main"]


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", type=click.Path(path_type=Path), help="A YAML file of settings.")
@click.version_option(package_name="penstock")
@click.pass_context
def main(context: click.Context, config: Path | None) -> None:
    """Queue-based inference: submit jobs, drain them in micro-batches, stream the results.

    \b
    penstock demo                                 see it work on this machine
    penstock up                                   run Redis, workers and Flower in the foreground
    penstock submit minilm -i text="a sentence" --wait
    """
    # Child processes read the same file: its path is passed in the environment.
    context.obj = {**os.environ, **({"PENSTOCK_CONFIG": str(config.absolute())} if config else {})}


for _command in (
    up,
    worker,
    serve,
    bench,
    demo,
    submit,
    job,
    new,
    models,
    policy,
    shadow,
    canary,
    rollout,
    ab,
    status,
    workers,
    top,
    cost,
    doctor,
    dead,
    queue,
    webhooks,
    audit,
    cache,
    keys,
):
    main.add_command(_command)
