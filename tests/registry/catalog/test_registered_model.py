"""RegisteredModel: questions about the versions of one model, answered from its rows without a database."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.registry.catalog.registered_model import HISTORY, Change, RegisteredModel, check_whole, listed
from penstock.registry.catalog.stages import ModelStage, TransitionAction
from penstock.registry.catalog.tables import RegisteredVersion, Transition
from penstock.registry.errors import BadSignature, InvalidInput, TransitionConflict, TransitionRefused, UnknownModel
from tests.registry.catalog.catalogs import registered

DRAFT, STAGING, PRODUCTION, ARCHIVED = ModelStage
REGISTER, PROMOTE, ROLLBACK, SIGN = (
    TransitionAction.REGISTER,
    TransitionAction.PROMOTE,
    TransitionAction.ROLLBACK,
    TransitionAction.SIGN,
)


def model(*versions: RegisteredVersion, productions: tuple[str, ...] = ()) -> RegisteredModel:
    """A model with these versions."""
    return RegisteredModel("minilm", {each.version: each for each in versions}, 9, productions)


def step(epoch: int, version: str, action: TransitionAction = PROMOTE, replaced: str | None = None) -> Transition:
    """One change of the model."""
    hash_ = (version * 64)[:64]
    return Transition("minilm", epoch, action, version, hash_, DRAFT, STAGING, replaced, (), "me", "", "2026-01-01")


def test_a_version_is_named_by_label_hash_or_latest():
    """A label comes before a hash prefix; `latest` is the version in production."""
    first, second = registered("1", PRODUCTION), registered("2", content_hash="abcdef" + "0" * 58)
    known = model(first, second)
    assert known.production == known.select("latest") == known.select("1") == first
    assert known.select("2") == known.select("abcdef") == second
    hashlike = registered("abcdef")
    assert model(first, second, hashlike).select("abcdef") == hashlike


def test_an_unknown_version_lists_those_that_exist():
    """A short prefix is no hash; without a production version there is no `latest`."""
    known = model(registered("1"), registered("2", STAGING))
    for wanted in ("3", "11111", "", "111111g"):
        with pytest.raises(UnknownModel, match=r"Expected one of: 1 \(draft, 11111111\), 2 \(staging, 22222222\)"):
            known.select(wanted)
    with pytest.raises(UnknownModel, match="minilm has no version in production"):
        known.select("latest")


def test_a_shared_prefix_is_refused():
    """A prefix of two hashes names neither version; one digit more may be enough."""
    known = model(registered("1", content_hash="abcdef0" * 9), registered("2", content_hash="abcdef1" * 9))
    with pytest.raises(InvalidInput, match="several versions of minilm: 1, 2"):
        known.select("abcdef")
    assert known.select("abcdef1").version == "2"


def test_a_rollback_restores_the_production_before():
    """The label before the last one is restored; with fewer than two there is none."""
    assert model(registered("1"), productions=("1", "2", "1")).before_production() == "2"
    for productions in ((), ("1",)):
        with pytest.raises(TransitionRefused, match="no earlier production version"):
            model(registered("1"), productions=productions).before_production()


def test_rollbacks_go_back_through_promotions():
    """A promotion to production adds a label, a rollback removes one, and other changes keep them."""
    known = model(registered("1"), productions=("1", "2"))
    assert known.productions_after(Change(PROMOTE, registered("3"), PRODUCTION)) == ("1", "2", "3")
    assert known.productions_after(Change(PROMOTE, registered("3"), STAGING)) == ("1", "2")
    assert known.productions_after(Change(ROLLBACK, registered("1"), PRODUCTION)) == ("1",)
    full = model(registered("1"), productions=tuple(map(str, range(HISTORY))))
    assert full.productions_after(Change(PROMOTE, registered("x"), PRODUCTION)) == (*full.productions[1:], "x")


def test_a_change_needs_the_state_that_it_was_decided_on():
    """A version or a production version that changed since the decision is a conflict."""
    first, second = registered("1", PRODUCTION), registered("2", STAGING)
    change = Change(PROMOTE, second, PRODUCTION, replaces=first)
    model(first, second).check_unchanged(change)
    with pytest.raises(TransitionConflict, match=r"minilm/2 was changed meanwhile and is in archived now"):
        model(first, replace(second, stage=ARCHIVED)).check_unchanged(change)
    with pytest.raises(TransitionConflict, match=r"another production version now: 3\. Expected 1"):
        model(replace(first, stage=ARCHIVED), second, registered("3", PRODUCTION)).check_unchanged(change)
    with pytest.raises(TransitionConflict, match=r"another production version now: none\. Expected 1"):
        model(second).check_unchanged(change)


def test_rows_of_one_history_are_whole():
    """Each version has the epoch of its last change, whether it was changed itself or replaced by another one."""
    history = [step(1, "1", REGISTER), step(2, "2", REGISTER), step(3, "1"), step(4, "2", replaced="1")]
    check_whole(model(registered("1", epoch=4), registered("2", epoch=4)), history)
    check_whole(model(), [])
    # Changes before the first kept one are forgotten, and so are the epochs of versions that only they changed.
    check_whole(model(registered("1", epoch=1), registered("2", epoch=7)), [step(7, "2")])


def test_missing_and_older_rows_are_found():
    """A gap in the history, a missing version, an older row and an invented row are refused by name."""
    first, second = registered("1", epoch=1), registered("2", epoch=2)
    history = [step(1, "1", REGISTER), step(2, "2", REGISTER)]
    check_whole(model(first, second), history)
    for rows, steps, told in (
        (model(first, second), [history[0], step(3, "2")], "has no epoch 2"),
        (model(first), history, "the record of minilm/2 is missing"),
        (model(first, replace(second, epoch=1)), history, "record of minilm/2 is not the one of its last change"),
        (model(first, second, registered("3", epoch=2)), history, "record of minilm/3 is not the one"),
    ):
        with pytest.raises(BadSignature, match=told):
            check_whole(rows, steps)


def test_only_a_signing_may_skip_epochs():
    """`sign` adopts an older copy of the registry with an epoch after that of the workers."""
    check_whole(model(registered("1", epoch=9)), [step(1, "1", REGISTER), step(9, "1", SIGN)])
    with pytest.raises(BadSignature, match="has no epoch 2"):
        check_whole(model(registered("1", epoch=9)), [step(1, "1", REGISTER), step(9, "1")])


def test_a_message_lists_the_last_names():
    """Of many names a message has the last twenty and the number of the others."""
    assert listed([]) == "none"
    assert listed(["1", "2"]) == "1, 2"
    assert listed(map(str, range(25))) == ", ".join(map(str, range(5, 25))) + " and 5 more"
