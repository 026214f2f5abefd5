"""What a running job has not written yet: which events travel together, again after an error, and what is kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.registry.broker.base import Emission, Position
from penstock.registry.envelope import Keyring, open_event
from penstock.registry.event_body import EventPart, decode_parts
from penstock.registry.tensors import Tensor
from penstock.workers.streaming.event_stream import EventStream
from penstock.workers.streaming.outbox import ENVELOPE_BYTES, KeptEvents, Outbox
from tests.workers.doubles import job_of
from tests.workers.streaming.jobs import Broker, writer_of

UNSIGNED = Keyring.parse(None)
MAX_BYTES = 1 << 24
BYTE = (Tensor("t", "uint8", (1,)),)


def chunk(size: int = 1) -> EventPart:
    """A chunk of so many bytes."""
    return EventPart(bytes(size), BYTE if size == 1 else (Tensor("t", "uint8", (size,)),))


def outbox() -> Outbox:
    """Of a job of its own."""
    return Outbox(job_of(), "run", UNSIGNED, MAX_BYTES)


def count_of(emission: Emission) -> int:
    """The events in its envelope."""
    return len(decode_parts(open_event(emission.sealed, UNSIGNED)[1]))


def write(box: Outbox, seq: int = 0) -> Emission:
    """One write that succeeds."""
    box.begin()
    emission = box.emission()
    after = emission.after
    box.written(Position(seq or (after.seq or 2) + emission.events, after.size + len(emission.sealed)))
    return emission


def test_events_that_wait_travel_together():
    """All of them in one envelope, as many as it says; nothing waits afterwards."""
    box = outbox()
    for _ in range(10):
        box.add(chunk())
    emission = write(box)
    assert emission.events == count_of(emission) == 10
    assert emission.after == Position()
    assert box.is_empty
    assert box.waiting_bytes == 0
    box.add(EventPart(fraction=0.5))
    assert write(box).after.seq == 12


def test_an_envelope_is_bounded():
    """Up to 64 KiB together; a larger chunk travels alone."""
    box = outbox()
    for _ in range(3000):
        box.add(chunk())
    first = write(box)
    assert 1000 < first.events < 3000
    assert len(first.sealed) <= ENVELOPE_BYTES
    counts = [first.events]
    while not box.is_empty:
        counts.append(write(box).events)
    assert sum(counts) == 3000
    for size in (1, 2 * ENVELOPE_BYTES, 1):
        box.add(chunk(size))
    assert [write(box).events for _ in range(3)] == [1, 1, 1]


def test_a_write_that_failed_is_repeated_as_it_was():
    """The same bytes after the same position; what came meanwhile travels with the next one."""
    box = outbox()
    box.add(chunk())
    box.begin()
    emission = box.emission()
    box.add(chunk())
    assert box.begin() == 0
    assert box.emission() is emission
    box.written(Position(3, 100))
    assert not box.is_empty
    assert write(box).after == Position(3, 100)


def test_a_lost_job_has_nothing_to_write():
    """The broker says that another worker holds it."""
    box = outbox()
    box.add(chunk())
    box.begin()
    box.emission()
    box.add(chunk())
    box.written(Position())
    assert box.job.is_lost
    assert box.is_empty


def test_runs_have_names_of_their_own():
    """Two runs of one job by one worker are told apart."""
    job, names = job_of(), set()
    writers = [writer_of(Broker(), lambda: 0.0) for _ in range(2)]
    for writer in (*writers, *writers):
        stream = EventStream(job, lambda: None, writer, UNSIGNED, MAX_BYTES)
        box = stream._outbox
        box.add(chunk())
        names.add(write(box).attempt)
    assert len(names) == 4


class Stream:
    """What a broker keeps when it is told `keep_from`: (last number, bytes) of each entry."""

    def __init__(self, max_bytes: int, earlier: list[int]) -> None:
        self.kept = KeptEvents(max_bytes)
        self.entries = [(3 + number, size) for number, size in enumerate(earlier)]
        self.position = Position()

    def append(self, count: int, size: int) -> None:
        if self.position.seq == 0:
            last = self.entries[-1][0] if self.entries else 1
            before = sum(size for _, size in self.entries)
            self.entries += [(last + 1, 0), (last + 1 + count, size)]
            self.position = Position(last + 1 + count, before + size)
            self.kept.begin(self.position, count, size)
            return
        keep_from = self.kept.keep_from(self.position, size)
        self.position = Position(self.position.seq + count, self.position.size + size)
        self.entries.append((self.position.seq, size))
        self.entries = [entry for entry in self.entries if entry[0] >= keep_from]

    @property
    def size(self) -> int:
        return sum(size for _, size in self.entries)


@given(
    earlier=st.lists(st.integers(1, 2000), max_size=3),
    sizes=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 6400)), min_size=2, max_size=300),
)
def test_the_last_bytes_are_kept_and_no_more(earlier: list[int], sizes: list[tuple[int, int]]):
    """From the second write of a run on never more than the limit; and what may stay stays, but for a 64th and the
    entry at its edge."""
    stream = Stream(6400, earlier)
    written = list(earlier)
    for count, size in sizes:
        stream.append(count, size)
        written.append(size)
        if len(written) > len(earlier) + 1:
            assert stream.size <= 6400
    own = sum(size for _, size in sizes)
    assert stream.size >= min(own, 6400 - 100 - max(size for _, size in sizes))
