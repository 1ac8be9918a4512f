"""Saved states of agents: save, load and list them, and resume with the last one.

    ACTION: save   the state: the body, or what follows the fields or `STATE:`
    ACTION: load   the last state, or that of VERSION; operator and lead also of NAME
    ACTION: list   a line for each version: number, bytes, time, message id

    continuity/{agent}/{version, 8 digits}-{message id}.state

A state is on disk, whole and synced, before the ack is committed. The message id in its name makes
saving repeatable: after a crash it is the same version. Only the last ``continuity.keep_versions``
are kept. See docs/formats/msg.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from typing import NamedTuple

from relay.acomm.model import Priority
from relay.base import fsio
from relay.base.clock import iso_time
from relay.base.config import ContinuitySettings
from relay.base.errors import MessageError, Refused, UnsafePath
from relay.base.home import CONTINUITY, READ, Dirs, Home
from relay.base.message import (
    DIGITS,
    MAX_DELIVERED_HEADER_BYTES,
    Kind,
    MessageFile,
    parse_delivered,
    split,
)
from relay.base.names import MSG_SUFFIX, OPERATOR, is_agent_name
from relay.delivery.file_ops import DiskFull, inbox_files
from relay.delivery.values import ControlReply, Plan, Subject, SystemMessage

NAME = re.compile(r"([0-9]{8,12})-([0-9]{10,20}-[0-9a-f]{0,32})\.state")
LEFT_OVER = ".tmp"  # a write that a crash cut short


class SavedState(NamedTuple):
    """One version of one agent's state."""

    version: int  # from 1, growing
    message_id: str  # of the message that saved it
    size: int  # bytes
    saved_at: int  # Unix nanoseconds

    @property
    def file_name(self) -> str:
        """Its name in the agent's folder."""
        return f"{self.version:08d}-{self.message_id}.state"


class StateStore:
    """The saved states of all agents. Only the loop writes; agent names are validated before."""

    def __init__(self, home: Home, settings: ContinuitySettings) -> None:
        self.home = home
        self.settings = settings

    def versions(self, agent: str) -> list[SavedState]:
        """The versions of an agent, oldest first. Errors: OSError, UnsafePath."""
        try:
            with self.home.dirs() as dirs, os.scandir(dirs.get(CONTINUITY, agent)) as entries:
                found = [
                    SavedState(int(match[1]), match[2], status.st_size, status.st_mtime_ns)
                    for entry in entries
                    if (match := NAME.fullmatch(entry.name))
                    for status in (entry.stat(follow_symlinks=False),)
                ]
        except FileNotFoundError:
            return []
        return sorted(found)

    def save(self, agent: str, message_id: str, state: bytes) -> SavedState:
        """Save a state as the newest version; the same message again gives the same version.

        Durable on return. Errors: OSError, UnsafePath; then nothing was saved or removed.
        """
        known = self.versions(agent)
        for save in known:
            if save.message_id == message_id:
                return save
        with self.home.dirs() as dirs:
            is_new = not known
            folder = dirs.ensure(CONTINUITY, agent)
            if is_new:  # its directory may have been made just now
                fsio.sync_dir(self.home.root)
                fsio.sync_dir(self.home.path(CONTINUITY))
            version = known[-1].version + 1 if known else 1
            save = SavedState(version, message_id, len(state), 0)
            fsio.write_atomic(self.home.path(CONTINUITY, agent, save.file_name), state)
            for old in (*known, save)[: -self.settings.keep_versions]:
                fsio.remove(old.file_name, folder)
            for name in os.listdir(folder):
                if name.endswith(LEFT_OVER):
                    fsio.remove(name, folder)
        return save

    def read(self, agent: str, save: SavedState) -> bytes:
        """The state, byte for byte. Errors: OSError, UnsafePath."""
        with self.home.dirs() as dirs:
            folder = dirs.get(CONTINUITY, agent)
            return fsio.read_regular(save.file_name, folder, max(save.size, 1))[0]


SAVE, LOAD, LIST = ACTIONS = ("save", "load", "list")
FIELDS = ("ACTION", "NAME", "VERSION")
STATE = "STATE"
MOST_UNREAD = 20  # messages that a welcome names; more are counted
MOST_WORDS = 80  # characters of each
LINE = "-----"


