"""One signed POST to a receiver, as Standard Webhooks says: for the ends of jobs and for safety alerts.

event -> signing.py: body and signature -> request.py: one POST -> schedule.py: delivered, later or dead
                                             `-> address.py: which addresses may be called
"""

from __future__ import annotations

__all__: list[str] = []
