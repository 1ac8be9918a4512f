"""``relay prune``: free disk space by hand.

A running relay does it in the background; without one this process does, holding the home's lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from relay.base.clock import Clock, local_time
from relay.base.home import is_served
from relay.cli.common import echo_json, hold_lock, open_home, when
from relay.cli.request import control_options, send_command
from relay.cli.tables import print_table

if TYPE_CHECKING:
    from relay.daemon.prune import Pruned


@click.command(epilog="\b\nExamples:\n  relay prune --dry-run\n  relay prune")
@control_options
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
def prune(ctx: click.Context, /, dry_run: bool, **caller: Any) -> None:
    """Remove data that has expired by the `retention` settings.

    That is: the archive, messages that agents have read, refused files, logs of agents that are
    gone, attachments that nothing names or that were never finished, old rows of audit_log. A
    running relay does this every hour. NEXT says what goes next by its age, and when.
    """
    from agent_sdk import Timeout
    from relay.base.config import load
    from relay.daemon.housekeeper import run_retention

    with open_home(ctx, caller["home"]) as home:
        config = load(home)
        if dry_run:
            _show(run_retention(home, config, Clock(), dry_run=True), caller["as_json"])
            return
        if not is_served(home):
            with hold_lock(home):
                _show(run_retention(home, config, Clock()), caller["as_json"])
            return
    try:
        send_command(ctx, "prune", {}, **caller)
    except Timeout as exc:
        hint = "the result comes as a message, `relay inbox` shows it"
        raise Timeout(str(exc), message_id=exc.message_id, hint=hint) from exc


def _show(found: list[Pruned], as_json: bool) -> None:
    if as_json:
        for gone in found:
            echo_json(
                {
                    "kind": gone.kind,
                    "count": gone.number,
                    "bytes": gone.n_bytes,
                    "oldest": when(gone.oldest_ns),
                    "newest": when(gone.newest_ns),
                    "next_count": gone.next_number,
                    "next_at": when(gone.next_ns),
                }
            )
        return
    # A run that removes things does not look for what goes later.
    upcoming = any(gone.next_ns for gone in found)
    header = ("KIND", "COUNT", "BYTES", "OLDEST", "NEWEST", *(("NEXT",) if upcoming else ()))
    print_table(header, [_cells(gone)[: len(header)] for gone in found])


def _cells(gone: Pruned) -> tuple[object, ...]:
    times = (gone.oldest_ns, gone.newest_ns, gone.next_ns)
    oldest, newest, due = (None if at is None else local_time(at) for at in times)
    coming = f"{gone.next_number} on {due}" if due else None
    return (gone.kind, gone.number, gone.n_bytes, oldest, newest, coming)
