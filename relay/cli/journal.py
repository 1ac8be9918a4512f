"""``relay journal``: where the segments of the journal are, and moving them by hand.

``status`` reads, whether the relay runs or not. The others write, so they take the home's lock as
the relay does: while it runs they are refused, for it does all this by itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from relay.cli.common import columns, echo_json, home_option, json_option, open_home, printable
from relay.errors import EXIT_FAILED, AlreadyRunning, NotFound

if TYPE_CHECKING:
    from relay.aof2.journal import Journal
    from relay.aof2.orders import Done
    from relay.aof2.plan import TierPolicy
    from relay.aof2.tiers import Tiers

F = TypeVar("F", bound=Callable[..., Any])
STREAM_ID = 1  # a home has one stream
_AGES = {"s": 1, "min": 60, "h": 3_600, "d": 86_400}
_SIZES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "B": 1}
_MOST_DIGITS = 15


@click.group(
    epilog="""\b
Examples:
  relay journal status
  relay journal upload --objects s3://bucket/prefix
  relay journal prune --keep-age 90d --dry-run""",
)
def journal() -> None:
    """Show where the journal's segments are, and move them."""


def _segments(command: F) -> F:
    """What the commands that move segments have in common."""
    for option in (
        click.argument("segment_ids", metavar="[SEGMENT]...", nargs=-1, type=click.IntRange(0)),
        click.option(
            "--objects",
            metavar="URL",
            default="",
            help="The object store: a directory, or s3://bucket/prefix.",
        ),
        json_option,
        home_option,
    ):
        command = option(command)
    return click.pass_context(command)  # type: ignore[return-value]


@journal.command(epilog="\b\nExample:\n  relay journal status --json | jq .tiers")
@home_option
@json_option
@click.pass_context
def status(ctx: click.Context, home: str | None, as_json: bool) -> None:
    """Show each segment: its offsets, its size, the tiers that have it, what failed last.

    Tier 0 is segments/, Tier 1 warm/ (compressed), Tier 2 the object store.
    """
    from relay.aof2.manifest import read_manifest

    stream_dir = _stream_dir(ctx, home)
    view = read_manifest(stream_dir, lambda line: click.echo(f"warning: {line}", err=True))
    rows = [_facts(entry, view.catalog.failures) for entry in view.catalog.entries.values()]
    if as_json:
        for row in rows:
            echo_json(row)
        return
    columns(
        ("SEGMENT", "BASE", "END", "BYTES", "COMPRESSED", "TIERS", "FAILED"),
        [
            (
                row["segment"],
                row["base_offset"],
                row["end_offset"] if row["sealed"] else "active",
                row["bytes"],
                row["compressed_bytes"],
                ",".join(map(str, row["tiers"])),
                row["failed"],
            )
            for row in rows
        ],
    )


@journal.command(epilog="\b\nExample:\n  relay journal seal")
@home_option
@json_option
@click.pass_context
def seal(ctx: click.Context, home: str | None, as_json: bool) -> None:
    """Seal the active segment, so that it can be compressed; an empty one stays as it is."""
    with _opened(ctx, home) as (opened, _):
        entries = opened.manifest.entries()
        opened.seal()
        sealed = opened.manifest.entries()[len(entries) - 1].sealed
    if as_json:
        echo_json({"segment": entries[-1].segment_id, "done": "sealed" if sealed else None})
    elif sealed:
        click.echo(f"sealed segment {entries[-1].segment_id}")
    else:
        click.echo(f"segment {entries[-1].segment_id} is empty: nothing to seal", err=True)


@journal.command(epilog="\b\nExample:\n  relay journal compress 3 4")
@_segments
def compress(ctx: click.Context, /, **given: Any) -> int:
    """Compress sealed segments into Tier 1: those named, or all that are in Tier 0 alone."""
    return _order(ctx, "compress", **given)


@journal.command(epilog="\b\nExample:\n  relay journal upload --objects s3://bucket/prefix")
@_segments
def upload(ctx: click.Context, /, **given: Any) -> int:
    """Upload sealed segments to Tier 2: those named, or all that it has not."""
    return _order(ctx, "upload", **given)


@journal.command(epilog="\b\nExample:\n  relay journal evict 3\n  relay journal evict --warm")
@_segments
@click.option("--warm", is_flag=True, help="The compressed copies, once Tier 2 has them.")
def evict(ctx: click.Context, /, warm: bool, **given: Any) -> int:
    """Remove local copies whose other copy is proved: those named, or all that may leave.

    A segment leaves Tier 0 when two checkpoints cover it.
    """
    return _order(ctx, "evict-warm" if warm else "evict", **given)


@journal.command(epilog="\b\nExample:\n  relay journal hydrate 3")
@_segments
def hydrate(ctx: click.Context, /, **given: Any) -> int:
    """Bring segments back to Tier 0: those named, or all that are not there.

    A segment whose file is damaged is mended from another tier, when it is named.
    """
    return _order(ctx, "hydrate", **given)


