"""The text that a hook prints: messages as facts, never as instructions.

    Message 1706…-ab from alice (command, 12:03:04Z, thread t-1); answer with `relay ack …`:
    | deploy to staging

Control and invisible characters are visible, in names of files too, and every line of a body has a
bar in front, so that nothing can pretend to be another message. What the relay did not deliver is
marked, whoever it says that it is from. What does not fit is named and comes at the next event;
what never fits is named once, and read with a command.
"""

from __future__ import annotations

import contextlib
import os

from relay.base.clock import ttl_note
from relay.base.names import MESSAGE_ID, attachments_of
from relay.base.text import format_size, plural, visible
from relay.reach.evidence import marker
from relay.reach.mailbox import inbox_file, read_message, undelivered_notes
from relay.reach.session import Session, acting_as

MAX_BODIES = 8192  # bytes of printed bodies in one text
MAX_TEXT = 9500  # characters; above 10,000 Claude Code makes a file of it
MOST_LOOKED_AT = 500  # files whose priority is looked at: the oldest and the newest
MOST_NAMED = 10
MOST_READ = 16_384 + MAX_BODIES  # bytes of a file: a header, and a body
NORMAL = "2"
REST = 200  # characters for the last line


def compose(root: str, session: Session, ids: list[str], first: str) -> tuple[str, list[str]]:
    """The text to print, and the ids of the messages that are in it as a whole.

    ``first`` begins it. Messages are ordered by priority, then age. The ids of those that are too
    large are added to ``session.listed``.
    """
    ids, in_all = sorted(ids), len(ids)
    if in_all > MOST_LOOKED_AT:
        ids[MOST_LOOKED_AT // 2 : -MOST_LOOKED_AT // 2] = []
    read = (read_waiting(inbox_file(root, session.agent, one), one) for one in ids)
    waits = [message for message in read if message is not None]
    _mark_strays(root, session.agent, waits)
    waits.sort(key=lambda message: (message.priority, message.id))
    parts = [first] if first else []
    length, room = len(first), MAX_BODIES
    shown: list[str] = []
    later: list[Waiting] = []
    for message in waits:
        text, size = ("", 0) if message.body is None else _whole(root, session, message)
        if text and size <= room and length + len(text) < MAX_TEXT - REST:
            parts.append(text)
            shown.append(message.id)
            length, room = length + len(text) + 1, room - size
            continue
        later.append(message)
        if not text or size > MAX_BODIES or len(text) > MAX_TEXT - 2 * REST:
            session.listed.append(message.id)
    named = 0
    for message in later:
        line = message.line()
        if (shown and message.id not in session.listed) or length + len(line) > MAX_TEXT - REST:
            continue
        if named < MOST_NAMED:
            parts.append(line)
            length, named = length + len(line) + 1, named + 1
    more = len(waits) + in_all - len(ids) - len(shown) - named
    if parts and more > 0:
        parts.append(f"agent-relay: {plural(more, 'more message')} in the inbox.")
    return "\n".join(parts), shown


class Waiting:
    """A message in the inbox; ``body`` None: it is too large, or not a message."""

    def __init__(
        self, message_id: str, fields: list[tuple[str, str]], body: bytes | None, size: int
    ) -> None:
        headers = dict(fields)
        self.id = message_id
        self.is_message = MESSAGE_ID.fullmatch(message_id) is not None
        self.note = ""  # that the relay did not deliver it
        self.size = size
        self.headers = headers
        self.references = [value for name, value in fields if name == "ATTACHMENT"]
        self.body: str | None = None
        if self.is_message and body is not None and "TO" in headers and size <= MOST_READ:
            with contextlib.suppress(UnicodeDecodeError):
                self.body = body.decode()
        self.kind = headers.get("KIND", "message").lower()
        self.sender = visible(headers.get("FROM", "")) or "an unknown sender"
        priority = headers.get("PRIORITY", NORMAL)
        self.priority = priority if priority in ("0", "1", "2", "3", "4") else NORMAL

    def line(self) -> str:
        """Name it without its body."""
        size = format_size(self.size)
        if not self.is_message:
            return f"In the inbox is a file that is not a message: {visible(self.id)} ({size})."
        facts = f"{size}, {self.note}" if self.note else size
        return f"Waits: {self.id} from {self.sender} ({facts}); `relay show {self.id}` prints it."


def read_waiting(path: str, message_id: str) -> Waiting | None:
    """Read a message as far as it can be printed; None if it is gone, or not a file."""
    read = read_message(path, MOST_READ)
    return None if read is None else Waiting(message_id, *read)


def _mark_strays(root: str, agent: str, waits: list[Waiting]) -> None:
    """Note which of them the relay did not deliver."""
    notes = undelivered_notes(root, agent, [message.id for message in waits if message.is_message])
    for message in waits:
        message.note = (notes or {}).get(message.id, "")


def describe(root: str, session: Session, message: Waiting) -> str:
    """One message as the answer of a tool; a body that is too large, by the path of its file."""
    _mark_strays(root, session.agent, [message])
    if not message.is_message:
        return message.line()
    if message.body is not None:
        text, size = _whole(root, session, message, by_tool=True)
        if size <= MAX_BODIES:
            return text + _files(root, message)
    facts = [
        visible(message.kind),
        format_size(message.size),
        *([message.note] if message.note else []),
    ]
    path, later = (
        inbox_file(root, session.agent, message.id, is_read=is_read) for is_read in (False, True)
    )
    return (
        f"{marker(message.id)}{message.sender} ({', '.join(facts)}): read it in {path}, "
        f"after your next call in {later}{_files(root, message)}"
    )


def _files(root: str, message: Waiting) -> str:
    """A line for each attachment; what its sender calls it comes last."""
    text = ""
    for each in attachments_of(message.headers, message.references):
        path, where = os.path.join(root, each.path), "is not there any more"
        if each.path and os.path.exists(path):
            where = f"in {path} ({format_size(os.path.getsize(path))})"
        text += f"\nattachment {where}: {each.name}"
    return text


def _whole(
    root: str, session: Session, message: Waiting, *, by_tool: bool = False
) -> tuple[str, int]:
    """The whole message as text, and the bytes of its body in it."""
    headers = message.headers
    facts = [visible(message.kind), *([message.note] if message.note else [])]
    if len(at := headers.get("SENT", "")) >= 19:
        facts.append(visible(at[11:19]) + "Z")
    if message.priority != NORMAL:
        facts.append(f"priority {message.priority}")
    for name in ("CHANNEL", "THREAD", "TOPIC"):
        if name in headers:
            facts.append(f"{name.lower()} {visible(headers[name])}")
    if about := headers.get("RE"):
        facts.append(f"answers {visible(about)}{_earlier(root, session, about)}")
    if late := ttl_note(headers.get("SENT"), headers.get("TTL")):
        facts.append(late)
    if message.references and not by_tool:
        facts.append(f"attachments: `relay show {message.id}`")
    if (offer := session.again.get(message.id, 0) + 1) > 1:
        facts.append(f"shown before, perhaps not seen: offer {offer}")
    text = f"{marker(message.id)}{message.sender} ({', '.join(facts)})"
    acts = acting_as(session.agent)
    if by_tool:
        text += "; owed an answer" if message.kind in ("command", "query") else ""
    elif message.kind == "command":
        text += f"; answered by `relay ack{acts} {message.id} completed`"
    elif message.kind == "query":
        text += f"; answered by `relay reply{acts} {message.id} ANSWER`"
    # An ack, say, may have no body: its kind says all.
    body = visible((message.body or "").rstrip("\n") or visible(message.kind), keep="\n\t")
    lines = "\n".join(f"| {line}" for line in body.split("\n"))
    return f"{text}:\n{lines}", len(lines.encode())


def _earlier(root: str, session: Session, about: str) -> str:
    """Say so if the answered message was sent by an earlier session of the agent."""
    from relay.reach.binding import run_at

    sent_at = about.partition("-")[0]
    run = run_at(root, session.agent, int(sent_at)) if sent_at.isdecimal() else 0
    if not run or run >= session.run:
        return ""
    return f", which run {run} of {session.agent} sent; this is run {session.run}"
