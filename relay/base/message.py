"""`.msg` files: text to value and back. Pure functions, no I/O.

    NAME: value          header lines, any order, names case-insensitive
                         one blank line
    body                 the rest, byte for byte

``parse`` reads a file written by an agent and drops FROM, ID, SENT, ATTEMPT and CHANNEL, which only
the relay sets. ``parse_delivered`` reads a file the relay wrote into an inbox and keeps them.
``render`` writes either. See docs/formats/msg.md.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import NamedTuple

from relay.base.clock import LATEST_NS, duration_ms, later_time
from relay.base.errors import BodyTooLarge, MessageError
from relay.base.names import (
    AGENT_NAME,
    CHECKSUM,
    EVERYONE,
    LEAD,
    MESSAGE_ID,
    ORCHESTRATOR,
    PERMISSION,
    SHA256_PREFIX,
    is_channel_name,
    options_of,
    permission_ms,
    sha256_hex,
)

DEFAULT_MAX_BODY_BYTES = 1_048_576
MAX_HEADER_LINES = 48
MAX_HEADER_BYTES = 6 * 1024
MAX_VALUE_BYTES = 4096
# The relay adds up to six lines to a delivered file.
MAX_DELIVERED_HEADER_BYTES = 2 * MAX_HEADER_BYTES

THREAD = re.compile(r"[A-Za-z0-9._:-]{1,128}")
TOPIC = re.compile(r"[a-zA-Z0-9_-]+(?:\.[a-zA-Z0-9_*#-]+)*")
MAX_TOPIC_BYTES = 256
SIGNATURE_PREFIX = "ed25519:"
HEADER_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
# C0 and C1 controls and Unicode line breaks: some reader takes each of them for a line break.
CONTROL_CHARACTER = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")  # the same but LF
DIGITS = re.compile(r"[0-9]{1,18}")
MOST_TTL_S = 10**18 - 1
MOST_AWAIT_S = 1_000_000_000  # 31 years: when it is over must be a time that has a name

# Headers that only the relay writes; a CHECKSUM it replaces.
RELAY_HEADERS = ("FROM", "ID", "SENT", "ATTEMPT", "CHANNEL")
DELIVERY_MODES = ("at-most-once", "at-least-once", "exactly-once")


class Kind(StrEnum):
    """Purpose of a message; the KIND header."""

    MESSAGE = "message"
    COMMAND = "command"  # expects an ack or nack
    QUERY = "query"  # expects a response
    RESPONSE = "response"
    ACK = "ack"
    NACK = "nack"
    ERROR = "error"
    STATUS = "status"
    NOTIFICATION = "notification"
    REMINDER = "reminder"  # the orchestrator's: an answer is owed
    SPAWN = "spawn"
    RELEASE = "release"
    CONTINUITY = "continuity"
    JOIN = "join"
    LEAVE = "leave"
    SUBSCRIBE = "subscribe"
    UNSUBSCRIBE = "unsubscribe"


_KINDS = {kind.value: kind for kind in Kind}
# Kinds that change a channel's participants; TO or a line CHANNEL names the channel.
CHANNEL_KINDS = frozenset({Kind.JOIN, Kind.LEAVE, Kind.SUBSCRIBE, Kind.UNSUBSCRIBE})
SENT_KINDS = tuple(kind for kind in Kind if kind is not Kind.REMINDER)  # by agents
# Kinds that may lack a body: the KIND's word is then the content (`received` for an ack).
EMPTY_BODY_CONTENT = {Kind.ACK: b"received"} | {
    kind: kind.value.encode()
    for kind in (Kind.NACK, Kind.STATUS, Kind.SPAWN, Kind.RELEASE, Kind.CONTINUITY)
}
EMPTY_BODY_CONTENT |= {kind: kind.value.encode() for kind in CHANNEL_KINDS}
# These may lack one only if a header names the agent concerned, or the action.
_BY_HEADER = {Kind.SPAWN: "NAME", Kind.RELEASE: "NAME", Kind.CONTINUITY: "ACTION"}
ANSWERS = frozenset({Kind.ACK, Kind.NACK, Kind.RESPONSE})
# Kinds that may leave TO out, because only the orchestrator takes them.
FOR_ORCHESTRATOR = frozenset({Kind.SPAWN, Kind.RELEASE, Kind.CONTINUITY})
# Fields that may be headers instead of `NAME: value` lines in the body.
CONTROL_FIELDS = ("NAME", "CLI", "CWD", "WORKING_DIR", "ENV", "RESTART", "ACTION", "REASON")
# Fields that are allowed only in the body; CHANNEL as a header is the relay's.
BODY_FIELDS = ("PROMPT", "CHANNEL", "PATTERN", "FILTER")


class MessageFile(NamedTuple):
    """Content of one `.msg` file.

    ``headers`` holds every header except TO, KIND and ATTACHMENT, names in upper case, in the
    order of the file. ``body`` is the bytes after the blank line, valid UTF-8.
    """

    to: str
    kind: Kind
    headers: dict[str, str]
    body: bytes
    attachments: tuple[str, ...] = ()

    @property
    def content(self) -> bytes:
        """The content for the engine: the body, or the KIND's word if the body is empty."""
        return self.body or EMPTY_BODY_CONTENT.get(self.kind, b"")

    @property
    def priority(self) -> int:
        """0 critical to 4 background; 2 when not given."""
        return int(self.headers.get("PRIORITY", "2"))

    @property
    def ttl_s(self) -> int | None:
        """Seconds after it was sent within which it may be delivered."""
        value = self.headers.get("TTL")
        return duration_ms(value) // 1000 if value else None

    @property
    def await_ms(self) -> int | None:
        """Milliseconds for which the sender waits for an answer."""
        value = self.headers.get("AWAIT")
        return duration_ms(value, "ms") if value else None


