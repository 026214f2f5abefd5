"""What a worker tells about itself: metrics, health, and the seam through which others watch its jobs."""

from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.observe.probe import Probe
from penstock.workers.observe.watcher import Ended, Watcher

__all__ = ["Ended", "InferenceMetrics", "Probe", "Watcher"]
