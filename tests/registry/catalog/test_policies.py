"""Policies in the registry: each change an epoch with a line of the history, signed, and never an older one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.registry.catalog.stages import TransitionAction
from penstock.registry.catalog.store import SqlStore, enter
from penstock.registry.errors import BadSignature, InvalidInput, UnknownModel
from penstock.registry.package import load_package
from penstock.registry.package.manifest import Manifest
from penstock.safety.operator_key import PublicKeys
from tests.registry.catalog.catalogs import Catalog
from tests.registry.catalog.test_catalog import catalog as catalog
from tests.registry.catalog.test_experiments import signed as signed
from tests.registry.catalog.test_experiments import stocked as stocked
from tests.registry.catalog.test_store import Overheard


def test_policy_is_changed_knob_by_knob_and_reset(stocked: Catalog):
    """Knobs are merged; each change has an epoch and a line of the history; a reset leaves nothing."""
    before = stocked.client.history(stocked.name)[-1].epoch
    assert stocked.client.policy(stocked.name) is None
    stocked.client.set_policy(stocked.name, "infer", {"window_ms": 5})
    record = stocked.client.set_policy(stocked.name, "infer", {"concurrency": 2}, reason="more of it")
    assert record.endpoints == {"infer": {"window_ms": 5.0, "concurrency": 2}}
    assert stocked.reopened().policy(stocked.name) == record
    assert stocked.client.find(stocked.name).epoch == record.epoch == before + 2
    last = stocked.client.history(stocked.name)[-1]
    assert (last.action, last.version, last.reason) == (TransitionAction.POLICY, "1", "more of it")
    assert stocked.client.set_policy(stocked.name, "", None).endpoints == {}


@pytest.mark.parametrize(
    ("endpoint", "knobs", "expected"),
    [
        ("slow", {"window_ms": 5}, "Unknown endpoint 'slow' of "),
        ("infer", {"window": 5}, "Unknown knob 'window'. Expected some of: window_ms, precision"),
        ("infer", {"concurrency": 0}, "Bad concurrency 0. Input should be greater than or equal to 1"),
        ("infer", {"window_ms": None}, "The knob 'window_ms' has no value"),
    ],
)
def test_bad_policy_changes_nothing(stocked: Catalog, endpoint: str, knobs: dict[str, object], expected: str):
    """The error says what was expected."""
    before = stocked.client.history(stocked.name)
    with pytest.raises(InvalidInput, match=re.escape(expected)):
        stocked.client.set_policy(stocked.name, endpoint, knobs)
    assert stocked.client.history(stocked.name) == before


def test_model_without_a_production_version_has_no_policy(catalog: Catalog):
    """There is no record that could carry it."""
    catalog.put("1")
    with pytest.raises(UnknownModel, match="has no version in production"):
        catalog.client.set_policy(catalog.name, "infer", {"window_ms": 5})


def test_older_policy_put_back_is_found(signed: tuple[Catalog, PublicKeys]):
    """A row with a valid signature of an earlier change is refused, and so is a missing one."""
    catalog, _ = signed
    catalog.client.set_policy(catalog.name, "infer", {"window_ms": 5})
    with SqlStore(catalog.url).changing(catalog.name) as transaction:
        older = dict(transaction.rows.policies[0])
    catalog.client.set_policy(catalog.name, "infer", {"window_ms": 50})
    with SqlStore(catalog.url).changing(catalog.name) as transaction:
        transaction.put_policy(older)
    with pytest.raises(BadSignature, match=r"the policy of .* is not the one of its last change"):
        catalog.client.find(catalog.name)


def _rehash(source: str) -> Manifest:
    return load_package(Path(source)).manifest()


def test_policy_is_entered_for_a_remote_operator(signed: tuple[Catalog, PublicKeys]):
    """A worker writes the signed rows of one change, once; forged knobs are refused."""
    catalog, trusted = signed
    heard = Overheard(catalog.url)
    record = catalog.reopened(store=heard).set_policy(catalog.name, "infer", {"window_ms": 5})

    def written(policy: dict[str, object]) -> None:
        rows = (heard.versions, heard.transitions, heard.experiments, [policy])
        enter(SqlStore(catalog.url), *rows, verify=trusted.verify, rehash=_rehash)

    with pytest.raises(BadSignature):
        written({**heard.policies[0], "endpoints": '{"infer":{"window_ms":9.0}}'})
    for _ in range(2):
        written(dict(heard.policies[0]))
    assert catalog.client.policy(catalog.name) == record