class ContinuityRequest(NamedTuple):
    """A parsed continuity message."""

    action: str
    name: str  # whose saves
    version: int | None  # None: the last
    state: bytes


def handle(
    message: MessageFile, message_id: str, sender: str, lead: str | None, states: StateStore
) -> ControlReply:
    """Execute a continuity message. Errors: DiskFull, which is transient."""
    try:
        asked = parse_request(message, sender)
        if asked.name != sender and not (
            asked.action != SAVE and sender in (OPERATOR, lead) and is_agent_name(asked.name)
        ):
            raise Refused(
                f"{asked.action} of NAME {asked.name[:70]!r} is not for {sender}: an agent can "
                f"access only its own states; {OPERATOR} and the lead can load and list others"
            )
        return _ANSWERS[asked.action](asked, message_id, states)
    except Refused as exc:
        return ControlReply(False, str(exc))
    except UnsafePath as exc:
        return ControlReply(False, f"the states of {sender} are not accessible: {exc}")
    except OSError as exc:
        if exc.errno in fsio.DISK_ERRNOS:
            raise DiskFull(f"continuity of {sender}: {exc.strerror}") from exc
        return ControlReply(
            False, f"the states of {sender} are not accessible: {exc.strerror or exc}"
        )


def parse_request(message: MessageFile, sender: str) -> ContinuityRequest:
    """Parse a continuity message. Errors: Refused, naming the rule."""
    fields = {name: message.headers[name] for name in FIELDS if name in message.headers}
    state = message.body
    if fields.get("ACTION", "").lower() != SAVE:  # given by header, all of its body is the state
        state = _take_fields(message.body, fields)
    action = fields.get("ACTION", "").lower()
    if action not in ACTIONS:
        what = f"there is no ACTION {action[:60]!r}" if action else "ACTION is missing"
        raise Refused(f"{what}: KIND continuity has ACTION save, load or list")
    if action == SAVE and "VERSION" in fields:
        raise Refused("save does not accept VERSION: it always makes a new one")
    if action != SAVE and state.strip():
        line = state.strip().split(b"\n")[0].decode()
        raise Refused(f"{action} does not accept {line[:60]!r}: expected VERSION and NAME")
    version = fields.get("VERSION") if action == LOAD else None
    if action == LIST and "VERSION" in fields:
        raise Refused("list does not accept VERSION: it lists all versions")
    if version is not None and not (DIGITS.fullmatch(version) and int(version) > 0):
        raise Refused(f"VERSION: expected an integer above 0, got {version[:60]!r}")
    return ContinuityRequest(
        action, fields.get("NAME") or sender, int(version) if version else None, state
    )


def _take_fields(body: bytes, fields: dict[str, str]) -> bytes:
    """Move the field lines at the beginning into ``fields``; returns the rest.

    They end at a blank line, at `STATE:`, or at the first other line.
    """
    while body:
        line, _, rest = body.partition(b"\n")
        name, colon, value = line.decode().partition(":")
        name = name.strip().upper()
        if not line.strip():
            return rest
        if colon and name == STATE:
            return body.partition(b":")[2].removeprefix(b" ") if value.strip() else rest
        if not colon or name not in FIELDS:
            return body
        if name in fields:
            raise Refused(f"{name} is given twice")
        fields[name] = value.strip()
        body = rest
    return b""


def _save(asked: ContinuityRequest, message_id: str, states: StateStore) -> ControlReply:
    most = states.settings.most_kib * 1024
    if not asked.state:
        raise Refused("there is no state to save: the state is the body, after the ACTION")
    if len(asked.state) > most:
        raise Refused(
            f"the state has {len(asked.state)} bytes, continuity.most_kib allows {most}: save a "
            "summary, and keep large things in files or attachments"
        )
    save = states.save(asked.name, message_id, asked.state)
    return ControlReply(True, f"saved as version {save.version} ({save.size} bytes)")


