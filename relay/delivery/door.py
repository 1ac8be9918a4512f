"""The door: what is asked of a message before anything is done with it.

Its attachments are what their names say, and it is signed as its sender's key asks for. What is
refused here is refused like any other file: a nack, `rejected/`, a row of ``security_events``.
Source: relay-file-system.txt 3.4, 5.2; FORMATS section 2, "Signatures".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from relay.agents.roster import Roster
from relay.base.checksums import SHA256_PREFIX
from relay.base.clock import NS_PER_MS, Clock
from relay.base.config import LimitSettings
from relay.base.errors import UnsafePath
from relay.base.home import Dirs
from relay.base.incidents import Incident, IncidentKind
from relay.base.outbox_file import FileKey
from relay.delivery.intake import Accepted, Look
from relay.delivery.signing import Keys
from relay.delivery.work import Work
from relay.ledger.attachments import Verifier, Wrong, set_aside

ASK_AGAIN_NS = 50 * NS_PER_MS  # while an attachment is read: a gigabyte takes a second or two


class LetIn(NamedTuple):
    """Looks that are complete, and those whose attachments are still being read."""

    looks: list[Look]
    waiting: list[Look]


class Door:
    """Asks it of every message. Owned by the loop."""

    def __init__(
        self,
        keys: Keys,
        roster: Roster,
        limits: LimitSettings,
        clock: Clock,
        log: Callable[..., object],
    ) -> None:
        self._keys = keys
        self._roster = roster
        self._clock = clock
        self._log = log
        self._verifier = Verifier(limits)
        self._wrong: dict[FileKey, tuple[str, Wrong]] = {}  # of this batch: reference, what it is
        self._aside: list[str] = []  # what is to be set aside, once its senders are told

    def let_in(self, dirs: Dirs, looks: list[Look]) -> LetIn:
        """Learn the senders' keys, and leave out what waits for its attachments."""
        senders = dict.fromkeys(look.found.agent for look in looks)
        self._keys.learn((name, self._roster.meta(dirs, name).public_key) for name in senders)
        self._wrong.clear()
        waiting = [look for look in looks if not self._is_read(dirs, look)]
        if not waiting:
            return LetIn(looks, waiting)
        return LetIn([look for look in looks if look not in waiting], waiting)

    def _is_read(self, dirs: Dirs, look: Look) -> bool:
        """False while an attachment is not read yet; what is wrong with one is kept."""
        if not isinstance(look, Accepted) or not look.message.attachments:
            return True
        try:
            for reference in dict.fromkeys(look.message.attachments):
                found = self._verifier.check(dirs, reference, look.found.agent)
                if isinstance(found, Wrong):
                    self._wrong[look.found.key] = (reference, found)
                    return True
                if not found:
                    return False
        except OSError as exc:
            self._log(
                f"Cannot read an attachment of {look.found.path}, trying again: {exc}",
                action="look_failed",
                level="warning",
                agent=look.found.agent,
            )
            return False
        return True

    def refuse(self, work: Work, look: Accepted) -> None:
        """Say in the work why it is not taken, if it is not."""
        # A message whose ENV values were taken out was signed with them in it.
        signed = look.original or look.message
        fault = self._keys.fault(work.agent, work.message_id, signed)
        if fault is not None:
            self._fail(work, fault.kind, work.found.path, fault.reason)
            return
        if work.found.key in self._wrong:
            reference, wrong = self._wrong[work.found.key]
            self._fail(work, wrong.kind, _path(reference), wrong.reason)
            if wrong.kind is not None:
                self._aside.append(reference)

    def _fail(self, work: Work, kind: IncidentKind | None, path: str, reason: str) -> None:
        work.failure = reason
        if kind is not None:
            work.incidents.append(Incident(kind, work.agent, path, reason))

    def carried_out(self, dirs: Dirs, batch: Iterable[Work]) -> None:
        """The senders are told: what is wrong leaves its place, keys that changed count."""
        if any(work.trust is not None for work in batch):
            self._keys.load()
        aside, self._aside = self._aside, []
        for reference in dict.fromkeys(aside):
            try:
                set_aside(dirs, reference)
            except (OSError, UnsafePath) as exc:
                self._log(
                    f"Could not set {_path(reference)} aside: {exc}",
                    action="set_aside_failed",
                    level="warning",
                )


def _path(reference: str) -> str:
    digest = reference.removeprefix(SHA256_PREFIX)
    return f"attachments/{digest[:2]}/{digest}"
