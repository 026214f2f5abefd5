"""The tokenizer of a text model, in the gateway: how many tokens texts have, and the texts of token ids.

    spec -> package under repo_root -> tokenizer.json of its weights -> PackageTokenizer, kept

A worker's answer does not tell its tokens: it may come from a cache, and then no text was tokenised. The tokenizer is
the same file, cuts at the same length, and costs 10 to 30 us for a sentence. A gateway without the package, or without
the library, has none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from penstock.producers.gateway.token_pieces import TokenPieces
from penstock.registry.errors import InvalidInput
from penstock.registry.package import ModelSpec, find, load_package
from penstock.registry.package.generation import GENERATE
from penstock.registry.package.inspection import declared_positions

__all__ = ["PackageTokenizer", "PackageTokenizers"]

_FILE: Final = "tokenizer.json"
_TEXTS_IN_THE_LOOP: Final = 64
_LOOK_AGAIN_S: Final = 60.0
_FORMATS: Final = ("transformers", GENERATE)


class PackageTokenizer:
    """A tokenizer as the model's worker uses it. limit: the most tokens of a text, which is cut; None: not cut."""

    def __init__(self, backend: Any, limit: int | None) -> None:
        backend.no_padding()
        if limit is None:
            backend.no_truncation()
        else:
            backend.enable_truncation(limit)
        self._backend = backend
        self.pieces: Final = TokenPieces(backend)

    async def count(self, texts: Sequence[str]) -> int:
        """The tokens that the model reads for these texts, its special tokens included."""
        if len(texts) <= _TEXTS_IN_THE_LOOP:
            return self._count(texts)
        return await asyncio.to_thread(self._count, texts)

    def text_of(self, ids: Sequence[int]) -> str:
        """The text that gives these ids. Raises InvalidInput for ids of another tokenizer."""
        try:
            text: str = self._backend.decode(ids, skip_special_tokens=False)
            again = self._backend.encode(text, add_special_tokens=False).ids
        except (OverflowError, TypeError):
            again = None
        if again != list(ids):
            raise InvalidInput(
                "The token ids are none that this model's tokenizer gives. Expected its ids, without special tokens "
                "and within the model's length, or texts"
            )
        return text

    def _count(self, texts: Sequence[str]) -> int:
        return sum(len(encoding.ids) for encoding in self._backend.encode_batch_fast(list(texts)))


class PackageTokenizers:
    """The tokenizers of the models under `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._found: dict[tuple[str, str], PackageTokenizer] = {}
        self._missing: dict[tuple[str, str], float] = {}
        """When to look again."""

    async def of(self, spec: ModelSpec) -> PackageTokenizer | None:
        """The tokenizer of a model; None: it has none, or it is not here."""
        key, now = (spec.name, spec.version), asyncio.get_running_loop().time()
        if (known := self._found.get(key)) is not None:
            return known
        if spec.format not in _FORMATS or self._missing.get(key, 0.0) > now:
            return None
        loaded = await asyncio.to_thread(_load, self._root, spec)
        if loaded is None:
            self._missing[key] = now + _LOOK_AGAIN_S
        else:
            self._found[key] = loaded
        return loaded


def _load(root: Path, spec: ModelSpec) -> PackageTokenizer | None:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    try:
        package = load_package(find(root, spec.name, spec.version).path, trusted_roots=(root,))
        folder = package.source_folder()
        backend = Tokenizer.from_file(str(folder / _FILE))
        if spec.format == GENERATE:
            # Its worker refuses prompts that are too long, and cuts none.
            return PackageTokenizer(backend, None)
        limit = spec.batching.max_length or declared_positions(folder, package.label)
    except Exception:  # of packages PenstockError; of files that are missing or broken, the library has no narrower one
        return None
    return PackageTokenizer(backend, limit if spec.batching.truncate else None)
