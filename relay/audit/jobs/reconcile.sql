-- Every message and delivery: ledger, store, journal, originals
--
-- missing: error | [message] accepted, but in no store file
--   The message was accepted, but no store file has it. `relay trace` shows how far it got; its
--   original may still be in the home's archive/.
--
-- checksum_differs: error | [message] changed in the store since it was accepted
--   The content in the store is not the one that the relay accepted. Compare it with the original
--   in archive/, and run `relay check` on the file.
--
-- journal_differs: error | [message] with other content in the journal
--   The content in the journal is not the one that the relay accepted. `relay check` reads the
--   stream; the original in archive/ is the reference.
--
-- headers_differ: error | [message] with other headers than the ledger's
--   Sender, TO, KIND, time or priority differ between the ledger and store, journal or archive, or
--   the ledger has a time that has not come: one of them was changed by hand. `headers` has both
--   values; `relay trace` shows those of the ledger. Compare with a backup.
--
-- status_differs: error | [message] further along than the ledger says
--   The ledger has the message as waiting, refused or not yet archived, but it is further along:
--   ledger.db was changed by hand. `relay tail --all --no-follow --since 7d` shows the changes.
--
-- unjournaled: error | [message] missing from the journal
--   The journal goes back to that time but has no record of it. `relay check` and `relay doctor`
--   say whether records are missing.
--
-- original_differs: error | [original] changed since it was archived
--   A file in archive/ was changed after it was accepted. The store has the accepted content.
--
-- original_missing: error | [original] missing from the archive
--   The file is missing from archive/, and retention did not remove it. The store still has the
--   content.
--
-- path_differs: error | [message] in another file than the ledger says
--   The original is in archive/ under another path than the ledger's: one of the two was changed by
--   hand. `relay tail --all --no-follow --since 7d` shows the changes; compare with a backup.
--
-- orphan: error | [message] in store or journal that the ledger does not know
--   Store or journal have a message without a ledger row: the ledger is older, or the file was
--   written by another program. `relay doctor` says which.
--
-- unknown_file: warning | [file] that the ledger does not know
--   This file did not come through the relay. Find out who put it into archive/.
--
-- undelivered: warning | [delivery] held or staged, not yet written
--   The delivery is held or staged. `relay status` says whether the relay is running, `relay trace`
--   shows the reason of the wait.
--
-- delivery_missing: error | [delivery] missing
--   The message was accepted for this recipient, and the ledger has no such delivery. `relay
--   doctor` compares them; start the relay, which follows the journal, and run this again.
--
-- delivery_orphan: error | [delivery] without a message
--   The ledger has a delivery that was never accepted: ledger.db was changed by hand. `relay check`
--   verifies it, `relay tail --all --no-follow --since 7d` shows the changes.
--
-- delivery_conflict: error | [delivery] with two different outcomes
--   Ledger, store and journal disagree on one delivery, its attempts, its acknowledgment or its
--   times: `differs` has the values. `relay doctor` compares them; `relay trace` shows the ledger's
--   side.
--
-- delivery_duplicate: error | [delivery] found twice
--   The recipient may have processed it twice. Inform it, and keep ledger and journal for an
--   analysis of the relay.
--
-- ledger_behind: error | the ledger is behind its journal
--   The journal has messages that this ledger was never told of: the relay was killed, or ledger.db
--   is an older copy, or its position was changed by hand. Keep a copy of it, start the relay,
--   which follows the journal, and run this again.

