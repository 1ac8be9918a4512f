"""The stores of a home, checked as ``relay doctor --deep`` checks them."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from relay.base.clock import Clock
from relay.base.config import Config, decode
from relay.base.discovery import CONFIG
from relay.base.errors import RelayError
from relay.base.home import LEDGER, Home, lock_holder
from relay.doctor import Severity, Target
from relay.doctor.stores import check_stores
from relay.ledger import file as ledger_file
from tests.documents import read_page, tables


@functools.cache
def moves(heading: str) -> set[tuple[str, str]]:
    """The (from, to) of a table of docs/formats/ledger.md."""
    rows = tables(read_page("formats/ledger.md"), heading)[0]
    return {(old, new) for new, olds, _ in rows for old in re.findall(r"\w+", olds)}


def unknown_moves(root: str) -> list[str]:
    """The moves of deliveries in the ledger's audit_log that its page does not name."""
    states = "('held', 'staged', 'written', 'read', 'acked', 'expired', 'bounced', 'dead')"
    query = (
        "SELECT DISTINCT old_status, new_status FROM audit_log "
        f"WHERE recipient IS NOT NULL AND old_status IN {states} AND new_status IN {states} "
        "AND old_status <> new_status "
        # the file of what was given up left the inbox: its state stays
        "AND NOT (new_status = 'read' AND old_status IN ('expired', 'bounced', 'dead'))"
    )
    with contextlib.closing(ledger_file.connect_readonly(os.path.join(root, LEDGER))) as db:
        made = set(db.execute(query))
    return [f"{old} -> {new}" for old, new in made - moves("Life of a delivery")]


def homes_below(folder: Path) -> Iterator[str]:
    """The homes that have a ledger, in a folder or one folder further down."""
    for level in (f"*/{LEDGER}", f"*/*/{LEDGER}"):
        yield from (str(path.parent) for path in folder.glob(level))


def findings_of(root: str) -> list[str]:
    """What is wrong with the stores of a home; nothing while a relay runs there."""
    if not os.path.isdir(os.path.join(root, "agents")):
        return []  # a part of a home
    with Home(root) as home:
        if lock_holder(home) is not None:
            return []
        config = Config()
        with contextlib.suppress(RelayError, OSError):  # a test wrote something else there
            config = decode(home.read_config(), home.path(CONFIG))
        found = check_stores(Target(home, config, Clock(), deep=True))
        wrong = [str(one) for one in found if one.severity is not Severity.NOTE]
        return wrong + unknown_moves(root)
