"""``relay journal``: list the segments of the journal, and move them between the tiers.

``status`` and ``prune --dry-run`` only read. The other commands are passed to a running relay;
otherwise they take the home's lock and run here. Options override the settings of config.json.
"""

from __future__ import annotations

import math
import os
from collections.abc import Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from relay.base.clock import Clock
from relay.base.errors import EXIT_FAILED, NotFound
from relay.base.home import is_served
from relay.base.text import times
from relay.cli.common import (
    AGE,
    Read,
    command,
    echo_json,
    hold_lock,
    open_home,
    print_rows,
    sanitize,
    say,
)
from relay.cli.request import control_options, send_command

if TYPE_CHECKING:
    from relay.base.config import Config
    from relay.base.home import Home
    from relay.journal.catalog import Residency
    from relay.journal.journal import Journal
    from relay.journal.tier_plan import JobResult, JournalCommand, TierPolicy
    from relay.journal.tiers import Tiers

_SIZES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "B": 1}
_MOST_DIGITS = 15


_MOVES = {0: ("hydrate",), 1: ("compress", "evict"), 2: ("upload", "evict", "evict-warm")}
_objects_option = click.option(
    "--objects",
    metavar="URL",
    default="",
    help="The object store: a directory, or s3://bucket/prefix [journal.objects].",
)


def _size(text: str) -> int:
    """Parse a size with its unit, which is required because pruning is permanent."""
    for unit, size in _SIZES.items():
        digits = text.removesuffix(unit)
        if digits != text and digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS:
            return int(digits) * size
    examples = ", ".join(f"10{unit}" for unit in _SIZES)
    raise ValueError(f"expected {examples}, got {text!r}")


@click.group(
    epilog="""\b
Examples:
  relay journal status
  relay journal move --to 2
  relay journal prune --keep-age 90d --dry-run""",
)
def journal() -> None:
    """Show the journal's segments, and move them between the tiers.

    A running relay executes the commands in the background: `status` shows the result. Without
    one they run here and now.
    """


@command(of=journal, epilog="\b\nExample:\n  relay journal status --json | jq .tiers")
def status(ctx: click.Context, home: str | None, as_json: bool) -> None:
    """Show each segment: offsets, size, tiers, and the last failure.

    Tier 0 is segments/, Tier 1 warm/ (compressed), Tier 2 the object store.
    """
    from relay.journal.manifest_reader import read_manifest

    view = read_manifest(_place(ctx, home).stream_dir, _warn)
    rows = [_facts(entry, view.catalog.failures) for entry in view.catalog.entries.values()]
    print_rows(
        rows,
        ("SEGMENT", "BASE", "END", "BYTES", "COMPRESSED", "TIERS", "FAILED"),
        lambda row: (
            *(row["segment"], row["base_offset"], row["end_offset"] if row["sealed"] else "active"),
            *(row["bytes"], row["compressed_bytes"], ",".join(map(str, row["tiers"]))),
            row["failed"],
        ),
        as_json=as_json,
        nothing="no segments",
    )


@journal.command(epilog="\b\nExample:\n  relay journal seal")
@control_options
def seal(ctx: click.Context, /, **caller: Any) -> int:
    """Seal the active segment, so that it can be compressed, unless it is empty."""
    from relay.journal.tier_plan import SEAL, JournalCommand

    place, as_json = _place(ctx, caller["home"]), caller["as_json"]
    if is_served(place.home):
        return _ask(ctx, JournalCommand(SEAL), caller)
    with _opened(place) as (opened, _):
        entries = opened.manifest.entries()
        opened.seal()
        sealed = opened.manifest.entries()[len(entries) - 1].sealed
    if as_json:
        echo_json({"segment": entries[-1].segment_id, "done": "sealed" if sealed else None})
    elif sealed:
        click.echo(f"sealed segment {entries[-1].segment_id}")
    else:
        click.echo(f"segment {entries[-1].segment_id} is empty: nothing to seal", err=True)
    return 0


