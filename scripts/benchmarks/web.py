"""``web``: what each page takes over so many messages, and the relay beside an open stream.

A home as after a month; a relay that runs and has indexed it; the page in a process of its own.
Each page is asked for in turn, over one connection. Then the relay's latency, from a rename to the
file in the inbox, without a page and with a page whose stream is open and which is loaded again
with each event, as a browser does: in turns, the ratio is of the medians. Once alone, and once
while other agents send a thousand messages a second.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from relay.base.home import Home
from relay.search.query import Query
from relay.views.messages import find_rows
from scripts.benchmarks.common import fresh_root, make_home, message, note, percentile, report, sync
from scripts.benchmarks.latency import Relay, measure
from scripts.history.make import Given, History

AGENTS = 20
DAYS = 30
ROUNDS = 20
TURNS = 3  # of the relay's latency, without and with a page
SENT = 300  # messages in each
BUSY_AGENTS, PER_S = 10, 1_000  # others that send meanwhile; messages a second of all
INDEXED_WITHIN_S = 300


class Served:
    """``relay web`` of a home, and a connection to it."""

    def __init__(self, home: Home) -> None:
        words = [sys.executable, "-m", "relay.web", "--home", home.root]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        address = urlsplit(self._process.stdout.readline().strip())
        self.host = address.netloc
        self.headers = {"Authorization": f"Bearer {address.fragment}"}
        self._connection = self.connect()

    def connect(self) -> http.client.HTTPConnection:
        """Another connection."""
        return http.client.HTTPConnection(self.host)

    def get(self, path: str) -> float:
        """Seconds until a page is here."""
        began = time.perf_counter()
        self._connection.request("GET", path, headers=self.headers)
        answer = self._connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise SystemExit(f"web: {path}: {answer.status}")
        return time.perf_counter() - began

    def follow(self) -> None:
        """Load the page whenever the stream tells of something, until it ends."""
        stream = self.connect()
        stream.request("GET", "/events", headers=self.headers)
        answer = stream.getresponse()
        with contextlib.suppress(OSError, http.client.HTTPException):  # the process has ended
            while line := answer.readline():
                if line.startswith(b"event:"):
                    self.get("/search")

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()


def run(base: str | None, *, messages: int) -> None:
    """Run the case and print its lines."""
    root = fresh_root(base)
    note(f"web: {messages} messages in {root}")
    History(str(root / "history"), Given(messages, AGENTS, DAYS, time.time_ns(), 0)).make()
    sync()
    with Home(str(root / "history")) as home, Relay(home):
        rows = _indexed(home)
        served = Served(home)
        _pages(served, rows[0]["id"], rows[0]["from"], messages)
        served.close()
    (root / "beside").mkdir()
    home, (sender, reader, *others) = make_home(root / "beside", 2 + BUSY_AGENTS)
    with Relay(home):
        _beside(home, sender, reader, 0)
        with _others_at_work(home, others):
            _beside(home, sender, reader, PER_S)
    home.close()


def _indexed(home: Home) -> list[dict[str, object]]:
    """The newest messages, once the relay has indexed all."""
    deadline = time.monotonic() + INDEXED_WITHIN_S
    while (found := find_rows(home, Query(), 1)).note:
        if time.monotonic() > deadline:
            raise SystemExit(f"web: {found.note}")
        time.sleep(1)
    return found.rows


def _pages(served: Served, message_id: object, agent: object, messages: int) -> None:
    paths = [
        *("/", "/search", "/search?q=deploy", "/search?q=is:open", f"/search?q=with:{agent}"),
        *(f"/m/{message_id}", "/agents", f"/agents/{agent}", "/threads", "/failed"),
        *("/health", "/audits"),
    ]
    first = {path: served.get(path) for path in paths}
    taken: dict[str, list[float]] = {path: [] for path in paths}
    for _ in range(ROUNDS):
        for path in paths:
            taken[path].append(served.get(path))
    for path in paths:
        shown = path.replace(str(message_id), "ID").replace(str(agent), "NAME")
        report(
            case="web",
            page=shown,
            messages=messages,
            p50_ms=_ms(percentile(taken[path], 0.5)),
            p99_ms=_ms(percentile(taken[path], 0.99)),
            first_ms=_ms(first[path]),
        )


@contextlib.contextmanager
def _others_at_work(home: Home, agents: list[str]) -> Iterator[None]:
    """Other agents send ``PER_S`` messages a second to each other, from a process of their own."""
    words = [sys.executable, "-m", "scripts.benchmarks.web", home.root, *agents]
    work = subprocess.Popen(words)
    try:
        yield
    finally:
        work.terminate()
        work.wait()


def send_steadily(root: str, agents: list[str]) -> None:
    """Send from each agent to the next, ten messages every hundredth of a second."""
    for number in itertools.count():
        began = time.monotonic()
        for n in range(PER_S // 100):
            at = (10 * number + n) % len(agents)
            name = f"{time.time_ns()}-{n:02x}.msg"
            outbox = os.path.join(root, "agents", agents[at], "outbox")
            pending = os.path.join(outbox, ".pending", name)
            with open(pending, "wb") as file:
                file.write(message(agents[at - 1]))
            os.rename(pending, os.path.join(outbox, name))
        time.sleep(max(0.0, 0.01 - (time.monotonic() - began)))


def _beside(home: Home, sender: str, reader: str, per_s: int) -> None:
    """The relay's latency without and with a page, in turns, beside so many other messages."""
    data = message(reader)
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(TURNS):
        alone += measure(home, sender, reader, data, SENT)
        served = Served(home)
        thread = threading.Thread(target=served.follow, daemon=True)
        thread.start()
        beside += measure(home, sender, reader, data, SENT)
        served.close()
        thread.join()
    report(
        case="web",
        page="a stream beside the relay",
        others_per_s=per_s,
        messages=len(beside),
        p50_ms=_ms(percentile(beside, 0.5)),
        p99_ms=_ms(percentile(beside, 0.99)),
        alone_p50_ms=_ms(percentile(alone, 0.5)),
        alone_p99_ms=_ms(percentile(alone, 0.99)),
        ratio_to_alone_p50=round(percentile(beside, 0.5) / percentile(alone, 0.5), 3),
    )


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)


if __name__ == "__main__":
    send_steadily(sys.argv[1], sys.argv[2:])
