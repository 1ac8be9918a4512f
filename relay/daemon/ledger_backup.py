"""Back up, restore and rebuild the ledger: `relay ledger backup`, `restore`, `rebuild`.

A backup is a snapshot, made while the relay runs. After a restore the next start adds what is
missing from the journal: messages, deliveries, refusals. The journal does not have audit_log and
security_events of that time: they are in the ledger that was set aside.

A rebuild is the recovery of a start without ``ledger.db``, on a new ledger beside the current one,
which it replaces once it is verified. Rows that the journal does not have are copied from the old
ledger as far as it can be read: agents, keys, processes, security events, and the home's id.
"""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from relay.base import fsio
from relay.base.clock import Clock
from relay.base.config import Config
from relay.base.errors import LedgerBusy, LedgerError, UnsafePath, VersionError
from relay.base.home import LEDGER, Home, lock_home
from relay.base.logs import LogCall
from relay.daemon.session import begin_epoch, open_recovered
from relay.ledger import file as ledger_file
from relay.ledger.file import LEFTOVERS, SCHEMA_VERSION, LedgerContent
from relay.ledger.ledger import LEDGER_ONLY_TABLES, SKIPPED, Ledger

BEFORE_RESTORE = ".before-restore"
BEFORE_REBUILD = ".before-rebuild"
SIDE_FILES = ("-wal", "-shm")
UNFINISHED = ".rebuilt"
DERIVED_KEYS = ("journal", SKIPPED)  # of orchestrator_state: of the journal after all


def backup(home: Home, target: str, *, force: bool = False) -> LedgerContent:
    """Copy the ledger to ``target``, complete, verified and durable; returns its content.

    The relay keeps running. Committed by the rename: an existing file stays until then.
    Errors: LedgerError when the target exists and not ``force``, or is a database with a WAL, or
    the ledger is missing; UnsafePath for a target that is not a file; FormatError for a damaged
    ledger; OSError.
    """
    source = home.path(LEDGER)
    if not os.path.exists(source):
        raise LedgerError(f"there is no ledger at {source}", hint="run `relay init`")
    if os.path.lexists(target) and not force:
        raise LedgerError(f"{target} exists already", hint="name another file, or use --force")
    target = os.path.realpath(target)
    if target in {os.path.realpath(source) + s for s in ("", *SIDE_FILES)}:
        raise LedgerError(f"{target} is the ledger itself", hint="name another file")
    if os.path.lexists(target) and not os.path.isfile(target):
        raise UnsafePath(f"{target} is not a regular file")
    if any(os.path.lexists(target + suffix) for suffix in SIDE_FILES):
        text = f"{target} is a database in use, or one whose program was killed"
        raise LedgerError(text, hint="name another file")
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise LedgerError(
            f"directory {folder} does not exist", hint="create it, or name another file"
        )
    with ledger_file.temporary_copy(source, target) as (temp, content):
        ledger_file.install_copy(temp, target, replace=force)
    return content


def restore(home: Home, source: str, *, force: bool = False) -> tuple[LedgerContent, str]:
    """Replace the ledger by a backup; the previous ledger is set aside, never removed.

    Returns the restored content, and the path of the previous ledger; empty if there was none.
    ``force`` accepts the ledger of another home, too. Committed by one rename: if killed before,
    the ledger is unchanged. Errors: AlreadyRunning; LedgerBusy while another process has the ledger
    open; VersionError; FormatError for a damaged backup; LedgerError for another home's.
    """
    path = home.path(LEDGER)
    if not os.path.isfile(source):
        raise LedgerError(f"{source} does not exist", hint="name a ledger's backup")
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock_home(home.root))
        temp, content = stack.enter_context(ledger_file.temporary_copy(source, path))
        if content.version > SCHEMA_VERSION:
            expected = f"user_version <= {SCHEMA_VERSION}"
            raise VersionError(source, 60, expected, content.version)
        ledger_file.require_migratable(source, content.version)
        if not force:
            _check_home(path, temp, source)
        check_unused(path)
        _keep_epoch(path, temp)
        aside = set_aside(path, BEFORE_RESTORE)
        ledger_file.install_copy(temp, path, replace=True)
    return content, aside


def _check_home(path: str, temp: str, source: str) -> None:
    """Errors: LedgerError for another home's ledger, whose messages this journal does not have."""
    ours, theirs = home_id(path), home_id(temp)
    if ours and theirs and ours != theirs:
        raise LedgerError(
            f"{source} is the ledger of another home",
            hint="name a backup of this home, or use --force",
        )


def home_id(path: str) -> str:
    """The random id from the home's first start; empty if the home was never started."""
    with (
        contextlib.suppress(LedgerError),
        contextlib.closing(ledger_file.connect_readonly(path)) as db,
    ):
        row = db.execute("SELECT value FROM orchestrator_state WHERE key = 'home_id'").fetchone()
        return str(row[0]) if row else ""
    return ""


