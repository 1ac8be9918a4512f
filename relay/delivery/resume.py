"""Continuity: what an agent saves, gets back, and is told when it begins again.

    ACTION: save   the state: the body, or what stands behind the fields or behind `STATE:`
    ACTION: load   the last save, or that of VERSION; the operator's and the lead's also of NAME
    ACTION: list   a line for each version: number, bytes, time, message id

A save is on disk before the ack that says so is committed; killed in between, the message is
obeyed again and gives the same version. Source: relay-file-system.txt 4.1, docs/formats/msg.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import NamedTuple

from relay.acomm.model import ChannelType, Message, MessageType, Metadata, Priority
from relay.agents.saved_state import SavedState, StateStore
from relay.base import fsio
from relay.base.clock import iso_time
from relay.base.errors import MessageError, Refused, UnsafePath
from relay.base.home import READ, Dirs
from relay.base.message import (
    DIGITS,
    MAX_DELIVERED_HEADER_BYTES,
    Kind,
    MessageFile,
    parse_delivered,
    split,
)
from relay.base.names import MSG_SUFFIX, OPERATOR, ORCHESTRATOR, direct_channel_name, is_agent_name
from relay.delivery.control import ControlReply
from relay.delivery.file_ops import DiskFull, inbox_files, render_delivered
from relay.delivery.work import OutgoingFile, WorkItem, system_message_row, system_work_about
from relay.engine.commstore import CommStore

SAVE, LOAD, LIST = ACTIONS = ("save", "load", "list")
FIELDS = ("ACTION", "NAME", "VERSION")
STATE = "STATE"
MOST_UNREAD = 20  # messages that a welcome names; more are counted
MOST_WORDS = 80  # characters of each
LINE = "-----"


class ContinuityRequest(NamedTuple):
    """A continuity message, read."""

    action: str
    name: str  # whose saves
    version: int | None  # None: the last
    state: bytes


def handle(
    message: MessageFile, message_id: str, sender: str, lead: str | None, states: StateStore
) -> ControlReply:
    """Do what a continuity message asks, and the answer to it. Errors: DiskFull, which passes."""
    try:
        asked = parse_request(message, sender)
        if asked.name != sender and not (
            asked.action != SAVE and sender in (OPERATOR, lead) and is_agent_name(asked.name)
        ):
            raise Refused(
                f"{asked.action} of NAME {asked.name[:70]!r} is not for {sender}: an agent has its "
                f"own saves alone; {OPERATOR} and the lead may load and list those of others"
            )
        return _ANSWERS[asked.action](asked, message_id, states)
    except Refused as exc:
        return ControlReply(False, str(exc))
    except UnsafePath as exc:
        return ControlReply(False, f"the saves of {sender} cannot be reached: {exc}")
    except OSError as exc:
        if exc.errno in fsio.DISK_ERRNOS:
            raise DiskFull(f"continuity of {sender}: {exc.strerror}") from exc
        return ControlReply(
            False, f"the saves of {sender} cannot be reached: {exc.strerror or exc}"
        )


def parse_request(message: MessageFile, sender: str) -> ContinuityRequest:
    """What a continuity message says. Errors: Refused, naming the rule."""
    fields = {name: message.headers[name] for name in FIELDS if name in message.headers}
    state = message.body
    if fields.get("ACTION", "").lower() != SAVE:  # given by header, all of its body is the state
        state = _take_fields(message.body, fields)
    action = fields.get("ACTION", "").lower()
    if action not in ACTIONS:
        what = f"there is no ACTION {action[:60]!r}" if action else "ACTION is missing"
        raise Refused(f"{what}: KIND continuity has ACTION save, load or list")
    if action == SAVE and "VERSION" in fields:
        raise Refused("save takes no VERSION: it makes a new one")
    if action != SAVE and state.strip():
        line = state.strip().split(b"\n")[0].decode()
        raise Refused(f"{action} takes no {line[:60]!r}: its lines are VERSION and NAME")
    version = fields.get("VERSION") if action == LOAD else None
    if action == LIST and "VERSION" in fields:
        raise Refused("list takes no VERSION: it lists them all")
    if version is not None and not (DIGITS.fullmatch(version) and int(version) > 0):
        raise Refused(f"VERSION {version[:60]!r} is no whole number above 0")
    return ContinuityRequest(
        action, fields.get("NAME") or sender, int(version) if version else None, state
    )


def _take_fields(body: bytes, fields: dict[str, str]) -> bytes:
    """Take the field lines at the beginning into ``fields``; what is behind them.

    They end at a blank line, at `STATE:`, or at the first line that is none of them.
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
        raise Refused("there is no state to save: it is the body, behind the ACTION")
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
        return ControlReply(True, "version 0")  # to begin anew is no error
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


