"""The relay's store and its journal, as one: ``relay.comm`` over ``relay.aof2``.

    eventlog    the store's events in the journal; ``commit`` is the instant that counts
    opening     opened, replayed, rebuilt
    upkeep      what is asked of the journal by name

Why so: docs/decisions/0008-journal.md.
"""
