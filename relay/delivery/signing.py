"""Signatures at the door: who signs for an agent, and whether a message is signed so.

    meta.json names a key, none is registered   registered, and said
    meta.json names another key                 ignored, and said once, until it is confirmed
    signed, and not by the registered key       refused
    not signed, or by a key nobody registered   refused where security.require_signatures is set

A key that is registered stays when meta.json is gone. What is signed: relay/base/signatures.py.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from typing import NamedTuple

from relay.base.clock import Clock
from relay.base.crypto import key_id, verify
from relay.base.incidents import Incident, IncidentDedup, IncidentKind
from relay.base.message import SIGNATURE_PREFIX, MessageFile
from relay.delivery.key_registration import PUBLIC_KEY
from relay.engine.commstore import CommStore
from relay.ledger import Ledger


class SignatureFault(NamedTuple):
    """Why a message is refused for its signature."""

    kind: IncidentKind
    reason: str


class SigningKeys:
    """The registered keys. Owned by the loop."""

    def __init__(
        self,
        ledger: Ledger,
        store: CommStore,
        required: bool,
        clock: Clock,
        log: Callable[..., object],
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._required = required
        self._clock = clock
        self._log = log
        self._told = IncidentDedup()
        self._keys: dict[str, str] = {}
        self.load()

    def load(self) -> None:
        """Read what is registered; once more after a change. Who takes part in a channel already
        has its key's id there, too: what a crash left undone, the next start does."""
        self._keys = self._ledger.agents.public_keys()
        ids = {name: key_id(bytes.fromhex(key)) for name, key in self._keys.items()}
        self._store.set_identities(ids)

    def register_new(self, named: Iterable[tuple[str, str | None]]) -> None:
        """(agent, the key that its meta.json names): register the first, say of another one."""
        fresh: list[tuple[str, str]] = []
        incidents: list[Incident] = []
        for agent, given in named:
            key = (given or "").lower()
            known = self._keys.get(agent)
            if key == (known or "") or not PUBLIC_KEY.fullmatch(key):
                continue
            path = f"agents/{agent}/meta.json"
            if known is None:
                fresh.append((agent, key))
                detail = f"the first key of {agent} is {key}: its signatures are checked against it"
                incidents.append(Incident(IncidentKind.KEY_REGISTERED, agent, path, detail))
            else:
                detail = (
                    f"meta.json names the key {key}, registered is {known}: it is not used until "
                    f"operator or lead confirm it, `relay key trust {agent} {key}`"
                )
                incidents.append(Incident(IncidentKind.KEY_CHANGED, agent, path, detail))
        changed = [one for one in incidents if one.kind is IncidentKind.KEY_CHANGED]
        incidents = [one for one in incidents if one not in changed] + self._told.fresh(changed)
        if not incidents:
            return
        now = self._clock.now_ns()
        with self._ledger.transaction():
            self._ledger.agents.set_public_keys(fresh, now)
            self._ledger.agents.add_incidents(incidents, now)
        for one in incidents:
            self._log(one.detail, action=str(one.kind), level="warning", agent=one.agent)
        self.load()

    def check(self, agent: str, message_id: str, message: MessageFile) -> SignatureFault | None:
        """Why a message is not taken for its signature, or nothing."""
        signature = message.headers.get("SIGNATURE")
        key = self._keys.get(agent)
        if signature is None:
            if not self._required:
                return None
            return SignatureFault(
                IncidentKind.UNSIGNED,
                "it is not signed, and security.require_signatures asks for that: "
                f"`relay key make {agent}`, and send with the SDK or `relay send`",
            )
        if key is None:
            if not self._required:
                return None
            return SignatureFault(
                IncidentKind.UNSIGNED,
                f"no public key of {agent} is registered, and security.require_signatures asks for "
                f"one: put it into agents/{agent}/meta.json as public_key, 64 hex digits",
            )
        raw = base64.b64decode(signature.removeprefix(SIGNATURE_PREFIX))
        if verify(bytes.fromhex(key), raw, agent, message_id, message.to, message.body):
            return None
        return SignatureFault(
            IncidentKind.BAD_SIGNATURE,
            f"SIGNATURE is not of the key that is registered for {agent} "
            f"({key_id(bytes.fromhex(key))}), over this sender, id, TO and body",
        )
