"""The process of a candidate that is a form: it loads the version, builds the form, and runs nothing but that form.

    Candidate -- load, with the name of the form --> this process --> runtime.candidates(compiler)[form]() --> outputs

The form has no fallback here: what it raises, and each NaN, is what the shadow is to find. It serves no job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.registry.errors import ConfigurationError
from penstock.registry.settings_sections import CompilationConfig
from penstock.registry.tensors import Array
from penstock.workers.compilation import TorchCompiler
from penstock.workers.runtime import instance
from penstock.workers.runtime.base import Prepared, Runtime
from penstock.workers.runtime.compilable import CompilationRefused
from penstock.workers.runtime.forms import Tunable

__all__ = ["built_form"]


def built_form(runtime: Runtime, facts: Mapping[str, Any]) -> Callable[[Prepared], dict[str, Array]]:
    """The form that the facts of the load name. It may take a minute to build.

    Raises ConfigurationError for a form that the model does not have here, and where it cannot be built.
    """
    request, reference = facts["form"], runtime.spec.reference
    name, folder = str(request["name"]), Path(request["folder"])
    compiler = TorchCompiler(CompilationConfig(cache_dir=folder / "cache"), folder / "compilation.key")
    forms = runtime.candidates(compiler) if isinstance(runtime, Tunable) else {}
    if name not in forms:
        known = ", ".join(forms) or "there is none"
        raise ConfigurationError(f"{reference} has no form {name!r:.80} here. Expected one of: {known}")
    try:
        return forms[name]()
    except CompilationRefused as refusal:
        raise ConfigurationError(f"{reference} in the form {name}: {refusal}") from None


if __name__ == "__main__":
    instance.main(built_form)
