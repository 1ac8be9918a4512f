"""Any one record of the journal is lost to damage: the relay starts without it, and goes on.

What is left may speak of what is gone: a message of its channel, a delivery of its message. Such
an event has no effect at all, never half of one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from relay.base.home import STORE
from relay.daemon.home_journal import stream_dir
from relay.journal.format import RECORD, RecordFlag
from relay.journal.journal import JournalReader
from relay.journal.segment import FIRST_RECORD, segment_path
from tests.box import Box
from tests.crash.test_every_step import scenario
from tests.disk import flip


def check(box: Box) -> None:
    """Everything the store has of a message is there, and nothing stays on its way for ever."""
    state = box.store.state
    for number, message in state.messages.items():
        assert number in state.deliveries and message.channel_id in state.channels
    states = {state for (state,) in box.sql("SELECT state FROM deliveries")}
    assert states <= {"written", "read", "acked", "bounced"}
    assert {status for (status,) in box.sql("SELECT status FROM messages")} <= {
        "archived",
        "failed",
    }


def test_any_one_record_is_lost_and_the_rest_counts(tmp_path: Path) -> None:
    first = Box(tmp_path / "home", "alice", "bob", "carol")
    scenario(first)
    first.kill()
    records = list(JournalReader(stream_dir(first.home)).read())
    last_commit = [record.flags & RecordFlag.JOINED for record in records][::-1].index(0) + 1
    durable = records[:-last_commit]  # nobody knows of the last that it was
    assert len(durable) > 30
    for record in durable:
        root = tmp_path / f"at-{record.offset}"
        shutil.copytree(first.root, root)
        for path in root.glob(f"{STORE}*"):
            path.unlink()  # so that all of the journal counts
        segment = segment_path(stream_dir(first.home), 0)
        flip(
            root / Path(segment).relative_to(first.root), FIRST_RECORD + record.offset + RECORD.size
        )
        box = Box(root, "alice", "bob", "carol", seconds=10)
        lost = f"lost offsets: [{record.offset}, {record.end})"
        assert any(lost in line["event"] for line in box.log), box.log
        box.send("alice", "TO: #team\n\nafter it", "1000000020-20.msg")
        box.send("alice", "TO: bob\n\nand to you", "1000000021-21.msg")
        for _ in range(3):
            box.after(31)
        assert "and to you" in box.bodies("bob")
        check(box)
        box.close()
        shutil.rmtree(root)
