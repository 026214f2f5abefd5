"""Results of jobs that no model ran."""

from __future__ import annotations

import pytest

from penstock.registry.envelope import Failure, Keyring, RequestContext, open_result
from penstock.registry.unrun import EXPIRED, unrun_result

KEYRING = Keyring.parse("ours:" + "A" * 44 + ",old:" + "B" * 44)


def test_the_result_of_a_job_that_was_never_opened_has_its_failure_only():
    """It is signed, so its client can believe it."""
    failure = Failure("DeadLettered", "BadSignature")
    sealed = unrun_result("double.one", RequestContext("acme"), failure, KEYRING, worker="worker-1")
    header, body = open_result(sealed, KEYRING)
    assert (header.id, header.context.tenant, header.worker, header.error) == (
        "double.one",
        "acme",
        "worker-1",
        failure,
    )
    assert (header.key, bytes(body)) == ("ours", b"")


def test_another_key_may_sign():
    """A job is answered with its own key during a rotation; a key that is not known here is an error."""
    sealed = unrun_result("double.one", RequestContext("acme"), EXPIRED, KEYRING, key="old")
    assert open_result(sealed, KEYRING)[0].key == "old"
    with pytest.raises(KeyError):
        unrun_result("double.one", RequestContext("acme"), EXPIRED, KEYRING, key="foreign")
