-- The tables of the results, in the format of lake.sql: those of each job, by the name that the
-- job's own file gives them.
--
-- `recent` is true of what happened within the days that a run judges (--recent).

-- Of all jobs.
CREATE TABLE findings (
    check TEXT NOT NULL,              -- job.class, as reconcile.missing
    severity TEXT NOT NULL,           -- error or warning
    message_id TEXT,                  -- of the ledger
    agent TEXT,                       -- sender
    route TEXT,                       -- the TO header
    path TEXT,                        -- of a file, below the home
    observed_at TIMESTAMPTZ NOT NULL, -- time of the ledger's snapshot
    detail MAP(TEXT, TEXT) NOT NULL   -- further facts, where known
);

-- Of each own check: the columns of its SELECT.
CREATE TABLE own_check (
    message_id TEXT,                -- column of the check's SELECT
    agent TEXT,                     -- likewise
    route TEXT,                     -- likewise
    path TEXT,                      -- likewise
    detail MAP(TEXT, TEXT) NOT NULL -- its other columns that are not NULL
);

CREATE TABLE acks (
    sender TEXT NOT NULL,    -- agent that is owed the acknowledgment
    recipient TEXT NOT NULL, -- agent that owes it
    acked BIGINT NOT NULL,   -- deliveries that were acknowledged
    failed BIGINT NOT NULL,  -- of these, with the status failed
    owed BIGINT NOT NULL,    -- delivered, and not acknowledged yet
    late BIGINT NOT NULL,    -- of these and of those acknowledged: after a reminder, or its time
    overdue BIGINT NOT NULL, -- of those owed: past their time, without a further attempt
    p50_ms DOUBLE,           -- written to acknowledged, half are at most this
    p90_ms DOUBLE,           -- written to acknowledged, 9 of 10 are at most this
    p99_ms DOUBLE,           -- written to acknowledged, 99 of 100 are at most this
    max_ms DOUBLE            -- written to acknowledged, the longest
);

CREATE TABLE acks_owed (
    class TEXT NOT NULL,    -- owed, late, overdue, given_up, unrequested, offered_not_in_context
    message_id TEXT,        -- of the ledger, relay_id of the store
    agent TEXT,             -- sender
    route TEXT,             -- the TO header
    recipient TEXT,         -- agent that owes it, or has sent it
    state TEXT,             -- of the delivery in the ledger
    attempt BIGINT,         -- 1 for the first
    written_at TIMESTAMPTZ, -- renamed into the inbox, the last time
    due_at TIMESTAMPTZ,     -- when it is overdue
    overdue_s DOUBLE        -- at the relay's last activity; negative: not yet
);

CREATE TABLE agents (
    agent TEXT NOT NULL,             -- its name
    class TEXT NOT NULL,             -- see docs/audit.md
    status TEXT,                     -- of its row in agents; NULL: a process without one
    reason TEXT,                     -- why it is not active
    registered_at TIMESTAMPTZ,       -- first seen
    last_seen_at TIMESTAMPTZ,        -- wrote or read
    changed_at TIMESTAMPTZ,          -- of the status
    lifetime_s BIGINT,               -- from its registration until it was terminated or retired
    messages BIGINT NOT NULL,        -- files that it sent
    received BIGINT NOT NULL,        -- written into its inbox
    unread BIGINT NOT NULL,          -- files in its inbox
    unread_since TIMESTAMPTZ,        -- when the oldest of those was written
    saves BIGINT NOT NULL,           -- continuity messages that it sent
    silent_s BIGINT,                 -- since it last wrote or read
    longest_silence_s BIGINT,        -- between two of its activities; of an hour and more
    process TEXT,                    -- state of the process that the relay started
    cli TEXT,                        -- its name in spawn.clis
    restart TEXT,                    -- never, on-failure, always
    restarts BIGINT NOT NULL,        -- how often it was started again
    recent_restarts BIGINT NOT NULL, -- of those, in the window of the last one
    started_at TIMESTAMPTZ,          -- of the process that ran last
    ended_at TIMESTAMPTZ,            -- of the process that ran last
    exit_code BIGINT,                -- negative: the signal; NULL: not known
    stuck_s BIGINT,                  -- since it has been stuck
    last_error TEXT                  -- of the process: why it failed
);

