"""``peers``: the same two questions to other durable queues that install from packages.

    latency      one message of 1 KiB every 10 ms: handed over -> in the consumer's hands
    messages/s   one producer as fast as it can, one consumer

Each peer is set to keep what it has accepted through a power cut, as far as it can; ``durable``
says what that is. A peer that is not installed is left out, with a line that says what to install.
Producer and consumer are processes of their own. The relay is measured by ``latency`` and
``end_to_end`` in the same run: its producer does not wait for the disk, as those of its peers do.
Consumers without a way to be told look every millisecond.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.benchmarks import end_to_end, latency
from scripts.benchmarks.common import (
    BODY_BYTES,
    fresh_root,
    make_home,
    message,
    note,
    percentile,
    report,
    sync,
)

LATENCY_MESSAGES = 500
MESSAGES = 4_000
WARM_UP = 20
PACE_S = 0.010
POLL_S = 0.001
STARTED_S = 10
ITSELF = [sys.executable, "-m", "scripts.benchmarks.peers"]

Send = Callable[[bytes], object]
Receive = Callable[[], bytes | None]  # None: nothing yet


def redis(root: str) -> tuple[Send, Receive]:
    """A stream; every command is in its log, and synced, before the reply."""
    import redis as client

    server: Any = client.Redis(unix_socket_path=os.path.join(root, "redis.sock"))
    last = b"0"

    def receive() -> bytes | None:
        nonlocal last
        found = server.xread({"q": last}, count=1, block=1000)
        if not found:
            return None
        last, fields = found[0][1][0]
        return bytes(fields[b"d"])

    return lambda data: server.xadd("q", {"d": data}), receive


def persist_queue(root: str) -> tuple[Send, Receive]:
    """SQLite in WAL; each message is acknowledged."""
    from persistqueue import SQLiteAckQueue
    from persistqueue.exceptions import Empty

    queue = SQLiteAckQueue(root, multithreading=True)

    def receive() -> bytes | None:
        try:
            data = queue.get(block=False)
        except Empty:
            return None
        queue.ack(data)
        return bytes(data)

    return queue.put, receive


def litequeue(root: str) -> tuple[Send, Receive]:
    """SQLite in WAL with synchronous = FULL; each message is marked as done."""
    from litequeue import LiteQueue

    queue = LiteQueue(os.path.join(root, "q.db"))
    queue.conn.execute("PRAGMA synchronous = FULL")

    def receive() -> bytes | None:
        found = queue.pop()
        if found is None:
            return None
        queue.done(found.message_id)
        return str(found.data).encode()

    return lambda data: queue.put(data.decode()), receive


def maildir(root: str) -> tuple[Send, Receive]:
    """A file in tmp, synced, renamed into new; the consumer moves it into cur."""
    for name in ("tmp", "new", "cur"):
        os.makedirs(os.path.join(root, name), exist_ok=True)
    count = 0
    waiting: list[str] = []

    def send(data: bytes) -> None:
        nonlocal count
        count += 1
        name = f"{time.time_ns()}.{count}"
        with open(os.path.join(root, "tmp", name), "wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())
        os.rename(os.path.join(root, "tmp", name), os.path.join(root, "new", name))

    def receive() -> bytes | None:
        if not waiting:
            waiting.extend(sorted(os.listdir(os.path.join(root, "new")), reverse=True))
        if not waiting:
            return None
        name = waiting.pop()
        os.rename(os.path.join(root, "new", name), os.path.join(root, "cur", name))
        return Path(root, "cur", name).read_bytes()

    return send, receive


# name -> how to use it, what it syncs before it accepts, the module that it needs, what to install
PEERS = {
    "redis": (
        redis,
        "log synced before the reply",
        "redis",
        "redis-server and `pip install redis`",
    ),
    "persist-queue": (persist_queue, "WAL, synchronous FULL", "persistqueue", "persist-queue"),
    "litequeue": (litequeue, "WAL, synchronous FULL", "litequeue", "litequeue"),
    "maildir": (maildir, "file synced, not its directory", "os", ""),
}


def run(base: str | None) -> None:
    """Measure the relay and each peer that is installed; a line each."""
    root = fresh_root(base)
    note(f"peers: {LATENCY_MESSAGES} and {MESSAGES} messages in {root}")
    _report_relay(root)
    for name, (_, durable, module, needs) in PEERS.items():
        if importlib.util.find_spec(module) is None or (
            name == "redis" and shutil.which("redis-server") is None
        ):
            note(f"peers: {name} is left out: install {needs}")
            continue
        folder = root / name
        folder.mkdir()
        with _server(name, folder):
            lone, _ = _measure(name, folder / "lone", LATENCY_MESSAGES, PACE_S)
            _, rate = _measure(name, folder / "many", MESSAGES, 0)
        _report(name, lone, rate, durable)


def _report_relay(root: Path) -> None:
    (root / "ours").mkdir()
    home, (sender, recipient) = make_home(root / "ours", 2)
    with latency.Relay(home):
        lone = latency.measure(home, sender, recipient, message(recipient), LATENCY_MESSAGES)
    (root / "many").mkdir()
    home, (sender, recipient) = make_home(root / "many", 2)
    sync()
    with latency.Relay(home):
        taken_s, _ = end_to_end.measure(home, sender, recipient, MESSAGES)
    _report("agent-relay", lone, MESSAGES / taken_s, "journal synced before the delivery")


def _report(peer: str, lone: list[float], rate: float, durable: str) -> None:
    report(
        case="peers",
        peer=peer,
        p50_ms=round(1000 * percentile(lone, 0.5), 3),
        p99_ms=round(1000 * percentile(lone, 0.99), 3),
        messages_per_s=round(rate),
        durable=durable,
    )


@contextlib.contextmanager
def _server(name: str, folder: Path) -> Iterator[None]:
    """Run redis-server on a socket during the block; the other peers have no server."""
    if name != "redis":
        yield
        return
    path = folder / "lone"
    path.mkdir()
    (folder / "many").symlink_to(path)  # both use one server
    settings = ["--port", "0", "--unixsocket", str(path / "redis.sock"), "--dir", str(path)]
    durable = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
    with subprocess.Popen(["redis-server", *settings, *durable], stdout=subprocess.DEVNULL) as one:
        try:
            _wait_for(path / "redis.sock")
            yield
        finally:
            one.terminate()


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + STARTED_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))
            return
        time.sleep(0.02)
    raise SystemExit(f"peers: redis-server did not start within {STARTED_S} s")


def _measure(name: str, folder: Path, messages: int, pace_s: float) -> tuple[list[float], float]:
    """Seconds from hand-over to receipt of each message, and messages a second in all."""
    folder.mkdir(exist_ok=True)
    PEERS[name][0](str(folder))  # creates what is there before both begin
    sync()
    total = messages + (WARM_UP if pace_s else 0)
    words = [name, str(folder), str(total)]
    with subprocess.Popen([*ITSELF, "consume", *words], stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        one.stdout.readline()  # it looks
        subprocess.run([*ITSELF, "produce", *words, str(pace_s)], check=True)
        lines = one.stdout.read().split()
    if len(lines) != total:
        raise SystemExit(f"peers: {len(lines)} of {total} messages came through {name}")
    pairs = [tuple(map(int, line.split(":"))) for line in lines]
    taken = [(seen - sent) / 1e9 for sent, seen in pairs]
    began, ended = min(sent for sent, _ in pairs), max(seen for _, seen in pairs)
    return taken[-messages:], messages / ((ended - began) / 1e9)


def _produce(name: str, folder: str, messages: int, pace_s: float) -> None:
    send, _ = PEERS[name][0](folder)
    for _ in range(messages):
        at = time.monotonic_ns()
        send(f"{at:020d}".encode() + b"x" * (BODY_BYTES - 20))
        if pace_s:
            time.sleep(max(0.0, pace_s - (time.monotonic_ns() - at) / 1e9))


def _consume(name: str, folder: str, messages: int) -> None:
    """Receive messages; print when each was sent and when it was seen."""
    _, receive = PEERS[name][0](folder)
    print("ready", flush=True)
    seen: list[str] = []
    while len(seen) < messages:
        data = receive()
        if data is None:
            time.sleep(POLL_S)
        else:
            seen.append(f"{int(data[:20])}:{time.monotonic_ns()}")
    print("\n".join(seen))


if __name__ == "__main__":
    if sys.argv[1] == "produce":
        _produce(sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
    else:
        _consume(sys.argv[2], sys.argv[3], int(sys.argv[4]))
