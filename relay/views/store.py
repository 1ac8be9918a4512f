"""Reads the store as it is now: its file, and the journal after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relay.base.home import Home
    from relay.engine.engine import Engine


def read_store(home: Home) -> Engine:
    """Open the store read-only.

    Errors: FormatError for a damaged file; KeyFileError, SealedStore for an encrypted one.
    """
    from relay.base.clock import Clock
    from relay.base.config import load
    from relay.daemon.opening import open_store_readonly, store_key

    config = load(home)
    return open_store_readonly(home, Clock(), config, store_key(home, config, make=False))
