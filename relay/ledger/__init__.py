"""Layer 2: the ledger, the status of every file and delivery in SQLite. Schema: schema.sql."""

from relay.ledger.deliveries import (
    DeliveryFacts,
    DeliveryRow,
    HeldDelivery,
    ObligationFacts,
    ReadDelivery,
    WrittenDelivery,
)
from relay.ledger.file import open_readonly
from relay.ledger.ledger import FileFacts, Ledger, MessageRow
from relay.ledger.schema import SCHEMA_VERSION, WAL_KEPT_BYTES, schema_sql

__all__ = [
    "SCHEMA_VERSION",
    "WAL_KEPT_BYTES",
    "DeliveryFacts",
    "DeliveryRow",
    "FileFacts",
    "HeldDelivery",
    "Ledger",
    "MessageRow",
    "ObligationFacts",
    "ReadDelivery",
    "WrittenDelivery",
    "open_readonly",
    "schema_sql",
]
