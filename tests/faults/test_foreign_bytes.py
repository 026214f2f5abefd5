"""F10: foreign bytes in the queue: no msgpack, other versions, unsigned, swapped, replayed, 10 MB, deeply nested."""

from __future__ import annotations

import base64
import math
import random
import time
import urllib.request
from collections.abc import Callable
from functools import partial

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from penstock.registry.admission import JobBuilder, SubmitOptions
from penstock.registry.envelope import PROTOCOL, Keyring
from penstock.registry.metrics import QUARANTINED
from penstock.registry.package import ModelSpec
from penstock.registry.queues import GROUP, Priority, dead_key, stream_key
from penstock.registry.tensors import MAX_BYTES
from tests.faults.conftest import OpenStage, Stage, StartLoad, Trial
from tests.faults.load import row
from tests.faults.rounds import is_full, seeds
from tests.servers import wait_until

GOOD_JOB_S = 0.1
TRIES = 20 if is_full() else 1
"""How often one kind of bytes is tried until its recovery is in time: only a full run judges that."""
_KEYS = "live:" + base64.b64encode(b"k" * 32).decode()
_OTHER_KEYS = "other:" + base64.b64encode(b"o" * 32).decode()
_FIXED = 8
"""Bytes of an envelope before its header."""


class Forge:
    """Bytes that no worker may take for a job of `stage`'s model."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self._model = stage.model
        self._random = random.Random(seed)
        with stage.server.client() as client:
            self._spec = ModelSpec.from_json(client.get(f"{{{stage.model}}}:spec"))

    def sealed(self, keys: str | None = _KEYS, *, number: float = -1.0, **how: str) -> bytes:
        """A job as a client seals it, that was never published."""
        builder = JobBuilder(tenant="forger", keyring=Keyring.parse(keys), max_bytes=MAX_BYTES)
        return builder.build(self._spec, {"x": row(number)}, SubmitOptions(**how)).sealed  # type: ignore[arg-type]  # all text

    def noise(self) -> bytes:
        """Random bytes."""
        return self._random.randbytes(self._random.randrange(1, 300))

    def empty(self) -> bytes:
        """Nothing at all."""
        return b""

    def not_msgpack(self) -> bytes:
        """A sound frame around a header that is none."""
        return _framed(b"\xc1" * 64)

    def newer(self) -> bytes:
        """From the next release."""
        return _of_protocol(self.sealed(), PROTOCOL + 1)

    def older(self) -> bytes:
        """From the release before."""
        return _of_protocol(self.sealed(), PROTOCOL - 1)

    def unsigned(self) -> bytes:
        """A sound job without a signature."""
        return self.sealed(None)

    def by_a_stranger(self) -> bytes:
        """Signed with a key that is not known here."""
        return self.sealed(_OTHER_KEYS)

    def flipped(self) -> bytes:
        """One bit of a signed job is another."""
        sealed = bytearray(self.sealed())
        sealed[self._random.randrange(_FIXED, len(sealed))] ^= 1 << self._random.randrange(8)
        return bytes(sealed)

    def swapped(self) -> bytes:
        """The header of one signed job before the body of another."""
        one, other = self.sealed(number=-2.0), self.sealed(number=-3.0)
        return one[: _body_at(one)] + other[_body_at(other) :]

    def of_another_queue(self) -> bytes:
        """A sound, signed job, made for another priority."""
        return self.sealed(priority="critical")

    def huge(self) -> bytes:
        """10 MB and more."""
        return self.sealed() + bytes(MAX_BYTES)

    def deep(self) -> bytes:
        """A header of nested arrays."""
        return _framed(b"\x91" * 50_000 + b"\xc0")

    def truncated(self) -> bytes:
        """The first part of a job."""
        sealed = self.sealed()
        return sealed[: self._random.randrange(4, len(sealed))]


FORGERIES: tuple[Callable[[Forge], bytes], ...] = (
    *(Forge.noise, Forge.empty, Forge.not_msgpack, Forge.newer, Forge.older, Forge.unsigned, Forge.by_a_stranger),
    *(Forge.flipped, Forge.swapped, Forge.of_another_queue, Forge.huge, Forge.deep, Forge.truncated),
)


def _framed(header: bytes) -> bytes:
    return b"PS" + bytes([PROTOCOL]) + b"J" + len(header).to_bytes(4, "little") + header


def _of_protocol(sealed: bytes, protocol: int) -> bytes:
    return sealed[:2] + bytes([protocol]) + sealed[3:]


def _body_at(sealed: bytes) -> int:
    return _FIXED + int.from_bytes(sealed[4:_FIXED], "little")


@pytest.fixture(scope="module")
def stage(open_stage: OpenStage) -> Stage:
    """One worker that asks for signatures."""
    stage = open_stage()
    stage.start_worker(PENSTOCK_SIGNING_KEYS=_KEYS)
    return stage


def _quarantined(stage: Stage) -> float:
    (worker,) = stage.workers
    with urllib.request.urlopen(worker.report()["probe"] + "/metrics", timeout=180) as page:  # noqa: S310  # loopback
        families = text_string_to_metric_families(page.read().decode())
    return sum(sample.value for family in families for sample in family.samples if sample.name == QUARANTINED.name)


def _has_counted(stage: Stage, count: float) -> bool:
    return _quarantined(stage) == count


def _newest(client: redis.Redis, model: str) -> object:
    """The id of the newest dead letter. Their number does not tell: beyond their limit of bytes the oldest ones go."""
    letters = client.xrevrange(dead_key(model), count=1)
    return letters[0][0] if letters else None


def _await_letter(client: redis.Redis, model: str, before: object, what: str) -> None:
    """A dead letter behind this one. A failure tells what is in the queue instead."""
    try:
        wait_until(lambda: _newest(client, model) != before, 30, what)
    except pytest.fail.Exception as failure:
        queue = stream_key(model, Priority.NORMAL)
        held = client.xpending_range(queue, GROUP, "-", "+", 10)
        pytest.fail(f"{failure}: the newest letter is {before!r}; queued {client.xlen(queue)}, held {held}")


@pytest.mark.parametrize("seed", seeds())
def test_foreign_bytes_are_quarantined_and_counted(seed: int, stage: Stage, start_load: StartLoad, trial: Trial):
    """Each goes to the dead letters with its bytes and is counted; the worker lives and does the next job at once."""
    forge = Forge(stage, seed)
    load = start_load(stage.server, stage.forward_log, signing_keys=_KEYS)
    queue, dead = stream_key(stage.model, Priority.NORMAL), dead_key(stage.model)
    process = stage.workers[0].pid
    order = list(FORGERIES)
    random.Random(seed).shuffle(order)
    load.publish(1)
    load.await_all(30)
    times = 0
    with stage.server.client() as client:
        for make in order:
            fastest_s = math.inf
            # What the bytes cost they cost every time; what a busy machine adds it does not.
            for _ in range(TRIES):
                if fastest_s <= GOOD_JOB_S:
                    break
                times += 1
                sealed, before = make(forge), _newest(client, stage.model)
                counted = _quarantined(stage)
                client.xadd(queue, {"e": sealed})
                begun = time.monotonic()
                load.publish(1)
                load.await_all(5)
                fastest_s = min(fastest_s, time.monotonic() - begun)
                # Bytes beyond one claim and the good job are in two claims.
                _await_letter(client, stage.model, before, f"{make.__name__} is a dead letter")
                ((_, letter),) = client.xrevrange(dead, count=1)
                assert letter[b"e"] == sealed
                assert letter[b"reason"].startswith((b"UndecodableEnvelope: ", b"BadSignature: ")), make.__name__
                wait_until(partial(_has_counted, stage, counted + 1), 30, f"{make.__name__} is counted")
            trial.recovered(fastest_s, within=GOOD_JOB_S)
    assert stage.workers[0].is_running
    assert stage.workers[0].pid == process
    trial.check(load.history(), times=times)
    load.check_answers()


@pytest.mark.parametrize("seed", seeds())
def test_replayed_jobs_have_no_second_effect(seed: int, stage: Stage, start_load: StartLoad, trial: Trial):
    """Signed bytes that were seen before, once their job has ended: its result stays, and no client is told again."""
    load = start_load(stage.server, stage.forward_log, signing_keys=_KEYS)
    queue = stream_key(stage.model, Priority.NORMAL)
    with stage.server.client() as client:
        stage.workers[0].freeze()
        try:
            load.publish(20)
            seen = [fields[b"e"] for _, fields in client.xrange(queue)]
        finally:
            stage.workers[0].thaw()
        load.await_all(10)
        for sealed in random.Random(seed).sample(seen, 20):
            client.xadd(queue, {"e": sealed})
        wait_until(lambda: not client.xlen(queue), 10, "the replays are dealt with")
        assert client.xpending(queue, GROUP)["pending"] == 0
    findings = trial.check(load.history(), times=20)
    assert len(findings.re_executed) <= 20
    load.check_answers()
