"""A relay that runs is asked to move its journal's segments: by messages, by `relay journal`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relay.base.config import Config, JournalSettings
from relay.base.errors import StoreFull
from relay.base.home import BASE, STORE
from relay.daemon.home_journal import covered_offset
from relay.delivery.apply import PlanApplier
from tests.box import INLINE, Box
from tests.fakes import IdleExecutor
from tests.procs import Relay, home_of, relay, rows_of, until

SMALL = Config(journal=JournalSettings(segment_bytes=4096, compress_segments=False))

BY_HAND = INLINE._replace(tiers=IdleExecutor())  # the tiers' work is in ``steps``

pytestmark = [
    pytest.mark.box("alice", "bob", config=SMALL, executors=BY_HAND),
    pytest.mark.usefixtures("no_patience"),
    pytest.mark.shows("journal 5.8"),
]


@pytest.fixture
def box(box: Box) -> Box:
    """Some sealed segments, four checkpoints."""
    box.send_many(40, flush_every=10)
    return box


def ask(box: Box, body: str, sender: str = "operator") -> str:
    """What the relay answers to a command."""
    sent = box.command(sender, body)
    answers = [m.body for m in box.inbox(sender).values() if m.headers.get("RE") == sent]
    assert len(answers) == 1
    return answers[0].decode()


def steps(box: Box) -> list[str]:
    """Everything that the tiers have to do."""
    done = []
    while (line := box.tiers.run_next()) is not None:
        done.append(line)
    return done


def residency(box: Box) -> list[int]:
    return [int(entry.residency) for entry in box.tiers.entries() if entry.sealed]


def test_seal_is_done_with_the_turn_that_takes_it(box: Box) -> None:
    journal = box.events.journal
    assert journal.manifest.entries()[-1].base_offset < journal.durable
    assert ask(box, "journal.seal") == (
        "completed journal.seal started; `relay journal status` shows the result\n"
    )
    assert journal.manifest.entries()[-1].base_offset == journal.durable == journal.end
    assert box.tiers.run_next() is None
    box.send("alice", "TO: bob\n\non it goes")
    assert box.bodies("bob")[-1] == "on it goes"


def test_the_others_wait_for_the_tiers_thread(box: Box) -> None:
    assert len(residency(box)) > 3
    assert "started; `relay journal status`" in ask(box, "journal.compress\nSEGMENTS: 1 2")
    assert set(residency(box)) == {1}  # the loop has moved nothing
    assert box.tiers.due_ns() == 0
    assert steps(box) == ["command: compressed segment 1", "command: compressed segment 2"]
    ask(box, "journal.compress")
    ask(box, "journal.evict\nSEGMENTS: 0")
    done = steps(box)
    assert done[0] == "command: compressed segment 0"
    assert done[-1] == "command: evicted segment 0"
    assert residency(box)[:2] == [2, 3]
    ask(box, "journal.hydrate\nSEGMENTS: 0")
    assert steps(box) == ["command: hydrated segment 0"]


def test_what_fails_is_said_in_the_log_and_the_next_is_done(box: Box) -> None:
    ask(box, "journal.compress\nSEGMENTS: 99")
    ask(box, "journal.upload\nSEGMENTS: 0")
    ask(box, "journal.compress\nSEGMENTS: 0")
    steps(box)
    told = [line["event"].removeprefix("The store: ") for line in box.log]
    said = [line for line in told if line.startswith("command")]
    assert said[0].startswith("command failed: segment 99 is not in the stream; `relay")
    assert said[1].startswith("command: segment 0: a segment is in Tier 2, and no object store")
    assert residency(box)[0] == 3


def test_prune_keeps_the_base_first(box: Box) -> None:
    assert not box.path(BASE).exists()
    ask(box, "journal.prune\nKEEP_BYTES: 0")
    done = steps(box)
    assert done[:2] == ["command: pruned segment 0", "command: pruned segment 1"]
    kept = covered_offset(str(box.path(BASE)))
    assert 0 < box.events.journal.first <= kept
    assert kept == covered_offset(str(box.path(STORE + ".prev")))


def test_prune_lets_nothing_go_that_no_base_covers(box: Box) -> None:
    data = box.path(STORE + ".prev").read_bytes()
    box.path(STORE + ".prev").write_bytes(data[:-7])
    ask(box, "journal.prune\nKEEP_BYTES: 0")
    assert steps(box) == []
    assert not box.path(BASE).exists() and box.events.journal.first == 0


def test_an_order_lets_retention_go_no_further_than_a_base(box: Box) -> None:
    box.kill()
    box.config = Config(
        journal=JournalSettings(segment_bytes=4096, compress_segments=False, keep_age_s=1)
    )
    whole = box.path(STORE + ".prev").read_bytes()
    box.path(STORE + ".prev").write_bytes(whole[:-7])
    box.open()
    ask(box, "journal.compress\nSEGMENTS: 3")
    assert steps(box) == ["command: compressed segment 3"]
    assert box.events.journal.first == 0 and not box.path(BASE).exists()
    box.path(STORE + ".prev").write_bytes(whole)
    ask(box, "journal.compress\nSEGMENTS: 4")
    assert steps(box)[1].startswith("prune segment 0")
    assert box.events.journal.first <= covered_offset(str(box.path(BASE)))
    box.close()


def test_prune_without_a_word_of_what_to_keep_deletes_nothing(box: Box) -> None:
    ask(box, "journal.prune")
    assert steps(box) == [
        "command failed: no limit is set for the size or age of the journal;"
        " set journal.keep_age_s or journal.keep_mib in config.json, or give an option"
    ]


def test_a_command_that_is_decided_twice_is_one_order(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StoreFull("too many messages are active")

    with monkeypatch.context() as patch:
        patch.setattr(PlanApplier, "_store_own", full)  # of its reply
        sent = box.command("operator", "journal.seal")
    box.after(2)
    assert box.states(sent) == {"__orchestrator__": "read"}
    entries = box.events.journal.manifest.entries()
    assert entries[-2].sealed
    box.tick(3)
    assert box.events.journal.manifest.entries() == entries


# -- a relay in a process of its own -------------------------------------------------------


def test_the_command_line_asks_the_relay_that_runs(tmp_path: Path) -> None:
    tier2 = tmp_path / "tier2"
    tier2.mkdir()
    journal = {"compress_segments": False, "objects": str(tier2), "keep_mib": 1024}
    home = home_of(tmp_path / "home", "alice", "bob", checkpoint_ms=5000, journal=journal)
    with Relay(home):
        assert relay("send", "--as", "alice", "bob", "hi", home=home).returncode == 0
        asked = relay("journal", "seal", home=home)
        shown = f"`relay --home {home} journal status` shows the result"
        assert asked.stdout == f"journal.seal started; {shown}\n"
        until(lambda: rows_of("journal", "status", home=home)[0]["sealed"])
        done = relay("journal", "move", "--to", "2", "--copy", "0", "--json", home=home)
        assert json.loads(done.stdout)["answer"].startswith("journal.upload started")
        until(lambda: rows_of("journal", "status", home=home)[0]["tiers"] == [0, 1, 2])
        assert list(tier2.rglob("*.seg.zst"))

        missing = relay("journal", "move", "--to", "1", "9", home=home)
        assert missing.returncode == 1 and "segment 9 is not in the stream" in missing.stderr
        other = relay("journal", "move", "--to", "1", "--as", "bob", home=home)
        assert other.returncode == 6 and "is for operator and the lead alone" in other.stderr
        named = relay("journal", "move", "--to", "2", "--objects", "/elsewhere", home=home)
        assert named.returncode == 2 and "journal.objects of config.json" in named.stderr

        before = rows_of("journal", "status", home=home)
        plan = relay("journal", "prune", "--keep-bytes", "0B", "--dry-run", home=home)
        assert plan.returncode == 0, plan.stderr
        assert rows_of("journal", "status", home=home) == before and not (home / BASE).exists()


def test_a_store_that_is_away_is_seen_until_it_is_back(tmp_path: Path) -> None:
    away = tmp_path / "not-mounted"
    journal = {"compress_after_s": 0, "objects": str(away)}
    home = home_of(tmp_path / "home", "alice", "bob", checkpoint_ms=5000, journal=journal)
    with Relay(home):
        assert relay("send", "--as", "alice", "bob", "hi", home=home).returncode == 0
        assert relay("journal", "seal", home=home).returncode == 0
        until(lambda: "the journal's tiers: " in relay("status", home=home).stdout)
        (told,) = rows_of("status", home=home)[0]["tiers_waiting"]
        assert told.startswith("retry in ") and f"upload segment 0: not in {away} yet" in told
        done = relay("doctor", home=home)
        assert done.returncode == 3 and told.partition(": ")[2] in done.stdout
        assert "the relay keeps retrying" in done.stdout

        away.mkdir()
        until(lambda: rows_of("journal", "status", home=home)[0]["tiers"] == [0, 1, 2])
        until(lambda: relay("doctor", home=home).returncode == 0)
