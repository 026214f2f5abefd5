"""Descriptors that a model closes: the log goes on, the standard streams are put back, the others are missed."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.workers.process.descriptors import OwnDescriptor, OwnLog, first_lost, moved_up
from tests.servers import ROOT


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """A descriptor that the test may close."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    try:
        os.close(fd)
    except OSError:
        # The test has closed it.
        return


def test_a_descriptor_is_intact_while_it_stands_for_the_same_file(file: int, tmp_path: Path):
    """Not when it was closed, and not when its number stands for another file."""
    own = OwnDescriptor(file)
    assert first_lost({"file": own}) == ""
    os.close(file)
    assert first_lost({"file": own}) == "file"
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    os.dup2(other, file)
    os.close(other)
    assert first_lost({"file": own, "another": own}) == "file"


def test_the_log_survives_the_end_of_its_stream(file: int, tmp_path: Path):
    """Lines go to a copy. When the copy was closed, another is taken; when both were, the line raises OSError."""
    log = OwnLog(file)
    os.close(log._copy)
    log.write("a copy of the copy: \udcff\n")
    os.close(file)
    log.write("no original\n")
    assert (tmp_path / "file").read_text() == "a copy of the copy: \\udcff\nno original\n"
    os.close(log._copy)
    with pytest.raises(OSError, match="Bad file descriptor"):
        log.write("nowhere\n")


def test_a_number_of_ours_is_given_to_nothing_else(file: int):
    """After a model has closed it: what is opened next does not get it, so that no line goes to a connection."""
    log = OwnLog(file)
    os.close(log._copy)
    pipes = [fd for _ in range(20) for fd in os.pipe()]
    assert log._copy not in pipes
    for fd in pipes:
        os.close(fd)


def test_a_descriptor_can_be_moved_up(file: int, tmp_path: Path):
    """It stands for the same file, under another number, and child processes do not inherit it."""
    fd = moved_up(os.dup(file))
    os.write(fd, b"written")
    assert (tmp_path / "file").read_text() == "written"
    assert not os.get_inheritable(fd)
    os.close(fd)


RESTORED = """
import logging, os, sys
from penstock.registry import logs
from penstock.workers.process.descriptors import OwnLog, StandardStreams

logs.configure("INFO", OwnLog())
streams = StandardStreams()
streams.restore()
{closes}
streams.restore()
{closes}
streams.restore()
print("printed")
os.write(1, b"written\\n")
os.write(2, b"to stderr\\n")
print("from Python", file=sys.stderr)
logging.getLogger("penstock.server").info("logged")
os.read(0, 1)
"""


@pytest.mark.parametrize(
    ("closes", "streams"),
    [
        ("sys.stdout.close()", ["stdout"]),
        ("sys.stdout.close(); sys.stderr.close()", ["stderr", "stdout"]),
        ("os.close(1)", ["stdout"]),
        ("os.closerange(0, 3)", ["stderr", "stdin", "stdout"]),
        ("sys.stdout.close(); os.closerange(0, 3)", ["stderr", "stdin", "stdout"]),
    ],
)
def test_standard_streams_are_put_back_and_told_once(closes: str, streams: list[str]):
    """What is printed and written afterwards arrives, from Python and from a library; each stream has one line."""
    ended = subprocess.run(
        [sys.executable, "-c", RESTORED.format(closes=closes)],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=ROOT,
        input="",
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["printed", "written"]
    lines = ended.stderr.splitlines()
    told = sorted(line.partition("closed ")[2].partition(",")[0] for line in lines if "a model closed" in line)
    assert told == streams
    assert "to stderr" in lines
    assert "from Python" in lines
    assert any('"msg":"logged"' in line for line in lines)


def test_a_redirected_stream_is_left_alone():
    """A model may redirect the output of a library: that is no closed descriptor."""
    code = (
        "import os, sys\n"
        "from penstock.workers.process.descriptors import StandardStreams\n"
        "streams = StandardStreams()\n"
        "hole = os.open(os.devnull, os.O_RDWR)\n"
        "os.dup2(hole, 1)\n"
        "streams.restore()\n"
        "os.write(1, b'redirected')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, cwd=ROOT, check=True
    )
    assert (ended.stdout, ended.stderr) == ("", "")


def test_a_process_with_a_low_limit_moves_fewer_up(file: int):
    """Beyond the highest numbers any other number will do."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    moved: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        moved += [moved_up(os.dup(file)) for _ in range(30)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in moved:
            os.close(fd)
    assert max(moved) == 511
    assert min(moved) < 490


def test_the_log_of_a_process_takes_a_line_of_any_size(file: int, tmp_path: Path):
    """A write to a pipe or file may take a part only: the rest follows."""
    logger = logging.Logger("own")
    logger.addHandler(logging.StreamHandler(OwnLog(file)))
    logger.info("x" * 3_000_000)
    assert (tmp_path / "file").stat().st_size == 3_000_001
