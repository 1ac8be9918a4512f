"""Intake: selects complete files in the outboxes, reads and parses them.

A file renamed into an outbox is complete when seen: the watcher reports the rename, or its ctime is
later than its mtime and it parses. A file written in place waits until it is unchanged for
``SETTLE_NS``. A file that does not parse may still be growing, and is malformed only when unchanged
for ``MALFORMED_NS``. Unchanged time is the larger of the file's age by its mtime and the time
since it was first seen with this size and mtime, so that a clock that was set does not delay it.

The files of one sender are ordered by PRIORITY, then name, within a batch. None overtakes one that
is still being written, for up to ``MALFORMED_NS``.

Files in ``outbox/.pending`` were never renamed into the outbox. Untouched (neither written nor
renamed) for ``PENDING_WARN_S``: a warning. Untouched for ``orphan_after_s``: a ``*.msg`` is refused
and kept in ``rejected/``, since its writer may only have been interrupted; others are removed. See
docs/formats/msg.md.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from msgspec.structs import replace

from relay.agents.requests import redact
from relay.base import fsio
from relay.base.clock import NS_PER_MS, NS_PER_S, iso_date
from relay.base.errors import (
    BodyTooLarge,
    ForeignOwner,
    HardLink,
    MessageError,
    RelayError,
    UnsafePath,
)
from relay.base.home import PENDING, REJECTED, Dirs
from relay.base.incidents import Incident, IncidentKind, Refusal, RefusalCode
from relay.base.message import Kind, MessageFile, max_file_bytes, parse
from relay.base.names import MSG_SUFFIX, SHA256_PREFIX, sha256_hex, shown
from relay.delivery import file_ops
from relay.delivery.intake_queue import FileKey, Hint, IntakeQueue, sort_within_agents
from relay.delivery.limits import RateLimit
from relay.delivery.reads import COARSEST_NS
from relay.delivery.values import IN_PENDING, Inbound, OutboxFile, Part, Resources, outbox_file_of
from relay.reach.report import SUFFIX

_KIND_OF: dict[type[RelayError], IncidentKind] = {
    HardLink: IncidentKind.HARD_LINK,
    ForeignOwner: IncidentKind.FOREIGN_OWNER,
}


SETTLE_NS = 100 * NS_PER_MS  # a file written straight into an outbox is read when it is as old
BATCH_BYTES = 16 << 20  # read at a time, in equal shares of the agents: their files are in memory
MALFORMED_NS = 5 * NS_PER_S  # at this age what is not a valid message is refused: it may grow
PENDING_WARN_S = 30  # a file in .pending of this age was probably not renamed


class Intake(Part):
    """The files waiting to be read, in order of discovery."""

    def __init__(self, given: Resources) -> None:
        super().__init__(given)
        security, clock = given.config.security, given.clock
        self._max_body = given.config.limits.max_body_bytes
        self._max_file = max_file_bytes(self._max_body)
        self.rate_limit = RateLimit(security.rate_per_s, security.rate_burst, clock)
        self._queue = IntakeQueue(self.rate_limit, clock)
        self._pending_files = PendingFiles(given)

    @property
    def backlog(self) -> int:
        """Known files not yet taken, including deferred ones."""
        return len(self._queue)

    @property
    def is_busy(self) -> bool:
        """True while files wait that can be read now."""
        return self._queue.is_busy or self._pending_files.is_busy

    def add(self, agent: str, file_name: str, *, renamed: bool, counted: bool = False) -> None:
        """Queue a file. A rename supersedes an earlier hint of a write.

        ``counted``: it was taken before, and its agent's rate already includes it.
        """
        if not file_name.endswith(MSG_SUFFIX) or file_name.startswith("."):
            return
        self._queue.add(agent, file_name, renamed=renamed, counted=counted)

    def retry(self, agent: str, file_name: str, due_ns: int, waited_ns: int = 0) -> None:
        """Read the file again at ``due_ns`` (monotonic): a transient error has delayed it.

        ``waited_ns``: for how long so far.
        """
        found_ns = self._clock.monotonic_ns() - waited_ns
        self._queue.defer(Hint(agent, file_name, True, True, due_ns, found_ns=found_ns))

    def scan(
        self, dirs: Dirs, agent: str, on_report: Callable[[str, str], object] | None = None
    ) -> bool:
        """List an agent's outbox and its ``.pending``; False if nothing waits there.

        ``on_report`` gets the agent and the name of each report.
        """
        outbox = dirs.get("agents", agent, "outbox")
        names = sorted(os.listdir(outbox))
        for name in names:
            self.add(agent, name, renamed=False)
            if on_report is not None and name.endswith(SUFFIX):
                on_report(agent, name)
        is_pending = self._pending_files.scan(dirs, agent)
        return is_pending or any(name.endswith((MSG_SUFFIX, SUFFIX)) for name in names)

    def read_batch(self, dirs: Dirs, limit: int, busy: Iterable[str] = ()) -> list[Inbound]:
        """Read up to ``limit`` files; incomplete ones are deferred, missing ones dropped.

        ``busy``: agents of which no file is read, as earlier ones of theirs are still to be done.
        """
        batch: list[Inbound] = []
        settling = set(busy)  # and agents that are still writing one
        hints = self._queue.pop_batch(limit)
        read_bytes = dict.fromkeys([hint.agent for hint in hints], 0)
        share_bytes = BATCH_BYTES // max(1, len(read_bytes))
        for hint in hints:
            if hint.agent in settling or read_bytes[hint.agent] >= share_bytes:
                self._queue.requeue(hint)
                continue
            try:
                read = self._read_file(dirs, hint)
            except FileNotFoundError:
                continue  # taken back by its writer, or its agent is gone
            except (OSError, UnsafePath) as exc:  # the outbox is broken, or no descriptor is left
                read = replace(hint, due_ns=self._clock.monotonic_ns() + NS_PER_S)
                self._log(
                    f"Cannot look at a file, trying again in 1 s: {exc}",
                    action="read_failed",
                    level="warning",
                    agent=hint.agent,
                    file=hint.file_name,
                )
            if isinstance(read, Inbound):
                batch.append(read)
                read_bytes[hint.agent] += read.file.size
                continue
            later = replace(read, counted=True, settling=False)
            known_ns = self._clock.monotonic_ns() - hint.found_ns
            if read.settling and known_ns < MALFORMED_NS:
                self._queue.block_agent(later)
                settling.add(hint.agent)
            else:
                self._queue.defer(later)
        if self._queue.has_unlisted:
            self._rescan(dirs)
        batch = sort_within_agents(batch, attrgetter("file.agent"), _rank)
        if not self._pending_files.is_busy:
            return batch
        left = self._pending_files.pop_overdue(dirs, limit - len(batch), self._max_file)
        return batch + [self._refuse_pending(found, data) for found, data in left]

    def _refuse_pending(self, found: OutboxFile, data: bytes) -> Inbound:
        """Refuse a message abandoned in ``.pending``."""
        clean = redact(data, loose=True)
        refusal = Refusal(RefusalCode.UNSENT, self._pending_files.reason(found.agent))
        return Inbound(found, None, refusal, redacted=clean.data if clean else None)

    def oldest_ns(self) -> int | None:
        """Time at which the longest waiting file was seen (monotonic); None if none waits."""
        return self._queue.oldest_ns()

    def _rescan(self, dirs: Dirs) -> None:
        """List outboxes again that were over their quota and now have room."""
        for agent in self._queue.agents_to_rescan():
            with contextlib.suppress(OSError, UnsafePath):  # the next scan reports it
                self.scan(dirs, agent)

    def due_ns(self) -> int | None:
        """Time at which the next file is due (monotonic); 0: now."""
        return 0 if self._pending_files.is_busy else self._queue.due_ns()

    def _read_file(self, dirs: Dirs, hint: Hint) -> Inbound | Hint:
        agent, name = hint.agent, hint.file_name
        outbox = dirs.get("agents", agent, "outbox")
        try:
            try:
                fd, status = fsio.open_regular(name, outbox, narrow=hint.renamed)
            except HardLink:
                _finish_rename(dirs, agent, name, outbox)
                fd, status = fsio.open_regular(name, outbox, narrow=hint.renamed)
        except UnsafePath as exc:
            status = os.stat(name, dir_fd=outbox, follow_symlinks=False)
            kind = incident_kind(exc)
            found, reason = outbox_file_of(agent, name, status), shown(str(exc))
            incident = Incident(kind, agent, found.path, reason)
            refusal = Refusal(RefusalCode.UNSAFE_FILE, reason)
            return Inbound(found, None, refusal, incidents=(incident,))
        try:
            data, status = fsio.read_open(fd, status.st_size, self._max_file)
            is_whole = len(data) == status.st_size or status.st_size > self._max_file
            if hint.renamed and is_whole:
                return self._parse(outbox_file_of(agent, name, status), data)
            return self._examine(dirs, hint, fd, status, data if is_whole else None)
        finally:
            os.close(fd)

    def _examine(
        self, dirs: Dirs, hint: Hint, fd: int, status: os.stat_result, data: bytes | None
    ) -> Inbound | Hint:
        """Take a file found by a scan if it is complete; ``data`` None: it grew while read."""
        agent, name, now = hint.agent, hint.file_name, self._clock.monotonic_ns()
        seen = (status.st_size, status.st_mtime_ns)
        seen_at_ns = hint.seen_at_ns if hint.seen == seen else now
        age_ns = self._clock.now_ns() - status.st_mtime_ns
        if status.st_mtime_ns % NS_PER_S == 0:  # the file system may keep whole seconds alone
            age_ns -= COARSEST_NS
        still_ns = max(age_ns, now - seen_at_ns)
        is_moving = data is None or still_ns < SETTLE_NS
        was_renamed = status.st_mtime_ns < status.st_ctime_ns <= self._clock.now_ns()
        settling = True
        if (
            data is not None
            and (was_renamed or not is_moving)
            and not _is_pending(dirs, agent, name)
        ):
            inbound = self._parse(outbox_file_of(agent, name, status), data)
            is_growing = is_moving or still_ns < MALFORMED_NS
            if inbound.message is not None or not is_growing:
                return _narrowed(inbound, fd, status)
            settling = is_moving
        due_ns = now + SETTLE_NS
        return replace(hint, due_ns=due_ns, seen=seen, seen_at_ns=seen_at_ns, settling=settling)

    def _parse(self, found: OutboxFile, data: bytes) -> Inbound:
        """Parse file content; the reason names each violated rule."""
        message = self._classify(found, data)
        if isinstance(message, Refusal):
            clean = redact(data, loose=True)
            if clean is None:
                return Inbound(found, None, message)
            # The same words of the text that may be kept: a reason quotes what is wrong.
            again = self._classify(found, clean.data)
            if not isinstance(again, Refusal):
                again = message._replace(reason=clean.clean(message.reason))
            return Inbound(found, None, again, redacted=clean.data)
        clean = redact(data) if message.kind is Kind.SPAWN else None
        if clean is not None:
            original, message = message, parse(clean.data)
            checksum = sha256_hex(message.content)
            return Inbound(found, message, None, checksum, original, clean.data)
        declared = message.headers.get("CHECKSUM")
        if declared and message.body:  # parse has compared it with the body's
            return Inbound(found, message, None, declared.removeprefix(SHA256_PREFIX))
        return Inbound(found, message, None, sha256_hex(message.content))

    def _classify(self, found: OutboxFile, data: bytes) -> MessageFile | Refusal:
        """The message, or why there is none."""
        if not found.message_id:
            return Refusal(
                RefusalCode.BAD_NAME,
                f"{shown(found.file_name)} is not a valid message name: expected "
                "{timestamp_ns}-{hex}.msg, 10 to 20 digits, -, up to 32 of 0-9a-f",
            )
        if found.size > self._max_file:
            return Refusal(
                RefusalCode.TOO_LARGE,
                f"{found.file_name} is {found.size} bytes, too large: the body may be "
                f"{self._max_body}; put large data into an attachment",
            )
        try:
            return parse(data, file=found.file_name, max_body_bytes=self._max_body)
        except BodyTooLarge as exc:
            return Refusal(RefusalCode.TOO_LARGE, str(exc))
        except MessageError as exc:
            is_sum = exc.header == "CHECKSUM" and exc.rule.startswith("the body")
            return Refusal(RefusalCode.CHECKSUM if is_sum else RefusalCode.MALFORMED, str(exc))


def incident_kind(exc: UnsafePath) -> IncidentKind:
    """The kind of incident that a file in an outbox is, by why it cannot be opened."""
    return _KIND_OF.get(type(exc), IncidentKind.NOT_A_REGULAR_FILE)


def _rank(inbound: Inbound) -> tuple[int, str]:
    """Sort key of one agent's files: priority, then name."""
    priority = 2 if inbound.message is None else inbound.message.priority
    return priority, inbound.file.file_name


