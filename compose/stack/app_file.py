"""`--app FILE` -> an environment in which workers serve the models of that file, and no others.

The file need not lie under a trusted root: the operator named it. Its packages are written under the home, and their
folder becomes the models root and one of the trusted roots.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from penstock.compose.terminal import load_settings
from penstock.registry.package.one_file import read_models, write_packages

__all__ = ["serving"]

_FOLDER: Final = "apps"
"""The folder of such packages, under the home."""


def serving(file: Path, environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment for workers and for this process.

    Modules beside the file can be imported, as if it were run. Raises ConfigurationError with file and line.
    """
    settings = load_settings(environ)
    root = write_packages(read_models(file), settings.home / _FOLDER)
    beside = [str(file.absolute().parent), *filter(None, [environ.get("PYTHONPATH")])]
    own = {"PENSTOCK_INFERENCE_REPO_ROOT": str(root), "PYTHONPATH": os.pathsep.join(beside)}
    if "trusted_roots" in settings.model_fields_set:
        own["PENSTOCK_TRUSTED_ROOTS"] = ",".join(map(str, (*settings.trusted_roots, root)))
    return {**environ, **own}