CREATE TABLE agents_spawns (
    message_id TEXT NOT NULL,      -- of the request
    agent TEXT NOT NULL,           -- agent that asked
    kind TEXT NOT NULL,            -- spawn or release
    asked_at TIMESTAMPTZ NOT NULL, -- discovered
    outcome TEXT NOT NULL,         -- done, refused, open
    answer_id TEXT,                -- of the nack, which has the reason: for `relay trace`
    reason TEXT,                   -- of a file that was refused
    process TEXT                   -- that it started
);

CREATE TABLE dead_letters (
    message_id TEXT NOT NULL, -- of the ledger
    recipient TEXT NOT NULL,  -- agent
    agent TEXT,               -- sender
    route TEXT,               -- the TO header
    class TEXT NOT NULL,      -- waiting, discarded or replayed: see docs/audit.md
    state TEXT NOT NULL,      -- of the delivery in the ledger, now
    reason TEXT,              -- why it was given up
    reason_kind TEXT,         -- the same, with … for its numbers
    attempt BIGINT,           -- the last that was made
    times BIGINT NOT NULL,    -- how often it died, as far back as audit_log goes
    died_at TIMESTAMPTZ,      -- the last time
    day TEXT,                 -- 2026-01-31, of that time
    age_s DOUBLE              -- at the snapshot
);

CREATE TABLE dead_letters_reasons (
    day TEXT,                -- 2026-01-31
    reason_kind TEXT,        -- why, with … for numbers
    recipient TEXT NOT NULL, -- agent
    letters BIGINT NOT NULL, -- that died for this reason
    waiting BIGINT NOT NULL  -- of these, neither replayed nor discarded
);

CREATE TABLE duplicates (
    class TEXT NOT NULL,   -- see docs/audit.md
    message_id TEXT,       -- of the ledger, relay_id of the store
    agent TEXT,            -- sender
    route TEXT,            -- the TO header
    recipient TEXT,        -- of the delivery that was made twice
    times BIGINT NOT NULL, -- how often it is there, or was done
    what TEXT,             -- the numbers, files, or the message before, divided by commas
    interval_ms BIGINT     -- resent: since the same was sent before
);

CREATE TABLE integrity (
    path TEXT NOT NULL,       -- below the home; of Tier 2, the object's key
    kind TEXT NOT NULL, -- store, archive, journal, ledger, segment, object, attachment, original
    class TEXT NOT NULL,      -- see docs/audit.md
    day TEXT,                 -- 2026-01-31, of a file that never changes
    item TEXT,                -- its name, the same in every tier or pack
    size BIGINT,              -- bytes
    sha256 TEXT,              -- of the file; of a segment size and crc64 of its records
    problems TEXT[] NOT NULL, -- faults, a line each
    warnings TEXT[] NOT NULL  -- notes, a line each
);

CREATE TABLE integrity_days (
    day TEXT NOT NULL,          -- 2026-01-31
    kind TEXT NOT NULL,         -- archive, segment, original
    files BIGINT NOT NULL,      -- of that day
    bytes BIGINT NOT NULL,      -- of all of them
    hash TEXT NOT NULL,         -- SHA-256 over names and checksums, 64 hex
    class TEXT NOT NULL,        -- new, same, grown, pruned; changed, shrunk
    files_before BIGINT,        -- in the run compared with
    hash_before TEXT,           -- likewise
    is_partial BOOLEAN NOT NULL -- a file of it could not be read
);

CREATE TABLE latency (
    stage TEXT NOT NULL,        -- accepted, written, inbox, read, acked
    hour TIMESTAMPTZ NOT NULL,  -- of the discovery, UTC
    recent BOOLEAN NOT NULL,    -- within the days that are judged
    deliveries BIGINT NOT NULL, -- whose stage has ended
    p50_ms DOUBLE,              -- half took at most this
    p90_ms DOUBLE,              -- 90 of 100 took at most this
    p99_ms DOUBLE,              -- 99 of 100 took at most this
    max_ms DOUBLE,              -- the longest
    slow BIGINT NOT NULL,       -- inbox: of them, above 5 s; 0 for other stages
    negative BIGINT NOT NULL    -- ended before they began: the clock was set back; not in the rest
);

