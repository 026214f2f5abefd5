"""The gateway's figures: the number of series is bounded, and open requests are counted while they are open."""

from __future__ import annotations

import threading

from prometheus_client.parser import text_string_to_metric_families

from penstock.producers.gateway.figures import MOST_KEYS, GatewayFigures
from penstock.registry.broker.base import Usage
from tests.producers.gateway.conftest import GatewayStack, StartGateway
from tests.producers.gateway.naps import naps_before
from tests.producers.gateway.test_one_job import jobs_of
from tests.servers import wait_until


def test_keys_beyond_the_bound_are_counted_together():
    """As `other`, of requests and of usage; no count is lost."""
    figures, keys = GatewayFigures(), [f"{number:012x}" for number in range(MOST_KEYS + 10)]
    for key_id in keys:
        figures.count_key(key_id, "admitted")
        figures.count_key(key_id, "limited")
    _, page = figures.page(dict.fromkeys(keys, Usage(2, 3, 4)))
    families = {family.name: family.samples for family in text_string_to_metric_families(page.decode())}
    for name, kinds, total in (
        ("penstock_api_key_requests", 2, 2),
        ("penstock_api_key_jobs", 1, 2),
        ("penstock_api_key_tokens", 2, 7),
    ):
        samples = [sample for sample in families[name] if sample.name.endswith("_total")]
        assert len(samples) == kinds * (MOST_KEYS + 1)
        assert sum(sample.value for sample in samples) == total * len(keys)
        assert sum(sample.value for sample in samples if sample.labels["key"] == "other") == total * 10


def test_methods_that_clients_make_up_are_counted_together():
    """A server may pass any word on, before anybody has shown a key."""
    figures = GatewayFigures()
    for number in range(50):
        figures.count("", f"WORD{number}", 405, 0.1)
    figures.count("/v1/jobs", "POST", 202, 0.1)
    _, page = figures.page({})
    (family,) = [
        each for each in text_string_to_metric_families(page.decode()) if each.name == "penstock_http_requests"
    ]
    counts = {each.labels["method"]: each.value for each in family.samples if each.name.endswith("_total")}
    assert counts == {"other": 50, "POST": 1}


def test_the_first_page_has_the_requests_that_wait(stack: GatewayStack, start_gateway: StartGateway):
    """Also where no request has ended since: with several processes, most pages come from another one."""
    gateway = start_gateway()
    before = jobs_of(stack, "napper")

    def wait() -> None:
        with gateway.client() as http:
            http.post("/v1/models/napper:predict", json={"inputs": {"x": [[5, 9, 8, 7]]}})

    with naps_before(stack), gateway.client() as http:
        occupied = jobs_of(stack, "napper") - before
        thread = threading.Thread(target=wait)
        thread.start()
        wait_until(lambda: jobs_of(stack, "napper") - before - occupied, 60, "the job of the request is accepted")
        page = http.get("/metrics").text
    thread.join()
    assert "\npenstock_http_waiting 1.0" in page
    with gateway.client() as http:
        assert "\npenstock_http_waiting 0.0" in http.get("/metrics").text
