"""Helpers of all commands: the home, common options, output as JSON or tables."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import click

from relay.base.clock import elapsed, iso_time
from relay.base.errors import RelayError
from relay.base.finding import Finding, Severity
from relay.base.home import META, Home, default_root, lock_home
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
    help=f"Act as this agent [${AGENT_VARIABLE}, {OPERATOR}].",
)


class Amount(click.FloatRange):
    """A finite number: nan and infinity pass click's range checks."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Convert and check the value."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a valid number", param, ctx)
        return number


def home_option(command: F) -> F:
    """Accept ``--home`` after the command's name as well as before it."""
    return click.option("--home", "home", metavar="DIR", help="The relay home.")(command)


def root_of(ctx: click.Context, home: str | None) -> str:
    """Return the home's path: the command's --home, the group's, $AGENT_RELAY_DIR, ~/.agent-relay.

    Errors: BadParameter for an empty --home, which comes from an unset variable.
    """
    given = (ctx.obj or {}).get("home") if home is None else home
    if given is not None and not given.strip():
        raise click.BadParameter("it is empty; name a directory", ctx, param_hint="--home")
    return default_root(given)


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

    gone = unclean_stop(home)
    last = f": the last one, {gone}" if gone is not None else ""
    return f"no relay is running{last}; start one with `relay up`"


def unread(home: Home) -> dict[str, int]:
    """Count the messages in each agent's inbox, whatever their state.

    Agents whose inbox cannot be listed are left out.
    """
    found: dict[str, int] = {}
    for name in home.agent_names():
        with contextlib.suppress(OSError), os.scandir(home.path("agents", name, "inbox")) as files:
            found[name] = sum(one.name.endswith(MSG_SUFFIX) for one in files)
    return found


def echo_json(value: object) -> None:
    """Print one JSON object on one line."""
    click.echo(json_line(value))


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print plain columns as wide as their cells, control characters escaped."""
    table = [header, *([("-" if c is None else visible(str(c))) for c in row] for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    for row in table:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo(line.rstrip())


def parse_meta(data: bytes | None) -> dict[str, object] | None:
    """Decode a meta.json: an empty object without a file, None if it is not a JSON object."""
    try:
        value = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_agent_meta(home: Home, name: str) -> dict[str, object]:
    """Read an agent's meta.json. Errors: RelayError if it is not a JSON object."""
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
) -> None:
    """Print rows as JSON lines or as a table; ``nothing`` is printed for an empty table."""
    if as_json:
        for row in rows:
            echo_json(row)
    elif rows:
        print_table(header, [tuple(cells(row)) for row in rows])
    else:
        click.echo(nothing, err=True)


def sanitize(text: str | None, most: int | None = None, *, lines: bool = False) -> str | None:
    """Escape the control characters in an agent's text.

    One line unless ``lines``; cut after ``most`` characters.
    """
    if text is None:
        return None
    clean = visible(text, keep="\n\t" if lines else "")
    return clean if most is None or len(clean) <= most else clean[: most - 1] + "…"


def plural(number: int, what: str) -> str:
    """Format a count, like ``1 error`` or ``2 errors``."""
    return f"{number} {what}{'s' * (number != 1)}"


def findings_json(findings: Iterable[Finding]) -> dict[str, list[str]]:
    """Collect findings as the JSON keys ``problems`` and ``warnings``."""
    row: dict[str, list[str]] = {"problems": [], "warnings": []}
    for finding in findings:
        row["problems" if finding.severity is Severity.ERROR else "warnings"].append(finding.text)
    return row


def echo_findings(findings: Iterable[Finding]) -> int:
    """Print findings, warnings on stderr, then the number of errors or OK; return the number."""
    errors = 0
    for finding in findings:
        if finding.severity is Severity.ERROR:
            errors += 1
            click.echo(sanitize(finding.text))
        else:
            click.echo(sanitize(f"warning: {finding.text}"), err=True)
    click.echo(f"{plural(errors, 'error')} found" if errors else "OK")
    return errors


def when(at_ns: int | None) -> str | None:
    """Format a time as ISO 8601; None stays None."""
    return None if at_ns is None else iso_time(at_ns)


def ago(at_ns: int | None, now_ns: int) -> str:
    """Format the time since then, like ``3 s``, ``5 min``, ``2 h``, ``4 d``."""
    if at_ns is None:
        return "never"
    return elapsed(now_ns - at_ns)