@journal.command(epilog="\b\nExample:\n  relay journal prune --keep-age 90d --dry-run")
@home_option
@click.option("--keep-age", metavar="AGE", help="Keep what is younger: 30s, 10min, 2h, 90d.")
@click.option("--keep-bytes", metavar="SIZE", help="Keep so much: 500MiB, 10GiB, uncompressed.")
@click.option("--objects", metavar="URL", default="", help="The object store, if one is used.")
@click.option("--dry-run", is_flag=True, help="Only show what would go, and why.")
@json_option
@click.pass_context
def prune(
    ctx: click.Context,
    home: str | None,
    keep_age: str | None,
    keep_bytes: str | None,
    objects: str,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Delete the oldest segments from all tiers, for good.

    Nothing goes that two checkpoints do not cover.
    """
    from relay.aof2 import orders
    from relay.aof2.plan import TierPolicy

    if keep_age is None and keep_bytes is None:
        raise click.UsageError("say what to keep: --keep-age or --keep-bytes")
    policy = TierPolicy(
        objects=objects,
        keep_age_s=None if keep_age is None else _number(keep_age, _AGES, "--keep-age"),
        keep_bytes=None if keep_bytes is None else _number(keep_bytes, _SIZES, "--keep-bytes"),
    )
    with _opened(ctx, home, policy) as (_, tiers):
        jobs = tiers.prunes()
        if not dry_run:
            return _report(orders.prune(tiers, jobs), as_json)
    for job in jobs:
        if as_json:
            echo_json({"segment": job.entry.segment_id, "would": "prune", "why": job.why})
        else:
            click.echo(f"would {job}")
    return 0


def _order(
    ctx: click.Context,
    verb: str,
    *,
    segment_ids: tuple[int, ...],
    objects: str,
    as_json: bool,
    home: str | None,
) -> int:
    from relay.aof2 import orders
    from relay.aof2.plan import TierPolicy

    with _opened(ctx, home, TierPolicy(objects=objects)) as (_, tiers):
        return _report(orders.order(tiers, verb, segment_ids), as_json)


def _report(found: Iterable[Done], as_json: bool) -> int:
    """A line for each segment as it is done; the exit code."""
    failed = 0
    for done in found:
        error = printable(str(done.error)) if done.error else None
        hint = getattr(done.error, "hint", "")
        failed += done.error is not None
        if as_json:
            echo_json({"segment": done.segment_id, "done": done.what or None, "error": error})
        elif error is None:
            click.echo(f"{done.what} segment {done.segment_id}")
        else:
            text = f"segment {done.segment_id}: {error}{'; ' + hint if hint else ''}"
            click.echo(text, err=True)
    return EXIT_FAILED if failed else 0


@contextmanager
def _opened(
    ctx: click.Context, home: str | None, policy: TierPolicy | None = None
) -> Iterator[tuple[Journal, Tiers]]:
    """The journal and its tiers, with the home's lock held. Errors: AlreadyRunning."""
    from relay import fsio
    from relay.aof2 import orders
    from relay.aof2.journal import Journal, Policy
    from relay.aof2.plan import TierPolicy
    from relay.aof2.tiers import Tiers
    from relay.clock import Clock
    from relay.home import LOCK

    def warn(line: str) -> None:
        click.echo(f"warning: {line}", err=True)

    stream_dir = _stream_dir(ctx, home)
    with open_home(ctx, home) as opened:
        lock = opened.path(LOCK)
    with ExitStack() as held:
        try:
            held.enter_context(fsio.locked(lock))
        except BlockingIOError as exc:
            raise AlreadyRunning(
                "the relay is running, and moves the journal's segments by itself",
                hint="`relay journal status` works; for the rest stop it with `relay down`",
            ) from exc
        covered = orders.checkpoints(stream_dir)
        clock, newest = Clock(), covered[0] if covered else 0
        journal = Journal.open(stream_dir, STREAM_ID, clock, Policy(), warn, covered=newest)
        held.callback(journal.close)
        tiers = Tiers(journal.manifest, STREAM_ID, policy or TierPolicy(), clock, warn)
        tiers.cover(covered[1] if len(covered) > 1 else 0)
        journal.fetch = tiers.fetch
        yield journal, tiers


def _stream_dir(ctx: click.Context, home: str | None) -> str:
    with open_home(ctx, home) as opened:
        path = opened.path("journal", f"{STREAM_ID:020d}")
    if not os.path.isdir(path):
        raise NotFound(f"{path}: no journal", hint="`relay up` makes one")
    return path


def _facts(entry: Any, failures: Any) -> dict[str, Any]:
    from relay.aof2.catalog import Residency
    from relay.aof2.format import Reason

    tiers = [number for number, tier in enumerate(Residency) if entry.residency & tier]
    last = max(
        ((f.at_ms, kind.name, f) for (n, kind), f in failures.items() if n == entry.segment_id),
        default=None,
        key=lambda found: found[0],
    )
    known = {reason.value: reason.name.lower() for reason in Reason}
    failed = None
    if last is not None:
        failed = f"{last[1]} ({known.get(last[2].reason, last[2].reason)}, {last[2].times} times)"
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


def _number(text: str, units: dict[str, int], option: str) -> int:
    """A number with a unit, which must be given: what is pruned is gone."""
    for unit, size in units.items():
        digits = text.removesuffix(unit)
        if digits != text and digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS:
            return int(digits) * size
    wanted = ", ".join(f"10{unit}" for unit in units)
    raise click.BadParameter(f"{text!r} is none of {wanted}", param_hint=option)
