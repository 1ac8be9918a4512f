-- The tables of an audit lake: the name, type and comment of each column, as lake_columns.py reads
-- them. Those of the ledger are in schema.sql, with times as timestamps.
--
-- `bucket` depends on the id of a message alone: all rows about a message are in one bucket, in
-- whatever table. Times are UTC with microseconds, or have their unit in the name. What a format
-- stores as u64 is DECIMAL(20).

-- No table, but a column of each besides, from the names of its folders.
CREATE TABLE every_table (
    home TEXT NOT NULL -- 16 hex: the home that the row is of
);

CREATE TABLE store_messages (
    bucket TEXT NOT NULL, -- 2026-01-31: day of the message's id; or h00 to h15, by its hash
    file TEXT NOT NULL,              -- path of the store file
    section TEXT NOT NULL,           -- messages, dead_letters or archive
    id DECIMAL(20) NOT NULL,         -- the engine's number, unique in one store
    relay_id TEXT,                   -- message_id of the ledger; NULL: not the relay's
    message_type TEXT NOT NULL,      -- Text, Command, Query, ...
    sender TEXT NOT NULL,            -- agent
    to TEXT,                         -- the TO header
    kind TEXT,                       -- the KIND header
    channel_id DECIMAL(20) NOT NULL, -- number of the channel
    channel TEXT,                    -- name of the channel; NULL when this file does not hold it
    correlation_id TEXT,             -- UUID v4 of the thread
    priority TEXT NOT NULL,          -- Critical, High, Normal, Low, Background
    ttl_s DECIMAL(20),               -- time to live, seconds
    topic TEXT,                      -- topic of a PubSub message
    created_ns BIGINT,               -- discovery, Unix nanoseconds
    created_at TIMESTAMPTZ,          -- the engine's clock, whole seconds
    delivered_at TIMESTAMPTZ,        -- written for every recipient, whole seconds
    acknowledged_at TIMESTAMPTZ,     -- acked by all that owe an ack, whole seconds
    checksum TEXT,                   -- SHA-256 of the content, 64 hex; NULL when sealed
    content_size BIGINT NOT NULL,    -- bytes of the content, before it was sealed
    sealed BOOLEAN NOT NULL,         -- the content is encrypted
    status TEXT NOT NULL,            -- Created, Sent, Delivered, Acknowledged, Failed, ...
    retry_count BIGINT NOT NULL      -- deliveries tried again
);

CREATE TABLE store_deliveries (
    bucket TEXT NOT NULL,    -- 2026-01-31: day of the message's id; or h00 to h15, by its hash
    file TEXT NOT NULL,      -- path of the store file
    id DECIMAL(20) NOT NULL, -- the engine's number of the message
    relay_id TEXT,           -- message_id of the ledger; NULL: not the relay's
    recipient TEXT NOT NULL, -- agent
    state TEXT NOT NULL,     -- Sent, Delivered, Acknowledged, Bounced
    due_at TIMESTAMPTZ       -- when the acknowledgment is overdue, or the next attempt due
);

CREATE TABLE store_channels (
    file TEXT NOT NULL,                 -- path of the store file
    id DECIMAL(20) NOT NULL,            -- number of the channel
    name TEXT NOT NULL,                 -- dm/a/b for two agents
    channel_type TEXT NOT NULL,         -- Direct, Group, Broadcast, PubSub
    owner TEXT NOT NULL,                -- agent
    participants TEXT[] NOT NULL,       -- agents, in the order of joining
    delivery TEXT NOT NULL,             -- AtMostOnce, AtLeastOnce, ExactlyOnce
    ack_timeout_s DECIMAL(20),          -- seconds until an ack is overdue
    max_retries BIGINT NOT NULL,        -- deliveries tried again at most
    state TEXT NOT NULL,                -- Active, Paused, Draining, Closed
    created_at TIMESTAMPTZ,             -- whole seconds
    modified_at TIMESTAMPTZ,            -- whole seconds
    message_count DECIMAL(20) NOT NULL, -- messages that it has had
    description TEXT,                   -- for people
    tags TEXT[] NOT NULL                -- for people
);

CREATE TABLE store_subscriptions (
    file TEXT NOT NULL,              -- path of the store file
    id DECIMAL(20) NOT NULL,         -- number of the subscription
    channel_id DECIMAL(20) NOT NULL, -- number of a PubSub channel
    subscriber TEXT NOT NULL,        -- agent
    topic_pattern TEXT NOT NULL,     -- * one segment, # all that follow
    match_mode TEXT NOT NULL,        -- Exact, Wildcard, MultiLevel
    created_at TIMESTAMPTZ,          -- whole seconds
    active BOOLEAN NOT NULL          -- it counts
);

