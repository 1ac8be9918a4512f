"""``engine``: the message engine on 100,000 messages of 200 bytes, over 10 channels.

Each case is compared with a floor of the same run:

    send     Message objects appended to a list and put into a dict
    write    libdeflate's gzip at level 6 of the same bytes, SHA-256, and the same atomic write
    read     isal's gunzip of the same bytes and SHA-256; ours ends with a store ready to serve
    range, thread, search   a list comprehension over the same messages
    publish  10,000 subscriptions against 100

What is timed is done three times; the best counts, for ours and for the floor. The first
question after opening builds the indexes, so it is measured separately. Memory is the rise of the
resident high-water mark (VmHWM) of a fresh process while it opens the file.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import deflate
from isal import igzip

from relay.acomm import store_file
from relay.acomm.container import SectionType, open_frame
from relay.acomm.sections import split
from relay.base import fsio
from relay.base.clock import NS_PER_MS, NS_PER_S, Clock
from relay.base.names import uuid4_of
from relay.commstore import ChannelType, CommStore, Message, MessageFilter, MessageType
from scripts.benchmarks.common import fresh_root, note, report, timed

CONTENT_BYTES = 200
CHANNELS = 10
THREAD_MESSAGES = 10  # every second message belongs to a thread
STEP_NS = 10 * NS_PER_MS
START_NS = 1_780_000_000 * NS_PER_S
RUNS = 3
PUBLISHED = 2_000
WORDS = (
    "the agent build test deploy failed passed branch merge review file line error retry queue "
    "worker plan step done waiting for result of task run staging production commit revert please "
    "check logs and report back when finished token limit context summary function module import "
    "type is it not in on with by to from that this was has no yes ok next first last time out "
    "database schema migration endpoint request response timeout latency memory cache index"
).split()


class _Steps(Clock):
    """Clock that advances with each message."""

    def __init__(self) -> None:
        self.at_ns = START_NS

    def now_ns(self) -> int:
        return self.at_ns


def run(base: str | None, *, messages: int) -> None:
    """Run every case and print its line."""
    root = fresh_root(base)
    path = str(root / "store.acomm")
    note(f"engine: {messages} messages of {CONTENT_BYTES} bytes, {CHANNELS} channels in {root}")
    store = _send(_contents(messages))
    _write(store, path)
    del store
    opened = _read(path)
    _ask(opened)
    _publish()


def _contents(count: int) -> list[bytes]:
    """Typical message contents; the same each time."""
    dice = random.Random(1)
    return [" ".join(dice.choices(WORDS, k=60)).encode()[:CONTENT_BYTES] for _ in range(count)]


def _send(contents: list[bytes]) -> CommStore:
    stores: list[CommStore] = []
    ours_s = timed(lambda: stores.append(_sent(contents)))
    made = list(stores[0].state.messages.values())
    report(case="engine send", messages=len(contents), **_ratio(ours_s, _best(lambda: _kept(made))))
    return stores[0]


def _sent(contents: list[bytes]) -> CommStore:
    clock = _Steps()
    store = CommStore(clock)
    channels = []
    for number in range(CHANNELS):
        channel = store.create_channel(f"team-{number}", ChannelType.DIRECT, f"lead-{number}")
        store.join_channel(channel.id, f"worker-{number}")
        channels.append(channel.id)
    for number, content in enumerate(contents):
        clock.at_ns += STEP_NS
        at = number % CHANNELS
        thread, odd = divmod(number, 2 * THREAD_MESSAGES)
        store.send_message(
            channels[at],
            f"{'worker' if odd % 3 else 'lead'}-{at}",
            MessageType.TEXT,
            content,
            correlation_id=uuid4_of(f"thread-{thread}") if odd % 2 else None,
        )
    return store


def _kept(made: list[Message]) -> int:
    """Floor of sending: one object per message, in a list and a dict."""
    kept, by_number = [], {}
    for one in made:
        message = Message(
            one.id,
            one.message_type,
            one.sender,
            one.channel_id,
            one.content,
            one.topic,
            one.correlation_id,
            one.priority,
            one.metadata,
            one.created_at,
        )
        kept.append(message)
        by_number[message.id] = message
    return len(kept) + len(by_number)


def _write(store: CommStore, path: str) -> None:
    ours_s = _best(lambda: store_file.write(path, store.snapshot().file()))
    raw = store_file.encode(store.snapshot().file(), compress=False)

    def floor() -> None:
        packed = deflate.gzip_compress(raw, 6)
        hashlib.sha256(packed).digest()
        fsio.write_atomic(path + ".floor", packed)

    report(case="engine write", bytes=len(raw), **_ratio(ours_s, _best(floor)))


def _read(path: str) -> CommStore:
    data = Path(path).read_bytes()
    header, table = open_frame(data, path)
    raw = split(data, path, header, table)[SectionType.MESSAGES].data
    packed = deflate.gzip_compress(raw, 6)
    stores: list[CommStore] = []

    def ours() -> None:
        stores.clear()
        stores.append(CommStore.load(Clock(), store_file.read(path)))

    def floor() -> None:
        with open(path, "rb") as file:
            hashlib.sha256(file.read()).digest()
        igzip.decompress(packed)

    peak = _peak_of_opening(path)
    report(
        case="engine read",
        bytes=len(raw),
        **_ratio(_best(ours), _best(floor)),
        peak_bytes=peak,
        peak_to_section=round(peak / len(raw), 2),
    )
    return stores[0]


def _ask(store: CommStore) -> None:
    made = list(store.state.messages.values())
    middle = made[len(made) // 2]
    after, before = middle.created_at, middle.created_at + len(made) // 10_000
    thread = made[len(made) // 2 | 1].correlation_id
    assert thread is not None
    pattern = re.compile("deploy failed .* staging")
    span = MessageFilter(after=after, before=before, limit=len(made))
    first_s = timed(lambda: store.query_messages(span))
    cases: dict[str, tuple[Callable[[], list[Message]], Callable[[], list[Message]]]] = {
        "range": (
            lambda: store.query_messages(span).messages,
            lambda: [m for m in made if after < m.created_at < before],
        ),
        "thread": (
            lambda: store.get_thread(thread),
            lambda: [m for m in made if m.correlation_id == thread],
        ),
        "search": (
            lambda: store.search(pattern.pattern, limit=len(made)),
            lambda: [m for m in made if pattern.search(m.content.decode())],
        ),
    }
    for name, (ours, floor) in cases.items():
        found = {message.id for message in ours()}
        if not found or found != {message.id for message in floor()}:
            raise SystemExit(f"engine {name}: {len(found)} messages found are not the floor's")
        facts = _ratio(_best(ours), _best(floor))
        report(case=f"engine {name}", found=len(found), **facts)
    report(case="engine first query", seconds=round(first_s, 4))


def _publish() -> None:
    few_s, many_s = _publish_to(100), _publish_to(10_000)
    report(
        case="engine publish",
        publish_us_100=round(few_s / PUBLISHED * 1e6, 2),
        publish_us_10000=round(many_s / PUBLISHED * 1e6, 2),
        ratio_10000_to_100=round(many_s / few_s, 2),
    )


def _publish_to(subscriptions: int) -> float:
    """Seconds for PUBLISHED messages; each reaches one of the subscribers."""
    store = CommStore(_Steps())
    channel = store.create_channel("ci", ChannelType.PUB_SUB, "builder")
    for number in range(subscriptions):
        store.subscribe(channel.id, f"worker-{number % 100}", f"build.{number}.#")

    def publish() -> None:
        for number in range(PUBLISHED):
            topic = f"build.{number * 31 % subscriptions}.done"
            store.publish(channel.id, "builder", topic, b"the build is done")

    return _best(publish)


def _best(work: Callable[[], object]) -> float:
    return min(timed(work) for _ in range(RUNS))


def _ratio(ours_s: float, floor_s: float) -> dict[str, float]:
    return {
        "seconds": round(ours_s, 7),
        "floor_seconds": round(floor_s, 7),
        "ratio_to_floor": round(ours_s / floor_s, 3),
    }


def _peak_of_opening(path: str) -> int:
    """Rise of the high-water mark, in bytes, when a fresh process opens the file."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.benchmarks.engine", path],
        stdout=subprocess.PIPE,
        check=True,
    )
    before, after = map(int, json.loads(done.stdout))
    return (after - before) * 1024


def _high_water_kib() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


if __name__ == "__main__":
    before = _high_water_kib()
    CommStore.load(Clock(), store_file.read(sys.argv[1]))
    print(json.dumps([before, _high_water_kib()]))
