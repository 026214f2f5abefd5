"""Packages of format `transformers`: sentence encoders, mean-pooled and of unit length.

    texts -> token ids, cut at max_length or refused  prepare, off the model thread; the tokenizer releases the GIL
          -> rows sorted by length, cut into slices   so that short texts are not padded to the longest of the batch,
                                                      but to the package's length buckets, if it has any
          -> vectors, by the form in use              run, on the model thread; rows return in their order

Measured with MiniLM, 32 sentences of 32 tokens, one thread of a CPU with avx512_bf16: eager 131 sentences/s, bf16 477.
Compiled bf16 takes 66 ms a batch and bf16 takes 68. That is not worth a build of 20 s, so a CPU has no compiled bf16.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from penstock.registry.errors import ConfigurationError, InvalidInput, MissingRequirement, ModelError
from penstock.registry.package import Package
from penstock.registry.package.manifest import Manifest
from penstock.registry.package.spec_sections import Precision
from penstock.registry.tensors import Array
from penstock.workers.batching.buckets import LengthBuckets, row_bucket
from penstock.workers.frameworks.adapters import adapt
from penstock.workers.runtime.base import Prepared
from penstock.workers.runtime.compilable import Compilable, CompilationRefused, ModelCompiler
from penstock.workers.runtime.cpu import has_fast_bf16
from penstock.workers.runtime.export import Exportable, can_export, open_exported
from penstock.workers.runtime.forms import Forms, Forward, WithProvenance, finite_outputs
from penstock.workers.runtime.loading import LoadOptions, PackageRuntime
from penstock.workers.runtime.tokeniser import Ids, Tokeniser
from penstock.workers.runtime.torch_device import TorchDevice, module_bytes, own_weights, sharing_weights

if TYPE_CHECKING:
    import torch

__all__ = ["EncoderRuntime", "slice_by_length"]

_CHARACTERS_PER_TOKEN: Final = 4
"""The average of English text; an estimate for sorting, never a limit."""
_MOST_CHARACTERS_PER_TOKEN: Final = 64
"""Text beyond this many characters for each token allowed is not read: 10 MiB would take seconds to tokenise."""
_CPU_FORWARD_TOKENS: Final = 32
_CPU_BF16_FORWARD_TOKENS: Final = 64
_GPU_FORWARD_TOKENS: Final = 4096
"""The cost of one more forward, in computed tokens. Padding beyond it costs more than another slice."""
_SHORT_TOKENS: Final = 128
"""Up to this length, eager attention is faster in bf16 on a CPU: 1.05 to 1.1 times; at 256 tokens 0.8 times."""
_CHECKED_TOKENS: Final = 32
"""Tokens of the rows with which a form is compared when it is built; one row has half as many."""
_MOST_TOKENISER_THREADS: Final = 4
_COMPILED_ROWS: Final = 64
"""Rows of the largest slice that a compiled form covers, where the package does not name a larger batch."""


class _Slice(NamedTuple):
    """Rows of like length: `ids` (n, width) int64 right-padded, `mask` likewise or None without padding."""

    rows: list[int]
    ids: torch.Tensor
    mask: torch.Tensor | None


_Embed: TypeAlias = "Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]"
"""(ids, mask) on the device -> (n, width) float32 vectors there."""


class EncoderRuntime(PackageRuntime):
    """Runs a transformers encoder on text: `text` string (batch,) -> one float32 vector a row."""

    def __init__(self, package: Package, options: LoadOptions | None = None) -> None:
        super().__init__(package, options)
        self._input = package.spec.inputs[0].name
        self._output = package.spec.outputs[0].name
        self._width = int(package.spec.outputs[0].shape[1])
        self._forward_tokens = _CPU_FORWARD_TOKENS
        self._max_tokens = 0
        self._max_characters = 0
        self._pad_id = 0
        self._vocabulary = 1
        self._buckets: LengthBuckets | None = None
        """The buckets that the package declares; None where it declares none, and until loaded."""
        self._padded_to: Counter[int] = Counter()
        """Bucket -> slices that were padded to it; changed under the lock."""
        self._padded_to_lock = threading.Lock()
        self._threads = 1
        self._device: TorchDevice | None = None
        self._pooled: torch.nn.Module | None = None
        self.forms: Final = Forms(self._run_eager, finite_outputs(package.spec))
        """The model's forms; every forward goes through them."""
        self.tokeniser: Tokeniser | None = None
        """None until loaded."""
        self.model: torch.nn.Module | None = None
        """The model that transformers loaded; None until then."""

    def check(self, inputs: Mapping[str, Array]) -> None:
        """Raises InvalidInput for a text of more tokens than the model reads, unless it is to be cut."""
        if self.spec.batching.truncate:
            return
        tokeniser = self._loaded_tokeniser
        room = self._max_tokens - tokeniser.added_tokens
        # A token has at least one byte, so most texts need no counting.
        doubtful = [text for text in inputs[self._input].tolist() if len(text.encode()) > room]
        if any(len(text) > self._max_characters for text in doubtful):
            raise InvalidInput(
                f"{self._input}: over {self._max_characters} characters. Expected at most {self._max_tokens} tokens"
            )
        longest = max(map(len, tokeniser.encode(doubtful)), default=0)
        if longest > self._max_tokens:
            raise InvalidInput(f"{self._input}: {longest} tokens. Expected at most {self._max_tokens}")

    def length(self, inputs: Mapping[str, Array]) -> int:
        """Estimated tokens of the longest row, padding to a bucket included, at most what the model reads."""
        characters = self.spec.signature.length(inputs)
        tokens = min(2 + characters // _CHARACTERS_PER_TOKEN, self._max_tokens or characters + 2)
        return self._buckets.bucket(tokens) if self._buckets else tokens

    def prepare(self, jobs: Sequence[Mapping[str, Array]]) -> Prepared:
        """Tokenises all rows and cuts them into slices of similar length, or of one bucket or a few."""
        limit = self._max_characters if self.spec.batching.truncate else None
        texts = [text[:limit] for job in jobs for text in job[self._input].tolist()]
        tokens = self._loaded_tokeniser.encode(texts)
        lengths = [len(ids) for ids in tokens]
        if max(lengths) > self._max_tokens:
            # The tokenizer makes more tokens than there are bytes, so `check` did not count them.
            raise ModelError(f"{self._input}: {max(lengths)} tokens. Expected at most {self._max_tokens}")
        widths = self._widths(lengths)
        slices = [self._padded(rows, tokens, widths[rows[-1]]) for rows in slice_by_length(widths, self._forward_costs)]
        self._count(slices)
        return Prepared(len(texts), slices, sum(lengths), sum(piece.ids.numel() for piece in slices))

    def run(self, prepared: Prepared) -> dict[str, Array]:
        """Embeds each slice and restores the order of the rows: (rows, width) float32."""
        return self.forms.run(prepared)

    def counts(self) -> dict[str, int]:
        """See Counted: calls of the eager model, slices by bucket, and the counters of the form in use."""
        edges = self._buckets.edges if self._buckets else ()
        with self._padded_to_lock:
            slices = {f"slices_of_{edge}": self._padded_to[edge] for edge in edges}
        return {**super().counts(), **slices, **self.forms.counts()}

    def candidates(self, compiler: ModelCompiler | None) -> dict[str, Callable[[], Forward]]:
        """See Tunable. Where the package or the settings name a precision, no form changes it."""
        device = self._loaded_device
        may_change = self.precision == "auto"
        found: dict[str, Callable[[], Forward]] = {}
        if compiler is not None:
            found["compiled"] = lambda: self._compiled(compiler, "compiled")
        if device.is_cuda:
            if may_change:
                reduced = device.reduced_precision
                found[reduced] = lambda: self._embedding(self._reduced(reduced))
                if compiler is not None and reduced == "bf16":
                    found["compiled-bf16"] = lambda: self._compiled(compiler, "compiled-bf16")
            return found
        is_fp32 = self.precision in ("auto", "fp32")
        if is_fp32 and self._can_prepack:
            found["prepacked"] = self._prepacked
        if may_change and has_fast_bf16():
            found["bf16"] = self._reduced_on_cpu
        if is_fp32 and can_export():
            found["onnx"] = lambda: self._exported(is_int8=False)
        if may_change and can_export():
            found["int8"] = lambda: self._exported(is_int8=True)
        return found

    def compilable(self, form: str) -> Compilable:
        """(ids, mask) -> vectors, for every shape up to the largest that is served."""
        module = self._reduced("bf16") if form == "compiled-bf16" else self._loaded
        corners = ((2, 4), (1, 2), (self._compiled_rows, self._max_tokens))
        return Compilable(module, tuple(self._example_tensors(*corner) for corner in corners))

    def exportable(self) -> Exportable:
        """ids and mask -> vectors, on a CPU."""
        examples = self._example_tensors(2, 16), self._example_tensors(3, self._max_tokens)
        return Exportable(self._loaded, examples, ("ids", "mask"), (self._output,))

    def _example_tensors(self, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids of different tokens, and a mask: two tensors, because a tracer takes a tensor passed twice for one."""
        ids = np.arange(rows * length, dtype=np.int64).reshape(rows, length) % self._vocabulary
        mask = np.ones((rows, length), np.int64)
        mask[0, (length + 1) // 2 :] = 0
        device = self._loaded_device
        return device.upload(device.host_tensor(ids)), device.upload(device.host_tensor(mask))

    def _run_eager(self, prepared: Prepared) -> dict[str, Array]:
        return self._embedding(self._called)(prepared)

    def _embedding(self, embed: _Embed) -> Forward:
        """A forward that calls `embed` for each slice of a batch."""
        device = self._loaded_device

        def forward(prepared: Prepared) -> dict[str, Array]:
            vectors = np.empty((prepared.rows, self._width), np.float32)
            with device.inference():
                # All slices are queued on the device before the first result is awaited.
                embedded = [(piece.rows, embed(*_uploaded(piece, device))) for piece in prepared.payload]
                for rows, tensor in embedded:
                    vectors[rows] = device.download(tensor)
            return {self._output: vectors}

        return forward

    def _reduced(self, precision: Precision) -> torch.nn.Module:
        """A second copy of the model, in another precision."""
        return self._loaded_device.converted(self._loaded, precision)

    @property
    def _can_prepack(self) -> bool:
        from penstock.workers.runtime.prepacked import can_prepack

        return can_prepack(self._loaded)

    def _prepacked(self) -> Forward:
        """The model in fp32 with packed weights beside its own."""
        import torch

        from penstock.workers.runtime.prepacked import prepack

        with suppress(CompilationRefused):
            return self._unpadded(torch.float32)
        module = sharing_weights(self._loaded)
        packing = prepack(module)
        return WithProvenance(self._embedding(module), packing.made, dict)

    def _reduced_on_cpu(self) -> Forward:
        """The model in bf16, with packed weights where that can be.

        Where tokens are padded, by the attention that is faster at each length.
        """
        import torch

        from penstock.workers.runtime.prepacked import prepack

        with suppress(CompilationRefused):
            return self._unpadded(torch.bfloat16)
        long = self._reduced("bf16")
        made: Mapping[str, object] = {}
        with suppress(CompilationRefused):
            made = prepack(long).made
        short: Any = sharing_weights(long)
        short.encoder.set_attn_implementation("eager")
        embed = self._embedding(lambda ids, mask: (short if ids.shape[1] <= _SHORT_TOKENS else long)(ids, mask))
        return WithProvenance(embed, made, dict)

    def _unpadded(self, dtype: torch.dtype) -> Forward:
        """The model on the tokens of a batch without padding. Raises CompilationRefused; see UnpaddedEncoder."""
        import torch

        from penstock.workers.runtime.unpadded import UnpaddedEncoder

        encoder = UnpaddedEncoder(self._loaded, dtype, self._example_tensors(2, min(_CHECKED_TOKENS, self._max_tokens)))
        device = self._loaded_device

        def forward(prepared: Prepared) -> dict[str, Array]:
            vectors = np.empty((prepared.rows, self._width), np.float32)
            slices: Sequence[_Slice] = prepared.payload
            with device.inference():
                ids = [piece.ids.flatten() if piece.mask is None else piece.ids[piece.mask.bool()] for piece in slices]
                lengths = [length for piece in slices for length in _lengths(piece)]
                embedded = encoder(torch.cat(ids), lengths)
                vectors[[row for piece in slices for row in piece.rows]] = device.download(embedded)
            return {self._output: vectors}

        return WithProvenance(forward, encoder.packing.made, dict)

    def _compiled(self, compiler: ModelCompiler, form: str) -> Forward:
        compiled = compiler.compile(self, form)

        def embed(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            vectors: torch.Tensor = compiled(ids, _filled(ids, mask))
            return vectors

        is_replayed = compiled.is_replayed
        forward = self._embedding(self._in_few_shapes(embed) if is_replayed else embed)
        return WithProvenance(forward, compiled.made, compiled.counts)

    def _in_few_shapes(self, compiled: _Embed) -> _Embed:
        """The same for slices padded to buckets of rows and length, because each shape needs its own CUDA graph."""
        from torch.nn.functional import pad

        buckets = self._buckets or LengthBuckets(self._max_tokens)
        most_rows = self._compiled_rows

        def embed(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            rows, length = ids.shape
            more_rows, more = row_bucket(rows, most_rows) - rows, buckets.bucket(length) - length
            # A row of padding only would have no mean.
            whole = pad(pad(_filled(ids, mask), (0, more)), (0, 0, 0, more_rows), value=1)
            return compiled(pad(ids, (0, more, 0, more_rows), value=self._pad_id), whole)[:rows]

        return embed

    def _exported(self, *, is_int8: bool) -> Forward:
        import torch

        session = open_exported(self, self._threads, is_int8=is_int8)

        def embed(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            return torch.from_numpy(session({"ids": ids.numpy(), "mask": _filled(ids, mask).numpy()})[0])

        return self._embedding(embed)

    def _build(self, manifest: Manifest, device: str, threads: int) -> int:
        self._device = TorchDevice(device, threads)
        self._threads = threads
        if self._device.is_cuda:
            self._forward_tokens = _GPU_FORWARD_TOKENS
        else:
            # Threads of the tokenizer would take the cores of the forward.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        folder = self._package.source_folder()
        _check_pooling(folder, self.spec.reference)
        try:
            model = self._load_from(folder)
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"{self.spec.reference}: the weights or the tokenizer cannot be read ({type(error).__name__})"
            ) from error
        from penstock.workers.runtime.pooling import Pooled

        own_weights(model)
        self.model = model
        self._pooled = Pooled(model).eval()
        self._adapter = adapt(self._pooled)
        return module_bytes(model)

    @property
    def _warm_up_lengths(self) -> Sequence[int]:
        return self._buckets.edges if self._buckets else super()._warm_up_lengths

    def _example(self, rows: int, length: int) -> dict[str, Array]:
        """Texts of `length` tokens, or of fewer where a word has more than one token."""
        tokeniser = self._loaded_tokeniser
        words = max(1, min(length, self._max_tokens) - tokeniser.added_tokens)
        while words > 1 and len(tokeniser.encode([" ".join("a" * words)])[0]) > length:
            words //= 2
        return {self._input: np.full(rows, " ".join("a" * words), object)}

    def _release(self) -> None:
        self.forms.reset("unloaded")
        self.model = self._pooled = self._adapter = None
        if self.tokeniser is not None:
            self.tokeniser.close()
        self.tokeniser = None
        if self._device is not None:
            self._device.release_memory()

    @property
    def _forward_costs(self) -> int:
        """The cost of one more forward in tokens. Where tokens are cheap, it is more tokens."""
        is_bf16 = "bf16" in (self.forms.name, self.precision)
        return _CPU_BF16_FORWARD_TOKENS if is_bf16 and not self._loaded_device.is_cuda else self._forward_tokens

    @property
    def _compiled_rows(self) -> int:
        """Rows of the largest slice that a compiled form covers."""
        return max(_COMPILED_ROWS, self.spec.batching.max_batch_size)

    @property
    def _loaded(self) -> torch.nn.Module:
        if self._pooled is None:
            raise self._not_loaded()
        return self._pooled

    @property
    def _loaded_tokeniser(self) -> Tokeniser:
        if self.tokeniser is None:
            raise self._not_loaded()
        return self.tokeniser

    @property
    def _loaded_device(self) -> TorchDevice:
        if self._device is None:
            raise self._not_loaded()
        return self._device

    def _load_from(self, folder: Path) -> torch.nn.Module:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        try:
            import torch
            from transformers import AutoModel, AutoTokenizer
        except ImportError:
            raise MissingRequirement("transformers is not installed. Expected: pip install '.[torch]'") from None
        device = self._loaded_device
        dtype = device.dtype(self.precision) or torch.float32
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True, dtype=dtype)
        self._check_width(model)
        self._limit_tokens(int(model.config.max_position_embeddings))
        self._pad_id = tokenizer.pad_token_id or 0
        self._vocabulary = int(model.config.vocab_size)
        self.tokeniser = Tokeniser(
            tokenizer.backend_tokenizer,
            truncate_at=self._max_tokens if self.spec.batching.truncate else None,
            # With a GPU, the cores have little other work.
            max_threads=min(_MOST_TOKENISER_THREADS, len(os.sched_getaffinity(0)) if device.is_cuda else self._threads),
        )
        return device.place(model, self.spec.reference)

    def _check_width(self, model: Any) -> None:
        if model.config.hidden_size != self._width:
            raise ConfigurationError(
                f"{self.spec.reference}: {self._output} is declared {self._width} wide, "
                f"expected {model.config.hidden_size} as the weights say"
            )

    def _limit_tokens(self, positions: int) -> None:
        self._max_tokens = self.spec.batching.max_length or positions
        if self._max_tokens > positions:
            raise ConfigurationError(
                f"{self.spec.reference}: batching.max_length: found {self._max_tokens}, expected at most {positions} "
                "as the weights say"
            )
        self._max_characters = self._max_tokens * _MOST_CHARACTERS_PER_TOKEN
        declared = self.spec.batching.buckets
        self._buckets = LengthBuckets(self._max_tokens, declared) if declared else None

    def _widths(self, lengths: list[int]) -> list[int]:
        """The least length that each row is padded to: its bucket, or its own length."""
        return list(map(self._buckets.bucket, lengths)) if self._buckets else lengths

    def _count(self, slices: Sequence[_Slice]) -> None:
        if self._buckets is not None:
            with self._padded_to_lock:
                self._padded_to.update(piece.ids.shape[1] for piece in slices)

    def _padded(self, rows: list[int], tokens: list[Ids], width: int) -> _Slice:
        lengths = np.array([len(tokens[row]) for row in rows])
        ids = np.full((len(rows), width), self._pad_id, np.int64)
        for line, row in enumerate(rows):
            ids[line, : lengths[line]] = tokens[row]
        device = self._loaded_device
        if lengths.min() == width:
            return _Slice(rows, device.host_tensor(ids), None)
        mask = (np.arange(width) < lengths[:, None]).astype(np.int64)
        return _Slice(rows, device.host_tensor(ids), device.host_tensor(mask))


def _filled(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The mask; all ones where there is no padding."""
    return ids.new_ones(ids.shape) if mask is None else mask


def _lengths(piece: _Slice) -> list[int]:
    """The tokens of each row, without padding."""
    if piece.mask is None:
        return [piece.ids.shape[1]] * len(piece.rows)
    lengths: list[int] = piece.mask.sum(1).tolist()
    return lengths


def _uploaded(piece: _Slice, device: TorchDevice) -> tuple[torch.Tensor, torch.Tensor | None]:
    return device.upload(piece.ids), None if piece.mask is None else device.upload(piece.mask)


def slice_by_length(lengths: Sequence[int], forward_tokens: int) -> list[list[int]]:
    """Row numbers in slices of ascending length, each cut where its padding would cost more than a forward.

    `forward_tokens`: the cost of one more forward, in tokens. Every row is in exactly one slice.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    slices: list[list[int]] = []
    padding = forward_tokens + 1
    for row in order:
        padding += lengths[slices[-1][0]] - lengths[row] if slices else 0
        if padding > forward_tokens:
            slices.append([])
            padding = 0
        slices[-1].append(row)
    return [rows[::-1] for rows in slices]


def _check_pooling(folder: Path, reference: str) -> None:
    """Raises ConfigurationError if the folder declares another pooling of its vectors."""
    file = folder / "1_Pooling" / "config.json"
    if not file.is_file():
        return
    modes = {key: value for key, value in json.loads(file.read_bytes()).items() if key.startswith("pooling_mode_")}
    used = [key.removeprefix("pooling_mode_") for key, is_used in modes.items() if is_used]
    if modes and used != ["mean_tokens"]:
        raise ConfigurationError(f"{reference}: its weights are pooled by {', '.join(used)}, expected mean_tokens")
