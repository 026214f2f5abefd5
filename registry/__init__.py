"""What exists: the contracts that every process shares, and the models there are. Imports nothing from above."""

__all__ = [
    "admission",
    "broker",
    "envelope",
    "errors",
    "local_stack",
    "logs",
    "metrics",
    "package",
    "queues",
    "settings",
    "signature",
    "tensors",
]
