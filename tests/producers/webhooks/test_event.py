"""What a receiver gets: the event of each end, and signatures that verify and cannot be moved."""

from __future__ import annotations

import time
from typing import Any

import pytest

from penstock.producers.webhooks.event import event_of
from penstock.registry.broker.base import State
from penstock.registry.broker.webhooks import Webhook
from penstock.registry.webhook_secrets import new_secret, parse_secrets
from penstock.registry.webhooks.signing import body_of, headers_of
from tests.architecture.documents import written
from tests.receiver import Call, verify
from tests.servers import require_module

NOW_S = 1_763_650_000.7


def webhook(state: State = State.COMPLETED) -> Webhook:
    """The webhook of one job."""
    return Webhook("minilm", "evt_1_2", "minilm.1", state, 1_763_649_999_900, "https://example.com/", 1)


def sent(body: bytes, *secrets: str, event_id: str = "evt_1_2") -> Call:
    """A call as it arrives."""
    return Call("/", headers_of(event_id, body, parse_secrets(",".join(secrets)), NOW_S), body)


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (State.COMPLETED, "completed"),
        (State.FAILED, "failed"),
        (State.CANCELLED, "cancelled"),
        (State.EXPIRED, "expired"),
        (State.DEAD, "dead"),
    ],
)
def test_event_names_the_job_and_its_end(state: State, status: str):
    """OpenAI's shape; the time is that of the end, in unix seconds."""
    assert event_of(webhook(state)) == {
        "id": "evt_1_2",
        "object": "event",
        "type": f"job.{status}",
        "created_at": 1_763_649_999,
        "data": {"id": "minilm.1", "model": "minilm", "status": status},
    }


def test_each_secret_signs():
    """A receiver that knows the old or the new one accepts; one that knows another refuses."""
    old, new, other = (new_secret() for _ in range(3))
    call = sent(body_of(event_of(webhook())), new, old)
    assert verify(call, old)
    assert verify(call, new)
    assert not verify(call, other)
    assert call.headers["webhook-timestamp"] == "1763650000"
    assert call.headers["content-type"] == "application/json"


def test_forged_calls_are_refused():
    """Another body, id or time under the same signature; a signature of another version."""
    secret = new_secret()
    call = sent(body_of(event_of(webhook())), secret)
    assert verify(call, secret)
    forged = [
        call._replace(body=call.body.replace(b"completed", b"failed")),
        call._replace(headers={**call.headers, "webhook-id": "evt_other"}),
        call._replace(headers={**call.headers, "webhook-timestamp": "1763650001"}),
        call._replace(headers={**call.headers, "webhook-signature": "v2," + call.headers["webhook-signature"][3:]}),
        call._replace(headers={**call.headers, "webhook-signature": ""}),
    ]
    assert [verify(each, secret) for each in forged] == [False] * len(forged)


def test_known_answer():
    """The example of the Standard Webhooks specification."""
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # noqa: S105 - the specification's
    headers = headers_of("msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}', parse_secrets(secret), 1614265330)
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_code_of_the_document_verifies():
    """The function in docs/how-to/submit.md accepts a call of ours, and refuses a forged and an old one."""
    (code,) = [each for each in written()["docs/how-to/submit.md"].runs() if "def is_from_penstock" in each]
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 - our own document
    secret = names["SECRET"]
    body = body_of(event_of(webhook()))
    headers = headers_of("evt_1_2", body, parse_secrets(f"{new_secret()},{secret}"), time.time())
    assert names["is_from_penstock"](headers, body)
    assert not names["is_from_penstock"](headers, body + b" ")
    assert not names["is_from_penstock"](headers_of("evt_1_2", body, parse_secrets(secret), time.time() - 600), body)
    assert not names["is_from_penstock"](headers_of("evt_1_2", body, parse_secrets(new_secret()), time.time()), body)


def test_library_of_the_standard_accepts():
    """The reference library verifies a call, and refuses one with another body."""
    standardwebhooks = require_module("standardwebhooks")
    secret = new_secret()
    body = body_of(event_of(webhook()))
    library = standardwebhooks.Webhook(secret)
    # The library refuses times that are not ours.
    headers = headers_of("evt_1_2", body, parse_secrets(secret), time.time())
    assert library.verify(body, headers) == event_of(webhook())
    with pytest.raises(standardwebhooks.WebhookVerificationError, match="No matching signature"):
        library.verify(body + b" ", headers)
