"""What the commands share: the home, JSON, times for people."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click

from relay.base.clock import elapsed, iso_time
from relay.base.errors import RelayError
from relay.base.home import META, Home, default_root
from relay.base.names import MSG_SUFFIX, OPERATOR
from relay.base.text import json_line, visible

F = TypeVar("F", bound=Callable[..., Any])
AGENT_VARIABLE = "AGENT_RELAY_NAME"

json_option = click.option("--json", "as_json", is_flag=True, help="JSON lines for programs.")
as_option = click.option(
    "--as",
    "agent",
    metavar="NAME",
    default=lambda: os.environ.get(AGENT_VARIABLE, OPERATOR),
    help=f"The agent to be [${AGENT_VARIABLE}, {OPERATOR}].",
)


class Amount(click.FloatRange):
    """A number that there is: neither nan nor infinite, which pass for any range."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is no number", param, ctx)
        return number


def home_option(command: F) -> F:
    """``--home`` behind the command's name as well as before it."""
    return click.option("--home", "home", metavar="DIR", help="The relay home.")(command)


def root_of(ctx: click.Context, home: str | None) -> str:
    """The home's path: the command's --home, the group's, $AGENT_RELAY_DIR, ~/.agent-relay.

    Errors: BadParameter for an empty --home: a variable that is not set must not mean another one.
    """
    given = (ctx.obj or {}).get("home") if home is None else home
    if given is not None and not given.strip():
        raise click.BadParameter("it is empty: name a directory", ctx, param_hint="--home")
    return default_root(given)


def open_home(ctx: click.Context, home: str | None) -> Home:
    """The home. Errors: HomeMissing with what to do."""
    return Home(root_of(ctx, home))


def no_relay(home: Home) -> str:
    """The line for a home where no relay runs: how the last one ended, and what to do."""
    from relay.base.lock_file import left

    gone = left(home)
    told = f": the last one, {gone}" if gone is not None else ""
    return f"no relay runs{told}; start one with `relay up`"


def unread(home: Home) -> dict[str, int]:
    """The number of messages in each agent's inbox, whatever their state otherwise.

    Who has no inbox that can be listed is not in it.
    """
    found: dict[str, int] = {}
    for name in home.agent_names():
        with contextlib.suppress(OSError), os.scandir(home.path("agents", name, "inbox")) as files:
            found[name] = sum(one.name.endswith(MSG_SUFFIX) for one in files)
    return found


def echo_json(value: object) -> None:
    """One JSON object on one line."""
    click.echo(json_line(value))


def columns(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Plain columns for people, as wide as they must be; whatever is in a cell can be seen."""
    table = [header, *([("-" if c is None else visible(str(c))) for c in row] for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    for row in table:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo(line.rstrip())


def parse_meta(data: bytes | None) -> dict[str, object] | None:
    """A meta.json's object, empty where there is no such file; None where it holds none."""
    try:
        value = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def meta_of(home: Home, name: str) -> dict[str, object]:
    """What is in an agent's meta.json. Errors: RelayError where that is no JSON object."""
    meta = parse_meta(home.read_meta(name))
    if meta is None:
        raise RelayError(
            f"{home.path('agents', name, META)} is no JSON object",
            hint="mend it, or remove it: it holds pid, start time, role and public key",
        )
    return meta


def show_rows(
    rows: Sequence[dict[str, Any]],
    header: Sequence[str],
    cells: Callable[[dict[str, Any]], Iterable[object]],
    *,
    as_json: bool,
    nothing: str,
) -> None:
    """Each row as a JSON line, or as columns; where there is none, a person reads ``nothing``."""
    if as_json:
        for row in rows:
            echo_json(row)
    elif rows:
        columns(header, [tuple(cells(row)) for row in rows])
    else:
        click.echo(nothing, err=True)


def printable(text: str | None, most: int | None = None, *, lines: bool = False) -> str | None:
    """Text of others for a person's terminal: no control character reaches it.

    One line unless ``lines``; cut after ``most`` characters.
    """
    if text is None:
        return None
    clean = visible(text, keep="\n\t" if lines else "")
    return clean if most is None or len(clean) <= most else clean[: most - 1] + "…"


def counted(number: int, what: str) -> str:
    """``1 error``, ``2 errors``."""
    return f"{number} {what}{'s' * (number != 1)}"


def when(at_ns: int | None) -> str | None:
    """A time for people and programs, or None where it is not known."""
    return None if at_ns is None else iso_time(at_ns)


def ago(at_ns: int | None, now_ns: int) -> str:
    """How long ago, for people: ``3 s``, ``5 min``, ``2 h``, ``4 d``."""
    if at_ns is None:
        return "never"
    return elapsed(now_ns - at_ns)
