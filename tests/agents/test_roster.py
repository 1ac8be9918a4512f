"""The roster: who is an agent, by the directories that there are."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.agents import roster as roster_module
from relay.agents.roster import Roster
from relay.base.home import Home
from relay.base.watcher import NOTHING, OutboxEvent, Watcher, make_watcher


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Home]:
    with Home.create(str(tmp_path / "home"), b"{}") as home:
        home.make_agent("alice")
        home.make_agent("bob")
        yield home


@pytest.fixture
def watcher(opened: Home) -> Iterator[Watcher]:
    made = make_watcher(opened, "auto")
    yield made
    made.close()


@pytest.fixture
def roster(opened: Home, watcher: Watcher) -> Roster:
    made = Roster(opened, watcher, "", lambda *_, **__: None)
    assert made.refresh().appeared == ["alice", "bob", "operator"]
    return made


def test_an_agent_whose_directory_went_is_gone_once(
    opened: Home, watcher: Watcher, roster: Roster
) -> None:
    held = watcher.watches_held
    shutil.rmtree(opened.path("agents", "bob"))
    assert roster.refresh().gone == ["bob"]
    assert roster.agents == {"alice", "operator"} and not watcher.watches("bob")
    assert watcher.watches_held == held - 2
    again = roster.refresh()
    assert (again.gone, again.appeared) == ([], [])


def test_another_directory_in_the_place_of_one_is_an_agent_that_appears(
    opened: Home, watcher: Watcher, roster: Roster
) -> None:
    bob = Path(opened.path("agents", "bob"))
    bob.rename(bob.with_name("bob.before"))
    opened.make_agent("bob")
    assert roster.refresh().appeared == ["bob"]
    assert roster.refresh().appeared == [] and watcher.watches("bob")
    while watcher.wait(0) != NOTHING:
        pass  # what was made until now
    (bob / "outbox" / "1-a.msg").write_text("TO: alice\n\nhi")
    assert watcher.wait(10**9).touched == (OutboxEvent("bob", "1-a.msg", renamed=False),)


def test_that_nobody_is_the_lead_is_believed_for_twenty_looks(
    opened: Home, roster: Roster, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, spent_s = [0.0], [0.0]

    def thread_time() -> float:  # a look takes half a second, as where agents are many
        spent_s[0] += 0.5
        return spent_s[0]

    monkeypatch.setattr(roster_module.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(roster_module.time, "thread_time", thread_time)
    assert roster.lead() is None
    Path(opened.path("agents", "bob", "meta.json")).write_text('{"role": "lead"}')
    now_s[0] = 9.9
    assert roster.lead() is None and spent_s[0] == 1.0  # nothing was looked at
    now_s[0] = 10
    assert roster.lead() == "bob"
