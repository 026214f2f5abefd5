"""Child processes: the embedded stack of Redis, workers, Flower and gateway, and the supervisor that restarts them.

local.py     the embedded stack          supervisor.py   restarts programs that crash or hang
fleet.py     one worker per device       launch.py       ties the life of a child to its supervisor
gateway.py   the HTTP gateway            restarts.py     crashes and next starts, for `penstock status`
"""

from __future__ import annotations

__all__: list[str] = []
