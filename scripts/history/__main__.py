"""Generate a home as after weeks of operation, optionally with known faults."""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from relay.base.clock import NS_PER_S
from relay.base.errors import RelayError
from scripts.history.damage import spoil
from scripts.history.faults import GROUPS, Planted, chosen, listed
from scripts.history.faulty import FaultyHistory
from scripts.history.make import Given, History

MARGIN_NS = 5 * 60 * NS_PER_S  # older than what an audit calls recent


def main() -> int:
    """Run the command line."""
    given = _arguments()
    began = time.monotonic()
    home = Path(given.home).absolute()
    what = Given(given.messages, given.agents, given.days, _end_ns(given.end), given.seed)
    try:
        if given.faults is None:
            History(str(home), what).make()
        else:
            listing = Path(given.faults_list or home.parent / "faults.json")
            found = make_faulty(home, what, chosen(given.faults))
            listing.write_bytes(msgspec.json.format(msgspec.json.encode(listed(found))) + b"\n")
            print(f"{listing}: {len(found)} faults", file=sys.stderr)
    except RelayError as exc:
        print(f"make-history: {exc}", file=sys.stderr)
        return exc.exit_code
    seconds = time.monotonic() - began
    print(f"{given.home}: {given.messages} messages in {seconds:.1f} s", file=sys.stderr)
    return 0


def _arguments() -> argparse.Namespace:
    """Parsed arguments; invalid ones end the process with an error on stderr."""
    parser = argparse.ArgumentParser(prog="scripts/make-history", description=__doc__)
    parser.add_argument(
        "home", nargs="?", metavar="HOME", help="a directory that does not exist yet"
    )
    parser.add_argument("--messages", type=int, default=100_000, metavar="N")
    parser.add_argument("--agents", type=int, default=20, metavar="M", help="at least 4 [20]")
    parser.add_argument("--days", type=float, default=7, metavar="D")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--end", help="end of the history, ISO 8601 in UTC [five minutes ago]")
    parser.add_argument(
        "--faults",
        nargs="?",
        const="all",
        metavar="NAMES",
        help=f"plant faults: all, {', '.join(GROUPS)}, or names separated by commas [all]",
    )
    parser.add_argument(
        "--faults-list", metavar="FILE", help="list of the planted faults [HOME/../faults.json]"
    )
    given = parser.parse_args()
    if given.home is None and given.faults not in (None, "all"):  # `--faults HOME`
        given.home, given.faults = given.faults, "all"
    if given.home is None:
        parser.error("name HOME, a directory that does not exist yet")
    if given.messages < 1 or given.agents < 4 or given.days < 0.25:
        parser.error("needs a message, four agents and a quarter of a day at least")
    if given.faults is not None and given.days < 2:
        parser.error("--faults needs two days at least: --days 2")
    if os.path.lexists(given.home):
        parser.error(f"{given.home} is there already: name a directory that is not")
    return given


def make_faulty(home: Path, given: Given, names: set[str]) -> list[Planted]:
    """Generate a history with these faults; returns the planted ones."""
    history = FaultyHistory(str(home), given, names)
    history.make()
    return history.planted + spoil(home, history.planted, names)


def _end_ns(text: str | None) -> int:
    if text is None:
        return time.time_ns() - MARGIN_NS
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * NS_PER_S


if __name__ == "__main__":
    sys.exit(main())
