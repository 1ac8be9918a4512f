"""``relay agents`` and ``relay register``."""

from __future__ import annotations

import json
import time

import click

from relay.cli.common import (
    ago,
    columns,
    echo_json,
    home_option,
    json_option,
    open_home,
    printable,
    when,
)
from relay.errors import RelayError
from relay.home import LEDGER, META
from relay.names import check_agent_name


@click.command(epilog="\b\nExamples:\n  relay agents\n  relay agents --json")
@home_option
@json_option
@click.pass_context
def agents(ctx: click.Context, home: str | None, as_json: bool) -> None:
    """List the agents there are.

    Seen: when it last wrote or read. Unread: messages that stand in its inbox.
    """
    from relay.ledger import open_readonly

    with open_home(ctx, home) as opened:
        db = open_readonly(opened.path(LEDGER))
        rows = db.execute(
            "SELECT name, status, pid, registered_at, last_seen_at, note, (SELECT count(*) "
            "FROM deliveries WHERE recipient = name AND state = 'written') AS unread "
            "FROM agents ORDER BY name"
        ).fetchall()
        roles = {row["name"]: _role(opened.read_meta(row["name"])) for row in rows}
        db.close()
    if as_json:
        for row in rows:
            echo_json(
                {
                    "name": row["name"],
                    "status": row["status"],
                    "role": roles[row["name"]],
                    "pid": row["pid"],
                    "registered_at": when(row["registered_at"]),
                    "last_seen_at": when(row["last_seen_at"]),
                    "unread": row["unread"],
                    "note": row["note"],
                }
            )
        return
    now = time.time_ns()
    columns(
        ("NAME", "STATUS", "ROLE", "SEEN", "UNREAD", "NOTE"),
        [
            (
                row["name"],
                row["status"],
                roles[row["name"]],
                ago(row["last_seen_at"], now),
                row["unread"],
                printable(row["note"], 40),
            )
            for row in rows
        ],
    )


@click.command(
    epilog="\b\nExamples:\n  relay register bob\n  relay register alice --role lead",
)
@home_option
@click.argument("name")
@click.option("--role", type=click.Choice(["lead", "member"]), help="`TO: Lead` means the lead.")
@json_option
@click.pass_context
def register(
    ctx: click.Context, home: str | None, name: str, role: str | None, as_json: bool
) -> None:
    """Make an agent's mailbox, or change its role.

    Needed for a role alone: a directory made by `mkdir -p` is an agent, too.
    """
    from relay import fsio

    check_agent_name(name)
    with open_home(ctx, home) as opened:
        opened.make_agent(name)
        if role is not None:
            meta = _meta(opened.read_meta(name))
            if meta is None:
                raise RelayError(
                    f"{opened.path('agents', name, META)} is no JSON object",
                    hint="mend it, or remove it: it holds pid, start time, role and public key",
                )
            path = opened.path("agents", name, META)
            fsio.write_atomic(path, json.dumps(meta | {"role": role}).encode())
        meta_role = _role(opened.read_meta(name))
    if as_json:
        echo_json({"name": name, "role": meta_role})
    else:
        click.echo(f"{name} has a mailbox at {opened.path('agents', name)}")


def _meta(data: bytes | None) -> dict[str, object] | None:
    """A meta.json's object; None where it is none."""
    try:
        value = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _role(data: bytes | None) -> str | None:
    """The role in a meta.json; None where there is none or it cannot be read."""
    role = (_meta(data) or {}).get("role")
    return role if isinstance(role, str) else None
