-- The ledger: what became of every file that an agent dropped.
--
-- Times are Unix nanoseconds (UTC). Paths are relative to the home. Look into it with
--     relay ledger query "select status, count(*) from messages group by 1"
-- Readers never block the relay (WAL). The only writer is the daemon.
-- Schema version: PRAGMA user_version. To change this file: raise it, and add the step from the
-- version before to relay/ledger/schema.py.

PRAGMA user_version = 7;

-- One row for each file in an outbox, and one for each message of the orchestrator's own.
CREATE TABLE messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT,      -- order of discovery
    message_id TEXT UNIQUE NOT NULL,           -- the file name's stem
    agent_name TEXT NOT NULL,                  -- the sender: owner of the outbox
    direction TEXT NOT NULL,                   -- 'outbox'; see the view all_messages
    file_path TEXT NOT NULL,                   -- where the file is now
    file_size INTEGER NOT NULL,                -- bytes
    file_mtime_ns INTEGER NOT NULL,
    file_inode INTEGER,
    checksum TEXT,                             -- SHA-256 of the body, 64 hex digits
    status TEXT NOT NULL DEFAULT 'pending'     -- pending > processing > completed > archived
        CHECK (status IN ('pending', 'processing', 'completed', 'failed', 'archived')),
    message_type TEXT,                         -- the KIND header
    target TEXT,                               -- the TO header
    discovered_at INTEGER NOT NULL,
    processed_at INTEGER,                      -- completed or failed
    retry_count INTEGER DEFAULT 0,
    last_error TEXT,
    last_error_code TEXT                       -- failed: a code of refusals, docs/formats/ledger.md
);
-- What is not at its end. A query must repeat this condition word for word to use it.
CREATE INDEX messages_open ON messages (id)
    WHERE status IN ('pending', 'processing', 'completed');
CREATE INDEX messages_failed ON messages (id) WHERE status = 'failed';

-- One row for each recipient of a message.
CREATE TABLE deliveries (
    message_id TEXT NOT NULL,
    recipient TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN
        ('held', 'staged', 'written', 'read', 'acked', 'expired', 'bounced', 'dead')),
    attempt INTEGER NOT NULL DEFAULT 1,        -- 1 for the first delivery
    staged_at INTEGER,                         -- the commit that accepted it
    written_at INTEGER,                        -- renamed into the inbox
    read_at INTEGER,                           -- the file left the inbox
    acked_at INTEGER,
    ack_status TEXT,                           -- received, in_progress, completed, failed
    due_at INTEGER,                            -- held: tried again; obligation open: overdue
    last_error TEXT,
    read_how TEXT,                             -- 'taken': in inbox/.read; 'removed': gone otherwise;
                                               -- NULL: not known
    answer_id TEXT,                            -- message id of the last ack, nack or response
    answer_text TEXT,                          -- the first line of what it says
    obligation TEXT,                           -- 'open' | 'answered' | 'given_up'; NULL: none
    reminders INTEGER NOT NULL DEFAULT 0,      -- how often its recipient was reminded
    discarded_at INTEGER,                      -- dead: its dead letter was discarded
    PRIMARY KEY (message_id, recipient)
) WITHOUT ROWID;
CREATE INDEX deliveries_open ON deliveries (due_at) WHERE state IN ('held', 'staged');
CREATE INDEX deliveries_unread ON deliveries (recipient, message_id) WHERE state = 'written';
CREATE INDEX deliveries_owed ON deliveries (recipient, message_id) WHERE obligation = 'open';
CREATE INDEX deliveries_dead ON deliveries (recipient, message_id) WHERE state = 'dead';
CREATE INDEX deliveries_failed ON deliveries (message_id) WHERE ack_status = 'failed'
    OR obligation = 'given_up' OR state IN ('expired', 'bounced', 'dead');

-- What hooks showed to the sessions of agents, and whether it came into their context.
CREATE TABLE offers (
    message_id TEXT NOT NULL,
    recipient TEXT NOT NULL,
    offer INTEGER NOT NULL,                    -- 1 for the first of this delivery
    session TEXT NOT NULL,                     -- claude:0089…
    state TEXT NOT NULL CHECK (state IN ('offered', 'in_context', 'returned')),
    after TEXT,                                -- the event of the hook that printed it
    offered_at INTEGER NOT NULL,
    ended_at INTEGER,                          -- in_context or returned
    evidence TEXT,                             -- where it was seen, or why it was returned
    PRIMARY KEY (message_id, recipient, offer)
) WITHOUT ROWID;
CREATE INDEX offers_open ON offers (recipient, message_id) WHERE state = 'offered';

