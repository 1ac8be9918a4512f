"""How an agent stands: the rules, from what is known of it to its status. Pure; no I/O.

    active       broadcasts and mail reach it
    inactive     its directory is gone; or it was silent for ``agents.inactive_after_s``:
                 no broadcasts, its mail still waits for it
    terminated   its process ended, and nothing was heard for ``agents.dead_after_s``: mail bounces
    retired      somebody said so: mail bounces

What it writes itself makes an agent active again, whatever it was; so does a process of its own
that began since. What it reads does, unless it is retired. docs/states.md has the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from relay.base.clock import NS_PER_S, iso_time
from relay.base.config import AgentSettings
from relay.base.names import OPERATOR

RETIRE, REVIVE = "agent.retire", "agent.revive"
MOST_REASON = 200  # characters; it stands in the nack of every message that bounces
GONE = "its directory is gone"


class AgentStatus(StrEnum):
    """The words of ``agents.status``."""

    ACTIVE = "active"  # it is there, or may come back any moment
    INACTIVE = "inactive"  # away, and its mail waits
    TERMINATED = "terminated"  # its process ended
    RETIRED = "retired"  # taken out of service


UNAVAILABLE = frozenset(
    {AgentStatus.TERMINATED, AgentStatus.RETIRED}
)  # who writes to these is told so


class StatusChange(NamedTuple):
    """An agent's new status, and why; ``Registry.set_status`` takes it."""

    name: str
    status: str
    reason: str | None


class AgentFacts(NamedTuple):
    """What is known of an agent; times are Unix nanoseconds, 0 where there is none."""

    name: str
    status: str
    changed_at: int  # of the status
    seen_at: int  # last heard of; registered, where it never was
    seen_pid: int | None = None  # the process that was last seen to run
    pid: int | None = None  # of the process that registered itself
    runs: bool = False  # that very process is there
    started_at: int = 0  # when it became this agent
    ended_at: int = 0  # when it was first found ended
    unregisters: bool = True  # it takes itself out when it ends: gone is not the same as dead else
    is_supervised: bool = False  # the relay started a process of it, which runs or is started again


def next_status(facts: AgentFacts, now_ns: int, settings: AgentSettings) -> StatusChange | None:
    """What an agent's status is from now on; None: it stays as it is."""
    if facts.status in UNAVAILABLE:
        came_back = facts.runs and (
            facts.status == AgentStatus.TERMINATED or facts.started_at > facts.changed_at
        )
        return StatusChange(facts.name, AgentStatus.ACTIVE, None) if came_back else None
    if facts.name == OPERATOR:  # a person may be away for as long as they like
        return None
    silent_since = max(facts.seen_at, facts.started_at)
    if facts.status == AgentStatus.ACTIVE:
        silent_since = max(silent_since, facts.changed_at)
    if _has_ended(facts):
        dead_since = max(silent_since, facts.ended_at)
        if now_ns - dead_since >= settings.dead_after_s * NS_PER_S:
            reason = f"its process {facts.pid} ended; nothing was heard since {_at(silent_since)}"
            return StatusChange(facts.name, AgentStatus.TERMINATED, reason)
    is_there = facts.runs or facts.is_supervised
    is_silent = not is_there and now_ns - silent_since >= settings.inactive_after_s * NS_PER_S
    if is_silent and facts.status == AgentStatus.ACTIVE:
        return StatusChange(facts.name, AgentStatus.INACTIVE, f"silent since {_at(silent_since)}")
    if is_there and facts.status == AgentStatus.INACTIVE:
        return StatusChange(facts.name, AgentStatus.ACTIVE, None)
    return None


def _has_ended(facts: AgentFacts) -> bool:
    """True when its process is gone and has died, and not before it was last made active.

    A shell's end is no death: it has no way to say that it leaves in good order.

    A process that its agent has outlived once, by a word of its own or of the operator, is not
    held against it again.
    """
    is_its_own = facts.pid == facts.seen_pid or facts.started_at > facts.changed_at
    is_gone = facts.pid is not None and not (facts.runs or facts.is_supervised)
    return is_gone and facts.unregisters and is_its_own


def parse_status_command(
    action: str, fields: Mapping[str, str], sender: str
) -> StatusChange | None:
    """The change that a command asks for, whoever may ask; None: it asks for none.

    The same command gives the same change, so that it can be noted again after a crash.
    """
    if action == RETIRE:
        reason = fields.get("REASON") or f"{sender} retired it"
        return StatusChange(fields["NAME"], AgentStatus.RETIRED, reason[:MOST_REASON])
    if action == REVIVE:
        return StatusChange(fields["NAME"], AgentStatus.ACTIVE, None)
    return None


def unavailable_reason(name: str, status: str, reason: str | None, changed_at: int | None) -> str:
    """What is said to who writes to an agent that is away: why, since when, what to do."""
    since = f" since {_at(changed_at)}" if changed_at else ""
    why = f": {reason}" if reason else ""
    if status == AgentStatus.RETIRED:
        what = f"`relay agents revive {name}` brings it back"
    else:
        what = "start it again: what it writes, and its process, bring it back"
    return f"{name} is {status}{since}{why}; {what}"


def _at(at_ns: int) -> str:
    return iso_time(at_ns)[:19] + "Z"
