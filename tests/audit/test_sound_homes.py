"""What a relay was asked to do, met or survived, and no job finds anything wrong with."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from relay.audit.snapshot import snapshot_home
from relay.base.clock import NS_PER_S
from relay.base.config import Config, RetentionSettings, StoreSettings
from relay.daemon.housekeeper import run_retention
from relay.delivery.eventlog import EventLog
from relay.ledger import OFFERED
from relay.ledger.deliveries import OfferChange
from tests.audit.second_engine import Said, SecondEngine
from tests.box import Box
from tests.fakes import FakeClock
from tests.integration.test_pruned_journal import KEEP_LITTLE
from tests.kills import killed_in

DAY_S = 86_400
COMMAND = "TO: bob\nKIND: command\n\nrun the tests"
SEES_ALL = Config(store=StoreSettings(active_messages=10))  # so that messages roll soon


class Case(NamedTuple):
    """A home, and the jobs that might have been wrong about it."""

    live: Callable[[Box], None]
    jobs: str
    config: Config = Config()
    after_s: int = 3600  # it is looked at


def found(box: Box, folder: Path, case: Case) -> dict[str, set[str]]:
    """What these jobs find in a home: check -> message ids."""
    clock = FakeClock(box.clock.now_ns() + case.after_s * NS_PER_S)
    folder.mkdir()
    snapshot = snapshot_home(str(box.root), str(folder), clock)
    with contextlib.closing(SecondEngine(snapshot, folder / "lake")) as engine:
        said: list[Said] = [engine.run(job) for job in case.jobs.split()]
    return {check: ids for one in said for check, ids in one.checks.items()}


def one_letter_of_two_is_discarded(box: Box) -> None:
    """The message is in the store for the other recipient, who answered."""
    box.command("alice", "channel.create", "CHANNEL: ci", "TYPE: group", "DELIVERY: at-least-once")
    box.join("ci", "alice", "bob", "carol")
    sent = box.send("alice", "TO: #ci\nKIND: command\n\nrun the tests")
    box.send("carol", f"TO: alice\nKIND: ack\nRE: {sent}\n\ncompleted")
    box.until_dead()
    box.command("operator", "dead.discard", f"ID: {sent}")
    box.tick()
    assert box.states(sent) == {"bob": "dead", "carol": "acked"}


def no_relay_ran_for_an_hour(box: Box) -> None:
    """Its time for an acknowledgment has grown by as much."""
    sent = box.send("alice", f"TO: bob\nDELIVERY: at-least-once\n\n{COMMAND}")
    box.after(10)
    box.kill()
    box.clock.advance(3600)
    box.open()
    box.after(2)
    assert box.states(sent) == {"bob": "written"}
    box.kill()


def the_clock_was_ahead(box: Box) -> None:
    """Notes in the ledger are of a time that has not come."""
    box.clock.jump(3 * DAY_S)
    box.restart()
    box.clock.jump(-3 * DAY_S)
    box.send("alice", COMMAND)
    box.after(10)
    box.kill()


def its_sender_gave_hours(box: Box) -> None:
    """Who reads at noon has until the evening."""
    sent = box.send("alice", "TO: bob\nKIND: query\nAWAIT: 5h\n\nwhich branch?")
    box.take("bob", sent)
    box.after(2 * 3600)


def its_time_has_not_come(box: Box) -> None:
    """Nobody can answer what was not delivered."""
    box.send("alice", "TO: bob\nKIND: query\nNOT-BEFORE: 1d\n\nwhich branch?")
    box.after(2 * 3600)
    box.flush()


def it_was_taken_back(box: Box) -> None:
    """Nobody executes the first."""
    sent = box.send("alice", COMMAND)
    box.command("alice", "message.cancel", f"ID: {sent}")
    box.after(5)
    box.send("alice", COMMAND)
    box.after(5)


def the_mailbox_went_with_what_had_rolled(box: Box) -> None:
    """It was unread, and comes again: of a message in an archive, the ledger alone knows."""
    sent = box.send("alice", "TO: bob\n\nunread for long")
    for number in range(40):
        sender = ("alice", "bob")[number % 2]  # one has half of the active messages at most
        box.take("carol", box.send(sender, f"TO: carol\n\n{number}"))
        box.flush()
    assert sent not in box.stored()
    shutil.rmtree(box.path("agents", "bob"))
    box.after(31)
    box.home.make_agent("bob")
    box.after(31)
    box.after(31)
    assert sent in box.inbox("bob")
    box.flush()


def the_mailbox_went_with_what_its_channel_keeps_no_longer(box: Box) -> None:
    """The same of one that is past the retention of its channel, still in the live store's file."""
    box.command("alice", "channel.create", "CHANNEL: ci", "TYPE: group", "RETENTION: count 1")
    box.join("ci", "alice", "bob")
    sent = [box.send("alice", f"TO: #ci\n\n{number}") for number in range(3)]
    shutil.rmtree(box.path("agents", "bob"))
    box.after(31)
    box.home.make_agent("bob")
    box.after(31)
    box.after(31)
    assert set(sent) <= box.inbox("bob").keys()
    box.flush()