-- How idle agents were rung for messages that wait.
CREATE TABLE rings (
    agent TEXT NOT NULL,
    at INTEGER NOT NULL,
    session TEXT NOT NULL,                     -- of the agent CLI
    rung TEXT NOT NULL,                        -- claude-inbox, command, ...
    messages INTEGER NOT NULL,                 -- how many waited
    result TEXT NOT NULL,                      -- ok, or why it failed
    PRIMARY KEY (agent, at, session)
) WITHOUT ROWID;

-- Files refused without a row of their own: the id is taken, or the name is none.
CREATE TABLE rejections (
    agent TEXT NOT NULL,
    file_name TEXT NOT NULL,
    inode INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    reason TEXT NOT NULL,
    nack_id TEXT NOT NULL,                     -- the answer in the agent's inbox
    at INTEGER NOT NULL,
    code TEXT,                                 -- of the refusal
    PRIMARY KEY (agent, file_name, inode, mtime_ns)
) WITHOUT ROWID;

CREATE TABLE agents (
    name TEXT PRIMARY KEY,
    registered_at INTEGER NOT NULL,
    last_seen_at INTEGER,                      -- last file written or read
    pid INTEGER,
    status TEXT DEFAULT 'active',              -- 'active' | 'inactive' | 'terminated' | 'retired'
    note TEXT,                                 -- what it last said of itself (KIND: status)
    reason TEXT,                               -- why it is not active, for who writes to it
    changed_at INTEGER,                        -- when the status last changed
    public_key TEXT,                           -- Ed25519, 64 hex digits: its messages are checked
    mailbox TEXT                               -- inode and birth of its inbox: another is a new one
);

-- The processes that the relay started, one a name; relay/agents/supervisor.py.
CREATE TABLE processes (
    name TEXT PRIMARY KEY,                     -- the agent's
    state TEXT NOT NULL CHECK (state IN ('starting', 'ready', 'working', 'idle', 'stuck',
        'exited', 'failed', 'released')),
    pid INTEGER,                               -- the leader of its group; NULL: none runs
    pid_start TEXT,                            -- tells it from a later process of the same pid
    cli TEXT NOT NULL,                         -- its name in spawn.clis
    cwd TEXT NOT NULL,
    restart TEXT NOT NULL,                     -- 'never' | 'on-failure' | 'always'
    requested_by TEXT NOT NULL,                -- who hears what becomes of it
    request_id TEXT NOT NULL,                  -- the spawn message
    restarts INTEGER NOT NULL DEFAULT 0,
    restarted_at TEXT NOT NULL DEFAULT '[]',   -- JSON: those in the window of the last one
    started_at INTEGER,                        -- of the process that runs, or ran last
    changed_at INTEGER NOT NULL,               -- of the state
    ended_at INTEGER,
    exit_code INTEGER,                         -- negative: the signal; NULL: not known
    cpu_percent REAL,                          -- since the look before
    rss_bytes INTEGER,
    idle_s INTEGER,                            -- since it last wrote, read or used CPU
    last_error TEXT
);

-- What the daemon must know after a crash: epoch, writer, boot_id.
CREATE TABLE orchestrator_state (
    key TEXT PRIMARY KEY,
    value TEXT,
    updated_at INTEGER
);

-- Intents of operations of several steps; recovery completes or rolls back each one.
CREATE TABLE pending_operations (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    operation_type TEXT NOT NULL,              -- 'spawn' | 'release' | 'notify_idle'
    payload TEXT NOT NULL,                     -- JSON
    created_at INTEGER NOT NULL,
    completed_at INTEGER
);

-- Which message names which attachment: what none names is nobody's.
CREATE TABLE attachment_refs (
    sha256 TEXT NOT NULL,
    message_id TEXT NOT NULL,
    at INTEGER NOT NULL,
    PRIMARY KEY (sha256, message_id)
) WITHOUT ROWID;

