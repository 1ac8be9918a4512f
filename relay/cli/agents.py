"""``relay agents`` and ``register``: agents, their status and warnings."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from relay.base.home import META
from relay.base.names import LEAD, check_agent_name
from relay.cli.common import (
    ago,
    command,
    complete_agents,
    echo_json,
    home_option,
    json_option,
    name_home,
    open_home,
    plural,
    read_agent_meta,
    root_of,
    sanitize,
    with_iso_times,
)
from relay.cli.listing import print_messages
from relay.cli.request import control_options, send_command
from relay.cli.tables import colour_by_word, print_table, wide_option
from relay.views.agents import ListedAgent, agent_facts, agent_page, list_agents, role_in
from relay.views.names import agent_not_found


@click.group(
    invoke_without_command=True,
    epilog="""\b
Examples:
  relay agents
  relay agents --json
  relay agents show bob
  relay agents retire bob --reason "its work is done"
  relay agents revive bob""",
)
@home_option
@wide_option
@json_option
@click.pass_context
def agents(ctx: click.Context, home: str | None, wide: bool, as_json: bool) -> None:
    """List the agents and their status.

    SINCE: when the current status began (- for active agents). SEEN: when it last wrote or
    read a message. UNREAD: messages in its inbox. DEAD: dead letters addressed to it. NOTE: what
    its session reports (working, idle, idle and owes 2, blocked on a person since 12:03, failing:
    rate limit, not seen since 12:03); that its registered process has exited; how long it has been
    silent with messages waiting; its own status text.
    """
    if ctx.invoked_subcommand is not None:
        ctx.obj = {"home": root_of(ctx, home)}
        return
    now = time.time_ns()
    with open_home(ctx, home) as opened:
        listed = list_agents(opened, now)
    if as_json:
        for agent in listed:
            echo_json(with_iso_times(agent_facts(agent, now)))
        return
    header = ("NAME", "STATUS", "SINCE", "ROLE", "SEEN", "UNREAD", "DEAD", "NOTE")
    print_table(header, [_cells(agent, now) for agent in listed], wide=wide)


def _cells(agent: ListedAgent, now_ns: int) -> tuple[object, ...]:
    row, role, unread, *_ = agent
    return (
        row["name"],
        row["status"],
        agent.away_since and ago(agent.away_since, now_ns),
        role,
        ago(agent.seen_at, now_ns),
        unread,
        row["dead"],
        sanitize(agent.text(now_ns)),
    )


@command(of=agents, epilog="\b\nExamples:\n  relay agents show bob\n  relay agents show bob --json")
@click.argument("name", shell_complete=complete_agents)
def show(ctx: click.Context, home: str | None, name: str, as_json: bool) -> None:
    """Show everything about one agent on one page.

    Status, process, unread messages, open answers, dead letters, channels, and the latest messages
    from or to it.
    """
    now = time.time_ns()
    with open_home(ctx, home) as opened:
        listed = next(
            (agent for agent in list_agents(opened, now) if agent.row["name"] == name), None
        )
        if listed is None:
            raise agent_not_found(opened, name)
        facts = agent_facts(listed, now) | agent_page(opened, name, now)
    if as_json:
        echo_json(with_iso_times(facts))
    else:
        _show_page(facts, listed, now)


def _show_page(facts: dict[str, Any], listed: ListedAgent, now_ns: int) -> None:
    """Print an agent's page."""

    def echo(label: str, *texts: str | None) -> None:
        click.echo(f"  {label:<10}{sanitize(', '.join(filter(None, texts)))}")

    def aged(what: str, at: int | None) -> str:
        return what if at is None else f"{what}, the oldest for {ago(at, now_ns)}"

    row = listed.row
    status = colour_by_word(row["status"])
    since = f"since {ago(listed.away_since, now_ns)}" if listed.away_since else None
    click.echo(facts["name"])
    click.echo(
        f"  {'status':<10}{', '.join(filter(None, (status, since, sanitize(facts['role']))))}"
    )
    echo("seen", ago(row["last_seen_at"], now_ns) + " ago" * (row["last_seen_at"] is not None))
    if text := listed.text(now_ns):
        echo("note", text)
    if facts["session"]:
        echo("session", facts["session"], f"seen {ago(facts['session_seen_at'], now_ns)} ago")
    if process := facts["process"]:
        pid = f"pid {process['pid']}" if process["pid"] else None
        echo(
            "process", process["state"], pid, process["cli"], plural(process["restarts"], "restart")
        )
        output = name_home(f"`relay logs {facts['name']}` shows its output")
        echo("", process["last_error"], output if process["started_at"] else None)
    elif facts["pid"]:
        echo("process", f"pid {facts['pid']}")
    echo("mailbox", facts["mailbox"])
    echo("outbox", plural(facts["outbox"], "message"))
    unread_text = f"{facts['unread'] or 0} unread"
    echo("inbox", aged(unread_text, facts["oldest_unread_at"]))
    answers = aged(plural(facts["owed"], "answer"), facts["oldest_owed_at"])
    echo("owes", answers, f"{facts['overdue']} overdue" if facts["overdue"] else None)
    echo("dead", plural(facts["dead"], "dead letter"))
    channels = facts["channels"]
    echo("channels", "unknown" if channels is None else ", ".join(channels) or "none")
    if facts["latest"]:
        click.echo()
        print_messages(facts["latest"], as_json=False, wide=False)


