"""Message ids on the command line: short in tables, and accepted in every form.

A message id is ``{nanoseconds}-{hex digits}``. Ids of one day share their first digits, so tables
show the beginning of the part after the ``-``.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator

from relay.base.errors import InvalidName, LedgerError, NotFound, UnsafePath
from relay.base.home import LEDGER, PENDING, Home
from relay.base.names import MESSAGE_ID, MSG_SUFFIX, message_id_of

SHORT = 8  # hex digits in a table; more where two of its ids would be alike
MOST_NAMED = 4  # ids in the error for an ambiguous one
MAX_FILE_BYTES = 1 << 30  # also of a file that was refused for its size
PLACES = ("outbox", f"outbox/{PENDING}", "inbox")
_PARTS = re.compile(r"[0-9]+-[0-9a-f]*|[0-9a-f]+")
_KNOWN = """(
    SELECT message_id AS id FROM messages
    UNION ALL SELECT substr(file_name, 1, length(file_name) - 4) FROM rejections)"""
# "g" sorts after every hex digit, and so after every id with this beginning
_BY_TIME = f"SELECT DISTINCT id FROM {_KNOWN} WHERE id >= :given AND id < :given || 'g' LIMIT :most"
_BY_DIGITS = f"""
    SELECT DISTINCT id FROM {_KNOWN}
    WHERE substr(id, instr(id, '-') + 1, length(:given)) = :given LIMIT :most"""


def short_ids(ids: Iterable[str]) -> dict[str, str]:
    """Shorten ids so that they differ: id -> the first hex digits after the ``-``.

    An id with fewer digits, or that none of them tells apart from another one, stays whole.
    """
    short = {message_id: message_id for message_id in ids}
    left = {message_id for message_id in short if len(message_id.partition("-")[2]) >= SHORT}
    length = SHORT
    while left:
        parts = {message_id: message_id.partition("-")[2][:length] for message_id in left}
        counts = Counter(parts.values())
        found = {message_id: part for message_id, part in parts.items() if counts[part] == 1}
        short |= found
        left -= found.keys()
        if all(len(part) < length for part in parts.values()):
            break
        length += 4
    return short


def resolve_id(home: Home, text: str, *, must_exist: bool = False) -> str:
    """Return the id of the message that ``text`` names: an id, or the beginning of either part.

    The ledger is asked first, then the mailboxes. An id that neither knows is returned as it is,
    unless it ``must_exist``.
    Errors: InvalidName for a text that is not an id; NotFound for an ambiguous or an unknown
    beginning, and for a file in an outbox that the relay ignores because of its name; LedgerError
    for an unknown one, while the ledger cannot be read.
    """
    from relay.ledger.file import open_current

    given = text.removesuffix(MSG_SUFFIX)
    if not _PARTS.fullmatch(given):
        _check_misnamed(home, given)
        raise InvalidName(
            f"{text!a} is not a message id",
            hint="expected an id, or its first digits after the `-`, as in `relay list`",
        )
    found = (
        _in_ledger(home, given)
        or {
            message_id
            for place in PLACES
            for _, message_id in messages_in(home, place)
            if given == message_id or begins(message_id, given)
        }
        or _in_ledger(home, given)  # the relay may have taken it over meanwhile
    )
    if given in found:
        return given
    if not found:
        _check_misnamed(home, given)
        if MESSAGE_ID.fullmatch(given) and not must_exist:
            return given
        open_current(home.path(LEDGER)).close()  # else it may be there
        raise NotFound(
            f"no message {given}, in the ledger or any outbox",
            hint="`relay list` lists messages",
        )
    if len(found) > 1:
        named = ", ".join(sorted(found, reverse=True)[:MOST_NAMED])
        named += ", …" if len(found) > MOST_NAMED else ""
        raise NotFound(f"several messages match {given}: {named}", hint="use more digits")
    return found.pop()


def messages_in(home: Home, place: str) -> Iterator[tuple[str, str]]:
    """Yield (agent, message id) of each file that a relay would take for a message.

    ``place``: a folder of the agents' mailboxes, e.g. ``inbox``.
    """
    for agent, name in _files_in(home, place):
        if message_id := message_id_of(name):
            yield agent, message_id


def read_file(home: Home, path: str) -> bytes | None:
    """Read a message's file, or its copy in the pack of its day; None if there is neither.

    ``path``: in the home, as in the ledger. Errors: OSError; FormatError for a damaged pack.
    """
    from relay.base import archive_pack, fsio

    *folder, name = path.split("/")
    with home.dirs() as dirs:
        with contextlib.suppress(FileNotFoundError, UnsafePath):
            return fsio.read_regular(name, dirs.get(*folder), MAX_FILE_BYTES, shared=True)[0]
        return archive_pack.read(dirs, path)


def _files_in(home: Home, place: str) -> Iterator[tuple[str, str]]:
    """Yield (agent, file name)."""
    with home.dirs() as dirs:
        for agent in sorted(home.agent_names()):
            try:
                names = os.listdir(dirs.get("agents", agent, *place.split("/")))
            except (OSError, UnsafePath):
                continue  # no such folder, or not accessible: `relay doctor` reports it
            yield from ((agent, name) for name in sorted(names))


def _check_misnamed(home: Home, given: str) -> None:
    """Check for a file in an outbox that differs from a message of this id in case alone.

    Errors: NotFound with the name that it needs.
    """
    wanted = given.lower().removesuffix(MSG_SUFFIX) + MSG_SUFFIX
    if not message_id_of(wanted):
        return
    for agent, name in _files_in(home, "outbox"):
        if name.lower() == wanted and not message_id_of(name):
            raise NotFound(
                f"agents/{agent}/outbox/{name} is not sent: {name} is not a message name",
                hint=f"rename it to {wanted}",
            )


def begins(message_id: str, given: str) -> bool:
    """True if a message's id begins with ``given``, or its part after the ``-`` does."""
    return message_id.startswith(given) or message_id.partition("-")[2].startswith(given)


def _in_ledger(home: Home, given: str) -> set[str]:
    """Return the ids in the ledger that begin with ``given`` in either part, or are it."""
    from relay.ledger.file import open_current

    try:
        db = open_current(home.path(LEDGER))
    except LedgerError:
        return set()  # the mailboxes have what is there
    with contextlib.closing(db):
        wanted = {"given": given, "most": MOST_NAMED + 1}
        found = {row[0] for row in db.execute(_BY_TIME, wanted)}
        if "-" not in given:
            found |= {row[0] for row in db.execute(_BY_DIGITS, wanted)}
    return found
