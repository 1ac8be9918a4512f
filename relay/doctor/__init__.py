"""What is wrong with a home: read only, whether a relay runs or not; and what of it can be mended.

One module a subject. Each finding says where, what and what to do. What recovery puts right by
itself is none; what it had to set aside is, until somebody has looked at it. What a running relay
has in hand is looked at twice, so that a busy one is not a broken one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from relay.base.clock import Clock
from relay.base.config import Config, decode
from relay.base.errors import RelayError
from relay.base.home import CONFIG, Home
from relay.base.lock_file import lock_holder
from relay.doctor import agents, attached, engine, files, ledger, limits, process, sealing
from relay.doctor.finding import Finding, Place, Severity, said
from relay.doctor.repair import repair

__all__ = ["Finding", "Severity", "examine", "repair"]


def examine(home: Home, *, deep: bool = False) -> Iterator[Finding]:
    """Everything that is found: settings, process, limits, files, store, journal, tiers, ledger,
    attachments.

    ``deep``: every attachment and every pack of the archive is read, too.
    """
    config = Config()
    try:
        config = decode(home.read_config(), home.path(CONFIG))
    except (RelayError, OSError) as exc:
        remedy = "mend it: the relay does not start; the rest is checked"
        yield Finding("config", said(exc), remedy, where=CONFIG)
    place = Place(home, config, Clock(), lock_holder(home) is not None, deep)
    position = engine.ledger_position(home)  # before the journal: what it follows only grows
    checks: list[Callable[[Place], Iterator[Finding]]] = [
        process.examine,
        limits.examine,
        files.examine,
        agents.examine,
        engine.examine,
        sealing.examine,
        lambda place: engine.ledger(place.home, position),
    ]
    if isinstance(position, int):
        checks += [lambda place: ledger.examine(place, position), attached.examine]
    for check in checks:
        yield from _as_far_as_it_goes(check, place)


def _as_far_as_it_goes(
    check: Callable[[Place], Iterator[Finding]], place: Place
) -> Iterator[Finding]:
    """What a check finds. What it cannot read is a finding, too, and ends no other check."""
    try:
        yield from check(place)
    except OSError as exc:
        remedy = f"`ls -ld` it: its owner, user {os.geteuid()}, has to be able to read it"
        yield Finding("files", f"{said(exc)}, and so it was not looked into", remedy)