-- view: reach
-- One row for all messages. Messages before `since` are judged: the ledger was read first, and the
-- others after it. A time of the ledger's is trusted up to the snapshot and the grace, half a
-- minute at least, since a clock may be set back by some seconds; a later one does not show that a
-- message is young.
--
-- journal_from: the journal has all since, but for a batch that pruning cut in two.
-- untold: what the journal has behind the ledger's position for longer than the grace. A relay
-- moves the position on with every batch. Counted are records that are there before it passes them:
-- what follows a batch, as deliveries and reads, an idle relay leaves behind it.
--
-- originals_from: the first day whose originals must all be there. Retention removes whole days,
-- the oldest first, and nothing of today: a day is judged when it is younger than the age at which
-- they go, and an older one is still there. The oldest itself may be half removed just now, unless
-- the total size does not call for that. What waits for its delivery is kept however old it is, and
-- so is the pack of its day: such a day shows nothing about others.
--
-- noted_at: the last time when the ledger recorded archived originals. The transaction that
-- completes a batch also records those of the batch before; a start does so for all that it finds.
SELECT timestamp_micros(:snapshot_us - :grace_us) AS since,
    timestamp_micros(:snapshot_us + greatest(:grace_us, 30000000)) AS until, journal_from,
    journal_until, journal_begin, follows, journal_end AS ends,
    coalesce(untold_records, 0) AS untold_records, untold_since, noted_at, :lost = 0 AS is_whole,
    CASE WHEN archive_days = 0 AND archive_mib = 0 THEN '' ELSE greatest(
        CASE WHEN archive_days = 0 THEN '' ELSE string(to_date(
            timestamp_micros(:snapshot_us - (archive_days - 1) * 86400000000))) END,
        least(string(to_date(timestamp_micros(:snapshot_us))),
            CASE WHEN archive_mib = 0 OR bytes <= archive_mib * 1048576 THEN first_day
                ELSE string(to_date(timestamp_micros(
                    unix_micros(to_timestamp(first_day)) + 86400000000)))
            END)) END AS originals_from
FROM home
CROSS JOIN (
    SELECT timestamp_micros(unix_micros(min(at))
            + CASE WHEN min_by(event, `end`) <> 'Start' THEN 1000000 ELSE 0 END) AS journal_from,
        max(at) AS journal_until, min(`end`) AS journal_begin,
        count_if(is_late) AS untold_records, min(CASE WHEN is_late THEN at END) AS untold_since
    FROM (
        SELECT at, `end`, event, at < timestamp_micros(:snapshot_us - :grace_us)
            AND `end` > (SELECT max(coalesce(follows, 0)) FROM home) AND event IN
                ('MessageSent', 'FileRefused', 'DeliveriesStaged') AS is_late
        FROM (
            SELECT at, `end`, 'MessageSent' AS event FROM journal_sent
            UNION ALL SELECT at, `end`, event FROM journal_records
            UNION ALL
            SELECT DISTINCT at, `end`, event FROM journal_moves WHERE event <> 'MessageSent')))
CROSS JOIN (
    SELECT min(day) AS first_day, sum(bytes) AS bytes
    FROM (
        SELECT substring(file_path, 9, 10) AS day, count(*) AS messages, sum(file_size) AS bytes
        FROM ledger_messages
        WHERE status = 'archived' AND agent_name <> '__orchestrator__'
            AND file_path LIKE 'archive/%'
        GROUP BY substring(file_path, 9, 10))
    LEFT JOIN (
        SELECT day, count(*) AS files FROM originals WHERE kind = 'original' GROUP BY day)
    USING (day)
    LEFT JOIN days_in_use USING (day)
    WHERE 2 * coalesce(files, 0) >= messages AND is_in_use IS NULL)
CROSS JOIN (
    SELECT max(processed_at) AS noted_at
    FROM ledger_messages WHERE status IN ('completed', 'archived') AND processed_at
        <= timestamp_micros(:snapshot_us + greatest(:grace_us, 30000000)))

