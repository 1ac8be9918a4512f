"""A relay starts on what a power cut left, and is judged from outside.

What is expected is known from the notes of senders and readers alone. For every message that was
acknowledged before the cut, and every recipient:

    lost          it is nowhere whole, and no reader had it
    doubled       it is there twice, whole, or an original of it was put aside as a duplicate
    falsely read  the ledger calls it read, or it stands in .read, and no reader had taken it
    ledger        rows, inboxes and archive differ, or what was read is back without its text
    start         the relay does not start, does not come to rest, or does not stop
    doctor        what `relay doctor --deep` finds when it has stopped, its notes and ACCEPTED aside

A reader has the text only once it has opened the file that it moved to .read. So a message whose
file there lost its content may come again: it is not doubled.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sqlite3
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from relay.base.names import ORCHESTRATOR, sha256_hex
from relay.cli import main as relay_command
from relay.daemon.process import main as relay_daemon
from scripts.powercutting.notes import AGENTS, Note, recipients
from scripts.powercutting.workload import FileSystem, state_mounted

KINDS = ("lost", "doubled", "falsely read", "ledger", "start", "doctor")
START_S, SETTLE_S, STOP_S = 60, 20, 30
# What a cut leaves that nobody was promised anything about.
ACCEPTED = (
    "not sent, in .pending",  # its sender was still writing it
    "a write cut short by a crash was set aside; nothing in it had been accepted",
    # The index of searches was being made; the relay was stopped before it could begin it again.
    "search.db: attempt to write a readonly database",
)
OPEN = "status IN ('pending', 'processing', 'completed')"


_Result = TypeVar("_Result")


class Fault(NamedTuple):
    """One of KINDS, and what it is."""

    kind: str
    text: str


class Verdict(NamedTuple):
    """Of one state."""

    acknowledged: int  # messages
    checks: int  # that one is where it should be, of one recipient
    faults: list[Fault]


class Unmountable(Exception):
    """The file system itself did not survive the cut."""


# A generator that yields while it waits for a relay, so that other states may go on.
Steps = Generator[None, None, _Result]


def judge(
    image: Path, target: Path, system: FileSystem, notes: Sequence[Note], at_ns: int
) -> Steps[Verdict]:
    """Start a relay on a state, let it come to rest, stop it, and compare. Errors: Unmountable."""
    with contextlib.ExitStack() as stack:
        try:
            home = stack.enter_context(state_mounted(image, target, system))
        except OSError as exc:
            raise Unmountable(str(exc)) from exc
        faults = yield from _run_relay(home, image.parent)
        if any(one.kind == "start" for one in faults):
            return Verdict(0, 0, faults)
        look = Look(home, notes, at_ns)
        faults += look.faults()
        faults += _doctor(home, image.parent)
        return Verdict(len(look.sent), look.checks, faults)


# -- the relay -------------------------------------------------------------------------------


def _run_relay(home: Path, aside: Path) -> Steps[list[Fault]]:
    read_fd, write_fd = os.pipe()
    words = ["relay.daemon", "--home", str(home), "--ready-fd", str(write_fd)]
    relay = _fork(relay_daemon, words, aside / "relay.out")
    os.close(write_fd)
    faults = []
    with os.fdopen(read_fd, "rb") as answer:
        yield from _wait(START_S, lambda: select.select([answer], [], [], 0)[0])
        said = answer.read() if select.select([answer], [], [], 0)[0] else b"nothing"
    if said == b"ready\n":
        if not (yield from _wait(SETTLE_S, lambda: not _unsettled(home))):
            faults.append(Fault("start", f"not at rest in {SETTLE_S} s: {_unsettled(home)}"))
    else:
        text = said.decode() or (aside / "relay.out").read_text()[-500:]
        faults.append(Fault("start", f"the relay did not start: {text}"))
    os.kill(relay, signal.SIGTERM)  # one that has ended is there until it is waited for
    if not (yield from _wait(STOP_S, lambda: os.waitpid(relay, os.WNOHANG)[0])):
        os.kill(relay, signal.SIGKILL)
        os.waitpid(relay, 0)
        faults.append(Fault("start", f"does not stop in {STOP_S} s"))
    return faults


def _wait(seconds: float, what: Callable[[], object]) -> Steps[bool]:
    ends = time.monotonic() + seconds
    while not what():
        if time.monotonic() > ends:
            return False
        yield
    return True


def _unsettled(home: Path) -> str:
    """What the relay still has to do, or nothing."""
    if left := [path.name for path in home.glob("agents/*/outbox/*.msg")]:
        return f"{len(left)} files in outboxes, {left[0]}"
    with contextlib.closing(_ledger(home)) as db:
        if left := db.execute(f"SELECT message_id FROM messages WHERE {OPEN}").fetchall():
            return f"{len(left)} open rows, {left[0][0]}"
        states = db.execute(
            "SELECT message_id, recipient, state FROM deliveries "
            "WHERE state IN ('held', 'staged', 'written')"
        ).fetchall()
    for message_id, recipient, state in states:
        is_there = (home / "agents" / recipient / "inbox" / f"{message_id}.msg").exists()
        if recipient != ORCHESTRATOR and (state != "written" or not is_there):
            return f"{message_id} for {recipient} is {state}, and in the inbox: {is_there}"
    return ""


def _ledger(home: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{home}/ledger.db?mode=ro", uri=True)


def _fork(main: Callable[[], object], words: list[str], output: Path) -> int:
    """Call a program's main in a process of its own: imports are done, which is most of a start."""
    child = os.fork()
    if child == 0:
        code: object = 1
        try:
            fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            sys.argv = words
            code = main()
        except SystemExit as exc:
            code = exc.code
        except BaseException as exc:
            print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code if isinstance(code, int) else bool(code))
    return child


