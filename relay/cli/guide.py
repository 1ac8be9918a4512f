"""``relay guide``: the page that tells an agent how to use the relay."""

from __future__ import annotations

import click

from relay.base.names import NAME_VARIABLE
from relay.cli.common import NAMED_HOME, home_option, root_of


@click.command(
    epilog="""\b
Examples:
  relay guide >> CLAUDE.md
  relay guide --as reviewer --for codex >> AGENTS.md
  relay guide --as worker --for sh
  relay config set spawn.clis.claude '["claude", "-p", "{prompt}"]'   # without the page""",
)
@home_option
@click.option(
    "--as",
    "agent",
    metavar="NAME",
    envvar=NAME_VARIABLE,
    help=f"The agent's name [${NAME_VARIABLE} in the agent's own environment].",
)
@click.option(
    "--for",
    "tool",
    type=click.Choice(["claude", "codex", "gemini", "sh", "python"]),
    default="claude",
    show_default=True,
    help="What the agent is.",
)
@click.pass_context
def guide(ctx: click.Context, home: str | None, agent: str | None, tool: str) -> None:
    """Print a page for an agent: how to send, read and answer messages, and what it owes.

    Without a name the page is for every agent that is started with its name in AGENT_RELAY_NAME.
    Agents that the relay starts as claude, codex or gemini get the page before their prompt.
    """
    import shlex

    from relay.agents.guide import guide as page
    from relay.base.names import check_agent_name

    if agent is not None:
        check_agent_name(agent)
    root = root_of(ctx, home)
    command = f"relay --home {shlex.quote(root)}" if NAMED_HOME in ctx.meta else "relay"
    click.echo(page(agent, root, tool, command), nl=False)
