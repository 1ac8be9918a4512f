"""Every error of the project: one family, one file.

A class's docstring describes the problem; ``exit_code`` is the exit status of the command line;
``hint`` is the remedy. Facts (path, offset, expected, found) are attributes. ``str(error)``
is always one line.

This module imports only what Python has loaded already, to keep the SDK's import fast.
"""

from __future__ import annotations

import os

# What `relay` exits with; `relay --help` lists it.
EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_FINDINGS = 3
EXIT_TIMEOUT = 4
EXIT_STATE = 5
EXIT_REFUSED = 6
EXIT_INTERRUPTED = 130  # as shells have it: 128 and SIGINT
EXIT_PIPE_CLOSED = 141  # likewise: 128 and SIGPIPE

EXIT_CODES = {
    EXIT_OK: "done",
    EXIT_FAILED: "failed; the line on stderr says why",
    EXIT_USAGE: "the command line, a message to be sent, or config.json is wrong",
    EXIT_FINDINGS: "it ran, and found something wrong (check, audit)",
    EXIT_TIMEOUT: "nothing arrived in the time given",
    EXIT_STATE: "the relay is not in the state this needs (not running, already running, no home)",
    EXIT_REFUSED: "the relay refused it; the answer says why",
    EXIT_INTERRUPTED: "ended by ^C; `up --foreground` and `audit watch` finish, and exit 0",
    EXIT_PIPE_CLOSED: "the reader of the output closed the pipe, as `| head -1` does",
}


class RelayError(Exception):
    """Base class of all errors."""

    exit_code = EXIT_FAILED
    hint = ""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        if hint:
            self.hint = hint

    def __str__(self) -> str:
        return " ".join(self.message.split())


class ConfigError(RelayError):
    """config.json cannot be read, or a value in it is wrong."""

    exit_code = EXIT_USAGE
    hint = "fix config.json, or move it away: `relay init` then writes an empty one"


class SettingsError(RelayError):
    """A settings file of an agent CLI cannot be changed; it was left as it is."""

    exit_code = EXIT_USAGE
    hint = "correct the file, and try again"


class HomeMissing(RelayError):
    """The relay home does not exist."""

    exit_code = EXIT_STATE
    hint = "run `relay init`, or name another home with --home"


class TwoHomes(RelayError):
    """The environment names a home, and the search from the working directory finds another."""

    exit_code = EXIT_STATE
    hint = "name one with --home"


class NoRoom(RelayError):
    """A lake, or the temporary one of a run, does not fit on the disk."""

    hint = "free space there, or name a folder on a larger disk: --lake, or TMPDIR without it"


class InvalidName(RelayError):
    """The name of an agent or a channel, or a message id, is not valid."""

    exit_code = EXIT_USAGE
    hint = "names are letters, digits, _ and -, start with a letter and have at most 63 characters"


class UnsafePath(RelayError):
    """A path below the home is a link, leaves the home, or is of another type than expected."""

    hint = "move it away: the relay follows no links and accepts only directories and regular files"


class HardLink(UnsafePath):
    """A file has several hard links, so that it can be changed from another directory."""


class ForeignOwner(UnsafePath):
    """A file or directory belongs to another user."""

    def __init__(self, name: str, uid: int) -> None:
        text = f"{name} belongs to user {uid}, not to {os.geteuid()}"
        super().__init__(text, hint=run_as(uid))
        self.uid = uid


def run_as(uid: int) -> str:
    """The hint for a file that belongs to another user."""
    import pwd  # rarely needed

    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:  # the user was removed or is from another machine
        name = str(uid)
    return f"run it as user {name}, or change the owner with `chown`"


class KeyFileError(RelayError):
    """A key file is missing, accessible to others, or not a valid key."""

    exit_code = EXIT_STATE
    hint = "a key is 32 bytes in a regular file of mode 600; data encrypted with it needs it"


class Interrupted(RelayError):
    """^C ended a command that leaves something behind: the message that it sent."""

    exit_code = EXIT_INTERRUPTED


class NotRunning(RelayError):
    """No relay is running for this home."""

    exit_code = EXIT_STATE
    hint = "start one with `relay up`"


class AlreadyRunning(RelayError):
    """Another relay is running for this home."""

    exit_code = EXIT_STATE
    hint = "stop it with `relay down`"


class StateFault(RelayError):
    """An event could not be applied to the store, whose memory may now differ from the journal."""

    hint = "the relay restarts its session and recovers; please report the line of the log"


class LedgerError(RelayError):
    """The ledger cannot be used."""

    hint = (
        "`relay check FILE` says what is wrong with it; if it is ledger.db, move it away"
        " with its -wal and -shm: the next start rebuilds it from the journal"
    )


class LedgerMissing(LedgerError):
    """A ledger is missing where one is expected."""

    exit_code = EXIT_STATE


class LedgerBusy(LedgerError):
    """Another process holds the ledger's write lock."""

    hint = "end the other writer; readers never hold it"


class RowRefused(LedgerError):
    """No row of the ledger can hold this value; the others of its kind are not affected."""


# Raised over a value in the ledger that is not of its column's type: SQLite keeps any.
BAD_VALUE_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


