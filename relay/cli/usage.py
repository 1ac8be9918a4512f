"""``relay help``, ``version`` and ``completion``: about the command line itself."""

from __future__ import annotations

import click

SHELLS = ("bash", "zsh", "fish")


def _complete_commands(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    root = ctx.find_root()
    assert isinstance(root.command, click.Group)
    return [name for name in root.command.list_commands(root) if name.startswith(incomplete)]


@click.command(epilog="\b\nExamples:\n  relay help\n  relay help channel create")
@click.argument("words", metavar="[COMMAND]...", nargs=-1, shell_complete=_complete_commands)
@click.pass_context
def help(ctx: click.Context, words: tuple[str, ...]) -> None:
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
    click.echo(context.command.get_help(context))


@click.command(epilog="\b\nExample:\n  relay version")
def version() -> None:
    """Show the version."""
    from importlib import metadata

    click.echo(f"relay, version {metadata.version('agent-relay')}")


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
