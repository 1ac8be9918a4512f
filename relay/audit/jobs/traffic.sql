-- Pairs of agents: messages, bytes, milliseconds to the inbox

-- view: pairs
-- What was written, by sender and recipient: a message to several recipients once for each. There
-- are no findings: a burst is a row of traffic_bursts. Percentiles are values that occurred, exact
-- up to 10,000 different ones a pair; negative when the clock was set back in between.
SELECT sender, recipient, messages, bytes, ms[0] AS p50_ms, ms[1] AS p99_ms, max_ms
FROM (
    SELECT sender, recipient, count(*) AS messages, sum(file_size) AS bytes,
        percentile_approx(ms, array(0.5, 0.99), 10000) AS ms, max(ms) AS max_ms
    FROM (
        SELECT sender, recipient, file_size,
            (unix_micros(written_at) - unix_micros(discovered_at)) / 1000 AS ms
        FROM sent WHERE written_at IS NOT NULL)
    GROUP BY sender, recipient)

-- table: traffic
SELECT * FROM pairs

-- table: traffic_agents
SELECT agent, sum(recipients) AS recipients, sum(senders) AS senders, sum(sent) AS sent,
    sum(received) AS received, sum(bytes_sent) AS bytes_sent, sum(bytes_received) AS bytes_received
FROM (
    SELECT sender AS agent, 1 AS recipients, 0 AS senders, messages AS sent, 0 AS received,
        bytes AS bytes_sent, 0 AS bytes_received
    FROM pairs
    UNION ALL
    SELECT recipient, 0, 1, 0, messages, 0, bytes FROM pairs)
GROUP BY agent

-- view: minutes
-- Messages a minute of discovery, and the busiest sender. By sender first: few rows are left.
SELECT minute, sum(messages) AS messages, sum(bytes) AS bytes,
    max(struct(messages, agent_name)) AS most
FROM (
    SELECT date_trunc('minute', discovered_at) AS minute, agent_name, count(*) AS messages,
        sum(file_size) AS bytes
    FROM ledger_messages GROUP BY date_trunc('minute', discovered_at), agent_name)
GROUP BY minute

-- table: traffic_hours
-- Messages by their discovery, deliveries by their writing; what ended otherwise by its acceptance.
SELECT hour, sum(messages) AS messages, sum(bytes) AS bytes, sum(deliveries) AS deliveries,
    sum(dead) AS dead
FROM (
    SELECT date_trunc('hour', minute) AS hour, messages, bytes, 0 AS deliveries, 0 AS dead
    FROM minutes
    UNION ALL
    SELECT date_trunc('hour', written_at), 0, 0, 1, 0 FROM sent
    WHERE written_at IS NOT NULL AND state NOT IN ('dead', 'expired', 'bounced')
    UNION ALL
    SELECT date_trunc('hour', coalesce(staged_at, discovered_at)), 0, 0, 0, 1 FROM sent
    WHERE state IN ('dead', 'expired', 'bounced'))
GROUP BY hour

-- table: traffic_bursts
-- Minutes far above the median one of those with any message. Ten a second are no person's.
SELECT minute, messages, bytes, messages / median AS times_median, most.agent_name AS busiest,
    most.messages AS busiest_messages
FROM minutes CROSS JOIN (SELECT median(messages) AS median FROM minutes)
WHERE messages >= 600 AND messages / median >= 10
ORDER BY messages DESC
