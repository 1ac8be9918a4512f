"""The files of an agent's mailbox, as hooks, bells and tools see them: with little of the library.

Nothing of a message is checked. A file that the relay did not deliver is marked, whoever it says
that it is from: the ledger tells. A delivery is recorded a moment after the file is there, so a
file that is new is looked for again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from collections.abc import Iterable

TYPE_CHECKING = False  # typing is not loaded for it
if TYPE_CHECKING:
    import sqlite3

SUFFIX = ".msg"
NOT_OURS = "not delivered by the relay"
UNKNOWN = "not in the ledger"  # the relay was killed before it recorded the delivery, for example
BUSY_S = 0.2  # for a ledger that is locked, which readers seldom see
PATIENCE_S = 2.0  # the delivery is recorded shortly after the rename
_UNDELIVERED = """SELECT value FROM json_each(?) WHERE NOT EXISTS
(SELECT 1 FROM deliveries WHERE message_id = value AND recipient = ?)"""


def inbox_dir(root: str, agent: str) -> str:
    """The path of an agent's inbox."""
    return f"{root}/agents/{agent}/inbox"


def inbox_file(root: str, agent: str, message_id: str, *, is_read: bool = False) -> str:
    """The path of a message in an agent's inbox, or among those that it has read."""
    return f"{inbox_dir(root, agent)}/{'.read/' if is_read else ''}{message_id}{SUFFIX}"


def inbox_ids(root: str, agent: str) -> list[str]:
    """The ids of the messages in an agent's inbox. Errors: OSError."""
    names = os.listdir(inbox_dir(root, agent))
    return [name[: -len(SUFFIX)] for name in names if name.endswith(SUFFIX) and name[0] != "."]


def is_there(root: str, agent: str, message_id: str) -> bool:
    """True while nobody has taken a message out of the agent's inbox."""
    return os.path.lexists(inbox_file(root, agent, message_id))


def read_message(path: str, most: int) -> tuple[list[tuple[str, str]], bytes | None, int] | None:
    """The header fields, what was read of the body, and the size of the file in bytes.

    ``most``: so many bytes are read. Names of fields are in upper case. The body is None where no
    blank line ends the header. None for what is gone, or no regular file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        facts = os.fstat(fd)
        data = os.read(fd, most) if stat.S_ISREG(facts.st_mode) else None
    except OSError:
        return None
    finally:
        os.close(fd)
    if data is None:
        return None
    end = re.search(rb"\n\r?\n", data)
    head = data[: end.start()] if end else data
    lines = [line.partition(":") for line in head.decode(errors="replace").split("\n")]
    fields = [(name.strip().upper(), value.strip()) for name, _, value in lines]
    return fields, data[end.end() :] if end else None, facts.st_size


def open_ledger(root: str) -> sqlite3.Connection:
    """Open the ledger for reading. Errors: OSError, sqlite3.Error."""
    import sqlite3

    from relay.base.home import LEDGER

    path = os.path.join(root, LEDGER)
    if not os.path.isfile(path):  # opening a pipe would wait
        raise FileNotFoundError(path)
    quoted = path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    return sqlite3.connect(f"file:{quoted}?mode=ro", uri=True, timeout=BUSY_S)


def undelivered_notes(root: str, agent: str, message_ids: Iterable[str]) -> dict[str, str] | None:
    """A note for each message in an inbox without a delivery in the ledger, by id.

    None if the ledger cannot be read.
    """
    import sqlite3  # here, because a bell does not need it

    from relay.base.fsio import lock_owner
    from relay.base.home import LOCK

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
        changed_at = os.lstat(inbox_file(root, agent, message_id)).st_ctime
    except OSError:
        return True
    return time.time() - changed_at < PATIENCE_S


def _undelivered(root: str, agent: str, message_ids: set[str]) -> set[str]:
    with contextlib.closing(open_ledger(root)) as db:
        found = db.execute(_UNDELIVERED, (json.dumps(sorted(message_ids)), agent))
        return {row[0] for row in found}