CREATE TABLE latency_routes (
    sender TEXT NOT NULL,       -- agent
    recipient TEXT NOT NULL,    -- agent
    stage TEXT NOT NULL,        -- accepted, written, inbox, read, acked
    deliveries BIGINT NOT NULL, -- whose stage has ended
    p50_ms DOUBLE,              -- half took at most this
    p90_ms DOUBLE,              -- 90 of 100 took at most this
    p99_ms DOUBLE,              -- 99 of 100 took at most this
    max_ms DOUBLE,              -- the longest
    slow BIGINT NOT NULL,       -- inbox: of them, above 5 s; 0 for other stages
    negative BIGINT NOT NULL    -- ended before they began: the clock was set back; not in the rest
);

CREATE TABLE latency_slowest (
    message_id TEXT NOT NULL,           -- for `relay trace`
    sender TEXT NOT NULL,               -- agent
    recipient TEXT NOT NULL,            -- agent
    discovered_at TIMESTAMPTZ NOT NULL, -- seen in the outbox
    staged_at TIMESTAMPTZ,              -- the commit that accepted it
    written_at TIMESTAMPTZ NOT NULL,    -- renamed into the inbox
    inbox_ms DOUBLE NOT NULL            -- discovered to written
);

CREATE TABLE ordering (
    sender TEXT NOT NULL,              -- agent
    recipient TEXT NOT NULL,           -- agent
    deliveries BIGINT NOT NULL,        -- first attempts that were neither held nor deferred
    inversions BIGINT NOT NULL,        -- written before one that was discovered earlier
    by_clock BIGINT NOT NULL,          -- of these, while the clock was set back
    worst_ms DOUBLE,                   -- by how much at most, those by the clock left out
    message_id TEXT,                   -- of that one
    created_inversions BIGINT NOT NULL -- ids older than that of one discovered before
);

CREATE TABLE ordering_clock (
    class TEXT NOT NULL,  -- see docs/audit.md
    message_id TEXT,      -- of the ledger, relay_id of the store
    agent TEXT,           -- sender
    recipient TEXT,       -- of the delivery, where it is about one
    at TIMESTAMPTZ,       -- what the clock said
    by_ms DOUBLE NOT NULL -- how far it is off
);

CREATE TABLE reconcile (
    message_id TEXT NOT NULL,   -- of the ledger, relay_id of the store
    class TEXT NOT NULL,        -- see docs/audit.md
    agent TEXT,                 -- sender
    route TEXT,                 -- the TO header
    status TEXT,                -- of the ledger's row; NULL: there is none
    discovered_at TIMESTAMPTZ,  -- seen in the outbox
    processed_at TIMESTAMPTZ,   -- completed or failed
    last_error TEXT,            -- of the ledger's row
    ledger_checksum TEXT,       -- SHA-256, 64 hex
    store_checksum TEXT,        -- SHA-256, 64 hex: one that differs, if any does
    journal_checksum TEXT,      -- SHA-256, 64 hex: of the accepted content
    original_checksum TEXT,     -- SHA-256, 64 hex: of the archived file's content
    headers TEXT,               -- headers that differ between the sources, with their values
    differs TEXT,               -- status, size or path where its class is about it, with the values
    copies BIGINT NOT NULL,     -- in store and archives
    records BIGINT NOT NULL,    -- of the journal that accept it
    store_file TEXT,            -- one of the files with a copy
    stored_at TIMESTAMPTZ,      -- the engine's clock, whole seconds
    original TEXT,              -- path of the archived file, or its expected path
    deliveries BIGINT NOT NULL, -- recipients in the ledger
    waiting_for TEXT,           -- recipients whose delivery is held or staged
    ended_for TEXT              -- recipients whose delivery expired, bounced or is dead
);

