"""A history from its first day to its last: posts are found, delivered, read and answered in
order of time, and engine, ledger and archive get each step as from the relay.

Memory holds what is underway, one hour's posts and what the engine keeps live.
"""

from __future__ import annotations

import functools
import heapq
import random
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from msgspec.structs import astuple

from relay.acomm.model import Message, Origin
from relay.base import fsio
from relay.base.clock import NS_PER_MS, NS_PER_S
from relay.base.config import Config, JournalSettings, RetentionSettings, StoreSettings
from relay.base.home import LEDGER, META, Home
from relay.base.message import ANSWERS, MessageFile, render
from relay.base.names import EVERYONE, OPERATOR, SHA256_PREFIX, sha256_hex
from relay.delivery.router import answer_status, new_message
from relay.ledger.agents import EXITED, RELEASED, ProcessRow
from relay.ledger.ledger import FileFacts
from scripts.history.books import Books, Delivered
from scripts.history.clock import HistoryClock
from scripts.history.engine import ENDS, ROLL_MESSAGES, Engine, Sent
from scripts.history.originals import Originals, loose_from, path_of
from scripts.history.talk import DAY_NS, LEAD, Post, Talk, latency_ns, make_cast

JOURNAL_BYTES = 1400  # of a message with all its events, about
SEGMENTS = 16  # a history has about so many
ATTACHMENTS = 40  # different ones
RELAY_RESTARTS, AGENT_RESTARTS = 3, 3
FIRST_INODE = 1_000_000


class Given(NamedTuple):
    """Parameters of a history; equal parameters give equal histories."""

    messages: int
    agents: int
    days: float
    end_ns: int
    seed: int = 0


class Draft(NamedTuple):
    """A message as in its file, found by the relay."""

    post: Post
    message_id: str
    file: MessageFile
    data: bytes
    facts: FileFacts


class Underway(NamedTuple):
    """An unfinished delivery."""

    draft: Draft
    number: int | None  # the engine's; None where it has none
    row: Delivered


