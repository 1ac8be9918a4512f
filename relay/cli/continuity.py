"""``relay continuity``: state that an agent saves for its next run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from relay.base.errors import NotFound
from relay.base.home import Home
from relay.cli.common import complete_agents, echo_json, print_rows, root_of, sanitize, say
from relay.cli.request import control_options, open_agent, require_relay
from relay.views.ids import short_ids
from relay.views.names import check_agents
from relay.views.times import local_iso

if TYPE_CHECKING:
    from agent_sdk import Agent

of_option = click.option(
    "--of",
    "name",
    metavar="NAME",
    shell_complete=complete_agents,
    help="Another agent; for the operator and the lead.",
)


@click.group(
    epilog="""\b
Examples:
  relay continuity save --as bob "the parser is done; tests are next"
  relay continuity load --as bob
  relay continuity list --of bob""",
)
def continuity() -> None:
    """Save an agent's state for its next run, load it, list saved versions.

    A restarted agent gets its last saved state in its first message.
    """


@continuity.command(epilog="\b\nExample:\n  relay continuity save --as bob - < state.md")
@control_options
@click.argument("state")
def save(ctx: click.Context, /, state: str, as_json: bool, **caller: Any) -> None:
    """Save STATE as the newest version; `-` reads standard input, byte for byte."""
    data: str | bytes = sys.stdin.buffer.read() if state == "-" else state
    with _agent(ctx, **caller) as (me, timeout_s):
        version = me.save_state(data, timeout_s)
    size = len(data if isinstance(data, bytes) else data.encode())
    facts = {"agent": me.name, "version": version, "bytes": size}
    say(f"saved as version {version} ({size} bytes)", facts, as_json)


@continuity.command(epilog="\b\nExample:\n  relay continuity load --as bob --version 2 > state.md")
@control_options
@of_option
@click.option("--version", type=click.IntRange(1), help="Version to load [the latest].")
def load(
    ctx: click.Context,
    /,
    name: str | None,
    version: int | None,
    as_json: bool,
    **caller: Any,
) -> None:
    """Print a saved state, byte for byte. Exits 1 if nothing has been saved.

    On a terminal, control characters are shown as escapes.
    """
    from agent_sdk.requests import load_version

    with _agent(ctx, **caller) as (me, timeout_s):
        found = load_version(me, version, timeout_s, name)
        if not found:
            _check_agent(me, name)
    if found is None:
        hint = f"`relay continuity save --as {name or me.name} STATE` saves one"
        raise NotFound(f"{name or me.name} has no saved state", hint=hint)
    if as_json:
        echo_json({"agent": name or me.name, "version": found.version, "state": found.state})
    elif sys.stdout.isatty():  # a pipe gets the saved bytes, escape sequences included
        click.echo(sanitize(found.state, lines=True), nl=False)
    else:
        sys.stdout.buffer.write(found.state.encode())


@continuity.command("list", epilog="\b\nExample:\n  relay continuity list --as bob --json")
@control_options
@of_option
def list_(ctx: click.Context, /, name: str | None, as_json: bool, **caller: Any) -> None:
    """List the saved versions, oldest first."""
    from agent_sdk.requests import list_versions

    with _agent(ctx, **caller) as (me, timeout_s):
        found = list_versions(me, timeout_s, name)
        if not found:
            _check_agent(me, name)
    of = name or me.name
    rows = [
        {
            "agent": of,
            "version": state.version,
            "bytes": state.size,
            "saved_at": state.saved_at,
            "message_id": state.message_id,
        }
        for state in found
    ]
    short = short_ids(state.message_id for state in found)
    print_rows(
        rows,
        ("VERSION", "BYTES", "SAVED AT", "MESSAGE"),
        lambda row: (
            *(row["version"], row["bytes"], local_iso(row["saved_at"])),
            short[row["message_id"]],
        ),
        as_json=as_json,
        nothing=f"{of} has no saved state",
    )


def _check_agent(me: Agent, name: str | None) -> None:
    """Errors: NotFound for an agent that does not exist."""
    with Home(me.home) as home:
        check_agents(home, name)


@contextlib.contextmanager
def _agent(
    ctx: click.Context, home: str | None, agent: str, timeout_s: float
) -> Iterator[tuple[Agent, float]]:
    """Open the requesting agent. Errors: NotRunning; Refused, with a text safe for a terminal."""
    from agent_sdk import Refused

    root = root_of(ctx, home)
    require_relay(root)
    with open_agent(agent, root) as me:
        try:
            yield me, timeout_s
        except Refused as exc:
            raise Refused(sanitize(str(exc).strip()) or "") from exc
