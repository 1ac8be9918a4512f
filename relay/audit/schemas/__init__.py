"""Every schema of the audits, once: what the sources give and what the jobs write.

    store.py    the format `acomm`            ledger.py   the format `relay_ledger`
    journal.py  the format `aof2`             results.py  what jobs write
    kept.py     the formats `relay_originals` and `relay_files`

Times are UTC with microseconds, or say their unit in the name. Enums have their names, not
numbers. Ids, sizes and durations that the format keeps as u64 are ``decimal(20,0)``: a bigint
ends at 2^63-1. A time behind the year 9999 is NULL. Each column carries its comment, which
``DESCRIBE`` shows.
"""

from relay.audit.schemas.accounts import (
    ACKS,
    CLOCK,
    DEAD_LETTER,
    DEAD_REASON,
    DUPLICATE,
    INTEGRITY_DAY,
    ORDERED,
    OWED,
    VERIFIED,
)
from relay.audit.schemas.fields import conform, subset
from relay.audit.schemas.journal import JOURNAL, JOURNAL_DAMAGE
from relay.audit.schemas.kept import KEPT_FILE, ORIGINAL
from relay.audit.schemas.ledger import LEDGER, LEDGER_WITHOUT_ROWID
from relay.audit.schemas.results import COUNT, FINDING, RECONCILED, RECONCILED_DELIVERY, TRAFFIC
from relay.audit.schemas.store import (
    STORED_CHANNEL,
    STORED_DELIVERY,
    STORED_MESSAGE,
    STORED_SUBSCRIPTION,
)

__all__ = [
    "ACKS",
    "CLOCK",
    "COUNT",
    "DEAD_LETTER",
    "DEAD_REASON",
    "DUPLICATE",
    "FINDING",
    "INTEGRITY_DAY",
    "JOURNAL",
    "JOURNAL_DAMAGE",
    "KEPT_FILE",
    "LEDGER",
    "LEDGER_WITHOUT_ROWID",
    "ORDERED",
    "ORIGINAL",
    "OWED",
    "RECONCILED",
    "RECONCILED_DELIVERY",
    "STORED_CHANNEL",
    "STORED_DELIVERY",
    "STORED_MESSAGE",
    "STORED_SUBSCRIPTION",
    "TRAFFIC",
    "VERIFIED",
    "conform",
    "subset",
]
