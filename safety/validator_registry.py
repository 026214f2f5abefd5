"""The validator of each workload and model: built-in, or a custom one in its place.

    register(validator, workload=..., model=...) -> validator_for(workload, model): of the model, else of the workload
    an entry point of the group penstock.validators, named `embedding` or `model:minilm` -> load_entry_points
    compare_outputs, compare_outputs_async: one comparison by a validator of either kind, which never raises

A validator is an object with `compare`. This one accepts a candidate whose numbers have the right sign in 99 % of all
places:

    >>> import numpy as np
    >>> from penstock.safety.validators import Comparison, Figure
    >>> class SameSign:
    ...     def compare(self, candidate, expected):
    ...         same = np.sign(candidate) == np.sign(expected)
    ...         return Comparison(len(expected), {"same_sign": Figure.share(int(same.sum()), same.size, 0.99)})
    >>> validators = ValidatorRegistry()
    >>> validators.register(SameSign(), model="prices")
    >>> validators.validator_for("classifier", "prices").compare(np.ones((2, 2)), -np.ones((2, 2))).reason
    'same_sign 0, expected at least 0.99'

`compare` may also be an `async def`. It is awaited in an event loop of its own, on a thread of its own if the caller's
thread has a running loop. A validator that raises, or returns something else, has refused the candidate.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from penstock.registry.errors import ConfigurationError
from penstock.registry.package.signature import TensorSpec
from penstock.registry.queues import parse_name
from penstock.registry.tensors import Array
from penstock.safety.validators import BUILT_IN, WORKLOADS, Comparison, Validator, workload_of

__all__ = ["ENTRY_POINTS", "ValidatorRegistry", "compare_outputs", "compare_outputs_async"]

ENTRY_POINTS: Final = "penstock.validators"
"""The group of entry points. A name is a workload, or `model:` and the name of a model."""
_OF_A_MODEL: Final = "model:"


class ValidatorRegistry:
    """Validators by workload and by model. Changes and look-ups are for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_workloads: dict[str, Validator] = {}
        self._of_models: dict[str, Validator] = {}

    def register(self, validator: Validator, *, workload: str | None = None, model: str | None = None) -> None:
        """Puts a validator in place of the built-in one of a workload, or of all that would judge a model's outputs.

        Raises ConfigurationError for an unknown workload, for both or neither of the two, for an object without
        `compare`, and where a custom validator is registered already.
        """
        table, name = self._place(workload, model)
        if not callable(getattr(validator, "compare", None)):
            raise ConfigurationError(
                f"The validator of {name} is a {type(validator).__name__}. Expected an object with a method compare"
            )
        with self._lock:
            if name in table:
                raise ConfigurationError(
                    f"{name} has a custom validator already. Expected `unregister` before another `register`"
                )
            table[name] = validator

    def unregister(self, *, workload: str | None = None, model: str | None = None) -> Validator:
        """Removes a custom validator and returns it. The one that it replaced judges again.

        Raises ConfigurationError where there is none.
        """
        table, name = self._place(workload, model)
        with self._lock:
            if name not in table:
                raise ConfigurationError(f"{name} has no custom validator. Expected one that was registered")
            return table.pop(name)

    def validator_for(self, workload: str, model: str = "") -> Validator:
        """The validator of a model's output: the model's own, else that of the workload.

        Raises ConfigurationError for an unknown workload.
        """
        _check_workload(workload)
        with self._lock:
            return self._of_models.get(model) or self._of_workloads.get(workload) or BUILT_IN[workload]

    def validators_for(
        self,
        model: str,
        outputs: Sequence[TensorSpec],
        expected: Mapping[str, Array],
        task: str | None = None,
        *,
        defaults: Mapping[str, Validator] | None = None,
    ) -> dict[str, Validator]:
        """A validator for each output, by its name. expected: some outputs of the model, which tell their workload.

        defaults: take the place of the built-in validators, and not of custom ones.
        """
        found: dict[str, Validator] = {}
        for output in outputs:
            workload = workload_of(output, expected[output.name], task)
            validator = self.validator_for(workload, model)
            is_built_in = validator is BUILT_IN[workload]
            found[output.name] = defaults[output.name] if is_built_in and defaults else validator
        return found

    def load_entry_points(self, found: Iterable[EntryPoint] | None = None) -> list[str]:
        """Registers the validators of installed distributions; returns their names.

        A class is called without arguments. found: None for the group `penstock.validators`. Raises ConfigurationError
        for one that cannot be used.
        """
        names = []
        for entry in entry_points(group=ENTRY_POINTS) if found is None else found:
            try:
                loaded: Any = entry.load()
                validator = loaded() if isinstance(loaded, type) else loaded
            except Exception as error:  # a distribution's code may raise anything
                raise ConfigurationError(
                    f"The entry point {entry.name!r:.80} of {ENTRY_POINTS} cannot be loaded ({type(error).__name__}). "
                    "Expected a validator, or a class that makes one without arguments"
                ) from error
            if entry.name.startswith(_OF_A_MODEL):
                self.register(validator, model=entry.name.removeprefix(_OF_A_MODEL))
            else:
                self.register(validator, workload=entry.name)
            names.append(entry.name)
        return names

    def _place(self, workload: str | None, model: str | None) -> tuple[dict[str, Validator], str]:
        if (workload is None) == (model is None):
            raise ConfigurationError("A validator belongs to a workload or to a model. Expected exactly one of them")
        if model is not None:
            return self._of_models, parse_name("model", model)
        return self._of_workloads, _check_workload(workload or "")


def _check_workload(workload: str) -> str:
    if workload not in BUILT_IN:
        raise ConfigurationError(f"There is no workload {workload!r:.80}. Expected one of: {', '.join(WORKLOADS)}")
    return workload


def compare_outputs(validator: Validator, candidate: Array, expected: Array) -> Comparison:
    """One comparison by a sync or async validator. Waits for it; never raises for what the validator does."""
    try:
        found = validator.compare(candidate, expected)
        if inspect.isawaitable(found):
            found = _awaited(found)
    except Exception as error:  # a custom validator may raise anything
        return _refusal(error, expected)
    return _checked(found, expected)


async def compare_outputs_async(validator: Validator, candidate: Array, expected: Array) -> Comparison:
    """The same in the caller's event loop. A sync validator blocks it."""
    try:
        found = validator.compare(candidate, expected)
        if inspect.isawaitable(found):
            found = await found
    except Exception as error:
        return _refusal(error, expected)
    return _checked(found, expected)


def _awaited(found: Awaitable[Comparison]) -> Comparison:
    async def wait() -> Comparison:
        return await found

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait())
    # This thread's loop runs, and is blocked until the answer is here: another thread has to wait for it.
    outcome: list[Comparison | BaseException] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(wait()))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name="validator", daemon=True)
    thread.start()
    thread.join()
    (answer,) = outcome
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _refusal(error: Exception, expected: Array) -> Comparison:
    # Its text may repeat an output.
    return Comparison.failed(f"the validator raised {type(error).__name__}", _rows(expected))


def _checked(found: object, expected: Array) -> Comparison:
    if isinstance(found, Comparison):
        return found
    return Comparison.failed(f"the validator returned a {type(found).__name__}, expected a Comparison", _rows(expected))


def _rows(values: Array) -> int:
    return len(values) if values.ndim else 1
