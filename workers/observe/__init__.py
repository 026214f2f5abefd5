"""What a worker tells about itself: metrics, health, and the seam through which others watch its jobs."""

from penstock.workers.observe.listener import Ended, JobListener
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.observe.probe import Probe

__all__ = ["Ended", "InferenceMetrics", "Probe", "JobListener"]