-- view: sides
-- Every message with its row in the ledger and what the other sources have. All are put into one
-- table and grouped once: as joins, each would be moved and ordered by itself. Where something is
-- collected Spark groups by a hash, else, for strings, in order. Messages of the store without a
-- relay id were sent through the engine alone; originals are accepted ones, neither rejected nor
-- duplicates. Without a TO a header was not read.
SELECT message_id, max(ledger) AS ledger, count(state) AS deliveries,
    nullif(array_join(sort_array(collect_list(
        CASE WHEN state IN ('held', 'staged') THEN recipient END)), ', '), '') AS waiting_for,
    nullif(array_join(sort_array(collect_list(
        CASE WHEN state IN ('expired', 'bounced', 'dead') THEN recipient END)), ', '), '')
        AS ended_for,
    count(discarded_at) AS discarded,
    coalesce(bool_or(state = 'scheduled'), false) AS is_scheduled,
    nullif(count(copy), 0) AS copies, count(copy.checksum) AS checksums,
    min(copy.checksum) AS lowest_checksum, max(copy.checksum) AS highest_checksum,
    min(copy.sender) AS sender, min(copy.to) AS to, min(copy.kind) AS kind,
    min(copy.file) AS store_file, max(copy.created_at) AS stored_at,
    min(copy.created_at) AS first_stored_at, max(copy.dated) AS dated,
    min(copy.dated) AS first_dated, max(copy.priority) AS priority, max(copy.ttl) AS ttl,
    max(copy.topic_line) AS topic_line, max(copy.thread) AS thread,
    nullif(count(record), 0) AS records, min(record.until_offset) AS record_end,
    max(record.at) AS journaled_at, min(record.checksum) AS lowest_journaled,
    max(record.checksum) AS journal_checksum, min(record.sender) AS journal_sender,
    min(record.to) AS journal_to, min(record.kind) AS journal_kind,
    max(record.dated) AS journal_dated, max(record.created_at) AS created_at,
    min(original.to) AS original_to, min(original.kind) AS original_kind,
    max(original.priority) AS original_priority, max(original.ttl) AS original_ttl,
    max(original.topic_line) AS original_topic, max(original.thread) AS original_thread,
    min(original.size) AS least_size, max(original.size) AS most_size,
    min(original.path) AS first_path, max(original.path) AS last_path,
    min(original.agent) AS original_agent, min(original.checksum) AS lowest_original,
    max(original.checksum) AS original_checksum, max(original.changed_at) AS original_at
FROM (
    SELECT /*+ REPARTITION(message_id) */ *
    FROM (
        SELECT message_id, struct(agent_name, target, message_type, status, checksum, file_path,
                file_size, file_inode, discovered_at, processed_at, last_error) AS ledger,
            CAST(NULL AS STRING) AS state, CAST(NULL AS STRING) AS recipient,
            CAST(NULL AS TIMESTAMP) AS discarded_at, NULL AS copy, NULL AS record, NULL AS original
        FROM ledger_messages
        UNION ALL
        SELECT message_id, NULL, CASE WHEN state = 'held' AND last_error LIKE 'not before %'
                THEN 'scheduled' ELSE state END, recipient, discarded_at, NULL, NULL, NULL
        FROM ledger_deliveries
        UNION ALL
        SELECT relay_id, NULL, NULL, NULL, at, NULL, NULL, NULL
        FROM journal_records WHERE event = 'DeadLetterDiscarded' AND relay_id IS NOT NULL
        UNION ALL
        SELECT relay_id, NULL, NULL, NULL, NULL, struct(file, checksum, sender, to, kind,
            created_at, priority, timestamp_micros(created_ns DIV 1000) AS dated,
            correlation_id AS thread,
            CASE WHEN to IS NOT NULL THEN coalesce(string(ttl_s), 'none') END AS ttl,
            CASE WHEN to IS NOT NULL THEN coalesce('=' || topic, '') END AS topic_line), NULL, NULL
        FROM store_messages WHERE relay_id IS NOT NULL
        UNION ALL
        SELECT relay_id, NULL, NULL, NULL, NULL, NULL, struct(`end` AS until_offset, at, checksum,
            sender, to, kind, created_at, timestamp_micros(created_ns DIV 1000) AS dated), NULL
        FROM journal_sent WHERE relay_id IS NOT NULL
        UNION ALL
        SELECT message_id, NULL, NULL, NULL, NULL, NULL, NULL, struct(path, agent, size, checksum,
            changed_at, target AS to, message_type AS kind, priority, thread,
            CASE WHEN target IS NOT NULL THEN coalesce(string(ttl_s), 'none') END AS ttl,
            CASE WHEN target IS NOT NULL THEN coalesce('=' || topic, '') END AS topic_line)
        FROM originals WHERE kind = 'original' AND message_id IS NOT NULL))
