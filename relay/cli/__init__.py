"""The command line, ``relay``: one module per noun; a command opens, calls one function, prints.

A command's module is imported when the command is called, or the list is printed. An error is one
line on stderr with a hint; its exit code is that of its class (``relay.base.errors.EXIT_CODES``).
^C ends a command with 130, a reader that closes the pipe with 141; neither is an error. After ^C
one line names what the command leaves behind.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import click

from relay.base.errors import (
    BAD_VALUE_ERRORS,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_PIPE_CLOSED,
    EXIT_USAGE,
    Interrupted,
    RelayError,
    RelayWarning,
)

# Module, and the commands in it, in the order in which a new user needs them.
_MODULES = """
daemon     init up down status
agents     agents register
processes  spawn release ps logs
messages   send
inbox      inbox
show       show
messages   reply wait resend cancel
show       attachment
messages   ack nack
usage      guide
continuity continuity
show       trace
tail       tail
attention  attention approve deny
top        top
watch      watch
web        web
listing    list thread search
channel    channel
listing    open unread failed
dead       dead
check      check
dump       dump build
journal    journal
config     config where
service    service
upkeep     ledger backup restore prune
key        key
hooks      hooks
wake       wake bell
hooks      mcp
check      doctor
audit      audit
daemon     sh
usage      completion help
"""
COMMANDS = {
    name: "relay.cli." + module
    for module, *names in map(str.split, _MODULES.strip().splitlines())
    for name in names
}
# The lines of `relay --help`, by what a reader wants to do.
SECTIONS = {
    "Send and answer": {
        "send": "Send a message.",
        "inbox": "Show or take the messages in an inbox.",
        "show attachment": "Show a whole message and its answers; get its files.",
        "reply approve deny": "Answer a message; a question with yes or no.",
        "ack nack": "Say that a message is done, or why it is not.",
        "wait": "Wait until it is delivered, read, done or answered.",
        "resend cancel": "Send a message again; take one back that is not read.",
        "channel": "Show, create and change channels.",
        "guide sh mcp": "For an agent: a page to read, a shell library, tools.",
    },
    "See what became of it": {
        "attention": "What waits for you, and what settles it.",
        "list": "Messages by words and keys, such as is:open.",
        "open unread failed": "The same by name: who owes an answer, and so on.",
        "thread search": "One conversation; with the lines found.",
        "trace": "Show every step of a message with its time.",
        "tail watch top web": "Events, one agent, rates as they happen; a page.",
        "dead": "Show dead letters, replay or discard them.",
        "audit": "Account for every message, on Spark.",
    },
    "Agents": {
        "agents register key": "Who is there; a mailbox; a key to sign with.",
        "spawn release ps logs": "Start and end their processes, and look at them.",
        "continuity": "Keep an agent's state for its next run.",
        "hooks wake bell": "Bring messages to the sessions of agent CLIs.",
    },
    "Run a relay": {
        "init up down status": "Create a home; run its relay.",
        "doctor check dump build": "Check a home or a file; print its content.",
        "config where service": "Settings; the home; systemd or launchd.",
        "backup restore prune": "A copy of the home; what has expired is removed.",
        "ledger journal": "Query the ledger; move parts of the journal.",
        "help completion": "`relay help --all` prints every command.",
    },
}
# options and arguments that are not called like the header or field that they become
FIELDS = {
    "WORKING_DIR": ("cwd",),
    "FILTER": ("wanted",),
    "content_pattern": ("wanted", "match", "regex", "pattern"),
    "topic_pattern": ("pattern", "topic"),
}
# command -> the hint for a word too many
UNEXPECTED = {
    "inbox": "`relay inbox --as {}` shows the messages of one agent",
    "unread": "`relay inbox --as {}` shows the messages of one agent",
    "send": "put a text of several words in quotes",
    "reply": "put a text of several words in quotes",
}
_EXTRA = re.compile(r"unexpected extra arguments? \((\S+).*\)")
COMPLETE_VARIABLE = "_RELAY_COMPLETE"  # set by the script of `relay completion`


class LazyGroup(click.Group):
    """A group that imports each command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order in which a new user needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name])
        command = getattr(module, cmd_name, None) or getattr(module, f"{cmd_name}_")
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list for ``--help`` without importing anything."""
        for title, rows in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(names.replace(" ", ", "), text) for names, text in rows.items()]
                )


EPILOG = """\b
Examples:
  relay init && relay up
  relay send bob "the build is green"
  relay trace 1706123456789012345-a1b2c3d4"""


@click.command(
    cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option("--home", metavar="DIR", help="The relay home [see `relay where --help`].")
@click.version_option(package_name="agent-relay", prog_name="relay")
@click.pass_context
def cli(ctx: click.Context, home: str | None) -> None:
    """A message relay for AI agents: send by dropping a file, trace every delivery."""
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
            opened = open(os.devnull, mode)  # the lowest free descriptor: this stream's
            os.set_inheritable(opened.fileno(), True)
            setattr(sys, name, opened)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code. Errors are printed here and nowhere else."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    context = None
    try:
        if COMPLETE_VARIABLE in os.environ:
            return _complete(os.environ[COMPLETE_VARIABLE])
        with _warnings_in_one_line(), cli.make_context("relay", words) as context:
            result = _invoke(context)
    except (click.exceptions.Abort, KeyboardInterrupt) as exc:
        _end_line()
        _print_notes(exc)
        return EXIT_INTERRUPTED
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except click.exceptions.NoArgsIsHelpError as exc:
        exc.show()  # a group without a command: print its help
        return exc.exit_code
    except click.ClickException as exc:
        _print_error(*_usage_error(exc))
        return exc.exit_code
    except UnicodeEncodeError as exc:  # a word of the command line that is not UTF-8
        _print_error(f"expected text in UTF-8, got {exc.object[:60]!a}", "")
        return EXIT_USAGE
    except RelayError as exc:
        if isinstance(exc, Interrupted):
            _end_line()
        _print_error(_in_user_words(exc, context), exc.hint, context)
        return exc.exit_code
    except BrokenPipeError as exc:
        _discard_output()
        _print_notes(exc)
        return EXIT_PIPE_CLOSED
    except OSError as exc:
        _print_error(*_system_error(exc))
        return EXIT_FAILED
    if isinstance(result, int) and result:
        return result
    from relay.cli.common import advise_unread

    advise_unread(context, words)
    return 0


def _end_line() -> None:
    """End the line of a terminal that shows ^C."""
    if sys.stderr.isatty():
        click.echo(err=True)


def _complete(instruction: str) -> int:
    """Print what a shell asks for: the completions of a command line, or the script for them."""
    from click.shell_completion import shell_complete

    return shell_complete(cli, {}, "relay", COMPLETE_VARIABLE, instruction)


def _invoke(ctx: click.Context) -> Any:
    """Run the command of a command line; an error that a value in the ledger causes names it."""
    try:
        return cli.invoke(ctx)
    except BAD_VALUE_ERRORS as exc:
        from relay.base.home import LEDGER
        from relay.cli.common import USED_HOME
        from relay.ledger.check import reason_of_error

        root = ctx.meta.get(USED_HOME)
        if root is None or (reason := reason_of_error(os.path.join(root, LEDGER))) is None:
            raise
        raise reason from exc


def _usage_error(exc: click.ClickException) -> tuple[str, str]:
    """Return the message and the hint for a wrong command line.

    The hint is the word that was probably meant, or else the command's help.
    """
    from relay.base.names import is_agent_name
    from relay.base.text import did_you_mean

    ctx: click.Context | None = getattr(exc, "ctx", None)
    if ctx is None:
        return _rephrase(exc.format_message()), ""
    see = f"see `{ctx.command_path} --help`"
    if (extra := _EXTRA.search(exc.format_message())) and ctx.command.name in UNEXPECTED:
        see = UNEXPECTED[ctx.command.name].format(extra[1])
    option, command = getattr(exc, "option_name", None), getattr(exc, "command_name", None)
    if isinstance(exc, click.NoSuchOption) and option:
        options = [each for each in ctx.command.get_params(ctx) if isinstance(each, click.Option)]
        known = [name for each in options for name in each.opts]
        return f"no such option '{option}'", did_you_mean(option, known) or see
    if command and isinstance(ctx.command, click.Group):
        known = ctx.command.list_commands(ctx)
        if ctx.command.name == "agents" and is_agent_name(command):
            see = f"`relay agents show {command}` shows an agent"
        return f"no such command '{command}'", did_you_mean(command, known) or see
    return _rephrase(exc.format_message()), see


def _rephrase(message: str) -> str:
    """Replace the names of click's classes in its message."""
    for click_name, plain in (("integer range", "integer"), ("float range", "number")):
        message = message.replace(f"is not a valid {click_name}", f"is not a valid {plain}")
    return message.rstrip(".")


