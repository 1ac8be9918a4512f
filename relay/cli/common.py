"""Helpers of all commands: the home, common options, output as JSON or tables."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from relay.base import fsio
from relay.base.clock import duration_ms, parse_time
from relay.base.discovery import (
    HOME_VARIABLE,
    default_home,
    default_root,
    has_config,
    search,
    two_homes,
    with_home,
)
from relay.base.errors import InvalidName, RelayError, UnsafePath
from relay.base.finding import Finding, Severity
from relay.base.home import META, TOP_DIRS, TOP_FILES, Home, lock_home
from relay.base.names import (
    MSG_SUFFIX,
    NAME_VARIABLE,
    OPERATOR,
    is_agent_name,
)
from relay.base.text import json_line, visible
from relay.base.text import plural as plural  # for the commands
from relay.cli.tables import print_table
from relay.views.times import ago as ago  # for the commands
from relay.views.times import when as when
from relay.views.times import with_iso_times as with_iso_times

if TYPE_CHECKING:
    from agent_sdk import Received

F = TypeVar("F", bound=Callable[..., Any])
NAMED_HOME = "relay.home"  # in a context's `meta`: the home that hints have to name
USED_HOME = "relay.used"  # likewise: the home of the command
READERS = ("inbox", "unread", "top", "guide")  # commands that show the inbox, or text to be copied
COMMAND = "relay.command"  # likewise: the context of the command that works on the home
ADVICE_S = 60  # between two lines about unread messages
TEMP = "tmp"  # of the home: nothing is written there
SCANNED = 300  # newest messages in which completion looks for channels and threads
_NAMED_IN = re.compile(  # of agents' texts: nothing that a shell would carry out
    rb"^(?:TO: #|ACTION: channel[.]create\nCHANNEL: )(?P<channel>[\w/-]+)$"
    rb"|^THREAD: (?P<thread>[A-Za-z0-9._:-]{1,128})$",
    re.MULTILINE,
)


def complete_agents(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of an agent."""
    with contextlib.suppress(RelayError, OSError), _completed_home(ctx) as home:
        return sorted(name for name in home.agent_names() if name.startswith(incomplete))
    return []


