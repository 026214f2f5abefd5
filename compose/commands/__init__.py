"""The commands of `penstock`: options, output and exit status. The other folders of compose/ do the work.

models.py with promotion.py and serving.py; audit.py; cache.py; keys.py; dead.py; queue.py; status.py; cost.py;
doctor.py; submit.py; run.py
"""

from __future__ import annotations

__all__: list[str] = []
