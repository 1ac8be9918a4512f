"""What the parts of a session work on, as one value: it is put together of many of them."""

from __future__ import annotations

from typing import NamedTuple

from relay.base.clock import Clock
from relay.base.config import Config
from relay.base.home import Home
from relay.base.logs import LogCall
from relay.base.metrics import Metrics
from relay.delivery.eventlog import EventLog
from relay.engine.commstore import CommStore
from relay.ledger import Ledger


class Context(NamedTuple):
    """What a session has opened, and what it was given. Each part keeps what it needs of it."""

    config: Config
    home: Home
    ledger: Ledger
    store: CommStore
    events: EventLog  # of that store: the journal
    clock: Clock
    log: LogCall
    tally: Metrics