CREATE TABLE reconcile_deliveries (
    message_id TEXT NOT NULL,      -- of the ledger, relay_id of the store
    recipient TEXT NOT NULL,       -- agent
    class TEXT NOT NULL,           -- see docs/audit.md
    differs TEXT,                  -- of a conflict: fields that differ, with their values
    agent TEXT,                    -- sender
    route TEXT,                    -- the TO header
    ledger_state TEXT,             -- of the ledger's row; NULL: there is none
    stored_state TEXT,             -- in the store, or the archive that has the message
    journal_state TEXT,            -- by the last record about it
    attempt BIGINT,                -- of the ledger's row
    journal_attempt BIGINT,        -- the highest that the journal has begun
    inbox_writes BIGINT NOT NULL,  -- records of the journal that put it into the inbox
    journal_changed_at TIMESTAMPTZ -- of the last record about it
);

CREATE TABLE reconcile_journal (
    class TEXT NOT NULL,            -- followed, ledger_behind
    follows BIGINT,                 -- the ledger's position in the journal; NULL: it has none
    ends BIGINT,                    -- where the journal ends; NULL: there is none
    untold_records BIGINT NOT NULL, -- of messages behind that position, older than the grace
    untold_since TIMESTAMPTZ        -- of the oldest of them
);

CREATE TABLE security (
    agent TEXT,                    -- owner of the outbox or directory; NULL: of the home's own
    hour TIMESTAMPTZ NOT NULL,     -- UTC
    source TEXT NOT NULL,          -- event, rejection, failed, request
    kind TEXT NOT NULL,            -- see docs/audit.md
    severity TEXT,                 -- error or warning; NULL: counted alone
    events BIGINT NOT NULL,        -- in this hour
    first_at TIMESTAMPTZ NOT NULL, -- the first of them
    last_at TIMESTAMPTZ NOT NULL,  -- the last of them
    message_id TEXT,               -- of one of them, where it is a message's
    path TEXT,                     -- of one of them, relative to the home
    detail TEXT,                   -- of one of them, for people
    recent BOOLEAN NOT NULL        -- within the days that are judged
);

CREATE TABLE threads (
    thread TEXT NOT NULL,         -- correlation id, UUID
    messages BIGINT NOT NULL,     -- in it
    participants BIGINT NOT NULL, -- agents that wrote in it
    turns BIGINT NOT NULL,        -- changes of the writer, and 1: its depth
    queries BIGINT NOT NULL,      -- of type Query
    responses BIGINT NOT NULL,    -- of type Response
    first_at TIMESTAMPTZ,         -- its first message, discovered
    last_at TIMESTAMPTZ,          -- its last message, discovered
    duration_s DOUBLE             -- between these
);

CREATE TABLE threads_queries (
    message_id TEXT NOT NULL,      -- of the query
    thread TEXT NOT NULL,          -- correlation id, UUID
    agent TEXT NOT NULL,           -- agent that asked
    route TEXT,                    -- the TO header
    asked_at TIMESTAMPTZ NOT NULL, -- discovered
    class TEXT NOT NULL,           -- answered, closed, ended, waiting, unanswered
    recipients BIGINT NOT NULL,    -- agents that were asked
    answered BIGINT NOT NULL,      -- of them, answered with a Response
    answered_at TIMESTAMPTZ,       -- the first Response, discovered
    age_s BIGINT NOT NULL,         -- since it was asked
    recent BOOLEAN NOT NULL        -- within the days that are judged
);

CREATE TABLE threads_runaways (
    first TEXT NOT NULL,           -- agent
    second TEXT NOT NULL,          -- agent
    minute TIMESTAMPTZ NOT NULL,   -- UTC
    messages BIGINT NOT NULL,      -- of kind message between the two, in the 60 s before one of it
    turns BIGINT NOT NULL,         -- of them, changes of the writer
    last_message_id TEXT NOT NULL, -- for `relay trace`
    recent BOOLEAN NOT NULL        -- within the days that are judged
);

