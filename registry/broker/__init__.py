"""The broker seam: `base` is the protocol with its rules, the other modules keep them."""

__all__ = ["base", "memory", "redis_streams"]
