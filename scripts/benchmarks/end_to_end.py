"""``end_to_end``: one producer and one consumer, each a process, with the relay between them.

The producer renames messages into its outbox as fast as it can, the consumer takes each out of its
inbox. Floor: the plain loop of ``drain`` over as many files. Beside the rate, the latency of each
message while the load lasts, from its rename to its event in the inbox.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from relay.base.home import Home
from relay.base.names import new_message_id
from scripts.benchmarks.common import fresh_root, make_home, message, note, percentile, report, sync
from scripts.benchmarks.drain import measure_floor
from scripts.benchmarks.latency import Relay, watch_folder

CONSUMER = [sys.executable, "-m", "scripts.benchmarks.end_to_end", "consume"]
PRODUCER = [sys.executable, "-m", "scripts.benchmarks.end_to_end", "produce"]


def run(base: str | None, *, messages: int) -> None:
    """Run the case and print its line."""
    root = fresh_root(base)
    note(f"end_to_end: {messages} messages in {root}")
    floor_s = measure_floor(root / "floor", 2, messages)
    (root / "ours").mkdir()
    home, (sender, recipient) = make_home(root / "ours", 2)
    sync()
    with Relay(home):
        taken_s, latencies = measure(home, sender, recipient, messages)
    report(
        case="end_to_end",
        messages=messages,
        messages_per_s=round(messages / taken_s),
        floor_files_per_s=round(messages / floor_s),
        ratio_to_floor=round(floor_s / taken_s, 3),
        p50_ms=round(1000 * percentile(latencies, 0.5), 3),
        p99_ms=round(1000 * percentile(latencies, 0.99), 3),
    )


def measure(home: Home, sender: str, recipient: str, messages: int) -> tuple[float, list[float]]:
    """Seconds from the first rename to the last message taken, and those of each message."""
    inbox = home.path("agents", recipient, "inbox")
    outbox = home.path("agents", sender, "outbox")
    consumer = subprocess.Popen(
        [*CONSUMER, inbox, str(messages)], stdout=subprocess.PIPE, text=True
    )
    assert consumer.stdout is not None
    consumer.stdout.readline()  # it watches
    began = time.time_ns()
    subprocess.run([*PRODUCER, outbox, recipient, str(messages)], check=True)
    lines = consumer.stdout.read().split()
    if consumer.wait() or len(lines) != messages:
        raise SystemExit(f"end_to_end: {len(lines)} of {messages} messages arrived")
    pairs = [line.split(":") for line in lines]
    ended = max(int(at) for _, at in pairs)
    return (ended - began) / 1e9, [(int(at) - int(sent)) / 1e9 for sent, at in pairs]


def _produce(outbox: str, recipient: str, messages: int) -> None:
    """Rename messages into the outbox; each one's id begins with the time of its rename."""
    data = message(recipient)
    for _ in range(messages):
        name = new_message_id(time.time_ns()) + ".msg"
        pending = os.path.join(outbox, ".pending", name)
        with open(pending, "wb", buffering=0) as file:
            file.write(data)
        os.rename(pending, os.path.join(outbox, new_message_id(time.time_ns()) + ".msg"))


def _consume(inbox: str, messages: int) -> None:
    """Read and remove each message; print when it was renamed and when it was seen."""
    wait, _ = watch_folder(inbox)
    print("ready", flush=True)
    seen: list[str] = []
    while len(seen) < messages:
        names = [name for name in os.listdir(inbox) if name.endswith(".msg")]
        now = time.time_ns()
        for name in names:
            path = Path(inbox, name)
            path.read_bytes()
            path.unlink()
            seen.append(f"{name.partition('-')[0]}:{now}")
        if not names:
            wait()
    print("\n".join(seen))


if __name__ == "__main__":
    if sys.argv[1] == "produce":
        _produce(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        _consume(sys.argv[2], int(sys.argv[3]))
