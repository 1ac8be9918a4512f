"""The operator is asked for a permission, by the hook of PermissionRequest that has ``--ask``.

The request is a question to the operator, with the options yes and no. An answer in time decides
it; without one, or without a relay, nothing is printed, and the vendor's own dialog decides. A
question shows all that the tool is told; what is too long for that, the vendor's dialog asks. A
question that no longer matters is withdrawn: when the time is over, and when the vendor ends the
hook. Killed before that, it stays in the list until its time is over, and its answer decides
nothing. What was asked and answered is in ledger and journal, like every message.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Mapping
from types import FrameType

from agent_sdk import Agent, Received
from relay.base.errors import RelayError, Timeout
from relay.base.home import Home, lock_holder
from relay.base.names import OPERATOR, ORCHESTRATOR, PERMISSION
from relay.base.text import visible
from relay.reach.session import load_session

MOST_S = 3600.0
MARGIN_S = 2.0  # before the vendor ends the hook
WITHDRAW_S = 2.0
LAST_LOOK = "answer=10ms"  # what was accepted before the withdrawal is in the inbox by then
MOST_TEXT = 100_000  # characters of what the tool is told: more is for the vendor's own dialog
MOST_LINE = 300  # characters of the first line, which lists show
TELLING = ("command", "file_path", "notebook_path", "url", "path")  # the first line has one of them


class Ended(BaseException):
    """The vendor ends the hook: it does not wait any more."""


def ask(root: str, vendor: str, facts: dict[str, object], given: str) -> None:
    """Ask, wait for the answer, and print what the vendor reads as a decision; or nothing.

    ``given``: the seconds. Errors: ValueError, RelayError, OSError.
    """
    seconds = min(float(given), MOST_S)
    signal.setitimer(signal.ITIMER_REAL, seconds + MARGIN_S + WITHDRAW_S)  # as for other hooks
    session = load_session(root, vendor, str(facts.get("session_id", "")))
    if session is None or not session.agent or session.agent == OPERATOR:
        return
    with Home(root) as home:
        if lock_holder(home) is None:
            return
    answer = None
    text = question_text(session.agent, facts)
    if not text:
        return
    tool = _tool(facts)
    signal.signal(signal.SIGTERM, _end)
    with contextlib.suppress(Ended, Timeout), Agent(session.agent, root, registers=False) as agent:
        question = ""
        try:
            question = agent.send(
                OPERATOR,
                text,
                kind="query",
                priority=1,
                headers={"OPTIONS": "yes, no", PERMISSION: f"{seconds:g}s {tool}"},
            )
            answer = agent.wait(question, f"answer={max(1, int(seconds * 1000))}ms")
        finally:
            if answer is None and question:
                answer = _withdraw(agent, question)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the answer is on its way
    if answer is not None:
        os.write(1, _decision(answer.body).encode())


def question_text(name: str, facts: Mapping[str, object]) -> str:
    """The question: a line with the tool and what tells most of what it is told, and all of it.

    A line says what of it is left out, and where lines ended. Empty if all of it is too long.
    """
    arguments = facts.get("tool_input")
    fields = arguments if isinstance(arguments, dict) else {}
    most = next((str(fields[key]) for key in TELLING if fields.get(key)), "")
    whole = json.dumps(arguments, indent=2, ensure_ascii=False) if arguments else ""
    if len(whole) > MOST_TEXT:
        return ""
    told = " ⏎ ".join(" ".join(line.split()) for line in most.strip().splitlines())
    first = f"{name} asks for permission: {_tool(facts)} {told}".strip()
    if len(first) > MOST_LINE:
        first = f"{first[:MOST_LINE]}… and {len(first) - MOST_LINE} more characters"
    return f"{first}\n\n{whole}".strip()


def _tool(facts: Mapping[str, object]) -> str:
    return visible(str(facts.get("tool_name", "")) or "a tool")[:64]


def _withdraw(agent: Agent, question: str) -> Received | None:
    """Take the question back; its answer, if that came first. Never raises RelayError."""
    with contextlib.suppress(RelayError):  # refused where it is read, or answered
        agent.request(ORCHESTRATOR, f"ACTION: message.cancel\nID: {question}", WITHDRAW_S)
    with contextlib.suppress(RelayError):
        return agent.wait(question, LAST_LOOK)
    return None


def _decision(body: str) -> str:
    """The vendor's form of an answer: yes or no, and the words of the operator."""
    word, _, words = body.partition("\n")
    is_yes = word.strip().lower() == "yes"
    decision: dict[str, str] = {"behavior": "allow" if is_yes else "deny"}
    if not is_yes:
        reason = " ".join(words.split())
        decision["message"] = f"the operator answered no{': ' + reason if reason else ''}"
    facts = {"hookEventName": "PermissionRequest", "decision": decision}
    return json.dumps({"hookSpecificOutput": facts}) + "\n"


def _end(number: int, frame: FrameType | None) -> None:
    raise Ended
