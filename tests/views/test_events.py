"""Events of the ledger say what was so at their time, as far as it is known."""

from __future__ import annotations

import contextlib
import os
import shutil

import pytest

from relay.base.errors import LedgerError
from relay.base.home import LEDGER
from relay.ledger.file import open_readonly
from relay.views.events import EventCursor
from tests.box import Box


def acked(box: Box) -> list[str | None]:
    """What the events of answers tell."""
    with contextlib.closing(open_readonly(str(box.root / LEDGER))) as db:
        events = EventCursor(db, None, 1000, security=False).read()
    return [one["detail"] for one in events if one["event"] == "acked"]


def test_an_earlier_answer_is_not_told_as_the_last_one(box: Box) -> None:
    sent = box.send("alice", "TO: bob\nKIND: command\n\ndeploy")
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {sent}\n\ncompleted shipped")
    assert acked(box) == ["completed: shipped"]
    box.after(5)
    box.send("bob", f"TO: alice\nKIND: nack\nRE: {sent}\n\nit broke")
    assert acked(box) == ["answered again since", "failed: it broke"]


def test_who_follows_a_ledger_hears_that_another_one_is_in_its_place(box: Box) -> None:
    path = str(box.root / LEDGER)
    with contextlib.closing(open_readonly(path)) as db:
        cursor = EventCursor(db, None, 10, security=False)
        cursor.read()
        os.rename(path, f"{path}.before")
        shutil.copyfile(f"{path}.before", path)
        try:
            with pytest.raises(LedgerError, match="was removed or replaced while it was open"):
                cursor.read()
        finally:
            os.rename(f"{path}.before", path)
