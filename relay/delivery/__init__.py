"""The pipeline: from a file in an outbox to its copies in inboxes and the original in the archive.

    event_source, intake, validate   find, read and claim files
    plan, router, retry, idle        decide what follows: plans, and the times of what is held
    apply, execute                   carry it out: events in memory, files, the commit
    eventlog                         the commit: events into the journal; their replay at a start
    projection, record               the ledger's rows of the events
    values                           what passes through, and what each part is given

Its steps in order: docs/architecture.md. States, and what a crash leaves of each: docs/states.md.
"""