def _in_user_words(exc: RelayError, ctx: click.Context | None) -> str:
    """Name the option or argument of the command, where the error names the header it becomes."""
    from relay.cli.common import COMMAND

    text = str(exc)
    field, mark, rest = text.removeprefix("header ").partition(" ")
    if not (text.startswith("header ") or field.isupper() or field.endswith(":")):
        return text
    if (used := None if ctx is None else ctx.meta.get(COMMAND)) is None:
        return text
    names = (field.rstrip(":").lower(), *FIELDS.get(field.rstrip(":"), ()))
    default = click.core.ParameterSource.DEFAULT  # the field is then of `--header`
    params = {param.name: param for param in used.command.params}
    for found in names:
        if found in params and used.get_parameter_source(found) is not default:
            param = params[found]
            is_option = isinstance(param, click.Option)
            name = max(param.opts, key=len) if is_option else param.human_readable_name
            return f"{name}{':' * field.endswith(':')}{mark}{rest}"
    return text


def _user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _system_error(exc: OSError) -> tuple[str, str]:
    """Return the message and the hint for an error of the system."""
    text = exc.strerror or str(exc)
    if exc.filename is not None:
        text = f"{exc.filename}: {text}"
    elif exc.errno == errno.ENOENT and not _has_directory():
        text = "the working directory does not exist any more"
    elif _is_output_stuck():
        _discard_output()
        return "; ".join((f"the output could not be written: {text}", *_notes_of(exc))), ""
    return "; ".join((text, *_notes_of(exc))), _hint_of(exc)


