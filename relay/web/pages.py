"""The facts of each page, as its JSON has them. Errors: RelayError, OSError."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from agent_sdk.attachments import Attachments
from relay.base.errors import MessageError, NotFound
from relay.base.home import Home, lock_holder
from relay.base.message import Kind
from relay.base.names import (
    MSG_SUFFIX,
    OPERATOR,
    ORCHESTRATOR,
    attachments_of,
    options_of,
    uuid4_of,
)
from relay.base.text import plural
from relay.doctor import examine
from relay.search.query import Query, parse
from relay.views.agents import (
    ListedAgent,
    OwedAnswers,
    agent_facts,
    agent_page,
    list_agents,
    owed_answers,
)
from relay.views.attention import attention
from relay.views.message import message_facts, read_message, size_of
from relay.views.messages import find_rows
from relay.views.names import agent_not_found
from relay.views.sessions import UNSEEN
from relay.views.times import when, with_iso_times
from relay.views.trace import (
    UNRECORDED_TEXT,
    describe_hop,
    describe_unrecorded,
    not_yet,
    trace_message,
)
from relay.views.transcript import Transcript, transcript_of
from relay.web.health import audit_facts, health_facts

Facts = dict[str, Any]
LIMIT = 50  # messages on a page
MOST_ROWS = 1_000  # of them: one for each recipient who has not read it, or owes an answer
MOST_RECENT = 500  # that are looked at for an overview of threads
MOST_FAILED = 500
MOST_STEPS = 40  # of a session
LOG_BYTES = 16 << 10
MOST_QUERY = 2000  # characters
FILTERS = (
    *("is:open", "is:overdue", "is:unread", "is:failed"),
    *("has:attachment", "since:1h", "since:1d", "sort:oldest"),
)


class Asked(NamedTuple):
    """The names in a request."""

    home: Home
    name: str  # in the path: an id, a thread, an agent
    query: Mapping[str, str]

    def number(self, name: str) -> int:
        """A number of the query; 0 for anything else."""
        text = self.query.get(name, "")
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else 0


def listed(home: Home, text: str, limit: int = LIMIT, offset: int = 0) -> Facts:
    """The messages that a text in the language of `relay list` finds."""
    found = find_rows(home, parse(text, tuple(map(str, Kind))), limit, offset)
    left = len(found.rows) - MOST_ROWS
    more = f"{plural(left, 'more recipient')} of these messages" if left > 0 else ""
    return {
        "q": text,
        "rows": found.rows[:MOST_ROWS],
        "note": "; ".join(filter(None, (found.note, more))),
        "offset": offset,
        "limit": limit,
        "has_more": found.has_more,
    }


def home(asked: Asked) -> Facts:
    """The items that wait for the operator, oldest first, with what doctor finds quickly."""
    found = attention(asked.home, examine(asked.home, quick=True))
    return {"items": [item._asdict() | {"at": item.at or None} for item in found]}


def search(asked: Asked) -> Facts:
    """Messages by words and keys; each filter is an address."""
    text = asked.query.get("q", "")[:MOST_QUERY].strip()
    words = text.split()
    filters = [
        {"word": word, "is_on": word in words, "q": _toggled(words, word), "more": "q"}
        for word in FILTERS
    ]
    return listed(asked.home, text, LIMIT, asked.number("offset")) | {"filters": filters}


def _toggled(words: list[str], word: str) -> str:
    return " ".join([other for other in words if other != word] + [word] * (word not in words))


def message(asked: Asked) -> Facts:
    """One message: every step with its time, who is still to act, its text and the answers."""
    trace, note = trace_message(asked.home, asked.name)
    message_id, facts = trace["message_id"], None
    try:
        facts = message_facts(asked.home, read_message(asked.home.root, message_id))
    except (NotFound, MessageError) as exc:
        note = note or str(exc)
    is_unrecorded = trace["status"] in UNRECORDED_TEXT
    steps = [hop | {"text": describe_hop(hop, trace)} for hop in trace["hops"]]
    is_owing = trace.get("kind") in ("command", "query")
    is_running = lock_holder(asked.home) is not None
    outcome = trace.get("outcome") or describe_unrecorded(trace, is_running)
    return {
        "id": message_id,
        "from": trace["from"] or (facts or {}).get("from"),
        "to": trace.get("to") or (facts or {}).get("to"),
        "kind": trace.get("kind") or (facts or {}).get("kind"),
        "outcome": outcome,
        "is_recorded": not is_unrecorded,
        "note": note,
        "steps": steps,
        "not_yet": [*not_yet(trace["deliveries"], is_owing)],
        "deliveries": trace["deliveries"],
        "message": facts,
        "options": _options(trace, facts),
        "actions": _actions(asked.home, trace, facts),
    }


class AttachedFile(NamedTuple):
    """A file sent with a message."""

    name: str
    n_bytes: int
    pieces: Iterator[bytes]


def attached_file(home: Home, name: str, number: int) -> AttachedFile:
    """The n-th attachment of a message, counted from 1; its checksum is verified."""
    found = read_message(home.root, name).file
    attached = attachments_of(found.headers, found.attachments)
    if not 1 <= number <= len(attached):
        raise NotFound(f"message {name} has no attachment {number}")
    chosen = attached[number - 1]
    pieces = Attachments(home, 0).pieces(chosen)
    first = next(pieces, b"")  # once all are verified
    return AttachedFile(chosen.name, size_of(home, chosen) or 0, itertools.chain([first], pieces))


def _options(trace: Facts, facts: Facts | None) -> tuple[str, ...]:
    """The answers of which the operator can still give one."""
    mine = [delivery for delivery in trace["deliveries"] if delivery["recipient"] == OPERATOR]
    if not mine or mine[0]["obligation"] == "answered":
        return ()
    return options_of((facts or {}).get("headers", {}).get("OPTIONS"))


def _actions(home: Home, trace: Facts, facts: Facts | None) -> list[str]:
    """The names of the forms with which the operator can do something about a message."""
    found: list[str] = []
    states = {delivery["state"] for delivery in trace["deliveries"]}
    mine = [delivery for delivery in trace["deliveries"] if delivery["recipient"] == OPERATOR]
    if facts and facts["from"] not in ("", OPERATOR, ORCHESTRATOR):
        found.append("reply")
    if mine and trace.get("kind") == "command" and mine[0]["obligation"] == "open":
        found.append("complete")
    if os.path.lexists(home.path("agents", OPERATOR, "inbox", trace["message_id"] + MSG_SUFFIX)):
        found.append("read")
    if any(
        delivery["state"] == "dead" and not delivery["discarded_at"]
        for delivery in trace["deliveries"]
    ):
        found += ["replay", "discard"]
    if trace["from"] == OPERATOR and states & {"staged", "written", "held"}:
        found.append("cancel")
    return found


def agents(asked: Asked) -> Facts:
    """Agents: at work, waiting for whom, gone, since when; what each owes, and is owed."""
    now_ns = time.time_ns()
    owed = owed_answers(asked.home)
    return {"agents": [_agent(agent, owed, now_ns) for agent in list_agents(asked.home, now_ns)]}


def _agent(agent: ListedAgent, owed: list[OwedAnswers], now_ns: int) -> Facts:
    name = agent.row["name"]
    state = agent.state.state if agent.state else agent.row["status"]
    since = agent.state.since if agent.state else agent.row["changed_at"]
    return {
        **agent_facts(agent, now_ns),
        "doing": "not seen" if state == UNSEEN else state,
        "since_at": since,
        "text": agent.text(now_ns),
        "owes": {one.to: one.number for one in owed if one.by == name},
        "is_owed_by": {one.by: one.number for one in owed if one.to == name},
    }


def agent(asked: Asked) -> Facts:
    """One agent: its inbox, what it owes, the latest messages, the output of its process."""
    now_ns, name = time.time_ns(), asked.name
    found = [agent for agent in list_agents(asked.home, now_ns) if agent.row["name"] == name]
    if not found:
        raise agent_not_found(asked.home, name)
    open_ = Query(states=("open",), parties=(name,))
    unread = Query(states=("unread",), recipients=(name,), sort="oldest")
    return {
        **_agent(found[0], owed_answers(asked.home), now_ns),
        **agent_page(asked.home, name, now_ns),
        "inbox": _rows(asked.home, unread, LIMIT),
        "open": _rows(asked.home, open_, LIMIT),
        "log": _log(asked.home, name),
        "steps": _session_steps(asked.home, name),
    }


def _session_steps(home: Home, name: str) -> list[Facts]:
    """The last steps of the agent's session, as `relay watch` shows them."""
    path = transcript_of(home, name)
    found = Transcript(path).read()[-MOST_STEPS:] if path else []
    return [change._asdict() | {"at": when(change.at)} for change in found]


