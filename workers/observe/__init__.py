"""Metrics and health of a worker, and the interface through which listeners follow its jobs."""

__all__: list[str] = []
