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
    "reconcile.extra": (
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
    "reconcile.stray": "Nobody sent this file through the relay. Look who put it into archive/.",
    "reconcile.contradicted": (
        "Ledger, store and journal disagree on one delivery. `relay doctor` compares them; `relay"
        " trace` shows the ledger's side."
    ),
    "reconcile.doubled": (
        "The recipient may have handled it twice. Tell it; then keep ledger and journal for "
        "whoever looks into the relay."
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
    "acks.overdue": (
        "The recipient owes an acknowledgment. `relay acks --overdue` lists who; ask it, or send "
        "again."
    ),
    "acks.orphan": "Somebody answered what was not asked. Look at what RE names in its message.",
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
    "integrity.unread": "The file cannot be read: see its owner, its mode and the disk below it.",
    "integrity.missing": (
        "Somebody has still to read a message whose attachment is gone. Ask the sender for it."
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
