"""An agent's outbox: messages are written atomically, and signed if the agent has a key.

outbox/.pending/{id}.msg   written, synced, closed
outbox/{id}.msg            after the rename the message is sent
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Required, TypedDict

from agent_sdk.disk import add_sent_note, install, install_many, retry_on_enospc, sync_name
from relay.base import fsio
from relay.base.clock import Clock
from relay.base.errors import MessageError, RelayError
from relay.base.home import KEY, PENDING, Dirs, Home
from relay.base.message import (
    MAX_HEADER_BYTES,
    MAX_HEADER_LINES,
    RELAY_HEADERS,
    SENT_KINDS,
    SIGNATURE_PREFIX,
    Kind,
    MessageFile,
    parse,
    render,
    split,
)
from relay.base.names import (
    ATTACHMENT_NAMES,
    MSG_SUFFIX,
    SHA256_PREFIX,
    Attachment,
    new_message_id,
    sha256_hex,
)

FIRST_PAUSE_S = 0.0005
MAX_PAUSE_S = 0.05
FEW_ATTACHMENTS = 10  # more take a good part of the header


class SendOptions(TypedDict, total=False):
    """Keyword arguments of ``send`` besides ``kind`` and ``re``; None means not given."""

    thread: str | None  # 1-128 of A-Z a-z 0-9 . _ : -
    priority: int | None  # 0 critical to 4 background; the relay's default is 2
    topic: str | None  # for channels with topics, like build.front.ok
    ttl_s: int | None  # seconds after which it is no longer delivered
    delivery: str | None  # at-most-once, at-least-once, exactly-once
    due_s: float | None  # when the answer is due, from 0.001; the default is the relay's
    headers: Mapping[str, str] | None  # other headers, passed on with the message
    attachments: Sequence[str]  # returned by attach(), or those of a received message


class OutgoingMessage(SendOptions, total=False):
    """One message of ``send_many``: the arguments of ``send``."""

    to: Required[str]
    body: Required[str | bytes]
    kind: str
    re: str | None


MESSAGE_KEYS = frozenset(OutgoingMessage.__annotations__) | SendOptions.__annotations__.keys()


class Outbox:
    """Sends messages of one agent. For one thread; processes may share an outbox."""

    def __init__(
        self, home: Home, agent: str, clock: Clock, max_body_bytes: int, disk_full_retry_s: float
    ) -> None:
        self._home = home
        self._agent = agent
        self._clock = clock
        self._max_body_bytes = max_body_bytes
        self._disk_full_retry_s = disk_full_retry_s
        self._last_ns = 0

    def put(self, messages: Sequence[tuple[str, MessageFile]], *, sync: bool = True) -> None:
        """Send messages (id, message), each by its rename. All are durable on return.

        One is synced by itself; several are written, synced at once, and then renamed in order.
        With a key of the agent, they are signed. Without ``sync`` they are durable once the relay,
        or ``wait_taken``, says so.
        Errors: KeyFileError; OSError.
        Nothing was sent, except what the notes of an OSError name: a rename was done, and a later
        one, or the sync of the directory, failed.
        """
        if not messages:
            return
        with self._home.dirs() as dirs:
            outbox, pending = self._open(dirs)
            files = [
                (
                    message_id + MSG_SUFFIX,
                    render(sign(self._home, dirs, self._agent, message_id, message)),
                )
                for message_id, message in messages
            ]
            if len(files) == 1:
                ((name, data),) = files
                retry_on_enospc(
                    lambda: install(data, name, pending, name, outbox, sync=sync),
                    self._disk_full_retry_s,
                )
            else:
                folder = self._home.path("agents", self._agent, "outbox")
                install_many(files, pending, outbox, folder, self._disk_full_retry_s)
            if sync:
                try:
                    self._sync_folder(outbox, files[-1][0])
                except OSError as exc:
                    add_sent_note(exc, [message_id for message_id, _ in messages])
                    raise

    def wait_taken(self, message_id: str, timeout_s: float) -> bool:
        """Wait until the relay has moved a sent message out of the outbox: its journal has it.

        False if it has not within ``timeout_s``: the message is durable in the outbox then, and
        also when the wait is interrupted.
        """
        try:
            return self._wait_taken(message_id, timeout_s)
        except BaseException as exc:
            self._sync(message_id + MSG_SUFFIX)
            add_sent_note(exc, [message_id])
            raise

    def _wait_taken(self, message_id: str, timeout_s: float) -> bool:
        name = message_id + MSG_SUFFIX
        ends_at, pause_s = monotonic() + timeout_s, FIRST_PAUSE_S
        with self._home.dirs() as dirs:  # a file that moves away with its home is not taken
            outbox = dirs.get("agents", self._agent, "outbox")
            while fsio.exists(name, outbox):
                left_s = ends_at - monotonic()
                if not left_s > 0:  # nan, too
                    return not self._sync(name)
                time.sleep(min(pause_s, left_s))  # a running relay needs one or two milliseconds
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
        return True

    def _sync(self, name: str) -> bool:
        """Make a file in the outbox durable; False if it is gone."""
        with self._home.dirs() as dirs:
            outbox, _ = self._open(dirs)
            try:
                sync_name(name, outbox)
            except FileNotFoundError:
                return False
            self._sync_folder(outbox, name)
        return True

    def _sync_folder(self, outbox: int, name: str) -> None:
        fsio.fault("sync_dir", name)
        fsio.sync_file(outbox)

    def check(self, message: MessageFile) -> None:
        """Errors: MessageError for a message that the relay would reject."""
        try:
            data = render(message)
        except UnicodeEncodeError as exc:
            raise MessageError(f"a header value is not valid UTF-8: {exc.reason}") from exc
        number, head = len(message.attachments), split(data)[0]
        is_long = len(head) > MAX_HEADER_BYTES or len(head.splitlines()) > MAX_HEADER_LINES
        if is_long and number > FEW_ATTACHMENTS:
            text = f"{number} attachments are more than its header holds"
            advice = "send several messages, or one archive of the files"
            raise MessageError(f"{text}: {advice}", header="ATTACHMENT")
        try:
            parse(data, max_body_bytes=self._max_body_bytes)
        except MessageError as exc:  # no line number: the caller passed values
            raise MessageError(exc.rule, file=exc.file, header=exc.header) from exc

    def new_id(self) -> str:
        """Return the id for the next message.

        Ids increase, so messages sort in the order in which they were sent, even if the clock is
        set back.
        """
        self._last_ns = max(self._clock.now_ns(), self._last_ns + 1)
        return new_message_id(self._last_ns)

    def _open(self, dirs: Dirs) -> tuple[int, int]:
        try:
            outbox = dirs.get("agents", self._agent, "outbox")
            return outbox, dirs.ensure("agents", self._agent, "outbox", PENDING)
        except FileNotFoundError as exc:
            raise RelayError(f"the outbox of agent {self._agent} no longer exists") from exc


def sign(home: Home, dirs: Dirs, agent: str, message_id: str, message: MessageFile) -> MessageFile:
    """Add a SIGNATURE over sender, id, TO and body, if the agent has a key and there is none yet.

    The key is agents/NAME/key, 32 bytes, mode 600. The cryptography is imported only with a key.
    Errors: KeyFileError for an invalid key or one accessible to others; UnsafePath; OSError.
    """
    if "SIGNATURE" in message.headers or not fsio.exists(KEY, dirs.get("agents", agent)):
        return message
    import base64

    from relay.base import crypto

    key = crypto.load_key(home.path("agents", agent, KEY))
    raw = crypto.sign(key, agent, message_id, message.to, message.body)
    text = SIGNATURE_PREFIX + base64.b64encode(raw).decode()
    return message._replace(headers={**message.headers, "SIGNATURE": text})


def compose(fields: OutgoingMessage) -> MessageFile:
    """Make a message of the arguments of ``send``, with its CHECKSUM.

    Errors: MessageError; TypeError for an unknown argument.
    """
    if not isinstance(fields, dict):
        raise MessageError(f"expected a dictionary with to and body, got {fields!r:.60}")
    if unknown := sorted(map(str, fields.keys() - MESSAGE_KEYS)):
        raise TypeError(f"unknown option {unknown[0]!r}: {_suggestion(unknown[0])}")
    to, body, kind = fields.get("to"), fields.get("body"), fields.get("kind", Kind.MESSAGE)
    _check_types(to, body, kind, fields)
    try:
        content = body.encode() if isinstance(body, str) else body
    except UnicodeEncodeError as exc:
        raise MessageError(f"the body is not valid UTF-8: {exc.reason}") from exc
    headers = _headers(fields)
    headers["CHECKSUM"] = SHA256_PREFIX + sha256_hex(content)
    return MessageFile(to, _kind(kind), headers, content, tuple(fields.get("attachments", ())))


def _suggestion(word: str) -> str:
    import difflib  # rarely needed

    options = SendOptions.__annotations__.keys()
    if similar := difflib.get_close_matches(word, options, 1, 0.5):
        return f"did you mean {similar[0]}?"
    return f"expected {', '.join(sorted(MESSAGE_KEYS))}"


def _check_types(to: object, body: object, kind: object, options: OutgoingMessage) -> None:
    """Reject wrong types: to=None must not address an agent named "None". Errors: MessageError."""
    for what, value, types in (
        ("to", to, (str,)),
        ("body", body, (str, bytes)),
        ("kind", kind, (str,)),
    ):
        if not isinstance(value, types):
            expected = " or ".join(kind.__name__ for kind in types)
            raise MessageError(f"{what} is {value!r}, expected {expected}")
    seconds = options.get("due_s")
    is_number = isinstance(seconds, int | float) and 0.001 <= seconds < float("inf")  # no nan
    if seconds is not None and not is_number:
        raise MessageError(f"due_s is {seconds!r}, expected a number of seconds from 0.001")


def _kind(word: str) -> Kind:
    if word.lower() not in SENT_KINDS:
        raise MessageError(f"{word!r} is not one of {', '.join(SENT_KINDS)}", header="KIND")
    return Kind(word.lower())


def _headers(options: OutgoingMessage) -> dict[str, str]:
    """Collect headers by upper-case name. Errors: MessageError for a duplicate or reserved one."""
    due_s = options.get("due_s")
    given = {
        "THREAD": options.get("thread"),
        "RE": options.get("re"),
        "PRIORITY": options.get("priority"),
        "TOPIC": options.get("topic"),
        "TTL": options.get("ttl_s"),
        "DELIVERY": options.get("delivery"),
        "AWAIT": _duration(due_s) if due_s is not None else None,
        ATTACHMENT_NAMES: _names(options.get("attachments", ())),
    }
    headers = {name: str(value) for name, value in given.items() if value is not None}
    for name, value in (options.get("headers") or {}).items():
        upper = name.upper()
        if upper in headers or upper in ("TO", "KIND", "CHECKSUM", "ATTACHMENT"):
            text = "it has its own argument or option, or is set on sending"
            raise MessageError(text, header=upper)
        if upper in RELAY_HEADERS:
            raise MessageError("it is written by the relay only", header=upper)
        headers[upper] = value
    return headers


def _names(attachments: Sequence[str]) -> str | None:
    """Join the names of files; None if none has one."""
    names = [
        attachment.name if isinstance(attachment, Attachment) else "" for attachment in attachments
    ]
    return "/".join(names) if any(names) else None


def _duration(seconds: float) -> str:
    """Format seconds for AWAIT: ``30s``, or ``1500ms`` for fractions."""
    millis = round(seconds * 1000)
    return f"{millis}ms" if millis % 1000 else f"{millis // 1000}s"
