-- The same message recorded, archived, delivered or sent twice
--
-- numbered_twice: error | [message] accepted twice
--   The relay accepted the message twice, and the recipient may have processed it twice. Inform it,
--   and keep ledger and journal for an analysis of the relay.
--
-- number_shared: error | [number] of two messages
--   Two messages have the same number: a file of another home is in this store, or was written by
--   hand. `relay dump` shows both.
--
-- recorded_twice: error | [message] recorded twice in the journal
--   Two records of the journal accept the message. `relay dump` shows them; keep the journal for an
--   analysis of the relay.
--
-- archived_twice: error | [message] in two archives of the store
--   Two archives of the store have the message: one of them was copied or restored. Run `relay
--   check` on both and remove the copy.
--
-- repeated_in_archive: error | [message] twice in one archive of the store
--   One archive of the store has the message twice: it was written by another program or by hand.
--   Run `relay check` on it, and replace it by a copy from a backup.
--
-- delivered_twice: error | [delivery] written twice in one attempt
--   The file was put into the inbox twice in one attempt: the recipient may have processed it
--   twice. Inform it, and keep the ledger for an analysis of the relay.
--
-- resent: warning | [message] sent again within a minute
--   The sender repeated the message within a minute: it did not wait for the answer, or did not see
--   it.

-- view: copies
-- A file whose id is in use is refused, which `security` counts.
--
-- Every place where a message has a number; `file` NULL: in the journal.
SELECT relay_id, id AS number, file, sender, to FROM store_messages WHERE relay_id IS NOT NULL
UNION ALL
SELECT relay_id, number, NULL, sender, to FROM journal_sent WHERE relay_id IS NOT NULL

-- view: by_id
-- A message in the live store and in one archive is being rolled.
SELECT relay_id AS message_id, min(sender) AS agent, min(to) AS route, min(number) AS lowest,
    max(number) AS highest, concat_ws(', ', string(min(number)), string(max(number))) AS numbers,
    count_if(file IS NULL) AS records, count_if(is_archived) AS archived,
    min(CASE WHEN is_archived THEN file END) AS first_file,
    max(CASE WHEN is_archived THEN file END) AS last_file
FROM (SELECT *, coalesce(file LIKE 'store/archive/%', false) AS is_archived FROM copies)
GROUP BY relay_id

-- table: duplicates
SELECT 'numbered_twice' AS class, message_id, agent, route, CAST(NULL AS STRING) AS recipient,
    2 AS times, numbers AS what, CAST(NULL AS BIGINT) AS interval_ms
FROM by_id WHERE lowest <> highest
UNION ALL
SELECT 'recorded_twice', message_id, agent, route, NULL, records, numbers, NULL
FROM by_id WHERE lowest = highest AND records > 1
UNION ALL
SELECT 'archived_twice', message_id, agent, route, NULL, archived,
    concat_ws(', ', first_file, last_file), NULL
FROM by_id WHERE lowest = highest AND first_file <> last_file
UNION ALL
SELECT 'repeated_in_archive', message_id, agent, route, NULL, archived, first_file, NULL
FROM by_id WHERE lowest = highest AND first_file = last_file AND archived > 1
UNION ALL
SELECT 'number_shared', min(relay_id), NULL, NULL, NULL, 2,
    concat(string(number), ': ', max(relay_id)), NULL
FROM copies GROUP BY number HAVING min(relay_id) <> max(relay_id)
UNION ALL
-- Written again without a further attempt. The first writing of an attempt comes from held or
-- staged, and is logged where it was late.
SELECT 'delivered_twice', message_id, NULL, NULL, recipient, times, NULL, NULL
FROM (
    SELECT message_id, recipient, count(*)
        + max(CAST(old_status IN ('written', 'read', 'acked') AND NOT is_again AS INT)) AS times
    FROM delivery_changes
    WHERE new_status = 'written' AND recipient <> '__orchestrator__' AND attempt IS NOT NULL
    GROUP BY message_id, recipient, attempt)
WHERE times > 1
UNION ALL
-- A text, an ack or a status may well be repeated; a command that is repeated is executed twice,
-- unless nobody got the first, as one that was cancelled. An intended repetition comes later; the
-- relay may be sent the same repeatedly.
SELECT 'resent', message_id, agent, route, NULL, 2, before_id, apart_ms
FROM (
    SELECT message_id, agent_name AS agent, target AS route, lag(message_id) OVER same AS before_id,
        unix_millis(discovered_at) - unix_millis(lag(discovered_at) OVER same) AS apart_ms
    FROM ledger_messages AS m
    WHERE message_type IN ('command', 'query') AND status IN ('completed', 'archived')
        AND checksum IS NOT NULL AND agent_name <> '__orchestrator__'
        AND target <> '__orchestrator__' AND NOT EXISTS (
            SELECT 1 FROM (
                SELECT message_id AS nobodys FROM ledger_deliveries GROUP BY message_id
                HAVING bool_and(state = 'expired' AND read_at IS NULL)) AS d
            WHERE nobodys = m.message_id)
    WINDOW same AS (PARTITION BY agent_name, target, message_type, checksum ORDER BY id))
WHERE abs(apart_ms) <= 60000

-- findings: class
SELECT * FROM duplicates
