"""Explicit journal commands (seal, compress, upload, evict, hydrate, prune).

Run by the command line while no relay runs, else by the daemon. A segment is never dropped before a
checkpoint on this disk covers it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from relay.acomm import store_file
from relay.acomm.engine_state import EngineState
from relay.acomm.store_file import PREVIOUS
from relay.base.clock import NS_PER_MS, Clock
from relay.base.errors import FormatError, JournalError
from relay.base.home import BASE, STORE, Home
from relay.daemon.opening import link_base, stream_dir
from relay.delivery.eventlog import EventLog
from relay.journal import tier_plan
from relay.journal.catalog import SegmentEntry
from relay.journal.manifest_reader import checkpoint_offsets
from relay.journal.tier_plan import JobResult, JournalCommand, TierJob, TierPolicy
from relay.journal.tiers import Tiers


def run_command(
    home: Home, events: EventLog, tiers: Tiers, clock: Clock, order: JournalCommand
) -> None:
    """Run a command in a running relay: a seal at once in the loop, any other in the tiers' thread.
    Errors: those of ``EventLog.seal``."""
    if order.verb == tier_plan.SEAL:
        events.seal()
        tiers.wake()  # a segment sealed by hand is moved on at once
    else:
        tiers.enqueue(carry_out(home, tiers, clock, order))


def carry_out(home: Home, tiers: Tiers, clock: Clock, order: JournalCommand) -> Iterator[JobResult]:
    """Run a command on each segment it names; yields the results.

    Errors: JournalError for an unknown segment, and for a prune without a limit.
    """
    is_prune = order.verb == tier_plan.PRUNE
    policy = retention(tiers.policy, order) if is_prune else tiers.policy
    below = safe_offset(home)
    if policy.keep_age_s is not None or policy.keep_bytes is not None:
        below = min(below, pin_base(home))
    tiers.set_safe_offset(below)
    if is_prune:
        yield from tiers.prune(prunes(tiers.entries(), policy, clock, below))
    else:
        yield from tiers.run(order.verb, order.segment_ids)


def retention(policy: TierPolicy, order: JournalCommand) -> TierPolicy:
    """The limits of a prune: those of the command, else those configured. Errors: JournalError."""
    if order.keep_age_s is not None or order.keep_bytes is not None:
        policy = policy._replace(keep_age_s=order.keep_age_s, keep_bytes=order.keep_bytes)
    if policy.keep_age_s is None and policy.keep_bytes is None:
        raise JournalError(
            "no limit is set for the size or age of the journal",
            hint="set journal.keep_age_s or journal.keep_mib in config.json, or give an option",
        )
    return policy


def prunes(
    entries: Sequence[SegmentEntry], policy: TierPolicy, clock: Clock, below: int
) -> list[TierJob]:
    """Segments that retention would drop below an offset, oldest first, with the reason."""
    return list(tier_plan.prunes(entries, policy, clock.now_ns() // NS_PER_MS, below))


def safe_offset(home: Home) -> int:
    """Offset below which two checkpoints cover the stream, by the manifest."""
    found = checkpoint_offsets(stream_dir(home))
    return found[1] if len(found) > 1 else 0


def prunable_below(home: Home) -> int:
    """The result of ``pin_base``, without changing anything."""
    return max(covered_offset(home.path(STORE) + PREVIOUS), covered_offset(home.path(BASE)))


def pin_base(home: Home) -> int:
    """Keep the previous checkpoint as the base for a rebuild of the store; returns the offset below
    which the rebuild does not need the journal. Errors: OSError."""
    previous, base = home.path(STORE) + PREVIOUS, home.path(BASE)
    if covered_offset(previous) > covered_offset(base):
        link_base(previous, base)
    return covered_offset(base)  # read again: a newer one may have come between


def covered_offset(path: str) -> int:
    """Offset up to which a store file covers the journal; 0 if it is missing, damaged or does not
    refer to a journal."""
    try:
        state = EngineState.decode(store_file.read(path).engine_state)
    except (FileNotFoundError, FormatError):
        return 0
    return state.journal.offset if state.journal else 0
