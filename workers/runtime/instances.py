"""Several instances of one model behind one Runtime: each is a copy of its own, and runs one forward at a time.

    model threads -- run, stream --> a free instance --> outputs
                                     |- of threads: a runtime in this process
                                     '- of processes: a child process; one that ends is replaced beside the others

Instances share nothing: each has loaded the package itself. Memory is that of one copy, times their number. They run
the model as its author built it: the forms of the optimizer are not for them.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Final, Generic, TypeVar

from penstock.registry.errors import ConfigurationError, ModelNotReady
from penstock.registry.package import ModelSpec, Package
from penstock.registry.tensors import Array
from penstock.workers.runtime.base import DeviceLost, InstanceLost, Prepared, Runtime, StreamContext, concatenate
from penstock.workers.runtime.instance_process import InstanceProcess, LoadedInstance
from penstock.workers.runtime.loading import LoadOptions
from penstock.workers.runtime.torch_device import keeping_threads

__all__ = ["ProcessInstances", "ThreadInstances"]

logger = logging.getLogger("penstock.runtime")

Copy = TypeVar("Copy")


class _FreeCopies(Generic[Copy]):
    """The instances that run no forward now. For any thread."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Copy | None] = SimpleQueue()
        self._error: Callable[[], Exception] | None = None

    def put(self, copy: Copy) -> None:
        """The instance is free."""
        self._queue.put(copy)

    def take(self) -> Copy:
        """A free instance, as soon as there is one. Raises the error of `close`."""
        if self._error is None and (copy := self._queue.get()) is not None:
            return copy
        # For the next thread that waits.
        self._queue.put(None)
        raise self._error() if self._error is not None else ModelNotReady("Model not loaded")

    def close(self, error: Callable[[], Exception]) -> None:
        """There will be no free instance any more."""
        self._error = error
        self._queue.put(None)


