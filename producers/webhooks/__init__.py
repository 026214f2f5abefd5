"""Webhooks: a signed POST to a URL of the producer's choice when its job has ended.

broker (registry/broker/webhooks.py) --> Deliverer --> event.py: the event --> registry/webhooks/: one signed POST
                                             `-------> settles the try: delivered, later or dead
"""

from __future__ import annotations

__all__: list[str] = []
