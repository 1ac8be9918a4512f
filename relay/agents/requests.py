"""Spawn and release requests: parsed, checked against the configuration, or refused.

A refusal is one line with the reason and a hint. The values of ENV are secrets: they reach only the
process that is started, not the archive, store, journal, ledger or log. So a message is redacted
before anything about it is recorded: each value of ENV becomes ``***``; CHECKSUM and SIGNATURE,
which belong to the original text, are removed. A malformed file that may have been meant as a spawn
is treated the same. Pure except for a check of the working directory. See docs/formats/msg.md.
"""

from __future__ import annotations

import os
import re
from fnmatch import fnmatchcase
from typing import NamedTuple

import msgspec

from relay.agents.guide import guide
from relay.base.config import RESTARTS, SpawnSettings
from relay.base.message import BODY_FIELDS, CONTROL_FIELDS, Kind, MessageFile, control_fields, split
from relay.base.names import LEAD, OPERATOR, is_agent_name, shown
from relay.ledger.agents import PendingOperation

ANY_AGENT = "*"
TAKEN_NAMES = frozenset({OPERATOR, "relay"})  # a person's, and logs/relay.log is the relay's own
TOKEN = re.compile(r"\{(guide|prompt|name|cwd)\}")


class Spec(msgspec.Struct, frozen=True):
    """Everything needed to start a process, and start it again; run/{name}.{request_id}.json."""

    request_id: str
    requested_by: str
    name: str
    cli: str
    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    restart: str

    @property
    def secrets(self) -> tuple[str, ...]:
        """Values that must not appear in any text."""
        return tuple(self.env.values())


class ProcessRequest(NamedTuple):
    """A valid spawn or release, carried out once its message is accepted."""

    intent: PendingOperation
    spec: Spec | None  # None: a release


class Requester(NamedTuple):
    """The agent that asks, and its message."""

    name: str
    message_id: str
    asked_at: int
    lead: str | None  # the agent that has the role


def read_request(
    message: MessageFile, requester: Requester, settings: SpawnSettings
) -> ProcessRequest | str:
    """Parse a message of KIND spawn or release; returns the reason if it is refused."""
    operation = str(message.kind)
    if not is_allowed(requester, settings):
        who = ", ".join(settings.allow_from) or "no agent"
        return (
            f"{operation} is for {who} (spawn.allow_from in config.json), not for {requester.name}"
        )
    fields = control_fields(message)
    name = fields.get("NAME", "")
    if not name:
        return (
            f"NAME is missing: name the agent to {operation}, as a header or a line `NAME: worker`"
        )
    if not is_agent_name(name) or name.lower() in TAKEN_NAMES:
        return (
            f"NAME {shown(name)[:70]!r} is not a valid name to {operation}: expected 1-63 of "
            "A-Z a-z 0-9 _ -, starting with a letter, not reserved"
        )
    intent = PendingOperation(
        operation, requester.message_id, requester.name, requester.asked_at, name
    )
    if message.kind is Kind.RELEASE:
        reason = " ".join(shown(fields.get("REASON", "")).split())[:200]
        return ProcessRequest(msgspec.structs.replace(intent, reason=reason), None)
    spec = _read_spec(fields, intent, settings)
    return spec if isinstance(spec, str) else ProcessRequest(intent, spec)


def is_allowed(requester: Requester, settings: SpawnSettings) -> bool:
    """True for agents named in the configuration; ``lead`` there means the agent with that role."""
    allowed = set(settings.allow_from)
    if ANY_AGENT in allowed or (LEAD in allowed and requester.name == requester.lead):
        return True
    return requester.name in allowed - {LEAD}


