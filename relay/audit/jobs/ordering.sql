-- Inversions by sender and recipient, clocks that are wrong
--
-- inversion: warning | [pair] of agents with messages out of order
--   A later message was written before an earlier one. `relay trace` of both shows which one
--   waited.
--
-- clock_back: warning | [step] back of this machine's clock
--   The clock of this machine was set back. The order is still that of discovery; check its time
--   service.
--
-- future_id: warning | [agent] with a clock ahead of the relay's
--   The sender's clock is ahead of the relay's. Check the time service of its machine.
--
-- future_mtime: warning | [agent] with files changed after their discovery
--   The file was changed after its discovery, or the sender's clock is ahead. Write elsewhere and
--   rename into the outbox; check the time service.
--
-- negative: warning | [message] with times that run backwards
--   The clock of this machine was set back while the message was on its way, or the ledger was
--   changed by hand. Its times are not reliable; check the time service, and compare with a backup.

-- view: steps
-- Messages that were discovered before their predecessor: the clock was set back. Neighbours are
-- compared in runs of ids, and the ends of the runs with each other: an order over everything would
-- be the work of one task. Ids of the orchestrator's answers are hashes.
SELECT message_id, agent, at, before_at,
    (unix_micros(before_at) - unix_micros(at)) / 1000 AS by_ms
FROM (
    SELECT message_id, agent_name AS agent, discovered_at AS at,
        lag(discovered_at) OVER (PARTITION BY id DIV 10000 ORDER BY id) AS before_at
    FROM ledger_messages WHERE agent_name <> '__orchestrator__'
    UNION ALL
    SELECT message_id, agent, at, lag(last_at) OVER (ORDER BY run)
    FROM (
        SELECT id DIV 10000 AS run, min_by(message_id, id) AS message_id,
            min_by(agent_name, id) AS agent, min_by(discovered_at, id) AS at,
            max_by(discovered_at, id) AS last_at
        FROM ledger_messages WHERE agent_name <> '__orchestrator__' GROUP BY id DIV 10000))
WHERE at < before_at

-- view: timed
-- Order is order of discovery: of two messages from one sender to one recipient the one discovered
-- first is written first. Others go by while a delivery is held or deferred.
--
-- First attempts that were neither held nor deferred, as far back as audit_log shows it, each
-- beside the latest earlier one of its pair. `created` is the time in the id: nanoseconds, as the
-- SDK and `date +%s%N` write it; a shell without %N gives seconds.
SELECT sender, recipient, message_id, written_at, max(written_at) OVER before AS last_written,
    coalesce(created < max(created) OVER before, false) AS is_created_before
FROM (
    SELECT *, CASE length(digits) WHEN 19 THEN number DIV 1000 WHEN 16 THEN number
        WHEN 13 THEN number * 1000 WHEN 10 THEN number * 1000000 END AS created
    FROM (
        SELECT *, split_part(message_id, '-', 1) AS digits,
            try_cast(split_part(message_id, '-', 1) AS BIGINT) AS number
        FROM sent)
    WHERE attempt = 1 AND retry_count = 0 AND written_at IS NOT NULL
        AND sender <> '__orchestrator__') AS first
WHERE coalesce(discovered_at >= (
        SELECT timestamp_micros(max(try_cast(value AS BIGINT)) DIV 1000)
        FROM ledger_orchestrator_state WHERE key IN ('audit_kept_from', 'rebuilt_at')), true)
    AND NOT EXISTS (
        SELECT 1 FROM delivery_changes AS change
        WHERE change.message_id = first.message_id AND change.recipient = first.recipient
            AND 'held' IN (change.old_status, change.new_status))
WINDOW before AS (PARTITION BY sender, recipient ORDER BY ledger_id
    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)

-- view: early
-- What was written before an earlier one of its pair; a row rebuilt from the journal has whole
-- seconds. After a step of the clock from `before_at` to `at` it went through the time between them
-- twice; a message written just then may be discovered a little earlier.
SELECT sender, recipient, message_id, written_at, last_written,
    bool_or(step.at IS NOT NULL) AS by_clock
FROM timed LEFT JOIN (SELECT at, before_at FROM steps LIMIT 10000) AS step
ON written_at <= step.before_at AND unix_micros(written_at) >= unix_micros(step.at) - 1000000
    AND last_written >= step.at
WHERE unix_micros(last_written) > unix_micros(written_at)
    + CASE WHEN unix_micros(written_at) % 1000000 = 0 THEN 1000000 ELSE 0 END
GROUP BY sender, recipient, message_id, written_at, last_written

-- table: ordering
SELECT pairs.sender, pairs.recipient, deliveries, coalesce(inversions, 0) AS inversions,
    coalesce(by_clock, 0) AS by_clock, worst_ms, message_id, created_inversions
FROM (
    SELECT sender, recipient, count(*) AS deliveries,
        count_if(is_created_before) AS created_inversions
    FROM timed GROUP BY sender, recipient) AS pairs
LEFT JOIN (
    SELECT sender, recipient, count(*) AS inversions, count_if(by_clock) AS by_clock,
        max(by_ms) AS worst_ms, max_by(message_id, by_ms) AS message_id
    FROM (
        SELECT *, CASE WHEN NOT by_clock
            THEN (unix_micros(last_written) - unix_micros(written_at)) / 1000 END AS by_ms
        FROM early)
    GROUP BY sender, recipient) AS inverted
ON inverted.sender = pairs.sender AND inverted.recipient = pairs.recipient

-- table: ordering_clock
-- From a second on a step is in the relay's own log, too. Ahead by two: times are rounded to whole
-- seconds, and a clock has its own error.
SELECT 'clock_back' AS class, message_id, agent, CAST(NULL AS STRING) AS recipient, at, by_ms
FROM steps WHERE by_ms >= 1000
UNION ALL
SELECT class, message_id, agent_name, NULL, discovered_at, us / 1000
FROM (
    SELECT message_id, agent_name, discovered_at,
        CAST(CASE length(digits) WHEN 19 THEN number DIV 1000 WHEN 16 THEN number
            WHEN 13 THEN number * 1000 WHEN 10 THEN number * 1000000 END
            - unix_micros(discovered_at) AS DOUBLE) AS future_id,
        file_mtime_ns / 1000 - unix_micros(discovered_at) AS future_mtime
    FROM (
        SELECT *, split_part(message_id, '-', 1) AS digits,
            try_cast(split_part(message_id, '-', 1) AS BIGINT) AS number
        FROM (SELECT message_id, agent_name, discovered_at, file_mtime_ns FROM ledger_messages)
        WHERE agent_name <> '__orchestrator__'))
UNPIVOT (us FOR class IN (future_id, future_mtime))
WHERE us > 2000000
UNION ALL
SELECT 'negative', message_id, sender, recipient, written_at, -least_us / 1000
FROM (
    SELECT message_id, sender, recipient, written_at, least(
            unix_micros(staged_at) - unix_micros(discovered_at),
            unix_micros(written_at) - unix_micros(discovered_at),
            unix_micros(written_at) - unix_micros(staged_at),
            unix_micros(read_at) - unix_micros(written_at),
            unix_micros(acked_at) - unix_micros(written_at)) AS least_us
    FROM sent WHERE attempt = 1 AND written_at IS NOT NULL AND sender <> '__orchestrator__')
WHERE least_us < -2000000

-- findings: inversion
SELECT message_id, sender AS agent, recipient AS route, recipient, inversions, by_clock, worst_ms
FROM ordering WHERE inversions > by_clock

-- findings: class
SELECT class, message_id, agent, recipient, at, by_ms FROM ordering_clock