GROUP BY message_id
HAVING max(ledger) IS NOT NULL OR count(copy) + count(record) + count(original) > 0

-- view: compared
-- Every message as all sources have it; each header that differs between them, with both values.
-- One of an answer is in the thread of its question, whatever its original says. Where the clock
-- was set back, other times of it or the journal are after the snapshot as well.
SELECT *, concat_ws('; ',
        'sender: ledger ' || agent_name || ', ' || nullif(concat_ws(', ',
            CASE WHEN sender <> agent_name THEN 'store ' || sender END,
            CASE WHEN journal_sender <> agent_name THEN 'journal ' || journal_sender END,
            CASE WHEN original_agent <> agent_name THEN 'original ' || original_agent END), ''),
        'TO: ledger ' || target || ', ' || nullif(concat_ws(', ',
            CASE WHEN to <> target THEN 'store ' || to END,
            CASE WHEN journal_to <> target THEN 'journal ' || journal_to END,
            CASE WHEN original_to <> target THEN 'original ' || original_to END), ''),
        'kind: ledger ' || message_type || ', ' || nullif(concat_ws(', ',
            CASE WHEN kind <> message_type THEN 'store ' || kind END,
            CASE WHEN journal_kind <> message_type THEN 'journal ' || journal_kind END,
            CASE WHEN original_kind <> message_type THEN 'original ' || original_kind END), ''),
        'time: ledger ' || string(discovered_at) || ', ' || nullif(concat_ws(', ',
            CASE WHEN dated <> discovered_at THEN 'store ' || string(dated) END,
            CASE WHEN first_dated <> discovered_at AND first_dated <> dated
                THEN 'store ' || string(first_dated) END,
            CASE WHEN journal_dated <> discovered_at
                THEN 'journal ' || string(journal_dated) END), ''),
        'stored at: journal ' || string(created_at) || ', ' || nullif(concat_ws(', ',
            CASE WHEN stored_at <> created_at THEN 'store ' || string(stored_at) END,
            CASE WHEN first_stored_at <> created_at AND first_stored_at <> stored_at
                THEN 'store ' || string(first_stored_at) END), ''),
        CASE WHEN priority <> original_priority THEN 'priority: ' || concat_ws(', ',
            'store ' || nullif(priority, ''), 'original ' || nullif(original_priority, '')) END,
        CASE WHEN ttl <> original_ttl
            THEN 'TTL: store ' || ttl || ', original ' || original_ttl END,
        CASE WHEN topic_line <> original_topic
            THEN 'TOPIC: not the same in store and original' END,
        CASE WHEN copies IS NOT NULL AND original_thread IS NOT NULL
                AND coalesce(thread <> original_thread, true)
                AND message_type NOT IN ('ack', 'nack', 'response')
            THEN 'thread: not the same in store and original' END,
        impossible_time) AS headers
FROM (
    SELECT *,
        CASE WHEN processed_at > greatest(until,
                timestamp_micros(unix_micros(journal_until) + 60000000))
            AND NOT greatest(discovered_at, dated, stored_at, journaled_at) >= since
            THEN 'processed_at: ledger ' || string(processed_at) || ', snapshot '
                || string(timestamp_micros(:snapshot_us)) END AS impossible_time,
        record_end > coalesce(follows, 0) AS is_ahead,
        coalesce(is_ahead, untold_records > 0 AND journal_begin > coalesce(follows, 0)
            AND greatest(dated, stored_at) < journal_from, false) AS is_behind,
        coalesce(dated BETWEEN since AND until, false)
            OR coalesce(stored_at BETWEEN since AND until, false)
            OR coalesce(journaled_at BETWEEN since AND until, false)
            OR coalesce(is_ahead AND journaled_at >= since, false) AS is_recent,
        status = 'archived' AND agent_name <> '__orchestrator__'
            AND file_path LIKE 'archive/%' AS is_filed,
        CASE WHEN first_path <> file_path THEN first_path ELSE last_path END AS original_path,
        file_inode IS NOT NULL AND message_type <> 'spawn'
            AND (least_size <> file_size OR most_size <> file_size) AS has_other_size
    FROM (SELECT *, ledger.*, substring(ledger.file_path, 9, 10) AS day FROM sides)
    LEFT JOIN (
        SELECT DISTINCT message_id, true AS was_archived
        FROM ledger_audit_log WHERE old_status = 'archived') USING (message_id)
    LEFT JOIN (
        SELECT DISTINCT day AS broken_day FROM originals
        WHERE problem IS NOT NULL AND message_id IS NULL) ON broken_day = day
    CROSS JOIN reach)

