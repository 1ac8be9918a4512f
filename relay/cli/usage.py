"""``relay help`` and ``relay completion``: about the command line itself."""

from __future__ import annotations

from collections.abc import Iterator

import click

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
@click.option("--all", "is_all", is_flag=True, help="Also the help of every command below it.")
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
    for number, one in enumerate(_with_all_below(context) if is_all else [context]):
        click.echo("\n\n" * (number > 0) + one.get_help())


def _with_all_below(context: click.Context) -> Iterator[click.Context]:
    """A command and all commands below it, in the order of their lists."""
    yield context
    if isinstance(group := context.command, click.Group):
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            if not command.hidden:
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
