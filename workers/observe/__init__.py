"""Metrics and health of a worker, and the interface through which listeners follow its jobs."""

from penstock.workers.observe.listener import Ended, JobListener
from penstock.workers.observe.metrics import BatchStats, InferenceMetrics
from penstock.workers.observe.probe import Probe

__all__ = ["BatchStats", "Ended", "InferenceMetrics", "JobListener", "Probe"]
