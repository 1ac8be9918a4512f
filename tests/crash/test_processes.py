"""Killed between any two effects of a spawn, an end, a restart and a release: the same end.

Never two processes of a name, each thing said once, no intent left open, and no value of ENV
anywhere but in ``run/``. Starts and signals are effects as well; what the killed relay started
lives on, as the system's processes do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.box import Box
from tests.crash.plays import Play
from tests.process_support import ProcessBox

SECRET = "hunter2"
REQUEST, RELEASE = "1000000001-01", "1000000002-02"


def drop_spawn(box: ProcessBox) -> None:
    text = f"NAME: w\nCLI: sh\nCWD: {box.cwd}\nENV: A=1,B={SECRET}\nRESTART: on-failure\nPROMPT: go"
    box.drop("operator", f"KIND: spawn\n\n{text}", f"{REQUEST}.msg")


def nothing(box: ProcessBox) -> None:
    box.tick()


def running(box: ProcessBox) -> None:
    drop_spawn(box)
    box.tick(2)
    box.flush()
    assert box.running


def ended(box: ProcessBox) -> None:
    running(box)
    box.spawner.end(1, "bye")


def stubborn(box: ProcessBox) -> None:
    running(box)
    box.running.dies_of = (9,)


def spawn(box: ProcessBox) -> None:
    drop_spawn(box)
    box.tick(2)
    box.flush()


def restart(box: ProcessBox) -> None:
    box.after(0)
    box.after(1.1)


def release(box: ProcessBox) -> None:
    box.drop("operator", "KIND: release\nNAME: w\nREASON: done\n\n", f"{RELEASE}.msg")
    box.tick(2)
    box.after(5.1)
    box.after(0.1)
    box.flush()


def refused(box: ProcessBox) -> None:
    box.drop("alice", f"KIND: spawn\nENV B={SECRET}\nNAME: w\n\ngo", f"{REQUEST}.msg")
    box.drop("alice", f"KIND: spawn\nENV: B={SECRET}\nNAME: w\n\ngo", "hello.msg")
    text = f"KIND: spawn\nENV: B={SECRET}\nNAME: w\nCLI: sh\n\ngo"
    box.drop("alice", text, f"{RELEASE}.msg")
    box.tick(2)
    box.flush()
    box.drop("alice", text, f"{RELEASE}.msg")  # once more: a duplicate
    box.tick(2)


def cannot(box: ProcessBox) -> None:
    box.spawner.refuses = "there is no program sh"


def can(box: ProcessBox) -> None:
    box.spawner.refuses = ""


def check_answered_once(box: ProcessBox) -> None:
    (answer,) = box.said(about=REQUEST)
    if answer.startswith("nack"):  # said is said: it is not started after that
        assert (box.spawner.processes, box.process().state) == ([], "failed")
        assert box.specs() == []
    else:
        assert (len(box.spawner.running()), box.process().state) == (1, "starting")


def check_spawned(box: ProcessBox) -> None:
    (process,) = box.spawner.processes
    assert process.code is None and process.spec.env == {"A": "1", "B": SECRET}
    assert box.said() == [f"ack completed started w, pid {process.pid.number}"]
    assert (box.process().state, box.process().pid) == ("starting", process.pid.number)


def check_restarted(box: ProcessBox) -> None:
    first, second = box.spawner.processes
    assert (first.code, second.code) == (1, None)
    assert second.spec.env == {"A": "1", "B": SECRET}
    said = box.said(about=REQUEST)
    assert said[0] == f"ack completed started w, pid {first.pid.number}"
    assert said[1] in (
        "notification w exited with code 1; it will be restarted in 1 s",
        "notification w ended, its exit code is not known; it will be restarted in 1 s",
    )
    assert said[2:] == [f"notification w was restarted, pid {second.pid.number}"]
    assert (box.process().restarts, box.process().pid) == (1, second.pid.number)


def check_released(box: ProcessBox) -> None:
    (process,) = box.spawner.processes
    assert process.code is not None
    (answer,) = box.said(about=RELEASE)
    assert answer.startswith("ack completed released w: it ")
    assert [text.partition(" ")[0] for text in box.said(about=REQUEST)] == ["ack"]
    assert (box.process().state, box.process().pid) == ("released", None)
    assert box.specs() == []


def check_refused(box: ProcessBox) -> None:
    assert sorted(text.partition(":")[0] for text in box.said("alice")) == [
        "nack not delivered",
        "nack not delivered",
        "nack spawn is for lead, operator (spawn.allow_from in config.json), not for alice",
    ]
    assert len([*box.path("archive").glob("*/alice/rejected/*")]) == 2
    assert box.spawner.processes == [] and box.specs() == []
    assert box.outbox("alice") == []


class Scenario(NamedTuple):
    """What is there before, what is interrupted, how it ends, and what happens in between."""

    before: Callable[[ProcessBox], object]
    act: Callable[[ProcessBox], None]
    check: Callable[[ProcessBox], None]
    meanwhile: Callable[[ProcessBox], object] = lambda box: None


SCENARIOS = {
    "spawn": Scenario(nothing, spawn, check_spawned),
    "restart": Scenario(ended, restart, check_restarted),
    "release": Scenario(running, release, check_released),
    "kill": Scenario(stubborn, release, check_released),
    "refused": Scenario(nothing, refused, check_refused),
    "fails": Scenario(cannot, spawn, check_answered_once, can),
}


def leaks(box: ProcessBox) -> list[str]:
    """Files with the secret in them."""
    return [
        str(path.relative_to(box.root))
        for path in box.root.rglob("*")
        if path.is_file() and SECRET.encode() in path.read_bytes()
    ]


def kill_before_each(tmp_path: Path, scenario: Scenario, *, lets_go: bool) -> int:
    """Play it whole, and killed before each distinct effect; how many effects it has."""

    def before(root: Path) -> Box:
        root.mkdir()
        box = ProcessBox(root / "home", "alice")
        box.spawner.lets_go = lets_go
        scenario.before(box)
        return box

    def meanwhile(box: ProcessBox) -> None:
        box.spawner.adopt_all()
        scenario.meanwhile(box)
        box.clock.advance(1)

    def check(box: ProcessBox) -> None:
        for _ in range(4):
            box.after(5.2)
        box.flush()
        scenario.check(box)
        assert box.open_intents() == []
        assert {path.partition("/")[0] for path in leaks(box)} <= {"run"}
        assert SECRET not in str(box.log)
        with contextlib.suppress(ValueError):
            box.spawner.end(0)

    return Play(before, scenario.act, check, meanwhile).kill_before_each(tmp_path, taking=False)


@pytest.mark.parametrize(
    ("name", "lets_go"),  # True: a program that closes the lock is not doubled either
    [*((name, False) for name in SCENARIOS), ("spawn", True), ("restart", True)],
)
def test_killed_before_any_effect_it_ends_the_same(
    tmp_path: Path, name: str, lets_go: bool
) -> None:
    assert kill_before_each(tmp_path, SCENARIOS[name], lets_go=lets_go) > 8
