"""A store whose tables do not agree, and archives that are gone, are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay.acomm.model import ArchiveInfo, ChannelType
from relay.engine.check import check, check_archives
from relay.engine.commstore import CommStore
from tests.engine.support import channel_of, send


@pytest.mark.damages
def test_a_table_that_an_event_did_not_update_is_found(store: CommStore) -> None:
    send(store, channel_of(store, ChannelType.GROUP, "a", "b"), "a")
    state = store.engine.state
    assert list(check(state)) == []
    state.queues.clear()
    assert [one.text for one in check(state)] == [
        "the table queues['b']: expected {1} as derived from the other tables, found None"
    ]


def test_archives_that_are_gone_or_have_another_size_are_found(tmp_path: Path) -> None:
    (tmp_path / "2026-01-30").mkdir()
    names = [f"2026-01-30/{number:06d}.acomm" for number in (1, 2, 3)]
    for name in names[:2]:
        (tmp_path / name).write_bytes(b"1234")
    listed = [
        ArchiveInfo(name, 1, 1, 1, 0, 0, 0, size)
        for name, size in zip(names, (4, 5, 4), strict=True)
    ]
    assert [one.text for one in check_archives(str(tmp_path), listed)] == [
        f"{tmp_path / names[1]}: expected 5 bytes, found 4",
        f"{tmp_path / names[2]}: missing, but the store lists it",
    ]