-- Of a record MessageSent: a row here, and one in journal_moves for each recipient.
CREATE TABLE journal_sent (
    bucket TEXT NOT NULL,        -- 2026-01-31: day of the message's id; or h00 to h15, by its hash
    stream TEXT NOT NULL,        -- folder of the journal's stream, below the home
    end BIGINT NOT NULL,         -- logical offset behind the record
    at TIMESTAMPTZ NOT NULL,     -- the record's own time, milliseconds
    number DECIMAL(20) NOT NULL, -- the engine's number of the message
    relay_id TEXT,               -- message_id of the ledger; NULL: not the relay's
    kind TEXT,                   -- the KIND header
    sender TEXT,                 -- agent
    to TEXT,                     -- the TO header
    checksum TEXT,               -- SHA-256 of the content, 64 hex
    created_ns BIGINT,           -- discovery, Unix nanoseconds
    created_at TIMESTAMPTZ,      -- the engine's clock, whole seconds
    correlation_id TEXT          -- UUID v4 of the thread
);

CREATE TABLE journal_moves (
    stream TEXT NOT NULL,    -- folder of the journal's stream, below the home
    end BIGINT NOT NULL,     -- logical offset behind the record
    at TIMESTAMPTZ NOT NULL, -- the record's own time, milliseconds
    event TEXT NOT NULL,     -- MessageSent, DeliveriesMoved, MessageReceived, ...
    number DECIMAL(20),      -- the engine's number of the message
    recipient TEXT,          -- agent
    attempt BIGINT,          -- 1 for the first; NULL: as it was
    relay_id TEXT,           -- message_id of the ledger, where the record has it
    state TEXT,              -- of the delivery from now on: Sent, Delivered, Acknowledged, ...
    due_at TIMESTAMPTZ,      -- when the acknowledgment is overdue, or the next attempt due
    said TEXT,               -- the status that an acknowledgment gives
    answer_id TEXT           -- message_id of the answer
);

CREATE TABLE journal_records (
    stream TEXT NOT NULL,    -- folder of the journal's stream, below the home
    segment BIGINT NOT NULL, -- id of the segment
    end BIGINT NOT NULL,     -- logical offset behind the record
    at TIMESTAMPTZ NOT NULL, -- the record's own time, milliseconds
    event TEXT NOT NULL,     -- FileRefused, OfferChanged, Rolled, ...; Start, Gap, Sealed
    relay_id TEXT,           -- message_id: FileRefused, OfferChanged, DeadLetterDiscarded
    sender TEXT,             -- agent: FileRefused
    to TEXT,                 -- the TO header: FileRefused
    created_ns BIGINT,       -- FileRefused: discovery, Unix nanoseconds
    state TEXT,              -- of deliveries from now on
    reason TEXT,             -- reason of a refusal or dead letter; of a gap
    answer_id TEXT,          -- FileRefused: message_id of the nack
    archive TEXT,            -- Rolled: name of the archive file, below store/archive
    lost_ms BIGINT,          -- TimeLost: time without a relay; negative: the clock was set back
    epoch BIGINT             -- Start: how often the daemon was started
);

CREATE TABLE originals (
    bucket TEXT NOT NULL,   -- 2026-01-31: day of the message's id; or h00 to h15, by its hash
    path TEXT NOT NULL,     -- below the home, as the ledger's file_path; in a pack, too
    message_id TEXT,        -- stem of the file's name
    kind TEXT NOT NULL,     -- original, rejected, duplicate; pack: a pack that cannot be read
    day TEXT NOT NULL,      -- 2026-01-31, of the archive's folder
    agent TEXT,             -- sender
    pack TEXT,              -- the pack that it was read from; NULL: a file of its own
    size BIGINT,            -- bytes, header and body
    checksum TEXT,          -- SHA-256 of the content, 64 hex, as the ledger's
    sha256 TEXT,            -- of the whole file, 64 hex
    target TEXT,            -- the TO header; empty: the header is not valid
    message_type TEXT,      -- the KIND header; likewise
    priority TEXT,          -- Critical, High, Normal, Low, Background; likewise
    ttl_s BIGINT,           -- the TTL header; NULL: none
    topic TEXT,             -- the TOPIC header; NULL: none
    thread TEXT,            -- the THREAD header, as the UUID v4 of its thread; NULL: none
    changed_at TIMESTAMPTZ, -- of the inode: when it came here; NULL in a pack
    problem TEXT            -- reason why it could not be read
);

CREATE TABLE files (
    path TEXT NOT NULL,          -- below the home; of Tier 2, the object's key
    kind TEXT NOT NULL,          -- ledger, store, archive, journal, segment, object, attachment
    day TEXT,                    -- 2026-01-31, of a file that never changes; NULL: it may
    item TEXT,                   -- its name, the same in every tier
    size BIGINT,                 -- bytes
    sha256 TEXT,                 -- of the file; of a segment size and crc64 of its records
    problems TEXT[] NOT NULL,    -- faults, a line each
    warnings TEXT[] NOT NULL,    -- notes, a line each
    read_at TIMESTAMPTZ NOT NULL -- when its bytes were last read
);

CREATE TABLE usage (
    part TEXT NOT NULL,         -- ledger, journal, store, archive, inbox, attachment, other
    day TEXT,                   -- 2026-01-31; NULL: it does not grow with the days
    files BIGINT NOT NULL,      -- files of this part and day
    disk_bytes BIGINT NOT NULL, -- what they take of the disk
    pack_bytes BIGINT           -- of it, the day's pack; NULL: the day is not packed
);

