"""``search``: the search index of so many messages: filling it, its size, and what a search takes.

A journal of messages is written without a relay; some of the deliveries in the ledger are unread,
owed or dead. A follower then fills the index as fast as it can; a relay takes four pauses of the
same length, and a fifth of a core. Each kind of query is asked with many values, in turn with the
others, in one process; a reader opened it before, so ``first_ms``, the first of all, is apart.
Floor of the fill: reading and decoding the same journal. Floor of a search: the scan of the store,
once a kind, where there are not too many messages to load.
"""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from relay.acomm.model import Channel, ChannelType, Message, MessageStatus, MessageType
from relay.base.clock import NS_PER_S, Clock
from relay.base.config import Config
from relay.base.home import LEDGER, SEARCH, Home
from relay.daemon.home_journal import open_journal, stream_dir
from relay.daemon.opening import open_store_readonly
from relay.daemon.search_filler import KINDS, source_of
from relay.engine.events import VERSION, ChannelCreated, Event, EventCodec, EventRecord, MessageSent
from relay.journal.format import RECORD
from relay.journal.journal import Append, JournalReader
from relay.ledger.file import open_readonly
from relay.ledger.ledger import Ledger
from relay.search.find import find, ledger_ids
from relay.search.follow import Follower
from relay.search.index import LEFTOVERS, Index
from relay.search.query import Query, parse
from relay.search.scan import scan
from scripts.benchmarks.common import fresh_root, make_home, note, percentile, report, sync, timed

AGENTS = 50
VOCABULARY = 60_000  # words, the frequent ones far more often
WORDS = 45  # of a message, about: 300 bytes
ROUNDS = 60  # of every kind of query
BEGIN_S = 1_750_000_000
MOST_SCANNED = 100_000
LIMIT = 20
BATCH = 2_000


def run(base: str | None, *, sizes: Iterable[int]) -> None:
    """Run the case for each number of messages, and print its lines."""
    for messages in sizes:
        _run(fresh_root(base), messages)


def _run(root: Path, messages: int) -> None:
    note(f"search: {messages} messages in {root}")
    home, names = make_home(root, AGENTS)
    texts = Texts(messages)
    n_bytes = _write_journal(home, names, texts, messages)
    _write_ledger(home, names, messages)
    sync()
    _fill(home, messages, n_bytes)
    _ask(home, names, texts, messages)


