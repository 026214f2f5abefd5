"""The worker's side of Celery. In `workers/`, only this package and app.py import Celery.

events.py sends task events, remote_control.py answers `inspect` and signed commands, consumer.py survives unreadable
messages, task_ingress.py and task_results.py are the Celery task endpoint (`send_task`), presentation.py names jobs
for Flower. Tested on celery 5.6 and 5.7.
"""

from __future__ import annotations

__all__: list[str] = []