@journal.command(
    epilog="""\b
Examples:
  relay journal move --to 2
  relay journal move --to 1 --copy 3 4
  relay journal move --to 0 3"""
)
@click.argument("segment_ids", metavar="[SEGMENT]...", nargs=-1, type=click.IntRange(0))
@click.option("--to", "tier", type=click.IntRange(0, 2), required=True, help="The tier, by number.")
@click.option("--copy", "is_copy", is_flag=True, help="Keep the copies in the tiers before it.")
@_objects_option
@control_options
def move(
    ctx: click.Context,
    /,
    segment_ids: tuple[int, ...],
    tier: int,
    is_copy: bool,
    objects: str,
    **caller: Any,
) -> int:
    """Move sealed segments: those given, or all that can be moved.

    To Tier 1 they are compressed, to Tier 2 uploaded; then the copies before are removed, if this
    one is verified and, in Tier 0, two checkpoints cover the segment. To Tier 0 they are restored
    from the nearest tier that has them; one with a damaged file there only if it is given.
    """
    from relay.daemon.home_journal import carry_out
    from relay.journal.manifest_reader import read_manifest
    from relay.journal.tier_plan import JournalCommand, check_segments

    place = _place(ctx, caller["home"], objects)
    needs_store = tier == 2
    if tier == 0 and is_served(place.home):
        needs_store = _are_away(place, segment_ids)
    if needs_store and not (objects or place.config.journal.objects):
        raise click.UsageError(
            "no object store is configured: set journal.objects in config.json, or use --objects"
        )
    verbs = _MOVES[tier][: 1 if is_copy else None]

    def orders(failed: Container[int] = ()) -> Iterator[JournalCommand]:
        """Yield the steps that remain, by the manifest as it is then."""
        for verb in verbs:
            entries = read_manifest(place.stream_dir, _warn).catalog.entries
            check_segments(entries, segment_ids)
            wanted = tuple(
                n for n in segment_ids if n not in failed and _is_wanted(verb, entries[n].residency)
            )
            if wanted or not segment_ids:
                yield JournalCommand(verb, wanted)

    if is_served(place.home):
        for order in list(orders()):
            _ask(ctx, order, caller, objects)
        return 0

    def results(tiers: Tiers) -> Iterator[JobResult]:
        failed = set[int]()
        for order in orders(failed):
            for done in carry_out(place.home, tiers, place.clock, order):
                if done.error is not None:
                    failed.add(done.segment_id)
                yield done

    with _opened(place) as (_, tiers):
        return _report(results(tiers), caller["as_json"])


def _are_away(place: _Place, segment_ids: tuple[int, ...]) -> bool:
    """True if one of these segments, or of all, is in Tier 2 alone."""
    from relay.journal.catalog import Residency
    from relay.journal.manifest_reader import read_manifest

    entries = read_manifest(place.stream_dir, _warn).catalog.entries
    return any(
        entry.residency == Residency.TIER2
        for number, entry in entries.items()
        if not segment_ids or number in segment_ids
    )


def _is_wanted(verb: str, has: Residency) -> bool:
    """True if a segment that was named needs this step, by the tiers that have it."""
    from relay.journal.catalog import Residency

    return bool(
        {
            "compress": has & Residency.TIER0 and not has & Residency.TIER1,
            "upload": not has & Residency.TIER2,
            "evict": has & Residency.TIER0,
            "evict-warm": has & Residency.TIER1 or not has & Residency.TIER2,
        }.get(verb, True)
    )


@journal.command(epilog="\b\nExample:\n  relay journal prune --keep-age 90d --dry-run")
@control_options
@click.option("--keep-age", type=AGE, help="Keep younger segments: 10m, 2h, 90d.")
@click.option(
    "--keep-bytes", type=Read("size", _size), help="Keep this much, uncompressed: 500MiB, 10GiB."
)
@_objects_option
@click.option(
    "--dry-run", is_flag=True, help="Only show the segments that would be deleted, and why."
)
def prune(
    ctx: click.Context,
    /,
    keep_age: float | None,
    keep_bytes: int | None,
    objects: str,
    dry_run: bool,
    **caller: Any,
) -> int:
    """Delete the oldest segments from all tiers, permanently.

    Only segments that two checkpoints cover are deleted; the older checkpoint is first kept as
    store/base.acomm. --keep-age and --keep-bytes replace both limits of config.json.
    """
    from relay.daemon.home_journal import carry_out, retention
    from relay.journal.tier_plan import PRUNE, JournalCommand

    place = _place(ctx, caller["home"], objects)
    order = JournalCommand(
        PRUNE,
        keep_age_s=None if keep_age is None else math.ceil(keep_age),
        keep_bytes=keep_bytes,
    )
    policy = place.policy()
    if {keep_age, keep_bytes, policy.keep_age_s, policy.keep_bytes} == {None}:
        raise click.UsageError(
            "no limit: use --keep-age or --keep-bytes, or set journal.keep_age_s or"
            " journal.keep_mib in config.json"
        )
    if dry_run:
        return _plan(place, retention(policy, order), caller["as_json"])
    if is_served(place.home):
        return _ask(ctx, order, caller, objects)
    with _opened(place) as (_, tiers):
        return _report(carry_out(place.home, tiers, place.clock, order), caller["as_json"])


