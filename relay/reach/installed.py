"""Where hooks are installed, whether they run, and what is wrong with them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from relay.base.clock import elapsed
from relay.base.discovery import has_config
from relay.base.errors import SettingsError
from relay.reach.rungs import silence
from relay.reach.session import Session, load_sessions
from relay.reach.settings import hook_files, is_old, is_ours, read_entries, takes_messages
from relay.reach.vendors import VENDORS, Vendor


class HookStatus(NamedTuple):
    """The hooks of one vendor in one settings file."""

    vendor: str
    scope: str  # user or project
    path: str
    events: tuple[str, ...]  # with a hook of ours
    fired_at: int | None  # Unix ns: the last hook of any session; None: never
    event: str  # which that was
    problem: str = ""  # why the file cannot be understood
    faults: tuple[str, ...] = ()  # what is wrong, each with its remedy

    @property
    def text(self) -> str:
        """The state in words."""
        if self.problem:
            return self.problem
        if not self.events:
            return "not installed"
        missing = [event for event in VENDORS[self.vendor].events if event not in self.events]
        text = f"installed, without {', '.join(missing)}" if missing else "installed"
        if self.fired_at is None:
            advice = VENDORS[self.vendor].advice
            return f"{text} and never seen to fire" + (f": {advice}" if advice else "")
        return f"{text}, last fired {elapsed(time.time_ns() - self.fired_at)} ago ({self.event})"


def hook_states(root: str, project: str, names: tuple[str, ...] = ()) -> list[HookStatus]:
    """The state of each vendor's hooks, of the user and of a project."""
    sessions = load_sessions(root) if has_config(root) else []
    found = []
    for vendor in chosen(names):
        own = [session for session in sessions if session.harness == vendor.name]
        takers = list[str]()
        states = [
            *_states(vendor, os.path.expanduser("~"), own, takers, user=True),
            *_states(vendor, project, own, takers, user=False),
        ]
        users = os.path.realpath(states[0].path)  # the project's own in the home directory
        others = [state for state in states if os.path.realpath(state.path) != users]
        if states[0].events and any(state.events for state in others):
            takers.append(f"they are installed for the user, too, and run twice: {states[0].path}")
        silent = [f"{s.agent}: {why}" for s in own if s.is_live and (why := silence(root, s))]
        for state in states:
            faults = (*state.faults, *takers, *silent) if state.events else ()
            found.append(state._replace(faults=faults))
    return found


def chosen(names: Iterable[str]) -> list[Vendor]:
    """The vendors of these names, each once; all of them without a name."""
    return [VENDORS[name] for name in dict.fromkeys(names or VENDORS)]


def _states(
    vendor: Vendor, folder: str, sessions: list[Session], takers: list[str], *, user: bool
) -> Iterator[HookStatus]:
    """The state in each file of a scope; of a former one only if it has a hook of ours.

    Adds to ``takers`` what is said of hooks that take messages by themselves.
    """
    scope = "user" if user else "project"
    fired_at, event = max(
        ((session.seen_at, session.event) for session in sessions), default=(0, "")
    )
    for number, path in enumerate(hook_files(vendor, folder, user=user)):
        state = HookStatus(vendor.name, scope, path, (), fired_at or None, event)
        try:
            entries = read_entries(vendor, path)
        except SettingsError as exc:
            yield state._replace(problem=str(exc))
            continue
        ours = [(event, entry) for event, entry in entries if is_ours(vendor, entry)]
        events = tuple(dict.fromkeys(event for event, _ in ours))
        takers += [
            f"a hook of {event} runs `relay inbox --take`, so a message comes twice: remove it "
            f"from {path}"
            for event, entry in entries
            if takes_messages(entry)
        ]
        old = f"an earlier version wrote them: `relay hooks install {vendor.name}"
        old += " --user` renews them" if user else "` renews them"
        is_outdated = number > 0 or any(is_old(entry) for _, entry in ours)
        if ours or not number:
            yield state._replace(events=events, faults=(old,) if ours and is_outdated else ())