def _has_directory() -> bool:
    """False in a working directory that was removed, which Python's error does not name."""
    try:
        return bool(os.getcwd())
    except OSError:
        return False


def _notes_of(exc: BaseException) -> list[str]:
    """Return what an error says was done nevertheless."""
    return getattr(exc, "__notes__", [])


def _print_notes(exc: BaseException) -> None:
    for note in _notes_of(exc):
        _print_error(note, "")


def _is_output_stuck() -> bool:
    """True if stdout holds text that it cannot write, for example on a full disk."""
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _discard_output() -> None:
    """Send what stdout still holds to /dev/null, so that Python's exit does not fail on it."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)


def _hint_of(exc: OSError) -> str:
    """Return a hint for an error of the system, or nothing if its own text suffices."""
    if exc.errno in (errno.EACCES, errno.EPERM):
        return f"user {_user()} lacks permission; check with `ls -ld`"
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space on that disk"
    if exc.errno == errno.EROFS:
        return "remount it, let the sandbox write there, or choose another path"
    return ""


@contextlib.contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Print warnings of the SDK like errors, for example that the disk is full."""

    def show(warning: Warning | str, *_: object) -> None:
        _print_error(str(warning), "")

    with warnings.catch_warnings():
        warnings.simplefilter("always", RelayWarning)
        warnings.showwarning = show  # type: ignore[assignment]
        yield


def _print_error(message: str, hint: str, ctx: click.Context | None = None) -> None:
    """Print one line on stderr, without the control characters that an agent's text may contain.

    The commands that it names have the --home of the command that failed.
    """
    from relay.cli.common import name_home, sanitize

    line = name_home(f"{message}{'; ' + hint if hint else ''}", ctx)
    click.echo(sanitize(" ".join(f"relay: {line}".split())), err=True)