class _Instances(ABC, Generic[Copy]):
    """A Runtime over the instances of one package. Subclasses add the instances."""

    def __init__(self, package: Package) -> None:
        self._package = package
        self._content_hash = ""
        self._memory_bytes = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._free: _FreeCopies[Copy] = _FreeCopies()

    @property
    def spec(self) -> ModelSpec:
        """The declarations of the package."""
        return self._package.spec

    @property
    def version(self) -> str:
        """The label of this version."""
        return self.spec.version

    @property
    def content_hash(self) -> str:
        """The hash of the files that every instance loaded; empty until they are loaded."""
        return self._content_hash

    @property
    def memory_bytes(self) -> int:
        """Bytes of all instances together."""
        return self._memory_bytes

    def load(self, device: str, threads: int) -> None:
        """Loads every instance; they share the threads. See Runtime.load."""
        if device != "cpu" and self.spec.device != "cpu":
            raise ConfigurationError(
                f"{self.spec.reference}: instances: found {self.spec.instances}, expected 1 on a GPU, or device: cpu"
            )
        self._check_open()
        try:
            with keeping_threads(threads):
                loaded = self._load(max(1, threads // self.spec.instances))
            if len({each.content_hash for each in loaded}) > 1:
                raise ConfigurationError(f"{self.spec.reference}: its files changed while they were loaded")
            self._memory_bytes = sum(each.memory_bytes for each in loaded)
            self._content_hash = loaded[0].content_hash
            self._check_open()
        except BaseException:
            self._release()
            self._memory_bytes = 0
            raise

    def check(self, inputs: Mapping[str, Array]) -> None:
        """Accepts every job: the signature has checked it."""
        return

    @property
    def may_change_threads(self) -> bool:
        """See Runtime. With several instances there are several model threads, too."""
        return False

    def length(self, inputs: Mapping[str, Array]) -> int:
        """Characters or extent of `length_input`; 1 without one."""
        return self.spec.signature.length(inputs)

    def close(self) -> None:
        """Releases every instance. A load under way ends with ModelNotReady."""
        with self._lock:
            self._is_closed = True
        self._free.close(self._not_loaded)
        self._release()
        self._memory_bytes = 0

    @abstractmethod
    def _load(self, threads: int) -> Sequence[LoadedInstance]:
        """Loads every instance with this many threads, and puts it among the free ones."""

    @abstractmethod
    def _release(self) -> None:
        """Ends every instance, also one that is loading. May be called more than once."""

    @contextmanager
    def _one(self) -> Iterator[Copy]:
        """A free instance, for one forward."""
        if not self._content_hash:
            raise self._not_loaded()
        while not self._is_alive(copy := self._free.take()):
            # It ended while it was idle: no job is at fault.
            self._replace(copy, "it ended between two forwards")
        try:
            yield copy
        except InstanceLost as error:
            self._replace(copy, str(error))
            raise
        except BaseException:
            self._free.put(copy)
            raise
        self._free.put(copy)

    def _is_alive(self, copy: Copy) -> bool:
        """Whether the instance can run a forward."""
        return True

    @abstractmethod
    def _replace(self, copy: Copy, reason: str) -> None:
        """The instance is gone."""

    def _not_loaded(self) -> ModelNotReady:
        return ModelNotReady(f"Model not loaded: {self.spec.reference}")

    def _check_open(self) -> None:
        if self._is_closed:
            raise ModelNotReady(f"{self.spec.reference} was unloaded while it was being loaded")


class ThreadInstances(_Instances[Runtime]):
    """Copies in this process, for models that release the interpreter's lock but cannot run two forwards at a time."""

    def __init__(self, package: Package, open_copy: Callable[[], Runtime]) -> None:
        super().__init__(package)
        self._copies: Final = [open_copy() for _ in range(package.spec.instances)]

    def check(self, inputs: Mapping[str, Array]) -> None:
        """See Runtime.check."""
        self._copies[0].check(inputs)

    def length(self, inputs: Mapping[str, Array]) -> int:
        """See Runtime.length."""
        return self._copies[0].length(inputs)

    def prepare(self, jobs: Sequence[Mapping[str, Array]]) -> Prepared:
        """Prepared by the first copy: the others are equal, and run it, too."""
        return self._copies[0].prepare(jobs)

    def run(self, prepared: Prepared) -> dict[str, Array]:
        """One forward of a free copy."""
        # The next forward of this thread may be that of a model whose own code sets no number.
        with self._one() as copy, keeping_threads():
            return copy.run(prepared)

    def stream(
        self, inputs: Mapping[str, Array], context: StreamContext
    ) -> Generator[dict[str, Array], None, dict[str, Array]]:
        """One stream of a free copy."""
        with self._one() as copy:
            return (yield from copy.stream(inputs, context))

    def _load(self, threads: int) -> Sequence[LoadedInstance]:
        for copy in self._copies:
            copy.load("cpu", threads)
            self._free.put(copy)
        return [LoadedInstance(copy.content_hash, copy.memory_bytes) for copy in self._copies]

    def _release(self) -> None:
        for copy in self._copies:
            copy.close()

    def _replace(self, copy: Runtime, reason: str) -> None:
        raise RuntimeError(f"a copy in this process cannot be lost alone: {reason}")


class ProcessInstances(_Instances[InstanceProcess]):
    """Copies in child processes, for models that hold the interpreter's lock."""

    def __init__(self, package: Package, options: LoadOptions) -> None:
        super().__init__(package)
        self._options = options
        self._threads = 1
        self._processes: set[InstanceProcess] = set()
        """Those that are loading, free or at work."""
        self._lost = 0

    def counts(self) -> dict[str, int]:
        """See Counted: instances that live, and those that were lost."""
        return {"instances": len(self._processes), "instances_lost": self._lost}

    def prepare(self, jobs: Sequence[Mapping[str, Array]]) -> Prepared:
        """Concatenates the rows; the instance does the rest."""
        inputs = concatenate(jobs)
        return Prepared(self.spec.signature.rows(inputs), inputs)

    def run(self, prepared: Prepared) -> dict[str, Array]:
        """One forward in a free instance. Raises InstanceLost when its process ended in it."""
        with self._one() as process:
            return process.run(prepared.payload)

    def stream(
        self, inputs: Mapping[str, Array], context: StreamContext
    ) -> Generator[dict[str, Array], None, dict[str, Array]]:
        """One stream in a free instance. Raises InstanceLost when its process ended in it."""
        with self._one() as process:
            return (yield from process.stream(inputs, context))

    def _load(self, threads: int) -> Sequence[LoadedInstance]:
        self._threads = threads
        processes = [self._started(self._options) for _ in range(self.spec.instances)]
        for process in processes:
            process.begin_load()
        loaded = [process.end_load() for process in processes]
        for process in processes:
            self._free.put(process)
        return loaded

    def _release(self) -> None:
        with self._lock:
            processes, self._processes = self._processes, set()
        for process in processes:
            process.end()

    def _started(self, options: LoadOptions) -> InstanceProcess:
        with self._lock:
            self._check_open()
            process = InstanceProcess(self._package, options, self._threads)
            self._processes.add(process)
        return process

    def _is_alive(self, copy: InstanceProcess) -> bool:
        return copy.is_alive

    def _replace(self, copy: InstanceProcess, reason: str) -> None:
        copy.end()
        with self._lock:
            self._processes.discard(copy)
            self._lost += 1
            if self._is_closed:
                return
        logger.error("an instance was lost: %s", reason, extra={"model": self.spec.name, "version": self.version})
        name = f"instance {self.spec.reference}"
        threading.Thread(target=self._start_again, name=name, daemon=True).start()

    def _start_again(self) -> None:
        process: InstanceProcess | None = None
        try:
            process = self._started(replace(self._options, content_hash=self._content_hash))
            process.begin_load()
            process.end_load()
        except Exception as error:
            self._not_replaced(process, error)
            return
        self._free.put(process)

    def _not_replaced(self, process: InstanceProcess | None, error: Exception) -> None:
        with self._lock:
            if process is not None:
                self._processes.discard(process)
            is_last = not self._processes
            if self._is_closed:
                return
        if process is not None:
            process.end()
        logger.error("an instance cannot be replaced: %s", error, extra={"model": self.spec.name})
        if is_last:
            self._free.close(lambda: DeviceLost(f"{self.spec.reference} has no instance left"))
