"""A history with known faults, listed in ``planted``.

Each stands in the books as it would if the relay had done it: what a fault does not touch is
consistent. Faults begin at a tenth of the history and end a day before its end.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from msgspec.structs import replace

from relay.acomm.model import DeliveryState
from relay.base.clock import NS_PER_MS, NS_PER_S
from relay.base.incidents import IncidentKind, Refusal, RefusalCode
from relay.base.message import Kind
from relay.base.names import uuid4_of
from relay.delivery.file_ops import render_delivered
from relay.delivery.router import new_message
from relay.ledger.agents import STUCK, ProcessRow
from scripts.history.books import Delivered
from scripts.history.engine import Sent
from scripts.history.faults import Planted, planted
from scripts.history.make import Draft, Given, History, Underway
from scripts.history.originals import path_of
from scripts.history.talk import DAY_NS, HOUR_NS, LEAD, Post
from scripts.history.text import Text

MINUTE_NS = 60 * NS_PER_S
SLEEPER = "sleeper"
DEAD_LETTERS = 5
RUNAWAY_POSTS = 40
SLOW_FACTOR = 60
SLOW_EVERY_NS = 30 * NS_PER_S  # an hour with few messages is not judged
LATE_NS = 4 * NS_PER_S
OUTSIDE = ("archive_byte", "segment_byte", "stuck", "repaired", "limited", "refused")
SPOILED = ("attachment_gone", "attachment_altered")
# Of an incident: its kind, the agent's folder that it is about, its words.
OPEN_INBOX = (IncidentKind.MODE_REPAIRED, "inbox", "was open to others, its mode is 700 now")
TOO_FAST = (IncidentKind.RATE_LIMITED, "outbox", "sends faster than 200 messages a second")
AGAIN = {"DELIVERY": "at-least-once"}  # what is not acknowledged in time is overdue
AS_USUAL = ("overdue", "unanswered")  # sent like any other, and never answered


class FaultyHistory(History):
    """A home being generated with these faults."""

    def __init__(self, root: str, given: Given, names: set[str]) -> None:
        super().__init__(root, given)
        self.planted: list[Planted] = []
        self._names = names
        self._text = Text(self.rng)
        self._slow = (0, 0)
        self._handlers: dict[str, Callable[[Post], None]] = {
            "lost": self._lose,
            "differs": self._differ,
            "extra": self._add,
            "undelivered": self._hold_up,
            "doubled": self._double,
            "twice": self._number_twice,
            "orphan": self._answer_nobody,
            "inversion": self._invert,
            "skew": self._skew,
            "dead": self._give_up,
            "signature": self._refuse_signature,
            "original_gone": self._lose_original,
            "original_altered": self._alter_original,
        }
        self._plan()

    # -- when ------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Schedule the faults far enough apart to be independent."""
        span = self.given.end_ns - self.begin_ns
        first, last = self.begin_ns + span // 10, self.given.end_ns - DAY_NS
        named = sorted(self._names - set(OUTSIDE))
        for place, name in enumerate(named):
            at_ns = first + (last - first) * place // len(named)
            pair = self.cast.agents[place % len(self.cast.agents)]
            self._plan_one(name, at_ns, pair, self.cast.peers[pair][-1])

    def _plan_one(self, name: str, at_ns: int, sender: str, to: str) -> None:
        post = Post(at_ns, sender, to, Kind.MESSAGE, self._text.body(), fault=name)
        posts = [post]
        if name in ("overdue", "dead"):
            posts = [post._replace(kind=Kind.COMMAND, headers=AGAIN)]
        if name == "dead":
            posts = [
                posts[0]._replace(at_ns=at_ns + n * 10 * MINUTE_NS, body=self._text.body())
                for n in range(DEAD_LETTERS)
            ]
        elif name in SPOILED:
            posts = [post._replace(attach=True)]
        elif name == "unanswered":
            posts = [post._replace(kind=Kind.QUERY, headers=AGAIN)]
        elif name == "orphan":
            unknown = self._new_id(at_ns - MINUTE_NS)
            posts = [post._replace(kind=Kind.ACK, headers={"RE": unknown}, body=b"received")]
        elif name == "silent":
            said = Post(at_ns, SLEEPER, LEAD, Kind.MESSAGE, self._text.body())
            late = self.given.end_ns - 30 * HOUR_NS
            posts = [said] + [
                Post(
                    late + n * MINUTE_NS, LEAD, SLEEPER, Kind.MESSAGE, self._text.body(), fault=name
                )
                for n in range(3)
            ]
        elif name == "runaway":
            posts = self._runaway(post)
        elif name == "slow":
            begin = at_ns - at_ns % HOUR_NS
            self._slow = (begin, begin + HOUR_NS)
            posts = [
                Post(begin + n * SLOW_EVERY_NS, sender, to, Kind.MESSAGE, self._text.body())
                for n in range(1, HOUR_NS // SLOW_EVERY_NS)
            ]
            self.planted.append(planted(name))
        for one in posts:
            self.at(one.at_ns, functools.partial(self.send, one))

    def _runaway(self, post: Post) -> list[Post]:
        headers = {"THREAD": f"loop-{self.rng.getrandbits(32):08x}"}
        self.planted.append(planted("runaway", route=f"{post.sender} > {post.to}"))
        pairs = ((post.sender, post.to), (post.to, post.sender))
        return [
            Post(post.at_ns + n * NS_PER_S, *pairs[n % 2], Kind.MESSAGE, self._text.body(), headers)
            for n in range(RUNAWAY_POSTS)
        ]

    def send(self, post: Post) -> None:
        """Send a message correctly, or with its fault."""
        handler = self._handlers.get(post.fault)
        if handler is not None:
            handler(post)
            return
        draft = self.draft(post)
        if post.fault in AS_USUAL:
            self._told(post, draft)
        self.record(draft, self.carry(draft))

    def staging_ns(self) -> int:
        """Time from discovery to commit; long in the slow hour."""
        usual = super().staging_ns()
        begin, end = self._slow
        return usual * SLOW_FACTOR if begin <= self.clock.now_ns() < end else usual

    def _told(self, post: Post, draft: Draft, **facts: str | None) -> None:
        self.planted.append(
            planted(
                post.fault,
                message_id=draft.message_id,
                agent=post.sender,
                route=post.to,
                **facts,
            )
        )

    # -- messages --------------------------------------------------------------------------

    def _lose(self, post: Post) -> None:
        draft = self.draft(post)
        self.clock.go_to(self.clock.now_ns() + 2 * NS_PER_MS)
        self.record(draft, (None, self.clock.now_ns()))
        self._told(post, draft)

    def _differ(self, post: Post) -> None:
        draft = self.draft(post)
        other = draft._replace(file=draft.file._replace(body=self._text.body()))
        self.record(draft, self.carry(other))
        self._told(post, draft)

    def _add(self, post: Post) -> None:
        draft = self.draft(post)
        sent, _ = self.carry(draft)
        self.engine.read(sent.number, post.to)
        self._told(post, draft)

    def _hold_up(self, post: Post) -> None:
        draft = self.draft(post)
        _, staged_at = self.carry(draft, is_delivered=False)
        self.note_row(draft, self.clock.now_ns())
        self.file_original(draft)
        self.seen[post.sender] = self.clock.now_ns()
        self.books.delivery(Delivered(draft.message_id, post.to, "staged", 1, staged_at))
        self._told(post, draft)

    def _double(self, post: Post) -> None:
        """Deliver the same attempt twice, in journal and audit log."""
        draft = self.draft(post)
        sent, staged_at = self.carry(draft)
        self.engine.deliver_again(sent)
        for _ in range(2):
            what = (draft.message_id, post.to)
            self.books.moved(self.clock.now_ns(), what, "staged", "written", 1)
        self.record(draft, (sent, staged_at))
        self._told(post, draft)

    def _number_twice(self, post: Post) -> None:
        draft = self.draft(post)
        carried = self.carry(draft)
        again = self._force(draft, None)
        self.engine.read(again.number, post.to)
        self.record(draft, carried)
        self._told(post, draft)

    def _answer_nobody(self, post: Post) -> None:
        """Answer an agent that does not exist, which a relay would bounce."""
        draft = self.draft(post)
        sent = self._force(draft, uuid4_of(post.headers["RE"]))
        self.record(draft, (sent, self.clock.now_ns()))
        self._told(post, draft)

    def _force(self, draft: Draft, correlation_id: str | None) -> Sent:
        post, facts = draft.post, draft.facts
        new = new_message(draft.file, draft.message_id, facts.discovered_at, None)
        new = replace(new, correlation_id=correlation_id or new.correlation_id)
        sent = self.engine.force(post.sender, post.to, new)
        self.engine.stage(sent)
        self.engine.deliver(sent)
        return sent

    def _invert(self, post: Post) -> None:
        """Delay a staged message so that a later one of the same pair overtakes it."""
        draft = self.draft(post)
        sent, staged_at = self.carry(draft, is_delivered=False)
        self.note_row(draft, self.clock.now_ns())
        self.file_original(draft)

        def deliver() -> None:
            self.engine.deliver(sent)
            now = self.clock.now_ns()
            row = Delivered(draft.message_id, post.to, "written", 1, staged_at, now)
            self.await_reader(Underway(draft, sent.number, row))

        self.at(self.clock.now_ns() + LATE_NS, deliver)
        later = post._replace(at_ns=post.at_ns + LATE_NS // 2, body=self._text.body(), fault="")
        self.at(later.at_ns, lambda: self.send(later))
        # of which of the two a check speaks is its affair
        self.planted.append(planted(post.fault, agent=post.sender, route=post.to))

    def _skew(self, post: Post) -> None:
        draft = self.draft(post, 2 * HOUR_NS)
        self.record(draft, self.carry(draft))
        self._told(post, draft)

    def _give_up(self, post: Post) -> None:
        """Leave a command unanswered: delivered four times, then a dead letter."""
        draft = self.draft(post)
        sent, staged_at = self.carry(draft)
        written_at = self.clock.now_ns()
        self.note_row(draft, written_at)
        self.file_original(draft)
        row = Delivered(draft.message_id, post.to, "written", 1, staged_at, written_at)
        self.at(self.engine.next_due_ns(), lambda: self._chase(sent, row))
        if not any(one.fault == post.fault for one in self.planted):  # all of them are one
            self.planted.append(planted(post.fault, agent=post.sender, route=post.to))

    def _chase(self, sent: Sent, row: Delivered) -> None:
        """Do what the relay does when an acknowledgment is overdue."""
        found, now = self.engine.overdue(sent), self.clock.now_ns()
        what = (row.message_id, row.recipient)
        if found is not None and found.state is DeliveryState.WAITING:
            before = row.staged_at, row.written_at
            row = row._replace(attempt=found.attempt, staged_at=now, written_at=now + 200_000)
            self.engine.stage(sent, found.attempt)
            self.engine.deliver(sent, found.attempt)
            self.books.moved(now, what, "written", "written", found.attempt, before)
        elif found is not None:
            self.engine.give_up(sent.number, row.recipient, found.reason)
            self.books.moved(now, what, "written", "dead", row.attempt)
            self.books.delivery(row._replace(state="dead", last_error=found.reason))
            return
        self.at(self.engine.next_due_ns(), lambda: self._chase(sent, row))

    # -- agents ----------------------------------------------------------------------------

    def await_reader(self, one: Underway) -> None:
        """Skip the sleeping agent, and messages that refer to a lost attachment."""
        recipient = one.row.recipient
        if recipient != SLEEPER and one.draft.post.fault != "attachment_gone":
            super().await_reader(one)
            return
        self.books.delivery(one.row)
        draft, facts = one.draft, one.draft.facts
        data = render_delivered(
            draft.file, draft.message_id, facts.agent_name, facts.discovered_at,
            facts.checksum or "", None,
        )  # fmt: skip
        path = self.home.path("agents", recipient, "inbox", draft.message_id + ".msg")
        with open(path, "xb") as file:
            file.write(data)
        os.chmod(path, 0o600)

    def note_rest(self, end_ns: int) -> None:
        """Record agents, processes, security events and refusals."""
        super().note_rest(end_ns)
        at_ns = end_ns - 30 * HOUR_NS
        _, second, third, fourth, *_ = self.cast.agents
        if "silent" in self._names:
            self.books.agent(SLEEPER, self.begin_ns, self.seen[SLEEPER])
            self.planted.append(planted("silent", agent=SLEEPER))
        if "stuck" in self._names:
            self._note_stuck(third, at_ns, end_ns)
        for fault, agent, (kind, folder, detail) in (
            ("repaired", second, OPEN_INBOX),
            ("limited", fourth, TOO_FAST),
        ):
            if fault in self._names:
                self.books.security(at_ns, str(kind), agent, f"agents/{agent}/{folder}", detail)
                self.planted.append(planted(fault, agent=agent))
        if "refused" in self._names:
            name, answer = f"{self._new_id(at_ns)}.msg", self._new_id(at_ns)
            reason = "its id is taken: every message needs a unique name"
            taken = (second, name, 999, at_ns, reason, answer, at_ns, RefusalCode.ID_TAKEN)
            self.books.reject(taken)
            self.planted.append(planted("refused", agent=second))

    def _note_stuck(self, agent: str, at_ns: int, end_ns: int) -> None:
        process = ProcessRow(
            agent, STUCK, 4_194_300, "1", "claude", "/srv/work", "never", LEAD,
            self._new_id(at_ns), 0, "[]", at_ns, at_ns + HOUR_NS,
            idle_s=int((end_ns - at_ns) / NS_PER_S),
        )  # fmt: skip
        self.books.process(process)
        self.planted.append(planted("stuck", agent=agent))

    def _new_id(self, at_ns: int) -> str:
        return f"{at_ns}-{self.rng.getrandbits(64):016x}"

    def _refuse_signature(self, post: Post) -> None:
        draft = self.draft(post)
        now, agent = self.clock.now_ns(), post.sender
        path = path_of(f"{agent}/rejected", draft.message_id, now)
        reason = f"SIGNATURE does not match the key registered for {agent}"
        facts = replace(draft.facts, file_path=path)
        refusal = Refusal(RefusalCode.BAD_SIGNATURE, reason)
        self.books.message(facts, "failed", now, refusal)
        self.books.moved(now, (draft.message_id, None), None, "pending")
        self.books.moved(now, (draft.message_id, None), "pending", "failed")
        self.books.security(now, str(IncidentKind.BAD_SIGNATURE), agent, path, reason)
        self.originals.put(path, draft.data, facts.file_mtime_ns)
        self._told(post, draft)

    # -- originals -------------------------------------------------------------------------

    def _lose_original(self, post: Post) -> None:
        draft = self.draft(post)
        self.record(draft._replace(data=b""), self.carry(draft))
        self._told(post, draft, path=draft.facts.file_path)

    def _alter_original(self, post: Post) -> None:
        draft = self.draft(post)
        altered = draft.data[:-1] + b"!\n"
        self.record(draft._replace(data=altered), self.carry(draft))
        self._told(post, draft, path=draft.facts.file_path)

    def file_original(self, draft: Draft) -> None:
        """Archive the original unless it is to be lost."""
        if draft.data:
            super().file_original(draft)

    def choose_attachment(self, post: Post) -> str:
        """Choose an attachment; those damaged later are referred to at least once."""
        if post.fault not in SPOILED:
            return super().choose_attachment(post)
        digest = self.attachments[SPOILED.index(post.fault)]
        path = f"attachments/{digest[:2]}/{digest}"
        self.planted.append(planted(post.fault, agent=post.sender, route=post.to, path=path))
        return digest

    def set_up(self) -> None:
        """Set up agents, including the sleeping one."""
        super().set_up()
        if "silent" in self._names:
            self.home.make_agent(SLEEPER)
