"""Reports: what hooks and bells tell the relay about messages that it delivered.

A report is a file of JSON lines, renamed into the agent's outbox like a message:

    agents/{name}/outbox/.pending/{id}.report → rename → agents/{name}/outbox/{id}.report

The relay records it in journal and ledger, and removes it. Every line has ``what``, ``session``
and ``at`` (Unix ns), and

    offered     ids, after, offer  printed by a hook that exited 0, after this event, the n-th time
    in_context  ids, how, where    seen in the transcript, or the session acted after the offer
    returned    ids, why           offered and not seen: the file is in the inbox, offered again
    ring        rung, messages, result   an idle agent was rung for that many messages
    state       state, owes        working, idle, blocked or ended; ids of what it owes

Files are not synced: after a power failure the messages are still in the inbox, and offered again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable

MAX_LOG = 1 << 20
SUFFIX = ".report"
OFFERED, IN_CONTEXT, RETURNED, RING, STATE = "offered", "in_context", "returned", "ring", "state"
MAX_BYTES = 1 << 20


def write_report(root: str, agent: str, entries: Iterable[dict[str, object]]) -> None:
    """Write one report of an agent in the home at ``root``. Errors: OSError."""
    lines = [json.dumps(entry, separators=(",", ":")) for entry in entries]
    if not lines:
        return
    outbox = os.path.join(root, "agents", agent, "outbox")
    name = f"{time.time_ns()}-{os.urandom(8).hex()}{SUFFIX}"
    pending = os.path.join(outbox, ".pending", name)
    fd = os.open(pending, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        os.rename(pending, os.path.join(outbox, name))
    except BaseException:
        os.unlink(pending)
        raise


def log(root: str, text: str, *, vendor: str = "", event: str = "bell", session: str = "") -> None:
    """Append a line to logs/hooks.log, of hooks and bells; nothing if that is not possible."""
    path = os.path.join(root, "logs", "hooks.log")
    facts = {"at": time.time_ns(), "vendor": vendor, "event": event, "session": session[:128]}
    try:
        if os.path.lexists(path) and os.lstat(path).st_size > MAX_LOG:
            os.rename(path, path + ".1")
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        os.write(fd, json.dumps(facts | {"text": text[:500]}).encode() + b"\n")
        os.close(fd)
    except OSError:
        pass