def check_unused(path: str) -> None:
    """Check that no process has the ledger open: closing the old one would remove the new WAL.

    Errors: LedgerBusy with the pids.
    """
    users = ledger_file.holders(path)
    if users:
        who = ", ".join(f"pid {pid} ({name})" for pid, name in sorted(users.items()))
        raise LedgerBusy(f"{path} is open elsewhere: {who}", hint="end it first")


def _keep_epoch(path: str, temp: str) -> None:
    """Continue the count of starts from the higher of the two, so that each number is unique."""
    query = "SELECT CAST(value AS INTEGER) FROM orchestrator_state WHERE key = 'epoch'"
    with (
        contextlib.suppress(LedgerError),
        contextlib.closing(ledger_file.connect_readonly(path)) as db,
    ):
        (epoch,) = db.execute(query).fetchone() or (0,)
        with contextlib.closing(ledger_file.connect(temp)) as copy:
            copy.execute(
                "UPDATE orchestrator_state SET value = ? "
                "WHERE key = 'epoch' AND CAST(value AS INTEGER) < ?",
                (str(epoch), epoch),
            )


def set_aside(path: str, suffix: str) -> str:
    """Give the current ledger a second name and return it; its WAL is merged, or renamed with it.

    A WAL that stayed would be taken for the new ledger's.
    """
    if not os.path.lexists(path):
        return ""
    aside = fsio.free_name(path + suffix, *SIDE_FILES)
    with contextlib.suppress(LedgerError):  # a file that is not a database keeps its WAL
        with contextlib.closing(ledger_file.connect_readonly(path)) as reader:
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


class Rebuilt(NamedTuple):
    """The result of a rebuild, and where the previous ledger is."""

    content: LedgerContent
    aside: str  # its path now; empty when there was none
    kept: dict[str, int]  # rows taken over from it, by table
    lost: tuple[str, ...]  # missing from the new one, a line each


def rebuild(home: Home, config: Config, clock: Clock, log: LogCall) -> Rebuilt:
    """Rebuild the ledger; the previous one is set aside, never removed.

    Committed by one rename: if killed before, the ledger is unchanged, and recovery's changes to
    inboxes and journal are those of the next start. Errors: AlreadyRunning; LedgerBusy while
    another process has the ledger open; those of ``open_store``; OSError.
    """
    path = home.path(LEDGER)
    temp = path + UNFINISHED
    lost: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock_home(home.root))
        check_unused(path)
        ledger_file.remove(temp, "", *LEFTOVERS)
        fsio.fault("create", temp)
        with contextlib.closing(Ledger.open(temp)) as ledger, contextlib.ExitStack() as opened:
            kept = _copy_rows(path, ledger, lost)
            begin_epoch(ledger, clock)
            open_recovered(opened, home, config, clock, log, ledger, lost.append, make_key=False)
        content = ledger_file.verify(temp)
        if os.path.exists(path):
            lost.append("audit_log: changes before now are only in the previous ledger")
        aside = set_aside(path, BEFORE_REBUILD)
        ledger_file.install_copy(temp, path, replace=True)
    return Rebuilt(content, aside, kept, tuple(lost))


def _copy_rows(path: str, ledger: Ledger, lost: list[str]) -> dict[str, int]:
    """Copy the rows that only the old ledger has, as far as readable; returns counts by table."""
    kept: dict[str, int] = {}
    for table in LEDGER_ONLY_TABLES if os.path.exists(path) else ():
        rows, why = _readable_rows(path, table)
        with ledger.transaction():
            for row in rows:
                ledger.import_row(table, row)
        kept[table] = len(rows)
        if why:
            after = f" after the first {len(rows)}" if rows else ""
            lost.append(f"{_LOST[table].format(after=after)}: {why}")
    return kept


_LOST = {
    "orchestrator_state": "the home's id, and the number of its starts",
    "agents": "agents{after} and their keys; the next start lists those that have"
    " a mailbox, and `relay key show NAME` says which key it takes from now on",
    "processes": "processes{after}; the next start takes over those that run",
    "pending_operations": "requests to processes{after}",
    "security_events": "security events{after}",
}


def _readable_rows(path: str, table: str) -> tuple[list[dict[str, object]], str]:
    """The rows of a table up to the first unreadable one, and the error."""
    rows: list[dict[str, object]] = []
    why = ""
    try:
        with contextlib.closing(ledger_file.connect_readonly(path)) as db:
            found = db.execute(f"SELECT * FROM {table}")
            names = [column[0] for column in found.description]
            for row in iter(found.fetchone, None):
                rows.append(dict(zip(names, row, strict=True)))
    except LedgerError as exc:
        why = str(exc)
    return [row for row in rows if row.get("key") not in DERIVED_KEYS], why
