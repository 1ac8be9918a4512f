"""Messages that no relay has recorded: files in outboxes, their `.pending`, or inboxes.

The ledger cannot tell of it. Nothing is opened here, and nothing is changed: names are listed, and
of one that is asked for it is seen how long nobody has touched it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

from relay.base.clock import NS_PER_S
from relay.base.errors import NotFound, UnsafePath
from relay.base.home import PENDING, Home
from relay.base.names import MSG_SUFFIX, message_id_of
from relay.delivery.intake import untouched_since

WORDS = {
    "waiting": "waits in the outbox of {}, and no relay has seen it yet",
    "stray": "is in the inbox of {}, and was not delivered by the relay",
    "unsent": "lies in the outbox/.pending of {}, untouched for {} s, and is not sent yet",
}
UNTOLD = "is in the inbox of {}, and the ledger does not know it"  # a crash may be why
IS_RUNNING = "one runs now, `relay status` says whether it takes messages in"


def waiting(home: Home) -> int:
    """How many messages stand in the outboxes."""
    return sum(1 for _ in _messages(home, "outbox"))


def find(home: Home, beginning: str) -> dict[str, Any] | None:
    """Where a message lies whose id begins so, as `relay trace` tells it; None: nowhere.

    Errors: NotFound when several begin so.
    """
    places = (("waiting", "outbox"), ("unsent", f"outbox/{PENDING}"), ("stray", "inbox"))
    for status, place in places:
        found = [one for one in _messages(home, place) if one[1].startswith(beginning)]
        exact = [one for one in found if one[1] == beginning]
        if len({message_id for _, message_id in exact or found}) > 1:
            raise NotFound(f"several messages begin with {beginning}", hint="give more of the id")
        for agent, message_id in exact or found:
            return {
                "message_id": message_id,
                "from": agent,
                "status": status,
                "file": f"agents/{agent}/{place}/{message_id}{MSG_SUFFIX}",
                "untouched_s": _untouched_s(home, agent, place, message_id + MSG_SUFFIX),
                "error": None,
                "deliveries": [],
                "hops": [],
            }
    return None


def told(facts: dict[str, Any], is_running: bool) -> str:
    """A message of `find` in words: where it lies, and what it waits for."""
    if facts["status"] == "stray" and not is_running:
        said = UNTOLD.format(facts["from"])
        return f"{said}: `relay up` tells the ledger what a crash took from it"
    if facts["status"] == "stray":
        hint = "find out who put it there"
    elif facts["status"] == "waiting":
        hint = IS_RUNNING if is_running else "no relay runs; start one with `relay up`"
    else:
        hint = "rename it into the outbox"
    return f"{WORDS[facts['status']].format(facts['from'], facts['untouched_s'])}: {hint}"


def _untouched_s(home: Home, agent: str, place: str, name: str) -> int:
    """Seconds since a file was written or renamed; 0 for one that has just gone."""
    now = time.time_ns()
    with home.dirs() as dirs, contextlib.suppress(OSError, UnsafePath):
        folder = dirs.get("agents", agent, *place.split("/"))
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        return (now - untouched_since(status, now)) // NS_PER_S
    return 0


def _messages(home: Home, place: str) -> Iterator[tuple[str, str]]:
    """(agent, message id) of each file that a relay would take for a message."""
    with home.dirs() as dirs:
        for agent in sorted(home.agent_names()):
            try:
                names = os.listdir(dirs.get("agents", agent, *place.split("/")))
            except (OSError, UnsafePath):
                continue  # an agent without an outbox; the doctor says what else is wrong with it
            for name in sorted(names):
                message_id = message_id_of(name)
                if message_id is not None:
                    yield agent, message_id
