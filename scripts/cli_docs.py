"""Print docs/cli.md: the help of every command, and the exit codes.

.venv/bin/python -m scripts.cli_docs > docs/cli.md
"""

from __future__ import annotations

from collections.abc import Iterator

import click

from relay.base.errors import EXIT_CODES
from relay.cli import cli

WIDTH = 92


def page() -> str:
    """The whole page."""
    codes = "\n".join(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items())
    parts = [
        "# Commands\n\nMade from `--help` by `python -m scripts.cli_docs`; a test compares them.\n",
        "`--home DIR` goes before the command name; for commands that work on a home it may also"
        "\nfollow it. `acomm` and `aof` work on the given files. The default home is"
        "\n`$AGENT_RELAY_DIR`, else the nearest `.agent-relay` in or above the working directory,"
        "\nelse `~/.agent-relay`. An error is one line on stderr with what to do.\n",
        f"## Exit codes\n\n| code | meaning |\n|---|---|\n{codes}\n",
    ]
    parts += [f"## {path}\n\n```\n{text}\n```\n" for path, text in _helps(cli, "relay", None)]
    return "\n".join(parts)


def _helps(
    command: click.Command, path: str, parent: click.Context | None
) -> Iterator[tuple[str, str]]:
    """(Command line, help) of a command and its subcommands."""
    context = click.Context(
        command,
        info_name=path.rpartition(" ")[2],
        parent=parent,
        max_content_width=WIDTH,
        **command.context_settings,
    )
    context.terminal_width = WIDTH
    yield path, "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from _helps(child, f"{path} {name}", context)


if __name__ == "__main__":
    print(page(), end="")
