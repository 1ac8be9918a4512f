"""One message whole: its file wherever it is, what became of it, and the answers."""

from __future__ import annotations

import contextlib
import glob
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from relay.base import outcomes
from relay.base.errors import LedgerError, MessageError, NotFound, RelayError
from relay.base.home import LEDGER, READ, REJECTED, Home
from relay.base.message import ANSWERS, MessageFile, parse, parse_delivered
from relay.base.names import (
    ATTACHMENT_NAMES,
    MSG_SUFFIX,
    ORCHESTRATOR,
    Attachment,
    attachments_of,
)
from relay.views.ids import PLACES, messages_in, read_file, resolve_id
from relay.views.times import when

if TYPE_CHECKING:
    from relay.search.index import Entry

# What a message sent again gets anew, or from arguments of its own.
OWN_HEADERS = ("CHECKSUM", "SIGNATURE", "ID", "FROM", "SENT", "ATTEMPT", "CHANNEL", "ATTACHMENT")
UNSHOWN_HEADERS = (*OWN_HEADERS, ATTACHMENT_NAMES)


class StoredFile(NamedTuple):
    """The file of a message: the original, or a copy in an inbox."""

    id: str
    sender: str  # empty for a copy, whose header names it
    path: str  # below the home
    data: bytes

    @property
    def place(self) -> str:
        """``inbox`` or ``outbox``; empty for an original in the archive."""
        folder = self.path.split("/")
        return folder[2] if folder[0] == "agents" else ""


class StoredMessage(NamedTuple):
    """A message and where it was found."""

    id: str
    sender: str
    file: MessageFile
    path: str
    place: str


def find_file(root: str, given: str) -> StoredFile:
    """Find the file of a message by its id or the beginning of it. Errors: NotFound."""
    with Home(root) as home:
        message_id = resolve_id(home, given, must_exist=True)
        for sender, path in _places(home, message_id):
            data = read_file(home, path)
            if data is not None:
                return StoredFile(message_id, sender, path, data)
    raise NotFound(
        f"the file of message {message_id} is gone",
        hint=f"`relay trace {message_id}` shows what became of it",
    )


def read_message(root: str, given: str) -> StoredMessage:
    """Read a message by its id or the beginning of it, wherever its file is.

    Errors: NotFound; MessageError for a file that is not a message.
    """
    found = find_file(root, given)
    try:
        parse_file = parse_delivered if found.place == "inbox" else parse
        message = parse_file(found.data, file=found.path)
    except MessageError as exc:
        exc.hint = f"`relay show --raw {found.id}` prints the file"
        raise
    sender = found.sender or message.headers.get("FROM", "")
    return StoredMessage(found.id, sender, message, found.path, found.place)


def _places(home: Home, message_id: str) -> Iterator[tuple[str, str]]:
    """Yield where a message's file may be: (sender or empty, path below the home)."""
    rows = _ledger_rows(home, "SELECT * FROM messages WHERE message_id = ?", message_id)
    for row in rows:
        yield row["agent_name"], row["file_path"]
    for row in _ledger_rows(home, "SELECT * FROM deliveries WHERE message_id = ?", message_id):
        for folder in ("inbox", f"inbox/{READ}"):
            yield "", f"agents/{row['recipient']}/{folder}/{message_id}{MSG_SUFFIX}"
    for place in PLACES:
        for agent, found in messages_in(home, place):
            if found == message_id:
                sender = "" if place == "inbox" else agent
                yield sender, f"agents/{agent}/{place}/{message_id}{MSG_SUFFIX}"
    for row in rows:  # it was moved just now, and its row does not say so yet
        for folder in ("", f"{REJECTED}/"):
            sender = row["agent_name"]
            name = f"archive/*/{sender}/{folder}{message_id}{MSG_SUFFIX}"
            for path in glob.glob(name, root_dir=home.root):
                yield sender, path


def _ledger_rows(home: Home, query: str, message_id: str) -> list[Any]:
    from relay.ledger.file import open_current

    try:
        with contextlib.closing(open_current(home.path(LEDGER))) as db:
            return db.execute(query, (message_id,)).fetchall()
    except LedgerError:
        return []


def _deliveries(home: Home, message_id: str) -> list[outcomes.Fields]:
    from relay.ledger.file import open_current

    try:
        with contextlib.closing(open_current(home.path(LEDGER))) as db:
            return outcomes.read_deliveries(db, "message_id = ?", message_id)
    except LedgerError:
        return []


def earlier_answer(root: str, agent: str, message_id: str) -> str:
    """A line on the answer that an agent has given for good; empty without one."""
    with Home(root) as home:
        deliveries = _deliveries(home, message_id)
    for delivery in deliveries:
        status = delivery["ack_status"]
        if delivery["recipient"] == agent and status in ("completed", "failed"):
            before = ": ".join(filter(None, (status, delivery["answer_text"])))
            return f"{agent} has answered it before, {before}: the last answer decides"
    return ""


def message_facts(home: Home, stored: StoredMessage) -> dict[str, Any]:
    """The facts that `relay show --json` prints."""
    rows = _ledger_rows(home, "SELECT * FROM messages WHERE message_id = ?", stored.id)
    deliveries = _deliveries(home, stored.id)
    answers = {each["answer_id"]: each["recipient"] for each in deliveries if each["answer_id"]}
    now_ns, row = time.time_ns(), rows[0] if rows else None
    attached = attachments_of(stored.file.headers, stored.file.attachments)
    sizes = {each: size_of(home, each) for each in attached}
    kind = str(stored.file.kind)
    return {
        "id": stored.id,
        "from": stored.sender,
        "to": stored.file.to,
        "kind": kind,
        "at": when(row["discovered_at"]) if row else None,
        "outcome": outcomes.headline(row, deliveries, now_ns) if row else _unknown(stored),
        "recipients": {
            each["recipient"]: outcomes.describe(each, kind, now_ns) for each in deliveries
        },
        "headers": {k: v for k, v in stored.file.headers.items() if k not in UNSHOWN_HEADERS},
        "attachments": sizes,
        "attached": [
            {"name": each.name, "reference": each, "bytes": sizes[each]} for each in attached
        ],
        "body": stored.file.body.decode(errors="replace"),
        "answers": [_answer(home, *each) for each in answers.items()],
        "about": [_about(each) for each in _messages_about(home, stored.id)],
        "path": stored.path,
    }


def _messages_about(home: Home, message_id: str) -> list[Entry]:
    """Messages of agents that name this one in RE, acks left out; empty if they are not known."""
    from relay.views.messages import messages_about

    with contextlib.suppress(RelayError, OSError):
        found = messages_about(home, message_id)
        return [e for e in found if e.kind not in ANSWERS and e.sender != ORCHESTRATOR]
    return []


def _about(entry: Entry) -> dict[str, Any]:
    return {"id": entry.relay_id, "from": entry.sender, "kind": entry.kind, "body": entry.body}


def _unknown(stored: StoredMessage) -> str:
    return "not in the ledger" if stored.place == "inbox" else "not seen by a relay yet"


def _answer(home: Home, answer_id: str, sender: str) -> dict[str, Any]:
    """The facts of the last answer of a recipient; without a body if its file is gone."""
    body = None
    with contextlib.suppress(RelayError):
        body = read_message(home.root, answer_id).file.body.decode(errors="replace")
    return {"id": answer_id, "from": sender, "body": body}


def size_of(home: Home, attachment: Attachment) -> int | None:
    """Return the bytes of an attachment; None if it is not there."""
    with contextlib.suppress(OSError):
        return os.stat(home.path(attachment.path)).st_size if attachment.path else None
    return None
