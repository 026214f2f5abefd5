"""Packages of format `transformers` with a `task`: a pipeline of that library, text in, named fields out.

    texts -> prepare: as they are -> run: one call of the pipeline, one batch -> fields of each row's best answers

An output has the name of a field of the pipeline's answers: `label` and `score` of a text-classification, `token`,
`token_str`, `sequence` and `score` of a fill-mask, `entity_group`, `word`, `start`, `end` and `score` of a
token-classification. Its shape is (batch,) for the best answer, (batch, k) for the best k. Where a text has fewer
entities, the rest are empty, with a score of 0.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.registry.errors import ConfigurationError, InvalidInput, MissingRequirement, ModelError
from penstock.registry.package import Package
from penstock.registry.package.manifest import Manifest
from penstock.registry.tensors import DTYPES, Array
from penstock.workers.frameworks.adapters import adapt
from penstock.workers.runtime.base import Prepared
from penstock.workers.runtime.loading import LoadOptions, PackageRuntime
from penstock.workers.runtime.torch_device import TorchDevice, module_bytes, own_weights

if TYPE_CHECKING:
    import torch

__all__ = ["PipelineRuntime"]


class _Task(NamedTuple):
    """A kind of pipeline."""

    model_class: str
    """The library's class that loads its models."""
    best: Callable[[int], dict[str, object]]
    """Arguments that set the number of answers for a text, where the pipeline takes any."""
    cut: Callable[[int], dict[str, object]]
    """Arguments that cut texts at this many tokens, where the pipeline does not do so by itself."""
    blank: Mapping[str, object] | None = None
    """Fills up for answers that a text does not have; None: each text has as many as are requested."""


_TASKS: Final = {
    "fill-mask": _Task(
        "AutoModelForMaskedLM",
        lambda best: {"top_k": best},
        lambda length: {"tokenizer_kwargs": {"truncation": True, "max_length": length}},
    ),
    "text-classification": _Task(
        "AutoModelForSequenceClassification",
        lambda best: {"top_k": best},
        lambda length: {"truncation": True, "max_length": length},
    ),
    "token-classification": _Task(
        "AutoModelForTokenClassification",
        lambda best: {"aggregation_strategy": "simple"},
        lambda length: {},
        {"entity_group": "", "word": "", "start": 0, "end": 0, "score": 0.0},
    ),
}
"""The tasks that give every row the same fields."""
_MOST_CHARACTERS_PER_TOKEN: Final = 64
"""Text beyond this many characters for each token allowed is not read: 10 MiB would take seconds to tokenise."""


