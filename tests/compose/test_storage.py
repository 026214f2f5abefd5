"""The disk of PENSTOCK_HOME: what keeps a user from writing there, and what the commands say of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.compose.storage import home_problem
from penstock.workers.process.exit_status import EXIT_CONFIGURATION
from tests.compose.conftest import penstock
from tests.packages import write_double
from tests.servers import ROOT, leave_out, require

A_FOLDER = "Expected a folder that this user may write to"
_NOBODY = 65534


def _disk(*, free_mib: int, free_files: int, files: int = 1000) -> os.statvfs_result:
    return os.statvfs_result((4096, 1 << 20, 1000, free_mib, free_mib, files, free_files, free_files, 0, 255))


@contextmanager
def _as_a_plain_user(folder: Path) -> Iterator[None]:
    """Without the right to write into `folder`: root may write everywhere, so root becomes another user."""
    folder.chmod(0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o755)


def test_a_folder_with_room_is_fine(tmp_path: Path):
    """A home that exists, and one that is made with the first command."""
    assert home_problem(tmp_path) == ""
    assert home_problem(tmp_path / "a" / "b") == ""
    assert not (tmp_path / "a").exists()


def test_a_file_is_no_home(tmp_path: Path):
    """Nor can a home be made below one."""
    (tmp_path / "file").touch()
    assert home_problem(tmp_path / "file") == f"PENSTOCK_HOME is a file. {A_FOLDER}"
    assert home_problem(tmp_path / "file" / "home") == f"PENSTOCK_HOME lies below a file. {A_FOLDER}"


@pytest.mark.parametrize("below", ["", "home", "a/home"])
def test_a_folder_of_another_user_is_no_home(below: str):
    """Nor can a home be made in it. Not pytest's tmp_path, which another user cannot enter."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-"))
    try:
        with _as_a_plain_user(folder):
            assert home_problem(folder / below) == f"PENSTOCK_HOME cannot be written to by this user. {A_FOLDER}"
    finally:
        folder.rmdir()


@pytest.mark.parametrize(
    ("disk", "shown"),
    [
        (_disk(free_mib=15, free_files=9), "15 MiB free"),
        (_disk(free_mib=0, free_files=9), "0 MiB free"),
        (_disk(free_mib=500, free_files=0), "0 MiB free"),
        (_disk(free_mib=16, free_files=1), ""),
        (_disk(free_mib=16, free_files=0, files=0), ""),
    ],
    ids=["little", "nothing", "no files", "enough", "files are not counted"],
)
def test_a_full_disk_is_told(tmp_path: Path, disk: os.statvfs_result, shown: str):
    """The room for this user counts, and the files that may still be made."""
    problem = home_problem(tmp_path / "home", lambda _: disk)
    assert problem == (f"The disk of PENSTOCK_HOME is full: {shown}. Expected at least 16 MiB" if shown else "")


def test_up_on_a_file_is_one_line(tmp_path: Path):
    """As on a home whose parts cannot be made."""
    write_double(tmp_path / "models")
    environ = {"PENSTOCK_INFERENCE_REPO_ROOT": str(tmp_path / "models"), "PENSTOCK_INFERENCE_DEVICE": "cpu"}
    (tmp_path / "file").touch()
    shown = penstock(tmp_path / "file", "up", "--no-flower", **environ)
    assert (shown.exit_code, shown.stderr) == (EXIT_CONFIGURATION, f"Error: PENSTOCK_HOME is a file. {A_FOLDER}\n")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "logs").touch()
    shown = penstock(tmp_path / "home", "up", "--no-flower", **environ)
    assert shown.exit_code == EXIT_CONFIGURATION
    assert shown.stderr == (
        "Error: The files of the stack cannot be written (File exists). Expected free space and the right to write in "
        "PENSTOCK_HOME\n"
    )


_ON_A_FULL_DISK = """
mount -t tmpfs -o size=64k tmpfs "$1" || exit 99
dd if=/dev/zero of="$1/fill" bs=4k 2>/dev/null
PENSTOCK_HOME="$1/home" exec "$2" -m penstock up --no-flower
"""


def test_up_on_a_full_disk_is_one_line(tmp_path: Path):
    """On a real one: a file system in memory of 64 KiB, in a namespace of its own."""
    write_double(tmp_path / "models")
    disk = tmp_path / "disk"
    disk.mkdir()
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PENSTOCK_INFERENCE_REPO_ROOT": str(tmp_path / "models")}
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _ON_A_FULL_DISK, "sh", str(disk)]
    require(shutil.which("unshare"), "unshare on PATH")
    ended = subprocess.run(
        [*command, sys.executable], env=environ, capture_output=True, text=True, timeout=180, check=False
    )
    if ended.returncode == 99 or ended.stderr.startswith("unshare:"):
        leave_out("this machine mounts no disk in a namespace")
    assert ended.returncode == EXIT_CONFIGURATION
    assert ended.stderr == "Error: The disk of PENSTOCK_HOME is full: 0 MiB free. Expected at least 16 MiB\n"
