"""Which public key an agent's signatures are checked against: what is asked, and by whom.

A key is 64 hex digits in the agent's meta.json. The first one seen is registered; another one
counts once operator or lead confirm it. Source: FORMATS section 2, "Signatures".
"""

from __future__ import annotations

import re
from typing import NamedTuple

from relay.base.errors import Refused
from relay.base.names import is_agent_name

PUBLIC_KEY = re.compile(r"[0-9a-f]{64}")
NO_KEY = "none"


class KeyRegistration(NamedTuple):
    """From now on this key is the agent's; empty: none is."""

    name: str
    public_key: str

    def __str__(self) -> str:
        if not self.public_key:
            return f"no key is registered for {self.name} any more"
        return f"the key {self.public_key} is registered for {self.name}"


def parse_key_registration(name: str, key: str) -> KeyRegistration:
    """What a command asks for. Errors: Refused for no name or no key."""
    if not is_agent_name(name):
        raise Refused(f"NAME {name[:60]!r} is no agent's name")
    word = key.lower()
    if word != NO_KEY and not PUBLIC_KEY.fullmatch(word):
        raise Refused(f"KEY {key[:80]!r} is no public key: 64 hex digits, or {NO_KEY}")
    return KeyRegistration(name, "" if word == NO_KEY else word)
