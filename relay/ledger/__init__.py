"""Layer 2: the ledger, the status of every file and delivery in SQLite. Schema: schema.sql.

Here: words of its columns, for commands that read it and need nothing else of this room.
"""

from relay.base.outcomes import CANCELLED

OFFERED, IN_CONTEXT, RETURNED = "offered", "in_context", "returned"  # states of an offer
TAKEN = "taken"  # read_how: the file is in inbox/.read
# What stands in inboxes, dead letters among it; each half has an index.
UNREAD = """(SELECT message_id, recipient, written_at FROM deliveries WHERE state = 'written'
UNION ALL SELECT message_id, recipient, written_at FROM deliveries
WHERE state = 'dead' AND coalesce(read_at, 0) < written_at)"""
NOT_CANCELLED = f"coalesce(d.last_error, '') NOT LIKE '{CANCELLED}%'"  # of ``deliveries AS d``
