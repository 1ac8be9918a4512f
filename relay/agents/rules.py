"""The rules of supervision: which state a process is in, and what follows its end. Pure.

The table: docs/states.md, "A process the relay started".
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from relay.agents.activity import LastSeen
from relay.agents.requests import Spec
from relay.base.agent_status import StatusChange
from relay.base.clock import NS_PER_S
from relay.base.config import SpawnSettings
from relay.base.message import Kind
from relay.ledger.processes import IDLE, READY, STARTING, STUCK, WORKING, ProcessRow

BUSY_PERCENT = 1.0  # of a CPU, between two looks: less is a program that waits in a loop


class ProcessNotice(NamedTuple):
    """What somebody is to hear of a process, and what the ledger is to say with it."""

    agent: str  # who hears it; empty: nobody
    request_id: str  # the message that it is about
    at: int  # its id is derived from it: the same after a crash
    kind: Kind  # ACK or NACK: the answer; NOTIFICATION: what came later
    text: str
    key: str = ""  # tells one notification about a message from another
    process: ProcessRow | None = None
    closed_intents: tuple[int, ...] = ()  # intents
    status_change: StatusChange | None = None  # the agent's status, with it
    forget: tuple[str, str] | None = None  # name, request: what was kept for it goes, once said


class RestartDecision(NamedTuple):
    """What is to follow an end."""

    again_in_s: int | None  # None: it is not started again
    gave_up: bool = False  # it would have been, and was too often


def new_row(spec: Spec, now_ns: int) -> ProcessRow:
    """The row of a process that is to be started for the first time."""
    return ProcessRow(
        spec.name,
        STARTING,
        None,
        None,
        spec.cli,
        spec.cwd,
        spec.restart,
        spec.requested_by,
        spec.request_id,
        0,
        "[]",
        None,
        now_ns,
    )


def decide_restart(row: ProcessRow, settings: SpawnSettings, now_ns: int) -> RestartDecision:
    """What the restart policy says of an end whose code is in the row.

    A code that nobody knows counts as a failure. Backoff doubles with every restart in the window.
    """
    if row.restart == "never" or (row.restart == "on-failure" and row.exit_code == 0):
        return RestartDecision(None)
    recent = len(restarts_in_window(row, settings, now_ns))
    if recent >= settings.restart_times:
        return RestartDecision(None, gave_up=True)
    return RestartDecision(
        min(settings.restart_first_s << min(recent, 30), settings.restart_most_s)
    )


def restarts_in_window(row: ProcessRow, settings: SpawnSettings, now_ns: int) -> list[int]:
    """The restarts that count."""
    since = now_ns - settings.restart_window_s * NS_PER_S
    return [at for at in row.recent_restarts if at > since]


def restarted(row: ProcessRow, settings: SpawnSettings, now_ns: int) -> ProcessRow:
    """The row with one restart more."""
    recent = [*restarts_in_window(row, settings, now_ns), now_ns]
    return row._replace(
        restarts=row.restarts + 1, restarted_at=msgspec.json.encode(recent).decode()
    )


def next_state(
    row: ProcessRow, seen: LastSeen, busy_at: int, settings: SpawnSettings, now_ns: int
) -> str:
    """The state that the evidence gives a process that runs.

    ``busy_at``: when it last used CPU. What it owes for too long makes it stuck, whatever else.
    """
    started_at = row.started_at or 0
    owes = seen.owes_since
    if owes is not None:
        since = max(owes, started_at)  # what was there before is owed from its start on
        if now_ns - since >= settings.stuck_after_s * NS_PER_S:
            return STUCK
    heard_at = seen.seen_at if seen.seen_at and seen.seen_at >= started_at else None
    if heard_at is None:
        return STARTING
    if row.state == STARTING:
        return READY
    if owes is not None:
        return WORKING
    active_at = max(heard_at, busy_at)
    if now_ns - active_at >= settings.idle_after_s * NS_PER_S:
        return IDLE
    if row.state == READY and active_at <= row.changed_at:
        return READY
    return WORKING
