"""The incidents of a job: processes that ended while the job was on their model. Pure: names in a set of the broker.

<consumer>               its process died; the job becomes a suspect
<consumer> exceeded 30   its forward exceeded the limit of 30 s, and the job has no further one
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

__all__ = ["exceeded_limit_s", "timeout_incident"]

_TIMEOUT: Final = re.compile(r" exceeded (\d{1,9}(?:\.\d{1,9})?)\Z")


def timeout_incident(consumer: str, limit_s: float) -> str:
    """The incident of a job whose last forward exceeded its limit.

    >>> timeout_incident("gpu0@host:1f", 30.0)
    'gpu0@host:1f exceeded 30.000'
    """
    return f"{consumer} exceeded {limit_s:.3f}"


def exceeded_limit_s(incidents: Iterable[str]) -> float:
    """The limit in seconds that the last forward of a job exceeded; 0 if none did.

    >>> exceeded_limit_s(["gpu0@host:1f", "gpu1@host:2e exceeded 30.000"]), exceeded_limit_s(["gpu0@host:1f"])
    (30.0, 0.0)
    """
    found = (_TIMEOUT.search(incident) for incident in incidents)
    return max((float(match[1]) for match in found if match), default=0.0)
