-- Answers owed, overdue, given up, unrequested; time to each
--
-- given_up: warning | [command or query] given up unanswered
--   The recipient was reminded and did not answer. `relay trace` shows whether it came into its
--   context, `relay agents` whether it still works; `relay resend` sends it again.
--
-- overdue: warning | [acknowledgment] overdue
--   The recipient owes an acknowledgment. `relay open --overdue` lists them; ask it, or send again.
--
-- unrequested: warning | [acknowledgment] that nobody asked for
--   An answer to something that did not ask for one. Look at the RE header of its message.
--
-- offered_not_in_context: warning | [message] shown to an agent, but not seen in its context
--   It was shown to an agent's session, and nothing shows that it came into its context. The next
--   hook of the session shows it again: `relay hooks status` says when one fired.

-- view: asked
-- A message of the store: `asks` when its kind or its channel wants an acknowledgment. One that is
-- leaving the store is in an archive, too.
SELECT relay_id, number, modified_at,
    (is_asking OR coalesce(delivery <> 'AtMostOnce', false)) AND NOT is_answer AS asks,
    coalesce(timeout_s, (SELECT max(ack_timeout_s) FROM home)) AS timeout_s
FROM (
    SELECT relay_id, max(id) AS number, max(channel_id) AS channel_id,
        bool_or(message_type IN ('Command', 'Query')) AS is_asking,
        bool_or(message_type = 'Acknowledgment') AS is_answer
    FROM store_messages WHERE relay_id IS NOT NULL GROUP BY relay_id) AS once
LEFT JOIN (
    SELECT id, delivery, CAST(ack_timeout_s AS BIGINT) AS timeout_s, modified_at,
        row_number() OVER (PARTITION BY id ORDER BY modified_at DESC) AS nth
    FROM store_channels) AS channel
ON channel.id = channel_id AND nth = 1

-- view: judged
-- Deliveries to agents that owe an acknowledgment or have one. The answer to a command or query is
-- owed as long as its obligation is open in the ledger, also after an acknowledgment that does not
-- close it. Ledger, store and journal have the time when it is overdue, the journal as it was
-- before the time without a relay was added; where none does, the kind of the message and its
-- channel decide. A relay that is not running does nothing: overdue is judged by its last activity,
-- which a clock that was ahead does not show.
SELECT CASE WHEN is_acked AND is_unrequested THEN 'unrequested' WHEN is_acked THEN 'answered'
        WHEN past_us > :grace_us THEN 'overdue' WHEN is_again THEN 'late' ELSE 'owed' END AS class,
    message_id, agent, route, recipient, state, attempt, written_at, due_at,
    CASE WHEN NOT is_acked THEN past_us / 1000000 END AS overdue_s, acked_at, ack_status,
    is_again OR coalesce(acked_at > due_at, false) AS is_late
FROM (
    SELECT message_id, sender AS agent, target AS route, recipient, state, attempt, written_at,
        acked_at, ack_status, attempt > 1 OR reminders > 0 AS is_again,
        acked_at IS NOT NULL AND NOT coalesce(obligation = 'open', false) AS is_acked,
        coalesce(asks, false) AS by_kind,
        coalesce(written_at >= journal_from, false) AS is_told,
        is_told AND told_until IS NULL AND NOT by_kind AND number IS NOT NULL
            AND NOT coalesce(modified_at >= written_at, false) AS is_unrequested,
        CASE WHEN obligation IS NOT NULL THEN obligation = 'open'
            WHEN is_told THEN told_until IS NOT NULL ELSE by_kind END AS owes,
        coalesce(owed_until, kept_until, told_until, CASE WHEN by_kind THEN
            timestamp_micros(unix_micros(written_at) + timeout_s * 1000000) END) AS due_at,
        alive_us - unix_micros(due_at) AS past_us
    FROM sent
    LEFT JOIN asked ON relay_id = message_id
    LEFT JOIN (
        SELECT id AS kept, recipient AS keeper, max(due_at) AS kept_until
        FROM store_deliveries WHERE due_at IS NOT NULL GROUP BY id, recipient)
    ON kept = number AND keeper = recipient
    LEFT JOIN (
        SELECT number AS of, recipient AS whom, max(due_at) AS told_until
        FROM journal_moves WHERE due_at IS NOT NULL GROUP BY number, recipient)
    ON of = number AND whom = recipient
    CROSS JOIN (
        SELECT max(unix_micros(updated_at)) AS alive_us
        FROM ledger_orchestrator_state WHERE unix_micros(updated_at) <= :snapshot_us)
    CROSS JOIN (
        SELECT min(at) AS journal_from
        FROM (
            SELECT at FROM journal_sent UNION ALL SELECT at FROM journal_moves
            UNION ALL SELECT at FROM journal_records))
    WHERE recipient <> '__orchestrator__'
        AND (acked_at IS NOT NULL OR state IN ('written', 'read')))
