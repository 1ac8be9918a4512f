"""Layer 2: the ledger: what became of every file, in SQLite. Schema: schema.sql."""

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
