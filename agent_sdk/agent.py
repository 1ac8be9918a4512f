"""``Agent``: send, receive, acknowledge, query, attach, use channels as one agent.

Every operation only reads or writes files in the home.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Unpack

from agent_sdk.attachments import Attachments
from agent_sdk.disk import retry_on_enospc
from agent_sdk.inbox import Inbox, Received
from agent_sdk.outbox import Outbox, OutgoingMessage, SendOptions, compose
from agent_sdk.presence import max_body_bytes, register, unregister
from agent_sdk.requests import SavedState, list_versions, load_state, save_state, spawn_headers
from relay.base.clock import Clock
from relay.base.errors import (
    InvalidName,
    MessageError,
    NotRunning,
    Refused,
    RelayError,
    Timeout,
)
from relay.base.home import Home, default_root, lock_holder
from relay.base.message import Kind, MessageFile
from relay.base.names import ORCHESTRATOR, check_agent_name, is_channel_name

ACK_STATUSES = ("received", "in_progress", "completed")
COMPLETED = re.compile(r"\s*completed\b")
REFUSALS = frozenset({Kind.NACK, Kind.ERROR})


class Agent:
    """One agent of a relay; its mailbox is created if needed.

    Owns a descriptor of the home, and an inotify descriptor once a call has waited. To be used by
    one thread at a time. Several processes may act as the same agent; each message then goes to one
    of them. ``home`` is a path, by default ``$AGENT_RELAY_DIR`` or ``~/.agent-relay``.
    ``disk_full_retry_s`` limits the total wait for a full disk or quota. The process registers
    itself in ``meta.json`` until closed; with ``registers=False`` it acts for an agent that has
    another process, or none.

    Errors: InvalidName; HomeMissing when there is no relay home; UnsafePath.
    """

    def __init__(
        self,
        name: str,
        home: str | os.PathLike[str] | None = None,
        *,
        disk_full_retry_s: float = 30.0,
        registers: bool = True,
        clock: Clock | None = None,
    ) -> None:
        self.name = check_agent_name(name)
        clock = clock or Clock()
        self._home = Home(default_root(os.fspath(home) if home is not None else None))
        try:
            retry_on_enospc(lambda: self._home.make_agent(name), disk_full_retry_s)
            started_at = clock.now_ns()
            if registers:
                retry_on_enospc(lambda: register(self._home, name, started_at), disk_full_retry_s)
            limit = max_body_bytes(self._home)
        except BaseException:
            self._home.close()
            raise
        # Unregister at interpreter exit, too: only a process that died stays registered.
        pid = os.getpid() if registers else 0
        self._leave = weakref.finalize(self, _leave, self._home.root, name, pid)
        self._outbox = Outbox(self._home, name, clock, limit, disk_full_retry_s)
        self._inbox = Inbox(self._home, name)
        self._attachments = Attachments(self._home, disk_full_retry_s)

    @property
    def home(self) -> str:
        """The absolute path of the relay's home."""
        return self._home.root

    def close(self) -> None:
        """Close the descriptors. The mailbox stays and keeps receiving."""
        self._leave()
        self._inbox.close()
        self._home.close()

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    # -- sending -----------------------------------------------------------------------------

    def send(
        self,
        to: str,
        body: str | bytes,
        *,
        kind: str = Kind.MESSAGE,
        re: str | None = None,
        committed: bool = False,
        timeout_s: float = 30.0,
        **options: Unpack[SendOptions],
    ) -> str:
        """Send a message and return its id. It is sent once its file is renamed into the outbox.

        From then on the relay is responsible: ``to`` gets it, or a nack in this inbox says why
        not. ``to`` is a name, ``*``, ``#channel``, ``Lead`` or ``__orchestrator__``; ``body``
        is text (bytes must be UTF-8; use an attachment for other data). A CHECKSUM is added. A
        full disk is waited for.

        Errors: MessageError for a message that the relay would reject, and for an unknown option;
        NotFound for an attachment that is not in the store; OSError. In each case nothing was sent.

        ``committed``: return when the relay has taken it over, durably; it is then the relay that
        syncs, and not this process. Errors then: NotRunning before anything is sent;
        Refused with the text of the relay's nack; Timeout when it was not taken over within
        ``timeout_s``: it then waits in the outbox, durably, and is not to be sent again.
        Source: relay-file-system.txt 3.1, FORMATS 1.
        """
        message = self._compose({"to": to, "body": body, "kind": kind, "re": re, **options})
        if not committed:
            return self._outbox.put([message])[0]
        if lock_holder(self._home) is None:
            raise NotRunning(f"no relay is running for {self.home}")
        seen = self._inbox.names()
        (sent,) = self._outbox.put([message], sync=False)
        if not self._outbox.wait_taken(sent, timeout_s):
            raise Timeout(
                f"message {sent} was not taken over by the relay within {timeout_s:g} s",
                message_id=sent,
                hint="it waits in the outbox: do not send it again",
            )
        self._next_answer(sent, (), 0, seen)
        return sent

    def send_many(self, messages: Iterable[OutgoingMessage]) -> list[str]:
        """Send messages with one sync for all; returns their ids, in order.

        Each is a dictionary of the arguments of ``send``: ``{"to": "bob", "body": "hi"}``. All are
        checked first, then written and synced, then renamed one after the other, and durable on
        return. Hundreds at once cost little more than one.

        Errors: as ``send``; nothing was sent. An OSError after the first rename names in its notes
        which messages were sent.
        """
        composed = []
        for number, one in enumerate(messages):
            try:
                composed.append(self._compose(one))
            except MessageError as exc:
                rule = f"message {number} of the list: {exc.rule}"
                raise MessageError(rule, header=exc.header) from exc
        return self._outbox.put(composed)

    def _compose(self, fields: OutgoingMessage) -> MessageFile:
        """Make the file of a message. Errors: MessageError; NotFound for an attachment."""
        message = compose(fields)
        for reference in message.attachments:
            self._attachments.check(reference)
        self._outbox.check(message)
        return message

    def reply(
        self,
        message: Received,
        body: str | bytes,
        *,
        kind: str | None = None,
        **options: Unpack[SendOptions],
    ) -> str:
        """Answer a message: to its sender, in its thread, RE its id. Returns the new id.

        KIND is response for a query, otherwise message. Errors: as ``send``.
        """
        if kind is None:
            kind = Kind.RESPONSE if message.kind is Kind.QUERY else Kind.MESSAGE
        if options.get("thread") is None:
            options["thread"] = message.thread
        return self.send(message.sender, body, kind=kind, re=message.id, **options)

    def ack(
        self,
        message: Received | str,
        status: str = "received",
        text: str = "",
        *,
        to: str | None = None,
    ) -> str:
        """Acknowledge a message, given as such or by id. Returns the id of the ack.

        ``status`` is received, in_progress or completed. ``to`` may be omitted: the relay finds
        the sender by RE. Only commands, queries and at-least-once messages expect an ack; for
        others the relay answers with a nack.
        """
        if status not in ACK_STATUSES:
            raise MessageError(f"status {status!r} is not one of {', '.join(ACK_STATUSES)}")
        body = f"{status}\n{text}" if text else status
        return self._acknowledge(Kind.ACK, message, body, to)

    def nack(self, message: Received | str, error: str, *, to: str | None = None) -> str:
        """Report that a message could not be handled, and why. Returns the id of the nack."""
        return self._acknowledge(Kind.NACK, message, error, to)

    def status(self, text: str) -> str:
        """Publish what this agent is doing, as shown by `relay agents`. Returns the message id."""
        return self.send(ORCHESTRATOR, text, kind=Kind.STATUS)

    # -- receiving ---------------------------------------------------------------------------

    def receive(self, timeout_s: float | None = None) -> Received | None:
        """Take the first message of the inbox, by priority, then age; None after the timeout.

        ``timeout_s`` None waits forever, 0 checks once. The file is first moved to ``inbox/.read``,
        which the relay counts as read, and then parsed; of two processes one gets it. With 64 or
        more messages waiting, the listing used may be a little old.

        Errors: MessageError for a damaged file or one that is not a message. It names the file,
        which is in ``.read`` by then, so the next call continues with the next message.
        """
        return self._inbox.until(self._inbox.take_next, timeout_s)

    def messages(self, timeout_s: float | None = None) -> Iterator[Received]:
        """Yield messages as they arrive, until none came for ``timeout_s`` (None: forever)."""
        while (message := self.receive(timeout_s)) is not None:
            yield message

    def query(
        self, to: str, body: str | bytes, timeout_s: float, **options: Unpack[SendOptions]
    ) -> Received:
        """Send a query and wait for the response; other messages stay in the inbox.

        Errors: Timeout without a response in time (a later one is received like any message);
        Refused with the text of a nack; as ``send``.
        """
        if options.get("await_s") is None:
            options["await_s"] = timeout_s
        seen = self._inbox.names()  # messages from before the query cannot answer it
        sent = self.send(to, body, kind=Kind.QUERY, **options)
        return self._answer(sent, Kind.RESPONSE, timeout_s, seen)

    def request(
        self,
        to: str,
        body: str | bytes,
        timeout_s: float,
        *,
        kind: str = Kind.COMMAND,
        re: str | None = None,
        on_sent: Callable[[str], object] | None = None,
        progress: Callable[[Received], object] | None = None,
        **options: Unpack[SendOptions],
    ) -> Received:
        """Send, and wait for the answer: a response or message RE it, or an ack `completed`.

        ``on_sent`` is called with the message id before the wait, ``progress`` with every other
        ack; all other messages stay in the inbox. With several recipients the first answer counts.

        Errors: Timeout, with the ``message_id`` of what was sent; Refused with the text of a nack
        or error; as ``send``.
        """
        if options.get("await_s") is None:
            options["await_s"] = timeout_s
        ends_at = time.monotonic() + timeout_s
        seen = self._inbox.names()
        sent = self.send(to, body, kind=kind, re=re, **options)
        if on_sent is not None:
            on_sent(sent)
        kinds = (Kind.RESPONSE, Kind.MESSAGE, Kind.ACK)
        while answer := self._next_answer(sent, kinds, ends_at - time.monotonic(), seen):
            if answer.kind is not Kind.ACK or COMPLETED.match(answer.body):
                return answer
            if progress is not None:
                progress(answer)
        raise Timeout(f"no answer to {sent} came within {timeout_s:g} s", message_id=sent)

    # -- continuity --------------------------------------------------------------------------

    def save_state(self, data: str | bytes, timeout_s: float = 30.0) -> int:
        """Save ``data`` for this agent's next run. Returns the version number.

        It is durable when this returns. Text, or bytes in UTF-8; by default the relay accepts
        256 KiB and keeps ten versions. A restarted agent gets its last saved state in its first
        message.
        Errors: Refused, with the rule; Timeout when no relay answers in time; as ``send``.
        """
        return save_state(self, data, timeout_s)

    def load_state(self, version: int | None = None, timeout_s: float = 30.0) -> str | None:
        """Load the latest saved state, or ``version``; None if nothing has been saved.

        Errors: Refused for a version that does not exist (any more); Timeout.
        """
        return load_state(self, version, timeout_s)

    def saved_states(self, timeout_s: float = 30.0) -> list[SavedState]:
        """List the saved versions, oldest first. Errors: Timeout."""
        return list_versions(self, timeout_s)

    # -- attachments -------------------------------------------------------------------------

    def attach(self, source: bytes | str | os.PathLike[str]) -> str:
        """Add bytes, or the file at a path, to the attachment store. Returns ``sha256:…``.

        Durable on return; existing content is not written again. A full disk is waited for.
        Errors: RelayError if the file changes meanwhile; OSError.
        """
        return self._attachments.add(source)

    def open_attachment(self, reference: str) -> bytes:
        """Read an attachment and verify its checksum.

        Errors: MessageError for an invalid reference; NotFound; IntegrityError.
        """
        return self._attachments.read(reference)

    # -- processes ---------------------------------------------------------------------------

    def spawn(
        self,
        name: str,
        cli: str,
        prompt: str = "",
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        restart: str | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """Have the relay start an agent's process. Returns the message id.

        ``cli`` is one of ``spawn.clis`` in config.json, ``restart`` never, on-failure or always.
        The values of ``env`` are passed to the process and not recorded. Its exit and restarts are
        reported as notifications RE that id. With ``timeout_s``, waits until it has started.
        Errors: MessageError; then Refused with the relay's reason, and Timeout.
        """
        folder = None if cwd is None else os.path.abspath(cwd)
        headers = spawn_headers(name, cli, folder, env or {}, restart)
        return self._ask(Kind.SPAWN, prompt, headers, timeout_s)

    def release(self, name: str, reason: str = "", *, timeout_s: float | None = None) -> str:
        """Have the relay stop an agent's process; with ``timeout_s``, waits until it has ended."""
        headers = {"NAME": name} | ({"REASON": reason} if reason else {})
        return self._ask(Kind.RELEASE, "", headers, timeout_s)

    # -- channels ----------------------------------------------------------------------------

    def join(self, channel: str, *, timeout_s: float | None = None) -> str:
        """Join a group channel, creating it if needed. Returns the message id.

        With ``timeout_s``, waits for the relay's ack; Errors then: Refused with the relay's reason,
        and Timeout. InvalidName is raised before anything is sent.
        """
        return self._control(Kind.JOIN, channel, None, timeout_s)

    def leave(self, channel: str, *, timeout_s: float | None = None) -> str:
        """Leave a channel; as ``join``."""
        return self._control(Kind.LEAVE, channel, None, timeout_s)

    def subscribe(
        self, channel: str, pattern: str, *, filter: str = "", timeout_s: float | None = None
    ) -> str:
        """Subscribe to topics of a channel, such as ``build.#``; as ``join``.

        ``filter`` restricts it to messages that match all of its terms: ``sender=ci
        type=Command,Query priority=0,1 match=REGEX``. Subscribing again replaces it.
        """
        return self._control(Kind.SUBSCRIBE, channel, pattern, timeout_s, filter)

    def unsubscribe(self, channel: str, pattern: str, *, timeout_s: float | None = None) -> str:
        """End a subscription; as ``join``."""
        return self._control(Kind.UNSUBSCRIBE, channel, pattern, timeout_s)

    # ----------------------------------------------------------------------------------------

    def _acknowledge(self, kind: Kind, message: Received | str, body: str, to: str | None) -> str:
        if isinstance(message, Received):
            re, to = message.id, to or message.sender
        else:
            re = message
        return self.send(to or ORCHESTRATOR, body, kind=kind, re=re)

    def _control(
        self,
        kind: Kind,
        channel: str,
        pattern: str | None,
        timeout_s: float | None,
        filter: str = "",
    ) -> str:
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
        return self._ask(kind, "\n".join(lines), {}, timeout_s)

    def _ask(
        self, kind: Kind, body: str, headers: Mapping[str, str], timeout_s: float | None
    ) -> str:
        """Send a request to the relay; with ``timeout_s``, wait for its ack."""
        seen = self._inbox.names() if timeout_s is not None else set()
        sent = self.send(ORCHESTRATOR, body, kind=kind, headers=headers)
        if timeout_s is not None:
            self._answer(sent, Kind.ACK, timeout_s, seen)
        return sent

    def _answer(self, sent: str, kind: Kind, timeout_s: float, seen: set[str]) -> Received:
        """Wait for the message of ``kind`` that answers ``sent``. Errors: Timeout, Refused."""
        answer = self._next_answer(sent, (kind,), timeout_s, seen)
        if answer is None:
            raise Timeout(f"no {kind} to {sent} came within {timeout_s:g} s", message_id=sent)
        return answer

    def _next_answer(
        self, sent: str, kinds: Collection[Kind], timeout_s: float, seen: set[str]
    ) -> Received | None:
        """Wait for a message of one of ``kinds`` that answers ``sent``. Errors: Refused."""
        wanted = REFUSALS.union(kinds)
        answer = self._inbox.until(lambda: self._inbox.take_answer(sent, wanted, seen), timeout_s)
        if answer is not None and answer.kind in REFUSALS:
            raise Refused(answer.body or f"{answer.sender} gave no reason")
        return answer


def _leave(root: str, name: str, pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child
        with contextlib.suppress(RelayError, OSError), Home(root) as home:
            unregister(home, name)
