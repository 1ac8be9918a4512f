"""Strays: files in an inbox that the relay did not deliver, whoever they say that they are from.

The ledger tells: a delivery is recorded a moment after the file is there, so a file that is new is
looked for again. Reads with nothing but SQLite: a hook has little time.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterable

from relay.base.fsio import lock_owner
from relay.base.home import LOCK
from relay.base.names import MSG_SUFFIX
from relay.reach.owed import open_ledger

NOT_OURS = "not delivered by the relay"
UNKNOWN = "not in the ledger"  # the relay was killed before it recorded the delivery, for example
PATIENCE_S = 2.0  # the delivery is recorded shortly after the rename
_UNDELIVERED = """SELECT value FROM json_each(?) WHERE NOT EXISTS
(SELECT 1 FROM deliveries WHERE message_id = value AND recipient = ?)"""


def undelivered_notes(root: str, agent: str, message_ids: Iterable[str]) -> dict[str, str] | None:
    """A note for each message in an inbox without a delivery in the ledger, by id.

    None if the ledger cannot be read.
    """
    try:
        found = _undelivered(root, agent, set(message_ids))
        if not found:
            return {}
        if lock_owner(os.path.join(root, LOCK)) is None:  # no relay runs
            return dict.fromkeys(found, UNKNOWN)
        end = time.monotonic() + PATIENCE_S
        while (
            found and time.monotonic() < end and any(_is_new(root, agent, name) for name in found)
        ):
            time.sleep(0.05)
            found = _undelivered(root, agent, found)
    except (OSError, sqlite3.Error):
        return None
    return dict.fromkeys(found, NOT_OURS)


def _is_new(root: str, agent: str, message_id: str) -> bool:
    """True if the file came a moment ago, or was taken meanwhile."""
    try:
        path = os.path.join(root, "agents", agent, "inbox", message_id + MSG_SUFFIX)
        return time.time() - os.lstat(path).st_ctime < PATIENCE_S
    except OSError:
        return True


def _undelivered(root: str, agent: str, message_ids: set[str]) -> set[str]:
    with contextlib.closing(open_ledger(root)) as db:
        found = db.execute(_UNDELIVERED, (json.dumps(sorted(message_ids)), agent))
        return {row[0] for row in found}
