"""The command line: ``relay``. One file a noun; a command opens, calls one function, prints.

Subcommands are imported when they are called: ``relay --help`` answers at once and imports
neither the daemon nor Spark. Errors are one line on stderr with what to do, and the exit code of
their class (``relay.base.errors.EXIT_CODES``).
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
    "init": ("relay.cli.daemon", "Make a relay home, or complete one."),
    "up": ("relay.cli.daemon", "Start the relay; returns when it is ready."),
    "down": ("relay.cli.daemon", "Stop the relay; the batch in hand is finished first."),
    "status": ("relay.cli.daemon", "Show whether the relay runs and what it has in hand."),
    "agents": ("relay.cli.agents", "List the agents there are."),
    "register": ("relay.cli.agents", "Make an agent's mailbox, or change its role."),
    "spawn": ("relay.cli.processes", "Start an agent's process, and say its pid."),
    "release": (
        "relay.cli.processes",
        "End an agent's process: SIGTERM, and SIGKILL after spawn.grace_s.",
    ),
    "ps": ("relay.cli.processes", "List the processes that the relay started, and how they do."),
    "send": ("relay.cli.messages", "Send a message."),
    "inbox": ("relay.cli.messages", "Show what waits in an inbox, or take it."),
    "ack": ("relay.cli.messages", "Acknowledge a message."),
    "nack": ("relay.cli.messages", "Say that a message could not be handled, and why."),
    "continuity": (
        "relay.cli.continuity",
        "Save an agent's state for its next life, load it, list what is saved.",
    ),
    "trace": ("relay.cli.trace", "Show every hop of a message with its time."),
    "tail": ("relay.cli.tail", "Show what happens, a line an event."),
    "top": ("relay.cli.top", "Show agents, queue, rates and owed answers, and refresh them."),
    "history": ("relay.cli.history", "Show messages of the store, newest first."),
    "thread": ("relay.cli.history", "Show the messages of one thread, oldest first."),
    "search": ("relay.cli.history", "Find messages by a regular expression."),
    "channel": ("relay.cli.channel", "Show channels, make them and change them."),
    "acks": ("relay.cli.acks", "Show the answers and acknowledgments that are owed."),
    "dead": ("relay.cli.dead", "Show dead letters, send them again or let them go."),
    "acomm": ("relay.cli.acomm", "Check, dump and build `.acomm` store files."),
    "aof": ("relay.cli.aof", "Check a journal stream, print its records and its manifest."),
    "journal": ("relay.cli.journal", "Show where the journal's segments are, and move them."),
    "service": ("relay.cli.service", "Have the system start the relay: systemd or launchd."),
    "ledger": (
        "relay.cli.ledger",
        "Keep a copy of the ledger, put one back or make it again, show what changed.",
    ),
    "backup": (
        "relay.cli.backup",
        "Copy the whole home to the new directory DIR, while the relay goes on or not.",
    ),
    "restore": (
        "relay.cli.backup",
        "Put the backup DIR in the place of the home; no relay may run.",
    ),
    "prune": ("relay.cli.prune", "Remove what nobody waits for, as config.json says."),
    "archive": ("relay.cli.prune", "Pack days of the archive into one file each."),
    "key": ("relay.cli.key", "Make and confirm the keys that agents sign with."),
    "doctor": ("relay.cli.doctor", "Look for what is wrong with the home."),
    "audit": ("relay.cli.audit", "Account for every message, on Spark."),
    "sh": ("relay.cli.daemon", "Print the path of relay.sh, to be sourced by a shell."),
}


class LazyGroup(click.Group):
    """Knows its commands by name and imports each when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order in which a new user meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in ``--help``, without importing anything."""
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
    """A local message relay for AI agents: drop a file, and know what became of it."""
    ctx.obj = {"home": home}


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script. Ends the process with the exit code of what happened."""
    _open_standard_streams()
    sys.exit(run(arguments))


def _open_standard_streams() -> None:
    """Whoever closed stdin, stdout or stderr gets /dev/null: nothing is read, or shown.

    Python has None there, and the next file that is opened would take the stream's number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, mode))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code. Errors are printed here and nowhere else."""
    try:
        result: Any = cli.main(arguments, prog_name="relay", standalone_mode=False)
    except click.exceptions.Abort:
        return EXIT_INTERRUPTED
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except click.exceptions.NoArgsIsHelpError as exc:
        exc.show()  # a group without a command: its help, and no complaint
        return exc.exit_code
    except click.ClickException as exc:
        _complain(_in_our_words(exc.format_message()), _help_of(exc))
        return exc.exit_code
    except RelayError as exc:
        _complain(str(exc), exc.hint)
        return exc.exit_code
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone: nobody is left to tell
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as exc:
        _complain(f"{exc.filename or 'system'}: {exc.strerror or exc}", _hint_of(exc))
        return EXIT_FAILED
    return result if isinstance(result, int) else 0


def _in_our_words(message: str) -> str:
    """A complaint of click's without the names of its classes."""
    for theirs, ours in (("integer range", "whole number"), ("float range", "number")):
        message = message.replace(f"is not a valid {theirs}", f"is no {ours}")
    return message.rstrip(".")


def _help_of(exc: click.ClickException) -> str:
    """Where the rule stands that a command line broke."""
    ctx = getattr(exc, "ctx", None)
    return f"see `{ctx.command_path} --help`" if ctx is not None else ""


def _hint_of(exc: OSError) -> str:
    """What to do about what the system refused; nothing where its own words say it."""
    if exc.errno in (errno.EACCES, errno.EPERM):
        return f"`ls -ld` it: user {os.geteuid()} has to be allowed to"
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room on that disk, then try again"
    if exc.errno == errno.EROFS:
        return "mount it to be written, or name another place"
    return ""


def _complain(message: str, hint: str) -> None:
    """One line; what others wrote may be in it, so no control character reaches a terminal."""
    from relay.cli.common import sanitize

    line = " ".join(f"relay: {message}{'; ' + hint if hint else ''}".split())
    click.echo(sanitize(line), err=True)