class Texts:
    """The texts of messages; the same ones each time."""

    def __init__(self, messages: int) -> None:
        chance = random.Random(7)
        letters = "etaoinshrdlucmfwypvbgkjqxz"
        lengths = [2, 3, 4, 5, 6, 7, 8, 9, 10]
        self.words = [
            "".join(chance.choices(letters, weights=range(26, 0, -1), k=chance.choice(lengths)))
            for _ in range(VOCABULARY)
        ]
        self._weights: list[float] = []
        total = 0.0
        for rank in range(1, VOCABULARY + 1):
            total += 1 / rank
            self._weights.append(total)
        self._chance = chance
        self.samples: list[str] = []  # of texts, from which phrases are taken
        self._every = max(1, messages // 500)

    def make(self, number: int) -> str:
        """The text of a message: words, and an id of its own."""
        count = self._chance.randint(WORDS // 2, WORDS * 3 // 2)
        chosen = self._chance.choices(self.words, cum_weights=self._weights, k=count)
        text = f"{' '.join(chosen)} job-{number:07d} src/{chosen[0]}_{chosen[-1]}.py"
        if number % self._every == 0:
            self.samples.append(text)
        return text


def _write_journal(home: Home, names: list[str], texts: Texts, messages: int) -> int:
    """Write the events of a relay's messages, and return the bytes of their texts."""
    codec = EventCodec(None)
    n_bytes = 0

    def events() -> Iterator[Event]:
        nonlocal n_bytes
        for number in range(1, AGENTS + 1):
            name = f"dm/{names[number - 1]}/{names[number % AGENTS]}"
            kind = ChannelType.GROUP
            yield ChannelCreated(Channel(number, name, kind, names[number - 1], created_at=BEGIN_S))
        for number in range(1, messages + 1):
            body = texts.make(number).encode()
            n_bytes += len(body)
            at = BEGIN_S + number
            metadata: dict[str, str | int | float | bool | None] = {
                "relay_id": relay_id(number),
                "to": names[(number + 1) % AGENTS],
                "created_ns": at * NS_PER_S,
            }
            if number % 1000 == 0:
                metadata["attachments"] = "0" * 64
            message = Message(
                number,
                MessageType.COMMAND if number % 200 == 0 else MessageType.TEXT,
                names[number % AGENTS],
                number % AGENTS + 1,
                body,
                metadata=metadata,
                created_at=at,
                status=MessageStatus.SENT,
            )
            yield MessageSent(message, (names[(number + 1) % AGENTS],))

    with contextlib.ExitStack() as held:
        journal, _ = open_journal(held, home, Config(), Clock(), note)
        batch: list[Append] = []
        offset = journal.end
        for sequence, event in enumerate(events()):
            payload = codec.encode(EventRecord(VERSION, sequence, event), offset)
            batch.append(Append(payload))
            offset += RECORD.size + len(payload)
            if len(batch) == BATCH:
                journal.append(batch)
                journal.commit()
                journal.roll_if_due()
                batch, offset = [], journal.end
        journal.append(batch)
        journal.commit()
    return n_bytes


def relay_id(number: int) -> str:
    """The relay's id of a message."""
    return f"{(BEGIN_S + number) * NS_PER_S}-{number:016x}"


def _write_ledger(home: Home, names: list[str], messages: int) -> None:
    """Write the deliveries: one in 500 is unread, one in 5000 owed, one in 10,000 dead."""
    Ledger.open(home.path(LEDGER)).close()

    def rows() -> Iterator[tuple[str, str, str, str | None]]:
        for number in range(1, messages + 1):
            state = "read"
            if number % 500 == 0:
                state = "written"
            elif number % 10_000 == 1:
                state = "dead"
            owed = "open" if number % 5000 == 2 else None
            yield relay_id(number), names[(number + 1) % AGENTS], state, owed

    sql = "INSERT INTO deliveries (message_id, recipient, state, obligation) VALUES (?, ?, ?, ?)"
    with contextlib.closing(sqlite3.connect(home.path(LEDGER))) as db, db:
        db.executemany(sql, rows())


def _fill(home: Home, messages: int, n_bytes: int) -> None:
    source = source_of(home, Config(), Clock(), None)

    def read() -> None:
        for record in JournalReader(stream_dir(home)).read():
            source.codec.decode(record.payload, record.offset)

    floor_s = timed(read)
    path = home.path(SEARCH)
    slices: list[float] = []
    began, cpu = time.perf_counter(), time.process_time()
    with Index(path, writable=True) as index:
        follower = Follower(index, source)
        is_done = False
        while not is_done:
            at = time.perf_counter()
            is_done = follower.step().is_done
            slices.append((time.perf_counter() - at) * 1000)
    seconds = time.perf_counter() - began
    size = sum(os.path.getsize(path + end) for end in LEFTOVERS if os.path.exists(path + end))
    report(
        case="search fill",
        messages=messages,
        messages_per_s=round(messages / seconds),
        seconds=round(seconds, 1),
        cpu_s=round(time.process_time() - cpu, 1),
        ratio=round(seconds / floor_s, 1),
        slice_p50_ms=round(percentile(slices, 0.5), 1),
        slice_p99_ms=round(percentile(slices, 0.99), 1),
        text_mb=round(n_bytes / 1e6),
        index_mb=round(size / 1e6),
        bytes_per_text_byte=round(size / n_bytes, 2),
    )


def _questions(names: list[str], texts: Texts, messages: int) -> Iterator[tuple[str, str]]:
    """Queries with their kinds, in turn."""
    chance = random.Random(11)

    def word(first: int, last: int) -> str:
        while len(found := texts.words[chance.randrange(first, last)]) < 3:
            pass
        return found

    for _ in range(ROUNDS):
        sample = chance.choice(texts.samples).split(" ")
        at = chance.randrange(len(sample) - 3)
        name = chance.choice(names)
        day = time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime(BEGIN_S + chance.randrange(messages)))
        yield "frequent word", word(0, 200)
        yield "rare word", word(20_000, VOCABULARY)
        yield "id", f"job-{chance.randrange(1, messages):07d}"
        yield "absent", f"{word(0, 5000)}%{word(0, 5000)}"
        yield "phrase", f'"{" ".join(sample[at : at + 2])}"'
        yield "part of a word", sample[-1][5:12]
        yield "three words", f"{word(0, 500)} {word(0, 500)} {word(0, 500)}"
        yield "word from:", f"{word(0, 2000)} from:{name}"
        yield "from:", f"from:{name}"
        yield "to: is:unread", f"to:{name} is:unread"
        yield "word is:open", f"{word(0, 50)} is:open"
        yield "is:dead", "is:dead"
        yield "word before:", f"{word(0, 2000)} before:{day}"
        yield "kind: after:", f"kind:command after:{day}"
        yield "has:attachment", f"has:attachment {word(0, 50)}"
        yield "two letters", texts.words[chance.randrange(500)][:2]


def _ask(home: Home, names: list[str], texts: Texts, messages: int) -> None:
    kinds = tuple(KINDS.values())
    took: dict[str, list[float]] = {}
    found: dict[str, int] = {}
    asked: dict[str, Query] = {}
    ledger = home.path(LEDGER)
    first_ms = 0.0
    with Index(home.path(SEARCH)) as index:
        for kind, text in _questions(names, texts, messages):
            began = time.perf_counter()
            query = parse(text, kinds)
            result = find(index, query, LIMIT, ledger)
            ms = (time.perf_counter() - began) * 1000
            if not took:
                first_ms = ms
            took.setdefault(kind, []).append(ms)
            found[kind] = found.get(kind, 0) + len(result.entries)
            asked[kind] = query
    scans = _scan(home, asked) if messages <= MOST_SCANNED else {}
    for kind, times in took.items():
        p95 = percentile(times, 0.95)
        report(
            case=f"search {kind}",
            messages=messages,
            found=round(found[kind] / len(times), 1),
            p50_ms=round(percentile(times, 0.5), 2),
            p95_ms=round(p95, 2),
            scan_ms=round(scans[kind]) if kind in scans else None,
        )
    everything = [ms for times in took.values() for ms in times]
    report(
        case="search all",
        messages=messages,
        queries=len(everything),
        p50_ms=round(percentile(everything, 0.5), 2),
        p95_ms=round(percentile(everything, 0.95), 2),
        p99_ms=round(percentile(everything, 0.99), 2),
        first_ms=round(first_ms, 1),
    )


def _scan(home: Home, asked: dict[str, Query]) -> dict[str, float]:
    """Milliseconds of one scan of each kind, each with the loading that a command has to do."""
    took: dict[str, float] = {}
    began = time.perf_counter()
    store = open_store_readonly(home, Clock(), Config())
    load_s = time.perf_counter() - began
    with contextlib.closing(open_readonly(home.path(LEDGER))) as db:
        for kind, query in asked.items():
            began = time.perf_counter()
            scan(store, query, LIMIT, KINDS, ledger_ids(db, query) if query.states else None)
            took[kind] = (load_s + time.perf_counter() - began) * 1000
    return took