class Heading(NamedTuple):
    """Recipient, kind and priority from a header."""

    to: str
    kind: Kind
    priority: int  # 0 critical to 4 background
    others: dict[str, str]  # by name in upper case, unchecked


def parse(
    data: bytes, *, file: str = "", max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
) -> MessageFile:
    """Parse a file written by an agent, checking every rule of the format.

    Errors: MessageError naming file, line, header and rule.
    """
    if not data:
        raise MessageError("the file is empty", file=file)
    head, body = split(data)
    if len(head) > MAX_HEADER_BYTES:
        raise MessageError(
            f"the header is {len(head)} bytes, at most {MAX_HEADER_BYTES}; a blank line ends it",
            file=file,
        )
    if len(body) > max_body_bytes:
        raise BodyTooLarge(
            f"the body is {len(body)} bytes, at most {max_body_bytes}; put it into an attachment",
            file=file,
        )
    try:
        parsed = _parse(head, body, file, delivered=False)
        _check_headers(parsed, file)
    except MessageError as exc:
        if exc.line or not exc.header:
            raise
        line = _line_of(exc.header, head)
        raise MessageError(exc.rule, file=file, line=line, header=exc.header) from exc
    return parsed


def max_file_bytes(max_body_bytes: int) -> int:
    """The size of the largest file within the limits: header, end of line, blank line, body."""
    return MAX_HEADER_BYTES + len(b"\n\r\n") + max_body_bytes


def heading(head: bytes) -> Heading:
    """Parse recipient, kind and priority of a header returned by ``split``.

    Errors: MessageError; the rules of other headers are not checked.
    """
    headers, _ = _header_lines(head, "", delivered=False)
    to, kind = _address(headers, "")
    priority = headers.get("PRIORITY", "2")
    is_valid, rule = _RULES["PRIORITY"]
    if not is_valid(priority):
        raise MessageError(f"{_shown(priority)} is not {rule}", header="PRIORITY")
    return Heading(to, kind, int(priority), headers)


def parse_delivered(data: bytes, *, file: str = "") -> MessageFile:
    """Parse a file the relay wrote into an inbox; FROM, ID, SENT, ATTEMPT and CHANNEL are kept."""
    head, body = split(data)
    if len(head) > MAX_DELIVERED_HEADER_BYTES:
        raise MessageError(
            f"the header is {len(head)} bytes, at most {MAX_DELIVERED_HEADER_BYTES}", file=file
        )
    return _parse(head, body, file, delivered=True)


