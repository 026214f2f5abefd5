"""Versions that share a model's jobs: rollouts and A/B experiments, on top of compose/deploy.py.

changes.py      begins, changes and ends an experiment: registry first, then broker
gradual.py      begins and drives a rollout
comparison.py   begins an A/B experiment, and reports it
"""

from __future__ import annotations

__all__: list[str] = []
