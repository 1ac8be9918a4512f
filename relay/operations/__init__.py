"""Operations: what those see who look after a relay, and how the system starts it.

    tally, published    what the loop counts, and its board, for threads beside it
    admin, metrics      health, status and numbers over HTTP
    asking              the other end: what a relay that runs says of itself
    logs                JSON lines
    disk, overseer      how full the disk is, and what follows from it
    notify, service     systemd and launchd

Why so: docs/decisions/0012-operations.md.
"""