def complete_channels(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a channel that recent messages name."""
    return _recently_named(ctx, "channel", incomplete)


def complete_threads(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete a thread that recent messages name."""
    return _recently_named(ctx, "thread", incomplete)


def complete_recipients(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete an address: an agent, or a channel after ``#``."""
    if incomplete.startswith("#"):
        return [f"#{name}" for name in complete_channels(ctx, param, incomplete[1:])]
    return complete_agents(ctx, param, incomplete)


def _completed_home(ctx: click.Context) -> Home:
    given = ctx.params.get("home") or ctx.find_root().params.get("home")
    return Home(default_root(given))


def _recently_named(ctx: click.Context, what: str, incomplete: str) -> list[str]:
    """Names in the newest originals; the store has them all, but takes too long to open."""
    import glob

    found: set[str] = set()
    with contextlib.suppress(RelayError, OSError), _completed_home(ctx) as home:
        files = []
        for day in sorted(os.listdir(home.path("archive")), reverse=True):
            for path in glob.glob("*/*" + MSG_SUFFIX, root_dir=home.path("archive", day)):
                files.append((os.path.basename(path), home.path("archive", day, path)))
            if len(files) >= SCANNED:
                break
        for _, path in sorted(files, reverse=True)[:SCANNED]:
            with contextlib.suppress(RelayError, OSError):
                data, _ = fsio.read_regular(path, None, 4096, shared=True, narrow=False)
                found |= {match[what].decode() for match in _NAMED_IN.finditer(data) if match[what]}
    return sorted(name for name in found if name.startswith(incomplete))


def not_empty(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse the path of an unset variable. Errors: BadParameter."""
    if value == "":
        raise click.BadParameter("it is empty: expected a path", ctx, param)
    return value


def check_no_home_file(path: str) -> str:
    """Return the real path of a file that a command is to write.

    Errors: UnsafePath for a file that is part of a relay home, such as its ledger.
    """
    real = Path(os.path.realpath(path))
    for folder in real.parents if real.exists() else ():
        if real.relative_to(folder).parts[0] in (*TOP_DIRS, *TOP_FILES) and has_config(str(folder)):
            raise UnsafePath(
                f"{path} is a file of the relay home {folder}, and is not replaced",
                hint="name another file",
            )
    return str(real)


def _check_own_name(ctx: click.Context, param: click.Parameter, name: str) -> str:
    """Name the variable that has a wrong name. Errors: InvalidName."""
    if name == os.environ.get(NAME_VARIABLE) and not is_agent_name(name):
        raise InvalidName(f"${NAME_VARIABLE}: {name!r} is not a valid name")
    return name


json_option = click.option("--json", "as_json", is_flag=True, help="JSON lines for programs.")
as_option = click.option(
    "--as",
    "agent",
    metavar="NAME",
    shell_complete=complete_agents,
    default=lambda: os.environ.get(NAME_VARIABLE, OPERATOR),
    callback=_check_own_name,
    help=f"Act as this agent [${NAME_VARIABLE}, {OPERATOR}].",
)
attach_option = click.option(
    "--attach",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    help="Send this file with it; repeatable.",
)


class Read(click.ParamType[Any]):
    """A value that ``read`` makes of a text; its ValueError says what was expected."""

    def __init__(self, name: str, read: Callable[[str], object]) -> None:
        """Name it as the help shows it."""
        self.name, self.read = name, read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert a text; a default may be a value."""
        try:
            return self.read(value) if isinstance(value, str) else value
        except ValueError as exc:
            self.fail(str(exc), param, ctx)


def duration(least_s: float = 0, most_s: float = 10**9, bare: str = "s") -> Read:
    """Seconds of a duration; ``bare``: the unit of a bare number, empty if it must have one."""
    least_ms, most_ms = int(least_s * 1000), int(most_s * 1000)
    return Read("duration", lambda text: duration_ms(text, bare, least_ms, most_ms) / 1000)


DURATION = duration()
WAIT = duration(0.001)  # longer than nothing
AGE = duration(bare="")  # of what is deleted permanently: days meant must not be seconds
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # that end a command from outside
TIME = Read("time", parse_time)  # Unix nanoseconds


def command(
    name: str | None = None, *, of: click.Group | None = None, json: bool = True, **attributes: Any
) -> Callable[[Callable[..., object]], click.Command]:
    """A command of a group, or of `relay`, that takes the context, ``home``, and ``as_json``.

    ``json`` False: it has no --json.
    """

    def make(call: Callable[..., object]) -> click.Command:
        function = click.pass_context(call)
        if json:
            json_option(function)
            options = function.__click_params__  # type: ignore[attr-defined]
            options.insert(0, options.pop())  # click reverses them: the last one in the help
        home_option(function)
        maker = click.command if of is None else of.command
        return maker(name, **attributes)(function)

    return make


def home_option(command: F) -> F:
    """Accept ``--home`` after the command's name as well as before it, where the help shows it."""
    return click.option("--home", "home", metavar="DIR", hidden=True)(command)


def root_of(ctx: click.Context, home: str | None) -> str:
    """Return the home's path: the command's --home, the group's, or what ``discovery`` chooses.

    Errors: BadParameter for an empty --home, which comes from an unset variable; UnsafePath for a
    home that was found and is refused.
    """
    given = given_home(ctx, home)
    ctx.meta[COMMAND] = ctx
    root = default_root(given)
    found, pinned = search(), os.environ.get(HOME_VARIABLE) or root
    usual = found.root if found else default_home()
    is_found = root == usual == os.path.abspath(pinned)  # in another shell, too
    ctx.meta[NAMED_HOME] = None if is_found else root
    ctx.meta[USED_HOME] = root
    return root


def given_home(ctx: click.Context, home: str | None) -> str | None:
    """Return the --home of the command or the group. Errors: BadParameter for an empty one."""
    given = (ctx.obj or {}).get("home") if home is None else home
    if given is not None and not given.strip():
        raise click.BadParameter("it is empty; name a directory", ctx, param_hint="--home")
    return given


def root_to_take_from(ctx: click.Context, home: str | None) -> str:
    """Return the home's path, for a command that takes messages out of an inbox.

    Errors: TwoHomes when $AGENT_RELAY_DIR and the working directory mean different homes.
    """
    root = root_of(ctx, home)
    if given_home(ctx, home) is None and (error := two_homes()):
        raise error
    return root


def name_home(text: str, ctx: click.Context | None = None) -> str:
    """``with_home``, unless the commands would find this home without it.

    ``ctx``: of the command that is running, by default.
    """
    ctx = ctx or click.get_current_context(silent=True)
    root = None if ctx is None else ctx.meta.get(NAMED_HOME)
    return text if root is None else with_home(text, root)


def open_home(ctx: click.Context, home: str | None) -> Home:
    """Open the home. Errors: HomeMissing."""
    return Home(root_of(ctx, home))


def hold_lock(home: Home) -> AbstractContextManager[None]:
    """Hold the home's lock, as a command that works without a relay. Errors: AlreadyRunning."""
    return lock_home(
        home.root,
        "another process has locked the home: a starting relay, or a command like this one",
        "try again when it has finished",
    )


def not_running_text(home: Home) -> str:
    """Describe a home without a running relay: how the last one ended, and what to do."""
    from relay.base.home import unclean_stop

    stopped = unclean_stop(home)
    last = f": the last one, {stopped}" if stopped is not None else ""
    return name_home(f"no relay is running{last}; start one with `relay up`")


def advise_unread(ctx: click.Context, words: Sequence[str]) -> None:
    """Tell the person at a terminal about unread messages, on stderr after a command's output.

    ``ctx``: of the group; ``words``: the command line.
    """
    root, name = ctx.meta.get(USED_HOME), os.environ.get(NAME_VARIABLE) or OPERATOR
    is_wanted = ctx.invoked_subcommand not in READERS and "--json" not in words
    if root is None or not is_wanted or not sys.stderr.isatty() or not is_agent_name(name):
        return
    from relay.views.agents import count_unread

    if (count := count_unread(root, name)) and _is_due(os.path.join(root, TEMP)):
        click.echo(name_home(f"{count} unread for {name}; see `relay inbox`", ctx), err=True)


def _is_due(folder: str) -> bool:
    """True once in ADVICE_S: the mtime of ``folder`` says when it was last."""
    with contextlib.suppress(OSError):
        if 0 <= time.time() - os.stat(folder).st_mtime < ADVICE_S:
            return False
        os.utime(folder)
    return True


def echo_json(value: object) -> None:
    """Print one JSON object on one line."""
    click.echo(json_line(value))


def say(text: str, facts: Mapping[str, object], as_json: bool) -> None:
    """Print what a command has done or found: facts for programs, or else a text for people."""
    if as_json:
        echo_json(facts)
    else:
        click.echo(sanitize(text, lines=True))


@contextlib.contextmanager
def printing(done: str) -> Iterator[None]:
    """Print what a command has done; an error of stdout, even a closed one, says ``done`` as well.

    For what must not be done again only because it was not printed.
    """
    try:
        yield
        sys.stdout.flush()
        if getattr(sys.stdout, "name", "") == os.devnull:
            raise OSError(errno.EBADF, "stdout is closed")
    except OSError as exc:
        exc.add_note(done)
        raise


def printing_taken(message: Received) -> AbstractContextManager[None]:
    """Print a message that was taken: one that cannot be printed is found by its file."""
    return printing(f"message {message.id} is read, and is in {message.path}")


def echo_received(message: Received, **more: object) -> None:
    """Print a message that was taken as JSON, with ``more``."""
    echo_json(
        {
            "id": message.id,
            "from": message.sender,
            "to": message.to,
            "kind": str(message.kind),
            "headers": message.headers,
            "body": message.body,
            "attached": [
                {"name": attachment.name, "reference": attachment}
                for attachment in message.attachments
            ],
            **more,
        }
    )


def echo_body(body: str) -> None:
    """Print the body of a message that was taken."""
    is_person = sys.stdout.isatty()  # a pipe gets the text as sent, escape sequences included
    text = sanitize(body, lines=True) if is_person else body
    click.echo((text or "").rstrip("\n"), color=True)


_LINE_END = re.compile("\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


def echo_quoted(body: str) -> None:
    """Print a body below lines of the relay's: with a bar in front, so that no line of an agent's
    can be taken for another message, or for an answer."""
    text = sanitize(body, lines=True) if sys.stdout.isatty() else body
    quoted = _LINE_END.sub(lambda end: f"{end[0]}| ", (text or "").rstrip("\n"))
    click.echo(f"| {quoted}", color=True)


def read_agent_meta(home: Home, name: str) -> dict[str, object]:
    """Read an agent's meta.json. Errors: RelayError if it is not a JSON object."""
    from relay.views.agents import parse_meta

    meta = parse_meta(home.read_meta(name))
    if meta is None:
        raise RelayError(
            f"{home.path('agents', name, META)} is not a JSON object",
            hint="fix or remove it; it holds pid, start time, role and public key",
        )
    return meta


def print_rows(
    rows: Sequence[dict[str, Any]],
    header: Sequence[str],
    cells: Callable[[dict[str, Any]], Iterable[object]],
    *,
    as_json: bool,
    nothing: str,
    wide: bool = False,
) -> None:
    """Print rows as JSON lines or as a table; ``nothing`` is printed for an empty table."""
    if as_json:
        for row in rows:
            echo_json(row)
    elif rows:
        print_table(header, [tuple(cells(row)) for row in rows], wide=wide)
    else:
        click.echo(name_home(nothing), err=True)


def sanitize(text: str | None, most: int | None = None, *, lines: bool = False) -> str | None:
    """Escape the control characters in an agent's text.

    One line unless ``lines``; cut after ``most`` characters.
    """
    if text is None:
        return None
    clean = visible(text, keep="\n\t" if lines else "")
    return clean if most is None or len(clean) <= most else clean[: most - 1] + "…"


def findings_json(findings: Iterable[Finding]) -> dict[str, list[str]]:
    """Collect findings as the JSON keys ``problems`` and ``warnings``."""
    row: dict[str, list[str]] = {"problems": [], "warnings": []}
    for finding in findings:
        row["problems" if finding.severity is Severity.ERROR else "warnings"].append(finding.text)
    return row