def _read_spec(
    fields: dict[str, str], intent: PendingOperation, settings: SpawnSettings
) -> Spec | str:
    cli = fields.get("CLI", "")
    template = settings.clis.get(cli)
    if template is None:
        there_are = ", ".join(sorted(settings.clis)) or "none"
        what = f"there is no CLI {shown(cli)[:70]!r}" if cli else "CLI is missing"
        return f"{what}: spawn.clis in config.json has {there_are}"
    restart = fields.get("RESTART") or settings.restart
    if restart not in RESTARTS:
        return f"RESTART {shown(restart)[:70]!r} is not one of {', '.join(RESTARTS)}"
    given = fields.get("WORKING_DIR") or fields.get("CWD") or default_dir(settings)
    cwd = check_dir(given, settings.roots)
    if cwd is None:
        return dir_refusal(given, settings.roots)
    env = _read_env(fields.get("ENV", ""), settings)
    if isinstance(env, str):
        return env
    prompt = fields.get("PROMPT", "")
    takes_prompt = any("{prompt}" in word for word in template)
    if takes_prompt and not prompt:
        return f"PROMPT is missing: CLI {cli} requires it"
    if prompt and not takes_prompt:
        return f"PROMPT would be lost: spawn.clis.{cli} in config.json has no {{prompt}}"
    page = f"{guide(intent.name, '$AGENT_RELAY_DIR', cli)}\n# Your task\n\n"
    values = {"prompt": prompt, "name": intent.name, "cwd": cwd, "guide": page}
    argv = tuple(TOKEN.sub(lambda token: values[token[1]], word) for word in template)
    if any("\0" in text for text in (*argv, *env.values())):
        return "PROMPT and ENV must not contain NUL"
    return Spec(
        intent.request_id,
        intent.requested_by,
        intent.name,
        cli,
        argv,
        env,
        cwd,
        restart,
    )


def default_dir(settings: SpawnSettings) -> str:
    """The default working directory: the first root, else the user's home."""
    return settings.roots[0] if settings.roots else os.path.expanduser("~")


def check_dir(path: str, roots: tuple[str, ...]) -> str | None:
    """The real path of a permitted working directory; None if it is not one."""
    if not os.path.isabs(path) or "\0" in path:
        return None
    real = os.path.realpath(path)
    if not os.path.isdir(real):
        return None
    if roots and not any(_lies_under(real, os.path.realpath(root)) for root in roots):
        return None
    return real


def dir_refusal(path: str, roots: tuple[str, ...]) -> str:
    """The reason why ``check_dir`` returned None."""
    named = f"WORKING_DIR {shown(path)[:300]}"
    if not os.path.isabs(path):
        return f"{named} is not an absolute path"
    if "\0" in path or not os.path.isdir(path):
        return f"{named}: there is no such directory"
    return f"{named} is not under any of spawn.roots: {', '.join(roots)}"


