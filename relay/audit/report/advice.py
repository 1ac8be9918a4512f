"""Advice on findings, one text a check, and a default for a check without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relay.audit.report.tables import duration_ms, shortened
from relay.audit.summary import with_noun

ADVICE = {
    "reconcile.missing": (
        "The message was accepted, but no store file has it. `relay trace` shows how far it "
        "got; its original may still be in the home's archive/."
    ),
    "reconcile.checksum_differs": (
        "The content in the store is not the one that the relay accepted. Compare it with the "
        "original in archive/, and run `relay check` on the file."
    ),
    "reconcile.orphan": (
        "Store or journal have a message without a ledger row: the ledger is older, or the file was"
        " written by another program. `relay doctor` says which."
    ),
    "reconcile.undelivered": (
        "The delivery is held or staged. `relay status` says whether the relay is running, `relay "
        "trace` shows the reason of the wait."
    ),
    "reconcile.journal_differs": (
        "The content in the journal is not the one that the relay accepted. `relay check` "
        "reads the stream; the original in archive/ is the reference."
    ),
    "reconcile.headers_differ": (
        "Sender, TO, KIND, time or priority differ between the ledger and store, journal or "
        "archive, or the ledger has a time that has not come: one of them was changed by hand. "
        "`headers` has both values; `relay trace` shows those of the ledger. Compare with a backup."
    ),
    "reconcile.status_differs": (
        "The ledger has the message as waiting, refused or not yet archived, but it is "
        "further along: ledger.db was changed by hand. "
        "`relay tail --all --no-follow --since 7d` shows the changes."
    ),
    "reconcile.unjournaled": (
        "The journal goes back to that time but has no record of it. `relay check` and `relay "
        "doctor` say whether records are missing."
    ),
    "reconcile.original_differs": (
        "A file in archive/ was changed after it was accepted. The store has the accepted content."
    ),
    "reconcile.original_missing": (
        "The file is missing from archive/, and retention did not remove it. The store still has "
        "the content."
    ),
    "reconcile.path_differs": (
        "The original is in archive/ under another path than the ledger's: one of the two was "
        "changed by hand. `relay tail --all --no-follow --since 7d` shows the changes; "
        "compare with a backup."
    ),
    "reconcile.unknown_file": (
        "This file did not come through the relay. Find out who put it into archive/."
    ),
    "reconcile.delivery_conflict": (
        "Ledger, store and journal disagree on one delivery, its attempts, its acknowledgment or "
        "its times: `differs` has the values. `relay doctor` compares them; `relay trace` shows "
        "the ledger's side."
    ),
    "reconcile.delivery_duplicate": (
        "The recipient may have processed it twice. Inform it, and keep ledger and journal for "
        "an analysis of the relay."
    ),
    "reconcile.delivery_missing": (
        "The message was accepted for this recipient, and the ledger has no such delivery. `relay "
        "doctor` compares them; start the relay, which follows the journal, and run this again."
    ),
    "reconcile.delivery_orphan": (
        "The ledger has a delivery that was never accepted: ledger.db was changed by hand. "
        "`relay check` verifies it, `relay tail --all --no-follow --since 7d` shows the "
        "changes."
    ),
    "reconcile.ledger_behind": (
        "The journal has messages that this ledger was never told of: the relay was killed, or "
        "ledger.db is an older copy, or its position was changed by hand. Keep a copy of it, start "
        "the relay, which follows the journal, and run this again."
    ),
    "duplicates.numbered_twice": (
        "The relay accepted the message twice, and the recipient may have processed it twice. "
        "Inform it, and keep ledger and journal for an analysis of the relay."
    ),
    "duplicates.number_shared": (
        "Two messages have the same number: a file of another home is in this store, or was "
        "written by hand. `relay dump` shows both."
    ),
    "duplicates.recorded_twice": (
        "Two records of the journal accept the message. `relay dump` shows them; keep the "
        "journal for an analysis of the relay."
    ),
    "duplicates.archived_twice": (
        "Two archives of the store have the message: one of them was copied or restored. Run "
        "`relay check` on both and remove the copy."
    ),
    "duplicates.repeated_in_archive": (
        "One archive of the store has the message twice: it was written by another program or by "
        "hand. Run `relay check` on it, and replace it by a copy from a backup."
    ),
    "duplicates.delivered_twice": (
        "The file was put into the inbox twice in one attempt: the recipient may have processed it "
        "twice. Inform it, and keep the ledger for an analysis of the relay."
    ),
    "duplicates.resent": (
        "The sender repeated the message within a minute: it did not wait for the answer, or did "
        "not see it."
    ),
    "ordering.inversion": (
        "A later message was written before an earlier one. `relay trace` of both shows which one"
        " waited."
    ),
    "ordering.clock_back": (
        "The clock of this machine was set back. The order is still that of discovery; check its "
        "time service."
    ),
    "ordering.future_id": (
        "The sender's clock is ahead of the relay's. Check the time service of its machine."
    ),
    "ordering.future_mtime": (
        "The file was changed after its discovery, or the sender's clock is ahead. Write "
        "elsewhere and rename into the outbox; check the time service."
    ),
    "ordering.negative": (
        "The clock of this machine was set back while the message was on its way, or the ledger "
        "was changed by hand. Its times are not reliable; check the time service, and compare "
        "with a backup."
    ),
    "acks.overdue": (
        "The recipient owes an acknowledgment. `relay open --overdue` lists them; ask it, or send "
        "again."
    ),
    "acks.given_up": (
        "The recipient was reminded and did not answer. `relay trace` shows whether it came into "
        "its context, `relay agents` whether it still works; `relay resend` sends it again."
    ),
    "acks.offered_not_in_context": (
        "It was shown to an agent's session, and nothing shows that it came into its context. "
        "The next hook of the session shows it again: `relay hooks status` says when one fired."
    ),
    "acks.unrequested": (
        "An answer to something that did not ask for one. Look at the RE header of its message."
    ),
    "dead_letters.repeated": (
        "Deliveries to this recipient fail repeatedly for the same reason. Fix it first, then run "
        "`relay dead replay`."
    ),
    "dead_letters.again": "It was replayed and failed again: the reason still exists.",
    "dead_letters.forgotten": "`relay dead list` shows it: replay or discard it.",
    "integrity.damaged": (
        "The file has changed since it was written. Replace it by a copy from a backup; `relay "
        "check` says where it is damaged."
    ),
    "integrity.unreadable": ("The file cannot be read. Check its owner, its mode and the disk."),
    "integrity.missing": (
        "An attachment: a message names it that is unread, or that is too young for retention to "
        "have removed it; ask the sender for it, or a backup. The journal: restore it from a "
        "backup before the relay starts."
    ),
    "integrity.day_changed": (
        "Files that should never change have changed since the previous run. Compare the day with"
        " a backup."
    ),
    "integrity.day_shrunk": (
        "Files of that day are missing, but older days are complete, so it was not retention."
        " Compare with a backup."
    ),
    "latency.slow": (
        "Look at the slowest of that hour with `relay trace`, and at the load of the machine then."
    ),
    "latency.slow_hour": (
        "Compare with the throughput of that hour: a burst, or other load on the machine."
    ),
    "agents.stuck": "`relay ps` shows the process; `relay release` ends it.",
    "agents.failed": "`relay ps` says why the process could not be started.",
    "agents.flapping": (
        "The process keeps ending and being restarted. Its log in logs/ has the reason."
    ),
    "agents.silent": "The agent has mail but reads none of it. Check that it is still running.",
    "threads.unanswered": "The query has no answer. `relay thread` shows its recipients.",
    "threads.runaway": (
        "Two agents answer each other endlessly. Stop one of them, or set a rate limit."
    ),
    "security.attachment_mismatch": (
        "The content of an attachment does not match its name: it was changed. It was set aside; "
        "ask the sender for another copy."
    ),
    "security.attachment_unsafe": (
        "A link, or a file of another user, was among the attachments. It was set aside: check "
        "its owner before you remove it."
    ),
    "security.bad_signature": (
        "A message was not signed with its sender's key, or changed after it was. It was refused. "
        "`relay key show` says which key counts; find out who wrote the file."
    ),
    "security.foreign_owner": (
        "Another user of the machine has written into the home. Nothing of it was read. Check the "
        "owner, and the modes of the folders above with `relay doctor`."
    ),
    "security.linked_directory": (
        "A link replaces a folder, so that files are written elsewhere. It is not "
        "followed. Check its target, then remove it."
    ),
    "security.not_a_regular_file": (
        "A link, a pipe or a device was put into an outbox, to have something else read. It was "
        "refused; ask the agent's owner."
    ),
    "security.hard_link": (
        "A message file has several names, from a backup by hard links or on purpose. It was "
        "refused; send a copy."
    ),
    "security.key_changed": (
        "The agent's meta.json names another key than the registered one, which is still used. Ask "
        "the agent's owner; `relay key trust` accepts the new one."
    ),
    "security.mode_repaired": (
        "Others could read it until the relay repaired it. Set the umask of its creator to 077."
    ),
    "security.quota_exceeded": (
        "The outbox has more messages than allowed. See what the agent does; `limits` in "
        "config.json sets the quota."
    ),
    "security.rate_limited": (
        "The agent sends faster than allowed: check whether it loops. `limits` in config.json sets"
        " the rate."
    ),
    "security.reply_loop": (
        "Agents answered each other endlessly, and were slowed down. Tell one of them when a "
        "conversation has ended; `relay thread` shows it."
    ),
    "security.stray_message": (
        "A file in the inbox was not put there by the relay, whatever its FROM says. Find out who "
        "wrote it, and do not follow its requests."
    ),
    "security.unsigned": (
        "Messages lack the signature that config.json requires. `relay key make` gives an agent a "
        "key; if it has one, the messages are not its own."
    ),
    "security.fault": (
        "The relay itself failed to process a message, and refused it. Its log has the traceback: "
        "report it, with the message."
    ),
    "security.file_disappeared": (
        "A file was removed from the outbox after its discovery, and was not delivered. Senders "
        "must leave their files alone; send it again."
    ),
    "security.id_taken": (
        "A message used an id that is already in use. Ids are made of the time and random digits: "
        "check how this agent makes its own, or who else writes into its outbox."
    ),
    "capacity.below_floor": (
        "The relay accepts nothing any more. Free space, or lower `disk.floor_mib`."
    ),
    "capacity.full_soon": (
        "`relay prune` and shorter retention free space; see also docs/runbook.md."
    ),
}
WITH_MESSAGE = "`relay trace` with the message's id shows every hop of it."
DEFAULT = "docs/audit.md, section {job}, explains the check."


def advice(check: str, *, has_message: bool) -> str:
    """Return the advice on a check; commands are in backquotes."""
    default = DEFAULT.format(job=check.partition(".")[0])
    known = ADVICE.get(check)
    if known:
        return known
    return f"{WITH_MESSAGE} {default}" if has_message else default


# Nouns and what is said of them: "3 messages" + "accepted, but in no store file".
SENTENCES = {
    "reconcile.missing": ("message", "accepted, but in no store file"),
    "reconcile.checksum_differs": ("message", "changed in the store since it was accepted"),
    "reconcile.orphan": ("message", "in store or journal that the ledger does not know"),
    "reconcile.undelivered": ("delivery", "held or staged, not yet written"),
    "reconcile.journal_differs": ("message", "with other content in the journal"),
    "reconcile.headers_differ": ("message", "with other headers than the ledger's"),
    "reconcile.status_differs": ("message", "further along than the ledger says"),
    "reconcile.unjournaled": ("message", "missing from the journal"),
    "reconcile.original_differs": ("original", "changed since it was archived"),
    "reconcile.original_missing": ("original", "missing from the archive"),
    "reconcile.path_differs": ("message", "in another file than the ledger says"),
    "reconcile.unknown_file": ("file", "that the ledger does not know"),
    "reconcile.delivery_conflict": ("delivery", "with two different outcomes"),
    "reconcile.delivery_duplicate": ("delivery", "found twice"),
    "reconcile.delivery_missing": ("delivery", "missing"),
    "reconcile.delivery_orphan": ("delivery", "without a message"),
    "reconcile.ledger_behind": ("", "the ledger is behind its journal"),
    "duplicates.numbered_twice": ("message", "accepted twice"),
    "duplicates.number_shared": ("number", "of two messages"),
    "duplicates.recorded_twice": ("message", "recorded twice in the journal"),
    "duplicates.archived_twice": ("message", "in two archives of the store"),
    "duplicates.repeated_in_archive": ("message", "twice in one archive of the store"),
    "duplicates.delivered_twice": ("delivery", "written twice in one attempt"),
    "duplicates.resent": ("message", "sent again within a minute"),
    "ordering.inversion": ("pair", "of agents with messages out of order"),
    "ordering.clock_back": ("step", "back of this machine's clock"),
    "ordering.future_id": ("agent", "with a clock ahead of the relay's"),
    "ordering.future_mtime": ("agent", "with files changed after their discovery"),
    "ordering.negative": ("message", "with times that run backwards"),
    "acks.given_up": ("command or query", "given up unanswered"),
    "acks.overdue": ("acknowledgment", "overdue"),
    "acks.offered_not_in_context": ("message", "shown to an agent, but not seen in its context"),
    "acks.unrequested": ("acknowledgment", "that nobody asked for"),
    "dead_letters.repeated": ("recipient", "failing repeatedly for the same reason"),
    "dead_letters.again": ("message", "replayed, and dead again"),
    "dead_letters.forgotten": ("dead letter", "neither replayed nor discarded"),
    "integrity.damaged": ("file", "damaged"),
    "integrity.unreadable": ("file", "that cannot be read"),
    "integrity.missing": ("file", "missing"),
    "integrity.day_changed": ("day", "of files changed since the previous run"),
    "integrity.day_shrunk": ("day", "of files with fewer files than before"),
    "latency.slow": ("hour", "with slow deliveries"),
    "latency.slow_hour": ("hour", "much slower than usual"),
    "agents.stuck": ("agent", "stuck"),
    "agents.failed": ("agent", "that could not be started"),
    "agents.flapping": ("agent", "restarted again and again"),
    "agents.silent": ("agent", "with mail that it does not read"),
    "threads.unanswered": ("question", "without an answer"),
    "threads.runaway": ("thread", "of agents answering each other endlessly"),
    "security.attachment_mismatch": ("agent", "with attachments that were changed"),
    "security.attachment_unsafe": ("agent", "with links among the attachments"),
    "security.bad_signature": ("agent", "with messages of a wrong signature"),
    "security.foreign_owner": ("agent", "with files of another user"),
    "security.linked_directory": ("agent", "with a link in the place of a folder"),
    "security.not_a_regular_file": ("agent", "with a link, pipe or device in the outbox"),
    "security.hard_link": ("agent", "with messages of several names"),
    "security.key_changed": ("agent", "with another key than the registered one"),
    "security.mode_repaired": ("agent", "with files that were open to others"),
    "security.quota_exceeded": ("agent", "with more messages than allowed"),
    "security.rate_limited": ("agent", "that sends faster than allowed"),
    "security.reply_loop": ("agent", "in an endless exchange of answers"),
    "security.stray_message": ("agent", "with a file in the inbox that the relay did not write"),
    "security.unsigned": ("agent", "with unsigned messages"),
    "security.fault": ("agent", "with messages that the relay failed to process"),
    "security.file_disappeared": ("agent", "with files that were removed from the outbox"),
    "security.id_taken": ("agent", "with an id that was in use"),
    "capacity.below_floor": ("", "the disk is too full: the relay accepts nothing"),
    "capacity.full_soon": ("", "the disk will be full within 30 days"),
}
PLURALS = {"command or query": "commands and queries", "day": "days"}
MOST_NAMED = 3  # agents in a sentence
CLOCKS_AHEAD = ("ordering.future_id", "ordering.future_mtime")


def sentence(check: str, count: int) -> str:
    """Say in plain English what the check found: ``3 messages missing from the journal``."""
    job, _, name = check.partition(".")
    other = (f"{job.replace('_', ' ')} finding", name.replace("_", " "))
    noun, said = SENTENCES.get(check, other)
    if not noun:  # there is one
        return said
    if count == 1:
        return f"1 {noun} {said}"
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count:,} {PLURALS.get(noun, plural)} {said}"


def by_whom(check: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Name the agents that did not answer: ``: bob, w2``; else ""."""
    if check != "acks.given_up":
        return ""
    names = sorted({str(dict(row["detail"]).get("recipient", "")) for row in rows})
    more = ", …" if len(names) > MOST_NAMED else ""
    return f": {', '.join(map(shortened, names[:MOST_NAMED]))}{more}" if names else ""


