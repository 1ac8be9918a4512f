"""``relay send``, ``wait``, ``reply``, ``resend``, ``ack`` and ``nack``."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from relay.base.errors import (
    EXIT_OK,
    EXIT_STATE,
    InvalidName,
    Refused,
    RelayError,
    RelayWarning,
)
from relay.base.home import Home, lock_holder
from relay.base.names import EVERYONE, ORCHESTRATOR
from relay.base.outcomes import IN_OUTBOX, NO_RECIPIENTS, Progress, Wait
from relay.cli.common import (
    WAIT,
    as_option,
    attach_option,
    command,
    complete_recipients,
    complete_threads,
    duration,
    echo_body,
    echo_json,
    not_running_text,
    printing,
    root_of,
    root_to_take_from,
    sanitize,
)
from relay.cli.request import (
    WAIT_FOR,
    answer_to,
    attaching,
    check_has_not_arrived,
    check_has_session,
    control_options,
    echo_earlier,
    echo_progress,
    mark_read,
    open_agent,
    recorded_answer,
    relay_runs,
    request,
    require_mailbox,
    send_command,
    show_answer,
    show_progress,
    wait_for_step,
    wait_option,
    watch,
)
from relay.views.ids import resolve_id
from relay.views.names import elsewhere

if TYPE_CHECKING:
    from agent_sdk import Agent
    from relay.base.home import Home

RECORD_S = 0.5  # at least, for the ledger's record of a message that the relay has taken over
MOST_UNASKED = 5  # agents that `*` may be without --yes
STEPS = ("delivered", "read", "done", "answer")


@command(
    epilog="""\b
Examples:
  relay send bob "the build is green"
  relay send '*' - < notes.txt
  relay send '#ci' --topic build.front.ok "done"
  relay send bob --kind command --thread t-1 "deploy to staging"
  relay send bob --kind query --wait answer "which branch?\""""
)
@as_option
@click.argument("to", shell_complete=complete_recipients)
@click.argument("body")
@click.option("--kind", default="message", show_default=True)
@click.option("--thread", metavar="ID", shell_complete=complete_threads, help="Its thread.")
@click.option("--re", metavar="ID", help="The message this one answers.")
@click.option("--priority", type=click.IntRange(0, 4), help="0 critical to 4 background.")
@click.option("--topic", metavar="TOPIC", help="For subscribers of it in the channel.")
@click.option(
    "--ttl",
    "ttl_s",
    type=duration(1),
    callback=lambda _c, _p, s: s and int(s),
    help="It expires if it is not delivered in this time.",
)
@click.option(
    "--delivery",
    type=click.Choice(["at-most-once", "at-least-once", "exactly-once"]),
    hidden=True,
)
@click.option(
    "-H",
    "--header",
    "lines",
    multiple=True,
    metavar="LINE",
    help="Such as 'NOT-BEFORE: 10m' or 'OPTIONS: yes, no'.",
)
@attach_option
@click.option("--due", "due_s", type=WAIT, help="When the answer is due, if not by the default.")
@click.option("--notify-idle", is_flag=True, help="Be told when the agent is idle and has read it.")
@click.option("--yes", is_flag=True, help="To '*' without asking where it is many agents.")
@wait_option
def send(
    ctx: click.Context,
    /,
    home: str | None,
    agent: str,
    to: str,
    body: str,
    files: tuple[str, ...],
    wait: Wait,
    notify_idle: bool,
    lines: tuple[str, ...],
    yes: bool,
    as_json: bool,
    **headers: Any,
) -> int:
    """Send a message.

    BODY is the text, or - for standard input. Prints the message id on stdout, and on stderr what
    became of it, for which it waits up to 2 s. Exit code 6: the relay refused it; 5: with an id, it
    waits in the outbox, as no relay is running, or has not picked it up; without, nothing is sent.

    --wait taken sends nothing without a running relay, exit code 5, and fails after the time with
    exit code 4: the message waits in the outbox. With delivered, read or done, exits as `relay
    wait`. With answer, prints the body of the answer instead: a response or message that names this
    one in RE, or an ack `completed`. Other acks are shown on stderr. With several recipients (`*`,
    a channel) the first answer counts. A nack is an error, exit code 6; a timeout is exit code 4.
    Without a running relay no answer is waited for, exit code 5.

    With --notify-idle, an ack of the relay comes into the sender's inbox when the agent is idle and
    has read the message, or a nack after its TTL, by default 24 hours. Its session needs hooks.
    """
    root = root_of(ctx, home)
    if notify_idle:
        if wait.word == "answer":
            raise click.UsageError("--notify-idle and --wait answer cannot be used together", ctx)
        check_has_session(root, to)
    if to == EVERYONE and not yes:
        _check_audience(root, agent)
    headers["headers"] = dict(_header(line) for line in lines)
    with contextlib.suppress(InvalidName):  # the error of the message names the option
        headers["re"] = headers["re"] and _resolve(root, headers["re"])
    content: str | bytes = sys.stdin.buffer.read() if body == "-" else body
    with open_agent(agent, root) as me:
        with attaching(files):
            headers["attachments"] = [me.attach(path) for path in files]
        return _send(me, to, content, as_json, wait, notify_idle, **headers)