-- view: classed
-- A message has one class: the first that is true, worst first. A message before the first record
-- that there still is may be one that the ledger was not told of. A completed row should be
-- `archived` once another was recorded that was archived later. A spawn is archived without its
-- secrets; a row without an inode, or its file, was made again from the store, which does not know
-- the size. A row that still names its outbox has no other path: a rebuilt ledger does not know
-- that of a packed file.
SELECT *, CASE
    WHEN status IS NULL AND (is_recent OR coalesce(original_at >= since, false)) THEN 'recent'
    WHEN status IS NULL AND coalesce(copies, records) IS NULL THEN 'unknown_file'
    WHEN status IS NULL AND is_behind THEN 'behind'
    WHEN status IS NULL THEN 'orphan'
    WHEN status IN ('pending', 'processing', 'failed') AND coalesce(copies, records) IS NOT NULL
        AND follows IS NOT NULL AND NOT is_recent AND NOT is_behind THEN 'status_differs'
    WHEN status IN ('pending', 'processing', 'failed') AND impossible_time IS NOT NULL
        THEN 'headers_differ'
    WHEN status IN ('pending', 'processing') THEN 'in_flight'
    WHEN status = 'failed' THEN 'failed'
    WHEN copies IS NULL AND discarded > 0 THEN 'discarded'
    WHEN copies IS NULL AND is_whole THEN 'missing'
    WHEN lowest_checksum <> checksum OR highest_checksum <> checksum THEN 'checksum_differs'
    WHEN checksum IS NULL
        AND coalesce(highest_checksum, journal_checksum, original_checksum) IS NOT NULL
        THEN 'checksum_differs'
    WHEN lowest_journaled <> checksum OR journal_checksum <> checksum THEN 'journal_differs'
    WHEN headers <> '' THEN 'headers_differ'
    WHEN status = 'completed' AND (was_archived OR original_path IS NOT NULL AND filed_at < since
        AND unix_micros(filed_at) + :grace_us < unix_micros(noted_at)) THEN 'status_differs'
    WHEN is_whole AND records IS NULL AND discovered_at >= journal_from THEN 'unjournaled'
    WHEN lowest_original <> checksum OR original_checksum <> checksum THEN 'original_differs'
    WHEN has_other_size THEN 'original_differs'
    WHEN is_filed AND original_path IS NULL AND day >= originals_from AND broken_day IS NULL
        THEN 'original_missing'
    WHEN status = 'archived' AND file_path NOT LIKE 'agents/%' AND original_path <> file_path
        THEN 'path_differs'
    WHEN copies IS NULL THEN 'not_checked' -- nothing else is wrong with it
    WHEN waiting_for IS NOT NULL THEN 'undelivered'
    WHEN is_scheduled THEN 'scheduled' -- by its sender's NOT-BEFORE
    WHEN ended_for IS NOT NULL THEN 'returned'
    WHEN checksum IS NULL OR checksums < copies THEN 'unverified'
    ELSE 'delivered' END AS class
FROM (
    SELECT *, greatest(original_at, discovered_at,
        CASE WHEN processed_at <= until THEN processed_at END) AS filed_at
    FROM compared)

