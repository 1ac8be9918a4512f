"""Reports of hooks and bells: from files in outboxes into journal and ledger.

    {id}.report in the outbox → events in the journal → rows in the ledger → the file is removed

Killed in between, the file is read again: the same report twice changes nothing. A line that is
not valid is logged, and its file kept in ``archive/{date}/{agent}/rejected/``; the other lines
count. What is not a regular file is kept there, too, and is a security incident. A file that
cannot be read or removed now is tried again with the next scan.

No agent can hold up the others with reports: each message, ring or state that a report names counts
for its agent's rate like a message sent, and one turn reads some hundred of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from relay.base import fsio
from relay.base.clock import NS_PER_S
from relay.base.errors import UnsafePath
from relay.base.home import REJECTED, Dirs
from relay.base.incidents import Incident
from relay.base.names import MESSAGE_ID, shown
from relay.delivery import file_ops
from relay.delivery.intake import incident_kind
from relay.delivery.limits import RateLimit
from relay.delivery.record import LedgerWriter
from relay.delivery.values import Part, Resources
from relay.engine import events
from relay.ledger import IN_CONTEXT, OFFERED, RETURNED
from relay.ledger.deliveries import MOST_OFFERS
from relay.reach import report

MOST_FILES = 64  # in one turn
MOST_FACTS = 500  # messages, rings and states in one report; about half of that in one turn
MOST_WAITING = 1_000  # files of an agent that are remembered; the next scan finds the others
JOURNAL_FACTOR = 8  # bytes in the journal for each of a report, at most
MOST_NESTED = 16  # brackets in a line
MOST_TEXT = 200  # characters of a text in a report
_OFFERS = {report.OFFERED: OFFERED, report.IN_CONTEXT: IN_CONTEXT, report.RETURNED: RETURNED}
OnState = Callable[[str, str, Iterable[str], str, int], None]


class ReportReader(Part):
    """Takes reports out of outboxes."""

    def __init__(
        self,
        given: Resources,
        ledger_writer: LedgerWriter,
        rate_limit: RateLimit,
        on_state: OnState,
    ) -> None:
        super().__init__(given)
        self._ledger_writer = ledger_writer
        self._rate_limit = rate_limit
        self._on_state = on_state
        self._waiting: dict[str, dict[str, None]] = {}  # file names by agent, served in turns

    def add(self, agent: str, file_name: str) -> None:
        """Note a file, to be read in this turn or the next; names without an id are left alone."""
        if MESSAGE_ID.fullmatch(file_name.removesuffix(report.SUFFIX)):
            names = self._waiting.setdefault(agent, {})
            if len(names) < MOST_WAITING:
                names[file_name] = None

    def due_ns(self) -> int | None:
        """Time at which the next report may be read (monotonic); 0: now; None: none waits."""
        if not self._waiting:
            return None
        if any(self._rate_limit.allowance(agent) > 0 for agent in self._waiting):
            return 0
        now = self._clock.monotonic_ns()
        return min(now + self._rate_limit.wait_ns(agent) for agent in self._waiting)

    def take(self, dirs: Dirs) -> None:
        """Record the reports that wait and may be read now, oldest first."""
        if not self._waiting:
            return
        lines: list[tuple[str, dict[str, Any]]] = []
        done: list[tuple[str, str, str]] = []  # agent, name, what is wrong with it
        n_bytes = n_facts = 0
        for agent, name in self._pop_files():
            try:
                entries, problem, size = self._read(dirs, agent, name)
            except FileNotFoundError:
                continue
            except (OSError, UnsafePath) as exc:
                self._warn(agent, name, f"cannot be read, the next scan tries again: {exc}")
                continue
            n_bytes += size
            lines += [(agent, entry) for entry in entries]
            done.append((agent, name, problem))
            facts = sum(map(_facts, entries))
            self._rate_limit.spend(agent, max(1, facts))
            n_facts += facts
            if n_bytes > report.MAX_BYTES or n_facts > MOST_FACTS // 2:
                break
        try:
            self._events.reserve(n_bytes * JOURNAL_FACTOR)
        except OSError as exc:
            for agent, name, _ in done:
                self._warn(agent, name, f"waits, the journal has no room: {exc}")
            return
        self._record(lines)
        for agent, name, problem in done:
            self._finish(dirs, agent, name, problem)

    def _pop_files(self) -> Iterator[tuple[str, str]]:
        """Up to ``MOST_FILES`` of the agents within their rate, one of each agent in turn."""
        for _ in range(MOST_FILES):
            allowed = (agent for agent in self._waiting if self._rate_limit.allowance(agent) > 0)
            agent = next(allowed, None)
            if agent is None:
                return
            names = self._waiting.pop(agent)
            first = min(names)
            del names[first]
            if names:
                self._waiting[agent] = names  # behind the others
            yield agent, first

    def _finish(self, dirs: Dirs, agent: str, name: str, problem: str) -> None:
        """Remove the file of a report, or keep it as rejected."""
        try:
            if problem:
                file_ops.archive(dirs, agent, name, self._clock.now_ns(), REJECTED)
                self._warn(agent, name, f"has a line that is not valid: {problem}")
            else:
                fsio.remove(name, dirs.get("agents", agent, "outbox"))
        except (OSError, UnsafePath) as exc:
            self._warn(agent, name, f"is recorded, the next scan removes it: {exc}")

    def _read(self, dirs: Dirs, agent: str, name: str) -> tuple[list[dict[str, Any]], str, int]:
        """The valid entries of a report, what is wrong with the first other one, and its size.

        Errors: OSError; UnsafePath if the outbox is not a directory of its own.
        """
        outbox = dirs.get("agents", agent, "outbox")
        try:
            fd, status = fsio.open_regular(name, outbox)
        except UnsafePath as exc:
            path, text = f"agents/{agent}/outbox/{name}", shown(str(exc))
            self._ledger_writer.record_incident(Incident(incident_kind(exc), agent, path, text))
            return [], text, 0
        try:
            data, _ = fsio.read_open(fd, status.st_size, report.MAX_BYTES)
        finally:
            os.close(fd)
        if status.st_size > report.MAX_BYTES:
            problem = f"expected {report.MAX_BYTES} bytes at most, got {status.st_size}"
            return [], problem, 0
        found, problem = list[dict[str, Any]](), ""
        n_facts = 0
        for line in data.splitlines():
            try:
                if line.count(b"[") + line.count(b"{") > MOST_NESTED:
                    raise ValueError(f"expected {MOST_NESTED} brackets at most")
                entry = _entry(json.loads(line))
                n_facts += _facts(entry)
                if n_facts > MOST_FACTS:
                    raise ValueError(f"expected {MOST_FACTS} messages, rings and states at most")
                found.append(entry)
            except ValueError as exc:
                problem = problem or shown(str(exc))[:MOST_TEXT]
        return found, problem, len(data)

    def _record(self, lines: list[tuple[str, dict[str, Any]]]) -> None:
        """Journal and ledger; states go to who waits for them."""
        now = self._clock.now_ns() // NS_PER_S
        fresh: list[events.Event] = []
        for agent, line in lines:
            if line["what"] == report.STATE:
                self._on_state(agent, line["state"], line["owes"], line["session"], line["at"])
            elif line["what"] == report.RING:
                values = (line["session"], line["rung"], line["messages"], line["result"])
                fresh.append(events.AgentRung(agent, *values, line["at"], now))
            else:
                fresh += self._changes(agent, line, now)
        if not fresh:
            return
        for event in fresh:
            self._store.apply(event)
        self._events.commit()
        self._ledger_writer.catch_up()

    def _changes(self, agent: str, line: dict[str, Any], now_s: int) -> list[events.OfferChanged]:
        """The offers of one line, of messages that were delivered to that agent."""
        ids = dict.fromkeys(line["ids"])
        unknown = self._ledger.deliveries.undelivered(agent, set(ids))
        if unknown:
            self._log(
                f"A report of {agent} names messages that it did not get: "
                f"{', '.join(sorted(unknown)[:3])}",
                action="report_unknown",
                level="warning",
                agent=agent,
            )
        details = (
            line["session"],
            line["offer"],
            _OFFERS[line["what"]],
            line["detail"],
            line["at"],
            now_s,
        )
        return [events.OfferChanged(name, agent, *details) for name in ids if name not in unknown]

    def _warn(self, agent: str, name: str, what: str) -> None:
        self._log(
            f"agents/{agent}/outbox/{shown(name)} {what}",
            action="report_invalid",
            level="warning",
            agent=agent,
        )


def _entry(given: object) -> dict[str, Any]:
    """A valid line, with what the relay needs of it. Errors: ValueError."""
    if not isinstance(given, dict):
        raise ValueError("expected a JSON object")
    what = given.get("what")
    entry: dict[str, Any] = {"what": what, "session": _text(given, "session")}
    entry["at"] = _number(given, "at")
    if what == report.STATE:
        return entry | {"state": _text(given, "state"), "owes": _ids(given, "owes")}
    if what == report.RING:
        texts = {name: _text(given, name) for name in ("rung", "result")}
        return entry | texts | {"messages": _number(given, "messages")}
    entry |= {"ids": _ids(given, "ids"), "offer": 0}
    if what == report.OFFERED:
        offer = _number(given, "offer", MOST_OFFERS)
        return entry | {"offer": offer, "detail": _text(given, "after")}
    if what == report.IN_CONTEXT:
        how, where = _text(given, "how"), _text(given, "where")
        return entry | {"detail": f"{how}, {where}" if where else how}
    if what == report.RETURNED:
        return entry | {"detail": _text(given, "why")}
    raise ValueError(f"expected what as {', '.join((*_OFFERS, report.RING))}, got {what!r}")


def _text(given: dict[str, Any], name: str) -> str:
    value = given.get(name, "")
    if not isinstance(value, str):
        raise ValueError(f"expected {name} as text, got {value!r}")
    return shown(value)[:MOST_TEXT]


def _number(given: dict[str, Any], name: str, most: int = 0) -> int:
    """A number that a row can hold. ``most``: the largest that it may be, if there is one."""
    value = given.get(name)
    if type(value) is not int or not 0 <= value < 1 << 63 or 0 < most < value:
        limit = f" up to {most}" if most else ""
        raise ValueError(f"expected {name} as a number{limit}, got {value!r}")
    return value


def _facts(entry: dict[str, Any]) -> int:
    """The number of rows that an entry may change."""
    return max(1, len(entry.get("ids", ())))


def _ids(given: dict[str, Any], name: str) -> list[str]:
    value = given.get(name)
    if not isinstance(value, list) or not all(
        isinstance(name, str) and MESSAGE_ID.fullmatch(name) for name in value
    ):
        raise ValueError(f"expected {name} as a list of message ids, got {value!r}")
    return value
