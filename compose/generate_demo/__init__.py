"""`penstock demo --generate`: a small decoder learns from docstrings, is served, and writes eight texts at once.

recipe    what the model is made of
training  docstrings -> tokenizer and model
store     the model under the home, made once
live      texts on the terminal as they grow
figures   times of a client, counts of the engine -> the closing table
show      the demo from end to end
"""

from __future__ import annotations

__all__: list[str] = []
