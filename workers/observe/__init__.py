"""What a worker tells about itself: metrics, health, and the seam through which others watch its jobs."""

from workers.observe.metrics import InferenceMetrics
from workers.observe.probe import Probe
from workers.observe.watcher import Ended, Watcher

__all__ = ["Ended", "InferenceMetrics", "Probe", "Watcher"]