-- table: reconcile
SELECT message_id, class, coalesce(agent_name, sender, journal_sender, original_agent) AS agent,
    coalesce(target, to, journal_to) AS route, status, discovered_at, processed_at, last_error,
    checksum AS ledger_checksum, CASE WHEN lowest_checksum <> checksum THEN lowest_checksum
        ELSE highest_checksum END AS store_checksum,
    journal_checksum, original_checksum, nullif(headers, '') AS headers,
    CASE WHEN class = 'status_differs' THEN 'status: ' || concat_ws(', ', 'ledger ' || status,
            CASE WHEN copies IS NOT NULL THEN 'store accepted' END,
            CASE WHEN records IS NOT NULL THEN 'journal accepted' END,
            CASE WHEN original_path IS NOT NULL THEN 'archive archived' END,
            CASE WHEN was_archived THEN 'audit_log archived' END)
        WHEN class = 'path_differs'
            THEN 'path: ' || concat_ws(', ', 'ledger ' || file_path, 'original ' || original_path)
        WHEN class = 'original_differs' AND has_other_size THEN 'size: ledger ' || string(file_size)
            || ', original '
            || string(CASE WHEN least_size <> file_size THEN least_size ELSE most_size END)
        END AS differs,
    coalesce(copies, 0) AS copies, coalesce(records, 0) AS records, store_file, stored_at,
    coalesce(original_path, CASE WHEN is_filed THEN file_path END) AS original,
    deliveries, waiting_for, ended_for
FROM classed

-- view: moved
-- Every delivery as store and journal have it, by the engine's number and by the ledger's id.
-- Archived is what has left the live messages: past its channel's retention, or in an archive file.
SELECT max(relay_id) AS message_id, recipient, max(stored_state) AS stored_state,
    bool_or(is_archived) AS is_archived, max_by(state, `end`) AS journal_state,
    max(`end`) AS moved_end, max_by(at, `end`) AS moved_at, count_if(is_made) AS made,
    count_if(is_made AND attempt <= 1) AS first_made, max(attempt) AS attempts,
    max(CASE WHEN is_made THEN attempt END) AS last_made,
    array_max(collect_list(CASE WHEN said IS NOT NULL
        THEN struct(`end`, said, answer_id) END)) AS ack
FROM (
    SELECT number, recipient, relay_id, CAST(NULL AS STRING) AS stored_state,
        CAST(NULL AS BOOLEAN) AS is_archived, state, `end`, at,
        greatest(coalesce(attempt, 1), 1) AS attempt,
        event = 'DeliveriesMoved' AND state = 'Delivered' AS is_made, said, answer_id
    FROM journal_moves WHERE state IS NOT NULL
    UNION ALL
    SELECT stored.id, recipient, relay_id, state, file LIKE 'store/archive/%'
        OR retained.id IS NOT NULL, NULL, NULL, NULL, NULL, false, NULL, NULL
    FROM store_deliveries AS stored LEFT JOIN (
        SELECT DISTINCT id FROM store_messages WHERE section = 'archive') AS retained
    ON retained.id = stored.id)
GROUP BY number, recipient

-- view: delivered
-- Every delivery in ledger, store and journal. `words`: the states of store and journal that go
-- with the ledger's, or come just before it. Overdue, an acknowledgment waits for the next attempt,
-- and only that reaches the ledger; a dead one that is replayed waits for its own. Control messages
-- are carried out by the relay itself: `read` in the ledger, whatever the outcome.
SELECT *, ledger.state AS ledger_state, ledger.attempt AS attempt,
    ledger.ack_status AS ack_status, ledger.answer_id AS answer_id,
    ledger.lacks_time AS lacks_time, coalesce(journal_state, stored_state) IS NOT NULL AS is_told,
    max(coalesce(journal_state, stored_state)) OVER (PARTITION BY message_id) AS known_state,
    recipient <> '__orchestrator__' AS is_agents,
    CASE WHEN recipient = '__orchestrator__'
            THEN array('Staged', 'Waiting', 'Delivered', 'Received', 'Acknowledged')
        WHEN ledger_state IN ('held', 'staged') THEN array('Sent', 'Staged', 'Waiting')
        WHEN ledger_state IN ('written', 'read')
            THEN array('Staged', 'Waiting', 'Delivered', 'Received')
        WHEN ledger_state = 'acked' THEN array('Acknowledged')
        WHEN ledger_state = 'expired' THEN array('Expired')
        WHEN ledger_state = 'bounced' THEN array('Bounced')
        WHEN ledger_state = 'dead' THEN array('Dead', 'Staged', 'Waiting') END AS words