def _load(asked: ContinuityRequest, message_id: str, states: StateStore) -> ControlReply:
    versions = states.versions(asked.name)
    if asked.version is None and not versions:
        return ControlReply(True, "version 0")  # a first start is not an error
    found = [save for save in versions if asked.version in (None, save.version)]
    if not found:
        there_are = ", ".join(str(save.version) for save in versions) or "none"
        raise Refused(f"{asked.name} has no version {asked.version}: there are {there_are}")
    state = states.read(asked.name, found[-1])
    return ControlReply(True, f"version {found[-1].version}", attached=state)


def _list(asked: ContinuityRequest, message_id: str, states: StateStore) -> ControlReply:
    versions = states.versions(asked.name)
    lines = "".join(
        f"{save.version} {save.size} {iso_time(save.saved_at)} {save.message_id}\n"
        for save in versions
    )
    return ControlReply(True, f"{len(versions)} versions", attached=lines.encode())


_ANSWERS = {SAVE: _save, LOAD: _load, LIST: _list}


# -- the first message of a new life -------------------------------------------------------------


def resume_plan(states: StateStore, name: str, key: str, now_ns: int) -> Plan | None:
    """The first message of an agent that starts again: its last state and its unread messages.

    None if there is neither, or if it has this message already. ``key`` is unique to this start.
    The message has the highest priority, and its name sorts before every other in the inbox. To be
    executed before the agent's process starts, or as soon as that is found; the same call after a
    crash gives the same message. Errors: OSError, UnsafePath when the home cannot be read.
    """
    versions = states.versions(name)
    mark = hashlib.sha256(f"welcome\0{name}\0{key}".encode()).hexdigest()[:32]
    with states.home.dirs() as dirs:
        unread = sorted(inbox_files(dirs, name))
        was_read = os.listdir(dirs.ensure("agents", name, "inbox", READ))
        if any(mark in file_name for file_name in (*unread, *was_read)):
            return None
        if not (versions or unread):
            return None
        body = _resume_body(states, dirs, name, versions[-1:], unread)
    message_id = f"{_before(unread[0]) if unread else now_ns}-{mark}"
    headers = {"PRIORITY": str(int(Priority.CRITICAL))}
    if versions:
        headers["VERSION"] = str(versions[-1].version)
    message = MessageFile(name, Kind.NOTIFICATION, headers, body)
    return Plan(Subject(), messages=(SystemMessage(message_id, message, now_ns, (name,)),))


def _before(message_id: str) -> str:
    """A timestamp that sorts right before that of a message id, with as many digits."""
    digits = message_id.partition("-")[0]
    return f"{max(int(digits) - 1, 0):0{len(digits)}d}"


def _resume_body(
    states: StateStore, dirs: Dirs, name: str, last: list[SavedState], unread: list[str]
) -> bytes:
    lines = ["You are starting again."]
    state = b""
    for save in last:
        state = states.read(name, save)
        at = iso_time(save.saved_at)[:19] + "Z"
        lines.append(
            f"Your last saved state is version {save.version} ({save.size} bytes, {at}); "
            f"it follows the line {LINE}."
        )
    lines.append(f"Unread in your inbox: {len(unread)}.")
    lines += [_first_words(dirs, name, message_id) for message_id in unread[:MOST_UNREAD]]
    if len(unread) > MOST_UNREAD:
        lines.append(f"… and {len(unread) - MOST_UNREAD} more")
    if last:
        lines.append(LINE)
    return ("\n".join(lines) + "\n").encode() + state


def _first_words(dirs: Dirs, name: str, message_id: str) -> str:
    """One line about a message in the inbox: id, sender, kind, first words."""
    described = "?"
    with contextlib.suppress(OSError, UnsafePath, MessageError):
        data, _ = fsio.read_regular(
            message_id + MSG_SUFFIX, dirs.get("agents", name, "inbox"), MAX_DELIVERED_HEADER_BYTES
        )
        head, body = split(data)
        message = parse_delivered(head + b"\n\n")
        text = " ".join(body[: 4 * MOST_WORDS].decode(errors="replace").split())
        words = text if len(text) <= MOST_WORDS else text[: MOST_WORDS - 1] + "…"
        described = f"from {message.headers.get('FROM', '?')}, {message.kind}: {words}"
    return f"- {message_id} {described}"
