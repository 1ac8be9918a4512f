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
from relay.doctor import files, ledger, stores, system
from relay.doctor.finding import Finding, Severity, Target, describe_error, repair

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
        yield Finding("config", describe_error(exc), remedy, where=CONFIG)
    target = Target(home, config, Clock(), lock_holder(home) is not None, deep)
    position = ledger.ledger_position(home)  # before the journal: what it follows only grows
    checks: list[Callable[[Target], Iterator[Finding]]] = [
        system.check_process,
        system.check_limits,
        files.check_files,
        files.check_agents,
        stores.check_stores,
        stores.check_encryption,
        lambda target: ledger.check_ledger_position(target.home, position),
    ]
    if isinstance(position, int):
        checks += [lambda target: ledger.check_ledger(target, position), files.check_attachments]
    for check in checks:
        yield from _report_unreadable(check, target)


def _report_unreadable(
    check: Callable[[Target], Iterator[Finding]], target: Target
) -> Iterator[Finding]:
    """What a check finds. What it cannot read is a finding, too, and ends no other check."""
    try:
        yield from check(target)
    except OSError as exc:
        remedy = f"`ls -ld` it: its owner, user {os.geteuid()}, has to be able to read it"
        yield Finding("files", f"{describe_error(exc)}, and so it was not looked into", remedy)
