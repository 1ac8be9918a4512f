"""``relay trace``: every hop of a message with its time; what is not known is said to be."""

from __future__ import annotations

import sqlite3
from operator import itemgetter
from typing import Any

import click

from relay.cli.common import echo_json, home_option, json_option, open_home, printable, when
from relay.errors import NotFound
from relay.home import LEDGER, Home
from relay.names import ORCHESTRATOR


@click.command(epilog="\b\nExample:\n  relay trace 1706123456789012345-a1b2c3d4")
@home_option
@click.argument("message_id")
@json_option
@click.pass_context
def trace(ctx: click.Context, home: str | None, message_id: str, as_json: bool) -> None:
    """Show every hop of a message with its time.

    MESSAGE_ID may be the beginning of one.
    """
    from relay.ledger import open_readonly

    with open_home(ctx, home) as opened:
        db = open_readonly(opened.path(LEDGER))
        facts = read_trace(db, message_id)
        db.close()
        facts["file_at"] = _file_at(opened, facts)
    if as_json:
        echo_json(facts)
    else:
        _show(facts)


def _file_at(home: Home, facts: dict[str, Any]) -> str | None:
    """Where the file of a message that is at its end is now; None where that is not asked."""
    from relay import archive_pack

    path = facts.get("file") or ""
    return archive_pack.place(home, path) if path.startswith("archive/") else None


ENDED = ("bounced", "expired", "dead", "held")


def read_trace(db: sqlite3.Connection, message_id: str) -> dict[str, Any]:
    """What the ledger knows of one message.

    Errors: NotFound when no id begins so, or several do.
    """
    if not message_id or not message_id.isascii():
        raise NotFound(f"{message_id!a} is no message id", hint="it is the file name without .msg")
    found = db.execute(
        "SELECT * FROM messages WHERE message_id >= ? AND message_id < ? || 'g' LIMIT 2",
        (message_id, message_id),
    ).fetchall()
    if not found:
        return _rejected(db, message_id)
    if len(found) > 1 and found[0]["message_id"] != message_id:
        raise NotFound(f"several messages begin with {message_id}", hint="give more of the id")
    row = found[0]
    identity = row["message_id"]
    deliveries = db.execute(
        "SELECT * FROM deliveries WHERE message_id = ? ORDER BY recipient", (identity,)
    ).fetchall()
    return {
        "message_id": identity,
        "from": row["agent_name"],
        "to": row["target"],
        "kind": row["message_type"],
        "status": row["status"],
        "file": row["file_path"],
        "checksum": row["checksum"],
        "discovered_at": when(row["discovered_at"]),
        "processed_at": when(row["processed_at"]),
        "retries": row["retry_count"],
        "error": row["last_error"],
        "deliveries": [
            {
                "recipient": d["recipient"],
                "state": d["state"],
                "attempt": d["attempt"],
                "staged_at": when(d["staged_at"]),
                "written_at": when(d["written_at"]),
                "read_at": when(d["read_at"]),
                "acked_at": when(d["acked_at"]),
                "ack_status": d["ack_status"],
                "due_at": when(d["due_at"]),
                "error": d["last_error"],
            }
            for d in deliveries
        ],
    }


def _rejected(db: sqlite3.Connection, message_id: str) -> dict[str, Any]:
    name = message_id if message_id.endswith(".msg") else f"{message_id}.msg"
    row = db.execute("SELECT * FROM rejections WHERE file_name = ?", (name,)).fetchone()
    if row is None:
        raise NotFound(f"the ledger knows no message {message_id}")
    return {
        "message_id": message_id,
        "from": row["agent"],
        "status": "rejected",
        "error": row["reason"],
        "answer": row["nack_id"],
        "discovered_at": when(row["at"]),
        "deliveries": [],
    }


def _show(facts: dict[str, Any]) -> None:
    click.echo(f"{facts['message_id']}")
    route = f"{facts['from']} -> {facts.get('to') or 'unknown'}"
    click.echo(f"  {facts.get('kind') or 'unknown'} {route}: {facts['status']}")
    hop = "  {:<28} {}".format
    click.echo(hop(facts["discovered_at"], f"discovered in the outbox of {facts['from']}"))
    came: list[tuple[str, str]] = []
    missing: list[tuple[str, str]] = []
    for delivery in facts["deliveries"]:
        for at, text in _hops(delivery):
            if at:
                came.append((at, text))
            else:
                missing.append(("-" if delivery["state"] in ENDED else "not yet", text))
    if facts.get("processed_at"):
        at = facts.get("file_at") or facts["file"]
        also = "" if at == facts["file"] else f" ({at})"
        came.append((facts["processed_at"], f"{facts['status']}, file in {facts['file']}{also}"))
    if not facts["deliveries"] and facts["status"] not in ("failed", "rejected"):
        missing.append(("-", "no recipients"))
    for at, text in [*sorted(came, key=itemgetter(0)), *missing]:
        click.echo(hop(at, text))
    if facts["error"]:
        click.echo(hop("why", printable(facts["error"])))


def _hops(delivery: dict[str, Any]) -> list[tuple[str | None, str]]:
    """The hops of one delivery, in order; a time that is None has not come."""
    name = delivery["recipient"]
    if name == ORCHESTRATOR:
        return [(delivery["read_at"], "handled by the relay itself")]
    again = f", attempt {delivery['attempt']}" if delivery["attempt"] > 1 else ""
    hops = [
        (delivery["staged_at"], f"accepted for {name}{again}"),
        (delivery["written_at"], f"written to the inbox of {name}{again}"),
        (delivery["read_at"], f"read by {name}"),
    ]
    if delivery["state"] in ENDED:
        also = f", tried again at {delivery['due_at']}" if delivery["due_at"] else ""
        hops = [(at, text) for at, text in hops[1:] if at]  # how far it came
        said = f"{delivery['state']} for {name}: {delivery['error']}{also}"
        hops.append((None if hops else delivery["staged_at"], said))
    if delivery["acked_at"]:
        hops.append((delivery["acked_at"], f"acknowledged by {name}: {delivery['ack_status']}"))
    return hops
