"""One bell at work: what it reads and keeps, and when it rings. See ``relay.reach.bell``.

It rings once for all that waits, then more and more slowly. Times are Unix ns.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping

from relay.reach.inotify import Folders
from relay.reach.mailbox import inbox_dir, inbox_file, inbox_ids, read_message
from relay.reach.report import RING, log, write_report
from relay.reach.rungs import (
    NO_RUNG,
    RUNGS,
    BadWake,
    Resume,
    RingFailed,
    Rung,
    RungTarget,
    Wake,
    applying,
    read_wake,
    ring_text,
    survey,
)
from relay.reach.session import (
    BELL,
    BLOCKED,
    FOLDER,
    WORKING,
    Session,
    adopt,
    load_session,
    load_sessions,
    read_facts,
    replace_file,
    session_lock,
    side_file,
)

NS = 10**9
PAUSES_S = (5, 10, 20, 40, 80, 120)  # between rings that were not answered
URGENT = ("0", "1")  # PRIORITY
URGENT_PAUSE_S = 1  # many urgent messages are few rings, too
MOST_BYTES = 65_536  # of a message: a name after them is not seen
TALK = ("message", "status", "notification")  # kinds that ask nothing
EVERYBODY, PERSON = "all", "operator"  # relay.base.names, which a bell does not import
TRIES = 2
LOOK_S = 30.0  # without any event
QUIET_S = 120  # a turn without a hook for so long may have been interrupted: no hook tells it
MOST_KEPT = 1000  # ids and
RINGS_KEPT = 10  # rings in the file


class Memory:
    """The facts that a bell keeps in its file, for its successor and ``relay wake status``."""

    def __init__(self) -> None:
        self.reset()
        self.pid = os.getpid()
        self.agent = ""
        self.rungs: dict[str, str] = {}  # name -> why it does not apply
        self.trouble = ""  # of wake.json
        self.begun: dict[str, object] = {}  # the ring under way
        self.rings: list[dict[str, object]] = []  # the last ones, as reported

    def reset(self) -> None:
        """Forget when it rang."""
        self.rung: list[str] = []  # ids that waited at the last ring
        self.at = 0  # of that ring; 0: nothing waited since
        self.count = 0  # rings that were not answered
        self.took = 0  # ns until it was over; pauses begin there
        self.again_s = 0.0  # least pause after it

    @staticmethod
    def load(path: str) -> Memory | None:
        """The memory in a bell's file; None if there is none or it is damaged."""
        memory, facts = Memory(), read_facts(path)
        adopt(memory, facts)
        return memory if facts else None

    def due(self, waiting: Mapping[str, bool], answered_at: int, now: int) -> int | None:
        """The time of the next ring; None if nothing waits.

        waiting: message id -> is it urgent. answered_at: the agent's last sign of life.
        """
        if not waiting:
            self.reset()
            return None
        if self.at > now:  # the clock was set back
            self.at = now
        is_answered, fresh = answered_at > self.at, waiting.keys() - set(self.rung)
        if not self.at or (fresh and is_answered):
            return now
        over = self.at + self.took
        earliest = over + round(self.again_s * NS)
        if any(waiting[message_id] for message_id in fresh):
            return max(now, earliest, over + URGENT_PAUSE_S * NS)
        return max(over + PAUSES_S[min(self.count, len(PAUSES_S)) - 1] * NS, earliest)

    def rang(self, waiting: Iterable[str], answered_at: int, now: int) -> None:
        """Remember a ring."""
        ids = sorted(waiting)
        is_new = answered_at > self.at and bool(set(ids) - set(self.rung))
        self.count = 1 if is_new or not self.at else self.count + 1
        self.rung, self.at, self.took, self.again_s = ids, now, 0, 0.0


class Inbox:
    """The messages in an agent's inbox for which it is rung; each is looked at once.

    What agents say to each other in a channel rings those that it names, and waits for the others:
    else one word to twelve agents is twelve runs of a model. What asks something, is urgent, comes
    from the operator or goes to everybody rings everybody.
    """

    def __init__(self, root: str, agent: str) -> None:
        self._place = root, agent
        self._name = re.compile(rb"(?<![\w-])@?%s(?![\w-])" % re.escape(agent).encode(), re.I)
        self._known: dict[str, bool | None] = {}

    def messages(self) -> dict[str, bool]:
        """Message id -> is it urgent. Empty without an inbox that can be read."""
        try:
            ids = inbox_ids(*self._place)
        except OSError:
            return {}
        self._known = {o: self._known[o] if o in self._known else self._look(o) for o in ids}
        return {
            message_id: is_urgent
            for message_id, is_urgent in self._known.items()
            if is_urgent is not None
        }

    def _look(self, message_id: str) -> bool | None:
        """Is a message urgent; None: it does not ring."""
        if (read := read_message(inbox_file(*self._place, message_id), MOST_BYTES)) is None:
            return False
        fields, body = dict(read[0]), read[1] or b""
        if fields.get("PRIORITY") in URGENT:
            return True
        is_talk = fields.get("CHANNEL", EVERYBODY) != EVERYBODY and fields.get("FROM") != PERSON
        is_talk = is_talk and fields.get("KIND", "message").lower() in TALK
        return None if is_talk and not self._name.search(body) else False


