"""``relay failed`` and ``relay dead``: what was not delivered or not done, and dead letters.

Failures are read from the ledger, dead letters from the store file; replay, discard and purge are
commands to the relay.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from relay.base.clock import NS_PER_S, iso_time
from relay.base.errors import InvalidName, NotFound
from relay.base.home import LEDGER
from relay.cli.common import (
    AGE,
    TIME,
    check_agents,
    complete_agents,
    echo_json,
    home_option,
    json_option,
    open_home,
    print_rows,
    sanitize,
)
from relay.cli.history import message_facts, read_store, wait_for_flush
from relay.cli.ids import begins, resolve_id, short_ids
from relay.cli.request import control_options, send_command
from relay.cli.tables import limit_option, local_iso, wide_option
from relay.ledger import NOT_CANCELLED

if TYPE_CHECKING:
    from relay.engine import DeadLetter, Engine


FAILED = f"""
SELECT *, count(*) OVER () AS total FROM (
    SELECT message_id AS id, coalesce(processed_at, discovered_at) AS at, agent_name AS "from",
           target AS "to", message_type AS kind, 'refused' AS outcome, last_error AS reason
    FROM messages WHERE status = 'failed'
    UNION ALL
    SELECT CASE WHEN file_name LIKE '%.msg' THEN substr(file_name, 1, length(file_name) - 4)
                ELSE file_name END,
           at, agent, NULL, NULL, 'refused', reason
    FROM rejections
    UNION ALL
    SELECT m.message_id,
           max(coalesce(d.acked_at, 0), coalesce(d.read_at, 0), coalesce(d.staged_at, 0),
               m.discovered_at),
           m.agent_name, d.recipient, m.message_type,
           CASE WHEN d.ack_status = 'failed' THEN 'failed'
                WHEN d.state IN ('bounced', 'dead', 'expired') THEN d.state
                ELSE 'unanswered' END,
           CASE WHEN d.ack_status = 'failed' THEN d.answer_text
                WHEN d.state IN ('bounced', 'dead', 'expired') THEN d.last_error
                ELSE iif(d.state = 'written', 'not read', 'read')
                     || CASE d.reminders WHEN 0 THEN '' WHEN 1 THEN ', reminded once'
                          WHEN 2 THEN ', reminded twice'
                          ELSE ', reminded ' || d.reminders || ' times' END END
    FROM deliveries AS d JOIN messages AS m USING (message_id)
    WHERE (d.state IN ('bounced', 'dead', 'expired') OR d.ack_status = 'failed'
       OR d.obligation = 'given_up') AND {NOT_CANCELLED}
)
WHERE at >= :since AND (:agent IS NULL OR :agent IN ("from", "to"))
ORDER BY at DESC LIMIT :limit
"""


@click.command(
    epilog="""\b
Examples:
  relay failed --since 1d
  relay failed --agent bob""",
)
@home_option
@click.option(
    "--agent",
    metavar="NAME",
    shell_complete=complete_agents,
    help="Only messages from or to this agent.",
)
@click.option("--since", type=TIME, default=0, help="10m ago, 14:05, '2026-11-20 18:30'.")
@limit_option
@wide_option
@json_option
@click.pass_context
def failed(
    ctx: click.Context,
    home: str | None,
    agent: str | None,
    since: int,
    limit: int,
    wide: bool,
    as_json: bool,
) -> None:
    """Show messages that were refused, bounced, given up or failed, newest first, and why.

    refused: by the relay; failed: the recipient sent a nack; dead: no acknowledgment after the last
    attempt; unanswered: the relay no longer waits for the answer.
    """
    from relay.ledger.file import open_readonly

    wanted = {"since": since, "agent": agent, "limit": limit}
    with open_home(ctx, home) as opened:
        with contextlib.closing(open_readonly(opened.path(LEDGER))) as db:
            rows = list(map(dict, db.execute(FAILED, wanted)))
        if not rows:
            check_agents(opened, agent)
    total = max((row.pop("total") for row in rows), default=0)
    for row in rows:
        row["at"] = iso_time(row["at"])
    short = short_ids(row["id"] for row in rows)
    print_rows(
        rows,
        ("ID", "AT", "FROM", "TO", "KIND", "STATUS", "REASON"),
        lambda row: (
            *(short[row["id"]], local_iso(row["at"]), row["from"], row["to"], row["kind"]),
            *(row["outcome"], row["reason"]),
        ),
        as_json=as_json,
        nothing="nothing failed",
        wide=wide,
    )
    if len(rows) < total and not as_json:
        click.echo(f"{len(rows)} of {total}; --limit shows more", err=True)


@click.group(
    epilog="""\b
