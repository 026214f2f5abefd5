"""`penstock shadow`: what an operator sees, and input that is refused with nothing changed. AR-087, AR-088."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from penstock.registry.broker.breakers import CANDIDATE, BreakerLimits, breaker_name, new_breaker_id
from penstock.registry.broker.redis_breakers import RedisBreakers
from penstock.registry.broker.redis_shadow import RedisShadow, Settled
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.deployment import Deployment
from penstock.registry.package import load_package
from penstock.registry.queues import WORKERS_KEY, shadow_key, worker_key
from penstock.registry.shadow import ShadowOrder
from penstock.safety.operator_key import OperatorKey, PublicKeys
from tests.flow.shadow_stage import DOUBLE, environ_of, report_of, run_shadow, write_versions
from tests.packages import write_package
from tests.servers import RedisServer
from tests.workers.shadow.pairs import order_of


@pytest.fixture
def environ(shared_redis: RedisServer, models_root: Path, tmp_path: Path, slot: str) -> Iterator[dict[str, str]]:
    """An operator's shell. A worker has reported that it serves version 2; version 1 is on disk, too."""
    write_versions(models_root, slot)
    with closing(RedisStreams.from_url(shared_redis.url)) as broker:
        broker.put_spec(slot, load_package(models_root / slot / "2").spec.to_json())
        report = json.dumps({"name": f"{slot}@test", "models": {slot: "2"}})
        broker.report(f"{slot}@test", report.encode(), 300_000)
    yield environ_of(shared_redis, models_root, tmp_path)
    # Other tests look at all workers of this server.
    with shared_redis.client() as client:
        client.zrem(WORKERS_KEY, f"{slot}@test")
        client.delete(worker_key(f"{slot}@test"))


@pytest.fixture
def end(shared_redis: RedisServer) -> Iterator[RedisShadow]:
    """The broker."""
    with closing(RedisShadow.from_url(shared_redis.url)) as connected:
        yield connected


def test_start_signs_an_order(environ: dict[str, str], slot: str, end: RedisShadow):
    """Workers that trust the operator's key follow it; it has the share and the caps of the command."""
    words = ("--sample", "0.25", "--hours", "2", "--max-pairs", "50", "--max-mb", "1", "--pair-ttl", "30", "--json")
    started = run_shadow(environ, "start", slot, "--candidate", "1", *words)
    assert started.exit_code == 0, started.output
    key = OperatorKey.load(Path(environ["PENSTOCK_HOME"]) / "operator.pem")
    order = ShadowOrder.open(end.orders([slot])[slot], slot, PublicKeys.parse(key.public_text).verify)
    assert json.loads(started.stdout) == {"id": order.id, "model": slot, "candidate": "1", "form": "", "share": 0.25}
    assert (order.max_pairs, order.max_bytes, order.pair_ttl_ms) == (50, 1 << 20, 30_000)
    assert 0 < order.until_ms - end.server_ms() <= 2 * 3_600_000


def test_start_and_stop_are_in_the_audit_log(environ: dict[str, str], slot: str):
    """With the id, the candidate and the share."""
    run_shadow(environ, "start", slot, "--candidate", "1")
    run_shadow(environ, "stop", slot)
    folder = Path(environ["PENSTOCK_HOME"]) / "audit"
    # Each command is a writer of its own.
    lines = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    entries = sorted(lines, key=lambda entry: entry["time"])
    told = [entry for entry in entries if slot in json.dumps(entry) and "shadow" in json.dumps(entry)]
    assert [next(word for word in ("started", "stopped") if word in json.dumps(entry)) for entry in told] == [
        "started",
        "stopped",
    ]


def refused(environ: Mapping[str, str], *words: str) -> str:
    """The one line of a command that is refused."""
    ended = run_shadow(environ, *words)
    assert ended.exit_code == 1, ended.output
    assert ended.stderr.count("\n") == 1
    return ended.stderr


def test_bad_input_changes_nothing(environ: dict[str, str], models_root: Path, slot: str, end: RedisShadow):
    """Each refusal says what is expected, and no order is written."""
    other = write_package(models_root, slot, DOUBLE, version="3") / "model.yaml"
    spec = yaml.safe_load(other.read_text())
    spec["outputs"][0]["shape"] = ["batch", 5]
    other.write_text(yaml.safe_dump(spec))
    write_versions(models_root, f"{slot}-idle")
    start = ("start", slot, "--candidate")
    assert "Unknown version 9" in refused(environ, *start, "9")
    assert "under the models root: 1, 2, 3" in refused(environ, *start, "9")
    assert "Bad version name" in refused(environ, *start, "../1")
    assert "found float32 (batch, 5), expected float32 (batch, 4)" in refused(environ, *start, "3")
    assert "is the active version" in refused(environ, *start, "2")
    assert f"No live worker serves {slot}-idle" in refused(environ, "start", f"{slot}-idle", "--candidate", "1")
    assert "Bad model name" in refused(environ, "start", "No Name", "--candidate", "1")
    for share in ("0", "-0.5", "1.01", "nan"):
        assert "Expected a number above 0 and up to 1" in refused(environ, *start, "1", "--sample", share)
    assert "hours. Expected a positive number" in refused(environ, *start, "1", "--hours", "0")
    assert "max_pairs" in refused(environ, *start, "1", "--max-pairs", "0")
    assert "has no shadow" in refused(environ, "stop", slot)
    assert "has had no shadow" in refused(environ, "report", slot)
    assert end.orders([slot]) == {slot: b""}


