"""``relay attention``: what waits for a person; ``relay approve`` and ``deny`` answer questions."""

from __future__ import annotations

import os
import time
from typing import Any

import click

from relay.base.clock import NS_PER_S
from relay.base.errors import EXIT_FINDINGS, NotFound, Refused, RelayError
from relay.base.home import Home
from relay.base.message import Kind
from relay.base.names import options_of
from relay.cli.common import (
    DURATION,
    ago,
    as_option,
    command,
    echo_json,
    home_option,
    json_option,
    name_home,
    open_home,
    root_of,
    sanitize,
    when,
)
from relay.cli.tables import screen_columns, table_lines, wide_option
from relay.views.attention import FOREVER, Item, tell_new
from relay.views.attention import attention as waiting
from relay.views.attention import hush as leave_out
from relay.views.ids import short_ids

COMMAND_S = 30  # for the operator's command
WIDE = 100  # columns
HEADER = ("AGE", "KIND", "WHO", "WHAT", "DO")
YES = ("yes", "approve", "allow", "ok")
NO = ("no", "deny", "reject")


@click.group(
    invoke_without_command=True,
    epilog="""\b
Examples:
  relay attention
  relay attention --count
  relay attention hush 3f6777fc --for 2h""",
)
@click.option("--count", "is_count", is_flag=True, help="Print how many there are; for a prompt.")
@click.option("--notify", is_flag=True, hidden=True, help="Run attention.command if it is new.")
@home_option
@wide_option
@json_option
@click.pass_context
def attention(
    ctx: click.Context, home: str | None, is_count: bool, notify: bool, wide: bool, as_json: bool
) -> int:
    """List what waits for you, the newest last, each with the command that settles it.

    Questions and requests to the operator, unread mail, agents that are blocked, failing, or gone
    or idle while they owe answers, dead letters, refusals that their sender has not read, held
    messages, bells that do not run, errors that `relay doctor` finds. Exit code 3: something waits.
    """
    if ctx.invoked_subcommand is not None:
        ctx.obj = {"home": root_of(ctx, home)}
        return 0
    now = time.time_ns()
    with open_home(ctx, home) as opened:
        items = _items(opened, now)
        if notify:
            tell_new(opened, items, lambda new: _run_command(opened, new, len(items)))
            return 0
    if is_count:
        echo_json({"count": len(items)}) if as_json else click.echo(len(items))
    elif as_json:
        for item in items:
            told = {"at": when(item.at or None), "command": name_home(item.command)}
            echo_json(item._asdict() | told)
    elif items:
        _show(_rows(items, now), screen_columns(wide=wide))
    else:
        click.echo(name_home("nothing waits for you"), err=True)
    return EXIT_FINDINGS if items else 0


@attention.result_callback()
def _exit_code(code: int, **_: Any) -> int:
    return code


