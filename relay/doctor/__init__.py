"""Checks of a home, read-only, with or without a running relay; and the safe repairs.

A finding says where, what and what to do. Damage that recovery repairs at the next start is no
finding; files that recovery set aside are, until they are removed. Transient states of a running
relay are checked twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from relay.base.clock import Clock
from relay.base.config import Config, decode
from relay.base.errors import RelayError
from relay.base.home import CONFIG, Home, lock_holder
from relay.doctor import files, ledger, stores, system
from relay.doctor.finding import Finding, Severity, Target, describe_error, repair

__all__ = ["Finding", "Severity", "examine", "repair"]


def examine(home: Home, *, deep: bool = False) -> Iterator[Finding]:
    """Yield all findings: settings, process, limits, files, store, journal, tiers, ledger,
    attachments.

    ``deep``: also read every attachment and every packed day of the archive.
    """
    config = Config()
    try:
        config = decode(home.read_config(), home.path(CONFIG))
    except (RelayError, OSError) as exc:
        remedy = "fix it: the relay does not start; the other checks still run"
        yield Finding("config", describe_error(exc), remedy, where=CONFIG)
    target = Target(home, config, Clock(), lock_holder(home) is not None, deep)
    position = ledger.ledger_position(home)  # before the journal, which may grow meanwhile
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
    """Run a check; a file it cannot read is a finding and does not end the other checks."""
    try:
        yield from check(target)
    except OSError as exc:
        remedy = f"check with `ls -ld`; user {os.geteuid()} must be able to read it"
        yield Finding("files", f"not checked: {describe_error(exc)}", remedy)
