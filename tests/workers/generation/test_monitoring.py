"""ES-049 to ES-051: the page and the console of an engine that runs without a worker."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.registry.errors import ConfigurationError
from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation import EngineStats, start_monitoring
from penstock.workers.generation.engine import Engine
from penstock.workers.generation.monitoring import console_line
from tests.servers import wait_until
from tests.workers.generation.architectures import decoder
from tests.workers.generation.engines import GREEDY, open_engine, prompts_of

PATIENCE_S = 180.0
PROMPTS = prompts_of(40, 9, 17)


@pytest.fixture
def engine() -> Engine:
    return open_engine(decoder("Llama"), kv_cache_mb=4)


def read(url: str) -> dict[tuple[str, str], float]:
    """(sample, its kind or state) -> value."""
    text = httpx.get(url).raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(one.name, one.labels.get("kind", one.labels.get("state", ""))): one.value for one in samples}


def test_page_is_empty_before_and_has_the_counts_after(engine: Engine):
    """The figures are those of the engine at the time of the request."""
    with start_monitoring(engine) as monitoring:
        assert monitoring.port > 0
        assert str(monitoring.port) in monitoring.url
        assert read(monitoring.url) == {}
        for _ in range(2):
            engine.generate(PROMPTS, GREEDY)
        stats, page = engine.stats(), read(monitoring.url)
        expected = {
            ("penstock_generation_finished_total", ""): 6,
            ("penstock_generation_requests", "running"): 0,
            ("penstock_tokens_total", "generated"): stats.tokens_generated,
            ("penstock_tokens_total", "prompt"): stats.prompt_tokens_computed,
            ("penstock_prefix_tokens_total", "found"): stats.prefix_tokens_found,
            ("penstock_prefix_tokens_total", "queried"): stats.prefix_tokens_queried,
            ("penstock_pages", "all"): stats.pages_total,
        }
        assert {name: page.get(name) for name in expected} == expected
        assert stats.prefix_tokens_found > 0
        assert page["process_resident_memory_bytes", ""] > 1e6


def test_page_shows_requests_that_run(engine: Engine):
    """Between two steps, those of `add_request`."""
    with start_monitoring(engine) as monitoring:
        engine.add_request("one", PROMPTS[0], GREEDY)
        engine.add_request("two", PROMPTS[1], GREEDY)
        engine.step()
        assert read(monitoring.url)["penstock_generation_requests", "running"] == 2
        engine.abort("one")
        page = read(monitoring.url)
    assert page["penstock_generation_requests", "running"] == 1
    assert page["penstock_generation_finished_total", ""] == 1


def test_page_waits_for_no_step(engine: Engine):
    """It is read in the middle of a step of another thread, which holds the engine."""
    engine.generate(PROMPTS, GREEDY)
    begun, over = threading.Event(), threading.Event()

    def stop(*_: Any) -> None:
        begun.set()
        over.wait(PATIENCE_S)

    with start_monitoring(engine) as monitoring:
        hook = engine.decoder.model.register_forward_hook(stop)
        thread = threading.Thread(target=engine.generate, args=(PROMPTS[:1], SamplingParams(max_tokens=1)))
        thread.start()
        assert begun.wait(PATIENCE_S)
        assert read(monitoring.url)["penstock_generation_requests", "running"] == 1
        over.set()
        thread.join()
        hook.remove()


def test_stop_frees_the_port_and_the_threads(engine: Engine):
    """The same port can be asked for at once, and one in use is told."""
    before = set(threading.enumerate())
    monitoring = start_monitoring(engine, enable_console=True, write=lambda _: None)
    with pytest.raises(ConfigurationError, match=rf"prometheus_port: {monitoring.port} cannot be used: .*in use"):
        start_monitoring(engine, prometheus_port=monitoring.port)
    monitoring.stop()
    assert set(threading.enumerate()) <= before
    with pytest.raises(httpx.ConnectError):
        httpx.get(monitoring.url)
    with start_monitoring(engine, prometheus_port=monitoring.port) as again:
        assert again.port == monitoring.port


def test_page_is_on_the_loopback_alone(engine: Engine):
    """It asks for no token."""
    with start_monitoring(engine) as monitoring:
        assert monitoring._server.server_address[0] == "127.0.0.1"


def test_bad_options_are_refused(engine: Engine):
    """Before anything is started."""
    before = set(threading.enumerate())
    options: list[tuple[dict[str, Any], str]] = [
        ({"prometheus_port": 70_000}, "prometheus_port: found an integer|prometheus_port: found 70000"),
        ({"prometheus_port": "9090"}, "prometheus_port: found"),
        ({"interval_s": 0}, "interval_s: found"),
    ]
    for given, expected in options:
        with pytest.raises(ConfigurationError, match=expected):
            start_monitoring(engine, **given)
    assert set(threading.enumerate()) == before


def test_console_writes_what_has_happened(engine: Engine):
    """A line each interval; one of them has the tokens of the generation."""
    lines: list[str] = []
    with start_monitoring(engine, enable_console=True, interval_s=0.02, write=lines.append):
        wait_until(lambda: bool(lines), PATIENCE_S, "a line")
        engine.generate(PROMPTS, GREEDY)
        engine.generate(PROMPTS, GREEDY)
        wait_until(lambda: any("cache hits -" not in line for line in lines), PATIENCE_S, "a line with cache hits")
    number = len(lines)
    assert lines[0].startswith("0.0 requests/s  0 tokens/s  memory ")
    assert any(not line.startswith("0.0 requests/s") for line in lines)
    assert len(lines) == number


def test_console_line_has_the_figures_of_its_interval(engine: Engine):
    """Five: requests, tokens, memory, cache hits, active texts."""
    before = engine.stats()
    after = replace(
        before,
        requests_finished=9,
        tokens_generated=3_000,
        prefix_tokens_queried=200,
        prefix_tokens_found=50,
        running=4,
        waiting=2,
        pages_used=12,
        pages_total=340,
    )
    line = console_line(before, after, 2.0)
    expected = r"4\.5 requests/s  1,500 tokens/s  memory [\d,]+ MB(?: \+ [\d,]+ MB GPU)?, pages 12/340  "
    assert re.fullmatch(expected + "cache hits 25%  active 4, waiting 2", line)
    assert "cache hits -" in console_line(after, after, 1.0)


def test_port_zero_takes_a_free_one(engine: Engine):
    """Two engines of one process have pages of their own."""
    with start_monitoring(engine) as one, start_monitoring(engine) as other:
        assert one.port != other.port


def test_counts_are_public():
    """A program reads them without a page."""
    assert "requests_finished" in EngineStats.__dataclass_fields__
