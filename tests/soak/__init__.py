"""`make soak`: a million jobs while workers and the broker are killed; what was lost, repeated, and held in memory.

plan.py     which jobs, of which model and size; when to kill       client.py   one client process, and its tally
stage.py    Redis, workers, client processes                       resources.py   memory and CPU by process
models.py   the three models                                       report.py   the tables, and whether it held
__main__.py the run: python -m tests.soak --help
"""

from __future__ import annotations

__all__: list[str] = []