Examples:
  relay dead list
  relay dead replay 1706123456789012345-a1b2c3d4
  relay dead purge --older-than 7d""",
)
def dead() -> None:
    """Show dead letters, replay or discard them.

    A message becomes a dead letter for a recipient that has not acknowledged it after the last
    attempt.
    """


@dead.command("list", epilog="\b\nExample:\n  relay dead list --json | jq -r .id")
@home_option
@wide_option
@json_option
@click.pass_context
def list_dead(ctx: click.Context, home: str | None, wide: bool, as_json: bool) -> None:
    """List the dead letters, oldest message first."""
    with open_home(ctx, home) as opened:
        wait_for_flush(opened)
        store = read_store(opened)
    rows = [_dead_facts(store, letter) for letter in store.retries.dead_letters()]
    short = short_ids(row["id"] for row in rows if row["id"])
    print_rows(
        rows,
        ("ID", "AT", "FROM", "DEAD FOR", "ATTEMPTS", "REASON"),
        lambda row: (
            *(short.get(row["id"], row["number"]), local_iso(row["dead_at"]), row["from"]),
            *(", ".join(row["dead_for"]), row["attempts"], row["reason"]),
        ),
        as_json=as_json,
        nothing="no dead letters",
        wide=wide,
    )


@dead.command("show", epilog="\b\nExample:\n  relay dead show 1706123456789012345-a1b2c3d4")
@home_option
@click.argument("message_id", metavar="ID")
@json_option
@click.pass_context
def show_dead(ctx: click.Context, home: str | None, message_id: str, as_json: bool) -> None:
    """Show one dead letter, with its content."""
    with open_home(ctx, home) as opened:
        wait_for_flush(opened)
        store = read_store(opened)
    known = [
        _dead_facts(store, letter) | {"content": letter.message.content.decode(errors="replace")}
        for letter in store.retries.dead_letters()
    ]
    found = [facts for facts in known if message_id in (facts["id"], str(facts["number"]))] or [
        facts for facts in known if message_id and begins(facts["id"] or "", message_id)
    ]
    if not found:
        raise NotFound(f"dead letter {message_id!a} does not exist", hint="see `relay dead list`")
    if len(found) > 1:
        raise NotFound(f"several dead letters match {message_id}", hint="use more digits")
    (facts,) = found
    if as_json:
        echo_json(facts)
        return
    for label in ("id", "from", "dead_for", "channel", "type", "attempts", "dead_at", "reason"):
        value = local_iso(facts[label]) if label == "dead_at" else facts[label]
        said = ", ".join(value) if isinstance(value, list) else str(value)
        click.echo(f"{label.replace('_', ' '):<10}{sanitize(said)}")
    click.echo()
    click.echo(sanitize(facts["content"], lines=True))


@dead.command(epilog="\b\nExample:\n  relay dead replay 1706123456789012345-a1b2c3d4")
@control_options
@click.argument("message_id", metavar="ID")
def replay(ctx: click.Context, /, message_id: str, **caller: Any) -> None:
    """Deliver a dead letter again, to the recipients for whom it is dead.

    In a paused channel it waits; a draining or closed channel refuses it.
    """
    send_command(ctx, "dead.replay", {"ID": _whole_id(ctx, caller, message_id)}, **caller)


def _whole_id(ctx: click.Context, caller: Mapping[str, Any], given: str) -> str:
    """Return the whole id; what names no message goes to the relay as it is, which refuses it."""
    with open_home(ctx, caller["home"]) as opened, contextlib.suppress(NotFound, InvalidName):
        return resolve_id(opened, given)
    return given


@dead.command(epilog="\b\nExample:\n  relay dead discard 1706123456789012345-a1b2c3d4")
@control_options
@click.argument("message_id", metavar="ID")
def discard(ctx: click.Context, /, message_id: str, **caller: Any) -> None:
    """Discard a dead letter permanently."""
    send_command(ctx, "dead.discard", {"ID": _whole_id(ctx, caller, message_id)}, **caller)


@dead.command(epilog="\b\nExample:\n  relay dead purge --older-than 7d")
@control_options
@click.option("--older-than", required=True, type=AGE, help="10m, 2h or 7d; 0s: all.")
def purge(ctx: click.Context, /, older_than: float, **caller: Any) -> None:
    """Discard all dead letters older than this. The unit is required: it cannot be undone."""
    send_command(ctx, "dead.purge", {"OLDER_THAN": math.ceil(older_than)}, **caller)


def _dead_facts(store: Engine, letter: DeadLetter) -> dict[str, Any]:
    facts = message_facts(store, letter.message)
    tried = store.state.deliveries.get(letter.message.id, {})
    attempts = [tried[name].attempt for name in letter.recipients if name in tried]
    return {
        "id": facts["id"],
        "number": facts["number"],
        "from": facts["from"],
        "dead_for": list(letter.recipients),
        "channel": facts["channel"],
        "type": facts["type"],
        "attempts": max(attempts, default=letter.message.retry_count + 1),
        "reason": letter.last_error,
        "dead_at": iso_time(letter.dead_lettered_at * NS_PER_S)[:19] + "Z",
        "sent_at": facts["at"],
    }
