"""Requests to the relay with a syntax of their own: saved state, and processes.

The syntax of the relay's answers (docs/formats/msg.md) is known here only.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from relay.base.errors import MessageError
from relay.base.message import Kind
from relay.base.names import ORCHESTRATOR

if TYPE_CHECKING:
    from agent_sdk.agent import Agent
from collections.abc import Mapping

_SAVED = re.compile(r"completed saved as version ([0-9]+) ")
_LOADED = re.compile(r"completed version ([0-9]+)\n")


KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SPLIT = re.compile(r",\s*[A-Za-z_][A-Za-z0-9_]*=")  # where the relay would begin another setting


class SavedState(NamedTuple):
    """One saved version, without its content."""

    version: int  # counted from 1
    size: int  # bytes
    saved_at: str  # ISO 8601, UTC
    message_id: str  # of the save message


class LoadedState(NamedTuple):
    """One saved version with its content."""

    version: int
    state: str


def save_state(agent: Agent, data: str | bytes, timeout_s: float) -> int:
    """See ``Agent.save_state``."""
    answer = _request(agent, "save", data, timeout_s)
    match = _SAVED.match(answer)
    if match is None:
        raise _unexpected(answer)
    return int(match[1])


def load_state(agent: Agent, version: int | None, timeout_s: float) -> str | None:
    """See ``Agent.load_state``."""
    found = load_version(agent, version, timeout_s)
    return None if found is None else found.state


def load_version(
    agent: Agent, version: int | None, timeout_s: float, name: str | None = None
) -> LoadedState | None:
    """Load a version; ``name`` is another agent, for the operator and the lead."""
    lines = [f"VERSION: {version}"] if version is not None else []
    lines += [f"NAME: {name}"] if name is not None else []
    answer = _request(agent, "load", "\n".join(lines), timeout_s)
    match = _LOADED.match(answer)
    if match is None:
        raise _unexpected(answer)
    return LoadedState(int(match[1]), answer[match.end() :]) if int(match[1]) else None


def list_versions(agent: Agent, timeout_s: float, name: str | None = None) -> list[SavedState]:
    """See ``Agent.saved_states``; ``name`` as in ``load_version``."""
    answer = _request(agent, "list", f"NAME: {name}" if name is not None else "", timeout_s)
    found = []
    for line in answer.splitlines()[1:]:
        version, size, saved_at, message_id = line.split()
        found.append(SavedState(int(version), int(size), saved_at, message_id))
    return found


def _request(agent: Agent, action: str, body: str | bytes, timeout_s: float) -> str:
    headers = {"ACTION": action}
    kind = Kind.CONTINUITY
    return agent.request(ORCHESTRATOR, body, timeout_s, kind=kind, headers=headers).body


def _unexpected(answer: str) -> MessageError:
    return MessageError(f"unexpected answer from the relay: {answer.splitlines()[:1]}")


def spawn_headers(
    name: str, cli: str, cwd: str | None, env: Mapping[str, str], restart: str | None
) -> dict[str, str]:
    """Build the headers of a spawn message, leaving out empty values.

    Errors: MessageError for an ENV that the relay could not parse; it shows no values.
    """
    for key, value in env.items():
        if not KEY.fullmatch(key):
            raise MessageError(f"{key!r} is not a valid variable name", header="ENV")
        if value != value.strip() or "\n" in value or SPLIT.search(value):
            raise MessageError(
                f"the value of {key} cannot be sent: it contains a line break, leading or trailing "
                "blanks, or `,NAME=`; pass it in a file",
                header="ENV",
            )
    given = {
        "NAME": name,
        "CLI": cli,
        "CWD": cwd,
        "ENV": ",".join(f"{key}={value}" for key, value in env.items()),
        "RESTART": restart,
    }
    return {field: value for field, value in given.items() if value}