def _narrowed(inbound: Inbound, fd: int, status: os.stat_result) -> Inbound:
    """The file with mode 600: set only now, as it changes the ctime, like a rename does."""
    if stat.S_IMODE(status.st_mode) == fsio.FILE_MODE:
        return inbound
    os.fchmod(fd, fsio.FILE_MODE)
    file = replace(inbound.file, ctime_ns=os.fstat(fd).st_ctime_ns)
    return replace(inbound, file=file)


def _is_pending(dirs: Dirs, agent: str, name: str) -> bool:
    """True while the writer has a file of this name in ``.pending``."""
    try:
        return fsio.exists(name, dirs.get("agents", agent, "outbox", PENDING))
    except FileNotFoundError:  # no such directory: nothing is pending there
        return False


def _finish_rename(dirs: Dirs, agent: str, name: str, outbox: int) -> None:
    """Remove the name in ``.pending`` of a file that a power cut left with both names."""
    pending = dirs.get("agents", agent, "outbox", PENDING)
    with contextlib.suppress(FileNotFoundError):
        if file_ops.has_both_names(name, outbox, pending):
            fsio.remove(name, pending)


def untouched_since(status: os.stat_result, now_ns: int) -> int:
    """Time at which a file was last written or renamed (Unix ns); future times are ignored."""
    times = [at for at in (status.st_mtime_ns, status.st_ctime_ns) if at <= now_ns]
    return max(times, default=now_ns)