def test_a_second_shadow_is_refused(environ: dict[str, str], slot: str, end: RedisShadow):
    """The first one goes on, and the message names it."""
    run_shadow(environ, "start", slot, "--candidate", "1")
    before = end.orders([slot])
    assert "has a shadow with the candidate 1 already. Expected `penstock shadow stop" in refused(
        environ, "start", slot, "--candidate", "1"
    )
    assert end.orders([slot]) == before


def test_an_operator_without_a_trusted_key_is_refused(environ: dict[str, str], slot: str, end: RedisShadow, tmp_path):
    """Workers would not follow the order."""
    other = OperatorKey.generate(tmp_path / "other.pem")
    trusting = {**environ, "PENSTOCK_OPERATOR_PUBLIC_KEYS": other.public_text}
    ended = run_shadow(trusting, "start", slot, "--candidate", "1")
    assert ended.exit_code == 78
    assert end.orders([slot]) == {slot: b""}


def test_status_shows_what_runs(environ: dict[str, str], slot: str, end: RedisShadow):
    """Queue, drops, the shadow worker that asked last; nothing for a model without a shadow."""
    assert run_shadow(environ, "status", slot, "--json").stdout.strip().startswith("[")
    run_shadow(environ, "start", slot, "--candidate", "1", "--max-pairs", "2")
    order = ShadowOrder.open(end.orders([slot])[slot], slot)
    end.mirror(order, [b"1", b"2", b"3"], dropped=4)
    end.take(slot, order.id, "shadow@here:1", 1, most_bytes=10, lease_ms=1000)
    (shown,) = json.loads(run_shadow(environ, "status", slot, "--json").stdout)
    assert shown["queue"] == {"pairs": 2, "bytes": 2}
    assert shown["mirror"] == {"mirrored": 2, "full": 1, "behind": 4, "expired": 0, "discarded": 0}
    assert shown["worker"]["name"] == "shadow@here:1"
    assert shown["worker"]["asked_s_ago"] >= 0
    text = run_shadow(environ, "status").stdout
    assert slot in text
    assert "1.000%" in text


def test_report_shows_agreement_figures_and_the_worst(environ: dict[str, str], slot: str, end: RedisShadow):
    """As JSON and as tables; it stays after the stop."""
    run_shadow(environ, "start", slot, "--candidate", "1")
    order = ShadowOrder.open(end.orders([slot])[slot], slot)
    end.mirror(order, [b"p"] * 100)
    taken = end.take(slot, order.id, "a", 100, most_bytes=1000, lease_ms=60_000) or []
    example = {"job_id": f"{slot}.x", "outcome": "fail", "reason": "y: far\x1b[2J", "figures": {}, "inputs": {"x": "b"}}
    end.settle(
        slot,
        order.id,
        [
            Settled(
                pair.entry_id,
                1,
                "fail" if n < 2 else "pass",
                {"y.max_delta": n / 100},
                True,
                1.0 - n / 100,
                json.dumps(example) if n == 0 else "",
            )
            for n, pair in enumerate(taken)
        ],
    )
    run_shadow(environ, "stop", slot)
    found = report_of(environ, slot)
    assert (found["compared"], found["outcomes"], found["agreement"]) == (100, {"fail": 2, "pass": 98}, 0.98)
    assert found["agreement_interval"] == pytest.approx([0.9300, 0.9945], abs=1e-4)
    figure = found["figures"]["y.max_delta"]
    assert (figure["count"], figure["mean"], figure["largest"]) == (100, pytest.approx(0.495), 0.99)
    assert found["worst"] == [example]
    assert not found["is_running"]
    text = run_shadow(environ, "report", slot).stdout
    assert "candidate 1, agreement 98.0000% (92.9988% to 99.4498%) in 100 pairs" in text
    assert "\x1b[2J" not in text


def test_stop_deletes_the_pairs(environ: dict[str, str], slot: str, end: RedisShadow, shared_redis: RedisServer):
    """The data of users does not outlive the shadow."""
    run_shadow(environ, "start", slot, "--candidate", "1")
    order = ShadowOrder.open(end.orders([slot])[slot], slot)
    end.mirror(order, [b"1", b"2"])
    assert "2 pairs deleted" in run_shadow(environ, "stop", slot).stdout
    with shared_redis.client() as client:
        assert not client.exists(shadow_key(slot))


def test_an_order_that_cannot_be_read_is_shown_and_stopped(environ: dict[str, str], slot: str, end: RedisShadow):
    """Another program wrote it."""
    order = order_of(slot)
    end.start(order, b"\nbroken")
    (shown,) = json.loads(run_shadow(environ, "status", slot, "--json").stdout)
    assert "the order of a shadow" in shown["problem"]
    assert run_shadow(environ, "stop", slot).exit_code == 0


def test_start_leaves_an_open_breaker_open(
    environ: dict[str, str], slot: str, shared_redis: RedisServer, models_root: Path
):
    """An order is no evidence: the PASS of the canary of the new shadow closes it."""
    content_hash = load_package(models_root / slot / "2").manifest().content_hash
    spec = load_package(models_root / slot / "2").spec.to_json()
    name = breaker_name(slot, "1", CANDIDATE)
    with (
        closing(RedisStreams.from_url(shared_redis.url)) as broker,
        closing(RedisBreakers.from_url(shared_redis.url)) as breakers,
    ):
        assert broker.activate(slot, 1, Deployment(1, slot, "2", content_hash).seal(), "2", spec)
        breakers.force_open_breaker(name, "the canary says FAIL", new_breaker_id(), BreakerLimits())
        started = run_shadow(environ, "start", slot, "--candidate", "1")
        assert started.exit_code == 0, started.output
        assert breakers.breakers(slot).records[name].circuit == "open"
