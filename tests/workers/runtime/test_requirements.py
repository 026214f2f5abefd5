"""requirements.txt of a package, compared with the environment before the model is built."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from penstock.registry.errors import ConfigurationError, MissingRequirement
from tests.packages import write_double, write_package
from tests.workers.runtime.formats import opened

NUMPY = metadata.version("numpy")


def requiring(root: Path, *lines: str) -> Path:
    """A package with this requirements.txt."""
    folder = write_double(root)
    (folder / "requirements.txt").write_text("\n".join(lines) + "\n")
    return folder


def test_requirements_that_are_met_load(models_root: Path):
    """Comments, options of pip, continued lines, extras and markers are those that pip reads."""
    folder = requiring(
        models_root,
        "# a comment",
        "--index-url https://packages.example/simple",
        f"numpy == {NUMPY} \\",
        "    --hash=sha256:0000",
        "NumPy>=1.0  # also by another spelling",
        "no-such-package>=3; python_version < '3.0'",
        "pydantic[email]>=2",
        "",
    )
    assert opened(folder).content_hash


def test_requirement_that_is_missing_says_what_to_install(models_root: Path):
    """All of them in one line, before the package's code runs: it would fail at an import."""
    folder = write_package(models_root, "broken", "raise SystemExit('this code must not run')")
    (folder / "requirements.txt").write_text(
        "no-such-package[fast]>=1.4,<2\nnumpy>=99\nother-package ; python_version>'3'\n"
    )
    with pytest.raises(MissingRequirement) as refused:
        opened(folder)
    assert str(refused.value) == (
        f"broken/1: requirements.txt: no-such-package is not installed; numpy is {NUMPY}, expected >=99; "
        "other-package is not installed. Expected: "
        "pip install 'no-such-package[fast]<2,>=1.4' 'numpy>=99' other-package"
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("-r other.txt", "found -r, expected requirements such as scikit-learn>=1.4"),
        ("--editable=.", "found --editable, expected requirements such as scikit-learn>=1.4"),
        ("./folder", "found ./folder, expected a requirement such as scikit-learn>=1.4"),
        ("numpy>>1", "found numpy>>1, expected a requirement such as scikit-learn>=1.4"),
    ],
)
def test_line_that_cannot_be_compared_is_refused(models_root: Path, line: str, problem: str):
    """The error names the line."""
    with pytest.raises(ConfigurationError) as refused:
        opened(requiring(models_root, "numpy", line))
    assert str(refused.value) == f"double/1: requirements.txt, line 2: {problem}"
    assert not isinstance(refused.value, MissingRequirement)
