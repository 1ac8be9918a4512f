"""What the parts of a session work on, as one value: it is put together of many of them."""

from __future__ import annotations

from typing import NamedTuple

from relay.clock import Clock
from relay.comm.engine import CommStore
from relay.config import Config
from relay.home import Home
from relay.ledger import Ledger
from relay.operations.logs import LogCall
from relay.operations.tally import Tally
from relay.store.eventlog import EventLog


class Basis(NamedTuple):
    """What a session has opened, and what it was given. Each part keeps what it needs of it."""

    config: Config
    home: Home
    ledger: Ledger
    store: CommStore
    events: EventLog  # of that store: the journal
    clock: Clock
    log: LogCall
    tally: Tally
