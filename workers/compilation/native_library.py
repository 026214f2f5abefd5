"""The C interface of an AOTInductor library, called without the interpreter's lock.

torch's own loader holds the lock from the first to the last instruction of a forward (torch 2.13, on a CPU: 1.3 s in
which no other thread of the worker ran). ctypes releases it. Torch declares the interface stable:
`torch/csrc/inductor/aoti_runtime/interface.h`. A function returns 0, or it failed and wrote its reason to stderr.
"""

from __future__ import annotations

import ctypes
import io
import tempfile
import threading
import weakref
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.workers.runtime.compilable import CompilationRefused

if TYPE_CHECKING:
    import torch

__all__ = ["NativeLibrary"]

_PREFIX: Final = "AOTInductorModelContainer"
_MOST_LIBRARY_BYTES: Final = 1 << 30

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class _Weight(ctypes.Structure):
    """AOTInductorConstantMapEntry."""

    _fields_ = (("name", ctypes.c_char_p), ("handle", ctypes.c_void_p))


class NativeLibrary:
    """A library on the CPU, with instances of its model that share weights. It is bound once.

    Calls beyond the number of instances wait for their turn here: when a call fails, torch 2.13 does not wake those
    that wait in its own code. There are more where operators raise `concurrency`.
    """

    def __init__(self, package: bytes, instances: int = 1) -> None:
        """Raises CompilationRefused for a package without code that runs alone, OSError if it cannot be loaded."""
        with tempfile.TemporaryDirectory(prefix="penstock-library-") as folder:
            path = Path(folder) / "model.so"
            path.write_bytes(_shared_object(package))
            self._library = ctypes.CDLL(str(path))
        self._places = threading.BoundedSemaphore(instances)
        self._container = ctypes.c_void_p()
        self._weights: list[ctypes.c_void_p] = []
        # Not at exit: a thread that outlives the main thread may be in the middle of a forward.
        weakref.finalize(self, _release, self._library, self._container, self._weights).atexit = False
        try:
            self._do(
                "CreateWithDevice",
                ctypes.byref(self._container),
                ctypes.c_size_t(instances),
                b"cpu",
                ctypes.c_char_p(None),
            )
            self._outputs = self._size("GetNumOutputs")
            in_spec, out_spec = ctypes.c_char_p(), ctypes.c_char_p()
            self._do("GetCallSpec", self._container, ctypes.byref(in_spec), ctypes.byref(out_spec))
        except AttributeError:
            raise CompilationRefused("This version of torch makes libraries with another interface") from None
        self.out_spec: Final = (out_spec.value or b"").decode()
        """The structure of the outputs, as torch.utils._pytree writes it."""

    def constant_names(self) -> list[str]:
        """The names, in the module, of the weights to bind."""
        return [qualified for _, qualified in self._constants()]

    def bind(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Binds the code to these tensors, without a copy. Raises KeyError for a missing one."""
        names = list(self._constants())
        # The library keeps the handles, so these and their tensors must live as long as the library.
        self._weights += _handles([weights[qualified] for _, qualified in names])
        entries = (_Weight * len(names))(
            *(_Weight(name, _pointer(handle)) for (name, _), handle in zip(names, self._weights, strict=True))
        )
        self._do(
            "UpdateUserManagedConstantBufferPairs",
            self._container,
            entries,
            ctypes.c_size_t(len(names)),
            ctypes.c_bool(False),
            ctypes.c_bool(True),
        )

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs of one forward. Raises RuntimeError if it failed."""
        import torch

        outputs = (ctypes.c_void_p * self._outputs)()
        # The library takes ownership of the input handles, also when it fails.
        inputs = (ctypes.c_void_p * len(tensors))(*map(_pointer, _handles(tensors)))
        with self._places:
            self._do(
                "Run",
                self._container,
                inputs,
                ctypes.c_size_t(len(tensors)),
                outputs,
                ctypes.c_size_t(self._outputs),
                ctypes.c_void_p(None),
                ctypes.c_void_p(None),
            )
        capsules = [_new_capsule(pointer, None, None) for pointer in outputs]
        return torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(capsules)

    def _constants(self) -> Iterator[tuple[bytes, str]]:
        """(name in the code, name in the module) of each constant that the code does not compute."""
        for number in range(self._size("GetNumConstants")):
            index, is_folded = ctypes.c_size_t(number), ctypes.c_bool()
            name, qualified = ctypes.c_char_p(), ctypes.c_char_p()
            self._do("GetConstantFromFolded", self._container, index, ctypes.byref(is_folded))
            self._do("GetConstantName", self._container, index, ctypes.byref(name))
            self._do("GetConstantOriginalFQN", self._container, index, ctypes.byref(qualified))
            if not is_folded.value:
                yield name.value or b"", (qualified.value or b"").decode()

    def _size(self, function: str) -> int:
        size = ctypes.c_size_t()
        self._do(function, self._container, ctypes.byref(size))
        return size.value

    def _do(self, function: str, *arguments: Any) -> None:
        if getattr(self._library, _PREFIX + function)(*arguments) != 0:
            raise RuntimeError(f"{function} failed in compiled code")


def _release(library: ctypes.CDLL, container: ctypes.c_void_p, weights: list[ctypes.c_void_p]) -> None:
    """Deletes the model and releases its weights. The code stays mapped, because Python unloads no library."""
    import torch

    if container:
        getattr(library, f"{_PREFIX}Delete")(container)
    torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(weights)


def _shared_object(package: bytes) -> bytes:
    """The machine code of a package. Raises CompilationRefused if it would call back into torch's interpreter."""
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        names = archive.namelist()
        if any(name.endswith(".json") and not name.endswith("_metadata.json") for name in names):
            raise CompilationRefused("The model uses operators that compiled code cannot call")
        libraries = [name for name in names if name.endswith(".so")]
        if len(libraries) != 1 or archive.getinfo(libraries[0]).file_size > _MOST_LIBRARY_BYTES:
            raise CompilationRefused(f"Found {len(libraries)} libraries in the package, expected one")
        return archive.read(libraries[0])


def _handles(tensors: Sequence[torch.Tensor]) -> list[ctypes.c_void_p]:
    """New handles, which own their tensors."""
    import torch

    return torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))


def _pointer(capsule: object) -> int:
    pointer: int = _capsule_pointer(capsule, None)
    return pointer
