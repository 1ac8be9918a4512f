-- Checksum of every file; each day against an earlier run
--
-- damaged: error | [file] damaged
--   The file has changed since it was written. Replace it by a copy from a backup; `relay check`
--   says where it is damaged.
--
-- unreadable: error | [file] that cannot be read
--   The file cannot be read. Check its owner, its mode and the disk.
--
-- missing: error | [file] missing
--   An attachment: a message names it that is unread, or that is too young for retention to have
--   removed it; ask the sender for it, or a backup. The journal: restore it from a backup before
--   the relay starts.
--
-- day_changed: error | [day] of files changed since the previous run
--   Files that should never change have changed since the previous run. Compare the day with a
--   backup.
--
-- day_shrunk: error | [day] of files with fewer files than before
--   Files of that day are missing, but older days are complete, so it was not retention. Compare
--   with a backup.

-- view: named
-- Attachments that messages name: whether one that is unread names it, and whether retention cannot
-- have removed it. Retention takes whole days, counted from the midnight before its run, and never
-- the last; a run may have come a day after the snapshot. By size it takes as many as it must.
-- References go with their files.
SELECT named, is_open, last_named, days = 0 OR unix_micros(last_at)
    >= (:snapshot_us DIV 86400000000 - days + 1) * 86400000000 AS is_kept
FROM (
    SELECT replace(sha256, 'sha256:', '') AS named, bool_or(unread.id IS NOT NULL) AS is_open,
        max(at) AS last_at, max_by(message_id, at) AS last_named
    FROM ledger_attachment_refs LEFT JOIN (
        SELECT DISTINCT message_id AS id FROM ledger_deliveries
        WHERE state IN ('held', 'staged', 'written')) AS unread
    ON unread.id = message_id
    GROUP BY replace(sha256, 'sha256:', ''))
CROSS JOIN (
    SELECT CASE WHEN attachments_mib > 0 THEN 1 ELSE attachments_days END AS days FROM home)

-- view: verified
-- Of packs the originals are listed. The ledger follows the journal, whose end was read after the
-- ledger's snapshot: even after a crash the journal is the longer of the two.
SELECT path, kind, CASE WHEN size(problems) > 0 THEN 'damaged'
        WHEN kind = 'attachment' AND named IS NULL THEN 'unreferenced'
        WHEN size(warnings) > 0 THEN 'warned' ELSE 'sound' END AS class,
    day, item, size, sha256, problems, warnings
FROM files LEFT JOIN named ON kind = 'attachment' AND item = named
WHERE kind NOT IN ('pack', 'records')
UNION ALL
SELECT path, 'original', CASE WHEN problem IS NOT NULL AND kind <> 'rejected' THEN 'unreadable'
        ELSE 'sound' END, day, path, size, sha256,
    CASE WHEN problem IS NULL THEN array() ELSE array(problem) END, array()
FROM originals
UNION ALL
SELECT concat('attachments/', substring(named, 1, 2), '/', named), 'attachment', 'missing', NULL,
    named, NULL, NULL, array(CASE WHEN is_open
        THEN 'missing, and a message that is not read yet names it'
        ELSE concat('missing, but not for its age: named by ', last_named) END), array()
FROM named LEFT JOIN (SELECT item AS kept FROM files WHERE kind = 'attachment') ON kept = named
WHERE kept IS NULL AND (is_open OR is_kept)
UNION ALL
SELECT 'journal', 'journal', CASE WHEN journal_end IS NULL THEN 'missing' ELSE 'damaged' END, NULL,
    NULL, NULL, NULL, array(concat('the ledger follows it up to ', string(follows),
        coalesce(', but it ends at ' || string(journal_end), ', but it is missing'))), array()
FROM home WHERE follows > coalesce(journal_end, 0)

-- table: integrity
SELECT * FROM verified

-- view: hashed
-- Files that never change belong to a day: an archive, a sealed segment in whatever tier, an
-- original in its folder or its pack. The hash of each day and kind is over names and checksums; a
-- segment in two tiers, or an original and its pack, is one. In two steps, by the first digits of
-- each file's own hash: no task holds a whole day's names.
SELECT day, kind, sum(files) AS files, coalesce(sum(bytes), 0) AS bytes,
    sha2(array_join(sort_array(collect_list(hash)), chr(10)), 256) AS hash,
    bool_or(is_partial) AS is_partial
FROM (
    SELECT day, kind, count(*) AS files, sum(size) AS bytes,
        sha2(array_join(sort_array(collect_list(one)), chr(10)), 256) AS hash,
        bool_or(is_partial) AS is_partial
    FROM (
        SELECT day, kind, max(size) AS size, bool_or(sha256 IS NULL) AS is_partial,
            sha2(concat_ws(' ', item, coalesce(min(sha256), '-')), 256) AS one
        FROM (
            SELECT day, item, size, sha256, replace(kind, 'object', 'segment') AS kind
            FROM verified WHERE day IS NOT NULL AND item IS NOT NULL)
        GROUP BY day, kind, item)
    GROUP BY day, kind, substring(one, 1, 2))
GROUP BY day, kind

-- table: integrity_days
-- Retention takes the oldest days first, and of the store's archives none. An original that waits
-- for its delivery stays, and shows nothing of the days after its own.
SELECT day, kind, coalesce(files, 0) AS files, coalesce(bytes, 0) AS bytes,
    coalesce(hash, '') AS hash, files_before, hash_before,
    coalesce(is_partial, false) AS is_partial,
    CASE WHEN files_before IS NULL THEN 'new' WHEN hash = hash_before THEN 'same'
        WHEN coalesce(files, 0) > files_before THEN 'grown' WHEN files = files_before THEN 'changed'
        WHEN first_same < day AND NOT is_past OR kind = 'archive' THEN 'shrunk'
        ELSE 'pruned' END AS class
FROM (
    SELECT *, min(CASE WHEN hash = hash_before AND NOT is_kept THEN day END)
            OVER (PARTITION BY kind) AS first_same
    FROM (
        SELECT *, kind = 'original' AND coalesce(is_in_use, false) AS is_kept,
            kind = 'original' AND archive_days > 0 AND day < string(to_date(timestamp_micros(
                :snapshot_us - (archive_days - 1) * 86400000000))) AS is_past
        FROM hashed FULL JOIN (
            SELECT day, kind, files AS files_before, hash AS hash_before
            FROM integrity_days_before WHERE files > 0)
        USING (day, kind)
        LEFT JOIN days_in_use USING (day)
        CROSS JOIN (SELECT archive_days FROM home)))

-- findings: class
SELECT class, path, kind, array_join(problems, '; ') AS problem
FROM integrity WHERE class IN ('damaged', 'unreadable', 'missing')

-- findings: class
SELECT concat('day_', class) AS class, kind, day, files, files_before, hash, hash_before
FROM integrity_days WHERE class IN ('changed', 'shrunk')
