"""Names and ids: agents, channels, messages. Pure rules, no I/O.

A message id is the whole stem of its file name, ``{timestamp_ns}-{hex}``: eight hex digits
alone are not unique over a million messages. Source: relay-file-system.txt 3.3 and 5.3,
FORMATS section 1.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Set

from relay.base.errors import InvalidName
from relay.base.text import visible

ORCHESTRATOR = "__orchestrator__"
OPERATOR = "operator"
LEAD = "lead"
EVERYONE = "*"
MSG_SUFFIX = ".msg"

# Names that no agent may register. `operator` is created by `relay init` for the person at the
# keyboard; `all` and `dm` are names of channels.
RESERVED_NAMES = frozenset({ORCHESTRATOR, "system", "root", "admin", OPERATOR, "dm", "all"})

AGENT_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9_-]{0,62}")
CHANNEL_NAME = re.compile(r"[a-zA-Z0-9_-]+(?:/[a-zA-Z0-9_-]+)*")
MAX_CHANNEL_NAME_BYTES = 128
MESSAGE_ID = re.compile(r"[0-9]{10,20}-[0-9a-f]{0,32}")
DIRECT_PREFIX = "dm/"
EVERYONE_CHANNEL = "all"


def is_agent_name(name: str) -> bool:
    """True for a name that an agent may have; ``operator`` is one, other reserved names are not."""
    return bool(AGENT_NAME.fullmatch(name)) and (
        name == OPERATOR or name.lower() not in RESERVED_NAMES
    )


def check_agent_name(name: str) -> str:
    """Return a valid name. Errors: InvalidName with the rule that is broken."""
    if not isinstance(name, str):  # for example from a script whose variable is not set
        raise InvalidName(f"expected an agent name as text, got {name!r}")
    if name != OPERATOR and name.lower() in RESERVED_NAMES:
        raise InvalidName(f"agent name {name!r} is reserved")
    if not AGENT_NAME.fullmatch(name):
        raise InvalidName(f"agent name {name!r} is not a valid name")
    return name


def lead_by_name(names: Set[str], spelled: str = "Lead") -> str | None:
    """The lead if no agent has the role: the agent of that name, the exact spelling first."""
    if spelled in names:
        return spelled
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


def new_message_id(now_ns: int) -> str:
    """A fresh id: nanoseconds, then 64 random bits."""
    return f"{now_ns}-{os.urandom(8).hex()}"


def derived_id(at_ns: int, *parts: object) -> str:
    """An id derived from its parts: the same parts give the same id.

    The orchestrator's replies derive their ids from the message they answer, so that a repetition
    after a crash writes the same file.
    """
    digest = hashlib.sha256("\0".join(map(str, parts)).encode(errors="surrogateescape"))
    return f"{max(at_ns, 10**9):d}-{digest.hexdigest()[:32]}"


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
    return DIRECT_PREFIX + hashlib.sha256(name.encode()).hexdigest()[:32]
