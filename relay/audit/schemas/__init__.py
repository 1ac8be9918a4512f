"""Every schema of the audits, once: of the Spark formats, and of what the jobs write.

    formats.py   the formats `acomm`, `aof2`, `relay_ledger`, `relay_originals`, `relay_files`
    results.py   findings, counts and the tables of the jobs
    fields.py    the types that columns have

Times are UTC with microseconds, or say their unit in the name. Enums have their names, not
numbers. Ids, sizes and durations that a format keeps as u64 are ``decimal(20,0)``: a bigint
ends at 2^63-1. A time after the year 9999 is NULL. Each column carries its comment, which
``DESCRIBE`` shows.
"""
