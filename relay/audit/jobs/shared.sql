-- Views that several jobs read.

-- view: sent
-- A delivery beside its message. `waited`: for a reason outside the relay. Its inbox could not be
-- written, the channel was full, it was delivered again, it is the copy of a recipient that joined
-- later, or the full disk deferred its message. One that is accepted at once is committed before
-- it is completed.
SELECT
    m.id AS ledger_id, m.message_id, m.agent_name AS sender, m.target, d.recipient,
    m.message_type AS kind, m.file_size, m.retry_count, d.state, d.attempt, d.ack_status,
    m.discovered_at, d.staged_at, d.written_at, d.read_at, d.acked_at, d.obligation,
    CASE WHEN d.obligation = 'open' THEN d.due_at END AS owed_until, d.reminders,
    coalesce(d.staged_at > m.processed_at, false) OR coalesce(m.retry_count > 0, false)
        OR d.attempt > 1 AS waited
FROM ledger_deliveries d
JOIN ledger_messages m ON m.message_id = d.message_id

-- view: delivery_changes
-- The changes of deliveries to written, held or dead: a few rows of audit_log. `is_again`: with a
-- new attempt.
SELECT at, message_id, recipient, old_status, new_status, attempt,
    coalesce(staged_at, written_at) IS NOT NULL AS is_again
FROM ledger_audit_log WHERE new_status IN ('written', 'held', 'dead')

-- view: days_in_use
-- Days of the archive with a file that retention keeps, however old: of a message that waits.
SELECT DISTINCT substring(m.file_path, 9, 10) AS day, true AS is_in_use
FROM ledger_messages m JOIN ledger_deliveries d ON d.message_id = m.message_id
WHERE d.state IN ('held', 'staged') AND m.file_path LIKE 'archive/%'

-- view: lost_times
-- Recent times without a relay, each at its end: none ran, or the machine slept. What happened
-- before is so much younger for agents that were not there either.
SELECT at AS found_at, lost_ms * 1000 AS lost_us FROM journal_records
WHERE event = 'TimeLost' AND lost_ms > 0 AND at >= timestamp_micros(:recent_since_us)

-- view: refused
-- Requests that the orchestrator answered with a nack, which is known by its id: after the time
-- come 32 digits of the SHA-256 of "answer", sender, message id and kind
-- (relay.base.names.answer_id).
SELECT asked.message_id, answer_id
FROM ledger_messages AS asked JOIN (
    SELECT message_id AS answer_id, split_part(message_id, '-', -1) AS digest
    FROM ledger_messages WHERE agent_name = '__orchestrator__' AND message_type = 'nack') AS nack
ON digest = left(sha2(concat_ws(chr(0), 'answer', agent_name, message_id, 'nack'), 256), 32)
WHERE target = '__orchestrator__' OR message_type IN ('spawn', 'release')
