"""Errors for a name that is nobody's, with the one that was probably meant."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from relay.base.discovery import default_home
from relay.base.errors import ChannelNotFound, NotFound, RelayError
from relay.base.home import Home
from relay.base.names import OPERATOR, ORCHESTRATOR, is_agent_name
from relay.base.text import did_you_mean


def elsewhere(root: str, name: str) -> str:
    """``bob is in ~/.agent-relay`` for an agent of the usual home that this one lacks."""
    usual = default_home()
    with contextlib.suppress(RelayError, OSError):
        if root != usual and name != OPERATOR:
            with Home(root) as here, Home(usual) as there:
                is_meant = name in there.agent_names() and name not in here.agent_names()
                return f"{name} is in {usual}" if is_meant else ""
    return ""


def agent_not_found(home: Home, name: str) -> NotFound:
    """Make the error for an agent that does not exist, with the name that was probably meant."""
    usual = "`relay agents` lists all agents"
    if is_agent_name(name):
        usual += f", `relay register {name}` creates it"
    hint = elsewhere(home.root, name) or did_you_mean(name, home.agent_names()) or usual
    return NotFound(f"there is no agent {name!a} in {home.root}", hint=hint)


def check_agents(home: Home, *names: str | None) -> None:
    """Check the agents whose messages a command did not find; None is skipped.

    Errors: NotFound for one that does not exist.
    """
    known = {ORCHESTRATOR, *home.agent_names()}
    for name in names:
        if name is not None and name not in known:
            raise agent_not_found(home, name)


def channel_not_found(name: str, known: Iterable[str]) -> ChannelNotFound:
    """Make the error for a channel that does not exist, with the name that was probably meant."""
    hint = did_you_mean(name, known) or "`relay channel list --all` lists all channels"
    return ChannelNotFound(f"channel {name!a} does not exist", hint=hint)
