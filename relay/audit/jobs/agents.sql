-- Lifetimes, processes, restarts; who is stuck, failed or silent
--
-- stuck: warning | [agent] stuck
--   `relay ps` shows the process; `relay release` ends it.
--
-- failed: warning | [agent] that could not be started
--   `relay ps` says why the process could not be started.
--
-- flapping: warning | [agent] restarted again and again
--   The process keeps ending and being restarted. Its log in logs/ has the reason.
--
-- silent: warning | [agent] with mail that it does not read
--   The agent has mail but reads none of it. Check that it is still running.

-- view: activity
-- What each agent did, and the longest time between two of its signs. By hours first, which are
-- few; a silence of less than an hour may lie within one, where nothing looks.
SELECT agent, sum(messages) AS messages, sum(saves) AS saves, sum(received) AS received,
    sum(unread) AS unread, min(unread_since) AS unread_since, max(last_at) AS last_at,
    max(CASE WHEN gap_s >= 3600 THEN gap_s END) AS longest_silence_s
FROM (
    SELECT *, unix_micros(lag(last_at) OVER (PARTITION BY agent ORDER BY hour)) AS before,
        (unix_micros(first_at) - before) DIV 1000000 AS gap_s
    FROM (
        SELECT agent, date_trunc('hour', at) AS hour, min(at) AS first_at, max(at) AS last_at,
            count_if(is_sent) AS messages, count_if(is_save) AS saves,
            count(written_at) AS received, count_if(is_unread) AS unread,
            min(CASE WHEN is_unread THEN written_at END) AS unread_since
        FROM (
            SELECT agent_name AS agent, discovered_at AS at, true AS is_sent,
                coalesce(message_type = 'continuity', false) AS is_save, NULL AS written_at,
                false AS is_unread
            FROM ledger_messages
            UNION ALL
            SELECT recipient, read_at, false, false, written_at, state = 'written'
                OR state = 'dead' AND coalesce(read_at < written_at, written_at IS NOT NULL)
            FROM ledger_deliveries)
        GROUP BY agent, date_trunc('hour', at)))
GROUP BY agent

-- view: idle
-- How long each agent with unread mail could have read it: since its last sign, or since that mail,
-- without the times when no relay ran.
SELECT agent AS idler, :observed_until_us - unix_micros(max(idle_since))
    - coalesce(sum(lost_us), 0) AS idle_us
FROM (
    SELECT name AS agent, greatest(registered_at, last_seen_at, last_at, unread_since) AS idle_since
    FROM ledger_agents JOIN activity ON activity.agent = name WHERE unread_since IS NOT NULL)
LEFT JOIN lost_times ON found_at > idle_since
GROUP BY agent

-- table: agents
-- Each agent that was ever registered, or whose process was. Ages end at the snapshot while a relay
-- runs, else at its last activity. The class is the first that is true, worst first. Three restarts
-- in spawn.restart_window_s are many, after five the relay gives up by default. A night without
-- reading is normal, a day while a relay runs is worth a look; the operator is a person.
SELECT coalesce(a.name, p.name) AS agent, status, reason, registered_at, last_seen_at, a.changed_at,
    greatest((coalesce(CASE WHEN status IN ('terminated', 'retired') THEN unix_micros(a.changed_at)
        END, :observed_until_us) - unix_micros(registered_at)) DIV 1000000, 0) AS lifetime_s,
    coalesce(messages, 0) AS messages, coalesce(received, 0) AS received,
    coalesce(unread, 0) AS unread, unread_since, coalesce(saves, 0) AS saves,
    greatest((:observed_until_us - unix_micros(greatest(registered_at, last_seen_at, last_at)))
        DIV 1000000, 0) AS silent_s,
    longest_silence_s, p.state AS process, cli, restart, coalesce(restarts, 0) AS restarts,
    coalesce(json_array_length(restarted_at), 0) AS recent_restarts, started_at, ended_at,
    exit_code, CASE WHEN p.state = 'stuck' THEN
        greatest((:observed_until_us - unix_micros(p.changed_at)) DIV 1000000, 0) END AS stuck_s,
    last_error,
    CASE WHEN process = 'stuck' THEN 'stuck'
        WHEN process = 'failed' AND p.changed_at >= timestamp_micros(:recent_since_us) THEN 'failed'
        WHEN process IN ('starting', 'ready', 'working', 'idle') AND recent_restarts >= 3
            AND started_at >= timestamp_micros(:recent_since_us) THEN 'flapping'
        WHEN status = 'active' AND a.name <> 'operator' AND idle_us >= 86400000000 THEN 'silent'
        WHEN status IN ('inactive', 'terminated', 'retired') THEN 'away' ELSE 'present' END AS class
FROM ledger_agents a FULL JOIN ledger_processes p ON p.name = a.name
LEFT JOIN activity ON activity.agent = coalesce(a.name, p.name)
LEFT JOIN idle ON idler = a.name

-- table: agents_spawns
-- Every request for a process. A refused one is counted and is no finding: the requester was sent
-- the reason, and most often the name is running already.
SELECT asked.message_id, agent_name AS agent, message_type AS kind, discovered_at AS asked_at,
    CASE WHEN status = 'failed' OR refused.answer_id IS NOT NULL THEN 'refused'
        WHEN obeyed.message_id IS NOT NULL THEN 'done' ELSE 'open' END AS outcome,
    refused.answer_id, CASE WHEN status = 'failed' THEN asked.last_error END AS reason,
    p.name AS process
FROM ledger_messages asked
LEFT JOIN refused ON refused.message_id = asked.message_id
LEFT JOIN ledger_deliveries obeyed
ON obeyed.message_id = asked.message_id AND obeyed.recipient = '__orchestrator__'
LEFT JOIN ledger_processes p ON p.request_id = asked.message_id
WHERE message_type IN ('spawn', 'release')

-- findings: class
SELECT class, agent, process, stuck_s, restarts, recent_restarts, exit_code, last_error, unread,
    unread_since, silent_s
FROM agents WHERE class IN ('stuck', 'failed', 'flapping', 'silent')
