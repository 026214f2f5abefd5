"""A lost device: nothing more begins on it, and the worker asks to be replaced."""

from __future__ import annotations

from pathlib import Path

from tests.packages import write_package
from tests.servers import wait_until
from tests.workers.stepped import (
    SteppedHarness,
)


def test_on_a_lost_device_nothing_more_is_begun_and_the_rest_is_given_back(
    harness: SteppedHarness, models_root: Path, forward_log: Path
):
    """What was on the model stays in the journal; what waited goes back at once; the process asks to be replaced."""
    write_package(
        models_root,
        "lost",
        """
        from penstock.workers.runtime.base import DeviceLost

        def build():
            def forward(inputs):
                if (inputs["x"][:, 0] < 0).any():
                    raise DeviceLost("cuda:0: an illegal access")
                return {"y": inputs["x"]}

            return forward
        """,
        max_batch_size=1,
    )
    worker = harness.start_worker()
    # The model thread is a real one here: what it does about the error is the point.
    worker.drain.start()
    try:
        lost, *waiting = harness.publish("lost", -1, 2, 3)
        wait_until(lambda: worker.drain.health.unhealthy_reason() is not None, 30, "the loss is noticed")
        assert worker.drain.health.unhealthy_reason() == "the device is lost: cuda:0: an illegal access"
        wait_until(lambda: not any(harness.job_record(job).is_claimed for job in waiting), 30, "the rest is given back")
        assert [job.job_id for job in worker.journal.jobs] == [lost]
    finally:
        worker.drain.stop(0.0)
