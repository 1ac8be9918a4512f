-- Deliveries given up: reasons, ages, repeats, replays
--
-- repeated: warning | [recipient] failing repeatedly for the same reason
--   Deliveries to this recipient fail repeatedly for the same reason. Fix it first, then run `relay
--   dead replay`.
--
-- again: warning | [message] replayed, and dead again
--   It was replayed and failed again: the reason still exists.
--
-- forgotten: warning | [dead letter] neither replayed nor discarded
--   `relay dead list` shows it: replay or discard it.

-- view: died
-- Deliveries that are dead, or once were by audit_log, with time and number of deaths.
SELECT d.message_id, d.recipient, d.state, d.attempt, d.last_error, d.discarded_at, log.times,
    log.died_at
FROM ledger_deliveries d LEFT JOIN (
    SELECT message_id, recipient, count(*) AS times, max(at) AS died_at
    FROM delivery_changes WHERE new_status = 'dead' GROUP BY message_id, recipient) log
ON log.message_id = d.message_id AND log.recipient = d.recipient
WHERE d.state = 'dead' OR log.times IS NOT NULL

-- view: letters
-- A message to several may be in the store for others when its dead letter was discarded; one that
-- is a dead letter there was not, whatever the ledger says.
SELECT died.message_id, died.recipient, m.agent_name AS agent, m.target AS route,
    CASE WHEN died.state <> 'dead' THEN 'replayed'
        WHEN kept.is_letter OR died.discarded_at IS NULL AND kept.relay_id IS NOT NULL
            THEN 'waiting'
        ELSE 'discarded' END AS class,
    died.state, died.last_error AS reason,
    regexp_replace(died.last_error, '[0-9]+', '…') AS reason_kind, died.attempt,
    coalesce(died.times, 1) AS times, died.died_at, string(to_date(died.died_at)) AS day,
    (:snapshot_us - unix_micros(died.died_at)) / 1000000 AS age_s
FROM died
LEFT JOIN ledger_messages m ON m.message_id = died.message_id
LEFT JOIN (
    SELECT s.relay_id, bool_or(s.section = 'dead_letters') AS is_letter
    FROM store_messages s JOIN died ON died.message_id = s.relay_id GROUP BY s.relay_id) kept
ON kept.relay_id = died.message_id

-- table: dead_letters
SELECT * FROM letters

-- table: dead_letters_reasons
SELECT day, reason_kind, recipient, count(*) AS letters, count_if(class = 'waiting') AS waiting
FROM letters GROUP BY day, reason_kind, recipient

-- findings: repeated
-- A new dead letter is none: its sender was notified, and `relay dead list` shows it.
-- Two may be one incident.
SELECT max_by(message_id, died_at) AS message_id, max_by(agent, died_at) AS agent,
    recipient AS route, count(*) AS letters, max(reason) AS reason, max(died_at) AS died_at
FROM dead_letters WHERE class = 'waiting' AND reason_kind IS NOT NULL
GROUP BY recipient, reason_kind HAVING count(*) >= 3

-- findings: again
SELECT message_id, agent, route, recipient, times, reason, died_at
FROM dead_letters WHERE class = 'waiting' AND times > 1

-- findings: forgotten
-- A weekly look has seen it.
SELECT message_id, agent, route, recipient, times, reason, died_at
FROM dead_letters WHERE class = 'waiting' AND age_s > 7 * 86400 AND times = 1
