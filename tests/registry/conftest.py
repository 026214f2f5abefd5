"""The fixtures of tests/producers, for test_admission.py: jobs are admitted through clients."""

from __future__ import annotations

from tests.producers.conftest import broker, client, parked

__all__ = ["broker", "client", "parked"]