def render(message: MessageFile, added: Iterable[tuple[str, str]] = ()) -> bytes:
    """Bytes of a `.msg` file; ``added`` headers come first and override the message's own.

    Errors: MessageError when a name or value contains a line break, so that no value can add a
    header line.
    """
    given = dict(added)
    for name in message.headers:
        if not HEADER_NAME.fullmatch(name) or name != name.upper():
            raise MessageError(f"{_shown(name)} is not a header name in upper case")
    lines = [f"{name}: {value}" for name, value in given.items()]
    lines.append(f"TO: {message.to}")
    if message.kind is not Kind.MESSAGE:
        lines.append(f"KIND: {message.kind}")
    for name, value in message.headers.items():
        if name not in given:
            lines.append(f"{name}: {value}")
    lines += map("ATTACHMENT: {}".format, message.attachments)
    text = "\n".join(lines)
    if text.count("\n") != len(lines) - 1 or _UNPRINTABLE.search(text):
        raise MessageError("a header value has a line break or control character in it")
    try:
        return text.encode() + b"\n\n" + message.body
    except UnicodeEncodeError as exc:
        raise MessageError(f"a header value is not valid UTF-8: {exc.reason}") from exc


def split(data: bytes) -> tuple[bytes, bytes]:
    """Header bytes and body bytes, without the blank line between them."""
    plain = data.find(b"\n\n")
    dos = data.find(b"\n\r\n", 0, plain + 1 if plain >= 0 else len(data))
    if dos >= 0:
        return data[:dos], data[dos + 3 :]
    if plain >= 0:
        return data[:plain], data[plain + 2 :]
    return data, b""


def control_fields(message: MessageFile) -> dict[str, str]:
    """The fields of a control message, from its headers and the `NAME: value` lines of its body.

    Both forms are accepted; a header takes precedence. A body line that does not start a known
    field continues the previous one (a prompt of many lines). A spawn with NAME as a header may
    give its prompt as the whole body.
    """
    lines: dict[str, list[str]] = {}
    last: list[str] = []  # what stands before the first field belongs to none
    body = message.body.decode()
    for line in body.split("\n"):
        name, colon, value = line.partition(":")
        is_text = name == "FILTER" and message.kind is not Kind.SUBSCRIBE  # as of a prompt
        if colon and not is_text and (name in CONTROL_FIELDS or name in BODY_FIELDS):
            last = lines[name] = [value]
        else:
            last.append(line)
    fields = {name: "\n".join(parts) for name, parts in lines.items()}
    if message.kind is Kind.SPAWN and "NAME" in message.headers and "PROMPT" not in fields:
        fields["PROMPT"] = body
    for name in CONTROL_FIELDS:
        if name in message.headers:
            fields[name] = message.headers[name]
    return {name: value.strip() for name, value in fields.items()}


def command_fields(message: MessageFile) -> dict[str, str]:
    """The fields of a command to the orchestrator: the `NAME: value` lines of its body.

    Names are in upper case, in the order of the lines; ACTION may be a header, which takes
    precedence. Blank lines are ignored.
    Errors: MessageError for any other line, or a duplicate name.
    """
    fields: dict[str, str] = {}
    for number, line in enumerate(message.body.decode().split("\n"), 1):
        if not line.strip():
            continue
        name, colon, value = line.partition(":")
        name = name.strip().upper()
        if not colon or not HEADER_NAME.fullmatch(name):
            given = _shown(line.strip())
            raise MessageError(
                f"{given} is not a line `NAME: value`, such as `ACTION: channel.join`",
                file="the body",
                line=number,
            )
        if name in fields:
            raise MessageError(f"{name} is given twice", file="the body", line=number)
        fields[name] = value.strip()
    if "ACTION" in message.headers:
        fields["ACTION"] = message.headers["ACTION"]
    return fields


def _parse(head: bytes, body: bytes, file: str, *, delivered: bool) -> MessageFile:
    headers, attachments = _header_lines(head, file, delivered=delivered)
    try:
        body.decode()
    except UnicodeDecodeError as exc:
        raise MessageError(
            f"the body is not UTF-8 (byte {exc.start}); put binary data into an attachment",
            file=file,
        ) from exc
    to, kind = _address(headers, file, delivered=delivered)
    return MessageFile(to, kind, headers, body, attachments)


