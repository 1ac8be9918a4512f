"""Layer 2: the ledger, the status of every file and delivery in SQLite. Schema: schema.sql.

Here: words of its columns, for commands that read it and need nothing else of this room.
"""

from relay.base.outcomes import CANCELLED as CANCELLED
from relay.base.outcomes import REMOVED as REMOVED

TAKEN = "taken"  # read_how: the file is in inbox/.read
NOT_CANCELLED = f"coalesce(d.last_error, '') NOT LIKE '{CANCELLED}%'"  # of ``deliveries AS d``
