"""The compiled model and CUDA graphs of a decoder, tried at load over two decoding steps of one row.

    a prompt, over the pages
    two steps: the decoder as it is -> logits --.
               the compiled model   -> logits ---+-> alike? -> the gate: compiled-decoding
               graph: captured, replayed with another plan -> logits -> alike? -> the gate: cuda-graphs

The graph of the trial stays, and is that of one row. Graphs of more rows are captured behind it, so that no step waits
for one.

Importing this module imports torch.
"""

from __future__ import annotations

import logging
from typing import Final

import torch

from penstock.registry.errors import OutOfMemory
from penstock.safety.orchestrator import GateEvidence
from penstock.workers.generation.acceleration_gate import (
    COMPILED_DECODING,
    CUDA_GRAPHS,
    AccelerationGate,
    error_evidence,
)
from penstock.workers.generation.attention import KeyValuePools
from penstock.workers.generation.compiled_decoding import CompiledDecoding
from penstock.workers.generation.decode_graphs import CaptureRefused, DecodeGraphs
from penstock.workers.generation.logit_evidence import logit_evidence
from penstock.workers.generation.model import Decoder
from penstock.workers.generation.scheduler import Chunk, Sequence
from penstock.workers.runtime.base import DeviceLost

__all__ = ["accepted_graphs"]

logger = logging.getLogger("penstock.runtime")

_LENGTH: Final = 12
_STEPS: Final = 2
"""The second one replays the graph that the first one has captured."""


def accepted_graphs(
    decoder: Decoder, pools: KeyValuePools, gate: AccelerationGate, *, compiles: bool, most_rows: int
) -> DecodeGraphs | None:
    """Graphs that the gate has accepted; None: there are none. pools: of the engine, before its first request.

    compiles: whether the model in them is to be compiled. most_rows: of a step. The decoder has the kernel, and lies on
    a GPU.
    """
    with decoder.device.inference():
        steps = _steps(decoder, pools)
        compiled = _accepted_compiled(decoder, pools, gate, steps[0]) if compiles else None
        graphs = DecodeGraphs(decoder, pools, compiled)
        evidence = _graph_evidence(decoder, pools, graphs, steps)
        is_accepted = gate.accepts(CUDA_GRAPHS, evidence, "cuda_graphs", True)
        is_captured = is_accepted and _captures(graphs, gate, steps[-1], most_rows)
    # A masked NaN of the trial would spoil the request that has the page next.
    pools.clear(range(1, pools.num_pages)[:_LENGTH])
    if is_captured:
        return graphs
    if compiled is not None and compiled.is_on:
        compiled.end()
        gate.switched_off(COMPILED_DECODING, "the graphs that would have it are refused")
    return None


def _captures(graphs: DecodeGraphs, gate: AccelerationGate, step: Chunk, most_rows: int) -> bool:
    """Whether the model can be a graph of each number of rows. Those for which there is no memory come later."""
    try:
        graphs.capture(step, most_rows)
    except CaptureRefused as refusal:
        gate.switched_off(CUDA_GRAPHS, str(refusal))
        return False
    except (OutOfMemory, torch.OutOfMemoryError):
        logger.warning("no memory for all CUDA graphs at the load; the others are captured when a step has their rows")
    return True


def _steps(decoder: Decoder, pools: KeyValuePools) -> list[Chunk]:
    """Computes the prompt. Returns the last steps of a text, as far as the pages have room for one."""
    usable = (pools.num_pages - 1) * pools.page_size
    length = min(_LENGTH, decoder.max_positions, usable)
    pages = [*range(1, 1 - (-length // pools.page_size))]
    tokens = [(5 * at + 2) % decoder.vocab_size for at in range(length)]
    number = min(_STEPS, length)
    if before := length - number:
        chunk = Chunk(Sequence("trial", tokens, length, pages=pages), 0, before)
        decoder.forward(decoder.batch([chunk], pools.page_size), pools)
    return [Chunk(Sequence("trial", tokens[: at + 1], at + 1, pages=pages), at, 1) for at in range(before, length)]


def _accepted_compiled(
    decoder: Decoder, pools: KeyValuePools, gate: AccelerationGate, step: Chunk
) -> CompiledDecoding | None:
    compiled = None
    try:
        compiled = CompiledDecoding(decoder, pools, gate)
        evidence = compiled.evidence(decoder.batch([step], pools.page_size))
    except DeviceLost:
        raise
    except Exception as error:  # there may be no compiler, or no memory for it
        evidence = error_evidence(error)
    if gate.accepts(COMPILED_DECODING, evidence, "compile_decoding", True):
        return compiled
    if compiled is not None:
        compiled.end()
    return None


def _graph_evidence(decoder: Decoder, pools: KeyValuePools, graphs: DecodeGraphs, steps: list[Chunk]) -> GateEvidence:
    """The logits of a capture and of a replay beside those of the decoder, which launches each kernel by itself."""
    expected = [decoder.forward(decoder.batch([step], pools.page_size), pools)[0] for step in steps]
    try:
        with decoder.device.inference():
            # They stand until the next call.
            found = [graphs.forward([step]).clone() for step in steps]
            return logit_evidence(torch.cat(found), torch.cat(expected), decoder.model.dtype)
    except DeviceLost:
        raise
    except Exception as error:  # the model's code may not be a graph, or there is no memory for one
        return error_evidence(error)
