"""``relay backup`` and ``relay restore``: copy a whole home, and put a copy back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from relay.cli.common import echo_json, home_option, json_option, open_home, plural, sanitize
from relay.cli.common import root_of as home_root

if TYPE_CHECKING:
    from relay.daemon.home_backup import BackupManifest

MIB = 1 << 20


@click.command(epilog="\b\nExample:\n  relay backup /backup/monday")
@home_option
@click.argument("directory", metavar="DIR", type=click.Path())
@json_option
@click.pass_context
def backup(ctx: click.Context, home: str | None, directory: str, as_json: bool) -> None:
    """Copy the whole home to the new directory DIR; the relay may be running.

    Contains ledger, store, journal, mailboxes, archive, attachments, saved states, keys and
    config.json, but not the logs. It includes private keys: protect it like the home. DIR appears
    only when the copy is complete.
    """
    from relay.base import config as configuration
    from relay.base.clock import Clock
    from relay.daemon import home_backup

    with open_home(ctx, home) as opened:
        config = configuration.load(opened)
        done = home_backup.backup(opened, config, Clock(), directory)
    if as_json:
        echo_json({"directory": directory, **_facts(done.manifest), "left_out": done.left_out})
        return
    click.echo(sanitize(f"backed up to {directory}: {_sizes(done.manifest)}, keys among them"))
    for line in done.left_out:
        click.echo(sanitize(f"left out: {line}"))


@click.command(
    epilog="\b\nExamples:\n  relay restore /backup/monday\n"
    "  relay --home ~/other restore /backup/monday\n"
    "  relay down; relay restore --force /backup/monday && relay up",
)
@home_option
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option("--force", is_flag=True, help="Replace an existing home; the old one is kept.")
@json_option
@click.pass_context
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
