"""Joined layers and the attention's kernel, tried at load: used for a trial, and after it where the gate accepts them.

    eager logits -> layers joined -> eager logits -> alike? -> the gate --refused--> plain layers again
    the kernel   -> the probe's logits over pages -> right? -> the gate --refused--> gathered pages, probed again

No request is there yet. What an earlier load has found for the same model on this machine is found again.

Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from penstock.registry.errors import ConfigurationError
from penstock.safety.orchestrator import GateEvidence
from penstock.workers.generation.acceleration_gate import (
    ATTENTION_KERNEL,
    JOINED_LINEARS,
    AccelerationGate,
    error_evidence,
)
from penstock.workers.generation.attention_choice import choose_kernel
from penstock.workers.generation.config import Config
from penstock.workers.generation.joined_linears import join_linears, part_linears
from penstock.workers.generation.load_records import LoadRecords
from penstock.workers.generation.logit_evidence import logit_evidence
from penstock.workers.generation.model import Decoder
from penstock.workers.generation.probe import Proof, eager_logits, model_facts, probe_tokens
from penstock.workers.runtime.base import DeviceLost

__all__ = ["joined_weights", "proof_with_kernel"]

_KIND: Final = "joining"


def joined_weights(decoder: Decoder, config: Config, records: LoadRecords, gate: AccelerationGate) -> int:
    """Joins layers of one input where that is wanted and accepted. Returns the number of joined weights."""
    choice = config.joined_linears
    if choice == "off":
        gate.stays_off(JOINED_LINEARS, "joined_linears", choice)
        return 0
    if choice == "auto" and config.device == "cpu":
        return 0
    evidence, number = _joined(decoder, records)
    if not number:
        # No layer is alike: there is nothing to decide on.
        return 0
    if gate.accepts(JOINED_LINEARS, evidence, "joined_linears", choice):
        return number
    part_linears(decoder.model)
    return 0


def proof_with_kernel(
    decoder: Decoder, config: Config, prove: Callable[[], Proof], gate: AccelerationGate
) -> Proof | None:
    """The proof of the decoder with the kernel, which it has from here on; None: its pages are gathered.

    prove: of the decoder as it is. Raises ConfigurationError where the kernel is wanted by name and cannot run.
    """
    choice = config.attention
    if choice == "sdpa":
        gate.stays_off(ATTENTION_KERNEL, "attention", choice)
        return None
    kernel = choose_kernel(choice, decoder.device)
    if kernel is None:
        return None
    decoder.kernel = kernel
    proof: Proof | None = None
    try:
        proof = prove()
        evidence = GateEvidence(figures={"logits_difference": proof.difference})
    except ConfigurationError as error:
        evidence = error_evidence(error)
    if not gate.accepts(ATTENTION_KERNEL, evidence, "attention", choice):
        decoder.kernel = proof = None
    return proof


def _joined(decoder: Decoder, records: LoadRecords) -> tuple[GateEvidence, int]:
    """The layers are joined. Evidence of the logits before and after, and the number of joined weights."""
    facts = model_facts(decoder)
    known = None if facts is None else _figures(records.read(_KIND, facts))
    if known is not None:
        return GateEvidence(figures=known), join_linears(decoder.model)
    tokens, number = probe_tokens(decoder), 0
    try:
        expected = eager_logits(decoder, tokens)
        number = join_linears(decoder.model)
        evidence = logit_evidence(eager_logits(decoder, tokens), expected, decoder.model.dtype)
    except DeviceLost:
        raise
    except Exception as error:  # the model's own code; where it fails without joined layers, the probe says so
        return error_evidence(error), number
    if facts is not None and not evidence.problems:
        records.write(_KIND, facts, dict(evidence.figures))
    return evidence, number


def _figures(record: Any) -> dict[str, float] | None:
    """None for a record that this module does not write."""
    if not isinstance(record, dict) or not record or not all(isinstance(one, float) for one in record.values()):
        return None
    return record