def _address(headers: dict[str, str], file: str, *, delivered: bool = False) -> tuple[str, Kind]:
    """TO and KIND, taken out of these headers."""
    word = headers.pop("KIND", Kind.MESSAGE)
    kind = _KINDS.get(word.lower())
    if kind is None or (kind not in SENT_KINDS and not delivered):
        raise MessageError(
            f"{_shown(word)} is not one of {', '.join(SENT_KINDS)}", file=file, header="KIND"
        )
    to = headers.pop("TO", None)
    if to is None:
        if kind not in FOR_ORCHESTRATOR:
            raise MessageError("TO is missing: say who gets it, `TO: name`", file=file)
        to = ORCHESTRATOR
    if not _is_address(to):
        raise MessageError(
            f"{_shown(to)} is not an address: expected a name, *, #channel, Lead or {ORCHESTRATOR}",
            file=file,
            header="TO",
        )
    return to, kind


def _header_lines(
    head: bytes, file: str, *, delivered: bool
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Headers by upper-case name, in order, and the attachments separately."""
    try:
        text = head.decode()
    except UnicodeDecodeError as exc:
        number = head.count(b"\n", 0, exc.start) + 1
        raise MessageError("the header is not UTF-8", file=file, line=number) from exc
    lines = text.split("\n")
    if lines and not lines[-1]:
        lines.pop()  # the file ends with its last header line
    if len(lines) > MAX_HEADER_LINES and not delivered:
        raise MessageError(
            f"{len(lines)} header lines, at most {MAX_HEADER_LINES}; a blank line ends the header",
            file=file,
            line=MAX_HEADER_LINES + 1,
        )
    headers: dict[str, str] = {}
    attachments: list[str] = []
    for number, line in enumerate(lines, 1):
        name, value = _header_line(line, number, file)
        if name == "ATTACHMENT":
            attachments.append(value)
        elif name in headers:
            raise MessageError("given twice", file=file, line=number, header=name)
        else:
            headers[name] = value
    if not delivered:
        for name in RELAY_HEADERS:
            headers.pop(name, None)
    return headers, tuple(attachments)


def _header_line(line: str, number: int, file: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon:
        raise MessageError(
            f"{_shown(line)} is not a header line `NAME: value`; a blank line ends the header",
            file=file,
            line=number,
        )
    name = name.strip()
    if name.startswith("\ufeff"):
        raise MessageError(
            "a byte order mark before the first header: write UTF-8 without one",
            file=file,
            line=number,
        )
    if not HEADER_NAME.fullmatch(name):
        raise MessageError(f"{_shown(name)} is not a valid header name", file=file, line=number)
    name = name.upper()
    value = value.strip()
    if CONTROL_CHARACTER.search(value):
        raise MessageError(
            "the value has a control character in it", file=file, line=number, header=name
        )
    if len(value.encode()) > MAX_VALUE_BYTES:
        raise MessageError(
            f"the header's value is {len(value.encode())} bytes, at most {MAX_VALUE_BYTES}",
            file=file,
            line=number,
            header=name,
        )
    return name, value


def _is_address(to: str) -> bool:
    if to.startswith("#"):
        return is_channel_name(to[1:])
    return to in (EVERYONE, ORCHESTRATOR) or to.lower() == LEAD or bool(AGENT_NAME.fullmatch(to))


def _shown(value: str, limit: int = 60) -> str:
    return repr(value if len(value) <= limit else value[:limit] + "…")


def _check_headers(message: MessageFile, file: str) -> None:
    """Check the rules of single headers and those that depend on the KIND."""
    for name, value in message.headers.items():
        rule = _RULES.get(name)
        if rule and not rule[0](value):
            raise MessageError(f"{_shown(value)} is not {rule[1]}", file=file, header=name)
    for value in message.attachments:
        if not CHECKSUM.fullmatch(value):
            raise MessageError(
                f"{_shown(value)} is not sha256: and 64 hex digits", file=file, header="ATTACHMENT"
            )
    if message.kind in ANSWERS and not message.headers.keys() & {"RE", "THREAD"}:
        raise MessageError(
            f"KIND {message.kind} needs RE, the id of the message that it answers, or a THREAD",
            file=file,
            header="RE",
        )
    if "OPTIONS" in message.headers and message.kind is not Kind.QUERY:
        raise MessageError("only KIND query asks something", file=file, header="OPTIONS")
    if "NOT-BEFORE" in message.headers and (message.to == ORCHESTRATOR or message.kind in ANSWERS):
        text = "an answer, and what the relay is told, has its effect at once"
        raise MessageError(text, file=file, header="NOT-BEFORE")
    if not message.body and message.kind not in EMPTY_BODY_CONTENT:
        raise MessageError(
            f"the body is empty; KIND {message.kind} needs one, behind a blank line", file=file
        )
    needed = _BY_HEADER.get(message.kind)
    if not message.body and needed and needed not in message.headers:
        raise MessageError(
            f"the body is empty; KIND {message.kind} needs {needed}, as a header or in the body",
            file=file,
        )
    declared = message.headers.get("CHECKSUM")
    if declared and declared != (found := SHA256_PREFIX + sha256_hex(message.body)):
        text = f"the body's is {found}, not {declared}"
        raise MessageError(text, file=file, header="CHECKSUM")


def _line_of(header: str, head: bytes) -> int:
    """The line number of a header, from 1; 0 if it is missing."""
    for number, line in enumerate(head.decode().split("\n"), 1):
        if line.partition(":")[0].strip().upper() == header:
            return number
    return 0


def _reads(read: Callable[[str], object], value: str) -> bool:
    try:
        return bool(read(value))
    except ValueError:
        return False


def _is_signature(value: str) -> bool:
    is_of_kind = value.startswith(SIGNATURE_PREFIX)
    return is_of_kind and len(base64.b64decode(value[len(SIGNATURE_PREFIX) :], validate=True)) == 64


# Header -> (does the value keep the rule?, the rule in words).
_RULES: dict[str, tuple[Callable[[str], bool], str]] = {
    "THREAD": (lambda v: bool(THREAD.fullmatch(v)), "1-128 of A-Z a-z 0-9 . _ : -"),
    "RE": (lambda v: bool(MESSAGE_ID.fullmatch(v)), "a message id"),
    "PRIORITY": (lambda v: v in ("0", "1", "2", "3", "4"), "0 (critical) to 4 (background)"),
    "TOPIC": (
        lambda v: len(v) <= MAX_TOPIC_BYTES and bool(TOPIC.fullmatch(v)),
        f"a topic like build.front.ok of at most {MAX_TOPIC_BYTES} bytes",
    ),
    "TTL": (
        lambda v: _reads(lambda v: duration_ms(v, "s", 1000, MOST_TTL_S * 1000), v),
        "a duration like 60 (s) or 10m, of 1 s at least and 18 digits of seconds at most",
    ),
    "CHECKSUM": (lambda v: bool(CHECKSUM.fullmatch(v)), "sha256: and 64 hex digits"),
    "DELIVERY": (lambda v: v in DELIVERY_MODES, f"one of {', '.join(DELIVERY_MODES)}"),
    "SIGNATURE": (lambda v: _reads(_is_signature, v), "ed25519: and base64 of 64 bytes"),
    "AWAIT": (
        lambda v: _reads(lambda v: duration_ms(v, "ms", 1, MOST_AWAIT_S * 1000), v),
        f"a duration like 30s, 1m or 60000 (ms), of {MOST_AWAIT_S}s at most",
    ),
    "OPTIONS": (
        lambda v: 2 <= len({o.lower() for o in options_of(v)}) == len(options_of(v)) <= 9,
        "2 to 9 different answers, with commas between them",
    ),
    PERMISSION: (lambda v: permission_ms(v) > 0, "the time it waits, and a tool: 120s Bash"),
    "NOT-BEFORE": (
        lambda v: _reads(lambda v: later_time(v, 1) < LATEST_NS, v),
        "a duration like 10m, or a time before the year 2262 like 14:05 or 2026-11-26T14:05Z",
    ),
}
