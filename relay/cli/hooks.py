"""``relay hooks``: the hooks that bring messages into the sessions of agent CLIs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial

import click

from relay.base.errors import RelayError
from relay.base.names import check_agent_name
from relay.cli.common import echo_json, home_option, json_option, root_of
from relay.reach import settings
from relay.reach.settings import Changed
from relay.reach.vendors import VENDORS, Vendor

_vendors = click.argument("vendor", nargs=-1, type=click.Choice(list(VENDORS)))
_scope = click.option(
    "--user/--project",
    "user",
    default=False,
    help="The user's settings, or those of the working directory.  [default: project]",
)
_dry_run = click.option(
    "--dry-run", is_flag=True, help="Print what would change, and change nothing."
)


@click.group(
    epilog="\b\nExamples:\n  relay hooks install claude\n  relay hooks install codex --user\n"
    "  relay hooks status\n  relay hooks remove claude",
)
def hooks() -> None:
    """Install the hooks that bring messages into the context of agent CLIs."""


@hooks.command(
    epilog="\b\nExamples:\n  relay hooks install claude\n  relay hooks install --user codex"
)
@_vendors
@_scope
@click.option("--as", "name", metavar="NAME", help="The agent's name [$AGENT_RELAY_NAME].")
@click.option("--mcp", is_flag=True, help="Register `relay mcp` as an MCP server, too.")
@_dry_run
@home_option
@click.pass_context
def install(
    ctx: click.Context,
    vendor: tuple[str, ...],
    home: str | None,
    name: str | None,
    *,
    user: bool,
    mcp: bool,
    dry_run: bool,
) -> None:
    """Add hooks to the settings of Claude Code, Codex or Gemini; all three without VENDOR.

    Entries of others stay as they are; a copy of the file as it was is beside it, with the ending
    `.before-relay`. A session is the agent $AGENT_RELAY_NAME, or NAME, or has the vendor's name.
    """
    options = ["--home", root_of(ctx, home)] if home or ctx.obj.get("home") else []
    if name is not None:
        options += ["--as", check_agent_name(name)]
    command, folder = relay_command(), _folder(user=user)
    for one in settings.chosen(vendor):
        path = settings.hooks_path(one, folder, user=user)
        changes = [partial(settings.with_hooks, one, path, command, options)]
        if mcp:
            server = settings.mcp_path(one, folder, user=user)
            changes.append(partial(settings.with_server, server, command, options))
        _carry_out(one, changes, "installed", dry_run=dry_run)
        if one.advice and not dry_run:
            click.echo(f"  {one.advice}")


@hooks.command(epilog="\b\nExamples:\n  relay hooks remove\n  relay hooks remove claude --user")
@_vendors
@_scope
@_dry_run
@click.pass_context
def remove(ctx: click.Context, vendor: tuple[str, ...], *, user: bool, dry_run: bool) -> None:
    """Remove exactly the hooks, and the MCP server, that `relay hooks install` added."""
    folder = _folder(user=user)
    for one in settings.chosen(vendor):
        path = settings.hooks_path(one, folder, user=user)
        server = settings.mcp_path(one, folder, user=user)
        changes = [
            partial(settings.without_hooks, one, path),
            partial(settings.without_server, server),
        ]
        _carry_out(one, changes, "removed", dry_run=dry_run)


@hooks.command(epilog="\b\nExamples:\n  relay hooks status\n  relay hooks status codex --json")
@_vendors
@home_option
@json_option
@click.pass_context
def status(ctx: click.Context, vendor: tuple[str, ...], home: str | None, as_json: bool) -> None:
    """Show where hooks are installed, and when one last fired."""
    root = root_of(ctx, home)
    for one in settings.hook_states(root, os.getcwd(), vendor):
        if as_json:
            echo_json(one._asdict() | {"text": one.text})
        else:
            click.echo(f"{one.vendor:<7} {one.scope:<8} {one.text}")
            if one.events or one.problem:
                click.echo(f"{'':<16} {one.path}")


def relay_command() -> list[str]:
    """The words that start this program, with an absolute path."""
    for path in (sys.argv[0], shutil.which("relay")):
        if path and os.path.basename(path) == "relay" and os.access(path, os.X_OK):
            return [os.path.abspath(path)]
    raise RelayError(
        "the program `relay` was not found", hint="install it, so that it is in your PATH"
    )


def _folder(*, user: bool) -> str:
    return os.path.expanduser("~") if user else os.getcwd()


def _carry_out(
    vendor: Vendor, changes: Sequence[Callable[[], Changed]], done: str, *, dry_run: bool
) -> None:
    """Make the changes one after the other: two may be of one file."""
    written: set[str] = set()
    for make in changes:
        change = make()
        if not change.is_change:
            text = "has them already" if done == "installed" else "has none of ours"
            click.echo(f"{vendor.name}: {change.path} {text}")
        elif dry_run:
            _show(change)
        else:
            settings.write(change, keep=change.path not in written)
            written.add(change.path)
            click.echo(f"{vendor.name}: {done} in {change.path}")


def _show(change: Changed) -> None:
    import difflib

    before, after = (change.before or "").splitlines(), (change.after or "").splitlines()
    for line in difflib.unified_diff(before, after, change.path, change.path, lineterm=""):
        click.echo(line)
