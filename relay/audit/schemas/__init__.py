"""Every schema of the audits, once: what the sources give and what the jobs write.

    store.py     the format `acomm`            ledger.py    the format `relay_ledger`
    journal.py   the format `aof2`             kept.py      `relay_originals` and `relay_files`
    results.py   what all jobs write           accounts.py  what jobs about messages write
    activity.py  what jobs about agents, time and room write

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
from relay.audit.schemas.activity import (
    AGENT_LIFE,
    AGENT_SPAWN,
    CAPACITY,
    CAPACITY_FORECAST,
    CAPACITY_PART,
    LATENCY,
    LATENCY_ROUTES,
    LATENCY_SLOWEST,
    MEASURED,
    PACK,
    RETENTION_LIMIT,
    SECURITY,
    THREAD,
    THREAD_QUERY,
    THREAD_RUNAWAY,
    TRAFFIC_AGENTS,
    TRAFFIC_BURSTS,
    TRAFFIC_HOURS,
)
from relay.audit.schemas.fields import conform, subset
from relay.audit.schemas.journal import JOURNAL, JOURNAL_DAMAGE
from relay.audit.schemas.kept import KEPT_FILE, ORIGINAL
from relay.audit.schemas.ledger import LEDGER, LEDGER_WITHOUT_ROWID
from relay.audit.schemas.results import COUNT, FINDING, RECONCILED, RECONCILED_DELIVERY, TRAFFIC
from relay.audit.schemas.store import (
    DAMAGED_FILE,
    STORED_CHANNEL,
    STORED_DELIVERY,
    STORED_MESSAGE,
    STORED_SUBSCRIPTION,
)

__all__ = [
    "ACKS",
    "AGENT_LIFE",
    "AGENT_SPAWN",
    "CAPACITY",
    "CAPACITY_FORECAST",
    "CAPACITY_PART",
    "CLOCK",
    "COUNT",
    "DAMAGED_FILE",
    "DEAD_LETTER",
    "DEAD_REASON",
    "DUPLICATE",
    "FINDING",
    "INTEGRITY_DAY",
    "JOURNAL",
    "JOURNAL_DAMAGE",
    "KEPT_FILE",
    "LATENCY",
    "LATENCY_ROUTES",
    "LATENCY_SLOWEST",
    "LEDGER",
    "LEDGER_WITHOUT_ROWID",
    "MEASURED",
    "ORDERED",
    "ORIGINAL",
    "OWED",
    "PACK",
    "RECONCILED",
    "RECONCILED_DELIVERY",
    "RETENTION_LIMIT",
    "SECURITY",
    "STORED_CHANNEL",
    "STORED_DELIVERY",
    "STORED_MESSAGE",
    "STORED_SUBSCRIPTION",
    "THREAD",
    "THREAD_QUERY",
    "THREAD_RUNAWAY",
    "TRAFFIC",
    "TRAFFIC_AGENTS",
    "TRAFFIC_BURSTS",
    "TRAFFIC_HOURS",
    "VERIFIED",
    "conform",
    "subset",
]
