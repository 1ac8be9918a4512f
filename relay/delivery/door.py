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
from relay.delivery.intake import Parsed, ParseResult
from relay.delivery.signing import SigningKeys
from relay.delivery.work import WorkItem
from relay.ledger.attachments import AttachmentProblem, AttachmentVerifier, set_aside

RECHECK_NS = 50 * NS_PER_MS  # while an attachment is read: a gigabyte takes a second or two


class Screened(NamedTuple):
    """Looks that are complete, and those whose attachments are still being read."""

    ready: list[ParseResult]
    waiting: list[ParseResult]


class Validator:
    """Asks it of every message. Owned by the loop."""

    def __init__(
        self,
        keys: SigningKeys,
        roster: Roster,
        limits: LimitSettings,
        clock: Clock,
        log: Callable[..., object],
    ) -> None:
        self._keys = keys
        self._roster = roster
        self._clock = clock
        self._log = log
        self._verifier = AttachmentVerifier(limits)
        self._invalid: dict[
            FileKey, tuple[str, AttachmentProblem]
        ] = {}  # of this batch: reference, what it is
        self._to_set_aside: list[str] = []  # what is to be set aside, once its senders are told

    def validate(self, dirs: Dirs, looks: list[ParseResult]) -> Screened:
        """Learn the senders' keys, and leave out what waits for its attachments."""
        senders = dict.fromkeys(look.file.agent for look in looks)
        self._keys.register_new(
            (name, self._roster.meta(dirs, name).public_key) for name in senders
        )
        self._invalid.clear()
        waiting = [look for look in looks if not self._is_read(dirs, look)]
        if not waiting:
            return Screened(looks, waiting)
        return Screened([look for look in looks if look not in waiting], waiting)

    def _is_read(self, dirs: Dirs, look: ParseResult) -> bool:
        """False while an attachment is not read yet; what is wrong with one is kept."""
        if not isinstance(look, Parsed) or not look.message.attachments:
            return True
        try:
            for reference in dict.fromkeys(look.message.attachments):
                found = self._verifier.check(dirs, reference, look.file.agent)
                if isinstance(found, AttachmentProblem):
                    self._invalid[look.file.key] = (reference, found)
                    return True
                if not found:
                    return False
        except OSError as exc:
            self._log(
                f"Cannot read an attachment of {look.file.path}, trying again: {exc}",
                action="look_failed",
                level="warning",
                agent=look.file.agent,
            )
            return False
        return True

    def refuse_invalid(self, work: WorkItem, look: Parsed) -> None:
        """Say in the work why it is not taken, if it is not."""
        # A message whose ENV values were taken out was signed with them in it.
        signed = look.original or look.message
        fault = self._keys.check(work.agent, work.message_id, signed)
        if fault is not None:
            self._fail(work, fault.kind, work.file.path, fault.reason)
            return
        if work.file.key in self._invalid:
            reference, wrong = self._invalid[work.file.key]
            self._fail(work, wrong.kind, _path(reference), wrong.reason)
            if wrong.kind is not None:
                self._to_set_aside.append(reference)

    def _fail(self, work: WorkItem, kind: IncidentKind | None, path: str, reason: str) -> None:
        work.failure = reason
        if kind is not None:
            work.incidents.append(Incident(kind, work.agent, path, reason))

    def after_commit(self, dirs: Dirs, batch: Iterable[WorkItem]) -> None:
        """The senders are told: what is wrong leaves its place, keys that changed count."""
        if any(work.key is not None for work in batch):
            self._keys.load()
        aside, self._to_set_aside = self._to_set_aside, []
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
