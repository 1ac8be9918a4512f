"""Messages with a syntax of their own, and the answers to them.

Acknowledgments, channels, saved state and processes. The syntax of the relay's answers
(docs/formats/msg.md) is known here only.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from agent_sdk.inbox import REFUSALS, Received
from agent_sdk.outbox import OutgoingMessage
from relay.base.errors import (
    InvalidName,
    LedgerError,
    LedgerMissing,
    MessageError,
    Refused,
    Timeout,
)
from relay.base.home import LEDGER, REJECTED, Home
from relay.base.message import MOST_AWAIT_S, Kind
from relay.base.names import MSG_SUFFIX, ORCHESTRATOR, check_agent_name, is_channel_name

if TYPE_CHECKING:
    import sqlite3

    from agent_sdk.agent import Agent
    from relay.base.outcomes import Progress, Wait

_Parsed = TypeVar("_Parsed")
_SAVED = re.compile(r"completed saved as version ([0-9]+) ")
_COMPLETED = re.compile(r"\s*completed\b")
_LOADED = re.compile(r"completed version ([0-9]+)\n")
ANSWERS = (Kind.RESPONSE, Kind.MESSAGE, Kind.ACK)  # that may end a request
NO_WAIT = "RELAY_NO_WAIT"
WAIT_S = 2.0
IDLE_GRACE_S = 2.0  # the relay answers when the time is over, not later than that
ACK_STATUSES = ("received", "in_progress", "completed")
KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SPLIT = re.compile(r",\s*[A-Za-z_][A-Za-z0-9_]*=")  # where the relay would begin another setting


class SavedState(NamedTuple):
    """One saved version, without its content."""

    version: int  # counted from 1
    size: int  # bytes
    saved_at: str  # ISO 8601, UTC
    message_id: str  # of the save message


class LoadedState(NamedTuple):
    """One saved version with its content."""

    version: int
    state: str


def load_version(
    agent: Agent, version: int | None, timeout_s: float, name: str | None = None
) -> LoadedState | None:
    """Load a version; ``name`` is another agent, for the operator and the lead."""
    return continuity(agent, "load", load_body(version, name), timeout_s, loaded_state)


def list_versions(agent: Agent, timeout_s: float, name: str | None = None) -> list[SavedState]:
    """See ``Agent.saved_states``; ``name`` as in ``load_version``."""
    body = f"NAME: {name}" if name is not None else ""
    return continuity(agent, "list", body, timeout_s, listed_states)


def saved_version(answer: str) -> int:
    """Parse the answer to ``save``. Errors: MessageError."""
    match = _SAVED.match(answer)
    if match is None:
        raise _unexpected(answer)
    return int(match[1])


def load_body(version: int | None, name: str | None = None) -> str:
    """Build the body of ``load``."""
    lines = [f"VERSION: {version}"] if version is not None else []
    lines += [f"NAME: {name}"] if name is not None else []
    return "\n".join(lines)


def loaded_state(answer: str) -> LoadedState | None:
    """Parse the answer to ``load``; None if nothing has been saved. Errors: MessageError."""
    match = _LOADED.match(answer)
    if match is None:
        raise _unexpected(answer)
    return LoadedState(int(match[1]), answer[match.end() :]) if int(match[1]) else None


def loaded_text(answer: str) -> str | None:
    """Parse the answer to ``load`` for its content only."""
    found = loaded_state(answer)
    return None if found is None else found.state


def listed_states(answer: str) -> list[SavedState]:
    """Parse the answer to ``list``."""
    found = []
    for line in answer.splitlines()[1:]:
        version, size, saved_at, message_id = line.split()
        found.append(SavedState(int(version), int(size), saved_at, message_id))
    return found


def _unexpected(answer: str) -> MessageError:
    return MessageError(f"unexpected answer from the relay: {answer.splitlines()[:1]}")


def reply_kind(message: Received, kind: str | None) -> str:
    """Return the KIND of a reply to a message.

    Errors: MessageError for an id: who sent it, and in which thread, is in the message.
    """
    if not isinstance(message, Received):
        raise MessageError(f"reply takes a message that was received, got {message!r:.60}")
    return kind or (Kind.RESPONSE if message.kind is Kind.QUERY else Kind.MESSAGE)


def ack_body(status: str, text: str) -> str:
    """Build the body of an ack. Errors: MessageError."""
    if status not in ACK_STATUSES:
        raise MessageError(f"status {status!r} is not one of {', '.join(ACK_STATUSES)}")
    return f"{status}\n{text}" if text else status


def original_of(message: Received | str, to: str | None) -> tuple[str, str]:
    """Return the TO and RE of an ack or nack; without TO the relay routes it by RE."""
    if isinstance(message, Received):
        return to or message.sender, message.id
    return to or ORCHESTRATOR, message


def ends_request(kind: str, body: str) -> bool:
    """Return True unless it is an ack before the last one."""
    return kind != Kind.ACK or _COMPLETED.match(body) is not None


def refused(answer: Received) -> Refused:
    """Make the error of a nack or error."""
    text = answer.body or f"{answer.sender} gave no reason"
    return Refused(text, message_id=answer.re or "")


def channel_body(channel: str, pattern: str | None = None, filter: str = "") -> str:
    """Build the body of a join, leave, subscribe or unsubscribe message.

    Errors: InvalidName; MessageError.
    """
    name = channel.removeprefix("#")
    if not is_channel_name(name):
        raise InvalidName(
            f"{channel!r} is not a valid channel name",
            hint="expected letters, digits, _ and -, parts separated by /, at most 128 bytes",
        )
    lines = [f"CHANNEL: {name}"]
    if pattern is not None:
        if len(pattern.split()) != 1:
            raise MessageError(f"pattern {pattern!r} is not one word")
        lines.append(f"PATTERN: {pattern}")
    if filter:
        if len(filter.splitlines()) != 1:
            raise MessageError(f"filter {filter!r} is not one line")
        lines.append(f"FILTER: {filter}")
    return "\n".join(lines)


def idle_body(name: str, within_s: float | None, message_id: str = "") -> str:
    """Build the body of a request to be told when an agent is idle. Errors: ValueError for nan."""
    check_limit(within_s)
    lines = ["ACTION: agent.notify_idle", f"NAME: {check_agent_name(name)}"]
    lines += [f"ID: {message_id}"] if message_id else []
    if within_s is not None:
        within_ms = round(min(within_s, MOST_AWAIT_S) * 1000)
        lines.append(f"WITHIN: {max(1, within_ms)}ms")
    return "\n".join(lines)


def default_wait_s(most_s: float = WAIT_S) -> float:
    """Return how long a send waits for the relay by default, at most ``most_s``.

    Errors: ValueError for nan.
    """
    check_limit(most_s)
    return 0.0 if os.environ.get(NO_WAIT) else min(WAIT_S, most_s)


def check_limit(timeout_s: float | None) -> None:
    """Errors: ValueError for a longest wait that is nan: it would never be over."""
    if timeout_s != timeout_s:
        raise ValueError("nan is not a number of seconds to wait")


def wait_of(name: str, given: str) -> Wait:
    """Read the argument ``name``, the step to wait for. Errors: MessageError."""
    from relay.base.outcomes import parse_wait  # most programs never wait

    try:
        return parse_wait(str(given))
    except ValueError as exc:
        raise MessageError(f"{name}: {exc}") from exc


class HowToWait(NamedTuple):
    """The step that a send waits for."""

    seconds: float  # for the relay to take the message over
    committed: bool  # it must
    step: str  # after that, as in ``Agent.wait``; or empty


def how_to_wait(wait: float | str | None) -> HowToWait:
    """Read the ``wait`` of ``Agent.send``: seconds, or a step.

    Errors: ValueError for nan; MessageError for a text that names no step, and for ``answer``.
    """
    if not isinstance(wait, str):
        check_limit(wait)
        return HowToWait(default_wait_s() if wait is None else wait, False, "")
    word, seconds = wait_of("wait", wait)
    if word == "answer":
        raise MessageError("send returns the id of the message; `request` waits for the answer")
    if word in ("none", "taken"):
        return HowToWait(0.0 if word == "none" else seconds, word == "taken", "")
    return HowToWait(default_wait_s(seconds), False, wait)


def ask(
    agent: Agent,
    kind: Kind,
    body: str,
    timeout_s: float | None,
    headers: Mapping[str, str] | None = None,
) -> str:
    """Send a request to the relay; with ``timeout_s``, wait for its ack. Returns the id."""
    if timeout_s is None:
        return agent.send(ORCHESTRATOR, body, kind=kind, headers=headers)
    fields = _to_relay(kind, body, headers)
    return agent._answer(fields, (Kind.ACK,), timeout_s, lambda answer: answer.re or "")


def continuity(
    agent: Agent,
    action: str,
    body: str | bytes,
    timeout_s: float,
    parse: Callable[[str], _Parsed],
) -> _Parsed:
    """Have the relay save, load or list states, and return its parsed answer."""
    fields = _to_relay(Kind.CONTINUITY, body, {"ACTION": action})
    return agent._answer(fields, ANSWERS, timeout_s, lambda answer: parse(answer.body))


def _to_relay(kind: Kind, body: str | bytes, headers: Mapping[str, str] | None) -> OutgoingMessage:
    return {"to": ORCHESTRATOR, "body": body, "kind": kind, "headers": headers}


def whole(answer: Received) -> Received:
    """Read an answer as it is."""
    return answer


def is_last(answer: Received, kinds: Sequence[Kind]) -> bool:
    """True for the last answer to a message. Errors: Refused for a nack."""
    if answer.kind in REFUSALS:
        raise refused(answer)
    return len(kinds) == 1 or ends_request(answer.kind, answer.body)


def was_asked(to: str, connect: Callable[[], sqlite3.Connection]) -> Callable[[str, str], bool]:
    """A test whether an agent got the message of that id; of the relay itself it is always true.

    ``to``: whom it was sent to, as far as it is known. ``connect``: opens the ledger, which knows a
    delivery before any answer to it is accepted.
    """

    def test(message_id: str, name: str) -> bool:
        if name and name in (to, ORCHESTRATOR):
            return True
        import sqlite3

        query = "SELECT 1 FROM deliveries WHERE message_id = ? AND recipient = ?"
        with (
            contextlib.suppress(LedgerError, OSError, sqlite3.Error),
            contextlib.closing(connect()) as db,
        ):
            return db.execute(query, (message_id, name)).fetchone() is not None
        return False

    return test


def check_not_refused(home: Home, agent: str, sent: str) -> None:
    """Errors: Refused for a message whose nack another process of the agent has taken.

    The relay has its file among the refused ones before it is out of the outbox.
    """
    with contextlib.suppress(OSError):
        for day in sorted(os.listdir(home.path("archive")))[-2:]:
            if os.path.lexists(home.path("archive", day, agent, REJECTED, sent + MSG_SUFFIX)):
                found = _progress(home, sent)
                raise Refused(found.text if found else "the relay refused it", message_id=sent)


def no_answer(
    home: Home, agent: str, sent: str, kinds: Sequence[Kind], timeout_s: float
) -> Timeout:
    """Make the error of an answer that has not come, with what the relay knows of the message.

    Errors: Refused for one that is refused; or, if it was not waited for, that cannot be answered.
    """
    check_not_refused(home, agent, sent)
    found = _progress(home, sent)
    if found and found.is_over and timeout_s <= 0:
        raise Refused(found.text, message_id=sent)
    what = "answer" if len(kinds) > 1 else kinds[0]
    text = f"no {what} to {sent} came within {timeout_s:g} s"
    return Timeout(f"{text}: {found.text}" if found else text, message_id=sent)


def _progress(home: Home, sent: str) -> Progress | None:
    """How far the answer to a message is; None if no ledger tells."""
    from relay.base.outcomes import Wait, watch

    with contextlib.suppress(LedgerError):
        return watch(home, ledger_of(home), sent, Wait("answer", 0))
    return None


def ledger_of(home: Home) -> Callable[[], sqlite3.Connection]:
    """The function that opens the ledger for reading. Its errors: LedgerMissing; LedgerError."""
    path = home.path(LEDGER)

    def connect() -> sqlite3.Connection:
        import sqlite3
        from urllib.parse import quote

        if not os.path.exists(path):
            raise LedgerMissing(f"there is no ledger at {path}")
        try:
            db = sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True)
        except sqlite3.Error as exc:
            raise LedgerError(f"{path}: {exc}") from exc
        db.row_factory = sqlite3.Row
        return db

    return connect


def answer_within_s(home: Home, sent: str, seconds: float) -> float:
    """How long the answer to a message is waited for: not at all if none can come any more.

    Errors: Refused for an id that is in no outbox, and that the relay has never had.
    """
    from relay.base.outcomes import UNKNOWN

    found = _progress(home, sent)
    if found == UNKNOWN:
        raise Refused(UNKNOWN.text, message_id=sent)
    return 0.0 if found and found.is_over else seconds


def waited(progress: Progress, sent: str, wait: Wait) -> None:
    """Errors: Timeout, or Refused, unless the message is where it was waited for."""
    if progress.is_over:
        raise Refused(progress.text, message_id=sent)
    if not progress.is_there:
        text = f"not {wait.word} within {wait.seconds:g} s: {progress.text}"
        raise Timeout(text, message_id=sent)


@contextlib.contextmanager
def idle_timeout(name: str, timeout_s: float) -> Iterator[None]:
    """Turn the relay's word that the time is over into a Timeout."""
    try:
        yield
    except Timeout as exc:
        text = f"the relay has not told within {timeout_s:g} s whether {name} is idle"
        raise Timeout(text, message_id=exc.message_id) from None
    except Refused as exc:
        if " within " in str(exc):
            raise Timeout(str(exc), message_id=exc.message_id) from None
        raise


def spawn_headers(
    name: str,
    cli: str,
    cwd: str | os.PathLike[str] | None,
    env: Mapping[str, str],
    restart: str | None,
) -> dict[str, str]:
    """Build the headers of a spawn message, leaving out empty values.

    Errors: MessageError for an ENV that the relay could not parse; it shows no values.
    """
    for key, value in env.items():
        if not KEY.fullmatch(key):
            raise MessageError(f"{key!r} is not a valid variable name", header="ENV")
        if value != value.strip() or "\n" in value or SPLIT.search(value):
            raise MessageError(
                f"the value of {key} cannot be sent: it contains a line break, leading or trailing "
                "blanks, or `,NAME=`; pass it in a file",
                header="ENV",
            )
    given = {
        "NAME": name,
        "CLI": cli,
        "CWD": None if cwd is None else os.path.abspath(cwd),
        "ENV": ",".join(f"{key}={value}" for key, value in env.items()),
        "RESTART": restart,
    }
    return {field: value for field, value in given.items() if value}


def release_headers(name: str, reason: str) -> dict[str, str]:
    """Build the headers of a release message."""
    return {"NAME": name} | ({"REASON": reason} if reason else {})
