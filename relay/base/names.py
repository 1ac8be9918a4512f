"""Names, ids and checksums: of agents, channels, messages and files. Pure rules, no I/O.

A message id is the whole stem of its file name, ``{timestamp_ns}-{hex}``: eight hex digits alone
are not unique over a million messages. See docs/formats/msg.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping, Sequence, Set
from typing import Self

from relay.base.errors import InvalidName
from relay.base.text import visible

ORCHESTRATOR = "__orchestrator__"
NAME_VARIABLE = "AGENT_RELAY_NAME"  # who acts, in a process's environment
OPERATOR = "operator"
LEAD = "lead"
EVERYONE = "*"
MSG_SUFFIX = ".msg"
SHA256_PREFIX = "sha256:"  # of a checksum in a header
CHECKSUM = re.compile(r"sha256:[0-9a-f]{64}")
ATTACHMENT_NAMES = "ATTACHMENT-NAMES"  # header: names of files, with / between them
MAX_FILE_NAME_BYTES = 255
DEFAULT_MAX_ATTACHMENT_MIB = 1024
MAX_SUFFIX_BYTES = 32  # a longer one is part of the name

# Names that no agent may register. `operator` is created by `relay init` for the person at the
# keyboard; `all` and `dm` are names of channels.
RESERVED_NAMES = frozenset({ORCHESTRATOR, "system", "root", "admin", OPERATOR, "dm", "all"})

AGENT_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9_-]{0,62}")
CHANNEL_NAME = re.compile(r"[a-zA-Z0-9_-]+(?:/[a-zA-Z0-9_-]+)*")
MAX_CHANNEL_NAME_BYTES = 128
MESSAGE_ID = re.compile(r"[0-9]{10,20}-[0-9a-f]{0,32}")
DIRECT_PREFIX = "dm/"
EVERYONE_CHANNEL = "all"
PERMISSION = "PERMISSION"  # header of a question: how long the session waits, and the tool


def is_agent_name(name: str) -> bool:
    """True for a name that an agent may have; ``operator`` is one, other reserved names are not."""
    return bool(AGENT_NAME.fullmatch(name)) and not _is_reserved(name)


def check_agent_name(name: str) -> str:
    """Return a valid name. Errors: InvalidName with the rule that is broken."""
    if not isinstance(name, str):  # for example from a script whose variable is not set
        raise InvalidName(f"expected an agent name as text, got {name!r}")
    if _is_reserved(name):
        raise InvalidName(f"agent name {name!r} is reserved")
    if not AGENT_NAME.fullmatch(name):
        raise InvalidName(f"agent name {name!r} is not a valid name")
    return name


def _is_reserved(name: str) -> bool:
    """True for a reserved name in any case, and for one that looks like the operator's."""
    plain = name.lower()
    return name != OPERATOR and (plain in RESERVED_NAMES or plain.rstrip("_-") == OPERATOR)


def lead_by_name(names: Set[str]) -> str | None:
    """The lead if no agent has the role: the agent of that name, in any case."""
    return min((name for name in names if name.lower() == LEAD), default=None)


def is_channel_name(name: str) -> bool:
    """True for a name that a channel may have (128 bytes at most)."""
    return (
        isinstance(name, str)
        and len(name) <= MAX_CHANNEL_NAME_BYTES
        and bool(CHANNEL_NAME.fullmatch(name))
    )


def message_id_of(file_name: str) -> str | None:
    """The message id in a file name; None for an invalid name."""
    stem = file_name.removesuffix(MSG_SUFFIX)
    if stem == file_name or not MESSAGE_ID.fullmatch(stem):
        return None
    return stem


def shown(file_name: str) -> str:
    """A file name as text; invalid UTF-8 and control characters are escaped."""
    text = file_name.encode(errors="surrogateescape").decode(errors="backslashreplace")
    return visible(text)


class Attachment(str):
    """A reference ``sha256:…`` to a file in the attachment store, with the name of the file.

    ``name`` is empty for content that has none.
    """

    name: str

    def __new__(cls, reference: str, name: str = "") -> Self:
        """Make one of both."""
        self = super().__new__(cls, reference)
        self.name = name
        return self

    @property
    def path(self) -> str:
        """Its path below the home; empty for a reference that is not valid."""
        digest = self.removeprefix(SHA256_PREFIX)
        return f"attachments/{digest[:2]}/{digest}" if CHECKSUM.fullmatch(self) else ""


def file_name_of(path: str | os.PathLike[str]) -> str:
    """The name of a file as it is sent with its content; empty if it cannot be sent."""
    name = shown(os.path.basename(os.fspath(path))).strip()
    return name if _is_file_name(name) else ""