-- Every change of a status, whoever makes it, and what happened to a delivery besides: an answer is
-- asked for, its recipient is reminded, it is given up; a session was shown a message; an agent was
-- rung. Nothing in it is ever changed or removed by hand.
CREATE TABLE audit_log (
    id INTEGER PRIMARY KEY,
    at INTEGER NOT NULL,                       -- to the millisecond
    message_id TEXT,                           -- NULL: a ring, for all that waits
    recipient TEXT,                            -- NULL: the message itself
    old_status TEXT,                           -- NULL: it is new
    new_status TEXT NOT NULL,
    who TEXT,                                  -- the daemon of that time: its pid and epoch
    attempt INTEGER,                           -- of a delivery, from now on; of an offer, which one
    staged_at INTEGER,                         -- of the attempt before, where this is a new one
    written_at INTEGER                         -- likewise, for its row forgets both
);
CREATE INDEX audit_log_message ON audit_log (message_id);

CREATE TABLE security_events (
    id INTEGER PRIMARY KEY,
    at INTEGER NOT NULL,
    kind TEXT NOT NULL,                        -- a word of relay/base/incidents.py
    agent TEXT,
    path TEXT,
    detail TEXT
);

CREATE TRIGGER messages_added AFTER INSERT ON messages BEGIN
    INSERT INTO audit_log (at, message_id, new_status, who) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id, NEW.status,
        (SELECT value FROM orchestrator_state WHERE key = 'writer'));
END;
CREATE TRIGGER messages_moved AFTER UPDATE OF status ON messages
WHEN OLD.status <> NEW.status BEGIN
    INSERT INTO audit_log (at, message_id, old_status, new_status, who) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id, OLD.status, NEW.status,
        (SELECT value FROM orchestrator_state WHERE key = 'writer'));
END;
CREATE TRIGGER deliveries_moved AFTER UPDATE OF state, attempt ON deliveries
WHEN OLD.state <> NEW.state OR OLD.attempt <> NEW.attempt BEGIN
    INSERT INTO audit_log (at, message_id, recipient, old_status, new_status, who, attempt,
        staged_at, written_at) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id, NEW.recipient, OLD.state, NEW.state,
        (SELECT value FROM orchestrator_state WHERE key = 'writer'), NEW.attempt,
        CASE WHEN OLD.attempt <> NEW.attempt THEN OLD.staged_at END,
        CASE WHEN OLD.attempt <> NEW.attempt THEN OLD.written_at END);
END;
-- A later answer to the same message: the row has the last one alone.
CREATE TRIGGER deliveries_answered_again AFTER UPDATE OF answer_id ON deliveries
WHEN OLD.state = 'acked' AND NEW.state = 'acked' AND NEW.answer_id IS NOT OLD.answer_id BEGIN
    INSERT INTO audit_log (at, message_id, recipient, old_status, new_status, attempt, who) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id, NEW.recipient, OLD.state, NEW.state, NEW.attempt,
        (SELECT value FROM orchestrator_state WHERE key = 'writer'));
END;
-- What was given up, and its file left the inbox all the same: the state stays.
CREATE TRIGGER deliveries_read_late AFTER UPDATE OF read_at ON deliveries
WHEN OLD.state = NEW.state AND NEW.state IN ('dead', 'expired', 'bounced')
AND NEW.read_at IS NOT OLD.read_at BEGIN
    INSERT INTO audit_log (at, message_id, recipient, old_status, new_status, attempt, who) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id, NEW.recipient, NEW.state, 'read', NEW.attempt,
        (SELECT value FROM orchestrator_state WHERE key = 'writer'));
END;
CREATE TRIGGER deliveries_asked AFTER INSERT ON deliveries WHEN NEW.obligation = 'open' BEGIN
    INSERT INTO audit_log (at, message_id, recipient, new_status, who) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id, NEW.recipient, 'asked',
        (SELECT value FROM orchestrator_state WHERE key = 'writer'));
END;
CREATE TRIGGER deliveries_asked_later AFTER UPDATE OF obligation ON deliveries
WHEN NEW.obligation IS NOT OLD.obligation AND NEW.obligation IN ('open', 'given_up') BEGIN
    INSERT INTO audit_log (at, message_id, recipient, new_status, who) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id, NEW.recipient,
        CASE NEW.obligation WHEN 'open' THEN 'asked' ELSE 'given_up' END,
        (SELECT value FROM orchestrator_state WHERE key = 'writer'));
