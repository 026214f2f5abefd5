"""The command line, the embedded stack with its supervisor, and deployments. May import every other package.

cli.py, commands/   the `penstock` command             terminal.py   shared by the commands
deploy.py, rollout/ the change of the active version   stack/        Redis, workers and Flower as child processes
jobs/               dead letters, purge, JSON tensors  views/        the state of the fleet as tables
doctor/             the checks of `penstock doctor`    bench.py, demo.py, docstrings.py   measure and show
"""

from __future__ import annotations

__all__: list[str] = []
