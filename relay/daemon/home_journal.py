"""The journal of a home: its tiers, how far checkpoints cover it, and commands on it.

Commands (seal, compress, upload, evict, hydrate, prune) are run by the command line while no relay
runs, else by the daemon. A segment is never dropped before a checkpoint on this disk covers it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence

from relay.acomm import store_file
from relay.acomm.engine_state import EngineState
from relay.acomm.store_file import PREVIOUS
from relay.base import fsio
from relay.base.clock import NS_PER_MS, Clock
from relay.base.config import Config
from relay.base.errors import FormatError, JournalError
from relay.base.home import BASE, JOURNAL, STORE, Home
from relay.delivery.eventlog import STREAM_ID, EventLog
from relay.journal import tier_plan
from relay.journal.catalog import SegmentEntry
from relay.journal.journal import Journal
from relay.journal.manifest_reader import checkpoint_offsets
from relay.journal.segment import SegmentPolicy
from relay.journal.tier_plan import JobResult, JournalCommand, TierJob, TierPolicy
from relay.journal.tiers import Tiers

_base_lock = threading.Lock()  # a checkpoint and a prune may both write the base


def stream_dir(home: Home) -> str:
    """The folder of the store's stream."""
    return home.path(JOURNAL, f"{STREAM_ID:020d}")


def tier_policy(home: Home, config: Config, objects: str) -> TierPolicy:
    """The tiers' settings; ``objects`` replaces the configured object store, which may be a
    path below the home."""
    settings = config.journal
    if not objects and settings.objects:
        is_url = "://" in settings.objects
        objects = settings.objects if is_url else home.path(os.path.expanduser(settings.objects))
    return TierPolicy(
        settings.compress_segments,
        settings.compress_after_s,
        objects,
        settings.local_mib << 20,
        settings.local_age_s,
        settings.keep_mib << 20 or None,
        settings.keep_age_s or None,
    )


def open_journal(
    held: contextlib.ExitStack,
    home: Home,
    config: Config,
    clock: Clock,
    warn: Callable[[str], object],
    *,
    epoch: int = 0,
    known: int = 0,
    covered: int = 0,
    objects: str = "",
) -> tuple[Journal, Tiers]:
    """Open a home's journal for writing, with its tiers; ``held`` closes it.

    ``known``: its length, as others know it. ``covered``: offset that the newest checkpoint covers.
    ``objects``: the object store, if not the configured one. Errors: those of ``Journal.open``;
    RelayError when S3 is asked for and not installed.
    """
    settings = config.journal
    journal = Journal.open(
        stream_dir(home),
        STREAM_ID,
        clock,
        SegmentPolicy(settings.segment_bytes),
        warn,
        epoch=epoch,
        at_least=known,
        covered=covered,
    )
    held.callback(journal.close)
    policy = tier_policy(home, config, objects)
    return journal, Tiers(journal.manifest, STREAM_ID, policy, clock, warn)


def note_covered(home: Home, tiers: Tiers, below: int) -> None:
    """Note that two checkpoints, the new one and ``.prev``, cover the journal below an offset.

    If the journal is ever pruned, ``.prev`` is kept as the base: with the rest of the journal it is
    enough to rebuild the store. Errors: OSError.
    """
    policy = tiers.policy
    if policy.keep_bytes is not None or policy.keep_age_s is not None:
        link_base(home.path(STORE) + PREVIOUS, home.path(BASE))
    tiers.set_safe_offset(below)


def link_base(previous: str, base: str) -> None:
    """Keep a checkpoint as the base for a rebuild when both others are lost."""
    temp = base + ".tmp"
    with _base_lock, contextlib.suppress(FileNotFoundError):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp)
        os.link(previous, temp, follow_symlinks=False)
        os.rename(temp, base)
        fsio.sync_dir(os.path.dirname(base))


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
