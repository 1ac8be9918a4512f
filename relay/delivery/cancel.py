"""Cancelling a message: taking it back from recipients that have not read it.

    take back   inbox/{id}.msg is renamed into inbox/.pending: who renames first has it
    commit      the delivery is Expired, with the reason, in the journal; so is the reply
    remove      the file that was taken back

Killed before the commit, recovery puts the file back, and the command is carried out again; killed
after it, recovery removes the file. See docs/states.md.
"""

from __future__ import annotations

import contextlib

from relay.acomm.model import Delivery, DeliveryState
from relay.base.errors import MessageError, Refused, UnsafePath
from relay.base.home import Dirs
from relay.base.message import Kind, MessageFile, command_fields
from relay.base.names import MSG_SUFFIX, OPERATOR, ORCHESTRATOR, message_id_of
from relay.base.outcomes import REMOVED, is_cancelled
from relay.delivery import file_ops
from relay.delivery.reads import ReadDetector, was_taken
from relay.delivery.values import NO_EFFECTS, Cancellation, ControlReply, Effects, Part, Resources
from relay.engine import rules
from relay.engine.engine import Engine
from relay.ledger.deliveries import DeliveryFacts
from relay.reach.session import load_session

CANCEL = "message.cancel"  # its ACTION


def is_cancel(command: MessageFile) -> bool:
    """True for the command that takes a message back."""
    if command.kind is not Kind.COMMAND:
        return False
    with contextlib.suppress(MessageError):
        return command_fields(command).get("ACTION", "").lower() == CANCEL
    return False


def find_message(message_id: str, sender: str, store: Engine, is_privileged: bool) -> Cancellation:
    """The message that ``sender`` asks to cancel. Errors: Refused."""
    if message_id_of(message_id + MSG_SUFFIX) is None:
        raise Refused(f"ID {message_id[:70]!r} is not a message id")
    message = store.messages.find_by_relay_id(message_id)
    if message is None or message.id not in store.state.deliveries:
        raise Refused(
            f"message {message_id} is not in the live store: it does not exist, waits in an "
            f"outbox, or is in an archive; `relay trace {message_id}` shows it"
        )
    if message.sender != sender and not is_privileged:
        raise Refused(
            f"message {message_id} can be cancelled only by {message.sender} who sent it, "
            f"{OPERATOR} and the lead, not by {sender}"
        )
    return Cancellation(message.id, message_id, sender)


def recorded_cancellation(message_id: str, sender: str, store: Engine) -> Effects:
    """The effects on the ledger of one that was carried out before a crash."""
    message = store.messages.find_by_relay_id(message_id)
    if message is None:
        return NO_EFFECTS
    states = store.deliveries.of(message.id).items()
    ended = tuple(name for name, delivery in states if delivery.state is DeliveryState.EXPIRED)
    return Effects(cancellation=Cancellation(message.id, message_id, sender, ended))