class PipelineRuntime(PackageRuntime):
    """Runs a transformers pipeline on text."""

    def __init__(self, package: Package, options: LoadOptions | None = None) -> None:
        super().__init__(package, options)
        self._input = package.spec.inputs[0].name
        self._best = 1
        self._blank: Mapping[str, object] | None = None
        self._max_tokens = 0
        self._arguments: dict[str, object] = {}
        self._device: TorchDevice | None = None
        self._counter: Any = None
        self.pipeline: Any = None
        """The pipeline that transformers built; None until loaded."""

    @property
    def _max_characters(self) -> int:
        return self._max_tokens * _MOST_CHARACTERS_PER_TOKEN

    @property
    def model(self) -> torch.nn.Module | None:
        """The pipeline's module; None until loaded."""
        model: torch.nn.Module | None = getattr(self.pipeline, "model", None)
        return model

    def check(self, inputs: Mapping[str, Array]) -> None:
        """Raises InvalidInput for a text of more tokens than the model reads, unless it is to be cut."""
        if self.spec.batching.truncate:
            return
        if self._counter is None:
            raise self._not_loaded()
        room = self._max_tokens - self._counter.num_special_tokens_to_add()
        for text in inputs[self._input].tolist():
            if len(text) > self._max_characters:
                raise InvalidInput(
                    f"{self._input}: over {self._max_characters} characters. Expected at most {self._max_tokens} tokens"
                )
            # No tokenizer makes more tokens than there are bytes.
            if len(text.encode()) > room and (tokens := len(self._counter(text).input_ids)) > self._max_tokens:
                raise InvalidInput(f"{self._input}: {tokens} tokens. Expected at most {self._max_tokens}")

    def prepare(self, jobs: Sequence[Mapping[str, Array]]) -> Prepared:
        """The texts of all jobs, in order."""
        if self.pipeline is None:
            raise self._not_loaded()
        limit = self._max_characters
        texts = [text[:limit] for job in jobs for text in job[self._input].tolist()]
        return Prepared(len(texts), texts)

    def run(self, prepared: Prepared) -> dict[str, Array]:
        """One call of the pipeline."""
        pipeline, device = self._called, self._device
        if device is None:
            raise self._not_loaded()
        with device.inference():
            answers = pipeline(prepared.payload, batch_size=prepared.rows, **self._arguments)
        # For a batch of one text, some pipelines return its answers without a list around them.
        rows = answers if isinstance(answers[0], list) else [answers]
        if self._blank is not None:
            rows = [_best_of(row, self._best, self._blank) for row in rows]
        arrays = {spec.name: self._field(rows, spec.name, spec.dtype, len(spec.shape)) for spec in self.spec.outputs}
        self.spec.signature.check_outputs(arrays, prepared.rows)
        return arrays

    def _build(self, manifest: Manifest, device: str, threads: int) -> int:
        task = _TASKS.get(self.spec.task or "")
        if task is None:
            raise ConfigurationError(
                f"{self.spec.reference}: task: found {self.spec.task}, expected one of: {', '.join(sorted(_TASKS))}"
            )
        self._best, self._blank = self._answers_per_row(), task.blank
        self._device = TorchDevice(device, threads)
        try:
            pipeline = self._pipeline(task.model_class, self._package.source_folder(), self._device)
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"{self.spec.reference}: the weights or the tokenizer cannot be read ({type(error).__name__})"
            ) from error
        own_weights(pipeline.model)
        self._limit_tokens(pipeline, task)
        # `check` counts with its own tokenizer, because the pipeline runs on another thread.
        self._counter = copy.deepcopy(pipeline.tokenizer)
        self.pipeline = pipeline
        self._adapter = adapt(pipeline)
        return module_bytes(pipeline.model)

    def _release(self) -> None:
        self.pipeline = self._counter = self._adapter = None
        if self._device is not None:
            self._device.release_memory()

    def _example(self, rows: int, length: int) -> dict[str, Array]:
        text = f"{self.pipeline.tokenizer.mask_token} a" if self.spec.task == "fill-mask" else "a" * length
        return {self._input: np.full(rows, text, object)}

    def _pipeline(self, model_class: str, folder: Path, device: TorchDevice) -> Any:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        try:
            import torch
            import transformers
        except ImportError:
            raise MissingRequirement("transformers is not installed. Expected: pip install '.[torch]'") from None
        dtype = device.dtype(self.precision) or torch.float32
        load: Any = getattr(transformers, model_class).from_pretrained
        own: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        model = load(folder, use_safetensors=True, dtype=dtype, **own)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **own)
        make: Any = transformers.pipeline  # its overloads accept a literal task only
        return make(self.spec.task, model=model, tokenizer=tokenizer, device=device.device)

    def _answers_per_row(self) -> int:
        extents = {spec.shape[1:] or (1,) for spec in self.spec.outputs}
        (best, *deeper), *others = extents
        if deeper or others or not isinstance(best, int):
            raise ConfigurationError(
                f"{self.spec.reference}: outputs: expected all of shape (batch,), or all of (batch, k) for the k best "
                f"answers of {self.spec.task}"
            )
        return best

    def _limit_tokens(self, pipeline: Any, task: _Task) -> None:
        # Some models have more positions than tokens that they can read. Their tokenizers have the smaller limit.
        known = pipeline.tokenizer.model_max_length
        readable = min(known, getattr(pipeline.model.config, "max_position_embeddings", known))
        self._max_tokens = self.spec.batching.max_length or readable
        if self._max_tokens > readable:
            raise ConfigurationError(
                f"{self.spec.reference}: batching.max_length: found {self._max_tokens}, expected at most {readable} "
                "as the weights say"
            )
        # Some pipelines always cut at this limit.
        pipeline.tokenizer.model_max_length = self._max_tokens
        self._arguments = task.best(self._best) | (task.cut(self._max_tokens) if self.spec.batching.truncate else {})

    def _field(self, rows: Sequence[Sequence[Mapping[str, Any]]], name: str, dtype: str, num_dims: int) -> Array:
        """(rows,) or (rows, k): a field of each row's answers. Raises ModelError for a field that they do not have."""
        if name not in rows[0][0]:
            raise ModelError(f"The pipeline's answers have no {name}. Its fields: {', '.join(sorted(rows[0][0]))}")
        values = [[answer[name] for answer in row] for row in rows]
        return np.array(values if num_dims == 2 else [row[0] for row in values], DTYPES[dtype])


def _best_of(answers: Sequence[Mapping[str, Any]], count: int, blank: Mapping[str, object]) -> list[Mapping[str, Any]]:
    """The `count` best answers of a text, best first, filled up with blank ones."""
    best = sorted(answers, key=lambda answer: float(answer["score"]), reverse=True)[:count]
    return [*best, *[blank] * (count - len(best))]
