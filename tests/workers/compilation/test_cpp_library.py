"""A compiler with the static C++ library alone links the shared one of this process."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from penstock.workers.compilation.cpp_library import shared_library_environment

SOURCE = """
#include <regex>
extern "C" int matches() { return std::regex_match("cuda:0", std::regex("(cuda|cpu)(:([0-9]+))?")); }
"""


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """As on a machine without the shared library: it does not find one, and looks into a folder with the static one."""
    assert torch.__version__
    static = subprocess.run(["g++", "-print-file-name=libstdc++.a"], capture_output=True, text=True, check=True)
    folder = tmp_path / "static"
    folder.mkdir()
    shutil.copy(static.stdout.strip(), folder)
    script = tmp_path / "compiler"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = -print-file-name=libstdc++.so ] && echo libstdc++.so && exit\nexec g++ "$@" -L{folder}\n'
    )
    script.chmod(0o700)
    return script


def needed(command: str, folder: Path) -> str:
    """The shared libraries that its code needs."""
    source, library = folder / "code.cpp", folder / "code.so"
    source.write_text(SOURCE)
    subprocess.run([command, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout


def test_library_is_shared_where_the_compiler_has_the_static_one(compiler: Path, tmp_path: Path):
    """Without the script the same compiler copies the library into the code."""
    assert "libstdc++.so.6" not in needed(str(compiler), tmp_path)
    build = tmp_path / "build with a space"
    build.mkdir()
    found = shared_library_environment(build, {"CXX": str(compiler)})
    assert [*found] == ["CXX"]
    assert "libstdc++.so.6" in needed(found["CXX"], tmp_path)


@pytest.mark.parametrize("environment", [{}, {"CXX": "/nowhere/c++"}], ids=["has it", "no compiler"])
def test_other_compilers_are_left_alone(environment: dict[str, str], tmp_path: Path):
    """One that finds its shared library, and one that cannot be asked."""
    assert shared_library_environment(tmp_path, environment) == {}
    assert not [*tmp_path.iterdir()]
