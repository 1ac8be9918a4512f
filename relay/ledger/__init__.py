"""The ledger: what became of every file, in SQLite.

    ledger        messages and deliveries
    registry      agents, what was meant, and what should not have been
    duties        what recipients owe
    values        what goes into rows, and what comes out of them
    wording       what became of a message, in words for people
    migrations    from each version of the schema to the next
    projection    the rows that the store's events tell, for those that a crash took
    file, backup  the ledger as a file: read by others, copied, kept and put back
    wal           how long its WAL is, and who keeps it long

The table of processes is in ``relay.processes.table``. The schema: schema.sql.
"""

from relay.ledger.file import open_readonly, undelivered
from relay.ledger.ledger import (
    SCHEMA_VERSION,
    WAL_KEPT_BYTES,
    Delivery,
    DeliveryFacts,
    DutyFacts,
    FileFacts,
    Held,
    Ledger,
    Read,
    Row,
    Written,
    schema_sql,
)

__all__ = [
    "SCHEMA_VERSION",
    "WAL_KEPT_BYTES",
    "Delivery",
    "DeliveryFacts",
    "DutyFacts",
    "FileFacts",
    "Held",
    "Ledger",
    "Read",
    "Row",
    "Written",
    "open_readonly",
    "schema_sql",
    "undelivered",
]