def _header(line: str) -> tuple[str, str]:
    """Name and value of a header line, not checked yet. Errors: UsageError."""
    name, colon, value = line.partition(":")
    if not colon:
        raise click.UsageError(f"--header {line!r}: expected NAME: VALUE")
    return name.strip(), value.strip()


def _check_audience(root: str, sender: str) -> None:
    """Ask for --yes before many agents are sent something. Errors: UsageError."""
    from relay.views.agents import reached_by_all

    with Home(root) as home:
        names, woken = reached_by_all(home, sender)
    if len(names) > MOST_UNASKED:
        text = f"'*' is {len(names)} agents, and wakes {woken} of them; with --yes it is sent"
        raise click.UsageError(text)


def _send(
    me: Agent,
    to: str,
    body: str | bytes,
    as_json: bool,
    wait: Wait,
    notify_idle: bool = False,
    **options: Any,
) -> int:
    """Send a message, print its id, and on stderr what became of it; return the exit code."""
    from agent_sdk.requests import default_wait_s, idle_body

    if wait.word == "answer" and relay_runs(me.home):
        answer = request(me, to, body, wait.seconds, progress=show_progress, **options)
        show_answer(answer, as_json)
        return EXIT_OK
    unprinted: list[OSError] = []

    def print_id(message_id: str) -> None:
        try:
            _print_sent({"id": message_id, "from": me.name, "to": to}, as_json)
        except OSError as exc:
            unprinted.append(exc)  # the message is sent all the same, and waited for

    ends_at = time.monotonic() + wait.seconds
    is_waiting = wait.word != "none" and default_wait_s() > 0
    options["wait"] = default_wait_s(wait.seconds) if is_waiting else 0
    if wait.word == "taken":
        options["wait"] = f"taken={wait.seconds * 1000:.0f}ms"
    with warnings.catch_warnings():
        # The line below says the same.
        warnings.filterwarnings("ignore", ".* waits in the outbox$", RelayWarning)
        try:
            sent = me.send(to, body, on_sent=print_id, **options)
        except Refused as exc:
            text = sanitize(str(exc)) or ""  # it may quote another agent's text
            raise Refused(text, hint=elsewhere(me.home, to)) from exc
        if notify_idle:
            body = idle_body(to, options.get("ttl_s"), sent)
            me.send(ORCHESTRATOR, body, kind="command", wait=options["wait"])
    if unprinted:
        raise unprinted[0]
    if not (is_waiting or wait.word in STEPS):
        return EXIT_OK
    with Home(me.home) as home:
        if lock_holder(home) is None:
            click.echo(f"relay: it waits in the outbox: {not_running_text(home)}", err=True)
            return EXIT_STATE
        left = Wait(wait.word, max(ends_at - time.monotonic(), RECORD_S))
        if wait.word in STEPS:
            return wait_for_step(home, sent, left)
        progress = watch(home, sent, left._replace(word="taken"))
        if progress.text == NO_RECIPIENTS:  # and no refusal: the channel is sticky
            text = f"no recipients yet, {to} keeps it for those who come later"
            progress = progress._replace(text=text)
        echo_progress(progress)
    _echo_owed(me, options.get("re"))
    return EXIT_STATE if progress == IN_OUTBOX else EXIT_OK