def attachments_of(headers: Mapping[str, str], references: Sequence[str]) -> tuple[Attachment, ...]:
    """The attachments of a message, each with a name that no other has and any folder can hold.

    Without a valid one in ATTACHMENT-NAMES it is the first digits of the content's hash.
    """
    given = headers.get(ATTACHMENT_NAMES, "").split("/")
    if len(given) != len(references):
        given = [""] * len(references)
    found: dict[str, Attachment] = {}
    for reference, name in zip(references, map(str.strip, given), strict=True):
        names = (name, reference.removeprefix(SHA256_PREFIX)[:8], "file")
        unused = _unused(next(filter(_is_file_name, names)), found)
        found[unused] = Attachment(reference, unused)
    return tuple(found.values())


def _is_file_name(name: str) -> bool:
    return (
        name not in ("", ".", "..")
        and "/" not in name
        and visible(name) == name
        and len(name.encode()) <= MAX_FILE_NAME_BYTES
    )


def _unused(name: str, used: Mapping[str, object]) -> str:
    """The name, with a number before its suffix if it is used."""
    stem, suffix = os.path.splitext(name)
    if len(suffix.encode()) > MAX_SUFFIX_BYTES:
        stem, suffix = name, ""
    number, found = 1, name
    while found in used:
        number += 1
        end = f" ({number}){suffix}"
        room = MAX_FILE_NAME_BYTES - len(end.encode())
        found = stem.encode()[:room].decode(errors="ignore") + end
    return found


def new_message_id(now_ns: int) -> str:
    """A fresh id: nanoseconds, then 64 random bits."""
    return f"{now_ns}-{os.urandom(8).hex()}"


def derived_id(at_ns: int, *parts: object) -> str:
    """An id derived from its parts: the same parts give the same id.

    The orchestrator's replies derive their ids from the message they answer, so that a repetition
    after a crash writes the same file.
    """
    digest = sha256_hex("\0".join(map(str, parts)).encode(errors="surrogateescape"))
    return f"{max(at_ns, 10**9):d}-{digest[:32]}"


def answer_id(at_ns: int, agent: str, about: object, what: str) -> str:
    """The id of the orchestrator's answer to an agent; the same again after a crash.

    ``about``: id of the message answered; ``what``: the answer's kind or subject.
    """
    return derived_id(at_ns, "answer", agent, about, what)


def direct_channel_name(a: str, b: str) -> str:
    """``dm/{a}/{b}`` in name order; over 128 bytes ``dm/`` and 32 hex digits of its SHA-256."""
    first, second = sorted((a, b))
    name = f"{DIRECT_PREFIX}{first}/{second}"
    if len(name) <= MAX_CHANNEL_NAME_BYTES:
        return name
    return DIRECT_PREFIX + sha256_hex(name.encode())[:32]


def sha256_hex(data: bytes) -> str:
    """SHA-256 as 64 lower-case hex digits: the checksum of ledger, headers and audits."""
    return hashlib.sha256(data).hexdigest()


def uuid4_of(text: str) -> str:
    """A UUID v4 that is always the same for ``text``.

    The first 16 bytes of its SHA-256 with version and variant set; a text that is a UUID v4 already
    stays as it is. See docs/formats/msg.md.
    """
    if _is_uuid4(text):
        return text.lower()
    raw = bytearray(hashlib.sha256(text.encode()).digest()[:16])
    raw[6] = (raw[6] & 0x0F) | 0x40
    raw[8] = (raw[8] & 0x3F) | 0x80
    digits = raw.hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def _is_uuid4(text: str) -> bool:
    if len(text) != 36:
        return False
    groups = text.lower().split("-")
    return (
        [len(group) for group in groups] == [8, 4, 4, 4, 12]
        and not set("".join(groups)) - set("0123456789abcdef")
        and groups[2][0] == "4"
        and groups[3][0] in "89ab"
    )


def options_of(value: object) -> tuple[str, ...]:
    """The answers of which a question wants one: the value of its OPTIONS; empty for None."""
    return tuple(filter(None, map(str.strip, str(value or "").split(","))))


def permission_ms(value: object) -> int:
    """Milliseconds that a request for permission waits: its PERMISSION is ``120s Bash``."""
    from relay.base.clock import duration_ms  # the hooks of agent CLIs need no clock

    with contextlib.suppress(ValueError):
        return duration_ms(str(value or "").partition(" ")[0])
    return 0


def listen_address(text: str) -> tuple[str, int] | None:
    """(address, port) of ``admin.listen``; None where it is empty.

    Errors: ValueError unless it is a loopback address: requests are not authenticated.
    """
    if not text:
        return None
    import ipaddress  # here: few name one

    rule = "expected 127.0.0.1:PORT or [::1]:PORT, a loopback address and a port from 1 to 65535"
    host, _, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    is_port = port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 1 << 16
    if not (is_loopback and is_port):
        raise ValueError(rule)
    return host, int(port)
