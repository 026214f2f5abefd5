"""Proves at load that a model is served right: a short prompt in steps over pages, against the model's own eager code.

    the whole prompt, eager, alone                                  -> logits at each position
    two chunks and a single token, beside another prompt, on pages  -> logits at three of these positions

A folder that was proven on this machine, with the same libraries and the same source, is not probed again.

An architecture that never calls the attention function, calls it twice for a layer, or lets a row depend on others
gives wrong text and no error. So it is refused here by its name. Windows that are longer than the probe are made short
for its time, in the model's own code and in ours.

Importing this module imports torch.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

from penstock.registry.errors import ConfigurationError
from penstock.workers.generation import attention
from penstock.workers.generation.attention import KeyValuePools
from penstock.workers.generation.load_records import LoadRecords, files_of, machine
from penstock.workers.generation.model import Decoder
from penstock.workers.generation.scheduler import Chunk, Sequence
from penstock.workers.generation.short_windows import short_windows
from penstock.workers.runtime.prepacked import PackedFailure

__all__ = ["Proof", "eager_logits", "model_facts", "probe", "probe_tokens"]

_TOLERANCES: Final = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
"""Of the largest logit, or of 1 where that is less."""
_NO_RECORDS: Final = LoadRecords(None)
_KIND: Final = "probe"
_LENGTH: Final = 24
_LONGEST: Final = 96
_NEIGHBOUR: Final = 7
_BEYOND: Final = 8
"""Tokens past the end of the shortest window or chunk."""


class Proof(NamedTuple):
    """A decoder is served right. page_nbytes: of one page in all layers.

    difference: of its logits over pages from its eager ones, as a share of the largest, or of 1 where that is less.
    """

    page_nbytes: int
    difference: float


def probe(decoder: Decoder, page_size: int, records: LoadRecords = _NO_RECORDS, packing: str = "off") -> Proof:
    """packing: how the linear layers are packed and joined.

    Raises ConfigurationError with the architecture's name, and PackedFailure where the packed layers are at fault.
    """
    facts = model_facts(decoder)
    if facts is not None:
        facts |= {"page": page_size, "packing": packing, "has_kernel": decoder.kernel is not None}
        if (known := _known(records.read(_KIND, facts))) is not None:
            return known
    proof = _proven(decoder, page_size)
    if facts is not None:
        records.write(_KIND, facts, proof._asdict())
    return proof


def model_facts(decoder: Decoder) -> dict[str, Any] | None:
    """All of the machine and the model that what it computes depends on. None for a model that is of no folder."""
    if decoder.folder is None:
        return None
    model = {"files": files_of(decoder.folder), "dtype": str(decoder.model.dtype), "device": str(decoder.model.device)}
    placed = decoder.device.device
    gpu = torch.cuda.get_device_name(placed) if placed.type == "cuda" else ""
    return {**machine(), **model, "folder": str(decoder.folder), "positions": decoder.max_positions, "gpu": gpu}


def _known(record: Any) -> Proof | None:
    if not isinstance(record, dict):
        return None
    nbytes, difference = record.get("page_nbytes"), record.get("difference")
    if isinstance(nbytes, int) and nbytes > 0 and isinstance(difference, float):
        return Proof(nbytes, difference)
    return None


def _proven(decoder: Decoder, page_size: int) -> Proof:
    try:
        with short_windows(decoder, _LONGEST - _BEYOND):
            return _probe(decoder, page_size)
    except (ConfigurationError, PackedFailure):
        raise
    except Exception as error:
        # The model's own code: it may not know an argument, or do with a flat batch what nobody foresaw.
        message = f"{decoder.name} is not served: {type(error).__name__} in a forward over pages, expected logits"
        raise ConfigurationError(message) from error


def _probe(decoder: Decoder, page_size: int) -> Proof:
    tokens = probe_tokens(decoder)
    length = len(tokens)
    own = Sequence("probe", [], 0)
    other = Sequence("neighbour", [], 0)
    per_request = -(-length // page_size)
    own.pages = list(range(1, 1 + per_request))
    other.pages = list(range(1 + per_request, 1 + 2 * per_request))
    pools = KeyValuePools(1 + 2 * per_request, page_size)
    ends = (length // 2, length - 1, length)
    found = []
    for step, end in enumerate(ends):
        chunks = (_next(own, tokens[:end]), _next(other, tokens[: min(length, _NEIGHBOUR + step)]))
        logits, calls = decoder.forward(batch := decoder.batch(chunks, page_size), pools)
        _check_calls(decoder, calls)
        if logits.shape[0] != len(batch.sampling):
            raise ConfigurationError(f"{decoder.name} is not served: its logits are of other tokens")
        found.append(logits[[chunk.sequence is own for chunk in batch.sampling].index(True)])
        for chunk in chunks:
            chunk.sequence.num_computed = chunk.start + chunk.num_tokens
    expected = eager_logits(decoder, tokens)
    difference = _difference(decoder, torch.stack(found), torch.stack([expected[end - 1] for end in ends]))
    return Proof(pools.page_nbytes, difference)


def probe_tokens(decoder: Decoder) -> list[int]:
    """A prompt that reaches past the shortest window, if that is short."""
    return [(7 * at + 3) % decoder.vocab_size for at in range(_length(decoder))]


def _length(decoder: Decoder) -> int:
    shortest = min((rule.reach for rule in decoder.rules if rule.reach is not None), default=0)
    wanted = shortest + _BEYOND if shortest + _BEYOND <= _LONGEST else 0
    return max(4, min(max(_LENGTH, wanted), decoder.max_positions))


def _next(sequence: Sequence, tokens: list[int]) -> Chunk:
    sequence.tokens = tokens
    return Chunk(sequence, sequence.num_computed, len(tokens) - sequence.num_computed)


def eager_logits(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    """(T, V) of transformers' own attention: the others know no capped logits."""
    decoder.model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            ids = torch.tensor([tokens], device=decoder.device.device)
            logits: torch.Tensor = decoder.model(input_ids=ids, use_cache=False).logits[0].float()
            return logits
    finally:
        decoder.model.set_attn_implementation(attention.NAME)


def _check_calls(decoder: Decoder, calls: list[int]) -> None:
    if sorted(calls) != list(range(len(decoder.rules))):
        raise ConfigurationError(
            f"{decoder.name} is not served: {len(calls)} calls of the attention function, expected one for each of "
            f"{len(decoder.rules)} layers"
        )


def _difference(decoder: Decoder, found: torch.Tensor, expected: torch.Tensor) -> float:
    """As a share of the largest logit. Raises ConfigurationError where it is more than rounding."""
    largest = max(1.0, float(expected.abs().max()))
    most = _TOLERANCES[decoder.model.dtype] * largest
    difference = float((found - expected).abs().max())
    # A NaN is no less than the tolerance, either.
    if not difference <= most:
        raise ConfigurationError(
            f"{decoder.name} is not served: its logits over pages differ by {difference:.2g} from its eager ones, "
            f"expected at most {most:.2g}"
        )
    return difference / largest
