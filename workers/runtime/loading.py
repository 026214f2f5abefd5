"""The steps of a load, for every format: hash, look at the environment, build, compare, warm up.

    package.manifest() -> requirements.txt -> _build(manifest, device, threads) -> manifest.check_unchanged() -> warm-up

So the model that serves is the content that was hashed, and `content_hash` names it. The model does not run before the
files were compared. A package's own Python modules run earlier: they are executed from the bytes whose hash the
manifest holds.

A load cannot be interrupted, but it can be abandoned: `close` may come at any time. A load that ends after `close`
releases everything that it took.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.registry.errors import ConfigurationError, MissingRequirement, ModelError, ModelNotReady
from penstock.registry.package import ModelSpec, Package
from penstock.registry.package.manifest import Manifest
from penstock.registry.package.spec_sections import Precision
from penstock.registry.tensors import Array
from penstock.workers.frameworks.adapters import Adapter
from penstock.workers.frameworks.inference_proxy import InferenceProxy
from penstock.workers.runtime.base import Prepared, StreamContext
from penstock.workers.runtime.closing import close_stream
from penstock.workers.runtime.requirements import check_requirements
from penstock.workers.runtime.tracebacks import message_of, name_of, placed

__all__ = ["LoadOptions", "NullContext", "PackageRuntime"]

_EXAMPLE_LENGTH: Final = 8
_WARM_UP_CHUNKS: Final = 16
"""A warm-up stream is closed after so many chunks: some entry points stream until their job is cancelled."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load a package.

    content_hash: the expected hash of its files; empty: any. precision: of torch models whose package names none.
    warmup_requests: forwards before the model counts as ready. 0: none; the first job then meets what only the first
    forwards cost, and outputs that differ from the declaration. runtime_hosts: see the setting.
    """

    content_hash: str = ""
    precision: Precision = "auto"
    warmup_requests: int = 1
    runtime_hosts: tuple[str, ...] = ()


class NullContext:
    """The context of a job without subscribers."""

    job_id = ""
    tenant = ""

    def __init__(self) -> None:
        self.is_cancelled = False

    def progress(self, fraction: float) -> None:
        """Does nothing."""


class PackageRuntime(ABC):
    """A Runtime without `prepare` and `run`. Subclasses add these, build the model and release it."""

    def __init__(self, package: Package, options: LoadOptions | None = None) -> None:
        self._package = package
        self._options = options or LoadOptions()
        self._content_hash = ""
        self._memory_bytes = 0
        self._adapter: Adapter | InferenceProxy | None = None
        """Calls the model; None until it is built."""
        self._is_loading = False
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def package(self) -> Package:
        """The package as it was opened."""
        return self._package

    @property
    def spec(self) -> ModelSpec:
        """The declarations of the package."""
        return self._package.spec

    @property
    def version(self) -> str:
        """The label of this version."""
        return self._package.spec.version

    @property
    def content_hash(self) -> str:
        """The hash of the files that were loaded; empty until they are."""
        return self._content_hash

    @property
    def memory_bytes(self) -> int:
        """Bytes of the weights and buffers, on the host or the device; 0 unless loaded."""
        return self._memory_bytes

    @property
    def may_change_threads(self) -> bool:
        """See Runtime. A model's own code may keep objects that belong to a thread, such as a database connection."""
        return False

    @property
    def call_count(self) -> int:
        """Calls of the eager model since it was built, warm-up included. Calls of its other forms do not count."""
        return 0 if self._adapter is None else self._adapter.call_count

    def counts(self) -> dict[str, int]:
        """See Counted."""
        return {"model_calls": self.call_count}

    @property
    def precision(self) -> Precision:
        """The number format of a forward: the package's own, else that of the load options."""
        return self._options.precision if self.spec.precision == "auto" else self.spec.precision

    def load(self, device: str, threads: int) -> None:
        """Loads the model and runs its warm-up; see Runtime.load."""
        with self._lock:
            self._check_open()
            self._is_loading = True
        try:
            self._load(self._own_device(device), threads)
            with self._lock:
                self._is_loading = False
                self._check_open()
        except BaseException:
            self._is_loading = False
            self._release()
            raise

    def check(self, inputs: Mapping[str, Array]) -> None:
        """Accepts every job: the signature has checked it."""
        return

    def length(self, inputs: Mapping[str, Array]) -> int:
        """Characters or extent of `length_input`; 1 without one."""
        return self.spec.signature.length(inputs)

    @abstractmethod
    def prepare(self, jobs: Sequence[Mapping[str, Array]]) -> Prepared:
        """See Runtime.prepare."""

    @abstractmethod
    def run(self, prepared: Prepared) -> dict[str, Array]:
        """See Runtime.run."""

    def stream(
        self, inputs: Mapping[str, Array], context: StreamContext
    ) -> Generator[dict[str, Array], None, dict[str, Array]]:
        """No chunks, then the outputs."""
        yield from ()
        return self.run(self.prepare([inputs]))

    def close(self) -> None:
        """Releases the model and its device memory. A load under way releases them when it ends."""
        with self._lock:
            self._is_closed = True
            # The thread that loads still uses the model that it builds.
            is_loading = self._is_loading
        if not is_loading:
            self._release()
            self._memory_bytes = 0

    @abstractmethod
    def _build(self, manifest: Manifest, device: str, threads: int) -> int:
        """Builds the model from the package's files; returns `memory_bytes`. Raises ConfigurationError."""

    @abstractmethod
    def _release(self) -> None:
        """Releases the model, also one that is half built. May be called more than once."""

    @property
    def _warm_up_lengths(self) -> Sequence[int]:
        """The lengths of the warm-up forwards."""
        return (_EXAMPLE_LENGTH,)

    def _example(self, rows: int, length: int) -> dict[str, Array]:
        """Valid inputs of `rows` rows whose free dimensions are `length` long."""
        return self.spec.signature.example(rows, length)

    def _weights_file(self) -> Path:
        """The file that `weights` names. Raises ConfigurationError for a package without one."""
        file = self._package.weights_file()
        if file is None:
            raise ConfigurationError(f"{self.spec.reference}: weights: missing, expected a file of the package")
        return file

    def _refuse_precision(self, reason: str) -> None:
        """Raises ConfigurationError, with the reason, if the package declares a precision."""
        if self.spec.precision != "auto":
            raise ConfigurationError(
                f"{self.spec.reference}: precision: found {self.spec.precision}, expected auto for format "
                f"{self.spec.format}: {reason}"
            )

    @property
    def _called(self) -> Callable[..., Any]:
        """The model, called through its adapter."""
        if self._adapter is None:
            raise self._not_loaded()
        return self._adapter

    def _not_loaded(self) -> ModelNotReady:
        return ModelNotReady(f"Model not loaded: {self.spec.reference}")

    def _load(self, device: str, threads: int) -> None:
        manifest = self._package.manifest()
        expected = self._options.content_hash
        if expected not in ("", manifest.content_hash):
            raise ConfigurationError(
                f"{self.spec.reference}: its files differ from those that were promoted under this version: "
                f"found the hash {manifest.content_hash[:12]}, expected {expected[:12]}"
            )
        check_requirements(self._package, manifest)
        self._check_open()
        memory_bytes = self._build(manifest, device, threads)
        manifest.check_unchanged()
        self._check_open()
        self._warm_up()
        self._memory_bytes, self._content_hash = memory_bytes, manifest.content_hash

    def _own_device(self, device: str) -> str:
        wanted = self.spec.device
        if wanted == "cuda" and not device.startswith("cuda"):
            raise MissingRequirement(
                f"{self.spec.reference}: device: found {device}, expected cuda as its package says"
            )
        return "cpu" if wanted == "cpu" else device

    def _check_open(self) -> None:
        if self._is_closed:
            raise ModelNotReady(f"{self.spec.reference} was unloaded while it was being loaded")

    def _warm_up(self) -> None:
        """Runs the forwards of the warm-up, at least one for each length that batches are padded to.

        The first has two rows, because one row hides a model that gives one output for all rows. The others have one
        row, like a single job.
        """
        asked, lengths = self._options.warmup_requests, self._warm_up_lengths
        for number in range(max(asked, len(lengths)) if asked else 0):
            self._try_forward(1 if number or self.spec.streams else 2, lengths[number % len(lengths)])

    def _try_forward(self, rows: int, length: int) -> None:
        example = self._example(rows, length)
        try:
            if self.spec.streams:
                self._stream_some(example)
            else:
                self.spec.signature.check_outputs(self.run(self.prepare([example])), rows)
        except ModelError as error:
            raise ConfigurationError(f"{self.spec.reference}: {message_of(error)}{placed(error)}") from error
        except KeyboardInterrupt:
            # In a command it is the user's.
            raise
        except BaseException as error:
            problem = f"the first forward failed ({name_of(error)}: {message_of(error)}){placed(error)}"
            raise ConfigurationError(f"{self.spec.reference}: {problem}") from error

    def _stream_some(self, example: Mapping[str, Array]) -> None:
        """One stream to its end, which checks its outputs, or to its first chunks."""
        context = NullContext()
        steps = self.stream(example, context)
        try:
            for _ in range(_WARM_UP_CHUNKS):
                next(steps)
            context.is_cancelled = True
        except StopIteration:
            return
        finally:
            close_stream(steps)
