"""Checks of a home, read-only, with or without a running relay; and the safe repairs.

A finding says where, what and what to do. Damage that recovery repairs at the next start is no
finding; files that recovery set aside are, until they are removed. Transient states of a running
relay are checked twice.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator

from relay.base.clock import Clock
from relay.base.config import Config, load
from relay.base.discovery import CONFIG
from relay.base.errors import RelayError
from relay.base.finding import Finding, Severity
from relay.base.home import Home, lock_holder
from relay.doctor import files, system
from relay.doctor.report import Target, describe_error, repair

__all__ = ["Finding", "Severity", "Target", "examine", "repair"]


def examine(home: Home, *, deep: bool = False, quick: bool = False) -> Iterator[Finding]:
    """Yield all findings: settings, process, limits, files, hooks, store, journal, tiers, ledger,
    attachments, search index.

    ``deep``: also read every attachment, every store archive and every packed day of the archive.
    ``quick``: only what takes no longer in a home with more messages.
    """
    config, is_running = Config(), lock_holder(home) is not None
    try:
        config = load(home)
    except (RelayError, OSError) as exc:
        start = "the relay fails at its next start" if is_running else "the relay does not start"
        advice = f"fix it: {start}; the other checks still run"
        yield Finding("config", CONFIG, describe_error(exc), advice)
    target = Target(home, config, Clock(), is_running, deep)
    checks: list[Callable[[Target], Iterator[Finding]]] = [
        system.check_process,
        system.check_limits,
        files.check_agents,
        files.check_hooks,
    ]
    if quick:
        checks.append(system.check_ledger_opens)
    else:
        from relay.doctor import rows, stores  # which load store, journal and search

        checks.insert(2, files.check_files)
        checks += [stores.check_stores, rows.check_rows, stores.check_search]
    for check in checks:
        yield from _report_unreadable(check, target)


def _report_unreadable(
    check: Callable[[Target], Iterator[Finding]], target: Target
) -> Iterator[Finding]:
    """Run a check; a file it cannot read is a finding and does not end the other checks."""
    try:
        yield from check(target)
    except OSError as exc:
        advice = f"check with `ls -ld`; user {os.geteuid()} must be able to read it"
        if exc.errno == errno.EROFS:
            advice = "it is checked once its file system can be written"
        found = f"not checked: {describe_error(exc)}"
        yield Finding("files", str(exc.filename), found, advice)
