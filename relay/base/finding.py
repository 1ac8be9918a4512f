"""The result of a check: every check of a store, of files or of the machine yields findings."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, Self

from relay.base.errors import FormatError, RelayError


class Severity(StrEnum):
    """Severity of a finding."""

    ERROR = "error"  # something is lost or does not work
    WARNING = "warning"  # may become an error, or needs attention
    NOTE = "note"  # information, not a problem


class Repair(NamedTuple):
    """One safe change of a file in the home."""

    action: str  # remove, "chmod 700" or "chmod 600"
    path: str  # relative to the home


class Finding(NamedTuple):
    """A problem and its remedy."""

    what: str  # the part that was checked: store, journal, ledger, files, process, …
    where: str  # a file, with the position in it, or another name by which it is found again
    found: str  # with ``expected`` a value, otherwise a sentence
    advice: str = ""
    severity: Severity = Severity.ERROR
    expected: str = ""
    repairs: tuple[Repair, ...] = ()
    is_partial: bool = False  # not a problem: only a part was checked

    @classmethod
    def of_error(
        cls, what: str, exc: RelayError | OSError, path: str = "", advice: str = ""
    ) -> Self:
        """Make a finding of an error that ended a check; ``path``: a file that it does not name."""
        if isinstance(exc, FormatError):
            where = f"{exc.path} at {exc.offset}"
            return cls(what, where, str(exc.found), advice, expected=str(exc.expected))
        if isinstance(exc, RelayError):
            return cls(what, path, str(exc), advice)
        path = path or str(exc.filename)
        return cls(what, path, f"{path}: {exc.strerror or exc}", advice)

    @property
    def text(self) -> str:
        """The problem in one line, without the advice."""
        if not self.expected:
            return self.found
        return f"{self.where}: expected {self.expected}, found {self.found}"

    def __str__(self) -> str:
        return f"{self.what}: {self.text}; {self.advice}"
