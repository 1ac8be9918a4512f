"""``audit acomm``: Spark's scan of archives by the format `acomm`, against its own Parquet scan.

Ten archives of 100,000 messages, as the relay writes them, and the same rows as Spark's own
Parquet files; both scanned into `noop` in one session, in turn: four columns, and all of them.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from relay.acomm.engine_state import EngineState, StoreSnapshot
from relay.acomm.model import (
    Channel,
    ChannelType,
    Delivery,
    DeliveryState,
    Message,
    MessageStatus,
    MessageType,
    Metadata,
    Participant,
    Priority,
    StoreFile,
)
from relay.base.clock import NS_PER_S
from relay.engine.archive_files import ArchiveFiles
from scripts.benchmarks.common import fresh_root, note, report, timed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

AGENTS = 50
MESSAGES = 1_000_000
ARCHIVE_MESSAGES = 100_000
ROUNDS = 5
WARMING = 2  # rounds that warm JVM, workers and page cache
MASTER = "local[2]"
FOUR = ("sender", "channel", "created_at", "status")
START_NS = 1_769_851_800 * NS_PER_S
_SYLLABLES = "an be co da er fi go ha in jo ka lo mi no op pa qu re st tu un ve wi ya zo".split()
_TOPICS = ("build.done", "build.failed", "deploy.started", "deploy.done", "review.asked")


def run(base: str | None, *, messages: int = MESSAGES) -> dict[str, float]:
    """Run the case and print its lines; the ratio of each set of columns."""
    from relay.audit.formats import STORED_MESSAGE, subset
    from relay.audit.session import spark_session

    root = fresh_root(base)
    note(f"audit acomm: {messages} messages in {root}")
    folder = str(root / "archive")
    write_archives(folder, messages)
    size = sum(path.stat().st_size for path in Path(folder).rglob("*.acomm"))
    spark = spark_session(MASTER)
    parquet = str(root / "parquet")
    spark.read.format("acomm").load(folder).write.parquet(parquet)

    every = spark.read.parquet(parquet)
    ratios = {}
    for name, columns in (("four", FOUR), ("full", tuple(every.columns))):
        schema = subset(STORED_MESSAGE, columns, "messages")
        frames = {
            "acomm": spark.read.format("acomm").schema(schema).load(folder),
            "parquet": every.select(*columns),
        }
        best_s = _scanned_in_turn(frames)
        ours, floor = best_s["acomm"], best_s["parquet"]
        ratios[name] = floor / ours
        report(
            case="audit acomm",
            columns=name,
            messages=messages,
            archive_bytes=size,
            rows_per_s=round(messages / ours),
            parquet_rows_per_s=round(messages / floor),
            ratio_to_parquet=round(ratios[name], 3),
        )
    spark.stop()
    return ratios


def _scanned_in_turn(frames: dict[str, DataFrame]) -> dict[str, float]:
    """Best time of each, in seconds: other load on the machine can only add to it."""
    seconds: dict[str, list[float]] = {kind: [] for kind in frames}
    for number in range(ROUNDS + WARMING):
        for kind, frame in frames.items():
            took = timed(frame.write.format("noop").mode("overwrite").save)
            if number >= WARMING:
                seconds[kind].append(took)
    return {kind: min(took) for kind, took in seconds.items()}


def write_archives(folder: str, messages: int) -> None:
    """Write archives with so many messages, one day each."""
    chance = random.Random(1)
    names = [f"{chance.choice(_SYLLABLES)}{chance.choice(_SYLLABLES)}-{n}" for n in range(AGENTS)]
    channels = _channels(names)
    archives = ArchiveFiles(folder)
    words = ["".join(chance.choices(_SYLLABLES, k=chance.randint(1, 4))) for _ in range(4000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    talk = _Talk(chance, names, channels, chance.choices(words, weights, k=1_000_000))
    for number, first in enumerate(range(0, messages, ARCHIVE_MESSAGES), 1):
        count = min(ARCHIVE_MESSAGES, messages - first)
        made = [talk.message(first + n + 1) for n in range(count)]
        used = {message.channel_id for message in made}
        state = EngineState(
            deliveries={m.id: {"bob": Delivery(DeliveryState.ACKNOWLEDGED)} for m in made}
        )
        store = StoreFile(
            made[0].created_at,
            made[-1].created_at + 3600,
            tuple(one for one in channels.values() if one.id in used),
            tuple(made),
        )
        archives.write(f"2026-02-{number:02d}/{number:06d}.acomm", StoreSnapshot(store, state))


def _channels(names: list[str]) -> dict[tuple[str, str], Channel]:
    found: dict[tuple[str, str], Channel] = {}
    for one in names:
        for other in names:
            if one < other:
                members = (Participant(one), Participant(other))
                ident = len(found) + 1
                found[one, other] = Channel(
                    ident, f"dm/{one}/{other}", ChannelType.DIRECT, one, members
                )
    return found


class _Talk(NamedTuple):
    """Generator of the messages: senders, channels and contents."""

    chance: random.Random
    names: list[str]
    channels: dict[tuple[str, str], Channel]
    pool: list[str]  # of words, in the frequency of a language

    def message(self, number: int) -> Message:
        """Create a message; every third one is an answered query in a thread."""
        chance = self.chance
        sender, to = chance.sample(self.names, 2)
        created_ns = START_NS + number * 800_000_000 + chance.randrange(700_000_000)
        size = chance.randint(50, 600)
        at = chance.randrange(len(self.pool) - 120)
        metadata: Metadata = {
            "relay_id": f"{created_ns - 2_000_000}-{chance.getrandbits(64):016x}",
            "to": to,
            "created_ns": created_ns,
        }
        answered = chance.random() < 0.3
        topic = chance.choice(_TOPICS) if chance.random() < 0.1 else None
        thread = None
        if answered:  # threads of some messages each
            thread = f"{(number // 50) * 7 + chance.randrange(12):08x}-0000-4000-8000-000000000000"
            metadata["thread"] = "design"
        if chance.random() < 0.05:
            metadata["h.Subject"] = " ".join(self.pool[at : at + 3])
        created = created_ns // NS_PER_S
        return Message(
            id=number,
            message_type=MessageType.QUERY if answered else MessageType.TEXT,
            sender=sender,
            channel_id=self.channels[min(sender, to), max(sender, to)].id,
            content=" ".join(self.pool[at : at + size // 5 + 5])[:size].encode(),
            topic=topic,
            correlation_id=thread,
            priority=Priority.HIGH if answered and number % 7 == 0 else Priority.NORMAL,
            metadata=metadata,
            created_at=created,
            delivered_at=created + (number % 20 == 0),
            acknowledged_at=created + chance.randrange(1, 30) if answered else None,
            ttl=3600 if number % 10 == 0 else None,
            status=MessageStatus.ACKNOWLEDGED if answered else MessageStatus.DELIVERED,
            retry_count=int(number % 40 == 0),
        )


if __name__ == "__main__":
    run(os.environ.get("BENCH_DIR"))