def _log(home: Home, name: str) -> str:
    """The end of the output of a process that the relay started; empty if there is none."""
    try:
        with open(home.path("logs", f"{name}.log"), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES))
            return file.read(LOG_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return ""


def threads(asked: Asked) -> Facts:
    """The threads of the newest messages, the one with the newest first."""
    found: dict[str, Facts] = {}
    for row in _rows(asked.home, Query(), MOST_RECENT):
        if row["thread"]:
            group = found.setdefault(
                row["thread"], {"thread": row["thread"], "count": 0, "names": [], "last": row}
            )
            group["count"] += 1
            parties = [row["from"], *row["recipients"]]
            group["names"] = [*dict.fromkeys([*group["names"], *parties])]
    return {"threads": [*found.values()], "most": MOST_RECENT}


def thread(asked: Asked) -> Facts:
    """One conversation, oldest first, with its texts."""
    name = asked.name
    query = Query(threads=(uuid4_of(name),), named_threads=(name,), sort="oldest")
    found = find_rows(asked.home, query, MOST_RECENT)
    if not found.rows:
        raise NotFound(f"thread {name} does not exist, and no message in a thread has this id")
    return {"thread": name, "rows": found.rows, "has_more": found.has_more, "note": found.note}


def failed(asked: Asked) -> Facts:
    """Failures by outcome and reason, the most frequent first."""
    return {"groups": failed_groups(asked.home), "most": MOST_FAILED}


def failed_groups(home: Home) -> list[Facts]:
    """The newest that failed: outcome, reason and rows of each group."""
    found: dict[tuple[str, str], Facts] = {}
    for row in _rows(home, Query(states=("failed",)), MOST_FAILED):
        outcome, reason = row["outcome"] or "failed", row["reason"] or ""
        fresh: Facts = {"outcome": outcome, "reason": reason, "rows": []}
        found.setdefault((outcome, reason), fresh)["rows"].append(row)
    return sorted(found.values(), key=lambda group: len(group["rows"]), reverse=True)


def health(asked: Asked) -> Facts:
    """Doctor, disk, rates, and the rungs that worked last."""
    return health_facts(asked.home, is_full=asked.query.get("full") == "1")


def audits(asked: Asked) -> Facts:
    """The last report, and the day in numbers."""
    return audit_facts(asked.home)


def _rows(home: Home, query: Query, most: int) -> list[Facts]:
    return find_rows(home, query, most).rows


class Page(NamedTuple):
    """One page: its path, which is also that of its JSON with ``.json`` behind it."""

    path: str
    template: str
    facts: Callable[[Asked], Facts]


PAGES = (
    Page("/", "home", home),
    Page("/search", "search", search),
    Page("/m/{name}", "message", message),
    Page("/agents", "agents", agents),
    Page("/agents/{name}", "agent", agent),
    Page("/threads", "threads", threads),
    Page("/t/{name}", "thread", thread),
    Page("/failed", "failed", failed),
    Page("/health", "health", health),
    Page("/audits", "audits", audits),
)


def page_facts(page: Page, asked: Asked) -> Facts:
    """The facts of a page; times are ISO 8601."""
    return with_iso_times(page.facts(asked)) | {"now_ns": time.time_ns()}
