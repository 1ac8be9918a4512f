"""Actions of the operator from the page: each is a message of the operator, by its outbox.

Where a relay runs, its answer is waited for some seconds and said; where none runs, the message
waits in the outbox, and that is said. Errors: RelayError, OSError; nothing was sent then, unless
the relay refused what was sent, or has not answered.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from agent_sdk import Agent
from relay.base import fsio
from relay.base.errors import MessageError, NotFound, Refused, Timeout
from relay.base.home import READ, Home, lock_holder
from relay.base.message import Kind
from relay.base.names import MSG_SUFFIX, OPERATOR, ORCHESTRATOR
from relay.base.text import plural
from relay.views.ids import resolve_id
from relay.views.message import earlier_answer, read_message
from relay.views.names import agent_not_found
from relay.web.pages import MOST_FAILED, failed_groups

WAIT_S = 3.0  # for the relay's answer, which takes milliseconds
Form = Mapping[str, str]


class Done(NamedTuple):
    """The result of an action: the page to show next, and a sentence."""

    address: str
    said: str = ""


def answer(home: Home, name: str, form: Form) -> Done:
    """Answer a message: a text to its sender, or the word that a command is done, or is not."""
    how, text = form.get("how", "reply"), _text(form)
    asked = read_message(home.root, name)
    if asked.sender in ("", OPERATOR):
        raise Refused(f"message {asked.id} is the operator's own")
    before = earlier_answer(home.root, OPERATOR, asked.id)  # by another tab, or a command
    with _operator(home) as me:
        wait = _wait_s(home)
        if how == "failed":
            sent = me.nack(asked.id, _needed(text), to=asked.sender, wait=wait)
        elif how in ("completed", "in_progress"):
            sent = me.ack(asked.id, how, text, to=asked.sender, wait=wait)
        else:
            kind = Kind.RESPONSE if asked.file.kind is Kind.QUERY else Kind.MESSAGE
            thread = asked.file.headers.get("THREAD")
            sent = me.send(
                *(asked.sender, _needed(text)), kind=kind, re=asked.id, thread=thread, wait=wait
            )
    _mark_read(home, asked.id)
    if form.get("back") == "home":
        return Done("/", "; ".join(filter(None, (f"answered by {sent}", before))))
    return Done(f"/m/{sent}", before)


def read(home: Home, name: str, form: Form) -> Done:
    """Take a message out of the operator's inbox."""
    message_id = resolve_id(home, name, must_exist=True)
    if not _mark_read(home, message_id):
        raise NotFound(f"message {message_id} is not in the operator's inbox")
    return Done(f"/m/{message_id}", "it is read")


def replay(home: Home, name: str, form: Form) -> Done:
    """Deliver a dead letter again."""
    return _ask_about(home, "dead.replay", name)


def discard(home: Home, name: str, form: Form) -> Done:
    """Give a dead letter up for good."""
    return _ask_about(home, "dead.discard", name)


def cancel(home: Home, name: str, form: Form) -> Done:
    """Take a message back from who has not read it."""
    return _ask_about(home, "message.cancel", name)


def send(home: Home, name: str, form: Form) -> Done:
    """Write to an agent, which has to be there: a typo creates none."""
    if name not in home.agent_names():
        raise agent_not_found(home, name)
    kind, thread = form.get("kind") or Kind.MESSAGE, form.get("thread", "").strip() or None
    if kind not in (Kind.MESSAGE, Kind.COMMAND, Kind.QUERY):
        raise MessageError(f"{kind!a} is not a kind that is sent from here", header="KIND")
    with _operator(home) as me:
        text = _needed(_text(form))
        sent = me.send(name, text, kind=kind, thread=thread, wait=_wait_s(home))
    return Done(f"/m/{sent}")


def replay_all(home: Home, name: str, form: Form) -> Done:
    """Deliver the dead letters of one reason again, if there are as many as were counted."""
    reason, count = form.get("reason", ""), form.get("count", "")
    groups = failed_groups(home)
    found = [
        group
        for group in groups
        if group["outcome"] == "dead" and (group["reason"] or "") == reason
    ]
    ids = sorted({row["id"] for group in found for row in group["rows"]})
    if not ids or str(len(ids)) != count:
        now = plural(len(ids), "dead letter")
        raise Refused(f"there are {now} of this reason now, not {count[:20]}: look again")
    bodies = [f"ACTION: dead.replay\nID: {message_id}" for message_id in ids[:MOST_FAILED]]
    with _operator(home) as me:
        sent = me.send_many(
            {"to": ORCHESTRATOR, "body": body, "kind": Kind.COMMAND} for body in bodies
        )
        if lock_holder(home) is None:
            return Done("/failed", f"{plural(len(sent), 'replay')} sent; no relay was running")
        done, refused = _count_answers(me, sent)
    said = f"{plural(done, 'message')} replayed"
    if refused:
        said += f", {refused} refused: see the inbox of operator"
    if silent := len(sent) - done - refused:
        said += f", {silent} without an answer yet: it comes into the inbox of operator"
    return Done("/failed", said)


def _count_answers(me: Agent, sent: list[str]) -> tuple[int, int]:
    """Take the relay's answers to commands out of the inbox: how many are a yes, and a no."""
    ends_at, done, refused = time.monotonic() + WAIT_S, 0, 0
    for message_id in sent:
        left_ms = max(1, int((ends_at - time.monotonic()) * 1000))
        try:
            me.wait(message_id, f"answer={left_ms}ms")
            done += 1
        except Refused:
            refused += 1
        except Timeout:
            break
    return done, refused


Action = Callable[[Home, str, Form], Done]
ACTIONS: dict[str, Action] = {
    "/m/{name}/answer": answer,
    "/m/{name}/read": read,
    "/m/{name}/replay": replay,
    "/m/{name}/discard": discard,
    "/m/{name}/cancel": cancel,
    "/agents/{name}/send": send,
    "/failed/replay": replay_all,
}


def _ask_about(home: Home, action: str, name: str) -> Done:
    """Have the relay do something with a message, and say what it answers."""
    message_id = resolve_id(home, name, must_exist=True)
    page, body = f"/m/{message_id}", f"ACTION: {action}\nID: {message_id}"
    with _operator(home) as me:
        if lock_holder(home) is None:
            sent = me.send(ORCHESTRATOR, body, kind=Kind.COMMAND, wait=0)
            return Done(page, f"no relay was running: it was put into the outbox, {sent}")
        found = me.request(ORCHESTRATOR, body, WAIT_S, kind=Kind.COMMAND)
    return Done(page, found.body.removeprefix("completed").strip())


def _operator(home: Home) -> Agent:
    return Agent(OPERATOR, home.root, registers=False, disk_full_retry_s=0)


def _wait_s(home: Home) -> float:
    """Seconds to wait until the relay has taken a message; without one it would be in vain."""
    return 0 if lock_holder(home) is None else WAIT_S


def _text(form: Form) -> str:
    return form.get("body", "").replace("\r\n", "\n")


def _needed(text: str) -> str:
    if not text.strip():
        raise MessageError("the text is empty")
    return text


def _mark_read(home: Home, message_id: str) -> bool:
    """Move a message to ``.read``, if it is in the operator's inbox."""
    name = message_id + MSG_SUFFIX
    with home.dirs() as dirs, contextlib.suppress(FileNotFoundError):
        inbox = dirs.get("agents", OPERATOR, "inbox")
        os.stat(name, dir_fd=inbox, follow_symlinks=False)
        fsio.rename(name, inbox, name, dirs.ensure("agents", OPERATOR, "inbox", READ))
        return True
    return False
