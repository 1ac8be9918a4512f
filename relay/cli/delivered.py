"""Files in an inbox that the relay did not deliver: the ledger has no delivery of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

from relay.base.errors import LedgerError
from relay.base.home import LEDGER, Home

NOT_OURS = "not delivered by the relay"
UNKNOWN = "the ledger does not know it"  # a relay that was killed may not have told it
PATIENCE_S = 1.0  # the ledger hears of a delivery behind the rename


def marks(root: str, agent: str, message_ids: Iterable[str]) -> dict[str, str] | None:
    """A note for each message that no delivery to this agent names, by id; None where the
    ledger cannot be read."""
    from relay.base.lock_file import lock_holder

    with Home(root) as home:
        try:
            found = _undelivered(home, agent, set(message_ids))
            if not found:
                return {}
            if lock_holder(home) is None:
                return dict.fromkeys(found, UNKNOWN)
            end = time.monotonic() + PATIENCE_S
            while found and time.monotonic() < end:
                time.sleep(0.05)
                found = _undelivered(home, agent, found)
        except LedgerError:
            return None
    return dict.fromkeys(found, NOT_OURS)


def _undelivered(home: Home, agent: str, message_ids: set[str]) -> set[str]:
    from relay.ledger import open_readonly, undelivered

    with contextlib.closing(open_readonly(home.path(LEDGER))) as db:
        return undelivered(db, agent, message_ids)