MOST_AT_ONCE = 1_000  # of an agent, between two scans: the next one lists the rest


class PendingFiles(Part):
    """Files that stay in ``.pending`` for long."""

    def __init__(self, given: Resources) -> None:
        super().__init__(given)
        self._over_ns = given.config.detection.orphan_after_s * NS_PER_S
        self._warned: dict[str, set[tuple[str, int]]] = {}  # by agent: name and inode
        self._over: dict[FileKey, None] = {}  # agent and name, oldest look first

    @property
    def is_busy(self) -> bool:
        """True while messages wait to be refused."""
        return bool(self._over)

    def scan(self, dirs: Dirs, agent: str) -> bool:
        """List an agent's ``.pending``; False if it is empty. Errors: OSError, UnsafePath."""
        pending = dirs.ensure("agents", agent, *IN_PENDING)
        now = self._clock.now_ns()
        warned = self._warned.pop(agent, set())
        still: set[tuple[str, int]] = set()
        found = 0
        is_empty = True
        for name, status in _files(pending):
            is_empty = False
            age_ns = now - untouched_since(status, now)
            if age_ns > self._over_ns and not name.endswith(MSG_SUFFIX):
                self._remove(agent, name, pending)
                continue
            if age_ns > self._over_ns and found < MOST_AT_ONCE:
                self._over[agent, name] = None
                found += 1
            elif age_ns > PENDING_WARN_S * NS_PER_S:
                still.add(key := (name, status.st_ino))
                if key not in warned:
                    self._warn(agent, name, age_ns)
        if still:
            self._warned[agent] = still
        return not is_empty

    def pop_overdue(
        self, dirs: Dirs, limit: int, max_bytes: int
    ) -> Iterator[tuple[OutboxFile, bytes]]:
        """Up to ``limit`` overdue messages and their content (``max_bytes`` at most).

        Each is checked again: its writer may have continued.
        """
        for agent, name in list(self._over)[:limit]:
            del self._over[agent, name]
            with contextlib.suppress(OSError, UnsafePath):  # the next scan tries again
                pending = dirs.get("agents", agent, *IN_PENDING)
                status = os.stat(name, dir_fd=pending, follow_symlinks=False)
                now = self._clock.now_ns()
                if now - untouched_since(status, now) <= self._over_ns:
                    continue
                data = b""
                with contextlib.suppress(UnsafePath):  # a link: kept as it is, and not read
                    data, status = fsio.read_regular(name, pending, max_bytes)
                yield outbox_file_of(agent, name, status, IN_PENDING), data

    def reason(self, agent: str) -> str:
        """The text of the nack for a file left in .pending."""
        kept = f"archive/{iso_date(self._clock.now_ns())}/{agent}/{REJECTED}/"
        return (
            f"found in .pending, untouched for {_span(self._over_ns // NS_PER_S)}: a message is "
            f"sent by renaming it into the outbox; it is kept in {kept}, move it from there into "
            "the outbox to send it"
        )

    def _warn(self, agent: str, name: str, age_ns: int) -> None:
        self._log(
            f"A file has been in .pending of {agent} for {age_ns // NS_PER_S} s; renaming it into "
            "the outbox sends it",
            action="left_in_pending",
            level="warning",
            agent=agent,
            file=name,
        )

    def _remove(self, agent: str, name: str, pending: int) -> None:
        fsio.remove(name, pending)
        self._log(
            "Removed a temporary file that its writer left in .pending",
            action="remove_orphan",
            level="warning",
            agent=agent,
            file=name,
        )


def _files(pending: int) -> Iterator[tuple[str, os.stat_result]]:
    """The files in ``.pending`` and their stat results, without directories."""
    with os.scandir(pending) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # its writer has renamed it
            if not stat.S_ISDIR(status.st_mode):
                yield entry.name, status


def _span(seconds: int) -> str:
    """A duration in words."""
    if seconds == 3600:
        return "an hour"
    return f"{seconds // 60} minutes" if seconds >= 120 else f"{seconds} s"
