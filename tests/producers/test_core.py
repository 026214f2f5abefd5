"""The part of both clients without I/O: settings, options and handles, seen through a client that only notes calls."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from penstock.producers.core import ClientCore, Inputs, Items, Refused
from penstock.producers.job_state import HandleCore, JobState
from penstock.producers.rows import MAP_WINDOW, MapOrder
from penstock.registry import stack_file
from penstock.registry.admission import SubmitOptions
from penstock.registry.broker.base import Publication, Receipt
from penstock.registry.envelope import Retry
from penstock.registry.errors import ConfigurationError, QueueFull
from penstock.registry.queues import Priority, new_job_id
from penstock.registry.settings import Settings

URL = "redis://127.0.0.1:6379/0"
KEY, OTHER_KEY = (f"{name}:{base64.b64encode(name.encode() * 32).decode()}" for name in "ab")


class NotedReader:
    """A reply reader that notes the jobs whose replies it routes."""

    def __init__(self) -> None:
        self.expected: list[str] = []

    def address(self, slot: str) -> str:
        return f"replies of {slot}"

    def expect_all(self, jobs: Iterable[JobState]) -> None:
        self.expected += [job.id for job in jobs]


class NotedClient(ClientCore[HandleCore, Any, Any, Any, Any]):
    """A client without a broker: each call returns what it was given."""

    def _connect(self, url: str, timeout_s: float, result_ttl_ms: int) -> None:
        self.connected = url, timeout_s, result_ttl_ms
        self.reader = self._reader = NotedReader()

    def _leave_parent(self) -> None:
        """There is no connection to replace."""

    def _handles(self, states: Iterable[JobState]) -> list[HandleCore]:
        return [HandleCore(self, state) for state in states]

    def _submit(self, model: str, inputs: Inputs, options: SubmitOptions, key: str | None) -> Any:
        return model, inputs, options, key

    def _submit_many(
        self,
        model: str,
        items: Items,
        options: SubmitOptions,
        *,
        first_index: int = 0,
        refused: Refused = None,
        timeout_s: float | None = None,
    ) -> Any:
        return model, list(items), options, timeout_s

    def _map(self, model: str, options: SubmitOptions, order: MapOrder) -> Any:
        return model, options, order


def settings(**overrides: object) -> Settings:
    """Settings that no environment changes."""
    return Settings.load(overrides=overrides, environ={})


def test_a_client_connects_as_its_arguments_and_settings_say():
    """The results' time to live comes from the settings, in milliseconds."""
    client = NotedClient(URL, timeout_s=2.5, settings=settings(**{"queue.result_ttl_s": 0.5}))
    assert client.connected == (URL, 2.5, 500)


def test_arguments_win_over_settings(tmp_path: Path):
    """An argument that is not given leaves the setting in force."""
    given = settings(tenant_id="acme", signing_keys=KEY, repo_root=str(tmp_path))
    kept = NotedClient(URL, settings=given)
    assert (kept.tenant, kept._builder.keyring.ids) == ("acme", ("a",))
    changed = NotedClient(URL, tenant="globex", settings=given)
    assert (changed.tenant, changed._builder.keyring.ids) == ("globex", ("a",))
    signing = NotedClient(URL, signing_keys=OTHER_KEY, settings=given)
    assert (signing.tenant, signing._builder.keyring.ids) == ("acme", ("b",))


@pytest.mark.parametrize("arguments", [{"tenant": "Not A Name"}, {"tenant": ""}, {"signing_keys": "short:a2V5"}])
def test_unusable_arguments_make_no_client(arguments: dict[str, Any]):
    """The error is a configuration error, and it does not contain a key."""
    with pytest.raises(ConfigurationError) as refused:
        NotedClient(URL, settings=settings(), **arguments)
    assert "a2V5" not in str(refused.value)


def test_from_env_needs_a_broker(tmp_path: Path):
    """Without a URL and without a running stack, the error names both ways out."""
    with pytest.raises(ConfigurationError, match=r"Expected PENSTOCK_REDIS_URL, or `penstock up`"):
        NotedClient.from_env(settings=settings(home=str(tmp_path)))


def test_from_env_uses_the_running_stack_unless_a_url_is_set(tmp_path: Path):
    """The stack's keys sign, too. A URL in the settings is used without the stack's keys."""
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    stack_file.write(tmp_path, stack_file.RunningStack(1, "unix:///stack.sock", str(keys)))
    with stack_file.hold(tmp_path):
        of_stack = NotedClient.from_env(timeout_s=1.0, settings=settings(home=str(tmp_path)))
        own = NotedClient.from_env(settings=settings(home=str(tmp_path), redis_url=URL))
    assert of_stack.connected[:2] == ("unix:///stack.sock", 1.0)
    assert of_stack._builder.keyring.ids == ("a",)
    assert (own.connected[0], own._builder.keyring.ids) == (URL, ())


@pytest.fixture
def client() -> NotedClient:
    """A client of the tenant `acme`."""
    return NotedClient(URL, settings=settings(tenant_id="acme"))


def test_calls_without_options_use_the_defaults(client: NotedClient):
    """`submit`, `submit_many` and `map` share one set of defaults."""
    plain = SubmitOptions()
    assert client.submit("m", {"x": [1]}) == ("m", {"x": [1]}, plain, None)
    assert client.submit_many("m", [{"x": [1]}]) == ("m", [({"x": [1]}, None)], plain, None)
    model, options, order = client.map("m", ["a"])
    assert (model, options) == ("m", plain)
    assert order == MapOrder(["a"], None, False, "raise", MAP_WINDOW)


def test_options_reach_every_call(client: NotedClient):
    """Each keyword argument becomes the option of its name."""
    given: dict[str, Any] = {
        "priority": "high",
        "deadline_s": 3.0,
        "tenant": "globex",
        "version": "2",
        "outputs": ("y",),
        "traceparent": "trace",
        "retry": Retry(attempts=2),
    }
    options = SubmitOptions(**given)
    assert client.submit("m", {}, idempotency_key="k", **given) == ("m", {}, options, "k")
    many = client.submit_many("m", [{}, {}], idempotency_keys=["k", None], timeout_s=4.0, **given)
    assert many == ("m", [({}, "k"), ({}, None)], options, 4.0)
    assert client.map("m", [], **given)[1] == options


def test_a_named_job_belongs_to_the_tenant_of_the_client_or_of_the_call(client: NotedClient):
    """No reply is expected: another client may have submitted it."""
    job_id = new_job_id("m")
    assert [client.job(job_id).tenant, client.job(job_id, tenant="globex").tenant] == ["acme", "globex"]
    assert client.job(job_id).id == job_id
    assert client.reader.expected == []


def test_a_published_job_keeps_its_handle_unless_an_earlier_job_answers(client: NotedClient):
    """The reply is expected from before the call on. For a known idempotency key, the earlier job's handle comes."""
    job_id, earlier = new_job_id("m"), new_job_id("m")
    (handle,) = client._track([Publication(job_id, Priority.NORMAL, b"", "globex")])
    assert client.reader.expected == [job_id]
    assert client._accepted(handle, Receipt("accepted", job_id), "m") is handle
    known = client._accepted(handle, Receipt("known", earlier), "m")
    assert (known.id, known.tenant) == (earlier, "globex")
    assert (handle._state.awaits_reply, known._state.awaits_reply) == (True, False)
    existing = client._accepted(handle, Receipt("exists", job_id), "m")
    assert (existing.id, existing.tenant, existing._state.awaits_reply) == (job_id, "globex", False)
    with pytest.raises(QueueFull):
        client._accepted(handle, Receipt("full", job_id, 0.5), "m")
