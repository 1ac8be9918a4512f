"""A part of the loop, and what all parts share: the home and its stores, the clock and the log."""

from __future__ import annotations

from typing import NamedTuple

from relay.base.clock import Clock
from relay.base.config import Config
from relay.base.home import Home
from relay.base.logs import LogCall
from relay.delivery.eventlog import EventLog
from relay.engine.engine import Engine
from relay.ledger.ledger import Ledger


class Resources(NamedTuple):
    """The open stores of a home, its settings, the clock and the log."""

    config: Config
    home: Home
    ledger: Ledger
    store: Engine
    events: EventLog  # of the store: its journal
    clock: Clock
    log: LogCall


class Part:
    """A part of the loop, which owns it: used in its thread alone."""

    def __init__(self, given: Resources) -> None:
        self._config = given.config
        self._home = given.home
        self._ledger = given.ledger
        self._store = given.store
        self._events = given.events
        self._clock = given.clock
        self._log = given.log
