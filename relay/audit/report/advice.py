"""What to do about a finding, a sentence a check; for a check without one, what always helps."""

from __future__ import annotations

ADVICE = {
    "reconcile.missing": (
        "The message was accepted and no store file holds it. `relay trace` shows how far it "
        "came; its original may still lie in the home's archive/."
    ),
    "reconcile.checksum_differs": (
        "The store holds another content than the relay took in. Compare it with the original in "
        "archive/, and run `relay acomm check` on the file named."
    ),
    "reconcile.orphan": (
        "Store or journal hold what the ledger knows nothing of: the ledger is older, or somebody"
        " else wrote the file. `relay doctor` says which."
    ),
    "reconcile.undelivered": (
        "The delivery is held or staged. `relay status` says whether the relay runs, `relay "
        "trace` what the message waits for."
    ),
    "reconcile.journal_differs": (
        "The journal holds another content than the relay took in. `relay aof check` reads the "
        "stream; the original in archive/ has the truth."
    ),
    "reconcile.headers_differ": (
        "Store, journal or archive say another sender, TO, KIND, time or priority than the "
        "ledger: somebody wrote into one of them. `relay acomm dump` and `relay trace` show "
        "both; compare with a backup."
    ),
    "reconcile.status_differs": (
        "The ledger has the message as waiting, refused or not yet archived, while it is "
        "further: somebody wrote into ledger.db. `relay ledger audit` has what changed."
    ),
    "reconcile.unjournaled": (
        "The journal goes back that far and does not hold it. `relay aof check` and `relay "
        "doctor` say whether records are gone."
    ),
    "reconcile.original_differs": (
        "Somebody changed a file in archive/ after it was taken in. The store has what the relay "
        "took."
    ),
    "reconcile.original_missing": (
        "The file is gone from archive/ and retention did not take it. The store still has the "
        "content."
    ),
    "reconcile.path_differs": (
        "The original lies in archive/ under another path than the ledger's: one of the two was "
        "changed by hand. `relay ledger audit` has what became of the row; compare with a backup."
    ),
    "reconcile.unknown_file": "Not sent through the relay. Find out who put it into archive/.",
    "reconcile.delivery_conflict": (
        "Ledger, store and journal disagree on one delivery, its attempts or its times. `relay "
        "doctor` compares them; `relay trace` shows the ledger's side."
    ),
    "reconcile.delivery_duplicate": (
        "The recipient may have handled it twice. Tell it; then keep ledger and journal for "
        "whoever looks into the relay."
    ),
    "reconcile.delivery_missing": (
        "The message was accepted for this recipient, and the ledger has no such delivery. `relay "
        "doctor` compares them; start the relay, which follows the journal, and run this again."
    ),
    "reconcile.delivery_orphan": (
        "The ledger has a delivery that was never accepted: somebody wrote into ledger.db. "
        "`relay ledger check` looks through it, `relay ledger audit` has what changed."
    ),
    "duplicates.numbered_twice": (
        "The relay accepted the message twice, and the recipient may have handled it twice. Tell "
        "it; then keep ledger and journal for whoever looks into the relay."
    ),
    "duplicates.number_shared": (
        "Two messages have one number: a file of another home lies in this store, or was written "
        "by hand. `relay acomm dump` shows both."
    ),
    "duplicates.recorded_twice": (
        "Two records of the journal accept the message. `relay aof dump` shows them; keep the "
        "journal for whoever looks into the relay."
    ),
    "duplicates.archived_twice": (
        "Two archives of the store hold the message: one of them was copied or put back. `relay "
        "acomm check` of both; remove the copy."
    ),
    "duplicates.delivered_twice": (
        "The file was put into the inbox twice in one attempt: the recipient may have handled it "
        "twice. Tell it; then keep the ledger for whoever looks into the relay."
    ),
    "duplicates.resent": (
        "The sender sent the same again within a minute: it did not wait for the answer, or did "
        "not see it."
    ),
    "ordering.inversion": (
        "A later message was written before an earlier one. `relay trace` of both shows which one"
        " waited."
    ),
    "ordering.clock_back": (
        "The clock of this machine was put back. Order stays that of discovery; see to its time "
        "service."
    ),
    "ordering.future_id": (
        "The sender's clock is ahead of the relay's. See to the time service of its machine."
    ),
    "ordering.future_mtime": (
        "The file was changed after the relay had seen it, or the clock that wrote it is ahead. "
        "Write elsewhere and rename into the outbox; see to the time service."
    ),
    "ordering.negative": (
        "The clock of this machine was put back while the message was on its way, or somebody "
        "wrote into the ledger. Its times say nothing; see to the time service, and compare "
        "with a backup."
    ),
    "acks.overdue": (
        "The recipient owes an acknowledgment. `relay acks --overdue` lists who; ask it, or send "
        "again."
    ),
    "acks.unrequested": "An answer that was not asked for. Look at the message that its RE names.",
    "dead_letters.repeated": (
        "Deliveries to this recipient die again and again for one reason. Mend that first, then "
        "`relay dead replay`."
    ),
    "dead_letters.again": "It was replayed, and died once more: the reason is still there.",
    "dead_letters.forgotten": "`relay dead list` shows it: replay it, or let it go.",
    "integrity.damaged": (
        "The file is not what was written. Put a copy of it from a backup in its place; `relay "
        "acomm check` or `relay aof check` say where it is damaged."
    ),
    "integrity.unreadable": "The file cannot be read: check its owner, its mode and the disk.",
    "integrity.missing": (
        "Of an attachment: somebody has still to read its message; ask the sender for it. Of the "
        "journal: it is gone. Put it back from a backup before the relay starts."
    ),
    "integrity.day_changed": (
        "What never changes again has changed since the run compared with. Compare the day with a"
        " backup."
    ),
    "integrity.day_shrunk": (
        "Files of that day are gone, while older days are whole: retention did not do it. Compare"
        " with a backup."
    ),
    "latency.slow": (
        "Look at the slowest of that hour with `relay trace`, and at what the machine did then."
    ),
    "latency.slow_hour": (
        "Compare with throughput in that hour: a burst, or a machine that was busy with something"
        " else."
    ),
    "agents.stuck": "`relay ps` shows the process; `relay release` ends it.",
    "agents.failed": "`relay ps` says why the process could not be started.",
    "agents.flapping": (
        "The process ends again and again and is started again. Its log in logs/ says why."
    ),
    "agents.silent": "The agent has mail and reads none. See whether it still runs.",
    "threads.unanswered": "Nobody answered the query. `relay thread` shows who was asked.",
    "threads.runaway": (
        "Two agents answer each other without an end. Stop one of them, or set a rate limit."
    ),
    "security.attachment_mismatch": (
        "An attachment is not what its name says: somebody changed it. It was set aside; ask who "
        "attached it for another."
    ),
    "security.attachment_unsafe": (
        "A link, or a file of another user, lay among the attachments. It was set aside: look "
        "whose it is before you remove it."
    ),
    "security.bad_signature": (
        "A message was not signed with its sender's key, or changed after it was. It was refused. "
        "`relay key show` says which key counts; find out who wrote the file."
    ),
    "security.foreign_owner": (
        "Another user of the machine has written into the home. Nothing of it was read. See who, "
        "and the modes of the folders above: `relay doctor`."
    ),
    "security.linked_directory": (
        "A link stands in the place of a folder: whoever made it wants files to be written "
        "elsewhere. It is not followed. Look at where it leads, then remove it."
    ),
    "security.not_a_regular_file": (
        "A link, a pipe or a device was put into an outbox: whoever did wants something else to be "
        "read. It was refused; ask the agent's keeper."
    ),
    "security.hard_link": (
        "A message file has several names, from a backup by hard links or on purpose. It was "
        "refused; send a copy."
    ),
    "security.key_changed": (
        "The agent's meta.json names another key than the registered one, which counts still. Ask "
        "the agent's keeper; `relay key trust` takes the new one."
    ),
    "security.mode_repaired": (
        "Others could read it until the relay repaired it. Set the umask of whoever made it to 077."
    ),
    "security.quota_exceeded": (
        "More waits in the outbox than may. See what the agent does; `limits` in config.json is "
        "what it may."
    ),
    "security.rate_limited": (
        "The agent sends faster than it may: look whether it loops. `limits` in config.json is what"
        " it may."
    ),
    "security.reply_loop": (
        "Agents answered each other without end, and were slowed down. Tell one of them when a "
        "conversation is over; `relay thread` shows what they said."
    ),
    "security.stray_message": (
        "A file in the inbox was not put there by the relay, whatever its FROM says. Find out who "
        "did; nothing that it asks for should be done."
    ),
    "security.unsigned": (
        "Messages came without the signature that config.json asks for. `relay key make` gives an "
        "agent a key; if it has one, somebody else wrote them."
    ),
    "security.fault": (
        "The relay itself failed at a message, and refused it. Its log has the traceback: report "
        "it, with the message."
    ),
    "security.file_disappeared": (
        "A file was taken out of the outbox after the relay had seen it, and reached nobody. Who "
        "sends leaves its files alone; send it again."
    ),
    "security.id_taken": (
        "A message came under an id that was taken. Ids are made of the time and random digits: "
        "see how this agent makes its own, or who else writes into its outbox."
    ),
    "capacity.below_floor": "Nothing is taken in any more. Free space, or lower `disk.floor_mib`.",
    "capacity.full_soon": (
        "`relay prune` and shorter retention free space; docs/runbook.md says what else."
    ),
}
WITH_MESSAGE = "`relay trace` with the message's id shows every hop of it."
ALWAYS = "docs/audit.md, section {job}, says what the check means."


def advice(check: str, *, has_message: bool) -> str:
    """What to do; commands stand between backquotes."""
    always = ALWAYS.format(job=check.partition(".")[0])
    known = ADVICE.get(check)
    if known:
        return known
    return f"{WITH_MESSAGE} {always}" if has_message else always