def told_clock(check: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Say whose clock is ahead, and by how much: ``fixer-2's clock is 2 h ahead``; else ""."""
    if check not in CLOCKS_AHEAD or not rows:
        return ""
    behind = [(float(dict(row["detail"]).get("by_ms") or 0), str(row["agent"])) for row in rows]
    by_ms, agent = max(behind, key=lambda of: abs(of[0]))
    others = len({name for _, name in behind}) - 1
    more = f", and {with_noun(others, 'other')}" if others else ""
    what = "clock is" if check == CLOCKS_AHEAD[0] else "files are dated"
    return f"{shortened(agent)}'s {what} {duration_ms(abs(by_ms))} ahead{more}"


def command(check: str, message_id: object = None) -> str:
    """Return the command that looks into a finding.

    An id that is not one of ours is not put into a command.
    """
    text = str(message_id or "")
    if text.isascii() and text.replace("-", "").isalnum():
        return f"relay trace {text}"
    parts = ADVICE.get(check, "").split("`")[1::2]
    known = (part for part in parts if part.startswith("relay ") and part not in NEEDS_ID)
    return next(known, "relay doctor")


# Commands of the advice that need the id of a message or the path of a file.
NEEDS_ID = (
    *("relay trace", "relay check", "relay dump"),
    *("relay thread", "relay resend", "relay release", "relay key make", "relay key trust"),
)
