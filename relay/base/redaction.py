"""Redaction of the secrets in a spawn request, the values of its ENV header.

They reach only the process that is started: not the archive, store, journal, ledger or log. A
message is redacted before anything about it is recorded: each value of ENV becomes ``***``;
CHECKSUM and SIGNATURE, which belong to the original text, are removed. A malformed file that may
have been meant as a spawn is treated the same. Pure; it does no I/O.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from relay.base.message import BODY_FIELDS, CONTROL_FIELDS, split

MASK = "***"
# Shorter values are not masked in texts: they occur everywhere by chance.
LEAST_SECRET = 4
KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A comma separates two settings if a name and = follow; otherwise it belongs to the value.
_NEXT = re.compile(rf",\s*(?={KEY.pattern}=)")
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
            if equals and KEY.fullmatch(name):
                found.append((name, value))
            elif part.strip():
                found.append(("", part.strip()))
    return found


def mask(text: str, secrets: tuple[str, ...]) -> str:
    """Replace every secret in a text; values too short to be secrets are left."""
    for one in sorted(secrets, key=len, reverse=True):
        if len(one) >= LEAST_SECRET:
            text = text.replace(one, MASK)
    return text


def _redact(part: bytes, secrets: list[str], *, loose: bool, in_header: bool = False) -> list[str]:
    kept: list[str] = []
    within = False  # continuation lines of an ENV
    for line in part.decode(errors="surrogateescape").split("\n"):
        match = (_LOOSE_ENV if loose else _ENV).fullmatch(line)
        if match:
            within = True
            gap = " " * match[2].startswith(" ")
            kept.append(match[1] + gap + _masked(match[2], secrets))
        elif within and not (_FIELD.match(line) or (in_header and ":" in line)):
            if line.strip():
                kept[-1] += "," + _masked(line, secrets)
        else:
            within = False
            kept.append(line)
    return kept


def _masked(text: str, secrets: list[str]) -> str:
    """Mask the values of settings; the result is not longer, so no limit is exceeded."""
    shown = []
    for name, value in parse_env(text):
        if value.strip("*,"):
            secrets.append(value)
        stars = MASK[: len(value)]
        shown.append(f"{name}={stars}" if name else stars)
    return ",".join(shown)