class History:
    """A home being generated."""

    def __init__(self, root: str, given: Given) -> None:
        self.given = given
        self.rng = random.Random(given.seed)
        self.begin_ns = given.end_ns - int(given.days * DAY_NS)
        self.config = make_config(given)
        self.home = Home.create(root, msgspec.json.encode(self.config))
        self.clock = HistoryClock(self.begin_ns)
        self.cast = make_cast(self.rng, given.agents)
        self.engine = Engine(self.home, self.config, self.clock)
        self.books = Books(self.home.path(LEDGER))
        self.originals = Originals(self.home, loose_from(given.end_ns))
        self._talk = Talk(self.rng, self.cast, given.messages, self.begin_ns, given.end_ns)
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._owed: dict[tuple[str, str], Underway] = {}  # (message id, recipient): its ack
        self.seen: dict[str, int] = {}
        self.attachments: list[str] = []
        self._epoch = 0

    def make(self) -> None:
        """Generate the whole history."""
        self.set_up()
        restarts = self._restarts()
        day = self.begin_ns // DAY_NS
        for end_ns, posts in self._talk.hours():
            for post in posts:
                self.at(post.at_ns, functools.partial(self.send, post))
            self._run(end_ns)
            if end_ns // DAY_NS > day:
                day = end_ns // DAY_NS
                self.engine.roll()
                self.engine.checkpoint()
            while restarts and restarts[0] <= end_ns:
                restarts.pop(0)
                self._begin()
        self._run(self.given.end_ns)
        assert not self._heap, "something is due after the end"
        self._finish()

    def at(self, at_ns: int, do: Callable[[], None]) -> None:
        """Schedule an action at a time."""
        self._count += 1
        heapq.heappush(self._heap, (at_ns, self._count, do))

    def _run(self, until_ns: int) -> None:
        while self._heap and self._heap[0][0] < until_ns:
            at_ns, _, do = heapq.heappop(self._heap)
            self.clock.go_to(at_ns)
            do()
            self.engine.tick()

    # -- begin and end ---------------------------------------------------------------------

    def set_up(self) -> None:
        """Set up what exists before the first message."""
        for name in self.cast.agents:
            self.home.make_agent(name)
        fsio.write_atomic(self.home.path("agents", LEAD, META), b'{"role": "lead"}\n')
        for _ in range(min(ATTACHMENTS, 1 + self.given.messages // 200)):
            data = self.rng.randbytes(self.rng.randrange(1_000, 40_000))
            digest = sha256_hex(data)
            fsio.ensure_dir(self.home.path("attachments", digest[:2]))
            fsio.write_atomic(self.home.path("attachments", digest[:2], digest), data)
            self.attachments.append(digest)
        self._begin()
        self.engine.gather(self.cast)

    def _begin(self) -> None:
        """Start the relay, for the first time or again."""
        self._epoch += 1
        self.books.writer = f"daemon {self._epoch}"
        self.engine.begin(self._epoch)

    def _restarts(self) -> list[int]:
        span = self.given.end_ns - self.begin_ns
        return sorted(self.begin_ns + self.rng.randrange(span) for _ in range(RELAY_RESTARTS))

    def _finish(self) -> None:
        end_ns = self.clock.now_ns()
        for one in self._owed.values():
            self.books.delivery(one.row)  # it was read, and never answered
        self.engine.checkpoint()
        self.clock.go_to(end_ns + NS_PER_S)
        self.engine.begin(self._epoch)  # an event, so that there are two checkpoints
        self.engine.close()
        self.originals.close()
        for name in (*self.cast.agents, OPERATOR):
            self.books.agent(name, self.begin_ns, self.seen.get(name))
        self.note_rest(end_ns)
        self.books.state(
            (
                ("home_id", f"{self.rng.getrandbits(128):032x}"),
                ("epoch", self._epoch),
                ("writer", self.books.writer),
                ("pid", 1),
                ("started_at", self.begin_ns),
                ("journal", self.engine.position),
            ),
            end_ns,
        )
        self.books.close()
        self.home.close()

    def note_rest(self, end_ns: int) -> None:
        """What no message leaves in the ledger: a third of the agents were started by the relay,
        some of them more than once."""
        chosen = self.cast.agents[1::3]
        for place, name in enumerate(chosen):
            restarts = self.rng.randrange(1, 3) if place < AGENT_RESTARTS else 0
            started = self.begin_ns + self.rng.randrange(NS_PER_S, 60 * NS_PER_S)
            span = end_ns - started
            again = sorted(started + self.rng.randrange(1, span) for _ in range(restarts))
            last = again[-1] if again else started
            state, code = (EXITED, 0) if place % 2 else (RELEASED, -15)
            row = ProcessRow(
                name, state, None, None, "claude", "/srv/work", "on-failure", LEAD,
                f"{started - NS_PER_S}-{self.rng.getrandbits(64):016x}", restarts,
                str(again[-1:]), last, end_ns, end_ns, code,
            )  # fmt: skip
            self.books.process(row)

    # -- one message -----------------------------------------------------------------------

    def send(self, post: Post) -> None:
        """Process a file as the relay does."""
        draft = self.draft(post)
        self.record(draft, self.carry(draft))

    def carry(self, draft: Draft, is_delivered: bool = True) -> tuple[Sent, int]:
        """Accept and deliver a message; (accepted message, time of delivery)."""
        sent = self.accept(draft)
        self._go_on(self.staging_ns())
        staged_at = self.clock.now_ns()
        self.engine.stage(sent)
        self.engine.tick()
        self._go_on(latency_ns(self.rng, 0.0002, 0.3, 0.1))
        if is_delivered:
            self.engine.deliver(sent)
        return sent, staged_at

    def staging_ns(self) -> int:
        """Time from discovery to commit."""
        return latency_ns(self.rng, 0.002, 0.4, 0.5)

    def _go_on(self, by_ns: int) -> None:
        self.clock.go_to(self.clock.now_ns() + by_ns)

    def draft(self, post: Post, dated_ns: int = 0) -> Draft:
        """Create the file of a post; ``dated_ns``: error of its sender's clock."""
        found_ns = self.clock.now_ns()
        mtime_ns = found_ns - self.rng.randrange(NS_PER_MS // 4, 4 * NS_PER_MS) + dated_ns
        message_id = f"{mtime_ns - 90_000}-{self.rng.getrandbits(64):016x}"
        attachments: tuple[str, ...] = ()
        if post.attach:
            digest = self.choose_attachment(post)
            attachments = (SHA256_PREFIX + digest,)
            self.books.refer(digest, message_id, found_ns)
        file = MessageFile(post.to, post.kind, post.headers, post.body, attachments)
        data = render(file)
        facts = FileFacts(
            message_id,
            post.sender,
            path_of(post.sender, message_id, found_ns),
            len(data),
            mtime_ns,
            FIRST_INODE + self.books.messages,
            sha256_hex(file.content),
            str(post.kind),
            post.to,
            found_ns,
        )
        return Draft(post, message_id, file, data, facts)

    def choose_attachment(self, post: Post) -> str:
        """Choose one of the attachments."""
        return self.rng.choice(self.attachments)

    def accept(self, draft: Draft) -> Sent:
        """Accept a message in the engine; acknowledge the one that it answers."""
        post, facts = draft.post, draft.facts
        answers = None
        if post.kind in ANSWERS:
            answers = self.find(post.headers["RE"])
        new = new_message(draft.file, draft.message_id, facts.discovered_at, answers)
        outbox = f"agents/{post.sender}/outbox/{draft.message_id}.msg"
        origin = Origin(post.sender, outbox, *astuple(facts)[3:])
        recipients: tuple[str, ...] | None = None
        if post.to == EVERYONE:
            recipients = tuple(name for name in self.cast.everyone if name != post.sender)
        elif not post.to.startswith("#"):
            recipients = (post.to,)
        sent = self.engine.accept(post.sender, post.to, new, origin, recipients)
        if answers is not None:
            said, text = answer_status(draft.file)
            answer = (draft.message_id, text)
            self.engine.acknowledge(answers.id, post.sender, said, answer)
            self._acked(post.headers["RE"], post.sender, said, answer)
        return sent

    def find(self, message_id: str) -> Message:
        """Return the engine's record of an unfinished message."""
        found = self.engine.find(message_id)
        assert found is not None, f"{message_id} is answered, and not in the store"
        return found

    def record(self, draft: Draft, carried: tuple[Sent | None, int]) -> list[Underway]:
        """Record a delivered message in the ledger, and schedule its readers."""
        sent, staged_at = carried
        written_at = self.clock.now_ns()
        self._go_on(40_000)
        done_ns = self.clock.now_ns()
        self.note_row(draft, done_ns)
        self.file_original(draft)
        self.seen[draft.post.sender] = done_ns
        recipients = sent.recipients if sent else (draft.post.to,)
        number = sent.number if sent else None
        rows = [
            Delivered(
                draft.message_id,
                recipient,
                "written",
                1,
                staged_at,
                written_at,
                obligation="open" if sent and self.engine.owed(sent, recipient) else None,
            )
            for recipient in recipients
        ]
        found = [Underway(draft, number, row) for row in rows]
        for one in found:
            self.await_reader(one)
        return found

    def note_row(self, draft: Draft, done_ns: int) -> None:
        """Record its archived row and the audit log of its states."""
        message_id, found_ns = draft.message_id, draft.facts.discovered_at
        self.books.message(draft.facts, "archived", done_ns)
        self.books.moved(found_ns, (message_id, None), None, "pending")
        self.books.moved(found_ns, (message_id, None), "pending", "processing")
        self.books.moved(done_ns, (message_id, None), "processing", "completed")
        self.books.moved(done_ns + NS_PER_MS, (message_id, None), "completed", "archived")

    def file_original(self, draft: Draft) -> None:
        """Move the file to the archive."""
        facts = draft.facts
        self.originals.put(facts.file_path, draft.data, facts.file_mtime_ns)

    def await_reader(self, one: Underway) -> None:
        """Schedule the recipient's read."""
        is_person = one.row.recipient == OPERATOR
        median_s, most_s = (60, 600) if is_person else (2, 25)
        at_ns = self.clock.now_ns() + latency_ns(self.rng, median_s, 0.8, most_s)
        self.at(at_ns, lambda: self._read(one))

    def _read(self, one: Underway) -> None:
        """Read a message as its recipient, and send its answers."""
        now, reader = self.clock.now_ns(), one.row.recipient
        draft, post = one.draft, one.draft.post
        if one.number is not None:
            self.engine.read(one.number, reader)
        row = one.row._replace(state="read", read_at=now)
        self.books.moved(now, (draft.message_id, reader), "written", "read", row.attempt)
        self.seen[reader] = now
        answer = self._talk.next_post(post, draft.message_id, reader, now)
        if answer is not None:
            self.at(answer.at_ns, lambda: self.send(answer))
        if answer is not None and answer.kind in ANSWERS:
            self._owed[draft.message_id, reader] = one._replace(row=row)
        else:
            self.books.delivery(row)

    def _acked(self, message_id: str, reader: str, said: str, answer: tuple[str, str]) -> None:
        now = self.clock.now_ns()
        row = self._owed.pop((message_id, reader)).row
        duty = row.obligation and ("answered" if said in ENDS else "open")
        row = row._replace(
            state="acked",
            acked_at=now,
            ack_status=said,
            answer_id=answer[0],
            answer_text=answer[1],
            obligation=duty,
        )
        self.books.delivery(row)
        self.books.moved(now, (message_id, reader), "read", "acked", row.attempt)


def make_config(given: Given) -> Config:
    """The relay's defaults, but for what a long history needs: nothing of it is pruned, and its
    journal has enough segments for all tiers."""
    size = given.messages * JOURNAL_BYTES // SEGMENTS
    journal = JournalSettings(
        segment_bytes=min(max(size, 64 << 10), 64 << 20),
        local_age_s=max(3600, int(given.days * 86_400 / 3)),
    )
    kept = RetentionSettings(
        archive_days=0, archive_mib=0, read_days=0, read_mib=0, attachments_days=0, audit_days=0
    )
    return Config(
        journal=journal, retention=kept, store=StoreSettings(active_messages=2 * ROLL_MESSAGES)
    )