CREATE TABLE limits (
    part TEXT NOT NULL, -- as in usage
    days BIGINT,        -- retention removes what is older; NULL: no limit
    bytes BIGINT        -- retention keeps no more; NULL: no limit
);

CREATE TABLE home (
    name TEXT NOT NULL,                  -- host:path of the home, or the name given for a copy
    snapshot_at TIMESTAMPTZ NOT NULL,    -- the ledger's snapshot: everything before is in it
    observed_until TIMESTAMPTZ NOT NULL, -- until when a relay observed the home: ages end here
    follows BIGINT,                      -- the ledger's position in the journal; NULL: it has none
    journal_end BIGINT,                  -- behind the journal's last record; NULL: no journal
    audit_kept_from TIMESTAMPTZ,         -- audit_log has what came later; NULL: all
    ack_timeout_s BIGINT NOT NULL,       -- delivery.ack_timeout_s of config.json
    archive_days BIGINT NOT NULL,        -- retention.archive_days; 0: no limit
    archive_mib BIGINT NOT NULL,         -- retention.archive_mib; 0: no limit
    attachments_days BIGINT NOT NULL,    -- retention.attachments_days; 0: no limit
    attachments_mib BIGINT NOT NULL,     -- retention.attachments_mib; 0: no limit
    disk_bytes BIGINT NOT NULL,          -- of the disk that has the home
    free_bytes BIGINT NOT NULL,          -- available to an ordinary user
    floor_bytes BIGINT NOT NULL,         -- the relay accepts nothing below it
    warm_raw_bytes BIGINT NOT NULL,      -- of segments in Tier 1, before they were compressed
    warm_bytes BIGINT NOT NULL,          -- the same, compressed
    evicted_bytes BIGINT NOT NULL,       -- of segments that the object store alone has, compressed
    extractor BIGINT NOT NULL            -- version of what wrote the lake
);

-- No table of the lake: what the format `acomm` has of a message besides store_messages.
CREATE TABLE acomm (
    content BLOB NOT NULL,    -- UTF-8, or ciphertext when sealed
    metadata MAP(TEXT, TEXT), -- values other than text are written as JSON
    signature BLOB            -- Ed25519
);

-- No table of the lake: the records as the format `aof2` and a watch have them.
CREATE TABLE aof2 (
    stream TEXT NOT NULL,          -- folder of the journal's stream
    segment BIGINT NOT NULL,       -- id of the segment
    offset BIGINT NOT NULL,        -- logical, of the record in its stream: bytes
    end BIGINT NOT NULL,           -- logical offset behind the record
    at TIMESTAMPTZ NOT NULL,       -- the record's own time, milliseconds
    event TEXT NOT NULL, -- MessageSent, DeliveriesMoved, ...; Start, Checkpoint, Gap, Sealed
    sequence BIGINT,               -- events of the store before this one; NULL: no event
    number DECIMAL(20),            -- the engine's number of the one message that it is about
    numbers BIGINT,                -- how many messages it is about; NULL: none
    relay_id TEXT,                 -- message_id: MessageSent, and the events of journal_records
    message_type TEXT,             -- MessageSent: Text, Command, ...
    kind TEXT,                     -- MessageSent: the KIND header
    sender TEXT,                   -- agent: MessageSent, FileRefused
    to TEXT,                       -- the TO header: MessageSent, FileRefused
    recipients TEXT[],             -- agents whose deliveries it is about, each once
    checksum TEXT,                 -- MessageSent: SHA-256 of the content, 64 hex
    content_size BIGINT,           -- MessageSent: bytes
    correlation_id TEXT,           -- MessageSent: UUID v4 of the thread
    created_ns BIGINT,             -- MessageSent, FileRefused: discovery, Unix nanoseconds
    created_at TIMESTAMPTZ,        -- MessageSent: the engine's clock, whole seconds
    state TEXT, -- of the deliveries from now on: Sent, Delivered, Acknowledged, ...
    attempt BIGINT,                -- of a delivery that was made again
    said TEXT,                     -- the status that an acknowledgment gives
    reason TEXT,                   -- reason of a refusal or dead letter
    answer_id TEXT,                -- FileRefused: message_id of the nack
    message_numbers DECIMAL(20)[], -- the engine's numbers of what it is about
    deliveries STRUCT(number DECIMAL(20), recipient TEXT, attempt BIGINT)[], -- what it is about
    due_at TIMESTAMPTZ,            -- when the acknowledgment is overdue, or the next attempt due
    held BOOLEAN,                  -- MessageSent: max_pending was reached, it waits for others
    channel_id DECIMAL(20),        -- of a channel's event, and of a message
    file_path TEXT,                -- MessageSent, FileRefused: of the file, below the home
    file_checksum TEXT,            -- the checksum that the ledger has of the file, 64 hex
    archive TEXT,                  -- Rolled: name of the archive file, below store/archive
    lost_ms BIGINT, -- TimeLost: time without a relay; negative: the clock was set back
    epoch BIGINT,                  -- Start: how often the daemon was started
    boot_id TEXT,                  -- Start: of the machine
    covers BIGINT                  -- Checkpoint: offset up to which a store file covers the stream
);
