"""``relay mcp``: the tools for an agent's client of the Model Context Protocol."""

from __future__ import annotations

import contextlib
import importlib.util
import io

import click

from relay.base.errors import RelayError
from relay.base.home import Home
from relay.base.names import NAME_VARIABLE, check_agent_name
from relay.base.outcomes import Progress, Wait
from relay.cli.common import command, complete_agents, root_to_take_from
from relay.views.ids import resolve_id


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
    from relay.reach.mcp import serve

    if agent:
        check_agent_name(agent)
    root = root_to_take_from(ctx, home)
    Home(root).close()  # an error here is seen in the client's log; later ones by the agent

    def run(name: str, *args: str) -> str:
        return run_command(root, name, *args)

    serve(
        root,
        agent,
        run,
        lambda message_id, wait: progress_of(root, message_id, wait),
        lambda text: id_of(root, text),
    )


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
