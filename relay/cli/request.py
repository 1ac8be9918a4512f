"""Requests to the relay or an agent: send a message, wait for the answer, print it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from relay.cli.common import (
    Amount,
    as_option,
    echo_json,
    home_option,
    json_option,
    root_of,
    sanitize,
)

if TYPE_CHECKING:
    from agent_sdk import Agent, Received

MAX_NAMED = 3  # recipients named one by one; more are counted


def control_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of every command that waits for the relay's answer."""
    timeout = click.option(
        "--timeout",
        "timeout_s",
        type=Amount(0, 10**6, min_open=True),
        default=10.0,
        show_default=True,
        help="Seconds to wait for the relay's answer.",
    )
    return home_option(as_option(timeout(json_option(click.pass_context(command)))))


def send_command(
    ctx: click.Context,
    action: str,
    fields: Mapping[str, object],
    *,
    home: str | None,
    agent: str,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Have the relay execute ``action`` and print its answer; fields that are None are omitted.

    Errors: NotRunning before anything is sent; Refused with the text of a nack; Timeout;
    MessageError for a value that is not one line.
    """
    from agent_sdk import MessageError
    from relay.base.names import ORCHESTRATOR

    root = root_of(ctx, home)
    require_relay(root)
    given = {"ACTION": action} | {n: str(v) for n, v in fields.items() if v is not None}
    for name, value in given.items():
        if not value:
            raise MessageError("it is empty: expected one line", header=name)
        if len(value.splitlines()) != 1:
            raise MessageError(f"{value!r} is not one line", header=name)
    body = "\n".join(f"{name}: {value}" for name, value in given.items())
    with open_agent(agent, root) as me:
        answer = request(me, ORCHESTRATOR, body, timeout_s)
    print_answer(answer, as_json)


def print_answer(answer: Received, as_json: bool) -> None:
    """Print what the relay answered."""
    said = answer.body.removeprefix("completed ").strip()
    if as_json:
        echo_json({"id": answer.re, "answer": said})
    else:
        click.echo(sanitize(said))


def request(me: Agent, to: str, body: str | bytes, timeout_s: float, **options: Any) -> Received:
    """Call ``Agent.request``; a Timeout tells the present state of the message.

    After ^C the id of the message is printed, since it stays sent.
    """
    from agent_sdk import Refused, Timeout
    from relay.base.errors import EXIT_INTERRUPTED

    sent: list[str] = []
    try:
        return me.request(to, body, timeout_s, on_sent=sent.append, **options)
    except KeyboardInterrupt as exc:
        if not sent:
            raise
        one = sent[0]
        line = f"relay: stopped waiting for the answer to {one}; `relay trace {one}` shows it"
        click.echo(f"\n{line}", err=True)  # after the terminal's ^C
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from exc
    except Refused as exc:
        raise Refused(sanitize(str(exc)) or "") from exc  # its text is another agent's
    except Timeout as exc:
        raise Timeout(
            f"no answer to {exc.message_id} within {timeout_s:g} s: "
            f"{_describe_progress(me.home, exc.message_id)}",
            hint=f"`relay trace {exc.message_id}` shows every hop",
        ) from exc


def require_relay(root: str) -> None:
    """Require a running relay. Errors: NotRunning."""
    from relay.base.errors import NotRunning
    from relay.base.home import Home, lock_holder

    with Home(root) as home:
        if lock_holder(home) is None:
            raise NotRunning(f"no relay is running for {root}")


def open_agent(agent: str, root: str) -> Agent:
    """Open the agent for one command; a line on stderr says if that created it.

    Errors: those of ``Agent``.
    """
    from agent_sdk import Agent

    is_new = not _has_mailbox(root, agent)
    me = Agent(agent, root, registers=False)
    if is_new:
        click.echo(f"relay: created agent {agent} in {root}", err=True)
    return me


def require_mailbox(root: str, agent: str) -> None:
    """Require an inbox, so that a typo does not create an agent. Errors: InvalidName; NotFound."""
    from relay.base.errors import NotFound

    if not _has_mailbox(root, agent):
        raise NotFound(
            f"there is no agent {agent} in {root}",
            hint=f"`relay agents` lists all agents, `relay register {agent}` creates it",
        )


def _has_mailbox(root: str, agent: str) -> bool:
    from relay.base.home import Home
    from relay.base.names import check_agent_name

    check_agent_name(agent)
    with Home(root) as home, home.dirs() as dirs:
        try:
            dirs.get("agents", agent, "inbox")
        except FileNotFoundError:
            return False
    return True


def _describe_progress(root: str, message_id: str) -> str:
    """Describe the state of a message by the ledger."""
    from relay.base.home import LEDGER, Home, lock_holder
    from relay.cli import outcomes
    from relay.ledger import open_readonly

    with Home(root) as home:
        stopped = "" if lock_holder(home) else ", and the relay has stopped"
        db = open_readonly(home.path(LEDGER))
    try:
        query = "SELECT * FROM {} WHERE message_id = ?"
        row = db.execute(query.format("messages"), (message_id,)).fetchone()
        found = db.execute(query.format("deliveries"), (message_id,)).fetchall()
    finally:
        db.close()
    deliveries = [outcomes.delivery_fields(one) for one in found]
    if row is None:
        return f"the relay has not picked it up yet{stopped}"
    if len(deliveries) > MAX_NAMED:
        return f"{outcomes.summary(row, deliveries)}{stopped}"
    kind, now = row["message_type"], time.time_ns()
    known = [outcomes.describe(one, kind, now) for one in deliveries]
    return f"{', '.join(known) or 'it had no recipients'}{stopped}"