def resume_message(
    states: StateStore, store: CommStore, name: str, key: str, now_ns: int
) -> WorkItem | None:
    """The message that an agent finds first when it begins again: its last save, and a list of
    what waits unread. None where there is neither, or where it has this message already.

    ``key`` tells this beginning from every other one. It is of the highest priority, and its
    name sorts before every other in the inbox. To be carried out before the agent's process
    starts, or as soon as it is found; killed before that, the same call gives the same message.
    Errors: StoreFull, StoreCapacity; OSError, UnsafePath when the home cannot be read.
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
    stored = store.find_by_relay_id(message_id) or _store_message(
        store, name, message_id, body, now_ns
    )
    facts = system_message_row(message_id, body, str(message.kind), name, now_ns)
    data = render_delivered(message, message_id, ORCHESTRATOR, now_ns, facts.checksum or "", None)
    work = system_work_about(message_id, "", now_ns, f"welcome {key}")
    work.outgoing.append(OutgoingFile(message_id, stored.id, data, (name,), facts))
    return work


def _before(message_id: str) -> str:
    """A timestamp that sorts right before that of a message id, in as many digits."""
    digits = message_id.partition("-")[0]
    return f"{max(int(digits) - 1, 0):0{len(digits)}d}"


def _resume_body(
    states: StateStore, dirs: Dirs, name: str, last: list[SavedState], unread: list[str]
) -> bytes:
    lines = ["You begin again."]
    state = b""
    for save in last:
        state = states.read(name, save)
        at = iso_time(save.saved_at)[:19] + "Z"
        lines.append(
            f"Your last save is version {save.version} ({save.size} bytes, {at}); it stands "
            f"behind the line {LINE}."
        )
    lines.append(f"Unread in your inbox: {len(unread)}.")
    lines += [_first_words(dirs, name, message_id) for message_id in unread[:MOST_UNREAD]]
    if len(unread) > MOST_UNREAD:
        lines.append(f"… and {len(unread) - MOST_UNREAD} more")
    if last:
        lines.append(LINE)
    return ("\n".join(lines) + "\n").encode() + state


def _first_words(dirs: Dirs, name: str, message_id: str) -> str:
    """One line for a message in the inbox: id, sender, kind, how it begins."""
    said = "?"
    with contextlib.suppress(OSError, UnsafePath, MessageError):
        data, _ = fsio.read_regular(
            message_id + MSG_SUFFIX, dirs.get("agents", name, "inbox"), MAX_DELIVERED_HEADER_BYTES
        )
        head, body = split(data)
        message = parse_delivered(head + b"\n\n")
        text = " ".join(body[: 4 * MOST_WORDS].decode(errors="replace").split())
        words = text if len(text) <= MOST_WORDS else text[: MOST_WORDS - 1] + "…"
        said = f"from {message.headers.get('FROM', '?')}, {message.kind}: {words}"
    return f"- {message_id} {said}"


def _store_message(
    store: CommStore, name: str, message_id: str, body: bytes, now_ns: int
) -> Message:
    """The engine's message, numbered now."""
    channel_name = direct_channel_name(name, ORCHESTRATOR)
    channel = store.get_channel_by_name(channel_name)
    if channel is None:
        channel = store.create_channel(channel_name, ChannelType.DIRECT, name)
    for member in (name, ORCHESTRATOR):
        if not store.is_participant(channel.id, member):
            store.join_channel(channel.id, member)
    metadata: Metadata = {"relay_id": message_id, "to": name, "created_ns": now_ns}
    return store.accept(
        channel.id,
        ORCHESTRATOR,
        MessageType.NOTIFICATION,
        body,
        recipients=(name,),
        priority=Priority.CRITICAL,
        metadata=metadata,
    )
