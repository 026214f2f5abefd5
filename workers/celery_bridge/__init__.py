"""Celery's part of a worker. This is the only package that touches Celery's private parts."""

from __future__ import annotations

__all__: list[str] = []
