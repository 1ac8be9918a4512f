-- Threads: length, depth, time; unanswered queries, runaway pairs
--
-- unanswered: warning | [question] without an answer
--   The query has no answer. `relay thread` shows its recipients.
--
-- runaway: warning | [thread] of agents answering each other endlessly
--   Two agents answer each other endlessly. Stop one of them, or set a rate limit.

-- view: threaded
-- A message that expects an answer has a correlation id of its own, unless its sender names a
-- THREAD; a text without one is in no thread.
--
-- A message of the store in a thread. One that is leaving the store is in an archive, too.
SELECT correlation_id AS thread, id, max(relay_id) AS relay_id, max(message_type) AS message_type,
    max(sender) AS sender, max(to) AS route,
    coalesce(timestamp_micros(CAST(floor(max(created_ns) / 1000) AS BIGINT)), max(created_at)) AS at
FROM store_messages WHERE correlation_id IS NOT NULL GROUP BY correlation_id, id

-- table: threads
SELECT thread, count(*) AS messages, count(DISTINCT sender) AS participants,
    count_if(is_turn) AS turns, count_if(message_type = 'Query') AS queries,
    count_if(message_type = 'Response') AS responses, min(at) AS first_at, max(at) AS last_at,
    (unix_micros(last_at) - unix_micros(first_at)) / 1000 / 1000 AS duration_s
FROM (
    SELECT *, coalesce(
        sender <> lag(sender) OVER (PARTITION BY thread ORDER BY at, id), true) AS is_turn
    FROM threaded)
GROUP BY thread

-- view: lost_since
-- How long no relay ran since a query.
SELECT message_id AS lost_for, sum(lost_us) DIV 1000000 AS lost_s
FROM (
    SELECT DISTINCT message_id, discovered_at FROM sent
    WHERE kind = 'query' AND discovered_at >= timestamp_micros(:recent_since_us)) AS recent_query
JOIN lost_times ON found_at > discovered_at
GROUP BY message_id

-- table: threads_queries
-- An answer has a higher number of the engine than the query, whatever the clock did. A response to
-- an agent that has gone leaves only the status of its acknowledgment. A model thinks for minutes,
-- and an answer may take a build: so one is missed after an hour, or after the time that its sender
-- gives (AWAIT), and not before it is delivered (NOT-BEFORE); times without a relay do not count.
-- Queries to the orchestrator are left out: they are refused at once.
SELECT message_id, max(asked.thread) AS thread, max(asked.sender) AS agent,
    max(asked.route) AS route, discovered_at AS asked_at, count(DISTINCT recipient) AS recipients,
    count(DISTINCT answer.sender) AS answered, min(answer.at) AS answered_at,
    greatest((:observed_until_us - unix_micros(asked_at)) DIV 1000000, 0) AS age_s,
    asked_at >= timestamp_micros(:recent_since_us) AS recent,
    CASE WHEN answered > 0 THEN 'answered'
        WHEN bool_or(ack_status IN ('completed', 'failed')) THEN 'closed'
        WHEN bool_and(state IN ('expired', 'bounced', 'dead')) THEN 'ended'
        WHEN age_s - coalesce(max(lost_s), 0) <= 3600
            OR bool_or(state IN ('held', 'staged') OR attempt = 1 AND reminders = 0
                AND coalesce(unix_micros(coalesce(owed_until, due_at)) > :observed_until_us, false))
            THEN 'waiting' ELSE 'unanswered' END AS class
FROM sent
JOIN threaded AS asked ON asked.relay_id = message_id AND asked.message_type = 'Query'
LEFT JOIN threaded AS answer
ON answer.thread = asked.thread AND answer.sender = recipient AND answer.id > asked.id
    AND answer.message_type = 'Response'
LEFT JOIN (
    SELECT id AS awaited, recipient AS whom, max(due_at) AS due_at
    FROM store_deliveries WHERE due_at IS NOT NULL GROUP BY id, recipient)
ON awaited = asked.id AND whom = recipient
LEFT JOIN lost_since ON lost_for = message_id
WHERE kind = 'query' AND recipient <> '__orchestrator__'
GROUP BY message_id, discovered_at

-- table: threads_runaways
-- More than 30 within 60 s, one every other second, are too fast for a reader. Two that write
-- independently of each other alternate in half of their messages, these in four of five. One
-- minute of the clock has at least half of the messages, and each of the two wrote three of ten:
-- that count finds the few candidates, and these alone are sorted, with the minutes beside them.
WITH texts AS (
    SELECT message_id, sender, least(sender, recipient) AS first,
        greatest(sender, recipient) AS second, date_trunc('minute', discovered_at) AS minute,
        unix_micros(discovered_at) AS at_us, written_at
    FROM sent
    WHERE kind = 'message' AND sender <> '__orchestrator__' AND recipient <> '__orchestrator__'),
busy AS (
    SELECT first, second,
        explode(array(minute - INTERVAL 1 MINUTE, minute, minute + INTERVAL 1 MINUTE)) AS minute
    FROM (
        SELECT first, second, minute FROM texts GROUP BY first, second, minute
        HAVING count(*) > 15
            AND least(count_if(sender = first), count_if(sender <> first)) >= 0.3 * count(*)))
SELECT first, second, minute, max(n) AS messages, max(n_turns) AS turns,
    max_by(message_id, at_us) AS last_message_id,
    minute >= timestamp_micros(:recent_since_us) AS recent
FROM (
    SELECT *, count(*) OVER within AS n, count_if(is_turn) OVER within AS n_turns
    FROM (
        SELECT /*+ BROADCAST(busy) */ *, coalesce(sender <> lag(sender) OVER (
            PARTITION BY first, second ORDER BY at_us, written_at, message_id), false) AS is_turn
        FROM texts LEFT SEMI JOIN busy USING (first, second, minute))
    WINDOW within AS (PARTITION BY first, second ORDER BY at_us
        RANGE BETWEEN 60000000 PRECEDING AND CURRENT ROW))
WHERE n > 30 AND n_turns >= 0.8 * n
GROUP BY first, second, minute

-- findings: unanswered
SELECT message_id, agent, route, thread, asked_at, age_s, recipients
FROM threads_queries WHERE recent AND class = 'unanswered'

-- findings: runaway
SELECT max_by(last_message_id, minute) AS message_id, first AS agent, second AS route,
    count(*) AS minutes, sum(messages) AS messages, min(minute) AS since
FROM threads_runaways WHERE recent GROUP BY first, second
