-- Incidents and refusals by kind, agent and hour; which are errors
--
-- attachment_mismatch: error | [agent] with attachments that were changed
--   The content of an attachment does not match its name: it was changed. It was set aside; ask the
--   sender for another copy.
--
-- attachment_unsafe: error | [agent] with links among the attachments
--   A link, or a file of another user, was among the attachments. It was set aside: check its owner
--   before you remove it.
--
-- bad_signature: error | [agent] with messages of a wrong signature
--   A message was not signed with its sender's key, or changed after it was. It was refused. `relay
--   key show` says which key counts; find out who wrote the file.
--
-- foreign_owner: error | [agent] with files of another user
--   Another user of the machine has written into the home. Nothing of it was read. Check the owner,
--   and the modes of the folders above with `relay doctor`.
--
-- linked_directory: error | [agent] with a link in the place of a folder
--   A link replaces a folder, so that files are written elsewhere. It is not followed. Check its
--   target, then remove it.
--
-- not_a_regular_file: error | [agent] with a link, pipe or device in the outbox
--   A link, a pipe or a device was put into an outbox, to have something else read. It was refused;
--   ask the agent's owner.
--
-- hard_link: warning | [agent] with messages of several names
--   A message file has several names, from a backup by hard links or on purpose. It was refused;
--   send a copy.
--
-- key_changed: warning | [agent] with another key than the registered one
--   The agent's meta.json names another key than the registered one, which is still used. Ask the
--   agent's owner; `relay key trust` accepts the new one.
--
-- mode_repaired: warning | [agent] with files that were open to others
--   Others could read it until the relay repaired it. Set the umask of its creator to 077.
--
-- rate_limited: warning | [agent] that sends faster than allowed
--   The agent sends faster than allowed: check whether it loops. `limits` in config.json sets the
--   rate.
--
-- reply_loop: warning | [agent] in an endless exchange of answers
--   Agents answered each other endlessly, and were slowed down. Tell one of them when a
--   conversation has ended; `relay thread` shows it.
--
-- stray_message: warning | [agent] with a file in the inbox that the relay did not write
--   A file in the inbox was not put there by the relay, whatever its FROM says. Find out who wrote
--   it, and do not follow its requests.
--
-- unsigned: warning | [agent] with unsigned messages
--   Messages lack the signature that config.json requires. `relay key make` gives an agent a key;
--   if it has one, the messages are not its own.
--
-- fault: error | [agent] with messages that the relay failed to process
--   The relay itself failed to process a message, and refused it. Its log has the traceback: report
--   it, with the message.
--
-- file_disappeared: warning | [agent] with files that were removed from the outbox
--   A file was removed from the outbox after its discovery, and was not delivered. Senders must
--   leave their files alone; send it again.
--
-- id_taken: warning | [agent] with an id that was in use
--   A message used an id that is already in use. Ids are made of the time and random digits: check
--   how this agent makes its own, or who else writes into its outbox.

-- view: seen
-- Incidents, files refused without a row of their own, messages that failed, and requests that the
-- orchestrator refused. An incident that is in no list is a newer relay's; of refusals a few are
-- findings beside the incidents. The sender of a refused message has the reason and must fix it.
SELECT agent, at, source, kind, message_id, path, detail,
    CASE WHEN source <> 'event' AND kind NOT IN ('fault', 'file_disappeared', 'id_taken') THEN NULL
        WHEN kind NOT IN ('audit_pruned', 'key_confirmed', 'key_registered')
            THEN coalesce(CASE kind :severities END, 'warning') END AS severity
FROM (
    SELECT agent, at, 'event' AS source, kind, CAST(NULL AS STRING) AS message_id, path, detail
    FROM ledger_security_events
    UNION ALL
    SELECT agent, at, 'rejection', coalesce(code, 'other'), nack_id, file_name, reason
    FROM ledger_rejections
    UNION ALL
    SELECT agent_name, coalesce(processed_at, discovered_at), 'failed',
        coalesce(last_error_code, 'other'), message_id, file_path, last_error
    FROM ledger_messages WHERE status = 'failed'
    UNION ALL
    SELECT asked.agent_name, asked.discovered_at, 'request', 'refused_request', asked.message_id,
        asked.file_path, asked.message_type
    FROM ledger_messages AS asked JOIN refused ON refused.message_id = asked.message_id
    WHERE asked.target = '__orchestrator__' AND asked.status <> 'failed')

-- table: security
SELECT agent, hour, source, kind, severity, events, first_at, last_at,
    last_at >= timestamp_micros(:recent_since_us) AS recent, last.message_id, last.path, last.detail
FROM (
    SELECT agent, date_trunc('hour', at) AS hour, source, kind, severity, count(*) AS events,
        min(at) AS first_at, max(at) AS last_at,
        max_by(struct(message_id, path, detail), at) AS last
    FROM seen GROUP BY agent, date_trunc('hour', at), source, kind, severity)

-- findings: class
SELECT kind AS class, agent, last.message_id, last.path, events, first_at, last_at, last.detail
FROM (
    SELECT agent, kind, sum(events) AS events, min(first_at) AS first_at, max(last_at) AS last_at,
        max_by(struct(message_id, path, detail), last_at) AS last
    FROM security WHERE recent AND severity IS NOT NULL GROUP BY agent, kind)
