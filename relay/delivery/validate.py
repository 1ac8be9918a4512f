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

A refused file gets a nack, `rejected/` and a row of ``security_events``. See
docs/states.md and docs/formats/acomm.md, "Signatures".
"""

from __future__ import annotations

import base64
from collections.abc import Iterable

from msgspec.structs import replace

from relay.agents.roster import Roster
from relay.base.clock import NS_PER_MS
from relay.base.crypto import key_id, verify
from relay.base.errors import UnsafePath
from relay.base.home import Dirs
from relay.base.incidents import Incident, IncidentDedup, IncidentKind, Refusal, RefusalCode
from relay.base.message import SIGNATURE_PREFIX, MessageFile
from relay.base.names import SHA256_PREFIX
from relay.delivery import file_ops
from relay.delivery.intake_queue import FileKey
from relay.delivery.values import OUTBOX, PUBLIC_KEY, Inbound, Part, Resources, Row
from relay.ledger import attachments
from relay.ledger.attachments import (
    AttachmentState,
    AttachmentVerifier,
    Fault,
    set_aside,
)
from relay.ledger.ledger import FileFacts, MessageRow

RECHECK_NS = 50 * NS_PER_MS  # while an attachment is read: a gigabyte takes a second or two


class Validator(Part):
    """Checks attachments and signatures."""

    def __init__(self, given: Resources, keys: SigningKeys, roster: Roster) -> None:
        super().__init__(given)
        self._keys = keys
        self._roster = roster
        self._verifier = AttachmentVerifier(given.config.limits)
        # file -> reference, what it is, since it was screened
        self._invalid: dict[FileKey, tuple[str, Fault]] = {}
        self._failures: dict[FileKey, int] = {}  # file -> attempts to read its attachments
        self._to_set_aside: list[str] = []  # once their senders are notified

    def screen(
        self, dirs: Dirs, batch: list[Inbound]
    ) -> tuple[list[Inbound], list[Inbound], list[Inbound], list[tuple[Inbound, str, int]]]:
        """Register new keys of the senders; (files ready, files for the next batch as this one may
        not read so many attachments, files whose attachments are being read beside the loop, files
        with one that cannot be read: why, and for how many times by now)."""
        senders = dict.fromkeys([inbound.file.agent for inbound in batch])
        self._keys.register_new(
            [(name, self._roster.meta(dirs, name).public_key) for name in senders]
        )
        self._verifier.left_bytes = attachments.BATCH_BYTES
        ready: list[Inbound] = []
        later: list[Inbound] = []
        late: set[str] = set()  # their senders: the order of their files stays
        waiting: list[Inbound] = []
        failed: list[tuple[Inbound, str, int]] = []
        for inbound in batch:
            if inbound.file.agent in late:
                later.append(inbound)
                continue
            try:
                state = self._attachments_of(dirs, inbound)
                if state is AttachmentState.VERIFIED:
                    ready.append(inbound)
                elif state is AttachmentState.LATER:
                    late.add(inbound.file.agent)
                    later.append(inbound)
                else:
                    waiting.append(inbound)
                if self._failures:
                    self._failures.pop(inbound.file.key, None)
            except OSError as exc:
                key = inbound.file.key
                self._failures[key] = self._failures.get(key, 0) + 1
                failed.append((inbound, f"cannot read an attachment: {exc}", self._failures[key]))
        return ready, later, waiting, failed

    def _attachments_of(self, dirs: Dirs, inbound: Inbound) -> AttachmentState:
        """Verify its attachments; an invalid one is noted. Errors: OSError."""
        file, message = inbound.file, inbound.message
        self._invalid.pop(file.key, None)
        if message is None or not message.attachments:
            return AttachmentState.VERIFIED
        for reference in dict.fromkeys(message.attachments):
            found = self._verifier.check(dirs, reference, file.agent)
            if not isinstance(found, AttachmentState):
                self._invalid[file.key] = (reference, found)
                break
            if found is not AttachmentState.VERIFIED:
                return found
        return AttachmentState.VERIFIED

    def validate(self, inbound: Inbound) -> Inbound:
        """Refuse it if its signature or an attachment is invalid."""
        # A message whose ENV values were taken out was signed with them in it.
        signed = inbound.original or inbound.message
        if signed is None or inbound.refusal:
            return inbound
        file = inbound.file
        fault = self._keys.check(file.agent, inbound.file.message_id, signed)
        if fault is not None:
            kind, refusal = fault
            return _refused(inbound, kind, file.path, refusal)
        if not self._invalid or file.key not in self._invalid:
            return inbound
        reference, (incident, refusal) = self._invalid.pop(file.key)
        if incident is not None:
            self._to_set_aside.append(reference)
        return _refused(inbound, incident, _path(reference), refusal)

    def after_commit(self, dirs: Dirs, *, keys_changed: bool) -> None:
        """Set invalid attachments aside and reload changed keys, after notifying the senders."""
        if keys_changed:
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


def _refused(inbound: Inbound, kind: IncidentKind | None, path: str, refusal: Refusal) -> Inbound:
    incidents = inbound.incidents
    if kind is not None:
        incidents = (*incidents, Incident(kind, inbound.file.agent, path, refusal.reason))
    return replace(inbound, refusal=refusal, incidents=incidents)


def _path(reference: str) -> str:
    digest = reference.removeprefix(SHA256_PREFIX)
    return f"attachments/{digest[:2]}/{digest}"


class Claimer(Part):
    """Inserts and claims ledger rows."""

    def claim(self, dirs: Dirs, batch: list[Inbound]) -> list[Inbound]:
        """Insert the rows of new files, claimed; returns the files in order of discovery.

        Every file that has a row is claimed when this returns. Duplicates are archived.
        """
        now = self._clock.now_ns()
        batch = [  # a nanosecond apart: in order of discovery
            replace(inbound, seen_at=now + order, discovered_at=now + order)
            for order, inbound in enumerate(batch)
        ]
        facts: dict[str, FileFacts] = {}
        for inbound in batch:
            message_id = inbound.file.message_id
            if message_id and message_id not in facts and inbound.file.place == OUTBOX:
                facts[message_id] = inbound.facts()
        added = self._ledger.add(list(facts.values())) if facts else set()
        if len(added) == len(batch):
            return batch
        with self._ledger.transaction():
            return self._claim_again(dirs, batch, added)

    def _claim_again(self, dirs: Dirs, batch: list[Inbound], added: set[str]) -> list[Inbound]:
        """Claim the rows that were there before; leave out files that are not processed now."""
        rows = self._ledger.rows(
            [inbound.file.message_id for inbound in batch if inbound.file.message_id]
        )
        admitted: list[Inbound] = []
        changed: list[FileFacts] = []
        again: list[str] = []
        for inbound in batch:
            row = rows.get(inbound.file.message_id)
            if inbound.file.message_id in added and inbound.file.place == OUTBOX:
                added.remove(inbound.file.message_id)  # the next file of this id is another's
                admitted.append(inbound)
                continue
            found = self._classify(dirs, inbound, row)
            if found is not None:
                admitted.append(found)
                if row is not None and row.status == "pending" and found.has_row:
                    again.append(row.message_id)
                    # the row of an accepted message keeps the facts that the journal has
                    if self._store.messages.find_by_relay_id(row.message_id) is None:
                        changed.append(found.facts())
        if again:
            self._ledger.update_facts(changed)
            self._ledger.claim(again)
        return admitted

    def _classify(self, dirs: Dirs, inbound: Inbound, row: MessageRow | None) -> Inbound | None:
        """Compare a file with the row of its id; None if it is not processed now."""
        file, now = inbound.file, inbound.seen_at
        if file.place != OUTBOX:
            if row is None or (row.agent_name, row.file_size) != (file.agent, file.size):
                return _without_row(inbound, now)  # never sent: its id stays free
            if row.status in ("archived", "failed"):  # it was sent by a copy: see ``fsio.rename``
                self._archive_duplicate(dirs, inbound, row)
            return None
        if row is None or row.agent_name != file.agent:
            taken = Refusal(
                RefusalCode.ID_TAKEN, "its id is taken: every message needs a unique name"
            )
            return _without_row(inbound, now, inbound.refusal or taken)
        first = row.discovered_at
        inbound = replace(inbound, row=Row.REPEATED, discovered_at=first)
        if row.status == "pending":
            return self._as_accepted(inbound)
        if row.status == "processing":
            return None  # another file was put in its place meanwhile: seen again once it is done
        known = (row.file_path, row.file_size, row.file_mtime_ns, row.file_inode)
        is_its_file = known == (file.path, file.size, file.mtime_ns, file.inode)
        if row.status == "failed" and is_its_file:  # a crash came before the nack
            return replace(inbound, refusal=_earlier(row))
        if row.status != "failed" and (is_its_file or _says_the_same(inbound, row)):
            self._archive_duplicate(dirs, inbound, row)
            return None
        reason = f"its id is taken by a message that is {row.status}"
        return _without_row(
            inbound,
            now,
            Refusal(RefusalCode.ID_TAKEN, f"{reason}: every message needs a unique name"),
        )

    def _as_accepted(self, inbound: Inbound) -> Inbound:
        """A file that the store has, whatever is said of it since: other settings, another link."""
        stored = self._store.messages.find_by_relay_id(inbound.file.message_id or "")
        if inbound.refusal is None or stored is None:
            return inbound
        return replace(inbound, message=file_ops.reconstruct(stored), refusal=None)

    def _archive_duplicate(self, dirs: Dirs, inbound: Inbound, row: MessageRow) -> None:
        """Archive a duplicate; it is not delivered again."""
        file = inbound.file
        # A crash, or a fault, came before its archive; or recovery found the outbox out of reach.
        is_late = row.status == "completed" or row.file_path == file.path
        day_ns = row.discovered_at if is_late else self._clock.now_ns()
        kind = "" if is_late else file_ops.DUPLICATES
        try:
            path = file_ops.archive(
                dirs, file.agent, file.file_name, day_ns, kind,
                redacted=inbound.redacted, place=file.place,
            )  # fmt: skip
        except (OSError, UnsafePath) as exc:
            self._log(
                f"Could not archive {file.path}, the next scan tries again: {exc}",
                action="archive_failed",
                level="warning",
                message_id=row.message_id,
            )
            return
        if is_late:
            self._ledger.archive([(row.message_id, path)], self._clock.now_ns())
            self._ledger.set_path([(row.message_id, path)] if path else [])
            return
        self._log(
            "Archived a duplicate, not delivered again",
            action="archive_duplicate",
            message_id=row.message_id,
            agent=file.agent,
        )


def _earlier(row: MessageRow) -> Refusal:
    """Why a message failed before."""
    return Refusal(row.last_error_code or "", row.last_error or "it failed before")


def _without_row(inbound: Inbound, now: int, refusal: Refusal | None = None) -> Inbound:
    return replace(
        inbound,
        row=Row.NONE,
        refusal=refusal or inbound.refusal,
        seen_at=now,
        discovered_at=inbound.file.mtime_ns,
    )


def _says_the_same(inbound: Inbound, row: MessageRow) -> bool:
    """True for the same content to the same recipient."""
    message = inbound.message
    return message is not None and (inbound.checksum, str(message.kind), message.to) == (
        row.checksum,
        row.message_type,
        row.target,
    )


class SigningKeys(Part):
    """The registered public keys.

    A registered key stays when meta.json is gone. Signed content: relay/base/crypto.py.
    """

    def __init__(self, given: Resources) -> None:
        super().__init__(given)
        self._told = IncidentDedup()
        self._keys: dict[str, str] = {}
        self.load()

    def load(self) -> None:
        """Load the registered keys, and give their ids to the engine's channel members.

        Repeated at each start, which completes what a crash interrupted.
        """
        self._keys = self._ledger.agents.public_keys()
        ids = {name: key_id(bytes.fromhex(key)) for name, key in self._keys.items()}
        self._store.channels.set_identities(ids)

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
                incident = Incident(IncidentKind.KEY_CHANGED, agent, path, detail)
                incidents += self._told.fresh([incident])
        if not incidents:
            return
        now = self._clock.now_ns()
        with self._ledger.transaction():
            self._ledger.agents.set_public_keys(fresh, now)
            self._ledger.agents.add_incidents(incidents, now)
        for incident in incidents:
            self._log(
                incident.detail, action=str(incident.kind), level="warning", agent=incident.agent
            )
        self.load()

    def check(
        self, agent: str, message_id: str, message: MessageFile
    ) -> tuple[IncidentKind, Refusal] | None:
        """The incident, and the reason why a signature is not accepted; None if it is."""
        signature = message.headers.get("SIGNATURE")
        key = self._keys.get(agent)
        if signature is None:
            if not self._config.security.require_signatures:
                return None
            return _unsigned(
                "it is not signed, and security.require_signatures requires it: "
                f"`relay key make {agent}`, and send with the SDK or `relay send`",
            )
        if key is None:
            if not self._config.security.require_signatures:
                return None
            return _unsigned(
                f"no public key of {agent} is registered, and security.require_signatures requires "
                f"one: put it into agents/{agent}/meta.json as public_key, 64 hex digits",
            )
        raw = base64.b64decode(signature.removeprefix(SIGNATURE_PREFIX))
        if verify(bytes.fromhex(key), raw, agent, message_id, message.to, message.body):
            return None
        reason = (
            f"SIGNATURE does not match the key registered for {agent} "
            f"({key_id(bytes.fromhex(key))}), over this sender, id, TO and body"
        )
        return IncidentKind.BAD_SIGNATURE, Refusal(RefusalCode.BAD_SIGNATURE, reason)


def _unsigned(reason: str) -> tuple[IncidentKind, Refusal]:
    return IncidentKind.UNSIGNED, Refusal(RefusalCode.UNSIGNED, reason)