@agents.command(epilog='\b\nExample:\n  relay agents retire bob --reason "its work is done"')
@control_options
@click.argument("name", shell_complete=complete_agents)
@click.option("--reason", metavar="TEXT", help="Reason, shown to agents that write to it.")
def retire(ctx: click.Context, /, name: str, reason: str | None, **caller: Any) -> None:
    """Take an agent out of service: mail to it bounces, with the reason.

    Its inbox stays. It becomes active again by `revive`, by writing a message, or when a new
    process registers as it.
    """
    send_command(ctx, "agent.retire", {"NAME": name, "REASON": reason}, **caller)


@agents.command(epilog="\b\nExample:\n  relay agents revive bob")
@control_options
@click.argument("name", shell_complete=complete_agents)
def revive(ctx: click.Context, /, name: str, **caller: Any) -> None:
    """Make a retired or terminated agent active again, with inbox and history."""
    send_command(ctx, "agent.revive", {"NAME": name}, **caller)


@command(epilog="\b\nExamples:\n  relay register bob\n  relay register alice --role lead")
@click.argument("name")
@click.option("--role", type=click.Choice(["lead", "member"]), help="`TO: Lead` means the lead.")
def register(
    ctx: click.Context, home: str | None, name: str, role: str | None, as_json: bool
) -> None:
    """Create an agent's mailbox, or change its role.

    Only needed to set a role: a directory made with `mkdir -p` is an agent, too. A terminated or
    retired agent becomes active again, by a message to the relay.
    """
    from relay.base import fsio
    from relay.reach.binding import revive

    check_agent_name(name)
    with open_home(ctx, home) as opened:
        every = list(opened.agent_names())
        alike = [other for other in every if other != name and other.lower() == name.lower()]
        opened.make_agent(name)
        if role is not None:
            path = opened.path("agents", name, META)
            with opened.changing("agents", name):
                meta = read_agent_meta(opened, name)
                fsio.write_atomic(path, json.dumps(meta | {"role": role}).encode())
        meta_role = role_in(opened.read_meta(name))
        revive(opened, name)
    leads = [other for other in every if other.lower() == LEAD and other != name]
    if meta_role == LEAD and leads:
        line = f"relay: `TO: {leads[0]}` means the agent of that name; {name} gets what is sent"
        click.echo(f"{line} TO: Lead in another spelling", err=True)
    elif name.lower() == LEAD != meta_role:
        line = f"relay: `TO: {name}` means this agent; another spelling of Lead means the agent"
        click.echo(f"{line} with the role lead", err=True)
    elif alike:
        line = f"relay: there is also an agent {', '.join(sorted(alike))}; names are case-sensitive"
        click.echo(line, err=True)
    if as_json:
        echo_json({"name": name, "role": meta_role})
    else:
        click.echo(f"registered {name}; mailbox: {opened.path('agents', name)}")
