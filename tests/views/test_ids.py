"""Ids of messages: short in tables, found by their beginning."""

from __future__ import annotations

import pytest

from relay.base.errors import InvalidName, LedgerMissing, NotFound
from relay.views.ids import resolve_id, short_ids
from tests.box import Box

A = "1795374055142523851-3f6777fcd67e7254"
B = "1795374055142523852-3f6777fc00000000"
C = "1795374062277024012-f0d55452d63a2e2a"


def test_short_ids_are_the_first_digits_after_the_dash() -> None:
    """Eight digits, more where two would be alike."""
    assert short_ids([A, C]) == {A: "3f6777fc", C: "f0d55452"}
    assert short_ids([A, B]) == {A: "3f6777fcd67e", B: "3f6777fc0000"}
    few = "1795374055142523851-aa"
    assert short_ids([few]) == {few: few}  # two digits begin many ids


def test_an_id_that_no_digits_tell_apart_stays_whole() -> None:
    """Agents choose their ids: the digits may be the same, or none."""
    same = ["1795374055142523851-aa", "1795374055142523852-aa", "1795374055142523853-"]
    assert short_ids(same) == {one: one for one in same}


@pytest.mark.box("alice", "bob")
def test_an_id_is_found_by_the_beginning_of_either_part(box: Box) -> None:
    """In the ledger first, then in the mailboxes."""
    for one in (A, B):
        box.drop("alice", "TO: bob\n\nhi\n", f"{one}.msg")
    box.tick()
    waiting = "1795374069999999999-cafe0000"
    box.drop("alice", "TO: bob\n\nlater\n", f"{waiting}.msg")
    for text in (A, f"{A}.msg", "3f6777fcd", "1795374055142523851", A[:-3]):
        assert resolve_id(box.home, text) == A
    assert resolve_id(box.home, "cafe") == waiting
    assert resolve_id(box.home, C) == C  # nobody knows it, and it is whole


@pytest.mark.box("alice")
@pytest.mark.parametrize("name", ["1795355100000000000-AA.MSG", "1795355100000000000-aa.MSG"])
def test_a_file_that_is_ignored_because_of_its_name(box: Box, name: str) -> None:
    """The relay leaves it: a shell's temporary file may have any name."""
    box.path("agents", "alice", "outbox", name).write_text("TO: bob\n\nhi\n")
    box.tick()
    for text in (name, name.partition(".")[0]):
        with pytest.raises(NotFound, match="is not a message name") as caught:
            resolve_id(box.home, text)
        assert str(caught.value).startswith(f"agents/alice/outbox/{name} is not sent: ")
        assert caught.value.hint == "rename it to 1795355100000000000-aa.msg"


@pytest.mark.box("alice", "bob")
def test_texts_that_name_no_message(box: Box) -> None:
    """One line each, with what to do."""
    for one in (A, B):
        box.drop("alice", "TO: bob\n\nhi\n", f"{one}.msg")
    box.tick()
    with pytest.raises(NotFound, match=f"several messages match 3f6777fc: {B}, {A}$"):
        resolve_id(box.home, "3f6777fc")
    with pytest.raises(NotFound, match="no message 99ff, in the ledger or any outbox"):
        resolve_id(box.home, "99ff")
    box.path("ledger.db").rename(box.path("away.db"))
    with pytest.raises(LedgerMissing, match="there is no ledger at"):  # where it may be
        resolve_id(box.home, "99ff")
    for text in ("", "the last one", "3F67", "a\nb", "*"):
        with pytest.raises(InvalidName, match="is not a message id"):
            resolve_id(box.home, text)