class Canceller(Part):
    """Carries out ``message.cancel``."""

    def __init__(self, given: Resources, reads: ReadDetector) -> None:
        super().__init__(given)
        self._reads = reads
        self.taken_back: list[tuple[str, str]] = []  # (message id, recipient), not committed yet

    def cancel(self, asked: Cancellation) -> ControlReply:
        """Take the message's unread files back and end their deliveries; says who had read it."""
        number, message_id = asked.number, asked.message_id
        rows = self._ledger.deliveries.rows([message_id]).get(message_id, {})
        cancelled: list[str] = []
        kept: list[str] = []
        with self._home.dirs() as dirs:
            for name, delivery in sorted(self._store.state.deliveries.get(number, {}).items()):
                reason = _reason_to_keep(name, delivery, rows.get(name))
                if not reason and self._is_being_shown(message_id, name):
                    reason = f"a session of {name} is being shown it"
                is_replayed = rules.is_replayed(delivery)
                if not reason and (delivery.queued or is_replayed):
                    is_held = delivery.state is DeliveryState.SENT or is_replayed
                    reason = self._take_back(dirs, message_id, name, is_held=is_held)
                (kept if reason else cancelled).append(reason or name)
        state, why = DeliveryState.EXPIRED, asked.reason
        self._store.deliveries.move(number, cancelled, state, why=why)
        also = "; ".join(kept)
        if not cancelled and not kept:
            also = self._nobody(number)
        if not cancelled:
            return ControlReply(False, f"message {message_id} is not cancelled: {also}")
        text = f"message {message_id} is cancelled: {', '.join(cancelled)} did not read it"
        effects = Effects(cancellation=asked._replace(recipients=tuple(cancelled)))
        return ControlReply(True, f"{text}; {also}" if also else text, effects)

    def _nobody(self, number: int) -> str:
        """Say why a message without recipients cannot be taken back."""
        message = self._store.messages.get(number)
        assert message is not None  # it is in the live store
        channel = self._store.channels.get(message.channel_id)
        if not channel.config.sticky_messages:
            return "it had no recipients"
        return (
            f"nobody has it yet, and #{channel.name} keeps it for those who come later: "
            f"`relay channel config {channel.name} sticky_messages=false` ends that"
        )

    def _is_being_shown(self, message_id: str, recipient: str) -> bool:
        """True while a session may see it; the next one is offered what one that ended had."""
        for key in self._ledger.offers.is_shown_to(message_id, recipient):
            harness, _, session_id = key.partition(":")
            session = load_session(self._home.root, harness, session_id)
            if session is None or session.is_live:
                return True
        return False

    def _take_back(self, dirs: Dirs, message_id: str, recipient: str, *, is_held: bool) -> str:
        """Take the file back; returns why it cannot be, or nothing.

        ``is_held``: a further attempt waits; then the file may have vanished with its mailbox.
        """
        try:
            if not file_ops.take_back(dirs, message_id, recipient):
                is_taken = was_taken(dirs, recipient, message_id)
                return "" if is_held and not is_taken else _left(recipient, is_read=is_taken)
        except (OSError, UnsafePath) as exc:
            return f"the inbox of {recipient} cannot be written: {file_ops.reason_of(exc)}"
        self._reads.expect_removal(recipient, message_id)
        self.taken_back.append((message_id, recipient))
        return ""

    def remove(self, dirs: Dirs) -> None:
        """Remove what was taken back: it is durable by now that those deliveries ended."""
        for message_id, recipient in self.taken_back:
            file_ops.unstage(dirs, message_id, recipient)
        self.taken_back.clear()


def _reason_to_keep(recipient: str, delivery: Delivery, row: DeliveryFacts | None) -> str:
    """The reason why a delivery cannot be cancelled; empty if its file may be unread."""
    if recipient == ORCHESTRATOR:
        return "the relay has carried it out"
    if delivery.state is DeliveryState.ACKNOWLEDGED:
        return f"{recipient} has acknowledged it"
    how = row.read_how if row else None
    if delivery.state > DeliveryState.ACKNOWLEDGED:
        is_over = row is not None and is_cancelled(row.state, row.last_error)
        is_there = row is not None and row.written_at is not None and how is None and not is_over
        what = "may have it in the inbox, and it is given up" if is_there else "did not get it"
        return f"{recipient} {what}" + (f": {row.last_error}" if row else "")
    if rules.is_replayed(delivery):
        return ""
    waits_read = delivery.state is DeliveryState.WAITING and not delivery.queued
    if delivery.state is DeliveryState.RECEIVED or waits_read or how is not None:
        return _left(recipient, is_read=how != REMOVED)
    return ""


def _left(recipient: str, *, is_read: bool) -> str:
    """The words for a file that has left the inbox."""
    unread = f"it was removed from the inbox of {recipient}, and not seen in .read"
    return f"{recipient} has read it" if is_read else unread