FROM (
    SELECT message_id, recipient, array_max(collect_list(ledger)) AS ledger,
        max(move.stored_state) AS stored_state,
        bool_or(move.is_archived) AS is_archived, max(move.journal_state) AS journal_state,
        max(move.moved_end) AS moved_end, max(move.moved_at) AS moved_at, max(move.made) AS made,
        max(move.first_made) AS first_made, max(move.attempts) AS attempts,
        max(move.last_made) AS last_made, max(move.ack.said) AS said,
        max(move.ack.answer_id) AS said_in
    FROM (
        SELECT /*+ REPARTITION(message_id) */ *
        FROM (
            SELECT message_id, recipient, struct(state, attempt, ack_status, answer_id,
                    CASE WHEN state = 'written' AND written_at IS NULL THEN 'written_at'
                        WHEN state = 'read' AND read_at IS NULL THEN 'read_at'
                        WHEN state = 'acked' AND acked_at IS NULL THEN 'acked_at'
                        END AS lacks_time) AS ledger, NULL AS move
            FROM ledger_deliveries
            UNION ALL
            SELECT message_id, recipient, NULL, struct(stored_state, is_archived, journal_state,
                moved_end, moved_at, made, first_made, attempts, last_made, ack)
            FROM moved WHERE message_id IS NOT NULL))
    GROUP BY message_id, recipient)
LEFT JOIN (
    SELECT message_id, agent_name, target, status, discovered_at, processed_at
    FROM ledger_messages) USING (message_id)
CROSS JOIN reach

-- table: reconcile_deliveries
-- What moved within the grace, or behind the journal's position of a ledger that was not told of
-- it, is not judged.
--
-- state: an archive keeps what was so when the message was rolled: a cancel just then is in journal
--   and ledger; a late answer to it, or a further attempt because its mailbox vanished unread, in
--   the ledger alone.
-- attempt: likewise. A held delivery may be of one that a crash kept from the journal, and attempts
--   are no longer counted once there is an answer; more than in the ledger are known only for files
--   in an inbox.
-- ack_status: of a message that was rolled the journal lacks later answers; they are in others.
SELECT message_id, recipient, CASE WHEN status IS NULL THEN 'unknown'
        WHEN status = 'failed' THEN 'failed'
        WHEN status IN ('pending', 'processing') THEN 'in_flight'
        WHEN is_agents AND (made > greatest(attempts, coalesce(attempt, 1)) OR first_made > 1)
            THEN 'duplicate'
        WHEN coalesce(moved_at >= since, false)
            OR coalesce(untold_records > 0 AND moved_end > coalesce(follows, 0), false)
            OR coalesce(discovered_at BETWEEN since AND until, false)
            OR coalesce(processed_at BETWEEN since AND until, false)
            THEN coalesce(ledger_state, 'recent')
        WHEN ledger_state IS NULL AND agent_name = '__orchestrator__' THEN 'undeliverable_reply'
        WHEN ledger_state IS NULL THEN 'missing'
        WHEN NOT is_told AND known_state IS NOT NULL AND is_whole THEN 'orphan'
        WHEN NOT is_told AND known_state IS NOT NULL THEN 'not_checked'
        WHEN said_differs <> '' AND is_whole THEN 'conflict'
        WHEN said_differs <> '' THEN 'not_checked'
        ELSE ledger_state END AS class,
    CASE WHEN class = 'conflict' THEN said_differs END AS differs, agent_name AS agent,
    target AS route, ledger_state, stored_state, journal_state, attempt,
    attempts AS journal_attempt, coalesce(made, 0) AS inbox_writes, moved_at AS journal_changed_at
