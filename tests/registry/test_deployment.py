"""Deployment: the record of the active version belongs to one model and one epoch."""

from __future__ import annotations

import pytest

from penstock.registry.deployment import Deployment
from penstock.registry.errors import BadSignature, Corrupt
from penstock.registry.signed import Verifier
from penstock.safety.operator_key import OperatorKey, PublicKeys
from tests.registry.catalog.catalogs import new_key

DEPLOYMENT = Deployment(7, "minilm", "2", "ab" * 32)


@pytest.fixture(scope="module")
def operator() -> OperatorKey:
    """The operator's key."""
    return new_key()


@pytest.fixture(scope="module")
def verify(operator: OperatorKey) -> Verifier:
    """The worker's check of signatures by this operator."""
    return PublicKeys.parse(operator.public_text).verify


def test_a_deployment_belongs_to_its_model_and_epoch(operator: OperatorKey, verify: Verifier):
    """A genuine record is refused under another model's key and with another epoch."""
    sealed = DEPLOYMENT.seal(operator.sign)
    assert Deployment.open(b"7 " + sealed, "minilm", verify) == DEPLOYMENT
    assert Deployment.open(b"7 " + DEPLOYMENT.seal(), "minilm") == DEPLOYMENT
    for active, model in ((b"7 " + sealed, "mlp"), (b"8 " + sealed, "minilm"), (b"07 " + sealed, "minilm")):
        with pytest.raises(BadSignature):
            Deployment.open(active, model, verify)


def test_a_worker_without_keys_checks_model_and_epoch(operator: OperatorKey):
    """Without a verifier the record still has to be for this model and this epoch."""
    sealed = DEPLOYMENT.seal(operator.sign)
    assert Deployment.open(b"7 " + sealed, "minilm") == DEPLOYMENT
    for active, model in ((b"7 " + sealed, "mlp"), (b"8 " + sealed, "minilm")):
        with pytest.raises(BadSignature, match="for another model or epoch"):
            Deployment.open(active, model)


def test_decisions_of_unknown_operators_are_refused(verify: Verifier):
    """A worker with keys refuses unsigned records and records of another operator."""
    for sealed in (DEPLOYMENT.seal(), DEPLOYMENT.seal(new_key().sign)):
        with pytest.raises(BadSignature):
            Deployment.open(b"7 " + sealed, "minilm", verify)


@pytest.mark.parametrize("active", [b"", b"7", b"7 ", b"7 \n", b"7 \n{}", b"x \n[]", b"7 " + b"\n" + b"x" * 5000])
def test_bytes_that_are_no_deployment_are_refused(active: bytes):
    """Any foreign bytes under the key raise Corrupt."""
    with pytest.raises(Corrupt):
        Deployment.open(active, "minilm")


def test_a_long_record_is_refused_before_it_is_decoded():
    """A genuine record with 5,000 bytes of spaces behind it is refused."""
    with pytest.raises(Corrupt, match="not an epoch and a record"):
        Deployment.open(b"7 " + DEPLOYMENT.seal() + b" " * 5000, "minilm")
