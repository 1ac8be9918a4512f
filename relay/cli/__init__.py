"""The command line, ``relay``: one module per noun; a command opens, calls one function, prints.

A command's module is imported when the command is called, so that ``relay --help`` imports neither
the daemon nor Spark. An error is one line on stderr with a hint; its exit code is that of its
class (``relay.base.errors.EXIT_CODES``).
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from relay.base.errors import EXIT_CODES, EXIT_FAILED, EXIT_INTERRUPTED, RelayError

# command -> (module, one line of help). The line is the command's own; a test compares them.
COMMANDS = {
    "init": ("relay.cli.daemon", "Create a relay home, or complete one."),
    "up": ("relay.cli.daemon", "Start the relay and return when it is ready."),
    "down": ("relay.cli.daemon", "Stop the relay after it has finished its current batch."),
    "status": ("relay.cli.daemon", "Show whether the relay is running and what it is working on."),
    "agents": ("relay.cli.agents", "List the agents and their status."),
    "register": ("relay.cli.agents", "Create an agent's mailbox, or change its role."),
    "spawn": ("relay.cli.processes", "Start an agent's process and print its pid."),
    "release": (
        "relay.cli.processes",
        "Stop an agent's process: SIGTERM, then SIGKILL after spawn.grace_s.",
    ),
    "ps": ("relay.cli.processes", "List the processes started by the relay and their state."),
    "send": ("relay.cli.messages", "Send a message."),
    "inbox": ("relay.cli.messages", "Show or take the messages in an inbox."),
    "ack": ("relay.cli.messages", "Acknowledge a message."),
    "nack": ("relay.cli.messages", "Report that a message could not be handled, and why."),
    "continuity": (
        "relay.cli.continuity",
        "Save an agent's state for its next run, load it, list saved versions.",
    ),
    "trace": ("relay.cli.trace", "Show every step of a message with its time."),
    "tail": ("relay.cli.tail", "Show events as they happen, one line each."),
    "top": ("relay.cli.top", "Show agents, queue, rates and pending answers, refreshed in place."),
    "history": ("relay.cli.history", "Show the messages in the store, newest first."),
    "thread": ("relay.cli.history", "Show the messages of one thread, oldest first."),
    "search": ("relay.cli.history", "Find messages by a regular expression."),
    "channel": ("relay.cli.channel", "Show, create and change channels."),
    "acks": ("relay.cli.acks", "Show pending answers and acknowledgments."),
    "dead": ("relay.cli.acks", "Show dead letters, replay or discard them."),
    "acomm": ("relay.cli.acomm", "Check, dump and build `.acomm` store files."),
    "aof": ("relay.cli.aof", "Check a journal stream, print its records and its manifest."),
    "journal": (
        "relay.cli.journal",
        "Show the journal's segments, and move them between the tiers.",
    ),
    "service": ("relay.cli.service", "Install the relay as a service: systemd or launchd."),
    "ledger": (
        "relay.cli.ledger",
        "Back up, restore, rebuild, check and query the ledger, show its changes.",
    ),
    "backup": (
        "relay.cli.backup",
        "Copy the whole home to the new directory DIR; the relay may be running.",
    ),
    "restore": (
        "relay.cli.backup",
        "Replace the home with the backup DIR; the relay must be stopped.",
    ),
    "prune": ("relay.cli.prune", "Remove data that has expired by the `retention` settings."),
    "archive": ("relay.cli.prune", "Pack days of the archive into one file each."),
    "key": ("relay.cli.agents", "Create and confirm the keys that agents sign with."),
    "doctor": ("relay.cli.doctor", "Check the home for problems."),
    "audit": ("relay.cli.audit", "Account for every message, on Spark."),
    "sh": ("relay.cli.daemon", "Print the path of relay.sh, to be sourced by a shell."),
}


class LazyGroup(click.Group):
    """A group that imports each command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order in which a new user needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list for ``--help`` without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


EPILOG = """\b
Examples:
  relay init && relay up
  relay send bob "the build is green"
  relay trace 1706123456789012345-a1b2c3d4
\b
Exit codes:
""" + "\n".join(f"  {code:<3}  {meaning}" for code, meaning in EXIT_CODES.items())


@click.command(cls=LazyGroup, epilog=EPILOG)
@click.option("--home", metavar="DIR", help="The relay home [$AGENT_RELAY_DIR, ~/.agent-relay].")
@click.version_option(package_name="agent-relay", prog_name="relay")
@click.pass_context
def cli(ctx: click.Context, home: str | None) -> None:
    """A local message relay for AI agents: send by dropping a file, trace every delivery."""
    ctx.obj = {"home": home}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the console script and exit with the command's exit code."""
    _open_standard_streams()
    sys.exit(run(arguments))


def _open_standard_streams() -> None:
    """Open /dev/null in place of a standard stream that is closed.

    Otherwise Python has None there, and the next file opened would get the stream's descriptor.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor: this stream's
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, mode))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code. Errors are printed here and nowhere else."""
    try:
        result: Any = cli.main(arguments, prog_name="relay", standalone_mode=False)
    except click.exceptions.Abort:
        return EXIT_INTERRUPTED
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except click.exceptions.NoArgsIsHelpError as exc:
        exc.show()  # a group without a command: print its help
        return exc.exit_code
    except click.ClickException as exc:
        _print_error(_rephrase(exc.format_message()), _help_of(exc))
        return exc.exit_code
    except RelayError as exc:
        _print_error(str(exc), exc.hint)
        return exc.exit_code
    except BrokenPipeError:
        sys.stderr.close()  # the reader has closed the pipe
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as exc:
        _print_error(f"{exc.filename or 'system'}: {exc.strerror or exc}", _hint_of(exc))
        return EXIT_FAILED
    return result if isinstance(result, int) else 0


def _rephrase(message: str) -> str:
    """Replace the names of click's classes in its message."""
    for click_name, plain in (("integer range", "integer"), ("float range", "number")):
        message = message.replace(f"is not a valid {click_name}", f"is not a valid {plain}")
    return message.rstrip(".")


def _help_of(exc: click.ClickException) -> str:
    """Return a hint at the help of the command that was used wrongly."""
    ctx = getattr(exc, "ctx", None)
    return f"see `{ctx.command_path} --help`" if ctx is not None else ""


def _user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _hint_of(exc: OSError) -> str:
    """Return a hint for an error of the system, or nothing if its own text suffices."""
    if exc.errno in (errno.EACCES, errno.EPERM):
        return f"user {_user()} lacks permission; check with `ls -ld`"
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space on that disk, then try again"
    if exc.errno == errno.EROFS:
        return "remount it read-write, or choose another path"
    return ""


def _print_error(message: str, hint: str) -> None:
    """Print one line on stderr, without the control characters that an agent's text may contain."""
    from relay.cli.common import sanitize

    line = " ".join(f"relay: {message}{'; ' + hint if hint else ''}".split())
    click.echo(sanitize(line), err=True)