WHERE is_acked OR owes

-- table: acks
-- By sender and recipient. A percentile's rank is right to a thousandth.
SELECT sender, recipient, acked, failed, owed, late, overdue, ms[0] AS p50_ms, ms[1] AS p90_ms,
    ms[2] AS p99_ms, max_ms
FROM (
    SELECT agent AS sender, recipient, count_if(is_answered) AS acked,
        count_if(is_answered AND ack_status = 'failed') AS failed,
        count_if(NOT is_answered) AS owed,
        count_if(class = 'late' OR is_answered AND is_late) AS late,
        count_if(class = 'overdue') AS overdue,
        percentile_approx(took_ms, array(0.5, 0.9, 0.99), 1000) AS ms, max(took_ms) AS max_ms
    FROM (
        SELECT *, class IN ('answered', 'unrequested') AS is_answered,
            CASE WHEN is_answered
                THEN (unix_micros(acked_at) - unix_micros(written_at)) / 1000 END AS took_ms
        FROM judged)
    GROUP BY agent, recipient)

-- table: acks_owed
SELECT class, message_id, agent, route, recipient, state, attempt, written_at, due_at, overdue_s
FROM judged WHERE class <> 'answered'
UNION ALL
-- Answers of agents in threads without a question.
SELECT 'unrequested', one.relay_id, one.sender, one.to, one.sender, NULL, NULL, NULL, NULL, NULL
FROM (
    SELECT count_if(NOT is_answer) AS asked,
        min(CASE WHEN is_answer AND sender <> '__orchestrator__'
            THEN struct(relay_id, sender, to) END) AS one
    FROM (
        SELECT *, message_type IN ('Acknowledgment', 'Response') AS is_answer
        FROM store_messages WHERE correlation_id IS NOT NULL)
    GROUP BY correlation_id)
WHERE asked = 0 AND one.relay_id IS NOT NULL
UNION ALL
-- Shown by a hook an hour ago while a relay ran, and nothing was heard of it since.
SELECT 'offered_not_in_context', sent.message_id, sender, target, sent.recipient, sent.state,
    attempt, written_at, NULL, NULL
FROM sent JOIN (
    SELECT message_id, recipient, max_by(struct(state, offered_at), offer) AS last
    FROM ledger_offers GROUP BY message_id, recipient) AS offered
ON offered.message_id = sent.message_id AND offered.recipient = sent.recipient
LEFT JOIN lost_times ON found_at > last.offered_at
WHERE last.state = 'offered' AND sent.state = 'written'
GROUP BY sent.message_id, sender, target, sent.recipient, sent.state, attempt, written_at,
    last.offered_at
HAVING unix_micros(last.offered_at) + coalesce(sum(lost_us), 0) < :observed_until_us - 3600000000
UNION ALL
-- Commands and queries that came to an agent and were never answered.
SELECT 'given_up', message_id, sender, target, recipient, state, attempt, written_at, NULL, NULL
FROM sent WHERE obligation = 'given_up' AND state IN ('written', 'read', 'dead')
    AND recipient <> '__orchestrator__'
    AND coalesce(written_at, discovered_at) >= timestamp_micros(:recent_since_us)

-- findings: class
SELECT class, message_id, agent, route, recipient, state, attempt, written_at, due_at, overdue_s
FROM acks_owed WHERE class IN ('given_up', 'overdue', 'unrequested', 'offered_not_in_context')