class Bell:
    """The bell of a session, or of an agent that has none (``relay bell --as NAME``)."""

    def __init__(self, root: str, agent: str, session: Session | None, fd: int = -1) -> None:
        self.root = root
        self.agent = agent
        self.session = session
        self._fd = fd  # of its locked file
        self._inbox = Inbox(root, agent)
        self._memory = Memory()
        self._memory.agent = agent
        self._asked = ("", 0)

    # -- its life --

    def run(self) -> None:
        """Ring until the session ends."""
        self._recall()
        folders = Folders()
        folders.add(inbox_dir(self.root, self.agent))
        if self.session is not None:
            folders.add(os.path.join(self.root, FOLDER), self.session.file)
            if self.session.is_live:
                folders.add_process(self.session.pid)
        try:
            while self._is_needed():
                try:
                    due = self.step(time.time_ns())
                except OSError as exc:  # a full disk, for example
                    log(self.root, f"the bell of {self.agent}: {exc}")
                    due = time.time_ns() + PAUSES_S[0] * NS
                left = LOOK_S if due is None else (due - time.time_ns()) / NS
                folders.wait(min(LOOK_S, left))
        finally:
            folders.close()

    def _is_needed(self) -> bool:
        """Read the session again; False when it has ended or lost its name."""
        session = self.session
        if session is None:
            return os.path.isdir(inbox_dir(self.root, self.agent))
        found = load_session(self.root, session.harness, session.session_id)
        if found is not None and found.is_live and not found.is_elsewhere:
            self.session = found
            return found.agent == self.agent
        return self._wake().rung == Resume.name and not any(
            other.agent == self.agent and other.is_live for other in load_sessions(self.root)
        )

    # -- one look --

    def step(self, now: int) -> int | None:
        """Ring if it is time to; when to look again (Unix ns), None for the next event."""
        target, waiting = self._target(), self.waiting()
        due = self._memory.due(waiting, self._answered_at(waiting), now)
        self._note(target)
        if due is None or not self._may_ring(waiting, now):
            return None if due is None else now + QUIET_S * NS
        if due > now:
            return due
        with session_lock(self.root, f"ring-{self.agent}"):
            if self._is_needed() and (waiting := self.waiting()) and self._may_ring(waiting, now):
                target.session = self.session
                self._ring(target, waiting, now)
        return self._memory.due(waiting, self._answered_at(waiting), now)

    def ring(self, name: str) -> dict[str, object]:
        """Ring by one rung now, whatever the rules say; the ring as it is reported."""
        target = self._target()
        with session_lock(self.root, f"ring-{self.agent}"):
            (rung,) = (candidate for candidate in RUNGS if candidate.name == name)
            self._ring_by(rung, target, len(self.waiting()))
        return self._memory.rings[-1]

    def survey(self) -> Memory:
        """The rungs and whether they apply, as this process sees it."""
        self._memory.rungs = survey(self._target())
        return self._memory

    def waiting(self) -> dict[str, bool]:
        """The messages that this session was not shown: id -> is it urgent."""
        found = self._inbox.messages()
        if self.session is not None:
            for message_id, offer in self.session.offered.items():
                if offer.get("printed"):
                    found.pop(message_id, None)
            for message_id in self.session.listed:
                found.pop(message_id, None)
        return found

    def _answered_at(self, waiting: Mapping[str, bool]) -> int:
        if self.session is not None:
            return self.session.seen_at
        return self._memory.at + 1 if set(self._memory.rung) - waiting.keys() else 0

    def _is_mid_turn(self) -> bool:
        return self.session is not None and self.session.is_live and self.session.state == WORKING

    def _may_ring(self, waiting: Mapping[str, bool], now: int) -> bool:
        """False while a permission dialog is open, and in a turn unless something is urgent."""
        if self.session is None or not self.session.is_live:
            return True
        if self.session.state == BLOCKED:
            return False
        is_urgent = any(
            waiting[message_id] for message_id in waiting.keys() - set(self._memory.rung)
        )
        is_quiet = now - self.session.seen_at > QUIET_S * NS
        return is_urgent or is_quiet or not self._is_mid_turn()

    def _ring(self, target: RungTarget, waiting: Mapping[str, bool], now: int) -> None:
        """Try the rungs in order until one has rung. Called under the agent's lock.

        A rung whose rings were not answered may not work here, and no error tells it: after
        TRIES of them the next one is first.
        """
        began = time.monotonic_ns()
        self._memory.rang(waiting, self._answered_at(waiting), now)
        rungs = [rung for rung in applying(target) if rung.mid_turn or not self._is_mid_turn()]
        first = (self._memory.count - 1) // TRIES % max(1, len(rungs))
        for rung in (*rungs[first:], *rungs[:first]):
            if self._ring_by(rung, target, len(waiting)):
                self._memory.again_s = rung.again_s
                break
        self._memory.took = time.monotonic_ns() - began
        self._save()

    def _ring_by(self, rung: Rung, target: RungTarget, messages: int) -> bool:
        at = time.time_ns()
        self._memory.begun = {"at": at, "rung": rung.name, "messages": messages}
        self._save()  # killed from here on, the next bell waits its time
        try:
            result, has_rung = f"rang: {rung.ring(target, ring_text(messages))}", True
        except RingFailed as exc:
            result, has_rung = f"failed: {exc}", False
        self._end_ring(result, round((time.time_ns() - at) / 10**6, 1))
        return has_rung

    def _end_ring(self, result: str, took_ms: float | None = None) -> None:
        ring = self._memory.begun | {"result": result}
        self._report(ring)
        self._memory.rings = [*self._memory.rings, ring | {"ms": took_ms}][-RINGS_KEPT:]
        self._memory.begun = {}
        self._save()

    def _report(self, ring: dict[str, object]) -> None:
        key = self.session.key if self.session else ""
        try:
            write_report(self.root, self.agent, [{"what": RING, "session": key} | ring])
        except OSError as exc:
            log(self.root, f"ring of {self.agent} was not reported: {exc}")

    # -- what it reads and keeps --

    def _target(self) -> RungTarget:
        return RungTarget(self.root, self.agent, self.session, self._wake())

    def _wake(self) -> Wake:
        """``wake.json``, and for a while the rung that ``relay wake test`` asks for."""
        trouble = ""
        try:
            wake = read_wake(self.root, self.agent)
        except BadWake as exc:  # nobody knows which rung was meant: none stands in for it
            wake, trouble = Wake(rung=NO_RUNG), str(exc)
        if trouble and trouble != self._memory.trouble:
            log(self.root, trouble)
        self._memory.trouble = trouble
        asked = asked_rung(self.root, self.session) if self.session is not None else ("", 0)
        if asked != self._asked:
            self._asked = asked
            if asked[0]:
                self._memory.reset()
        return Wake(wake.argv, asked[0]) if asked[0] else wake

    def _note(self, target: RungTarget) -> None:
        """Save which rungs apply when that has changed."""
        found = survey(target)
        if found != self._memory.rungs:
            self._memory.rungs = found
            self._save()

    def _recall(self) -> None:
        """Go on where a bell that was killed ended."""
        found = Memory.load(side_file(self.root, self.session, BELL)) if self.session else None
        if found is None or found.agent != self.agent:
            return
        found.pid = os.getpid()
        self._memory = found
        if found.begun:
            self._end_ring("failed: the bell was killed while it rang")
        self._save()

    def _save(self) -> None:
        """Write the memory in place: the file is locked, and one line is enough to read it."""
        if self._fd >= 0:
            facts = vars(self._memory) | {"rung": self._memory.rung[-MOST_KEPT:]}
            data = json.dumps(facts).encode() + b"\n"
            try:
                os.pwrite(self._fd, data, 0)
                os.ftruncate(self._fd, len(data))
            except OSError as exc:
                log(self.root, f"the bell of {self.agent} could not save its state: {exc}")


def asked_rung(root: str, session: Session) -> tuple[str, int]:
    """The only rung that is to be used just now, and until when; empty: all."""
    asked = read_facts(side_file(root, session, ".ask"))
    try:
        rung, until_ns = str(asked["rung"]), int(asked["until"])
    except (ValueError, KeyError, TypeError):
        return "", 0
    return (rung, until_ns) if time.time_ns() < until_ns else ("", 0)


def ask_rung(root: str, session: Session, rung: str, seconds: float) -> None:
    """Let the session's bell use this rung alone; an empty name ends that. Errors: OSError."""
    path = side_file(root, session, ".ask")
    if not rung:
        if os.path.exists(path):
            os.unlink(path)
        return
    facts = {"rung": rung, "until": time.time_ns() + round(seconds * NS)}
    replace_file(path, json.dumps(facts))