END;
CREATE TRIGGER deliveries_reminded AFTER UPDATE OF reminders ON deliveries
WHEN NEW.reminders > OLD.reminders BEGIN
    INSERT INTO audit_log (at, message_id, recipient, new_status, who) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id, NEW.recipient, 'reminded',
        (SELECT value FROM orchestrator_state WHERE key = 'writer'));
END;
CREATE TRIGGER deliveries_discarded AFTER UPDATE OF discarded_at ON deliveries
WHEN NEW.discarded_at IS NOT NULL AND OLD.discarded_at IS NULL BEGIN
    INSERT INTO audit_log (at, message_id, recipient, new_status, who) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id, NEW.recipient, 'discarded',
        (SELECT value FROM orchestrator_state WHERE key = 'writer'));
END;
CREATE TRIGGER offers_added AFTER INSERT ON offers BEGIN
    INSERT INTO audit_log (at, message_id, recipient, new_status, attempt, who) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id, NEW.recipient, NEW.state, NEW.offer,
        (SELECT value FROM orchestrator_state WHERE key = 'writer'));
END;
CREATE TRIGGER offers_moved AFTER UPDATE OF state ON offers
WHEN OLD.state <> NEW.state BEGIN
    INSERT INTO audit_log (at, message_id, recipient, old_status, new_status, attempt, who) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id, NEW.recipient, OLD.state, NEW.state, NEW.offer,
        (SELECT value FROM orchestrator_state WHERE key = 'writer'));
END;
CREATE TRIGGER rings_added AFTER INSERT ON rings BEGIN
    INSERT INTO audit_log (at, recipient, new_status, who) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.agent, 'rung',
        (SELECT value FROM orchestrator_state WHERE key = 'writer'));
END;

-- Append-only. What retention removes is older than audit_kept_from, and goes with a row in
-- security_events that says so.
CREATE TRIGGER audit_log_keeps_rows BEFORE DELETE ON audit_log
WHEN OLD.at >= coalesce((SELECT CAST(value AS INTEGER) FROM orchestrator_state
    WHERE key = 'audit_kept_from'), 0) BEGIN
    SELECT RAISE(ABORT, 'audit_log is append-only');
END;
CREATE TRIGGER audit_log_keeps_values BEFORE UPDATE ON audit_log BEGIN
    SELECT RAISE(ABORT, 'audit_log is append-only');
END;
CREATE TRIGGER audit_log_replaces_none BEFORE INSERT ON audit_log
WHEN EXISTS (SELECT 1 FROM audit_log WHERE id = NEW.id) BEGIN
    SELECT RAISE(ABORT, 'audit_log is append-only');
END;
CREATE TRIGGER security_events_keeps_rows BEFORE DELETE ON security_events
WHEN OLD.at >= coalesce((SELECT CAST(value AS INTEGER) FROM orchestrator_state
    WHERE key = 'audit_kept_from'), 0) BEGIN
    SELECT RAISE(ABORT, 'security_events is append-only');
END;
CREATE TRIGGER security_events_keeps_values BEFORE UPDATE ON security_events BEGIN
    SELECT RAISE(ABORT, 'security_events is append-only');
END;
CREATE TRIGGER security_events_replaces_none BEFORE INSERT ON security_events
WHEN EXISTS (SELECT 1 FROM security_events WHERE id = NEW.id) BEGIN
    SELECT RAISE(ABORT, 'security_events is append-only');
END;

-- What was sent and what was delivered, in the columns of messages.
CREATE VIEW all_messages AS
SELECT id, message_id, agent_name, direction, file_path, file_size, file_mtime_ns, file_inode,
       checksum, status, message_type, target, discovered_at, processed_at, retry_count, last_error,
       last_error_code
FROM messages
UNION ALL
SELECT m.id, m.message_id, d.recipient, 'inbox',
       'agents/' || d.recipient || '/inbox/' || m.message_id || '.msg',
       m.file_size, m.file_mtime_ns, NULL, m.checksum, d.state, m.message_type, d.recipient,
       d.staged_at, d.written_at, d.attempt - 1, d.last_error, NULL
FROM deliveries AS d JOIN messages AS m USING (message_id);
