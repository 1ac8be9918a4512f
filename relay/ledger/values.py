"""What goes into the ledger, and what comes out of it: rows as values."""

from __future__ import annotations

from typing import NamedTuple


class FileFacts(NamedTuple):
    """What is recorded of one file, in the order of the INSERT below."""

    message_id: str
    agent_name: str
    file_path: str
    file_size: int
    file_mtime_ns: int
    file_inode: int | None
    checksum: str | None
    message_type: str | None
    target: str | None
    discovered_at: int


class Row(NamedTuple):
    """A row of ``messages``, as far as the relay reads it back."""

    message_id: str
    agent_name: str
    file_path: str
    checksum: str | None
    status: str
    discovered_at: int
    retry_count: int
    last_error: str | None
    file_size: int
    file_mtime_ns: int
    file_inode: int | None
    message_type: str | None
    target: str | None


class Written(NamedTuple):
    """A delivery whose file stands in the inbox, in the order of the INSERT below."""

    message_id: str
    recipient: str
    attempt: int
    staged_at: int  # the commit that accepted it
    written_at: int
    obligation: str | None = None  # 'open': its recipient owes an answer
    due_at: int | None = None  # Unix ns: when that is overdue


TAKEN = "taken"  # read_how: the file is in inbox/.read
REMOVED = "removed"  # gone otherwise, from an inbox that stands


class Read(NamedTuple):
    """A file that left an inbox."""

    message_id: str
    recipient: str
    attempt: int  # it was of this one, or of one before
    how: str | None = None  # TAKEN or REMOVED; None: not known


class Held(NamedTuple):
    """A delivery whose attempt is made at ``due_at`` (Unix ns)."""

    message_id: str
    recipient: str
    attempt: int
    reason: str
    due_at: int


class DeliveryFacts(NamedTuple):
    """A row of ``deliveries`` as the journal tells it; None: it does not say."""

    message_id: str
    recipient: str
    state: str
    attempt: int
    staged_at: int | None = None
    written_at: int | None = None
    read_at: int | None = None
    acked_at: int | None = None
    ack_status: str | None = None
    last_error: str | None = None
    due_at: int | None = None
    read_how: str | None = None
    answer_id: str | None = None
    answer_text: str | None = None


class DutyFacts(NamedTuple):
    """An answer that is owed, as the journal has it; None: it does not say."""

    message_id: str
    recipient: str
    obligation: str
    due_at: int | None = None
    reminders: int = 0
    ack_status: str | None = None  # what the recipient said last
    acked_at: int | None = None


class Delivery(NamedTuple):
    """A row of ``deliveries`` that is not at its end."""

    message_id: str
    recipient: str
    state: str
    attempt: int
    staged_at: int
    last_error: str | None
