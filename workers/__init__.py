"""How work leaves. In reading order:

drain          the loop of the I/O thread: claim, route, batch, run, commit
intake         delivery -> opened job, or dead letter
router         job -> the way it goes
backlog        every job that has not begun
scheduler      backlog -> batches on the model threads
batch_run      one micro-batch on its way through a model
executor       the model threads
completer      ended runs -> commits
results        outputs -> sealed results
claims         how many jobs to ask for, and the wait for them
release        jobs that return to the broker
leases         a thread that renews leases and takes over lapsed ones
telemetry      settled batches -> events, metrics, log lines
status         the report of this worker, once a second
assembly       settings -> a drain with all its parts
worker, app    the process around it, and Celery's application
batching/      pending jobs -> micro-batches, pure
cache/         equal jobs: shared forwards and cached answers
versions/      the versions of models: which are loaded, which is active
runtime/  compilation/  frameworks/  levels/    models, and faster variants of them
generation/     text generation: an engine, and the runtime that gives it jobs
celery_bridge/  process/  observe/              Celery, the process, metrics
"""

from __future__ import annotations

__all__: list[str] = []