def _run_command(home: Home, new: list[Item], count: int) -> None:
    """Run the operator's command. It hears of kind and name, never of what a message says.

    Errors: RelayError if it fails or takes longer than half a minute.
    """
    import subprocess

    from relay.base.config import load

    if not (command := load(home).attention.command):
        return
    facts = {"COUNT": count, "NEW": len(new), "KIND": new[-1].kind, "WHO": new[-1].who or ""}
    env = {f"AGENT_RELAY_ATTENTION_{name}": str(value) for name, value in facts.items()}
    nothing = subprocess.DEVNULL
    try:
        subprocess.run(
            command,
            env={**os.environ, **env},
            stdin=nothing,
            stdout=nothing,
            stderr=nothing,
            timeout=COMMAND_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as exc:
        hint = "see attention.command in config.json"
        raise RelayError(f"{command[0]}: {exc}", hint=hint) from exc


def _items(home: Home, now_ns: int) -> list[Item]:
    from relay.doctor import examine

    return waiting(home, examine(home, quick=True), now_ns)


def _show(rows: list[tuple[object, ...]], columns: int | None) -> None:
    """A line for each; on a narrow terminal its command has one of its own, so that it is whole."""
    if columns is None or columns >= WIDE:
        for line in table_lines(HEADER, rows, columns, flexible=("WHAT",)):
            click.echo(line)
        return
    first, *lines = table_lines(HEADER[:-1], [row[:-1] for row in rows], columns)
    click.echo(first)
    for line, row in zip(lines, rows, strict=True):
        click.echo(f"{line}\n     {row[-1]}")


def _rows(items: list[Item], now_ns: int) -> list[tuple[object, ...]]:
    short = short_ids(item.id for item in items if item.id)

    def shown(text: str) -> str:
        for whole, digits in short.items():
            text = text.replace(whole, digits)
        return text

    return [
        (
            ago(item.at, now_ns) if item.at else None,
            item.kind,
            item.who,
            sanitize(item.what),
            name_home(shown(item.command)),
        )
        for item in items
    ]


@command(of=attention, json=False, epilog="\b\nExample:\n  relay attention hush 3f6777fc --for 2h")
@click.argument("which", metavar="ID|WHO")
@click.option("--for", "for_s", type=DURATION, help="So long; otherwise until it begins anew.")
def hush(ctx: click.Context, home: str | None, which: str, for_s: float | None) -> None:
    """Leave out what waits about a message or an agent, until it begins anew.

    WHO is a word of the column WHO, or for what has none, of the column KIND.
    """
    now = time.time_ns()
    until = FOREVER if for_s is None else now + int(for_s * NS_PER_S)
    with open_home(ctx, home) as opened:
        items = _items(opened, now)
        short = {digits: whole for whole, digits in short_ids(i.id for i in items if i.id).items()}
        wanted = short.get(which, which)
        names = [(item, {item.key, item.id, item.who or item.kind}) for item in items]
        found = [item for item, known in names if wanted in known]
        if not found:
            raise NotFound(f"nothing waits about {which!a}", hint="see `relay attention`")
        for item in found:
            leave_out(opened, item, until)
            click.echo(sanitize(f"hushed {item.kind}: {item.what}"))


@command(epilog='\b\nExamples:\n  relay approve 3f6777fc\n  relay approve 3f6777fc "on Monday"')
@as_option
@click.argument("message_id", metavar="ID")
@click.argument("words", default="")
def approve(ctx: click.Context, message_id: str, words: str, **given: Any) -> int:
    """Answer a question with yes, or the option that means it; WORDS are added.

    The first answer counts. Another one, from a second terminal or a page, is refused and says when
    the question was answered. Any other option: `relay reply ID OPTION`.
    """
    return _decide(ctx, message_id, words, YES, **given)


@command(epilog='\b\nExample:\n  relay deny 3f6777fc "not before the release"')
@as_option
@click.argument("message_id", metavar="ID")
@click.argument("words", default="")
def deny(ctx: click.Context, message_id: str, words: str, **given: Any) -> int:
    """Answer a question with no, or the option that means it; WORDS are added."""
    return _decide(ctx, message_id, words, NO, **given)


def _decide(
    ctx: click.Context,
    given: str,
    words: str,
    meant: tuple[str, ...],
    home: str | None,
    agent: str,
    as_json: bool,
) -> int:
    from relay.cli.messages import reply
    from relay.views.message import read_message

    message = read_message(root_of(ctx, home), given)
    if message.file.kind is not Kind.QUERY:
        hint = f"`relay ack {message.id} completed` or `relay nack {message.id} WHY`"
        if message.file.kind is not Kind.COMMAND:
            hint = f"`relay reply {message.id} TEXT`" if message.file.kind is Kind.MESSAGE else ""
        raise Refused(f"message {message.id} is a {message.file.kind}, not a question", hint=hint)
    options = options_of(message.file.headers.get("OPTIONS"))
    answer = next((each for each in options if each.lower() in meant), "")
    if options and not answer:
        raise Refused(
            f"the options of {message.id} are {', '.join(options)}: none of them means {meant[0]}",
            hint=f"`relay reply {message.id} OPTION`",
        )
    body = "\n\n".join(filter(None, (answer or meant[0], words)))
    code: int = ctx.invoke(
        reply, home=home, agent=agent, message_id=message.id, body=body, as_json=as_json
    )
    return code
