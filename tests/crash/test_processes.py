"""Killed between any two effects of a spawn, an end, a restart and a release: the same end.

Never two processes of a name, each thing said once, no intent left open, and no value of ENV
anywhere but in ``run/``. Each write, rename, transaction, start and signal is recorded; the relay
is killed right before each distinct one of them (``tests.kills``), the first time that it happens,
and what it started lives on, as the system's processes do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.kills import Axe, Effect, Killed, firsts
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
    """What is there before, what is interrupted, and what is so at the end."""

    before: Callable[[ProcessBox], None]
    act: Callable[[ProcessBox], None]
    check: Callable[[ProcessBox], None]
    meanwhile: Callable[[ProcessBox], None] = lambda box: None  # while no relay runs


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


def play(root: Path, scenario: Scenario, falls_at: int = 0) -> list[Effect]:
    """Kill before that effect (0: never), start again, let time go by, and look; the effects."""
    with pytest.MonkeyPatch.context() as patch:
        root.mkdir()
        box = ProcessBox(root / "home", "alice")
        scenario.before(box)
        axe = Axe(patch, box.root)
        box.spawner.step = axe.step
        axe.falls_at = falls_at
        dropped = False
        try:
            scenario.act(box)
            dropped = True
        except Killed:
            pass
        effects, axe.falls_at = list(axe.effects), 0
        if not dropped:
            box.kill()
            box.spawner.adopt_all()
            scenario.meanwhile(box)
            box.clock.advance(1)
            box.open()
        for _ in range(4):
            box.after(5.2)
        box.flush()
        scenario.check(box)
        assert box.open_intents() == []
        assert {path.partition("/")[0] for path in leaks(box)} <= {"run"}
        assert SECRET not in str(box.log)
        with contextlib.suppress(ValueError):
            box.spawner.end(0)
        box.kill()
    return effects


def kill_before_each(tmp_path: Path, scenario: Scenario) -> int:
    """Play it whole, and killed before each distinct effect; how many effects it has."""
    effects = play(tmp_path / "whole", scenario)
    killed_at = {
        play(tmp_path / f"at-{number:03d}", scenario, number)[-1] for number in firsts(effects)
    }
    assert killed_at == set(effects)
    return len(effects)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_before_any_effect_it_ends_the_same(tmp_path: Path, name: str) -> None:
    assert kill_before_each(tmp_path, SCENARIOS[name]) > 8


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["spawn", "restart"])
def test_a_program_that_closes_the_lock_is_not_doubled_either(tmp_path: Path, name: str) -> None:
    before, act, check, _ = SCENARIOS[name]

    def lets_go(box: ProcessBox) -> None:
        box.spawner.lets_go = True
        before(box)

    kill_before_each(tmp_path, Scenario(lets_go, act, check))
