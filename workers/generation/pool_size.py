"""How many pages an engine has: `kv_cache_mb`, or on a GPU what `hbm_utilization` leaves beside weights and forwards.

    the largest step of the scheduler, over one page -> forward -> peak of the device's memory
    all memory x hbm_utilization - peak -> pages

Importing this module imports torch.
"""

from __future__ import annotations

from math import ceil, inf
from typing import Final

from penstock.registry.errors import ConfigurationError
from penstock.workers.generation.attention import KeyValuePools
from penstock.workers.generation.config import Config, SchedulerConfig
from penstock.workers.generation.model import Decoder
from penstock.workers.generation.scheduler import Chunk, Sequence
from penstock.workers.runtime.device_peak import peak_used_bytes, total_bytes

__all__ = ["largest_step", "pages_beside", "pool_pages"]

_CPU_MB: Final = 256.0
_GPU_SHARE: Final = 0.9
_LEAST: Final = 2
"""Page 0, and one that a request can have."""
_MOST_POSITIONS: Final = 1 << 20


def pool_pages(decoder: Decoder, config: Config, page_nbytes: int) -> int:
    """Pages of the pool, with page 0. Raises ConfigurationError where there is no room for two."""
    cache = config.cache
    if cache.kv_cache_mb is None and decoder.device.is_cuda:
        device = str(decoder.device.device)
        peak = peak_used_bytes(device, lambda: _compute(decoder, config))
        share = _GPU_SHARE if cache.hbm_utilization is None else cache.hbm_utilization
        return pages_beside(total_bytes(device), share, peak, page_nbytes)
    megabytes = _CPU_MB if cache.kv_cache_mb is None else cache.kv_cache_mb
    pages = int(megabytes * 1e6 / page_nbytes)
    if pages < _LEAST:
        raise ConfigurationError(
            f"kv_cache_mb: found {megabytes:g}, expected at least {_LEAST * page_nbytes / 1e6:.3f}: two pages "
            f"of {cache.page_size} tokens"
        )
    return pages


def pages_beside(total: int, share: float, peak: int | None, page_nbytes: int) -> int:
    """Pages in so large a share of all memory, beside the peak of a forward. Sizes in bytes.

    peak: with the weights, and with what other processes use; None: the forward did not fit.
    """
    least = inf if peak is None else (peak + _LEAST * page_nbytes) / total
    if peak is None or least > 1:
        raise ConfigurationError(
            f"Weights and the largest step do not fit {total / 1e6:.0f} MB of the device beside two pages, expected "
            "smaller max_num_batched_tokens, max_num_seqs or max_model_len"
        )
    pages = (int(total * share) - peak) // page_nbytes
    if pages < _LEAST:
        raise ConfigurationError(
            f"hbm_utilization: found {share:g}, expected at least {ceil(least * 1000) / 1000:g}: weights and the "
            f"largest step take {peak / 1e6:.0f} of {total / 1e6:.0f} MB, two pages {_LEAST * page_nbytes / 1e6:.3f} MB"
        )
    return pages


def largest_step(config: SchedulerConfig, max_positions: int, page_size: int) -> list[Chunk]:
    """As many rows and tokens as a step can have, at the end of the longest texts. All tokens lie in page 1.

    What a text has in its page does not matter here, and no pool is large enough yet for so many texts.
    """
    longest = min(max_positions, _MOST_POSITIONS)
    tokens, pages = [0] * longest, [1] * -(-longest // page_size)
    rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    prompt = min(config.max_num_batched_tokens - rows + 1, longest)
    sizes = [prompt, *[1] * (rows - 1)]
    return [
        Chunk(Sequence(f"row {row}", tokens, longest, pages=pages), longest - size, size)
        for row, size in enumerate(sizes)
    ]


def _compute(decoder: Decoder, config: Config) -> None:
    page_size = config.cache.page_size
    chunks = largest_step(config.scheduler, decoder.max_positions, page_size)
    decoder.forward(decoder.batch(chunks, page_size), KeyValuePools(_LEAST, page_size))
