"""Checksums, and identifiers derived from them."""

from __future__ import annotations

import hashlib

SHA256_PREFIX = "sha256:"


def sha256_hex(data: bytes) -> str:
    """SHA-256 as 64 lower-case hex digits: the checksum of ledger, headers and audits."""
    return hashlib.sha256(data).hexdigest()


def uuid4_of(text: str) -> str:
    """A UUID v4 that is always the same for ``text``.

    The first 16 bytes of its SHA-256 with version and variant set; a text that is a
    UUID v4 already stays as it is. Source: FORMATS, header THREAD.
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