class LedgerDamaged(LedgerError):
    """SQLite cannot read the ledger's file any more."""

    hint = (
        "stop the relay, then `relay ledger rebuild` rebuilds it from the journal, or"
        " `relay ledger restore FILE` restores a backup"
    )

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} is damaged ({why})")


class InvalidQuery(RelayError):
    """A query is not valid: of a search, or an SQL statement that does more than read."""

    exit_code = EXIT_USAGE


class Timeout(RelayError):
    """Nothing arrived in the time given. ``message_id``: of the message waiting for an answer."""

    exit_code = EXIT_TIMEOUT

    def __init__(self, message: str, *, message_id: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.message_id = message_id


class Refused(RelayError):
    """The relay, or the recipient, answered with a nack. ``message_id``: of the refused message."""

    exit_code = EXIT_REFUSED

    def __init__(self, message: str, *, message_id: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.message_id = message_id


class RelayWarning(UserWarning):
    """A message waits: in the outbox for the relay, or for room on the disk."""


class NotFound(RelayError):
    """No message, file or agent has that name."""


class MessageError(RelayError):
    """A `.msg` text breaks a rule of the format: it names file, line, header and rule."""

    exit_code = EXIT_USAGE

    def __init__(self, rule: str, *, file: str = "", line: int = 0, header: str = "") -> None:
        where = ", ".join(
            part
            for part in (file, f"line {line}" if line else "", f"header {header}" if header else "")
            if part
        )
        super().__init__(f"{where}: {rule}" if where else rule)
        self.rule = rule
        self.file = file
        self.line = line
        self.header = header


class BodyTooLarge(MessageError):
    """A body is larger than limits.max_body_bytes."""


class FormatError(RelayError):
    """A binary file is not valid: file, offset, expected, found."""

    exit_code = EXIT_FINDINGS
    hint = "the file was left as it is; take a backup, or let the relay rebuild it"

    def __init__(self, path: str, offset: int, expected: object, found: object) -> None:
        super().__init__(f"{path} at {offset}: expected {expected}, found {found}")
        self.path = path
        self.offset = offset
        self.expected = expected
        self.found = found


class VersionError(FormatError):
    """The file was written by a version that this one cannot read."""

    hint = "use a newer agent-relay; the file was left as it is"


class LimitError(FormatError):
    """A whole file holds a value beyond its limit, and could not be written again."""

    hint = "`relay dump` reads it; the file was left as it is"


class IntegrityError(FormatError):
    """The file's checksum differs from its bytes."""


class JournalError(RelayError):
    """A journal operation failed or is not possible."""


class JournalFailed(JournalError):
    """A write or sync of the journal failed, so that the disk's content is unknown."""

    exit_code = EXIT_STATE
    hint = "open the journal again: it finds its end on the disk and continues from there"


class SegmentAway(JournalError):
    """A segment is in a tier that this reader cannot reach."""

    hint = "`relay journal move --to 0` brings it back"


class JournalPruned(JournalError):
    """The store cannot be rebuilt: the records that it lacks were pruned from the journal."""

    exit_code = EXIT_STATE


class CommError(RelayError):
    """Base class of the message engine's errors."""


class ValidationFailed(CommError):
    """A field breaks a rule of the engine."""

    def __init__(self, field: str, reason: str, value_length: int | None = None) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason
        self.value_length = value_length


class ChannelNotFound(CommError):
    """No channel has that name or id."""


class DuplicateChannel(CommError):
    """A channel of that name exists already."""


class NotParticipant(CommError):
    """The agent does not take part in the channel."""


class ChannelUnavailable(CommError):
    """The channel is paused, draining or closed."""


class MessageNotFound(CommError):
    """No message has that number in the store."""


class StoreLocked(CommError):
    """Another process writes this store."""

    exit_code = EXIT_STATE
    hint = "readers need no lock; a second writer waits for the first to end"


class StoreReadOnly(CommError):
    """Writing the store's file with this version would lose content."""

    hint = "use the agent-relay that wrote it; the file was left as it is"


class StoreClosed(CommError):
    """The store is closed."""

    hint = "open it again"


class SealedStore(CommError):
    """The store is encrypted, and the key is missing or a different one."""

    exit_code = EXIT_STATE
    hint = "name the key file that it was made with: store.encrypt and store.key_file, --key-file"


class StoreFull(CommError):
    """Too many messages are active; there is room again when some are acknowledged."""

    hint = "receive or acknowledge what waits, then send again"


class StoreCapacity(CommError):
    """A size limit of the store file is reached."""

    hint = "archive or compact the store"


class ObjectError(JournalError):
    """The object store failed a request. ``reason``: a code of the journal's Reason."""

    def __init__(self, message: str, reason: int, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class ArchivesUnreachable(ObjectError):
    """An audit cannot list or read files in an object store."""

    hint = (
        "set these in the environment of driver and workers before Spark starts:"
        " AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or a role), AWS_REGION, AWS_ENDPOINT_URL"
    )


class ObjectConflict(ObjectError):
    """The object store has other content under a key: it is never overwritten."""

    hint = "another stream may write there: name another prefix, or move that object away"


class ObjectMissing(ObjectError):
    """The object store has lost a segment, or has something else in its place."""

    hint = (
        "put the object back from a backup or an earlier version of the bucket, then run"
        " `relay journal move --to 0`: the manifest still has its size and checksum"
    )