def _doctor(home: Path, aside: Path) -> Iterator[Fault]:
    output = aside / "doctor.out"
    words = ["relay", "--home", str(home), "doctor", "--deep", "--json"]
    child = _fork(relay_command, words, output)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    findings = []
    for line in output.read_bytes().splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            findings.append(msgspec.json.decode(line))
    for one in findings:
        if one["severity"] != "note" and not any(text in one["finding"] for text in ACCEPTED):
            yield Fault("doctor", f"{one['check']}: {one['where']}: {one['finding']}")
    if code and not findings:
        yield Fault("doctor", f"exit {code}: {output.read_text()[-500:]}")


# -- what is there ---------------------------------------------------------------------------


class Look:
    """A home at rest, compared with what was noted before the cut."""

    def __init__(self, home: Path, notes: Sequence[Note], at_ns: int) -> None:
        self.sent = {one.id: one for one in notes if one.what == "sent" and one.at_ns < at_ns}
        # Whoever had begun to take it may have had it.
        self._taken = {
            (one.id, one.by) for one in notes if one.what == "taken" and one.since_ns < at_ns
        }
        self._home = home
        self._inboxes = {agent: self._files(agent) for agent in AGENTS}
        self._read = {agent: self._files(agent, ".read") for agent in AGENTS}
        with contextlib.closing(_ledger(home)) as db:
            self._rows = {
                message_id: (status, path)
                for message_id, status, path in db.execute(
                    "SELECT message_id, status, file_path FROM messages"
                )
            }
            self._deliveries: dict[tuple[str, str], str] = {
                (message_id, recipient): state
                for message_id, recipient, state in db.execute(
                    "SELECT message_id, recipient, state FROM deliveries"
                )
                if recipient != ORCHESTRATOR
            }
        self.checks = 0

    def _files(self, agent: str, *folder: str) -> dict[str, str]:
        """Message id -> SHA-256 of the body, of the files of an inbox or its .read."""
        inbox = self._home.joinpath("agents", agent, "inbox", *folder)
        return {path.stem: _body(path) for path in inbox.glob("*.msg")}

    def faults(self) -> Iterator[Fault]:
        for one in self.sent.values():
            for recipient in recipients(one):
                self.checks += 1
                yield from self._message(one, recipient)
            yield from self._original(one)
        yield from self._ledger_rows()
        yield from self._copies()

    def _message(self, one: Note, recipient: str) -> Iterator[Fault]:
        """An acknowledged message is with its recipient, once and whole, or he had it."""
        name = f"{one.id} of {one.by} to {recipient}"
        was_taken = (one.id, recipient) in self._taken
        waits = self._inboxes[recipient].get(one.id)
        read = self._read[recipient].get(one.id)
        state = self._deliveries.get((one.id, recipient))
        if waits is not None and read == one.body:
            yield Fault("doubled", f"{name}: in the inbox and in .read; {state}")
        if waits is not None and waits != one.body:
            kind = "ledger" if was_taken else "lost"
            yield Fault(kind, f"{name}: in the inbox, not whole; {state}")
        elif not was_taken and read is not None:
            yield Fault("falsely read", f"{name}: in .read; {state}")
        elif not was_taken and waits is None:
            yield Fault("lost", f"{name}: neither in the inbox nor read by anybody; {state}")
        if state is None:
            yield Fault("ledger", f"{name}: no delivery in the ledger")

    def _original(self, one: Note) -> Iterator[Fault]:
        status, path = self._rows.get(one.id, (None, ""))
        if status != "archived":
            yield Fault("ledger", f"{one.id} of {one.by}: its row is {status}")
        elif _body(self._home / path) != one.body:
            yield Fault("ledger", f"{one.id} of {one.by}: the original is not at {path}, whole")

    def _ledger_rows(self) -> Iterator[Fault]:
        """Each delivery of the ledger is where its state says, acknowledged or not."""
        for (message_id, recipient), state in self._deliveries.items():
            name = f"{message_id} to {recipient}"
            waits = message_id in self._inboxes[recipient]
            if state in ("read", "acked"):
                if (message_id, recipient) not in self._taken:
                    yield Fault("falsely read", f"{name}: {state}, and nobody took it")
                if waits:
                    yield Fault("ledger", f"{name}: {state}, and in the inbox")
            elif state != "written" or not waits:
                yield Fault("ledger", f"{name}: {state}, and in the inbox: {waits}")

    def _copies(self) -> Iterator[Fault]:
        """Nothing is there that no row knows, and no text is there twice."""
        for agent in AGENTS:
            for message_id in self._inboxes[agent]:
                if (message_id, agent) not in self._deliveries:
                    yield Fault("ledger", f"{message_id} is in the inbox of {agent}, not in it")
            texts: dict[str, set[str]] = defaultdict(set)
            for message_id, body in [*self._inboxes[agent].items(), *self._read[agent].items()]:
                texts[body].add(message_id)
            for body, ids in texts.items():
                if len(ids) > 1 and body != EMPTY:
                    yield Fault("doubled", f"{sorted(ids)} for {agent} have the same text")
        for path in self._home.glob("archive/*/*/duplicates/*.msg"):
            yield Fault("doubled", str(path.relative_to(self._home)))


EMPTY = sha256_hex(b"")


def _body(path: Path) -> str:
    """SHA-256 of the body of a message's file; nothing if there is none."""
    try:
        return sha256_hex(path.read_bytes().partition(b"\n\n")[2])
    except FileNotFoundError:
        return ""


def taken_twice(notes: Sequence[Note]) -> list[Fault]:
    """What a reader got twice while the power was on, though the relay was killed."""
    times = Counter((one.id, one.by) for one in notes if one.what == "taken")
    return [
        Fault("doubled", f"{message_id}: {by} got it {number} times, before any power cut")
        for (message_id, by), number in times.items()
        if number > 1
    ]
