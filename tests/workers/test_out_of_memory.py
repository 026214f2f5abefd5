"""Out of memory: batches become smaller where the device has no room, and larger again later."""

from __future__ import annotations

from pathlib import Path

from tests.packages import write_package
from tests.workers.stepped import (
    SteppedHarness,
)


def write_narrow(root: Path, room: Path, name: str = "narrow") -> Path:
    """Answers 2 x where the file `room` has room for so many rows."""
    return write_package(
        root,
        name,
        f"""
        from pathlib import Path

        from penstock.registry.errors import OutOfMemory

        def build():
            def forward(inputs):
                if len(inputs["x"]) > int(Path({str(room)!r}).read_text()):
                    raise OutOfMemory("no room")
                return {{"y": inputs["x"] * 2}}

            return forward
        """,
    )


def test_a_cap_is_learnt_and_later_relaxed(harness: SteppedHarness, models_root: Path, tmp_path: Path):
    """Room for four rows: batches of 16 are split, later ones have four rows, and after a while of room for all they
    grow again; every job is answered.
    """
    room = tmp_path / "room"
    room.write_text("16")
    write_narrow(models_root, room)
    worker = harness.start_worker()
    room.write_text("4")
    jobs = harness.publish("narrow", *range(48))
    batches = worker.forwards()
    # The second was ready before the first had ended.
    assert [len(batch) for batch in batches] == [16, 16, 4, 4, 4, 4]
    assert worker.counted("penstock_out_of_memory") == 2
    room.write_text("16")
    for size in (4, 8, 16):
        numbers = range(len(jobs), len(jobs) + 16)
        jobs += harness.publish("narrow", *numbers)
        assert [len(batch) for batch in worker.forwards()] == [size] * (16 // size)
        harness.now += 300.0
        harness.pass_time(0.5)
    assert [harness.answer(job) for job in jobs] == [2.0 * n for n in range(len(jobs))]


def test_one_job_that_fits_no_device_does_not_narrow_the_batches_of_others(harness: SteppedHarness, models_root: Path):
    """Any client can send one. Its batch is bisected until it fails alone, and the others are answered."""
    write_package(
        models_root,
        "greedy",
        """
        import numpy as np

        def build():
            def forward(inputs):
                if (inputs["x"] < 0).any():
                    return {"y": np.zeros(1 << 50, np.float32)}
                return {"y": inputs["x"] * 2}

            return forward
        """,
    )
    worker = harness.start_worker()
    for start in (0, 20, 40):
        # Other numbers each time: the cache knows answers.
        numbers = [*range(start, start + 11), -1]
        jobs = harness.publish("greedy", *numbers)
        worker.forwards()
        assert [harness.answer(job) for job in jobs] == [2.0 * n if n >= 0 else "ModelError" for n in numbers]
    harness.publish("greedy", *range(100, 116))
    assert [len(batch) for batch in worker.forwards()] == [16]


def test_one_row_that_never_fits_does_not_narrow_later_batches(
    harness: SteppedHarness, models_root: Path, tmp_path: Path
):
    """A job that fits no device by itself fails by itself, and the batches after it are as large as before."""
    room = tmp_path / "room"
    room.write_text("16")
    write_narrow(models_root, room)
    worker = harness.start_worker()
    room.write_text("0")
    (job,) = harness.publish("narrow", 1)
    assert worker.forwards() == [[job]]
    assert harness.answer(job) == "ModelError"
    room.write_text("16")
    harness.publish("narrow", *range(16))
    assert [len(batch) for batch in worker.forwards()] == [16]
