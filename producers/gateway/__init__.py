"""The HTTP gateway: one job behind every protocol. No protocol knows another.

    bytes -> server (uvicorn) -> application.py -> routing.py -> one route -> exchange.py: head, body, answer
                                                                   |
       jobs.py  predict.py  models.py  oip.py  openai.py  health.py |-> tensors.py: a body -> inputs of a job
                                                                   `-> waiting.py: submit, wait, cancel (AsyncClient)

An error of any route goes through problems.py, where each error has its status. The clients of the protocols see it in
the shape that their protocol has.
"""

from __future__ import annotations

__all__: list[str] = []