def _echo_owed(me: Agent, message_id: str | None) -> None:
    """Say so if an answer to this message is still owed after one about it was sent."""
    if message_id:
        from relay.reach.owed import still_owed

        if owed := still_owed(me.home, me.name, message_id):
            click.echo(f"relay: {owed}", err=True)


def _print_sent(facts: dict[str, str], as_json: bool) -> None:
    """Print the id of a message that was sent."""
    with printing(f"sent as {facts['id']}"):
        echo_json(facts) if as_json else click.echo(facts["id"])


@command(
    "wait",
    json=False,
    epilog="""\b
Examples:
  relay wait 3f6777fc read=1m
  relay wait 3f6777fc answer
  id=$(relay send --wait none bob --kind command "deploy") && relay wait "$id\"""",
)
@click.argument("message_id", metavar="ID")
@click.argument("wait", metavar="[WORD[=TIME]]", type=WAIT_FOR, default="done")
def wait_(
    ctx: click.Context,
    home: str | None,
    message_id: str,
    wait: Wait,
) -> int:
    """Wait until a message is delivered, read, done or answered, for every recipient.

    \b
    taken      the relay has it
    delivered  it is in their inboxes
    read       they have taken it
    done       completed, answered, or read where no answer is expected; the default
    answer     the first answer has come: its body is printed, and it leaves the inbox

    TIME is the longest wait, 30s by default. Prints what became of it. Exit code 4: not in the time
    given; 5: not so far, and no relay is running; 6: refused, failed, bounced, expired, dead or
    removed unread.
    """
    root = root_of(ctx, home)
    with Home(root) as opened:
        known = resolve_id(opened, message_id, must_exist=True)
        if wait.word == "answer":
            return _wait_for_answer(opened, known, wait)
        return wait_for_step(opened, known, wait)


def _wait_for_answer(home: Home, message_id: str, wait: Wait) -> int:
    """Print the answer: the one that was recorded, or the one that comes to the sender."""
    from relay.views.message import read_message

    sender = read_message(home.root, message_id).sender
    if answer_id := recorded_answer(home, message_id):
        with printing(f"the answer is {answer_id}"):
            echo_body(read_message(home.root, answer_id).file.body.decode())
        mark_read(home.root, sender, answer_id)
        return EXIT_OK
    now = wait._replace(seconds=0)
    if watch(home, message_id, now).is_over or not relay_runs(home.root):
        return wait_for_step(home, message_id, now)
    with open_agent(sender, home.root) as me:
        show_answer(answer_to(me, message_id, wait.seconds, progress=show_progress), as_json=False)
    return EXIT_OK


@command(epilog="\b\nExample:\n  relay reply 3f6777fc 'main, at 4f2c1e9'")
@as_option
@click.argument("message_id", metavar="ID")
@click.argument("body")
@attach_option
@wait_option
def reply(
    ctx: click.Context,
    home: str | None,
    agent: str,
    message_id: str,
    body: str,
    files: tuple[str, ...],
    wait: Wait,
    as_json: bool,
) -> int:
    """Answer a message: to its sender, in its thread.

    The answer to a query is a response. The answered message leaves the inbox. BODY is the text, or
    - for standard input. To report that a command is done use `relay ack ID completed`.
    """
    from relay.views.message import earlier_answer, read_message

    root = root_to_take_from(ctx, home)
    require_mailbox(root, agent)
    answered = read_message(root, message_id)
    before = earlier_answer(root, agent, answered.id)
    content: str | bytes = sys.stdin.buffer.read() if body == "-" else body
    with open_agent(agent, root) as me:
        with attaching(files):
            attached = [me.attach(path) for path in files]
        code = _send(
            me,
            answered.sender,
            content,
            as_json,
            wait,
            kind="response" if answered.file.kind == "query" else "message",
            re=answered.id,
            thread=answered.file.headers.get("THREAD"),
            attachments=attached,
        )
    echo_earlier(before)
    mark_read(root, agent, answered.id)
    return code


