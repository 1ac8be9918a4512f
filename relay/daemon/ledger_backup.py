"""The ledger kept and put back: `relay ledger backup`, `restore`, `check`.

A backup is of one instant, made while the relay runs. After a restore the next start tells the
ledger from the journal what it lacks: messages, deliveries, refusals. What the journal does not
have is in the ledger that was set aside: audit_log and security_events of that time.
"""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from relay.base import fsio
from relay.base.errors import AlreadyRunning, LedgerBusy, LedgerError, VersionError
from relay.base.home import LEDGER, LOCK, Home
from relay.ledger import SCHEMA_VERSION
from relay.ledger import file as ledger_file
from relay.ledger.file import LedgerContent

BEFORE = ".before-restore"
SIDE_FILES = ("-wal", "-shm")


class RestoredLedger(NamedTuple):
    """What was put back, and what became of the ledger before."""

    content: LedgerContent
    aside: str  # its path now; empty when there was none


def backup(home: Home, target: str, *, force: bool = False) -> LedgerContent:
    """Copy the ledger to ``target``, whole, checked and durable; returns what it has.

    The relay goes on meanwhile. Committed at the rename: a file that was there stays until then.
    Errors: LedgerError when the name is taken and not ``force``, or for no ledger; FormatError for
    a damaged one; OSError.
    """
    source = home.path(LEDGER)
    if not os.path.exists(source):
        raise LedgerError(f"there is no ledger at {source}", hint="run `relay init`")
    if os.path.realpath(target) in {os.path.realpath(source) + s for s in ("", *SIDE_FILES)}:
        raise LedgerError(f"{target} is the ledger itself", hint="name another file")
    if os.path.lexists(target) and not force:
        raise LedgerError(f"{target} exists already", hint="name another file, or use --force")
    folder = os.path.dirname(os.path.abspath(target))
    if not os.path.isdir(folder):
        raise LedgerError(f"there is no directory {folder}", hint="make it, or name another file")
    with ledger_file.temporary_copy(source, target) as (temp, content):
        ledger_file.install_copy(temp, target, replace=force)
    return content


def restore(home: Home, source: str, *, force: bool = False) -> RestoredLedger:
    """Put a backup in the ledger's place; the ledger before is set aside, never removed.

    ``force`` takes the ledger of another home, too. Committed at one rename: killed before it the
    ledger is as it was. Errors: AlreadyRunning; LedgerBusy while somebody has the ledger open;
    VersionError; FormatError for a damaged backup; LedgerError for one of another home.
    """
    path = home.path(LEDGER)
    if not os.path.isfile(source):
        raise LedgerError(f"there is no file {source}", hint="name a ledger's backup")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(fsio.locked(home.path(LOCK)))
        except BlockingIOError as exc:
            raise AlreadyRunning(f"a relay runs for {home.root}") from exc
        temp, content = stack.enter_context(ledger_file.temporary_copy(source, path))
        if content.version > SCHEMA_VERSION:
            expected = f"user_version <= {SCHEMA_VERSION}"
            raise VersionError(source, 60, expected, content.version)
        if not force:
            _check_home(path, temp, source)
        check_unused(path)
        _keep_epoch(path, temp)
        aside = set_aside(path, BEFORE)
        ledger_file.install_copy(temp, path, replace=True)
    return RestoredLedger(content, aside)


def _check_home(path: str, temp: str, source: str) -> None:
    """Messages of another home would be asked of this one's journal and archive."""
    ours, theirs = home_id(path), home_id(temp)
    if ours and theirs and ours != theirs:
        raise LedgerError(
            f"{source} is the ledger of another home",
            hint="name a backup of this one; --force takes it all the same",
        )


def home_id(path: str) -> str:
    """What the home's first start drew; empty where there is none, or no ledger."""
    with contextlib.suppress(LedgerError), contextlib.closing(_present(path)) as db:
        row = db.execute("SELECT value FROM orchestrator_state WHERE key = 'home_id'").fetchone()
        return str(row[0]) if row else ""
    return ""


def check_unused(path: str) -> None:
    """Who has the old one open would remove the new one's WAL when he closes it.

    Errors: LedgerBusy with their pids.
    """
    users = ledger_file.holders(path)
    if users:
        who = ", ".join(f"pid {pid} ({name})" for pid, name in sorted(users.items()))
        raise LedgerBusy(f"{path} is open elsewhere: {who}", hint="end that first")


def _keep_epoch(path: str, temp: str) -> None:
    """Starts are counted on from the newer of the two: no two of them have one number."""
    query = "SELECT CAST(value AS INTEGER) FROM orchestrator_state WHERE key = 'epoch'"
    with contextlib.suppress(LedgerError), contextlib.closing(_present(path)) as db:
        (epoch,) = db.execute(query).fetchone() or (0,)
        with contextlib.closing(ledger_file.connect(temp)) as copy:
            copy.execute(
                "UPDATE orchestrator_state SET value = ? "
                "WHERE key = 'epoch' AND CAST(value AS INTEGER) < ?",
                (str(epoch), epoch),
            )


def _present(path: str) -> ledger_file.Connection:
    return ledger_file.connect_readonly(path)


def set_aside(path: str, suffix: str) -> str:
    """The second name of the ledger that is there; its WAL is folded into it, or goes along.

    A WAL that stayed would be taken for the new ledger's.
    """
    if not os.path.lexists(path):
        return ""
    aside = fsio.free_name(path + suffix, *SIDE_FILES)
    with contextlib.suppress(LedgerError):  # one that is no database goes with its WAL
        with contextlib.closing(_present(path)) as reader:
            ledger_file.content(reader)
        with contextlib.closing(ledger_file.connect(path, timeout_s=0)) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    fsio.fault("link", aside)
    os.link(path, aside, follow_symlinks=False)
    for suffix in SIDE_FILES:
        with contextlib.suppress(FileNotFoundError):
            fsio.fault("rename", path + suffix)
            os.rename(path + suffix, aside + suffix)
    fsio.sync_dir(os.path.dirname(path))
    return aside
