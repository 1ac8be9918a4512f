"""Evidence: which of the messages that hooks printed have come into a session's context.

    offered ── found in the transcript ─────────────────────→ in_context
       │  ├─── the model acted in a later step ─────────────→ in_context
       │  ├─── the agent took the file by a command ────────→ in_context
       │  └─── ... but the transcript does not show it ─────→ returned, once
       ├────── the hook was killed around the print ────────→ returned
       └────── the turn, the session or its process ended ──→ returned

A returned message is still in the inbox, and is offered again with the next number. Tool calls of
one step run at the same time: the hook of one says nothing about what the hook of another printed,
because the model has seen neither. A step ends with PostToolBatch, a prompt or a stop.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time

from relay.reach.mailbox import inbox_file, is_there
from relay.reach.report import IN_CONTEXT, OFFERED, RETURNED, write_report
from relay.reach.session import Session
from relay.reach.vendors import END, OF_THE_MODEL, PROMPT, STOP

MAX_READ = 8 << 20  # of a transcript, in one call
CHUNK = 1 << 20
BACKSLASH = ord("\\")
KILLED = "the process that was to show it was stopped"  # a hook, or a server of tools
NOT_SHOWN = "the transcript does not show it"
TURN_OVER = "the turn ended without it"


def marker(message_id: str) -> str:
    """The words before a message. No text of a sender begins a line with them (``compose``)."""
    return f"Message {message_id} from "


def begin_offer(session: Session, ids: list[str], after: str) -> None:
    """Note that these are about to be printed; the caller saves the session."""
    _skip_transcript(session)
    for message_id in ids:
        session.offered[message_id] = {
            "at": time.time_ns(),
            "after": after,
            "offer": session.again.pop(message_id, 0) + 1,
            "printed": False,
            "step": session.step,
        }


def end_offer(root: str, session: Session, ids: list[str], after: str, role: str) -> None:
    """Report that these were printed; the caller saves the session. Errors: OSError."""
    base = {"what": OFFERED, "session": session.key, "at": time.time_ns(), "after": after}
    by_number: dict[object, list[str]] = {}
    for message_id in ids:
        by_number.setdefault(session.offered[message_id]["offer"], []).append(message_id)
    write_report(
        root, session.agent, [base | {"ids": of, "offer": n} for n, of in by_number.items()]
    )
    for message_id in ids:
        session.offered[message_id] |= {"printed": True, "at_stop": role == STOP}


def settle(root: str, session: Session, role: str, after: str, gone: str = "") -> None:
    """Decide about the offers of a session at one of its events, report, and move files to .read.

    ``gone``: why the session cannot see them any more, for example at its end. The caller saves the
    session. Killed before that, the next call does the same again. Errors: OSError.
    """
    found, is_whole = _search(session)
    agent = session.agent
    if role == END:
        gone = gone or "the session ended"
    entries: dict[tuple[str, ...], list[str]] = {}
    for message_id in session.offered:
        verdict: tuple[str, ...] | None
        if message_id in found:
            verdict = IN_CONTEXT, "transcript", found[message_id]
        elif not is_there(root, agent, message_id):
            verdict = IN_CONTEXT, "taken", "by a command"
        else:
            verdict = _verdict(session, message_id, role, after, is_whole)
            if verdict is None and gone:
                verdict = RETURNED, gone
        if verdict is not None:
            entries.setdefault(verdict, []).append(message_id)
    _report(root, session, entries)
    for (what, why, *_), ids in entries.items():
        for message_id in ids:
            if what == RETURNED:
                session.again[message_id] = session.offered.pop(message_id)["offer"]
                if why == NOT_SHOWN:
                    session.unshown.append(message_id)
            else:
                with contextlib.suppress(FileNotFoundError):  # the agent has taken it
                    os.rename(
                        inbox_file(root, agent, message_id),
                        inbox_file(root, agent, message_id, is_read=True),
                    )
                del session.offered[message_id]
                session.unshown = [other for other in session.unshown if other != message_id]


def _verdict(
    session: Session, message_id: str, role: str, after: str, is_whole: bool | None
) -> tuple[str, ...] | None:
    """Decide about one offer that the transcript does not show; None: nothing is known yet."""
    offer = session.offered[message_id]
    if not offer.get("printed"):
        return RETURNED, KILLED
    if role == PROMPT and offer.get("at_stop"):
        return RETURNED, TURN_OVER
    is_later = offer.get("step", 0) < session.step
    if role != STOP and not (role in OF_THE_MODEL and is_later):
        return None
    if is_whole is False and not session.blind:
        return None  # the next call reads on
    if is_whole and not session.blind:
        if message_id not in session.unshown:
            return RETURNED, NOT_SHOWN
        session.blind = True  # not for the second time either: it never shows what hooks print
    return IN_CONTEXT, "action", after


def _report(root: str, session: Session, entries: dict[tuple[str, ...], list[str]]) -> None:
    lines = []
    for (what, *more), ids in entries.items():
        line: dict[str, object] = {"what": what, "session": session.key, "at": time.time_ns()}
        names = ("how", "where") if what == IN_CONTEXT else ("why",)
        lines.append(line | {"ids": ids} | dict(zip(names, more, strict=True)))
    write_report(root, session.agent, lines)


# -- the transcript -----------------------------------------------------------------------------


def _open(session: Session) -> int | None:
    """Open the transcript; None without one that is a file."""
    if not session.transcript:
        return None
    try:
        fd = os.open(session.transcript, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def _search(session: Session) -> tuple[dict[str, str], bool | None]:
    """Where the transcript shows which offers; True if it was read to its end, None without one.

    Reads on from where the last call ended, ``MAX_READ`` at most. Unfinished lines are read again.
    """
    fd = _open(session)
    if fd is None:
        return {}, None
    found: dict[str, str] = {}
    marks = {message_id: marker(message_id).encode() for message_id in session.offered}
    try:
        if os.fstat(fd).st_size < session.transcript_offset:  # truncated or replaced
            session.transcript_offset = session.transcript_line = 0
        for _ in range(MAX_READ // CHUNK):
            data = os.pread(fd, CHUNK, session.transcript_offset)
            for message_id, mark in marks.items():
                if message_id not in found and (at := _find_line(data, mark)) >= 0:
                    found[message_id] = _place(session, data, at)
            is_last = len(data) < CHUNK
            end = data.rfind(b"\n") + 1
            if not end and not is_last:  # one long line: the mark may be across the border
                end = CHUNK - 256
            _advance(session, data[:end])
            if is_last:
                return found, True
    except OSError:
        return found, None
    finally:
        os.close(fd)
    return found, False


def _find_line(data: bytes, mark: bytes) -> int:
    """Where a line of a JSON string begins with the mark; -1 without one.

    Behind the quote that opens the string, or behind ``\\n``. Both are told by the backslashes
    before them from a quote or ``\\n`` in the text itself, such as the body of another message.
    """
    at = data.find(mark)
    while at >= 0:
        end = at - 1
        start = end
        while start > 0 and data[start - 1] == BACKSLASH:
            start -= 1
        is_escape = (end - start) % 2 == 1
        if start > 0 and data[end:at] == (b"n" if is_escape else b'"'):
            return at
        at = data.find(mark, at + 1)
    return -1


def _place(session: Session, data: bytes, at: int) -> str:
    if session.transcript_line < 0:
        return f"byte {session.transcript_offset + at}"
    return f"line {session.transcript_line + data.count(10, 0, at) + 1}"


def _advance(session: Session, data: bytes) -> None:
    session.transcript_offset += len(data)
    if session.transcript_line >= 0:
        session.transcript_line += data.count(b"\n")


def _skip_transcript(session: Session) -> None:
    """Go to the end of the transcript: what is printed from now on is behind it.

    Lines are counted where that takes a moment; after a larger part they are not counted any more.
    """
    fd = _open(session)
    if fd is None:
        return
    try:
        size = os.fstat(fd).st_size
        if size < session.transcript_offset:
            session.transcript_offset = session.transcript_line = 0
        if session.offered:  # still looked for: ``settle`` was here a moment ago
            return
        if size - session.transcript_offset > MAX_READ:
            session.transcript_offset, session.transcript_line = size, -1
        while data := os.pread(fd, CHUNK, session.transcript_offset):
            if session.transcript_offset >= size:
                break
            _advance(session, data)
    except OSError:
        pass
    finally:
        os.close(fd)
