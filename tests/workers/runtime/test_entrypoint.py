"""A package's Python: executed from the bytes that were hashed, apart from every other package's, and forgotten."""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path

import numpy as np
import pytest

from penstock.registry.errors import ConfigurationError
from penstock.registry.package import Package, load_package
from penstock.workers.runtime.entrypoint import PackageModules
from tests.packages import write_package
from tests.workers.runtime.formats import answers, opened

ONE = np.ones((1, 4), np.float32)


def modules_of(folder: Path) -> PackageModules:
    package: Package = load_package(folder)
    return PackageModules(package, package.manifest())


def names_of_packages() -> set[str]:
    return {name for name in sys.modules if name.startswith("penstock_package_")}


def test_packages_keep_their_modules_apart(models_root: Path):
    """Two packages may both have a model.py and import their own neighbours; sys.path stays as it was."""
    before, known = list(sys.path), names_of_packages()
    source = "from .factor import FACTOR\ndef build(): return lambda inputs: {'y': inputs['x'] * FACTOR}"
    runtimes = []
    for name, factor in (("three", 3), ("five", 5)):
        folder = write_package(models_root, name, source)
        (folder / "factor.py").write_text(f"import numpy as np\nFACTOR = np.float32({factor})\n")
        runtimes.append(opened(folder))
    assert [answers(runtime, x=ONE)["y"][0, 0] for runtime in runtimes] == [3, 5]
    assert sys.path == before
    for runtime in runtimes:
        runtime.close()
    assert names_of_packages() == known


def test_same_package_loaded_twice_has_its_modules_twice(models_root: Path):
    """A version that is loaded again beside itself shares no state with the one that serves."""
    source = """
    calls = []
    def build():
        def forward(inputs):
            calls.append(1)
            return {"y": inputs["x"] * len(calls)}
        return forward
    """
    folder = write_package(models_root, "counts", source)
    first, second = opened(folder), opened(folder)
    assert [answers(first, x=ONE)["y"][0, 0] for _ in range(3)] == [2, 3, 4]
    assert answers(second, x=ONE)["y"][0, 0] == 2
    second.close()
    assert answers(first, x=ONE)["y"][0, 0] == 5


def test_modules_may_lie_in_folders(models_root: Path):
    """Packages with and without `__init__.py` are imported, and relative imports work among them."""
    folder = write_package(
        models_root, "nested", "from .nets import scale\nfrom .plain.more import MORE\nbuild = scale.build"
    )
    for path, text in {
        "nets/__init__.py": "FACTOR = 2\n",
        "nets/scale.py": "from . import FACTOR\nfrom ..plain.more import MORE\n"
        "def build(): return lambda inputs: {'y': inputs['x'] * (FACTOR + MORE)}\n",
        "plain/more.py": "import numpy as np\nMORE = np.float32(5)\n",
    }.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    assert answers(opened(folder), x=ONE)["y"][0, 0] == 7


@pytest.mark.parametrize("changed", ["model.py", "factor.py"])
def test_module_that_changed_since_it_was_hashed_is_not_executed(models_root: Path, changed: str):
    """The bytes that run are the bytes whose hash is known, whichever module is swapped and whenever."""
    folder = write_package(models_root, "swapped", "from . import factor\ndef build(): return factor")
    (folder / "factor.py").write_text("executed = True\n")
    modules = modules_of(folder)
    with (folder / changed).open("a") as source:
        source.write("\nraise SystemExit('executed')\n")
    with pytest.raises(ConfigurationError, match=rf"^swapped/1: file {changed}: changed since it was hashed"):
        modules.build()
    modules.forget()


def test_import_during_a_forward_is_held_to_the_hash_as_well(models_root: Path):
    """A module that is first imported long after the load was hashed with the others."""
    source = """
    def build():
        def forward(inputs):
            if inputs["x"].any():
                from . import late
                return {"y": inputs["x"] * late.FACTOR}
            return {"y": inputs["x"]}
        return forward
    """
    folder = write_package(models_root, "lazy", source)
    (folder / "late.py").write_text("import numpy as np\nFACTOR = np.float32(3)\n")
    fresh, late = opened(folder), opened(folder)
    assert answers(fresh, x=ONE)["y"][0, 0] == 3
    (folder / "late.py").write_text("raise SystemExit('executed')\n")
    with pytest.raises(ConfigurationError, match=r"late\.py: changed since it was hashed"):
        answers(late, x=ONE)


def test_module_that_appeared_later_is_not_found(models_root: Path):
    """What the manifest does not name is no part of the package."""
    folder = write_package(models_root, "grown", "from . import late\nbuild = late.build")
    modules = modules_of(folder)
    (folder / "late.py").write_text("def build(): return 1\n")
    with pytest.raises(ConfigurationError, match=r"raised (ImportError|ModuleNotFoundError)"):
        modules.build()
    modules.forget()


def test_compiled_caches_are_neither_read_nor_written(models_root: Path):
    """A `__pycache__` could hold other code than the source that was hashed."""
    folder = write_package(models_root, "cached", "def build(): return lambda inputs: {'y': inputs['x']}")
    opened(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["model.py", "model.yaml"]


def test_tracebacks_show_the_packages_source(models_root: Path):
    """A debugger shows the lines of a model."""
    folder = write_package(
        models_root,
        "fails",
        "def build():\n    def forward(inputs):\n        raise KeyError('no')  # here\n    return forward",
    )
    with pytest.raises(ConfigurationError) as refused:
        opened(folder)
    cause = refused.value.__cause__
    assert cause is not None
    assert "# here" in "".join(traceback.format_exception(cause))


def test_packages_may_be_imported_on_several_threads(models_root: Path):
    """Loads take place side by side."""
    folders = []
    for number in range(4):
        folder = write_package(models_root, f"model{number}", "from .factor import FACTOR\ndef build(): return FACTOR")
        (folder / "factor.py").write_text(f"FACTOR = {number}\n")
        folders.append(folder)
    found: dict[int, list[object]] = {number: [] for number in range(4)}

    def build(number: int) -> None:
        for _ in range(10):
            modules = modules_of(folders[number])
            found[number].append(modules.build())
            modules.forget()

    threads = [threading.Thread(target=build, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [number] * 10 for number in range(4)}
