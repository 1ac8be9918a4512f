-- Milliseconds of each stage by hour and route; slow hours, slowest
--
-- slow: warning | [hour] with slow deliveries
--   Look at the slowest of that hour with `relay trace`, and at the load of the machine then.
--
-- slow_hour: warning | [hour] much slower than usual
--   Compare with the throughput of that hour: a burst, or other load on the machine.

-- view: interrupted
-- Slow deliveries for which no relay ran meanwhile. The record of that time may come after those
-- that its start completed.
SELECT DISTINCT message_id AS delayed, recipient AS whom
FROM sent JOIN lost_times ON discovered_at < found_at
    AND unix_micros(written_at) > unix_micros(found_at) - 5000000
WHERE unix_micros(written_at) - unix_micros(discovered_at) > 5000000

-- view: stages
-- Milliseconds of each stage of a delivery. What waited for a reason outside the relay, or for a
-- relay, and the orchestrator's own messages, have no stage before `written`; a repeated delivery
-- has no `read`. An interval below zero is counted apart. NULL where it has not ended, or was not
-- measured: times of whole seconds were almost always rebuilt by a start, and what waited is not
-- known of rows that were made again from the journal.
--
-- accepted: discovered in the outbox, to committed to the journal
-- written:  committed, to renamed into the inbox
-- inbox:    discovered, to renamed into the inbox: what the relay promises
-- read:     renamed into the inbox, to left the inbox: the reader's time
-- acked:    left the inbox, to its ack discovered: the reader's time
SELECT message_id, sender, recipient, discovered_at, staged_at, written_at,
    CASE WHEN at_once THEN (staged - discovered) / 1000 END AS accepted,
    (written - staged) / 1000 AS written,
    CASE WHEN at_once THEN (written - discovered) / 1000 END AS inbox,
    CASE WHEN attempt = 1 THEN (read - written) / 1000 END AS read,
    (acked - read) / 1000 AS acked
FROM (
    SELECT *, NOT waited AND sender <> '__orchestrator__' AND delayed IS NULL
            AND coalesce(unix_micros(discovered_at) >= rebuilt_us, true) AS at_once,
        unix_micros(discovered_at) AS discovered,
        CASE WHEN unix_micros(staged_at) % 1000000 <> 0 THEN unix_micros(staged_at) END AS staged,
        CASE WHEN unix_micros(written_at) % 1000000 <> 0 THEN unix_micros(written_at) END
            AS written,
        CASE WHEN unix_micros(read_at) % 1000000 <> 0 THEN unix_micros(read_at) END AS read,
        CASE WHEN unix_micros(acked_at) % 1000000 <> 0 THEN unix_micros(acked_at) END AS acked
    FROM sent CROSS JOIN (
        SELECT max(try_cast(value AS BIGINT)) DIV 1000 AS rebuilt_us
        FROM ledger_orchestrator_state WHERE key = 'rebuilt_at')
    LEFT JOIN interrupted ON delayed = message_id AND whom = recipient)

-- table: latency
-- By hour of discovery. A percentile's rank is right to a thousandth: 98.9 may pass for 99.
SELECT hour, stage, hour + INTERVAL 1 HOUR > timestamp_micros(:recent_since_us) AS recent,
    deliveries, ms[0] AS p50_ms, ms[1] AS p90_ms, ms[2] AS p99_ms, max_ms, slow, negative
FROM (
    SELECT date_trunc('hour', discovered_at) AS hour, stage, count_if(ms >= 0) AS deliveries,
        percentile_approx(CASE WHEN ms >= 0 THEN ms END, array(0.5, 0.9, 0.99), 1000) AS ms,
        max(CASE WHEN ms >= 0 THEN ms END) AS max_ms,
        count_if(stage = 'inbox' AND ms > 5000) AS slow, -- a thousand times the usual
        count_if(ms < 0) AS negative
    FROM stages UNPIVOT (ms FOR stage IN (accepted, written, inbox, read, acked))
    GROUP BY date_trunc('hour', discovered_at), stage)

-- table: latency_routes
SELECT sender, recipient, stage, deliveries, ms[0] AS p50_ms, ms[1] AS p90_ms, ms[2] AS p99_ms,
    max_ms, slow, negative
FROM (
    SELECT sender, recipient, stage, count_if(ms >= 0) AS deliveries,
        percentile_approx(CASE WHEN ms >= 0 THEN ms END, array(0.5, 0.9, 0.99), 1000) AS ms,
        max(CASE WHEN ms >= 0 THEN ms END) AS max_ms,
        count_if(stage = 'inbox' AND ms > 5000) AS slow,
        count_if(ms < 0) AS negative
    FROM stages UNPIVOT (ms FOR stage IN (accepted, written, inbox, read, acked))
    GROUP BY sender, recipient, stage)

-- table: latency_slowest
-- As many as a person looks into.
SELECT message_id, sender, recipient, discovered_at, staged_at, written_at, inbox AS inbox_ms
FROM stages WHERE inbox >= 0
ORDER BY inbox DESC, message_id, recipient LIMIT 100

-- findings: slow
-- Each hour with its slowest message, if that is known.
SELECT worst.message_id, worst.sender AS agent, worst.recipient AS route, latency.hour, deliveries,
    slow, max_ms
FROM latency LEFT JOIN (
    SELECT date_trunc('hour', discovered_at) AS hour,
        max_by(struct(message_id, sender, recipient), inbox_ms) AS worst
    FROM latency_slowest GROUP BY date_trunc('hour', discovered_at)) AS slowest
ON latency.hour = slowest.hour
WHERE stage = 'inbox' AND recent AND slow > 0

-- findings: slow_hour
-- The load of a day changes p99 by two or three. Not compared: hours of so few deliveries that
-- their p99 is the slowest one, and fewer than four hours; ten times a tiny median is still fast.
SELECT hour, deliveries, p99_ms, median_p99_ms
FROM latency CROSS JOIN (
    SELECT median(p99_ms) AS median_p99_ms, count(*) AS hours
    FROM latency WHERE stage = 'inbox' AND deliveries >= 100)
WHERE stage = 'inbox' AND deliveries >= 100 AND recent AND hours >= 4
    AND p99_ms >= greatest(10 * median_p99_ms, 100)
