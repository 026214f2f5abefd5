"""The worker's side of Celery. In `workers/`, only this package and app.py import Celery.

events.py sends task events, remote_control.py answers `inspect` and signed commands, consumer.py survives unreadable
messages. task_ingress.py, task_request.py, task_results.py and result_store.py are the Celery task endpoint
(`send_task`). presentation.py names jobs for Flower, application.py limits the wait for Celery's broker. Tested on
celery 5.6 and 5.7.
"""

from __future__ import annotations

__all__: list[str] = []