def one_waits_longer_than_the_archive_keeps(box: Box) -> None:
    """Its original stays, those of many days after it went."""
    box.restart()
    box.send("alice", "TO: bob\nNOT-BEFORE: 60d\n\nlater")
    for _ in range(12):
        box.take("bob", box.send("alice", "TO: bob\n\ntoday"))
        box.flush()
        box.clock.advance(DAY_S)
        box.restart()
    box.stop()
    retention = RetentionSettings(archive_days=5)
    run_retention(box.home, Config(retention=retention), box.clock)
    assert len(list(box.path("archive").iterdir())) == 6
    box.path("config.json").write_text(json.dumps({"retention": {"archive_days": 5}}))


def its_ledger_was_made_again(box: Box) -> None:
    """One waited for its time; nothing but audit_log has known it."""
    box.send("alice", "TO: bob\nNOT-BEFORE: 10m\n\nlater")
    box.send("alice", "TO: bob\n\nnow")
    box.after(600)
    box.flush()
    box.stop()
    box.path("ledger.db").unlink()
    box.clock.advance(60)
    box.open()
    box.tick()


def the_machine_slept_for_days(box: Box) -> None:
    """Whose mail waits was not there either, and had minutes before and after."""
    box.send("alice", "TO: bob\n\nuntil Monday")
    box.send("alice", "TO: carol\nKIND: query\n\nwhich branch?")
    shown = box.send("alice", "TO: carol\n\nas a hook shows it")
    offered = OfferChange(shown, "carol", "claude:1", 1, OFFERED, "Stop", box.clock.now_ns())
    with box.ledger.transaction():
        box.ledger.offers.change([offered])
    box.after(20)
    box.clock.jump(3 * DAY_S)
    box.after(60)
    box.kill()


def its_journal_was_pruned_within_a_batch(box: Box) -> None:
    """Messages of one instant: of the first ones the journal has no record any more."""
    box.send_many(40, flush_every=10)
    assert box.events.journal.first > 0


def a_start_whose_clock_was_ahead_completed_it(box: Box) -> None:
    """An hour, until the time service had set it."""
    box.send("alice", "TO: bob\n\nhi")
    box.stop()
    box.path("ledger.db").unlink()
    box.clock.jump(3600)
    box.open()
    box.tick()
    box.clock.jump(-3600)
    box.send("alice", "TO: bob\n\nthere")
    box.flush()


def a_power_cut_took_an_original(box: Box) -> None:
    """It is written again from the store, in other spelling than its sender's."""
    sent = box.send("alice", "to:  bob \n\nhi")
    box.tick()
    original = box.path(box.row(sent)["file_path"])
    box.kill()
    original.write_bytes(b"")
    box.boot = "boot-2"
    box.open()
    box.tick()
    assert original.read_bytes().startswith(b"TO: bob\n")
    box.flush()


def no_relay_ran_until_it_was_delivered(box: Box) -> None:
    """Killed before the commit; the machine was started again after an hour."""
    box.send("alice", "TO: carol\n\nhi")
    box.flush()
    with killed_in(EventLog, "commit"):
        box.send("alice", "TO: bob\n\nhi")
    box.kill()
    box.clock.advance(3600)
    box.open()
    box.after(5)
    assert box.bodies("bob") == ["hi"]


def it_was_cancelled_as_it_rolled(box: Box) -> None:
    """The archive was written a moment before, and has it as delivered."""
    sent = [box.send("alice", f"TO: bob\n\n{number}") for number in range(20)]
    box.flush()
    box.clock.advance(DAY_S)
    for _ in range(100):
        if box.store.state.evicting:
            break
        box.tick()
    box.command("alice", "message.cancel", f"ID: {sent[-1]}")
    assert box.states(sent[-1]) == {"bob": "expired"}
    box.tick(20)
    box.flush()
    assert sent[-1] not in box.stored()


CASES = {
    one.live.__name__: one
    for one in (
        Case(one_letter_of_two_is_discarded, "dead_letters reconcile", after_s=8 * DAY_S),
        Case(no_relay_ran_for_an_hour, "acks"),
        Case(the_clock_was_ahead, "acks"),
        Case(its_sender_gave_hours, "threads acks"),
        Case(its_time_has_not_come, "threads acks reconcile"),
        Case(it_was_taken_back, "duplicates reconcile"),
        Case(the_mailbox_went_with_what_had_rolled, "reconcile duplicates", config=SEES_ALL),
        Case(the_mailbox_went_with_what_its_channel_keeps_no_longer, "reconcile"),
        Case(the_machine_slept_for_days, "agents threads acks"),
        Case(its_journal_was_pruned_within_a_batch, "reconcile acks", config=KEEP_LITTLE),
        Case(a_start_whose_clock_was_ahead_completed_it, "reconcile acks", after_s=60),
        Case(a_power_cut_took_an_original, "reconcile integrity"),
        Case(no_relay_ran_until_it_was_delivered, "latency ordering reconcile"),
        Case(it_was_cancelled_as_it_rolled, "reconcile"),
        Case(its_ledger_was_made_again, "ordering latency reconcile"),
        Case(one_waits_longer_than_the_archive_keeps, "reconcile integrity"),
    )
}


@pytest.mark.parametrize("name", CASES)
def test_of_a_sound_home_nothing_is_said(
    name: str, make_box: Callable[..., Box], tmp_path: Path
) -> None:
    case = CASES[name]
    box = make_box("alice", "bob", "carol", config=case.config)
    case.live(box)
    assert found(box, tmp_path / "look", case) == {}