def _lies_under(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def _read_env(text: str, settings: SpawnSettings) -> dict[str, str] | str:
    """Parse ENV; returns the reason if an entry is refused, without any value."""
    if len(text) > MOST_ENV:
        return f"ENV has {len(text)} characters, at most {MOST_ENV}"
    env: dict[str, str] = {}
    for number, (name, value) in enumerate(parse_env(text), 1):
        if not name:
            return f"ENV: entry {number} is not KEY=value; separate entries with commas"
        if name in env:
            return f"ENV: {name} is given twice"
        pattern = next((p for p in settings.env_deny if fnmatchcase(name, p)), None)
        if pattern is not None:
            return f"ENV: {name} may not be set: spawn.env_deny has {pattern}"
        env[name] = value
    return env


# -- secrets -----------------------------------------------------------------------------

MASK = "***"
MOST_ENV = 64 << 10  # characters: what is longer is refused, and taken out unread
UNREAD = "\0"  # stands for the secrets of that
# Shorter values are not masked in texts: they occur everywhere by chance.
LEAST_SECRET = 4
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A comma separates two settings if a name and = follow; otherwise it belongs to the value.
_NEXT = re.compile(rf",\s*(?={ENV_NAME.pattern}=)")
_SPAWN = re.compile(rb"^[ \t]*KIND[ \t]*:[ \t]*spawn[ \t\r]*$", re.I | re.M)
_ENV = re.compile(r"(\s*ENV\s*:)(.*)", re.I | re.S)
_LOOSE_ENV = re.compile(r"(\s*ENV(?![A-Za-z0-9_-])\s*:?)(.*)", re.I | re.S)
_OF_SPAWN = [name for name in (*CONTROL_FIELDS, *BODY_FIELDS) if name != "FILTER"]
_FIELD = re.compile(rf"(?:{'|'.join(_OF_SPAWN)}):")
_DROPPED = re.compile(r"\s*(?:CHECKSUM|SIGNATURE)\s*:", re.I)


class Redacted(NamedTuple):
    """A file's bytes without its secrets, and the secrets."""

    data: bytes
    secrets: tuple[str, ...]  # longest first

    def clean(self, text: str) -> str:
        """Remove the secrets from a text about the file."""
        if UNREAD in self.secrets:
            return f"it is not valid, and its ENV is longer than {MOST_ENV} characters"
        return mask(text, self.secrets)


def redact(data: bytes, *, loose: bool = False) -> Redacted | None:
    """Remove the values of ENV from a file; None for a file without ENV or of another kind.

    A second call changes nothing. ``loose``: for a malformed file, where the colon may be missing.
    """
    if not _SPAWN.search(data):
        return None
    head, body = split(data)
    separator = data[len(head) : len(data) - len(body)]
    secrets: list[str] = []
    lines = _redact(head, secrets, loose=loose, in_header=True)
    rest = _redact(body, secrets, loose=loose)
    if not secrets:
        return None
    kept = [line for line in lines if not _DROPPED.match(line)]
    text = "\n".join(kept).encode(errors="surrogateescape") + separator
    text += "\n".join(rest).encode(errors="surrogateescape")
    return Redacted(text, tuple(sorted(set(secrets), key=len, reverse=True)))


def parse_env(text: str) -> list[tuple[str, str]]:
    """Parse an ENV, ``A=1,B=2`` or one setting per line, in order; invalid ones have no name."""
    found: list[tuple[str, str]] = []
    for line in text.split("\n"):
        for part in _NEXT.split(line.strip()):
            name, equals, value = part.strip().partition("=")
            name = name.strip()
            if equals and ENV_NAME.fullmatch(name):
                found.append((name, value))
            elif part.strip():
                found.append(("", part.strip()))
    return found


def mask(text: str, secrets: tuple[str, ...]) -> str:
    """Replace every secret in a text; values too short to be secrets are left."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= LEAST_SECRET:
            text = text.replace(secret, MASK)
    return text


def _redact(part: bytes, secrets: list[str], *, loose: bool, in_header: bool = False) -> list[str]:
    kept: list[list[str]] = []  # the parts of each line
    within = False  # continuation lines of an ENV
    length = 0  # of these
    for line in part.decode(errors="surrogateescape").split("\n"):
        match = (_LOOSE_ENV if loose else _ENV).fullmatch(line)
        if match:
            within, length = True, len(line)
            gap = " " * match[2].startswith(" ")
            kept.append([match[1] + gap + _masked(match[2], secrets)])
        elif within and not (_FIELD.match(line) or (in_header and ":" in line)):
            length += len(line)
            if length > MOST_ENV:
                secrets.append(UNREAD)
            elif line.strip():
                kept[-1].append(_masked(line, secrets))
        else:
            within = False
            kept.append([line])
    return [",".join(parts) for parts in kept]


def _masked(text: str, secrets: list[str]) -> str:
    """Mask the values of settings; the result is not longer, so no limit is exceeded."""
    if len(text) > MOST_ENV:
        secrets.append(UNREAD)
        return MASK
    shown = []
    for name, value in parse_env(text):
        if value.strip("*,"):
            secrets.append(value)
        stars = MASK[: len(value)]
        shown.append(f"{name}={stars}" if name else stars)
    return ",".join(shown)
