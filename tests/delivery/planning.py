"""A store and files by number, for tests that plan without a disk."""

from __future__ import annotations

from collections.abc import Set
from types import SimpleNamespace
from typing import Any, cast

from msgspec.structs import replace

from relay.agents.status import Directory
from relay.base.config import Config
from relay.base.message import parse
from relay.base.names import message_id_of, sha256_hex
from relay.delivery.apply import PlanApplier
from relay.delivery.control import Orchestrator
from relay.delivery.plan import plan_file
from relay.delivery.values import Inbound, OutboxFile, Plan, Resources
from relay.engine.engine import Engine
from tests.engine.support import NOW_S, relay_engine
from tests.fakes import FakeClock

AGENTS = frozenset({"alice", "bob", "carol", "operator"})
AT_NS = NOW_S * 10**9


class Table:
    """A store, and plans for files, which are numbered as they come."""

    def __init__(self) -> None:
        self.store: Engine = relay_engine()
        self.lead: str | None = None
        clock = FakeClock(AT_NS)
        roster = SimpleNamespace(trusted_lead=str, agents=AGENTS, retired=[])
        ledger = SimpleNamespace(deliveries=SimpleNamespace(unread_senders=lambda _: []))
        nothing = cast(Any, None)
        given = Resources(
            Config(), nothing, cast(Any, ledger), self.store, nothing, clock, lambda *_, **__: None
        )
        orchestrator: Any = Orchestrator(given, *[cast(Any, roster)] * 3, nothing)
        self.writer = PlanApplier(given, orchestrator)
        self.number = 0

    def plan(
        self,
        text: str,
        sender: str = "alice",
        agents: Set[str] = AGENTS,
        number: int | None = None,
        late_s: int = 0,
        directory: Directory | None = None,
        **facts: Any,
    ) -> Plan:
        if number is None:
            self.number += 1
        inbound = read(text, sender, number or self.number)
        inbound = replace(inbound, seen_at=AT_NS + late_s * 10**9, **facts)
        sequence = self.store.sequence
        plan = plan_file(inbound, directory or Directory(agents, self.lead), self.store)
        assert self.store.sequence == sequence  # planning changes nothing
        return plan

    def decide(self, text: str, *args: Any, **kwargs: Any) -> Plan:
        """Plan it, and apply the plan to the store."""
        return self.writer.apply(self.plan(text, *args, **kwargs))


def read(text: str, sender: str, number: int) -> Inbound:
    name = f"{AT_NS + number}-{number:08x}.msg"
    found = OutboxFile(sender, name, message_id_of(name) or "", len(text), AT_NS, number)
    message = parse(text.encode())
    checksum = sha256_hex(message.content)
    return Inbound(found, message, checksum=checksum, discovered_at=AT_NS, seen_at=AT_NS)
