"""A process that writes to a ledger until it is ended: each transaction adds a whole group.

python ledger_writer.py LEDGER
"""

from __future__ import annotations

import sys

from relay.ledger.deliveries import DeliveryFacts
from relay.ledger.ledger import FileFacts, Ledger

GROUP = 7  # rows of messages, and deliveries of each: a torn read does not divide


def main(path: str) -> None:
    """Add groups, and say so once the first is there."""
    ledger = Ledger.open(path)
    number = 0
    while True:
        ids = [f"{number}-{part}" for part in range(GROUP)]
        with ledger.transaction():
            ledger.add(
                [FileFacts(i, "alice", "x", 1, 1, None, "c", "message", "bob", 1) for i in ids]
            )
            ledger.deliveries.upsert([DeliveryFacts(i, "bob", "staged", 1, 1) for i in ids])
        if number == 0:
            print("writing", flush=True)
        number += 1


if __name__ == "__main__":
    main(sys.argv[1])
