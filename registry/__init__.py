"""What exists: the contracts that every process shares, and the models there are. Imports nothing from above."""

__all__ = [
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
