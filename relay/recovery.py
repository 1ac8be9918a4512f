"""What a crash left, put right before the first message is taken. The table: docs/states.md.

| found | done |
|---|---|
| row open, file in the outbox | pending again, fed first, in the order of discovery |
| row open, file in the archive | completed and archived |
| row open, file nowhere, deliveries committed | completed: they have it |
| row open, file nowhere | failed: file_disappeared |
| delivery staged, file in inbox/.pending | renamed now |
| delivery staged, no such file | it was delivered: the recipient may have taken it already |
| staged file, no such delivery | removed |
| open intent in pending_operations | rolled back |

Source: relay-file-system.txt 2.4, DESIGN "After a crash".
"""

from __future__ import annotations

from collections.abc import Callable

from relay import delivery, fsio
from relay.clock import Clock, iso_date
from relay.comm.engine import CommStore
from relay.comm.model import DeliveryState
from relay.decide import STICKY
from relay.errors import UnsafePath
from relay.home import PENDING, Dirs, Home
from relay.ledger import Ledger, Row
from relay.names import MSG_SUFFIX, ORCHESTRATOR, message_id_of

DISAPPEARED = "file_disappeared"


def recover(
    home: Home, ledger: Ledger, store: CommStore, clock: Clock, log: Callable[..., object]
) -> list[tuple[str, str]]:
    """Put right what the last daemon left; returns the files to be fed first, in order."""
    now = clock.now_ns()
    with ledger.transaction():
        for operation in ledger.roll_back_operations(now):
            log(f"Rolled back an operation that was cut short: {operation}", action="roll_back")
    with home.dirs() as dirs:
        delivered = _finish_deliveries(dirs, ledger, store, now)
        removed = _remove_strays(dirs, home, ledger)
        _owe_copies(ledger, store, now)
        rows = ledger.open_rows()
        feed = _settle_rows(dirs, ledger, store, rows, now)
    if rows or delivered or removed:
        log(
            "Recovered what was in hand",
            action="recover",
            rows=len(rows),
            fed=len(feed),
            deliveries=delivered,
            strays=removed,
        )
    return feed


def _finish_deliveries(dirs: Dirs, ledger: Ledger, store: CommStore, now: int) -> int:
    """Every delivery that was committed and perhaps not renamed."""
    staged = [held for held in ledger.open_deliveries() if held.state == "staged"]
    written: list[tuple[str, str]] = []
    failed: list[tuple[str, str, str, int]] = []
    for item in staged:
        if item.recipient == ORCHESTRATOR:
            continue  # its message is fed again, and obeyed again
        reason = delivery.deliver(dirs, item.message_id, item.recipient, again=True)
        if reason:
            failed.append((item.message_id, item.recipient, reason, now))
        else:
            written.append((item.message_id, item.recipient))
            stored = store.by_relay_id(item.message_id)
            if stored is not None:
                store.deliver(stored.id, [item.recipient], item.attempt)
    with ledger.transaction():
        ledger.written(written, now)
        ledger.hold(failed)
    return len(staged)


def _owe_copies(ledger: Ledger, store: CommStore, now: int) -> None:
    """What the store owes a newcomer to a sticky channel, and the ledger does not know: held."""
    unsettled = store.unsettled()
    known, rows = ledger.deliveries(unsettled), ledger.rows(unsettled)
    owed = [
        (relay_id, recipient, "held", now, STICKY, now)
        for relay_id, number in unsettled.items()
        if relay_id in rows and rows[relay_id].status in ("completed", "archived")
        for recipient, one in store.state.deliveries[number].items()
        if one.state is DeliveryState.SENT and recipient not in known.get(relay_id, {})
    ]
    with ledger.transaction():
        ledger.stage(owed)


def _remove_strays(dirs: Dirs, home: Home, ledger: Ledger) -> int:
    """Files staged by a batch that never committed."""
    expected = {(held.recipient, held.message_id) for held in ledger.open_deliveries()}
    removed = 0
    for agent in list(home.agent_names()):
        try:
            for name in delivery.staged_files(dirs, agent):
                if (agent, message_id_of(name)) not in expected:
                    fsio.remove(name, dirs.get("agents", agent, "inbox", PENDING))
                    removed += 1
        except (OSError, UnsafePath):
            continue  # broken, or not yet complete: the roster says so, and mends what it can
    return removed


def _settle_rows(
    dirs: Dirs, ledger: Ledger, store: CommStore, rows: list[Row], now: int
) -> list[tuple[str, str]]:
    """Give every open row its way; the files of those that begin again."""
    feed: list[tuple[str, str]] = []
    again: list[str] = []
    completed: list[str] = []
    archived: list[tuple[str, str | None]] = []
    own: list[str] = []
    disappeared: list[tuple[str, str]] = []
    reached = ledger.deliveries(row.message_id for row in rows)
    for row in rows:
        name = row.message_id + MSG_SUFFIX
        path = _archived_path(dirs, row)
        if row.agent_name == ORCHESTRATOR:
            # Delivered, it is at its end; what it answers makes it again where the store lacks it.
            if row.message_id in reached or store.by_relay_id(row.message_id) is not None:
                own.append(row.message_id)
        elif _in_outbox(dirs, row.agent_name, name):
            if row.status != "completed":
                again.append(row.message_id)
            feed.append((row.agent_name, name))
        elif path or row.status == "completed" or reached.get(row.message_id):
            completed.append(row.message_id)
            archived.append((row.message_id, path))
        else:
            disappeared.append((row.message_id, DISAPPEARED))
    with ledger.transaction():
        ledger.reset(again)
        ledger.fail(disappeared, now)
        ledger.claim(completed)
        ledger.complete(completed + own, now)
        ledger.archive(archived)
        ledger.archive_own(own)
    return feed


def _in_outbox(dirs: Dirs, agent: str, name: str) -> bool:
    try:
        return fsio.exists(name, dirs.get("agents", agent, "outbox"))
    except (OSError, UnsafePath):
        return False


def _archived_path(dirs: Dirs, row: Row) -> str | None:
    """Where the original lies in the archive, under the day it was discovered."""
    parts = ("archive", iso_date(row.discovered_at), row.agent_name)
    try:
        if fsio.exists(row.message_id + MSG_SUFFIX, dirs.get(*parts)):
            return "/".join([*parts, row.message_id + MSG_SUFFIX])
    except (OSError, UnsafePath):
        pass  # no such folder
    return None