FROM (
    SELECT *, concat_ws('; ',
        CASE WHEN NOT (is_later OR coalesce(is_archived, false) AND (ledger_state = 'acked'
                OR coalesce(array_contains(words, journal_state), false)))
                AND (coalesce(NOT array_contains(words, stored_state), false)
                    OR coalesce(NOT array_contains(words, journal_state), false))
            THEN 'state: ' || concat_ws(', ', 'ledger ' || ledger_state, 'store ' || stored_state,
                'journal ' || journal_state) END,
        CASE WHEN reaches AND is_agents AND ledger_state IN ('written', 'read', 'acked')
                AND attempt > attempts AND NOT is_later
            THEN 'attempt: ledger ' || string(attempt) || ', journal ' || string(attempts)
            WHEN reaches AND is_agents AND ledger_state IN ('written', 'read')
                AND attempt < last_made
            THEN 'attempt: ledger ' || string(attempt) || ', journal ' || string(last_made) END,
        CASE WHEN reaches THEN lacks_time || ': missing in the ledger' END,
        CASE WHEN (answer_id = said_in OR NOT is_archived AND said_in IS NOT NULL)
                AND coalesce(said <> ack_status, coalesce(said, ack_status) IS NOT NULL)
            OR reaches AND NOT is_archived AND ack_status IS NOT NULL AND said IS NULL
                AND journal_state <> 'Acknowledged'
            THEN 'ack_status: ledger ' || coalesce(ack_status, 'none') || ', journal '
                || coalesce(said, 'none') END) AS said_differs
    FROM (SELECT *, coalesce(discovered_at >= journal_from, false) AS reaches,
            coalesce(is_archived AND attempt > coalesce(attempts, 1), false) AS is_later
        FROM delivered))

-- table: reconcile_journal
SELECT CASE WHEN untold_records > 0 THEN 'ledger_behind' ELSE 'followed' END AS class, follows,
    ends, untold_records, untold_since
FROM reach

-- findings: class
-- Not a message that waits for one recipient alone, whose delivery is found itself. Where the
-- checksums are equal only what differs is shown, and a file of the archive is its finding's path.
SELECT class, reconcile.message_id, agent, route, headers, differs, status, waiting_for, last_error,
    CASE WHEN class <> 'headers_differ' THEN ledger_checksum END AS ledger_checksum,
    CASE WHEN class <> 'headers_differ' THEN store_checksum END AS store_checksum,
    CASE WHEN class <> 'headers_differ' THEN journal_checksum END AS journal_checksum,
    CASE WHEN class <> 'headers_differ' THEN original_checksum END AS original_checksum, store_file,
    CASE WHEN NOT is_of_file THEN original END AS original,
    CASE WHEN is_of_file THEN original END AS path
FROM (
    SELECT *, class IN
        ('original_differs', 'original_missing', 'path_differs', 'unknown_file') AS is_of_file
    FROM reconcile) AS reconcile
LEFT JOIN (
    SELECT message_id AS found_id, recipient
    FROM reconcile_deliveries WHERE class IN ('missing', 'orphan', 'conflict', 'duplicate')
        AND ledger_state IN ('held', 'staged')) AS found
ON class = 'undelivered' AND found_id = message_id AND found.recipient = waiting_for
WHERE found_id IS NULL AND CASE class :severities END IS NOT NULL

-- findings: class
SELECT 'delivery_' || class AS class, message_id, agent, route, recipient, differs, ledger_state,
    stored_state, journal_state, attempt, journal_attempt, inbox_writes
FROM reconcile_deliveries WHERE class IN ('missing', 'orphan', 'conflict', 'duplicate')

-- findings: ledger_behind
SELECT 'the ledger follows the journal up to ' || string(coalesce(follows, 0)) || ', it ends at '
    || string(ends) || ': ' || string(untold_records)
    || ' records of messages are not in it, the oldest of '
    || string(date_trunc('second', untold_since)) || 'Z' AS problem
FROM reconcile_journal WHERE class = 'ledger_behind'
