"""The jobs of a request for several texts, their idempotency keys, and events that make a text void."""

from __future__ import annotations

import pytest

from penstock.producers.events import JobEvent
from penstock.producers.gateway.request_headers import checked_key
from penstock.producers.gateway.text_jobs import Delta, Sent, TextRequest, delta_of
from penstock.registry.errors import JobFailed, ResultGone
from penstock.registry.sampling_params import SamplingParams


def keys_of(key: str | None, choices: int, prompts: int = 1) -> list[str | None]:
    """The keys of the jobs of a request."""
    request = TextRequest("writer", [{"prompt": "a"}] * prompts, SamplingParams(), choices, idempotency_key=key)
    return [job.idempotency_key for job in request.jobs()]


@pytest.mark.parametrize("key", ["k", "k" * 255])
def test_the_first_text_has_the_key_of_the_request(key: str):
    """So a key that was used for several texts is refused for another request, and the other way around."""
    for choices, prompts in ((1, 1), (2, 1), (2, 2), (1, 3)):
        keys = keys_of(key, choices, prompts)
        assert keys[0] == key
        assert len({*keys}) == choices * prompts
        assert all(found is not None and checked_key(f'"{found}"') for found in keys)
    # `k/0` was such a key before.
    assert not {*keys_of("k", 3)[1:]} & {f"k/{number}" for number in range(3)}
    assert keys_of("k", 3) == keys_of("k", 3)
    assert not {*keys_of("k", 3)} & {*keys_of("other", 3)}


def test_without_a_key_no_text_has_one():
    """Then the client's end cancels them."""
    assert keys_of(None, 2) == [None, None]


def test_a_text_whose_first_events_are_gone_is_no_text():
    """A late reader, as with the key of an earlier request, would get the later half twice in place of the whole."""
    begun = Sent().and_then(Delta(0, "half"))
    for sent in (Sent(), begun):
        with pytest.raises(ResultGone, match="Expected a request without stream"):
            delta_of(0, JobEvent(7, "reset", "trimmed"), sent)
    assert delta_of(0, JobEvent(7, "reset", "redelivered"), Sent()) is None
    with pytest.raises(JobFailed, match="began anew"):
        delta_of(0, JobEvent(7, "reset", "redelivered"), begun)