@command(epilog="\b\nExamples:\n  relay resend 3f6777fc\n  relay resend 3f6777fc --to carol")
@click.argument("message_id", metavar="ID")
@click.option("--to", metavar="NAME", help="Another recipient.")
@click.option("--again", is_flag=True, help="Even if a recipient has it already.")
@wait_option
def resend(
    ctx: click.Context,
    home: str | None,
    message_id: str,
    to: str | None,
    again: bool,
    wait: Wait,
    as_json: bool,
) -> int:
    """Send a refused, failed or lost message again, as a new one of the same sender.

    Its content and headers are those of the original; its id, and with --to its recipient, are new.
    A message that its recipient has, or has read, is sent again only with --again.
    """
    from relay.views.message import OWN_HEADERS, read_message

    root = root_of(ctx, home)
    original = read_message(root, message_id)
    if original.place == "outbox":
        raise RelayError(
            f"message {original.id} is still in {original.path}",
            hint="it is delivered when a relay runs; `relay trace` shows it",
        )
    if original.place:
        is_own = original.sender == ORCHESTRATOR
        why = "was sent by the relay itself" if is_own else "has only a copy left"
        raise RelayError(
            f"message {original.id} {why}: {original.path}",
            hint="expected an original in the archive",
        )
    headers = {k: v for k, v in original.file.headers.items() if k not in OWN_HEADERS}
    recipient = to or original.file.to
    if recipient == original.file.to and not again:
        check_has_not_arrived(root, original.id)
    echo_progress(Progress(f"sending it again, from {original.sender} to {recipient}"))
    with open_agent(original.sender, root) as me:
        return _send(
            me,
            recipient,
            original.file.body,
            as_json,
            wait,
            kind=str(original.file.kind),
            headers=headers,
            attachments=original.file.attachments,
        )


@click.command(epilog="\b\nExample:\n  relay cancel 3f6777fc")
@control_options
@click.argument("message_id", metavar="ID")
def cancel(ctx: click.Context, /, message_id: str, **caller: Any) -> None:
    """Take a message back from every recipient that has not read it.

    For its sender, the operator and the lead. The answer names who has read it already. Without a
    relay, remove its file from the outbox.
    """
    root = root_of(ctx, caller["home"])
    send_command(ctx, "message.cancel", {"ID": _resolve(root, message_id)}, **caller)


@command(epilog="\b\nExample:\n  relay ack 1706123456789012345-a1b2c3d4 completed 'shipped'")
@as_option
@click.argument("message_id", metavar="ID")
@click.argument(
    "status", default="received", type=click.Choice(["received", "in_progress", "completed"])
)
@click.argument("text", default="")
def ack(
    ctx: click.Context,
    home: str | None,
    agent: str,
    message_id: str,
    status: str,
    text: str,
    as_json: bool,
) -> int:
    """Acknowledge a message; it counts as read, and leaves the inbox.

    Exit code 5: no relay is running, and the ack waits in the outbox.
    """
    root = root_to_take_from(ctx, home)
    if status == "completed":
        from relay.cli import show

        show.check_is_not_query(root, message_id)
    return _answer(root, agent, message_id, as_json, lambda me, known: me.ack(known, status, text))


@command(epilog="\b\nExample:\n  relay nack 1706123456789012345-a1b2c3d4 'no such branch'")
@as_option
@click.argument("message_id", metavar="ID")
@click.argument("error")
def nack(
    ctx: click.Context, home: str | None, agent: str, message_id: str, error: str, as_json: bool
) -> int:
    """Report that a message could not be handled, and why; it leaves the inbox."""
    root = root_to_take_from(ctx, home)
    return _answer(root, agent, message_id, as_json, lambda me, known: me.nack(known, error))


def _answer(
    root: str, agent: str, given: str, as_json: bool, say: Callable[[Agent, str], str]
) -> int:
    from agent_sdk import Agent
    from relay.views.message import earlier_answer

    require_mailbox(root, agent)
    message_id = _resolve(root, given)
    before = earlier_answer(root, agent, message_id)
    with Agent(agent, root, registers=False) as me:
        sent = say(me, message_id)
    echo_earlier(before)
    mark_read(root, agent, message_id)
    _print_sent({"id": sent, "re": message_id}, as_json)
    return EXIT_OK if relay_runs(root) else EXIT_STATE


def _resolve(root: str, message_id: str) -> str:
    with Home(root) as home:
        return resolve_id(home, message_id)
