"""What to do about a finding, a sentence a check; for a check without one, what always helps."""

from __future__ import annotations

ADVICE = {
    "reconcile.missing": "The message was accepted and no store file holds it. `relay trace` shows "
    "how far it came; its original may still lie in the home's archive/.",
    "reconcile.checksum_differs": "The store holds another content than the relay took in. Compare "
    "with the original in archive/, and run `relay acomm check` on the file named.",
    "reconcile.extra": "The store holds a message that the ledger knows nothing of: the ledger is "
    "older than the store, or somebody else wrote the file. `relay doctor` says which.",
    "reconcile.undelivered": "The delivery is held or staged. `relay status` says whether the "
    "relay runs, `relay trace` what the message waits for.",
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
