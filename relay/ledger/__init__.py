"""Layer 2: the ledger, the status of every file and delivery in SQLite. Schema: schema.sql.

Here: words of its columns, for commands that read it and need nothing else of this room.
"""

TAKEN = "taken"  # read_how: the file is in inbox/.read
REMOVED = "removed"  # the same: no longer in the inbox, and not in inbox/.read
CANCELLED = "cancelled by "  # last_error of an expired delivery whose message was taken back
NOT_CANCELLED = f"coalesce(d.last_error, '') NOT LIKE '{CANCELLED}%'"  # of ``deliveries AS d``