def _plan(place: _Place, policy: TierPolicy, as_json: bool) -> int:
    """Show what a prune would do, by the manifest; changes nothing."""
    from relay.daemon import home_journal
    from relay.journal.manifest_reader import read_manifest

    entries = list(read_manifest(place.stream_dir, _warn).catalog.entries.values())
    below = min(home_journal.safe_offset(place.home), home_journal.prunable_below(place.home))
    jobs = home_journal.prunes(entries, policy, place.clock, below)
    for job in jobs:
        facts = {"segment": job.entry.segment_id, "would": "prune", "why": job.why}
        say(f"would {job}", facts, as_json)
    if not jobs and not as_json:
        click.echo("nothing to delete", err=True)
    return 0


def _ask(
    ctx: click.Context, order: JournalCommand, caller: dict[str, Any], objects: str = ""
) -> int:
    """Pass the command to the running relay."""
    if objects:
        raise click.UsageError("a running relay uses journal.objects of config.json")
    fields = {
        "SEGMENTS": " ".join(map(str, order.segment_ids)) or None,
        "KEEP_AGE": order.keep_age_s,
        "KEEP_BYTES": order.keep_bytes,
    }
    send_command(ctx, f"journal.{order.verb}", fields, **caller)
    return 0


def _report(found: Iterable[JobResult], as_json: bool) -> int:
    """Print a line for each segment when it is done; the exit code."""
    failed, is_silent = 0, not as_json
    for done in found:
        is_silent = False
        error = sanitize(str(done.error)) if done.error else None
        failed += done.error is not None
        if as_json:
            echo_json({"segment": done.segment_id, "done": done.what or None, "error": error})
        else:
            click.echo(sanitize(str(done)), err=error is not None)
    if is_silent:
        click.echo("nothing to do", err=True)
    return EXIT_FAILED if failed else 0


class _Place(NamedTuple):
    """A home's journal, and its settings."""

    home: Home
    config: Config
    objects: str  # overrides that of config.json

    @property
    def stream_dir(self) -> str:
        from relay.daemon.home_journal import stream_dir

        return stream_dir(self.home)

    @property
    def clock(self) -> Clock:
        return Clock()

    def policy(self) -> TierPolicy:
        """The policy of config.json, with --objects."""
        from relay.daemon.home_journal import tier_policy

        return tier_policy(self.home, self.config, self.objects)


def _place(ctx: click.Context, home: str | None, objects: str = "") -> _Place:
    """Errors: HomeMissing, ConfigError, NotFound."""
    from relay.base.config import load

    with open_home(ctx, home) as opened:
        place = _Place(opened, load(opened), objects)
    if not os.path.isdir(place.stream_dir):
        raise NotFound(f"{place.stream_dir}: no journal", hint="`relay up` creates one")
    return place


@contextmanager
def _opened(place: _Place) -> Iterator[tuple[Journal, Tiers]]:
    """Open the journal and its tiers, with the home's lock held. Errors: AlreadyRunning."""
    from relay.daemon.home_journal import open_journal
    from relay.journal.manifest_reader import checkpoint_offsets

    with ExitStack() as held:
        held.enter_context(hold_lock(place.home))
        covered = [*checkpoint_offsets(place.stream_dir), 0, 0]
        journal, tiers = open_journal(
            held,
            place.home,
            place.config,
            place.clock,
            _warn,
            covered=covered[0],
            objects=place.objects,
        )
        tiers.set_safe_offset(covered[1])
        yield journal, tiers


def _warn(line: str) -> None:
    click.echo(f"warning: {sanitize(line)}", err=True)


def _facts(entry: Any, failures: Any) -> dict[str, Any]:
    from relay.journal.catalog import Residency
    from relay.journal.manifest_format import Reason

    tiers = [number for number, tier in enumerate(Residency) if entry.residency & tier]
    last = max(
        ((f.at_ms, kind.name, f) for (n, kind), f in failures.items() if n == entry.segment_id),
        default=None,
        key=lambda found: found[0],
    )
    known = {reason.value: reason.name.lower() for reason in Reason}
    failed = None
    if last is not None:
        failed = f"{last[1]} ({known.get(last[2].reason, last[2].reason)}, {times(last[2].times)})"
    return {
        "segment": entry.segment_id,
        "base_offset": entry.base_offset,
        "end_offset": entry.end_offset if entry.sealed else None,
        "sealed": entry.sealed,
        "bytes": entry.file_bytes if entry.sealed else None,
        "compressed_bytes": entry.compressed_bytes or None,
        "tiers": tiers,
        "key": entry.key or None,
        "etag": entry.etag or None,
        "failed": failed,
    }
