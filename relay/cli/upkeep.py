"""``relay backup``, ``restore`` and ``prune``: copies of a home, and what is too old in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from relay.base.clock import Clock, local_time
from relay.base.config import load
from relay.base.home import is_served
from relay.cli.common import (
    command,
    echo_json,
    hold_lock,
    open_home,
    plural,
    sanitize,
    when,
)
from relay.cli.common import root_of as home_root
from relay.cli.request import control_options, send_command
from relay.cli.tables import print_table

if TYPE_CHECKING:
    from relay.daemon.home_backup import BackupManifest
    from relay.daemon.prune import Pruned

MIB = 1 << 20


@command(epilog="\b\nExample:\n  relay backup /backup/monday")
@click.argument("directory", metavar="DIR", type=click.Path())
def backup(ctx: click.Context, home: str | None, directory: str, as_json: bool) -> None:
    """Copy the whole home to the new directory DIR; the relay may be running.

    Contains ledger, store, journal, mailboxes, archive, attachments, saved states, keys and
    config.json, but not the logs. It includes private keys: protect it like the home. DIR appears
    only when the copy is complete.
    """
    from relay.daemon import home_backup

    with open_home(ctx, home) as opened:
        config = load(opened)
        done = home_backup.backup(opened, config, Clock(), directory)
    if as_json:
        echo_json({"directory": directory, **_facts(done.manifest), "left_out": done.left_out})
        return
    click.echo(sanitize(f"backed up to {directory}: {_sizes(done.manifest)}, keys among them"))
    for line in done.left_out:
        click.echo(sanitize(f"left out: {line}"))


@command(
    epilog="\b\nExamples:\n  relay restore /backup/monday\n"
    "  relay --home ~/other restore /backup/monday\n"
    "  relay down; relay restore --force /backup/monday && relay up"
)
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option("--force", is_flag=True, help="Replace an existing home; the old one is kept.")
def restore(
    ctx: click.Context, home: str | None, directory: str, force: bool, as_json: bool
) -> None:
    """Replace the home with the backup DIR; the relay must be stopped.

    Every file is checked against the backup's list before anything is changed. An existing home is
    kept as HOME.before-restore. Never run a home and its copy at the same time.
    """
    from relay.daemon import home_restore

    root = home_root(ctx, home)
    done = home_restore.restore(directory, root, force=force)
    if as_json:
        echo_json({"home": root, "aside": done.aside or None, **_facts(done.manifest)})
        return
    kept = f"; the previous home is now {done.aside}" if done.aside else ""
    at = f"as it was at {done.manifest.at}"
    click.echo(sanitize(f"restored {root} {at}: {_sizes(done.manifest)}{kept}"))


def _facts(manifest: BackupManifest) -> dict[str, object]:
    return {
        "at": manifest.at,
        "home_id": manifest.home_id,
        "files": len(manifest.files),
        "bytes": sum(one.size for one in manifest.files),
    }


def _sizes(manifest: BackupManifest) -> str:
    size = sum(one.size for one in manifest.files)
    return f"{plural(len(manifest.files), 'file')}, {size / MIB:.1f} MiB"


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
