"""`penstock demo --safety`: a candidate is refused, another one is promoted, then it breaks and a breaker holds it off.

    models.py   the models root: MiniLM, and a small model with a fault that only its faster form has
    stage.py    a private stack, traffic, and the commands that the demo runs as a user would
    acts.py     the three acts -> facts
    charts.py   facts -> PNG;  page.py  facts and pictures -> one HTML file;  show.py  all of it, in order

Every figure is measured in the run that shows it.
"""

from __future__ import annotations

__all__: list[str] = []
