"""Kills before the effects of a piece of work, planned so that each distinct effect is met once.

An effect is a call that ``fsio.fault`` announces, the begin, the COMMIT or the end of a
transaction, or a start or a signal of a process. Two effects are the same if the operation, the
kind of file and the stack of calls that leads there are the same: the second of two recipients'
files, say, is written by the same lines as the first. ``firsts`` and ``lasts`` choose one of each,
and a suite that kills before all of these asserts that it did.
"""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from relay.base import fsio
from relay.ledger.ledger import Ledger

_PROJECT = Path(__file__).resolve().parent.parent
_FOLLOWED = (f"{_PROJECT / 'relay'}/", f"{_PROJECT / 'tests' / 'fakes' / '__init__.py'}")
_AGENTS = re.compile(r"(?<=/)(alice|bob|carol|operator)(?=/|$)")
_NUMBERS = re.compile(r"[0-9a-f-]*[0-9][0-9a-f-]*")


class Killed(BaseException):
    """SIGKILL: nothing catches it, nothing is cleaned up by it."""


class Effect(NamedTuple):
    """One effect of the work, without what differs from one file of a kind to the next."""

    operation: str
    kind: str
    stack: tuple[tuple[str, int], ...]  # file and line, the innermost first


def effect(operation: str, name: str = "", root: Path | str = "") -> Effect:
    """The effect that is about to happen, as seen from the function that was called for it."""
    frame = sys._getframe(1)
    stack = []
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_followed(file):
            stack.append((file, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return Effect(operation, kind_of(name.removeprefix(str(root))), tuple(stack))


@functools.cache
def _is_followed(file: str) -> bool:
    return file.startswith(_FOLLOWED)


def kind_of(path: str) -> str:
    """A path below the home without its numbers, and without the agent whose file it is."""
    return _NUMBERS.sub("#", _AGENTS.sub("*", path))


def firsts(effects: Sequence[Effect]) -> list[int]:
    """The number of the first of each distinct effect; they are counted from 1."""
    found: dict[Effect, int] = {}
    for number, one in enumerate(effects, 1):
        found.setdefault(one, number)
    return sorted(found.values())


def lasts(effects: Sequence[Effect]) -> list[int]:
    """The number of the last of each distinct effect."""
    return sorted({one: number for number, one in enumerate(effects, 1)}.values())


@contextlib.contextmanager
def killed_in(owner: object, function: str) -> Iterator[None]:
    """Leave the block where it calls this function of a class, a module or an object."""

    def kill(*_: object, **__: object) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(owner, function, kill)
        yield


class Axe:
    """Falls before the n-th effect; records all of them until then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.effects: list[Effect] = []
        self.falls_at = 0  # never
        self.fell_at: Effect | None = None
        self._root = root
        monkeypatch.setattr(fsio, "fault", self.step)
        transaction = Ledger.transaction

        @contextlib.contextmanager
        def recorded(ledger: Ledger) -> Iterator[None]:
            self.step("begin")
            with transaction(ledger):
                yield
                self.step("commit")
            self.step("committed")

        monkeypatch.setattr(Ledger, "transaction", recorded)

    def step(self, operation: str = "process", name: str = "") -> None:
        """One effect is about to happen."""
        if self.fell_at is not None:
            return
        self.effects.append(effect(operation, name, self._root))
        if len(self.effects) == self.falls_at:
            self.fell_at = self.effects[-1]
            raise Killed


def killed_on_a_copy(
    of: Path, where: Path, number: int, work: Callable[[], object]
) -> list[Effect]:
    """Do some work on a copy of a folder, killed at its n-th effect, 0: never; the effects."""
    shutil.rmtree(where, ignore_errors=True)
    shutil.copytree(of, where)
    with pytest.MonkeyPatch.context() as patch:
        axe = Axe(patch, where.parent)
        axe.falls_at = number
        with contextlib.suppress(Killed):
            work()
    return [found._replace(kind="") for found in axe.effects]  # the same lines write each table
