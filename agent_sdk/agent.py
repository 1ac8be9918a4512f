"""``Agent``: send, receive, acknowledge, query, attach, use channels as one agent.

Every operation only reads or writes files in the home.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeVar, Unpack

from agent_sdk import requests
from agent_sdk.attachments import Attachments
from agent_sdk.disk import retry_on_enospc
from agent_sdk.inbox import Inbox, Received, answers_to, refusal_of
from agent_sdk.outbox import Outbox, OutgoingMessage, SendOptions, compose
from agent_sdk.presence import Closed, leave, max_body_bytes, open_home, with_remedy
from agent_sdk.requests import SavedState
from relay.base.clock import Clock
from relay.base.errors import MessageError, NotRunning, RelayWarning, Timeout
from relay.base.home import lock_holder
from relay.base.message import Kind, MessageFile
from relay.base.names import ORCHESTRATOR, Attachment, check_agent_name

if TYPE_CHECKING:
    from relay.base.outcomes import Wait

_Read = TypeVar("_Read")


class Agent:
    """One agent of a relay; its mailbox is created if needed.

    Owns a descriptor of the home, and an inotify descriptor once a call has waited. To be used by
    one thread at a time. Several processes may act as the same agent; each message then goes to one
    of them. ``home`` is a path; by default ``$AGENT_RELAY_DIR``, else the nearest ``.agent-relay``
    in or above the working directory, else ``~/.agent-relay``.
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
        self._home, self._doubt = open_home(home, name, clock.now_ns() if registers else None)
        try:
            retry_on_enospc(self._home.enter, disk_full_retry_s)
            limit = max_body_bytes(self._home)
        except BaseException:
            self._home.close()
            raise
        # Unregister at interpreter exit, too: only a process that died stays registered.
        pid = os.getpid() if registers else 0
        self._leave = weakref.finalize(self, leave, self._home.root, name, pid)
        self._outbox = Outbox(self._home, name, clock, limit, disk_full_retry_s)
        self._inbox = Inbox(self._home, name)
        self._attachments = Attachments(self._home, disk_full_retry_s)
        self._home.replaced = self._inbox.close  # its watch is of the one before

    @property
    def home(self) -> str:
        """The absolute path of the relay's home."""
        return self._home.root

    def close(self) -> None:
        """Close the descriptors. The mailbox stays and keeps receiving."""
        if self._leave() is None:  # closed before
            return
        self._inbox.close()
        self._home.close()
        self._outbox = self._inbox = self._attachments = Closed()  # type: ignore[assignment]

    def __enter__(self) -> Agent:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Agent has descriptors of its process: make another one by its name")

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- sending -----------------------------------------------------------------------------

    def send(
        self,
        to: str,
        body: str | bytes,
        *,
        kind: str = Kind.MESSAGE,
        re: str | None = None,
        wait: float | str | None = None,
        on_sent: Callable[[str], object] | None = None,
        **options: Unpack[SendOptions],
    ) -> str:
        """Send a message and return its id. It is sent once its file is renamed into the outbox.

        ``to`` is a name, ``*``, ``#channel``, ``Lead`` or ``__orchestrator__``; ``body`` is text
        (bytes must be UTF-8; use an attachment for other data). A CHECKSUM is added. A full disk is
        waited for.

        Waits up to ``wait`` seconds for the relay to take the message over, which takes
        milliseconds; by default 2, or 0 if ``RELAY_NO_WAIT`` is set. A message that nobody gets
        raises Refused with the text of the relay's nack. If no relay is running, or it has not
        taken the message over in time, a RelayWarning says so: the message waits in the outbox,
        durably. Without a wait, and after it, a refusal arrives as a nack in this inbox; so does
        the news that some of several recipients did not get it. ``on_sent`` is called with the id
        before the wait.

        ``wait`` may be a word instead: ``none``, ``delivered``, ``read``, ``done`` as in
        ``Agent.wait``, or ``taken``: the relay must take it over. Errors then: NotRunning before
        anything is sent; Timeout when it was not taken over in time: it waits in the outbox,
        durably, and is not to be sent again. ``read=10s`` sets the longest wait, 30 s by default.

        Errors: MessageError for a message that the relay would reject; TypeError for an unknown
        option; NotFound for an attachment that is not in the store; OSError. In each case nothing
        was sent.
        """
        fields: OutgoingMessage = {"to": to, "body": body, "kind": kind, "re": re, **options}
        return self._send(fields, requests.how_to_wait(wait), on_sent)

    def _send(
        self,
        fields: OutgoingMessage,
        how: requests.HowToWait,
        on_sent: Callable[[str], object] | None,
    ) -> str:
        message = self._compose(fields)
        sent = self._outbox.new_id()
        seen = self._inbox.names() if how.seconds > 0 else set()
        if self._post(message, sent, how.seconds, how.committed, on_sent):
            # The relay writes a nack before it takes the message out of the outbox.
            if nack := self._inbox.take_answer(refusal_of(sent, message.to), seen):
                raise requests.refused(nack)
            requests.check_not_refused(self._home, self.name, sent)
        if how.step:
            self.wait(sent, how.step)
        return sent

    def _post(
        self,
        message: MessageFile,
        sent: str,
        wait_s: float,
        committed: bool = False,
        on_sent: Callable[[str], object] | None = None,
    ) -> bool:
        """Send a message under the id ``sent``; True if the relay has taken it over.

        Errors and warnings as ``send``, except Refused.
        """
        waits = committed or wait_s > 0
        runs = waits and lock_holder(self._home) is not None
        text = f"no relay is running for {self.home}"
        if committed and not runs:
            raise with_remedy(NotRunning(text))
        self._outbox.put([(sent, message)], sync=not runs)
        if on_sent is not None:
            on_sent(sent)
        if not waits:
            return False
        if runs:
            if self._outbox.wait_taken(sent, wait_s):
                return True
            text = f"the relay has not taken message {sent} over within {wait_s:g} s"
            if committed:
                hint = "it waits in the outbox: do not send it again"
                raise with_remedy(Timeout(text, message_id=sent, hint=hint))
        warnings.warn(f"{text}: the message waits in the outbox", RelayWarning, stacklevel=4)
        return False

    def send_many(self, messages: Iterable[OutgoingMessage]) -> list[str]:
        """Send messages with one sync for all; returns their ids, in order.

        Each is a dictionary of the arguments of ``send``: ``{"to": "bob", "body": "hi"}``. All are
        checked first, then written and synced, then renamed one after the other, and durable on
        return. Hundreds at once cost little more than one.

        Errors: as ``send``; nothing was sent. An OSError after the first rename names in its notes
        which messages were sent.
        """
        composed = []
        for number, message in enumerate(messages):
            try:
                composed.append(self._compose(message))
            except (MessageError, TypeError) as exc:
                rule, header = getattr(exc, "rule", exc), getattr(exc, "header", "")
                raise MessageError(f"message {number} of the list: {rule}", header=header) from exc
        ids = [self._outbox.new_id() for _ in composed]
        self._outbox.put(list(zip(ids, composed, strict=True)))
        return ids

    def _compose(self, fields: OutgoingMessage) -> MessageFile:
        """Make the file of a message. Errors: MessageError; TypeError; NotFound (attachment)."""
        message = compose(fields)
        if re := message.headers.get("RE"):
            message.headers["RE"] = self._inbox.id_of(re)
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
        wait: float | str | None = None,
        **options: Unpack[SendOptions],
    ) -> str:
        """Answer a message: to its sender, in its thread, RE its id. Returns the new id.

        KIND is response for a query, otherwise message. Errors: as ``send``.
        """
        kind = requests.reply_kind(message, kind)
        options["thread"] = options.get("thread") or message.thread
        return self.send(message.sender, body, kind=kind, re=message.id, wait=wait, **options)

    def ack(
        self,
        message: Received | str,
        status: str = "received",
        text: str = "",
        *,
        to: str | None = None,
        wait: float | str | None = None,
    ) -> str:
        """Acknowledge a message, given as such or by id. Returns the id of the ack.

        ``status`` is received, in_progress or completed. ``to`` may be omitted: the relay finds
        the sender by RE. Only commands, queries and at-least-once messages expect an ack; for
        others the relay answers with a nack. Waits, and raises Refused, as ``send``.
        """
        to, re = requests.original_of(message, to)
        return self.send(to, requests.ack_body(status, text), kind=Kind.ACK, re=re, wait=wait)

    def nack(
        self,
        message: Received | str,
        error: str,
        *,
        to: str | None = None,
        wait: float | str | None = None,
    ) -> str:
        """Report that a message could not be handled, and why. Returns the id of the nack."""
        to, re = requests.original_of(message, to)
        return self.send(to, error, kind=Kind.NACK, re=re, wait=wait)

    def status(self, text: str, *, wait: float | str | None = None) -> str:
        """Publish what this agent is doing, as shown by `relay agents`. Returns the message id."""
        return self.send(ORCHESTRATOR, text, kind=Kind.STATUS, wait=wait)

    # -- receiving ---------------------------------------------------------------------------

    def receive(self, timeout_s: float | None = None) -> Received | None:
        """Take the first message of the inbox, by priority, then age; None after the timeout.

        ``timeout_s`` None waits forever, 0 checks once. The file is first moved to ``inbox/.read``,
        which the relay counts as read, and then parsed; of two processes one gets it. With 64 or
        more messages waiting, the listing used may be a little old.

        Errors: MessageError for a damaged file or one that is not a message. It names the file,
        which is in ``.read`` by then, so the next call continues with the next message. TwoHomes
        when ``$AGENT_RELAY_DIR`` chose this home, and the search finds another.
        """
        requests.check_limit(timeout_s)
        if self._doubt is not None:
            raise self._doubt
        return self._receive(timeout_s)

    def _receive(self, timeout_s: float | None) -> Received | None:
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
        kind = Kind.QUERY
        fields: OutgoingMessage = {"to": to, "body": body, "kind": kind, "re": None, **options}
        return self._answer(fields, (Kind.RESPONSE,), timeout_s, requests.whole)

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
        fields: OutgoingMessage = {"to": to, "body": body, "kind": kind, "re": re, **options}
        return self._answer(fields, requests.ANSWERS, timeout_s, requests.whole, on_sent, progress)

    def _answer(
        self,
        asked: OutgoingMessage | str,
        kinds: Sequence[Kind],
        timeout_s: float,
        read: Callable[[Received], _Read],
        on_sent: Callable[[str], object] | None = None,
        progress: Callable[[Received], object] | None = None,
    ) -> _Read:
        """Send, unless an id is given; ``read`` the last answer. Errors: Timeout; Refused."""
        ends_at = time.monotonic() + timeout_s
        if isinstance(asked, str):
            sent, seen, to = asked, set(), ""
        else:
            message, sent, to = self._compose(asked), self._outbox.new_id(), asked["to"]
            seen = self._inbox.names()  # messages from before it cannot answer it
            self._post(message, sent, requests.default_wait_s(timeout_s), False, on_sent)
        was_asked = requests.was_asked(to, requests.ledger_of(self._home))
        wanted = answers_to(sent, kinds, was_asked)
        look = functools.partial(self._inbox.take_answer, wanted, seen)
        while answer := self._inbox.until(look, ends_at - time.monotonic()):
            if requests.is_last(answer, kinds):
                return read(answer)
            if progress is not None:
                progress(answer)
        raise requests.no_answer(self._home, self.name, sent, kinds, timeout_s)

    def wait(
        self,
        message_id: str,
        until: str = "done",
        *,
        progress: Callable[[Received], object] | None = None,
    ) -> Received | None:
        """Wait for a message of this agent as `relay wait` does: ``read``, or ``read=10s``.

        With ``answer``, takes the answer out of the inbox and returns it, as ``request``. Errors:
        Timeout; Refused if it cannot come so far, or was never sent; LedgerError; MessageError for
        another word.
        """
        wait, sent = requests.wait_of("until", until), self._inbox.id_of(message_id)
        if wait.word == "answer":
            within_s = requests.answer_within_s(self._home, sent, wait.seconds)
            known = (sent, requests.ANSWERS, within_s, requests.whole)
            return self._answer(*known, None, progress)
        return self._watch(sent, wait)

    def _watch(self, sent: str, wait: Wait) -> Received | None:
        from relay.base.outcomes import watch

        requests.waited(watch(self._home, requests.ledger_of(self._home), sent, wait), sent, wait)
        return None

    def wait_idle(self, name: str, timeout_s: float, message_id: str = "") -> None:
        """Wait until another agent is idle, as its hooks report, and has read ``message_id``.

        Errors: Timeout; Refused if it has no session, or its session ends; as ``send``.
        """
        with requests.idle_timeout(name, timeout_s):
            body = requests.idle_body(name, timeout_s, message_id)
            requests.ask(self, Kind.COMMAND, body, timeout_s + requests.IDLE_GRACE_S)

    # -- continuity --------------------------------------------------------------------------

    def save_state(self, data: str | bytes, timeout_s: float = 30.0) -> int:
        """Save ``data`` for this agent's next run. Returns the version number.

        It is durable when this returns. Text, or bytes in UTF-8; by default the relay accepts
        256 KiB and keeps ten versions. A restarted agent gets its last saved state in its first
        message.
        Errors: Refused, with the rule; Timeout when no relay answers in time; as ``send``.
        """
        return requests.continuity(self, "save", data, timeout_s, requests.saved_version)

    def load_state(self, version: int | None = None, timeout_s: float = 30.0) -> str | None:
        """Load the latest saved state, or ``version``; None if nothing has been saved.

        Errors: Refused for a version that does not exist (any more); Timeout.
        """
        body = requests.load_body(version)
        return requests.continuity(self, "load", body, timeout_s, requests.loaded_text)

    def saved_states(self, timeout_s: float = 30.0) -> list[SavedState]:
        """List the saved versions, oldest first. Errors: Timeout."""
        return requests.continuity(self, "list", "", timeout_s, requests.listed_states)

    # -- attachments -------------------------------------------------------------------------

    def attach(self, source: bytes | str | os.PathLike[str]) -> Attachment:
        """Add bytes, or the file at a path, to the attachment store. Returns ``sha256:…``.

        It is a string that also has the ``name`` of the file, which is sent with it. Durable on
        return; existing content is not written again. Of a file that grows, what is there is taken.
        A full disk is waited for. Errors: RelayError for what is not a regular file, is above
        ``limits.max_attachment_mib``, or is written anew meanwhile; OSError.
        """
        return self._attachments.add(source)

    def open_attachment(self, reference: str) -> bytes:
        """Read an attachment and verify its checksum.

        Errors: MessageError for an invalid reference; NotFound; IntegrityError.
        """
        return self._attachments.read(reference)

    def save_attachments(
        self, attachments: Sequence[Attachment], folder: str | os.PathLike[str]
    ) -> list[str]:
        """Write attachments of a message into a directory, under their names; returns the paths.

        All or none; nothing is overwritten. Errors: RelayError for a file that exists already; as
        ``open_attachment``; OSError.
        """
        return self._attachments.save(attachments, folder)

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
        headers = requests.spawn_headers(name, cli, cwd, env or {}, restart)
        return requests.ask(self, Kind.SPAWN, prompt, timeout_s, headers)

    def release(self, name: str, reason: str = "", *, timeout_s: float | None = None) -> str:
        """Have the relay stop an agent's process; with ``timeout_s``, waits until it has ended."""
        headers = requests.release_headers(name, reason)
        return requests.ask(self, Kind.RELEASE, "", timeout_s, headers)

    # -- channels ----------------------------------------------------------------------------

    def join(self, channel: str, *, timeout_s: float | None = None) -> str:
        """Join a group channel, creating it if needed. Returns the message id.

        With ``timeout_s``, waits for the relay's ack; Errors then: Refused with the relay's reason,
        and Timeout. InvalidName is raised before anything is sent.
        """
        return requests.ask(self, Kind.JOIN, requests.channel_body(channel), timeout_s)

    def leave(self, channel: str, *, timeout_s: float | None = None) -> str:
        """Leave a channel; as ``join``."""
        return requests.ask(self, Kind.LEAVE, requests.channel_body(channel), timeout_s)

    def subscribe(
        self, channel: str, pattern: str, *, filter: str = "", timeout_s: float | None = None
    ) -> str:
        """Subscribe to topics of a channel, such as ``build.#``; as ``join``.

        ``filter`` restricts it to messages that match all of its terms: ``sender=ci
        type=Command,Query priority=0,1 match=REGEX``. Subscribing again replaces it.
        """
        body = requests.channel_body(channel, pattern, filter)
        return requests.ask(self, Kind.SUBSCRIBE, body, timeout_s)

    def unsubscribe(self, channel: str, pattern: str, *, timeout_s: float | None = None) -> str:
        """End a subscription; as ``join``."""
        body = requests.channel_body(channel, pattern)
        return requests.ask(self, Kind.UNSUBSCRIBE, body, timeout_s)
