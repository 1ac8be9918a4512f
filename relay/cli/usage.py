"""``relay help``, ``guide`` and ``completion``: how the command line is used."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import click

from relay.base.errors import EXIT_CODES
from relay.base.names import NAME_VARIABLE, check_agent_name
from relay.cli.common import NAMED_HOME, command, root_of

SHELLS = ("bash", "zsh", "fish")


def _complete_commands(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    root = ctx.find_root()
    assert isinstance(root.command, click.Group)
    return [name for name in root.command.list_commands(root) if name.startswith(incomplete)]


@click.command(
    epilog="""\b
Examples:
  relay help
  relay help channel create
  relay help --all > commands.txt""",
)
@click.argument("words", metavar="[COMMAND]...", nargs=-1, shell_complete=_complete_commands)
@click.option(
    "--all",
    "is_all",
    is_flag=True,
    help="Also of every command below it, and what exit codes mean.",
)
@click.pass_context
def help(ctx: click.Context, words: tuple[str, ...], is_all: bool) -> None:
    """Show the help of a command.

    The same as `relay COMMAND --help`; without a command, that of relay.
    """
    context = ctx.find_root()
    for word in words:
        if not isinstance(context.command, click.Group):
            raise click.UsageError(f"`{context.command_path}` has no subcommands", context)
        _, command, _ = context.command.resolve_command(context, [word])
        assert command is not None
        context = click.Context(command, info_name=word, parent=context)
    for number, shown in enumerate(_with_all_below(context) if is_all else [context]):
        click.echo("\n\n" * (number > 0) + shown.get_help())
    if is_all:
        codes = "\n".join(f"  {code:<3}  {meaning}" for code, meaning in EXIT_CODES.items())
        click.echo(f"\n\nExit codes of all commands:\n{codes}")


def _with_all_below(context: click.Context) -> Iterator[click.Context]:
    """A command and all commands below it, in the order of their lists."""
    yield context
    if isinstance(group := context.command, click.Group):
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            yield from _with_all_below(click.Context(command, info_name=name, parent=context))


@click.command(
    epilog="""\b
Examples:
  relay completion bash >> ~/.bashrc      # takes effect in the next shell
  relay completion zsh >> ~/.zshrc        # after compinit
  relay completion fish > ~/.config/fish/completions/relay.fish""",
)
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script that completes commands and names.

    With it, Tab completes commands, options, and names of agents, channels and threads.
    """
    from click.shell_completion import get_completion_class

    from relay.cli import COMPLETE_VARIABLE, cli

    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(cli, {}, "relay", COMPLETE_VARIABLE).source())


@command(
    json=False,
    epilog="""\b
Examples:
  relay guide >> CLAUDE.md
  relay guide --as reviewer --for codex >> AGENTS.md
  relay guide --as worker --for sh
  relay config set spawn.clis.claude '["claude", "-p", "{prompt}"]'   # without the page""",
)
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
def guide(ctx: click.Context, home: str | None, agent: str | None, tool: str) -> None:
    """Print a page for an agent: how to send, read and answer messages, and what it owes.

    Without a name the page is for every agent that is started with its name in AGENT_RELAY_NAME.
    Agents that the relay starts as claude, codex or gemini get the page before their prompt.
    """
    from relay.agents.guide import guide as page

    if agent is not None:
        check_agent_name(agent)
    root = root_of(ctx, home)
    command = f"relay --home {shlex.quote(root)}" if NAMED_HOME in ctx.meta else "relay"
    click.echo(page(agent, root, tool, command), nl=False)
