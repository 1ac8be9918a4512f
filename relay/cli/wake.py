"""``relay wake``: how an agent is rung when messages wait, and whether that works."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from relay.base.clock import NS_PER_MS
from relay.base.errors import NotRunning, RelayError
from relay.base.home import READ, Home, is_served
from relay.base.names import MSG_SUFFIX, OPERATOR
from relay.cli.common import (
    ago,
    command,
    complete_agents,
    duration,
    echo_json,
    open_home,
    plural,
    sanitize,
)
from relay.views.names import agent_not_found
from relay.views.sessions import last_rings
from relay.views.times import with_iso_times

if TYPE_CHECKING:
    from relay.reach.ringing import Bell, Memory
    from relay.reach.session import Session

_Found = tuple[str, int] | None  # a text, and its time in Unix ns, or 0: now

LOOK_S = 0.01
NO_BELL = (
    "not running: the session is not rung. The end of its next turn starts it: give it a prompt; "
    "until then `relay bell --as {}` runs the command of wake.json"
)


@click.group(epilog="\b\nExamples:\n  relay wake status bob\n  relay wake test bob --timeout 60")
def wake() -> None:
    """Show how an agent is woken when messages wait, and try it."""


@command(of=wake, epilog="\b\nExamples:\n  relay wake status bob\n  relay wake status bob --json")
@click.argument("name", shell_complete=complete_agents)
def status(ctx: click.Context, name: str, home: str | None, as_json: bool) -> None:
    """Show an agent's session, the rungs that apply, and the last rings.

    A rung is a way to ring: claude-inbox, claude-rewake, codex-queue, resume, command. They are
    tried in this order; `agents/NAME/wake.json` may name one, which is then the only one.
    """
    with open_home(ctx, home) as opened:
        facts = _status(opened, name)
    if as_json:
        echo_json(with_iso_times(facts))
        return
    session, now = facts["session"], time.time_ns()
    if session:
        click.echo(f"session  {sanitize(session)}, {facts['state']}")
        pid = facts["bell_pid"]
        click.echo(f"bell     {f'pid {pid}' if pid else NO_BELL.format(sanitize(name))}")
    else:
        click.echo("session  none is live")
    worked = facts["worked"]
    last = f"{worked['rung']}, {ago(worked['at'], now)} ago" if worked else "none yet"
    click.echo(f"worked   {last}")
    if facts["unanswered"]:
        click.echo(f"last     {sanitize(facts['unanswered'])}")
    if facts["trouble"]:
        click.echo(f"trouble  {sanitize(facts['trouble'])}")
    click.echo("rungs")
    for rung, missing in facts["rungs"].items():
        click.echo(f"  {rung:<14} {sanitize(missing) or 'applies'}")
    click.echo("rings" if facts["rings"] else "rings    none yet")
    for ring in facts["rings"]:
        count = plural(ring["messages"], "message")
        words = f"{ago(ring['at'], now) + ' ago':<12} {ring['rung']:<14} {count}, {ring['result']}"
        click.echo(f"  {sanitize(words)}")


@command(of=wake, epilog="\b\nExamples:\n  relay wake test bob\n  relay wake test bob --timeout 60")
@click.argument("name", shell_complete=complete_agents)
@click.option(
    "--timeout",
    "timeout_s",
    type=duration(0.1, 3600),
    default="30s",
    show_default=True,
    help="How long to wait for evidence of each rung.",
)
def test(ctx: click.Context, name: str, timeout_s: float, home: str | None, as_json: bool) -> None:
    """Send a test message through every rung that applies, and print what becomes of it.

    The message comes from the operator and has a nonce. Each step is printed with the milliseconds
    since the message was sent: in the inbox, rung, offered (a hook printed it), in context (it was
    seen in the transcript, or the file was taken). The agent must be idle: at work it is not rung.
    """
    with open_home(ctx, home) as opened:
        if name not in set(opened.agent_names()):
            raise agent_not_found(opened, name)
        if not is_served(opened):
            raise NotRunning(f"no relay is running for {opened.root}")
        made = WakeTest(opened, name, timeout_s, as_json)
        try:
            works = made.run()
        finally:
            made.end()
    if not made.sent:
        raise RelayError(
            f"no rung applies to {name}: no test message was sent",
            hint=f"`relay wake status {name}` shows what each one needs",
        )
    if not works:
        hint = f"`relay wake status {name}` shows which rungs apply"
        if unread := made.unread():
            hint += f"; {plural(unread, 'test message')} {'is' if unread == 1 else 'are'} unread"
            hint += " in its inbox"
        raise RelayError(f"no rung brought the test message to {name}", hint=hint)


@command(json=False, epilog="\b\nExamples:\n  relay bell --as bob")
@click.option("--as", "agent", metavar="NAME", help="Ring this agent; it needs no session.")
@click.option("--rewake", is_flag=True, help="Be claude's Stop hook with asyncRewake.")
def bell(ctx: click.Context, home: str | None, agent: str | None, rewake: bool) -> None:
    """Ring an agent when messages wait, until this command is ended.

    Sessions with hooks have a bell of their own, which their hooks start; this one is for other
    agents, with a command in `agents/NAME/wake.json`. With --rewake it waits until messages wait
    for the idle session whose input is on stdin, and ends with exit 77; the hook that `relay hooks
    install` writes turns that, and nothing else, into the exit 2 that wakes it.
    """
    from relay.reach.bell import rewake_hook, ring_for

    with open_home(ctx, home) as opened:
        root = opened.root
    ctx.exit(rewake_hook(root) if rewake else ring_for(root, agent or ""))


class WakeTest:
    """One test message for each rung that applies."""

    def __init__(self, home: Home, agent: str, timeout_s: float, as_json: bool) -> None:
        self.home = home
        self.agent = agent
        self.timeout_s = timeout_s
        self.as_json = as_json
        self.bell, self.memory = _bell_of(home, agent)
        self.session = self.bell.session
        self.sent: list[str] = []  # ids of the test messages
        self._is_ringing = self.memory.pid != os.getpid()

    def run(self) -> bool:
        """Try them all; True if one of them works."""
        works = False
        for rung, missing in self.memory.rungs.items():
            if missing:
                self._print(f"{rung}  does not apply: {missing}")
                if self.as_json:
                    echo_json({"rung": rung, "applies": False, "why": missing})
            else:
                works = self._try(rung) or works
        return works

    def unread(self) -> int:
        """The number of test messages that are still in the inbox."""
        inbox = os.path.join(self.home.root, "agents", self.agent, "inbox")
        return sum(
            os.path.exists(os.path.join(inbox, message_id + MSG_SUFFIX)) for message_id in self.sent
        )

    def end(self) -> None:
        """Let the bell use every rung again."""
        if self.session is not None and self._is_ringing:
            from relay.reach.ringing import ask_rung

            ask_rung(self.home.root, self.session, "", 0)

    def _try(self, rung: str) -> bool:
        from agent_sdk import Agent
        from relay.reach.rungs import NO_RUNG

        self._print(rung)
        self._ask(NO_RUNG)  # its arrival rings nothing yet
        began = time.time_ns()
        body = f"relay wake test {os.urandom(4).hex()}: a test by the operator, no answer is needed"
        with Agent(OPERATOR, self.home.root) as operator:
            self.message_id = operator.send(self.agent, body, priority=0)
        self.sent.append(self.message_id)
        steps: dict[str, float] = {}
        until = time.monotonic() + self.timeout_s
        while time.monotonic() < until:
            for step, probe in self._probes(rung, began).items():
                if step not in steps and (found := probe()):
                    text, at = found
                    steps[step] = ((at or time.time_ns()) - began) / NS_PER_MS
                    self._print(f"  {steps[step]:>9,.1f} ms  {text}")
                    if step == "inbox":
                        self._ring(rung)
            if "in_context" in steps and ("result" in steps or not self._last_ring(rung, began)):
                break
            time.sleep(LOOK_S)
        works = "in_context" in steps
        if not works:
            self._print(f"  no evidence in {self.timeout_s:g} s: {self._lack(rung, steps)}")
        if self.as_json:
            times = {f"{step}_ms": round(ms, 1) for step, ms in steps.items()}
            ring = self._last_ring(rung, began)
            facts = {"rung": rung, "applies": True, "id": self.message_id, "works": works}
            echo_json(facts | {"result": ring.get("result")} | times)
        return works

    def _ring(self, rung: str) -> None:
        """Ring here, or let the bell do it, which has the environment for it."""
        self._ask(rung)
        if not self._is_ringing:
            self.memory.rings.append(self.bell.ring(rung))

    def _ask(self, rung: str) -> None:
        if self.session is not None and self._is_ringing:
            from relay.reach.ringing import ask_rung

            ask_rung(self.home.root, self.session, rung, self.timeout_s + 5)

    def _probes(self, rung: str, began: int) -> dict[str, Callable[[], _Found]]:
        """Step -> a function that finds it: a text, and when it was if that is known."""
        inbox = os.path.join(self.home.root, "agents", self.agent, "inbox")
        file = f"{self.message_id}{MSG_SUFFIX}"
        is_read = os.path.exists(os.path.join(inbox, READ, file))
        is_there = is_read or os.path.exists(os.path.join(inbox, file))
        ring = self._last_ring(rung, began)

        def offered() -> _Found:
            key, offer = self._offer()
            if not offer:
                return None
            after = f", after {sanitize(str(offer['after']))}" if offer.get("after") else ""
            return f"offered to {sanitize(key)}{after}", 0

        return {
            "inbox": lambda: (f"message {self.message_id} in the inbox", 0) if is_there else None,
            "rung": lambda: (f"rung by {rung}", ring["at"]) if ring else None,
            "offered": offered,
            "in_context": lambda: ("in context: the file is in .read", 0) if is_read else None,
            "result": lambda: (str(sanitize(ring["result"])), 0) if "result" in ring else None,
        }

    def _offer(self) -> tuple[str, dict[str, object]]:
        """The session that was shown the message, and what it keeps of it."""
        from relay.reach.session import load_sessions

        for session in load_sessions(self.home.root):
            offer = session.offered.get(self.message_id, {})
            if session.agent == self.agent and offer.get("printed"):
                return session.key, offer
        return "", {}

    def _last_ring(self, rung: str, began: int) -> dict[str, Any]:
        """The newest ring since then; without ``result`` while it is under way."""
        if self._is_ringing:
            self.memory = _bell_of(self.home, self.agent)[1]
        rings: list[dict[str, Any]] = [*self.memory.rings, self.memory.begun]
        found = [ring for ring in rings if ring.get("rung") == rung and ring["at"] >= began]
        return found[-1] if found else {}

    def _lack(self, rung: str, steps: dict[str, float]) -> str:
        """Why it may be that a rung brought nothing."""
        if "inbox" not in steps:
            return "the relay did not deliver the message"
        if "rung" not in steps:
            session = _bell_of(self.home, self.agent)[0].session
            state = session.state if session is not None else "gone"
            return f"it was not rung, the session is {state}"
        if "offered" not in steps:
            text = "no hook printed the message; `relay hooks status` shows when one last ran"
            return f"{text}; {silence}" if (silence := _silence(rung, self.session)) else text
        return "it was printed, and the session did nothing after that"

    def _print(self, text: str) -> None:
        if not self.as_json:
            click.echo(text)


def _bell_of(home: Home, agent: str) -> tuple[Bell, Memory]:
    """A bell of this process for the agent, and what the one that runs keeps.

    Without one that runs the memory is that of this process.
    """
    from relay.reach.ringing import Bell, Memory
    from relay.reach.session import BELL, is_ringing, load_sessions, side_file

    live = [session for session in load_sessions(home.root) if session.agent == agent]
    session = max(live, key=lambda candidate: (candidate.is_live, candidate.bound_at), default=None)
    bell = Bell(home.root, agent, session)
    if session is not None and is_ringing(home.root, session):
        memory = Memory.load(side_file(home.root, session, BELL))
        if memory is not None:
            return bell, memory
    return bell, bell.survey()


def _status(home: Home, agent: str) -> dict[str, Any]:
    """The facts of ``relay wake status``."""
    if agent not in set(home.agent_names()):
        raise agent_not_found(home, agent)
    bell, memory = _bell_of(home, agent)
    session = bell.session if bell.session is not None and bell.session.is_live else None
    rings = last_rings(home, agent)
    if not rings:  # no relay has taken the reports yet
        rings = [_ring_row(ring) for ring in reversed(memory.rings)]
    worked = next((ring for ring in rings if ring["result"].startswith("rang")), None)
    unanswered = ""
    if worked and session and session.seen_at < worked["at"]:
        silence = _silence(worked["rung"], session)
        unanswered = silence and f"no hook ran since that ring; {silence}"
    return {
        "agent": agent,
        "session": session.key if session else None,
        "state": session.state if session else None,
        "bell_pid": memory.pid if memory.pid != os.getpid() else None,
        "rungs": memory.rungs,
        "trouble": memory.trouble,
        "unanswered": unanswered,
        "worked": worked and {"rung": worked["rung"], "at": worked["at"]},
        "rings": rings,
    }


def _silence(rung: str, session: Session | None) -> str:
    """Possible reasons when a rung has rung, and no hook ran since."""
    from relay.reach.rungs import RUNGS

    text = next((other.silence for other in RUNGS if other.name == rung), "")
    return text.format(session.session_id if session else "ID")


def _ring_row(ring: dict[str, Any]) -> dict[str, Any]:
    return {key: ring.get(key) for key in ("at", "rung", "messages", "result")}
