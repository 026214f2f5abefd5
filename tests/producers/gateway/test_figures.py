"""The gateway's figures of API keys: however many keys there are, a page has a bounded number of series."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from penstock.producers.gateway.figures import MOST_KEYS, GatewayFigures
from penstock.registry.broker.base import Usage


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
