"""The stores of a home, checked as ``relay doctor --deep`` checks them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from relay.base.clock import Clock
from relay.base.config import Config, decode
from relay.base.discovery import CONFIG
from relay.base.errors import RelayError
from relay.base.home import LEDGER, Home, lock_holder
from relay.doctor import Severity, Target
from relay.doctor.stores import check_stores


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
        return [str(one) for one in found if one.severity is not Severity.NOTE]
