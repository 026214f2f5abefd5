"""Packages of format `transformers`: sentence encoders, mean-pooled and of unit length, in fp32.

    texts -> token ids, cut at max_length           prepare, off the model thread; the tokenizer releases the GIL
          -> rows sorted by length, cut into slices  so that short texts are not padded to the longest of the batch
          -> hidden states -> masked mean -> L2 norm  run, on the model thread; rows return in their order

Pooling follows Reimers & Gurevych 2019 (https://arxiv.org/abs/1908.10084), section 3.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from registry.errors import ConfigurationError
from registry.manifest import Manifest
from registry.package import Package
from registry.tensors import Array
from workers.runtime.base import Prepared
from workers.runtime.loading import Loading, PackageRuntime
from workers.runtime.torch_device import TorchDevice, module_bytes, own_weights

if TYPE_CHECKING:
    import torch

__all__ = ["EncoderRuntime", "slice_by_length"]

_CHARACTERS_PER_TOKEN: Final = 4
"""What English text averages; an estimate for sorting, never a limit."""
_MOST_CHARACTERS_PER_TOKEN: Final = 64
"""Text beyond this many characters for each token allowed is not read: 10 MiB would take seconds to tokenise."""
_CPU_FORWARD_TOKENS: Final = 32
_GPU_FORWARD_TOKENS: Final = 4096
"""What starting one more forward costs, in tokens computed: above it, padding is dearer than another slice."""


class _Slice(NamedTuple):
    """Rows of like length: `ids` (n, longest) int64 right-padded, `mask` likewise or None without padding."""

    rows: list[int]
    ids: torch.Tensor
    mask: torch.Tensor | None


class EncoderRuntime(PackageRuntime):
    """Runs a transformers encoder on text: `text` string (batch,) -> one float32 vector a row."""

    def __init__(self, package: Package, loading: Loading | None = None) -> None:
        super().__init__(package, loading)
        self._input = package.spec.inputs[0].name
        self._output = package.spec.outputs[0].name
        self._width = int(package.spec.outputs[0].shape[1])
        self._forward_tokens = _CPU_FORWARD_TOKENS
        self._max_tokens = 0
        self._max_characters = 0
        self._pad_id = 0
        self._device: TorchDevice | None = None
        self._tokenizer: Any = None
        self.model: torch.nn.Module | None = None
        """What transformers loaded; None until then."""

    def length(self, inputs: Mapping[str, Array]) -> int:
        """Estimated tokens of the longest row, at most what the model reads."""
        characters = self.spec.signature.length(inputs)
        return min(2 + characters // _CHARACTERS_PER_TOKEN, self._max_tokens or characters + 2)

    def prepare(self, jobs: Sequence[Mapping[str, Array]]) -> Prepared:
        """Tokenises all rows and cuts them into slices of like length."""
        limit = self._max_characters
        texts = [text[:limit] for job in jobs for text in job[self._input].tolist()]
        tokens = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]
        lengths = [len(ids) for ids in tokens]
        slices = [self._padded(rows, tokens) for rows in slice_by_length(lengths, self._forward_tokens)]
        return Prepared(len(texts), slices, sum(lengths), sum(piece.ids.numel() for piece in slices))

    def run(self, prepared: Prepared) -> dict[str, Array]:
        """Embeds each slice and puts the rows back into their order: (rows, width) float32."""
        device = self._loaded_device
        vectors = np.empty((prepared.rows, self._width), np.float32)
        with device.inference():
            # Everything is queued on the device before the first result is waited for.
            embedded = [(piece.rows, self._embed(piece, device)) for piece in prepared.payload]
            for rows, tensor in embedded:
                vectors[rows] = device.download(tensor)
        return {self._output: vectors}

    def _build(self, manifest: Manifest, device: str, threads: int) -> int:
        self._device = TorchDevice(device, threads)
        if self._device.is_cuda:
            self._forward_tokens = _GPU_FORWARD_TOKENS
        else:
            # Threads of the tokenizer would take the cores that the forward runs on.
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
        own_weights(model)
        self.model = model
        return module_bytes(model)

    def _release(self) -> None:
        self.model = None
        self._tokenizer = None
        if self._device is not None:
            self._device.release_memory()

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
            raise ConfigurationError("transformers is not installed. Expected: pip install 'penstock[torch]'") from None
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True, dtype=torch.float32)
        if model.config.hidden_size != self._width:
            raise ConfigurationError(
                f"{self.spec.reference}: {self._output} is declared {self._width} wide, "
                f"expected {model.config.hidden_size} as the weights say"
            )
        positions = int(model.config.max_position_embeddings)
        self._max_tokens = self.spec.batching.max_length or positions
        if self._max_tokens > positions:
            raise ConfigurationError(
                f"{self.spec.reference}: batching.max_length: found {self._max_tokens}, expected at most {positions} "
                "as the weights say"
            )
        self._max_characters = self._max_tokens * _MOST_CHARACTERS_PER_TOKEN
        self._pad_id = tokenizer.pad_token_id or 0
        self._tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(self._max_tokens)
        return self._loaded_device.place(model, self.spec.reference)

    def _padded(self, rows: list[int], tokens: list[list[int]]) -> _Slice:
        longest = len(tokens[rows[-1]])
        ids = np.full((len(rows), longest), self._pad_id, np.int64)
        for line, row in enumerate(rows):
            ids[line, : len(tokens[row])] = tokens[row]
        device = self._loaded_device
        if len(tokens[rows[0]]) == longest:
            return _Slice(rows, device.host_tensor(ids), None)
        lengths = np.array([len(tokens[row]) for row in rows])
        mask = (np.arange(longest) < lengths[:, None]).astype(np.int64)
        return _Slice(rows, device.host_tensor(ids), device.host_tensor(mask))

    def _embed(self, piece: _Slice, device: TorchDevice) -> torch.Tensor:
        if self.model is None:
            raise self._not_loaded()
        mask = None if piece.mask is None else device.upload(piece.mask)
        hidden = self.model(input_ids=device.upload(piece.ids), attention_mask=mask).last_hidden_state
        if mask is None:
            pooled = hidden.mean(1)
        else:
            weights = mask.unsqueeze(2).to(hidden.dtype)
            pooled = (hidden * weights).sum(1) / weights.sum(1)
        unit: torch.Tensor = pooled / pooled.norm(dim=1, keepdim=True).clamp_min(1e-12)
        return unit


def slice_by_length(lengths: Sequence[int], forward_tokens: int) -> list[list[int]]:
    """Row numbers in slices of ascending length, each cut where its padding would cost more than a forward.

    `forward_tokens`: what one more forward costs, in tokens. Every row is in exactly one slice.
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
    """Raises ConfigurationError if the folder says that its vectors are pooled in another way."""
    file = folder / "1_Pooling" / "config.json"
    if not file.is_file():
        return
    modes = {key: value for key, value in json.loads(file.read_bytes()).items() if key.startswith("pooling_mode_")}
    used = [key.removeprefix("pooling_mode_") for key, is_used in modes.items() if is_used]
    if modes and used != ["mean_tokens"]:
        raise ConfigurationError(f"{reference}: its weights are pooled by {', '.join(used)}, expected mean_tokens")
