"""The folder of a run: its tables are of one run, or it has no report.

    OUT/{table}/*.parquet               a table of a job
    OUT/findings/job={job}/*.parquet    findings of all jobs: one table
    OUT/summary.json                    counts, findings a check, seconds
    OUT/report.html                     the same for people

A run holds OUT/.lock and writes into OUT/.unfinished. When its jobs are done, summary and report
of the previous run are removed, tables are exchanged, and the new summary and report come last, by
rename. Killed before that, the folder is unchanged; killed within, it has no report. Tables of the
previous run that this one did not make are removed; other files stay. A folder that no run has
made, and that is not empty, is refused: what is in it may have the name of a table, as ``agents``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

import msgspec

from relay.audit.jobs import JOBS
from relay.audit.jobs.job import FINDINGS
from relay.audit.report import Previous, make_page
from relay.audit.summary import REPORT, SUMMARY, Report, read_summary, to_json
from relay.base import fsio
from relay.base.discovery import has_config
from relay.base.errors import RelayError
from relay.base.home import LEDGER

UNFINISHED = ".unfinished"
LOCK = ".lock"


class OutFolder:
    """Where a run writes its tables; ``publish`` makes them the folder's."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.tables = os.path.join(path, UNFINISHED)

    def publish(self, report: Report) -> None:
        """Exchange the tables, then write summary.json and report.html. Errors: RelayError."""
        try:
            page = make_page(report, self.tables, self._previous())
            self._exchange()
            summary = os.path.join(self.path, SUMMARY)
            fsio.write_atomic(summary, msgspec.json.format(to_json(report)))
            fsio.write_atomic(os.path.join(self.path, REPORT), page)
        except OSError as exc:
            raise _cannot_write(exc.filename or self.path, exc) from exc

    def _previous(self) -> Previous | None:
        """Return the run that is in the folder, to mark what is new since; None without one."""
        with contextlib.suppress(OSError, RelayError):
            return Previous(read_summary(self.path), self.path)
        return None

    def _exchange(self) -> None:
        old = os.path.join(self.tables, ".old")
        os.makedirs(old)
        previous = self._previous_tables()
        there = [name for name in previous if os.path.isdir(os.path.join(self.path, name))]
        for name in (REPORT, SUMMARY):  # the report first: it speaks of more
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, name))
        fsio.sync_dir(self.path)
        for name in there:
            os.rename(os.path.join(self.path, name), os.path.join(old, name))
        for name in sorted(os.listdir(self.tables)):
            if not name.startswith("."):
                os.rename(os.path.join(self.tables, name), os.path.join(self.path, name))
        fsio.sync_dir(self.path)

    def _previous_tables(self) -> list[str]:
        """List tables that a previous run may have left here: of its jobs and of today's."""
        names = {FINDINGS, *[table for job in JOBS.values() for table in job.tables]}
        names.update(os.listdir(self.tables))
        with contextlib.suppress(OSError, RelayError):
            for job in read_summary(self.path).jobs.values():
                names.update(name for name in job.tables if os.path.basename(name) == name)
        return sorted(name for name in names if name and not name.startswith("."))


@contextlib.contextmanager
def out_folder(path: str) -> Iterator[OutFolder]:
    """Open the folder, made if need be; unfinished tables are removed afterwards.

    Errors: RelayError when it cannot be made, is of something else, or another run writes there.
    """
    made = not os.path.exists(path)
    path = path if made else os.path.realpath(path)  # a folder that is a link cannot be synced
    _require_own(path)
    folder = OutFolder(path)
    with contextlib.ExitStack() as held:
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)  # private: it shows who writes to whom
            held.enter_context(fsio.locked(os.path.join(path, LOCK)))
            shutil.rmtree(folder.tables, ignore_errors=True)  # of a run that was killed
            os.mkdir(folder.tables, mode=0o700)
        except BlockingIOError:
            raise RelayError(
                f"another run writes into {path}", hint="wait for it, or see --out"
            ) from None
        except OSError as exc:
            raise _cannot_write(path, exc) from exc
        try:
            yield folder
        finally:
            shutil.rmtree(folder.tables, ignore_errors=True)
            if made and os.listdir(path) == [LOCK]:  # else the run is published
                shutil.rmtree(path, ignore_errors=True)


def _require_own(path: str) -> None:
    """Refuse a folder with files that no run has made: a home first, which has a lock, too."""
    with contextlib.suppress(OSError):  # explained when it is made
        names = os.listdir(path)
        is_home = has_config(path) or LEDGER in names  # complete or not
        if is_home or (names and not _is_of_a_run(path, names)):
            what = "is a relay home" if is_home else "has files of something else"
            hint = "name a new or an empty folder, or that of an earlier run, with --out"
            raise RelayError(f"{path} {what}", hint=hint)


def _is_of_a_run(path: str, names: list[str]) -> bool:
    """True for a folder with a run, or what is left of one; others have a lock, too."""
    if LOCK not in names:
        return False
    with contextlib.suppress(RelayError):
        read_summary(path)
        return True
    # killed, or its disk was full, while tables were exchanged
    tables = {table for job in JOBS.values() for table in job.tables}
    return UNFINISHED in names or {*names} <= {LOCK, REPORT, SUMMARY, FINDINGS, *tables}


def write_page(path: str) -> str:
    """Make report.html again from a run's folder; return its path. Errors: RelayError."""
    report = read_summary(path)
    name = os.path.join(os.path.realpath(path), REPORT)
    try:
        fsio.write_atomic(name, make_page(report, path))
    except OSError as exc:
        raise _cannot_write(exc.filename or name, exc) from exc
    return name


def _cannot_write(path: str, error: OSError) -> RelayError:
    return RelayError(f"{path} cannot be made: {error.strerror}", hint="see --out")
