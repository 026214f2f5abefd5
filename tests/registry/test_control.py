"""Control commands of operators: valid once, for the named workers, for minutes, and only if signed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from penstock.registry.control import Command, CommandVerifier
from penstock.registry.deployment import Deployment
from penstock.registry.errors import BadSignature, Corrupt, Forbidden, UndecodableEnvelope
from penstock.registry.signed import Verifier
from penstock.safety.operator_key import OperatorKey, PublicKeys

WORKER = "gpu0@host"
LOAD = Command("load", "minilm", "2")


@pytest.fixture
def operator(tmp_path: Path) -> OperatorKey:
    """The operator's key."""
    return OperatorKey.generate(tmp_path / "operator.pem")


@pytest.fixture
def verify(operator: OperatorKey) -> Verifier:
    """The worker's check of signatures by this operator."""
    return PublicKeys.parse(operator.public_text).verify


def test_a_signed_command_is_valid_once(operator: OperatorKey, verify: Verifier):
    """It arrives unchanged; its repetition is refused."""
    command = LOAD.addressed_to([WORKER])
    verifier = CommandVerifier(verify, WORKER)
    sealed = command.seal(operator.sign)
    assert verifier.open(sealed) == command
    with pytest.raises(BadSignature, match="received before"):
        verifier.open(sealed)


def test_a_command_is_for_the_workers_that_it_names(operator: OperatorKey, verify: Verifier):
    """A recent command that was recorded has no effect on another worker (S0.3)."""
    sealed = LOAD.addressed_to([WORKER, "gpu1@host"]).seal(operator.sign)
    assert CommandVerifier(verify, "gpu1@host").open(sealed).model == "minilm"
    for sent in (sealed, LOAD.addressed_to([]).seal(operator.sign)):
        with pytest.raises(BadSignature, match="for other workers"):
            CommandVerifier(verify, "gpu2@host").open(sent)


@pytest.mark.parametrize("lag_s", [-301, 301])
def test_a_command_is_valid_for_five_minutes(operator: OperatorKey, verify: Verifier, lag_s: float):
    """It is refused when it is replayed later, or when it is dated ahead."""
    sealed = LOAD.addressed_to([WORKER]).seal(operator.sign)
    with pytest.raises(BadSignature, match="300 s"):
        CommandVerifier(verify, WORKER, clock=lambda: time.time() + lag_s).open(sealed)


def test_commands_need_the_signature_of_a_known_operator(operator: OperatorKey, verify: Verifier, tmp_path: Path):
    """Foreign keys, flipped bytes, other kinds of record and unsigned ones are refused (S0.1, S0.3)."""
    stranger = OperatorKey.generate(tmp_path / "stranger.pem")
    sealed = LOAD.addressed_to([WORKER]).seal(operator.sign)
    flipped = [sealed[:at] + chr(ord(sealed[at]) ^ 1) + sealed[at + 1 :] for at in range(len(sealed))]
    others = [
        LOAD.addressed_to([WORKER]).seal(stranger.sign),
        Deployment(1, "minilm", "2", "0" * 64).seal(operator.sign).decode(),
        sealed.partition("\n")[2],
        "\n" + sealed.partition("\n")[2],
        "",
        7,
        None,
        "\ud800",
    ]
    verifier = CommandVerifier(verify, WORKER)
    for forged in (*flipped, *others):
        with pytest.raises(Corrupt):
            verifier.open(forged)
    assert verifier.open(sealed).model == "minilm"


def test_a_worker_without_keys_accepts_no_commands(operator: OperatorKey):
    """The error names the missing setting."""
    with pytest.raises(Forbidden, match="PENSTOCK_OPERATOR_PUBLIC_KEYS"):
        CommandVerifier(None, WORKER).open(LOAD.addressed_to([WORKER]).seal(operator.sign))


def test_an_unknown_action_is_no_command(operator: OperatorKey, verify: Verifier):
    """A worker accepts the actions that it knows, and no other, also when they are signed."""
    sealed = Command("erase").addressed_to([WORKER]).seal(operator.sign)  # type: ignore[arg-type]
    with pytest.raises(UndecodableEnvelope, match="erase"):
        CommandVerifier(verify, WORKER).open(sealed)
