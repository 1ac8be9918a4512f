"""``relay hooks`` and ``relay mcp``: messages and tools in the sessions of agent CLIs."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import shutil
import sys

import click

from relay.base.discovery import user_home
from relay.base.errors import RelayError
from relay.base.home import Home
from relay.base.names import NAME_VARIABLE, check_agent_name
from relay.base.outcomes import Progress, Wait
from relay.cli.common import (
    command,
    complete_agents,
    duration,
    echo_json,
    given_home,
    open_home,
    root_of,
    root_to_take_from,
    sanitize,
)
from relay.reach import settings_file
from relay.reach.settings import Scope, chosen, hook_states
from relay.reach.settings_file import Change
from relay.reach.vendors import ASKED, REWAKE, REWAKE_TEXT, VENDORS, Vendor
from relay.views.ids import resolve_id
from relay.views.times import with_iso_times

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


@command(
    of=hooks,
    json=False,
    epilog="""\b
Examples:
  relay hooks install claude
  relay hooks install --user codex""",
)
@_vendors
@_scope
@click.option("--as", "name", metavar="NAME", help="The agent's name [$AGENT_RELAY_NAME].")
@click.option("--mcp", is_flag=True, help="Register `relay mcp` as an MCP server, too.")
@click.option(
    "--approvals",
    "ask_s",
    type=duration(10, 3600),
    is_flag=False,
    flag_value="2m",
    help="Ask the operator about permission requests, so long [2m]; Claude Code and Codex.",
)
@_dry_run
def install(
    ctx: click.Context,
    vendor: tuple[str, ...],
    home: str | None,
    name: str | None,
    *,
    user: bool,
    mcp: bool,
    ask_s: float | None,
    dry_run: bool,
) -> None:
    """Add hooks to the settings of Claude Code, Codex, Gemini or agy; of all if none is named.

    Entries of others stay as they are; a copy of the file as it was is beside it, with the ending
    `.before-relay`. A project's hooks of Claude Code are in .claude/settings.local.json, which is
    yours alone; those that an earlier version put into settings.json are moved. A session is the
    agent $AGENT_RELAY_NAME, or NAME, or has the vendor's name.

    With --approvals a permission request is a question to the operator, answered by `relay approve`
    or `deny`. No answer in time, or no relay: the agent CLI's own dialog asks.

    Nothing is installed where a message would come twice: beside hooks of the other scope, and
    beside a hook that runs `relay inbox --take`.
    """
    options = []
    if given_home(ctx, home) is not None:
        with open_home(ctx, home) as opened:
            options = ["--home", opened.root]
    if name is not None:
        options += ["--as", check_agent_name(name)]
    command, wait_s = relay_command(), int(ask_s or 0)
    plans = [
        (scope.vendor, scope.installation(command, options, mcp=mcp, ask_s=wait_s))
        for scope in _scopes(vendor, user=user)
    ]
    for one, changes in plans:
        if dry_run:
            _explain(one, wait_s)
        _carry_out(one, changes, "installed", "has them already", dry_run=dry_run)
        if one.advice and not dry_run:
            click.echo(f"  {one.advice}")


@hooks.command(epilog="\b\nExamples:\n  relay hooks remove\n  relay hooks remove claude --user")
@_vendors
@_scope
@_dry_run
@click.pass_context
def remove(ctx: click.Context, vendor: tuple[str, ...], *, user: bool, dry_run: bool) -> None:
    """Remove exactly the hooks, and the MCP server, that `relay hooks install` added.

    A file that was not changed since is put back as it was, and its copy is removed.
    """
    plans = [(scope.vendor, scope.removal()) for scope in _scopes(vendor, user=user)]
    for one, changes in plans:
        _carry_out(one, changes, "removed", "has none of ours", dry_run=dry_run)


@command(of=hooks, epilog="\b\nExamples:\n  relay hooks status\n  relay hooks status codex --json")
@_vendors
def status(ctx: click.Context, vendor: tuple[str, ...], home: str | None, as_json: bool) -> None:
    """Show where hooks are installed, when one last fired, and what is wrong with them."""
    root = root_of(ctx, home)
    for state in hook_states(root, os.getcwd(), vendor):
        if as_json:
            echo_json(with_iso_times(state._asdict()) | {"text": state.text})
        else:
            click.echo(f"{state.vendor:<7} {state.scope:<8} {state.text}")
            if state.events or state.problem:
                click.echo(f"{'':<16} {state.path}")
            for fault in state.faults:
                click.echo(sanitize(f"{'':<16} {fault}"))


def relay_command() -> list[str]:
    """The words that start this program, with an absolute path where `relay` is not enough.

    `relay` is enough where PATH has this very program, and not in an environment of venv or conda,
    whose directory an agent CLI started elsewhere would not have in its PATH.
    """
    in_path, this = shutil.which("relay"), sys.argv[0]
    if os.path.basename(this) != "relay" or not os.access(this, os.X_OK):
        this = in_path or ""
    if not this:
        raise RelayError(
            "the program `relay` was not found", hint="install it, so that it is in your PATH"
        )
    is_activated = sys.prefix != sys.base_prefix or os.path.isdir(f"{sys.prefix}/conda-meta")
    is_inside = is_activated and this.startswith(os.path.join(sys.prefix, ""))
    if in_path and not is_inside and os.path.samefile(in_path, this):
        return ["relay"]
    return [os.path.abspath(this)]


def _scopes(names: tuple[str, ...], *, user: bool) -> list[Scope]:
    folder = user_home() if user else os.getcwd()
    return [Scope(vendor, folder, is_user=user) for vendor in chosen(names)]


def _carry_out(
    vendor: Vendor, changes: list[Change], done: str, nothing: str, *, dry_run: bool
) -> None:
    """Make the changes of one vendor, or show them."""
    for change in changes:
        if not change.is_change:
            click.echo(f"{vendor.name}: {change.path} {nothing}")
        elif dry_run:
            _show(change)
        else:
            settings_file.write(change)
            is_moved = done == "installed" and change.keeps is False
            click.echo(f"{vendor.name}: {'moved from' if is_moved else f'{done} in'} {change.path}")


def _explain(vendor: Vendor, ask_s: int) -> None:
    """Say what the hook of each event does."""
    for event in vendor.events:
        click.echo(f"{vendor.name}, at {event}: {vendor.text(event)}.")
        if (vendor.name, event) == REWAKE:
            click.echo(f"{vendor.name}, at {event}: {REWAKE_TEXT}.")
        if event == ASKED and ask_s:
            text = f"asks the operator through the relay for {ask_s} s, then the dialog asks"
            click.echo(f"{vendor.name}, at {event}: {text}.")


def _show(change: Change) -> None:
    import difflib

    before, after = (change.before or "").splitlines(), (change.after or "").splitlines()
    for line in difflib.unified_diff(before, after, change.path, change.path, lineterm=""):
        click.echo(line)


@command(
    json=False,
    epilog="""\b
