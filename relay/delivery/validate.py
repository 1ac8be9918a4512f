"""Validation of parsed files: attachments, signatures, and the ledger row with the same id.

Attachments must match their names. A signature must be of the key registered for the sender:

    meta.json names a key, none is registered   registered and logged
    meta.json names another key                 ignored and logged once, until it is confirmed
    signed with another key                     refused
    not signed, or no key is registered         refused if security.require_signatures is set

A file is then compared with the ledger:

    no row                            new: inserted and claimed
    pending                           claimed again, with the facts of the file as read last
    same agent, same checksum         a duplicate: archived, not delivered again
    another agent, or other content   refused: the id is taken
    failed, its file still here       answered now: a crash came before the answer

A refused file gets a nack, `rejected/` and a row of ``security_events``. Source:
relay-file-system.txt 3.4, 5.2; FORMATS 2, "Signatures", and 4; DESIGN "How a message flows".
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from typing import NamedTuple

from relay.acomm.model import Origin
from relay.agents.roster import Roster
from relay.base.checksums import SHA256_PREFIX
from relay.base.clock import NS_PER_MS, Clock
from relay.base.config import LimitSettings
from relay.base.crypto import key_id, verify
from relay.base.errors import UnsafePath
from relay.base.home import Dirs
from relay.base.incidents import Incident, IncidentDedup, IncidentKind
from relay.base.message import SIGNATURE_PREFIX, MessageFile
from relay.base.names import shown
from relay.delivery import file_ops
from relay.delivery.intake import OUTBOX, Malformed, Parsed, ParseResult
from relay.delivery.intake_queue import FileKey
from relay.delivery.work import PUBLIC_KEY, WorkItem
from relay.engine.commstore import CommStore
from relay.ledger import FileFacts, Ledger, MessageRow
from relay.ledger.attachments import AttachmentProblem, AttachmentVerifier, set_aside

RECHECK_NS = 50 * NS_PER_MS  # while an attachment is read: a gigabyte takes a second or two


class Screened(NamedTuple):
    """Files ready to be planned, and those whose attachments are being read."""

    ready: list[ParseResult]
    waiting: list[ParseResult]


class Validator:
    """Checks attachments and signatures. Owned by the loop."""

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
        self._to_set_aside: list[str] = []  # once their senders are told

    def validate(self, dirs: Dirs, looks: list[ParseResult]) -> Screened:
        """Register new keys of the senders, and separate files that wait for their attachments."""
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
        """False while an attachment is being read; an invalid one is remembered."""
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
                action="read_failed",
                level="warning",
                agent=look.file.agent,
            )
            return False
        return True

    def refuse_invalid(self, work: WorkItem, look: Parsed) -> None:
        """Refuse the work if its signature or an attachment is invalid."""
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
        """Set invalid attachments aside and reload changed keys, once the senders are told."""
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


class Recorder:
    """Inserts and claims ledger rows. Owned by the loop."""

    def __init__(self, ledger: Ledger, clock: Clock, log: Callable[..., object]) -> None:
        self._ledger = ledger
        self._clock = clock
        self._log = log

    def claim(self, dirs: Dirs, looks: list[ParseResult]) -> list[tuple[WorkItem, ParseResult]]:
        """Insert rows for new files and claim them; returns work items in order of discovery.

        Every item that has a row is claimed when this returns.
        """
        now = self._clock.now_ns()
        ids = [look.file.message_id for look in looks if look.file.message_id]
        admitted: list[tuple[WorkItem, ParseResult]] = []
        fresh: dict[str, FileFacts] = {}
        changed: list[FileFacts] = []
        with self._ledger.transaction():
            rows = self._ledger.rows(ids)
            for order, look in enumerate(looks):  # a nanosecond apart: in order of discovery
                work, facts = self._classify(dirs, look, rows, fresh, now + order)
                if work is None:
                    continue
                admitted.append((work, look))
                if facts is not None and work.is_repeat:
                    changed.append(facts)
                elif facts is not None:
                    fresh[facts.message_id] = facts
            self._ledger.add(list(fresh.values()))
            self._ledger.update_facts(changed)
            mine = self._ledger.claim(work.message_id for work, _ in admitted if work.has_row)
        return [
            (work, look)
            for work, look in admitted
            if work.message_id in mine or not work.has_row or work.failure
        ]

    def _classify(
        self,
        dirs: Dirs,
        look: ParseResult,
        rows: dict[str, MessageRow],
        fresh: dict[str, FileFacts],
        now: int,
    ) -> tuple[WorkItem | None, FileFacts | None]:
        """Classify one parsed file against the ledger row with the same id."""
        found = look.file
        message_id = found.message_id or ""
        work = WorkItem(found, message_id, now)
        work.redacted = look.redacted
        if isinstance(look, Malformed):
            work.failure, work.is_unsafe = look.reason, look.unsafe
            if look.incident is not None:
                one = Incident(look.incident, found.agent, found.path, look.reason)
                work.incidents.append(one)
        row = rows.get(message_id)
        facts = _facts(look, message_id, row.discovered_at if row else now)
        # A file name may be invalid text; events are valid text.
        path = found.path if message_id else shown(found.path)
        work.origin = Origin(facts.agent_name, path, *facts[3:])
        if found.place != OUTBOX:  # never sent: its id stays free
            work.has_row = False
            work.discovered_at = found.mtime_ns
            return work, None
        if not message_id or message_id in fresh or (row and row.agent_name != found.agent):
            work.has_row = False
            work.failure = work.failure or "its id is taken: every message needs a unique name"
            work.discovered_at = found.mtime_ns
            return work, None
        if row is None:
            return work, facts
        work.discovered_at = row.discovered_at
        work.is_repeat = True
        if row.status == "pending":
            return work, facts
        return self._classify_known(dirs, look, row, work), None

    def _classify_known(
        self, dirs: Dirs, look: ParseResult, row: MessageRow, work: WorkItem
    ) -> WorkItem | None:
        """Classify a file whose row is no longer pending."""
        if row.status == "processing":
            return None  # another file was put in its place meanwhile: seen again once it is done
        found = look.file
        known = (row.file_path, row.file_size, row.file_mtime_ns, row.file_inode)
        is_its_file = known == (found.path, found.size, found.mtime_ns, found.inode)
        if row.status == "failed" and is_its_file:
            work.failure = row.last_error or "it failed before"  # a crash came before the nack
            return work
        if isinstance(look, Parsed) and row.status != "failed" and _says_the_same(look, row):
            self._archive_duplicate(dirs, look, row)
            return None
        work.has_row = False
        work.failure = (
            f"its id is taken by a message that is {row.status}: every message needs a unique name"
        )
        work.discovered_at = look.file.mtime_ns
        return work

    def _archive_duplicate(self, dirs: Dirs, look: ParseResult, row: MessageRow) -> None:
        """Archive a duplicate; it is not delivered again."""
        found = look.file
        # A crash, or a fault, came before its archive; or recovery found the outbox out of reach.
        is_late = row.status == "completed" or row.file_path == found.path
        day_ns = row.discovered_at if is_late else self._clock.now_ns()
        kind = "" if is_late else file_ops.DUPLICATES
        try:
            path = file_ops.archive(
                dirs, found.agent, found.file_name, day_ns, kind, redacted=look.redacted
            )
        except (OSError, UnsafePath) as exc:
            self._log(
                f"Could not archive {found.path}, the next scan tries again: {exc}",
                action="archive_failed",
                level="warning",
                message_id=row.message_id,
            )
            return
        if is_late:
            self._ledger.archive([(row.message_id, path)])
            self._ledger.set_path([(row.message_id, path)] if path else [])
            return
        self._log(
            "Archived a duplicate, not delivered again",
            action="archive_duplicate",
            message_id=row.message_id,
            agent=found.agent,
        )


def _says_the_same(look: Parsed, row: MessageRow) -> bool:
    """True for the same content to the same recipient."""
    message = look.message
    return (look.checksum, str(message.kind), message.to) == (
        row.checksum,
        row.message_type,
        row.target,
    )


def _facts(look: ParseResult, message_id: str, now: int) -> FileFacts:
    found = look.file
    accepted = look if isinstance(look, Parsed) else None
    return FileFacts(
        message_id,
        found.agent,
        shown(found.path),
        found.size,
        found.mtime_ns,
        found.inode,
        accepted.checksum if accepted else None,
        str(accepted.message.kind) if accepted else None,
        accepted.message.to if accepted else None,
        now,
    )


class SignatureFault(NamedTuple):
    """The reason why a signature is refused."""

    kind: IncidentKind
    reason: str


class SigningKeys:
    """The registered public keys. Owned by the loop.

    A registered key stays when meta.json is gone. Signed content: relay/base/crypto.py.
    """

    def __init__(
        self,
        ledger: Ledger,
        store: CommStore,
        required: bool,
        clock: Clock,
        log: Callable[..., object],
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._required = required
        self._clock = clock
        self._log = log
        self._told = IncidentDedup()
        self._keys: dict[str, str] = {}
        self.load()

    def load(self) -> None:
        """Load the registered keys, and give their ids to the engine's channel members.

        Repeated at each start, which completes what a crash interrupted.
        """
        self._keys = self._ledger.agents.public_keys()
        ids = {name: key_id(bytes.fromhex(key)) for name, key in self._keys.items()}
        self._store.set_identities(ids)

    def register_new(self, named: Iterable[tuple[str, str | None]]) -> None:
        """Register first keys and log changed ones: (agent, the key in its meta.json)."""
        fresh: list[tuple[str, str]] = []
        incidents: list[Incident] = []
        for agent, given in named:
            key = (given or "").lower()
            known = self._keys.get(agent)
            if key == (known or "") or not PUBLIC_KEY.fullmatch(key):
                continue
            path = f"agents/{agent}/meta.json"
            if known is None:
                fresh.append((agent, key))
                detail = f"the first key of {agent} is {key}: its signatures are checked against it"
                incidents.append(Incident(IncidentKind.KEY_REGISTERED, agent, path, detail))
            else:
                detail = (
                    f"meta.json names the key {key}, but {known} is registered: it is not used "
                    f"until confirmed by operator or lead, `relay key trust {agent} {key}`"
                )
                incidents.append(Incident(IncidentKind.KEY_CHANGED, agent, path, detail))
        changed = [one for one in incidents if one.kind is IncidentKind.KEY_CHANGED]
        incidents = [one for one in incidents if one not in changed] + self._told.fresh(changed)
        if not incidents:
            return
        now = self._clock.now_ns()
        with self._ledger.transaction():
            self._ledger.agents.set_public_keys(fresh, now)
            self._ledger.agents.add_incidents(incidents, now)
        for one in incidents:
            self._log(one.detail, action=str(one.kind), level="warning", agent=one.agent)
        self.load()

    def check(self, agent: str, message_id: str, message: MessageFile) -> SignatureFault | None:
        """The reason why a signature is not accepted, or None."""
        signature = message.headers.get("SIGNATURE")
        key = self._keys.get(agent)
        if signature is None:
            if not self._required:
                return None
            return SignatureFault(
                IncidentKind.UNSIGNED,
                "it is not signed, and security.require_signatures requires it: "
                f"`relay key make {agent}`, and send with the SDK or `relay send`",
            )
        if key is None:
            if not self._required:
                return None
            return SignatureFault(
                IncidentKind.UNSIGNED,
                f"no public key of {agent} is registered, and security.require_signatures requires "
                f"one: put it into agents/{agent}/meta.json as public_key, 64 hex digits",
            )
        raw = base64.b64decode(signature.removeprefix(SIGNATURE_PREFIX))
        if verify(bytes.fromhex(key), raw, agent, message_id, message.to, message.body):
            return None
        return SignatureFault(
            IncidentKind.BAD_SIGNATURE,
            f"SIGNATURE does not match the key registered for {agent} "
            f"({key_id(bytes.fromhex(key))}), over this sender, id, TO and body",
        )
