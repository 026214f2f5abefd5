"""`Client.in_memory` with sealed payloads: its broker holds no input and no output, and nothing else changes."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from penstock import AsyncClient, Client
from penstock.registry.broker.base import JobRecord
from penstock.registry.errors import IdempotencyConflict
from penstock.registry.settings import Settings
from tests.payload_keys import DATA_KEY_TEXT
from tests.testing.models import PATIENCE_S, Gate, declared, row

MARK = 1234567.25
MARKS = [np.float32(factor * MARK).tobytes() for factor in (1, 2)]
SEALING = {"l2_encryption_key": DATA_KEY_TEXT, "privacy.seal_payloads": "on"}


def settings_of(**overrides: Any) -> Settings:
    return Settings.load(overrides={**SEALING, **overrides})


def record_of(client: Any, job: Any) -> JobRecord:
    """The record of a job in the broker of its client."""
    record: JobRecord | None
    (record,) = client._broker.job_records([job.id])
    assert record is not None
    return record


@pytest.mark.parametrize("is_sealed", [True, False])
def test_every_call_works_as_without_sealing(is_sealed: bool):
    """submit, submit_many, map and streams; the record has the marks only while payloads are not sealed."""
    settings = settings_of(**({} if is_sealed else {"privacy.seal_payloads": "off"}))
    with Client.in_memory({"double": declared()}, settings=settings) as client:
        jobs = [client.submit("double", row(MARK)), *client.submit_many("double", [row(MARK + n) for n in range(20)])]
        for number, job in enumerate(jobs):
            expected = 2 * np.float32(MARK + max(0, number - 1))
            assert job.result(PATIENCE_S)["y"].tolist() == [[expected] * 4]
        results = [record_of(client, job).result for job in jobs]
        assert any(mark in result for mark in MARKS for result in results) is not is_sealed
        rows = np.arange(40, dtype=np.float32).reshape(10, 4)
        assert np.array_equal(client.map("double", rows), rows * 2)
        (end,) = [event for event in jobs[0].stream(timeout=PATIENCE_S) if event.is_terminal]
        assert end.data["y"].tolist() == [[2 * np.float32(MARK)] * 4]
        assert jobs[0].info().status == "completed"


def test_equal_jobs_share_a_forward_and_no_bytes():
    """Cache and single flight ask for the plain inputs: sealed bytes differ, and equal jobs hit all the same.

    Every result is sealed for its own job.
    """
    gate = Gate()
    with Client.in_memory({"gate": declared(gate)}, settings=settings_of()) as client:
        jobs = [client.submit("gate", row(MARK)) for _ in range(4)]
        gate.await_forward()
        jobs += [client.submit("gate", row(MARK)) for _ in range(4)]
        gate.opened.set()
        for job in jobs:
            assert job.result(PATIENCE_S)["y"].tolist() == [[2 * np.float32(MARK)] * 4]
        cached = client.submit("gate", row(MARK))
        assert cached.result(PATIENCE_S)["y"].tolist() == [[2 * np.float32(MARK)] * 4]
        assert cached.info().is_cached
        assert gate.forwards == [[MARK]]
        bodies = [record_of(client, job).result[-48:] for job in (*jobs, cached)]
        assert len(set(bodies)) == len(bodies)


def test_an_idempotency_key_knows_equal_inputs():
    """Its fingerprint is of the plain inputs: the second submit returns the first job, other inputs are a conflict."""
    with Client.in_memory({"double": declared()}, settings=settings_of()) as client:
        first = client.submit("double", row(MARK), idempotency_key="order-1")
        assert client.submit("double", row(MARK), idempotency_key="order-1").id == first.id
        with pytest.raises(IdempotencyConflict):
            client.submit("double", row(MARK + 1), idempotency_key="order-1")
        assert first.result(PATIENCE_S)["y"].tolist() == [[2 * np.float32(MARK)] * 4]


async def _answered() -> list[float]:
    async with AsyncClient.in_memory({"double": declared()}, settings=settings_of()) as client:
        jobs = [await client.submit("double", row(number)) for number in range(5)]
        return [float((await job.result(PATIENCE_S))["y"][0, 0]) for job in jobs]


def test_the_asyncio_client_seals_as_well():
    """One key for both clients."""
    assert asyncio.run(_answered()) == [0.0, 2.0, 4.0, 6.0, 8.0]