Examples:
  relay mcp
  claude mcp add agent-relay --env AGENT_RELAY_NAME=alice -- relay mcp""",
)
@click.option(
    "--as",
    "agent",
    metavar="NAME",
    default="",
    shell_complete=complete_agents,
    help=f"The agent, unless hooks or {NAME_VARIABLE} name it.",
)
def mcp(ctx: click.Context, home: str | None, agent: str) -> None:
    """Serve an agent's tools over stdio: send, inbox, answer, channel, trace, agents, search.

    An MCP client starts it. The agent is that of the session which hooks have bound for this
    client, else AGENT_RELAY_NAME of the environment, else --as. Needs the extra `mcp`.
    """
    if importlib.util.find_spec("mcp") is None:
        raise RelayError(
            "the tools need the package mcp",
            hint="`pip install '.[mcp]'` in the source of agent-relay; the relay runs without",
        )
    from relay.reach.mcp import ToolServer

    if agent:
        check_agent_name(agent)
    root = root_to_take_from(ctx, home)
    Home(root).close()  # an error here is seen in the client's log; later ones by the agent

    ToolServer(root, agent, run_command, progress_of, id_of).run()


def id_of(root: str, text: str) -> str:
    """Return the id of the message that ``text`` names. Errors: InvalidName; NotFound."""
    with Home(root) as home:
        return resolve_id(home, text)


def progress_of(root: str, message_id: str, wait: Wait) -> Progress:
    """Wait until a message has come so far."""
    from relay.cli.request import watch

    with Home(root) as home:
        return watch(home, message_id, wait)


def run_command(root: str, name: str, *args: str) -> str:
    """Run a command on the home and return what it prints. Errors: RelayError.

    It takes sys.stdout: call it once at a time.
    """
    from relay.cli import cli

    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            cli.main(["--home", root, name, *args], standalone_mode=False)
    except click.ClickException as exc:
        raise RelayError(exc.format_message()) from exc
    except (click.exceptions.Exit, SystemExit):
        pass
    return printed.getvalue()
