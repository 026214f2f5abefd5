"""A program that uses every call of both clients once. It needs the base install and nothing of the tests.

    PENSTOCK_REDIS_URL=... python client_calls.py MODEL LOCAL_MODEL

MODEL answers `y` for `x`, both float32 (batch, 4). LOCAL_MODEL has a package under the models root and no worker.
Prints the number of answers.
"""

from __future__ import annotations

import asyncio
import sys

from penstock import AsyncClient, Client, Retry

ROW = [1.0, 2.0, 3.0, 4.0]
INPUTS = {"x": [ROW]}
IN_MEMORY = {"double": lambda inputs: {"y": inputs["x"] * 2}}


def blocking(model: str, local_model: str) -> int:
    """Every call of Client and of JobHandle."""
    with Client.from_env() as client:
        job = client.submit(model, INPUTS, deadline_s=60, idempotency_key="once", retry=Retry(2), priority="high")
        answers = [job.result(180)["y"], client.job(job.id).result(180)["y"]]
        assert job.status() == "completed"
        assert job.info().attempt == 1
        # No experiment divides the jobs.
        assert (job.rate(0.5), client.report_quality(job.id, 0.5)) == (False, False)
        assert [event.type for event in job.stream()][-1] == "completed"
        jobs = client.submit_many(model, [INPUTS, INPUTS])
        assert {job.id for job in client.as_completed(jobs, 60)} == {job.id for job in jobs}
        answers += [outputs["y"] for outputs in client.gather(jobs)]
        answers += client.map(model, [ROW, ROW], progress=True)
        assert client.submit(local_model, INPUTS).cancel() == "cancelled"
    client.close()
    with Client.in_memory(IN_MEMORY) as in_memory:
        assert in_memory.submit("double", INPUTS).result(180)["y"].tolist() == [[2.0, 4.0, 6.0, 8.0]]
    return len(answers)


async def on_a_loop(model: str, local_model: str) -> int:
    """Every call of AsyncClient and of AsyncJobHandle."""
    async with AsyncClient.from_env() as client:
        job = await client.submit(model, INPUTS)
        answers = [(await job.result(180))["y"], (await client.job(job.id).result(180))["y"]]
        assert await job.status() == "completed"
        assert (await job.info()).attempt == 1
        assert (await job.rate(0.5), await client.report_quality(job.id, 0.5)) == (False, False)
        assert [event.type async for event in job.stream()][-1] == "completed"
        jobs = await client.submit_many(model, [INPUTS, INPUTS])
        assert {job.id async for job in client.as_completed(jobs, 60)} == {job.id for job in jobs}
        answers += [outputs["y"] for outputs in await client.gather(jobs)]
        answers += await client.map(model, [ROW, ROW], progress=True)
        assert await (await client.submit(local_model, INPUTS)).cancel() == "cancelled"
    await client.aclose()
    async with AsyncClient.in_memory(IN_MEMORY) as in_memory:
        assert (await (await in_memory.submit("double", INPUTS)).result(180))["y"].tolist() == [[2.0, 4.0, 6.0, 8.0]]
    return len(answers)


if __name__ == "__main__":
    sys.stdout.write(f"{blocking(*sys.argv[1:]) + asyncio.run(on_a_loop(*sys.argv[1:]))}\n")
