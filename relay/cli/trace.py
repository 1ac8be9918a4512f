"""``relay trace``: every hop of a message with its time; what is not known is said to be."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from typing import Any

import click

from relay.base.errors import NotFound
from relay.base.home import LEDGER, Home
from relay.base.names import MSG_SUFFIX, ORCHESTRATOR
from relay.cli import outboxes
from relay.cli.common import echo_json, home_option, json_option, open_home, printable, when
from relay.cli.hops import Hop, changes, hops_of, in_order
from relay.ledger import wording
from relay.ledger.values import REMOVED
from relay.ledger.wording import Word


class Unrecorded(NotFound):
    """The ledger has neither a row nor a refusal of that id."""


@click.command(epilog="\b\nExample:\n  relay trace 1706123456789012345-a1b2c3d4")
@home_option
@click.argument("message_id")
@json_option
@click.pass_context
def trace(ctx: click.Context, home: str | None, message_id: str, as_json: bool) -> None:
    """Show every hop of a message with its time.

    MESSAGE_ID may be the beginning of one. Of one that no relay has seen yet it says where it
    lies.
    """
    from relay.base.lock_file import lock_holder
    from relay.ledger import open_readonly

    with open_home(ctx, home) as opened:
        db = open_readonly(opened.path(LEDGER))
        message_id = message_id.removesuffix(MSG_SUFFIX)
        try:
            facts = read_trace(db, message_id)
        except Unrecorded:  # and once more: a relay may have taken it in between the two looks
            facts = outboxes.find(opened, message_id) or read_trace(db, message_id)
        finally:
            db.close()
        facts["file_at"] = _file_at(opened, facts)
        is_running = lock_holder(opened) is not None
    if as_json:
        echo_json(facts)
    elif facts["status"] in outboxes.WORDS:
        told = f"{facts['message_id']}\n  {outboxes.told(facts, is_running)}"
        click.echo(printable(told, lines=True))
    else:
        _show(facts)


def _file_at(home: Home, facts: dict[str, Any]) -> str | None:
    """Where the file of a message that is at its end is now; None where that is not asked."""
    from relay.ledger import archive_pack

    path = facts.get("file") or ""
    return archive_pack.place(home, path) if path.startswith("archive/") else None


def read_trace(db: sqlite3.Connection, message_id: str) -> dict[str, Any]:
    """What the ledger knows of one message.

    Errors: Unrecorded when no id begins so, NotFound when several do.
    """
    row = _row(db, message_id)
    if row is None:
        return _rejected(db, message_id)
    identity = row["message_id"]
    query = "SELECT * FROM deliveries WHERE message_id = ? ORDER BY recipient"
    deliveries = [wording.fields(one) for one in db.execute(query, (identity,))]
    log = changes(db, identity, row["discovered_at"])
    hops = [Hop(row["discovered_at"], "discovered", None)]
    for one in deliveries:
        hops += hops_of(one, log.get(one["recipient"], ()))
    if row["processed_at"]:
        hops.append(Hop(row["processed_at"], row["status"], None, detail=row["file_path"]))
    return {
        "message_id": identity,
        "from": row["agent_name"],
        "to": row["target"],
        "kind": row["message_type"],
        "status": row["status"],
        "outcome": wording.headline(row, deliveries, time.time_ns()),
        "file": row["file_path"],
        "checksum": row["checksum"],
        "discovered_at": when(row["discovered_at"]),
        "processed_at": when(row["processed_at"]),
        "retries": row["retry_count"],
        "error": row["last_error"],
        "deliveries": [_delivery(one) for one in deliveries],
        "hops": [_hop(hop) for hop in in_order(hops)],
    }


def _row(db: sqlite3.Connection, message_id: str) -> sqlite3.Row | None:
    """The row of the one message whose id begins so; None when none does."""
    if not message_id or not message_id.isascii():
        raise NotFound(f"{message_id!a} is no message id", hint="it is the file name without .msg")
    # behind every hex digit, and so behind every id that begins so, comes a g
    found: list[sqlite3.Row] = db.execute(
        "SELECT * FROM messages WHERE message_id >= ? AND message_id < ? || 'g' LIMIT 2",
        (message_id, message_id),
    ).fetchall()
    if len(found) > 1 and found[0]["message_id"] != message_id:
        raise NotFound(f"several messages begin with {message_id}", hint="give more of the id")
    return found[0] if found else None


def _delivery(row: wording.Fields) -> dict[str, Any]:
    return {
        "recipient": row["recipient"],
        "state": row["state"],
        "outcome": wording.word_of(row),
        "attempt": row["attempt"],
        "staged_at": when(row["staged_at"]),
        "written_at": when(row["written_at"]),
        "read_at": when(row["read_at"]),
        "acked_at": when(row["acked_at"]),
        "ack_status": row["ack_status"],
        "read_how": row["read_how"],
        "answer": row["answer_id"],
        "answer_text": row["answer_text"],
        "obligation": row["obligation"],
        "reminders": row["reminders"],
        "due_at": when(row["due_at"]),
        "error": row["last_error"],
    }


def _hop(hop: Hop) -> dict[str, Any]:
    return hop._asdict() | {"at": when(hop.at)}


def _rejected(db: sqlite3.Connection, message_id: str) -> dict[str, Any]:
    name = message_id if message_id.endswith(".msg") else f"{message_id}.msg"
    row = db.execute(
        "SELECT * FROM rejections WHERE file_name = ? ORDER BY at DESC", (name,)
    ).fetchone()
    if row is None:
        raise Unrecorded(
            f"no message {message_id}: the ledger does not know it, and it is in no outbox"
        )
    return {
        "message_id": message_id,
        "from": row["agent"],
        "status": "rejected",
        "outcome": f"refused: {row['reason']}",
        "error": row["reason"],
        "answer": row["nack_id"],
        "discovered_at": when(row["at"]),
        "deliveries": [],
        "hops": [_hop(Hop(row["at"], "discovered", None))],
    }


def _show(facts: dict[str, Any]) -> None:
    click.echo(printable(facts["message_id"]))
    kind, to = facts.get("kind"), facts.get("to")
    about = f"{kind or 'unknown'} {facts['from']} -> {to or 'unknown'}"
    if not (kind or to):  # nobody could read it
        about = f"a file of {facts['from']}"
    click.echo(f"  {printable(about)}: {printable(facts['outcome'])}")
    hop = "  {:<28} {}".format
    for one in facts["hops"]:
        click.echo(hop(one["at"] or "unknown", printable(_told(one, facts))))
    for text in _not_yet(facts["deliveries"], facts.get("kind") in ("command", "query")):
        click.echo(hop("not yet", printable(text)))
    if not facts["deliveries"] and facts["status"] in ("completed", "archived"):
        click.echo(hop("-", "no recipients"))
    if facts["error"] and facts["error"] not in facts["outcome"]:
        click.echo(hop("why", printable(facts["error"])))


_WORDS = {
    "accepted": "accepted for {}",
    "discovered": "discovered in the outbox of {}",
    "acked": "acknowledged by {}",
    "handled": "handled by the relay itself",
    "read": "read by {}",
    REMOVED: "removed from the inbox of {}, not seen in .read",
    "written": "written to the inbox of {}",
}


def _told(hop: dict[str, Any], facts: dict[str, Any]) -> str:
    """A hop in words."""
    what, name = hop["what"], hop["recipient"]
    if name is None and what != "discovered":
        at = facts.get("file_at") or hop["detail"]
        return f"{what}, file in {hop['detail']}" + ("" if at == hop["detail"] else f" ({at})")
    word = REMOVED if what == "read" and hop["detail"] == REMOVED else what
    said: str = _WORDS.get(word, what + " for {}").format(name or facts["from"])
    if hop["detail"] is not None and what != "read":
        said += f": {hop['detail']}" + (_answer(name, facts) if what == "acked" else "")
    elif (hop["attempt"] or 1) > 1:
        said += f", attempt {hop['attempt']}"
    for one in facts["deliveries"]:
        is_it = one["recipient"] == name and one["state"] == what == "held"
        if is_it and hop["detail"] is not None and one["due_at"]:
            said += f", tried again at {one['due_at']}"
    return said


def _answer(name: str, facts: dict[str, Any]) -> str:
    """The first line of an acknowledgment, and the id of the whole."""
    for one in facts["deliveries"]:
        if one["recipient"] == name and one["answer"]:
            text = f", {one['answer_text']}" if one["answer_text"] else ""
            return f"{text} (answer {one['answer']})"
    return ""


def _not_yet(deliveries: list[dict[str, Any]], is_to_be_acked: bool) -> Iterator[str]:
    """What is still to come. Read is not done: who crashed with a command has read it, too."""
    for one in deliveries:
        name, state = one["recipient"], one["state"]
        if name == ORCHESTRATOR:
            if not one["read_at"]:
                yield "handled by the relay itself"
            continue
        if state == "staged":
            yield f"written to the inbox of {name}"
        if state in ("staged", "written"):
            yield f"read by {name}"
        if is_to_be_acked and state in ("staged", "written", "read") and not one["acked_at"]:
            yield f"acknowledged by {name}{wording.obliged(one)}"
        elif state == "acked" and one["outcome"] == Word.IN_PROGRESS:
            yield f"completed by {name}"