CREATE TABLE traffic (
    sender TEXT NOT NULL,     -- agent
    recipient TEXT NOT NULL,  -- agent
    messages BIGINT NOT NULL, -- written into the recipient's inbox
    bytes BIGINT NOT NULL,    -- of the files sent, header and body
    p50_ms DOUBLE,            -- discovered to written, half are at most this
    p99_ms DOUBLE,            -- discovered to written, 99 of 100 are at most this
    max_ms DOUBLE             -- discovered to written, the longest
);

CREATE TABLE traffic_agents (
    agent TEXT NOT NULL,           -- sender or recipient
    recipients BIGINT NOT NULL,    -- agents that it wrote to
    senders BIGINT NOT NULL,       -- agents that wrote to it
    sent BIGINT NOT NULL,          -- deliveries of its messages
    received BIGINT NOT NULL,      -- written into its inbox
    bytes_sent BIGINT NOT NULL,    -- of the files sent, header and body
    bytes_received BIGINT NOT NULL -- of the files written into its inbox
);

CREATE TABLE traffic_hours (
    hour TIMESTAMPTZ NOT NULL,  -- UTC
    messages BIGINT NOT NULL,   -- discovered in it
    bytes BIGINT NOT NULL,      -- of their files, header and body
    deliveries BIGINT NOT NULL, -- written in it
    dead BIGINT NOT NULL        -- accepted in it, and dead, expired or bounced since
);

CREATE TABLE traffic_bursts (
    minute TIMESTAMPTZ NOT NULL,     -- UTC
    messages BIGINT NOT NULL,        -- discovered in it
    bytes BIGINT NOT NULL,           -- of their files, header and body
    times_median DOUBLE NOT NULL,    -- messages, by those of the median minute that has any
    busiest TEXT NOT NULL,           -- the agent that sent most of them
    busiest_messages BIGINT NOT NULL -- sent by that agent
);

CREATE TABLE capacity (
    day DATE NOT NULL,                -- UTC
    messages BIGINT NOT NULL,         -- discovered in it
    message_bytes BIGINT NOT NULL,    -- of their files, header and body
    ledger_bytes BIGINT NOT NULL,     -- of the ledger's file, shared out by messages
    journal_bytes BIGINT NOT NULL,    -- segments begun in it, every copy that is here
    store_bytes BIGINT NOT NULL,      -- store/archive of that date
    archive_bytes BIGINT NOT NULL,    -- archive of that date, folder and pack
    inbox_bytes BIGINT NOT NULL,      -- files in inboxes and .read, by their mtime
    attachment_bytes BIGINT NOT NULL, -- by their mtime
    total_bytes BIGINT NOT NULL       -- on the disk, of all these
);

CREATE TABLE capacity_parts (
    part TEXT NOT NULL,    -- ledger, journal, store, archive, inbox, attachment, other
    files BIGINT NOT NULL, -- now
    bytes BIGINT NOT NULL, -- on the disk, now
    bytes_per_day DOUBLE,  -- over seven whole days at most; NULL: there is none
    limit_bytes BIGINT     -- retention keeps it below; NULL: nothing does
);

CREATE TABLE capacity_forecast (
    disk_bytes BIGINT NOT NULL,       -- size of the disk
    free_bytes BIGINT NOT NULL,       -- that the relay may still write
    floor_bytes BIGINT NOT NULL,      -- the relay accepts nothing below it
    home_bytes BIGINT NOT NULL,       -- of the home, on the disk
    bytes_per_day DOUBLE,             -- of the home, likewise
    full_in_days BIGINT,              -- until the floor, if nothing is removed; NULL: ten years on
    full_in_days_kept BIGINT,         -- the same, with what retention removes
    warm_raw_bytes BIGINT NOT NULL,   -- of journal segments that are compressed, before
    warm_bytes BIGINT NOT NULL,       -- the same, compressed
    evicted_bytes BIGINT NOT NULL,    -- of segments that left this disk for the object store
    packed_raw_bytes BIGINT NOT NULL, -- of messages of archive days that are packed
    packed_bytes BIGINT NOT NULL      -- of their packs
);
