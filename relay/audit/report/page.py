"""The page: the findings, verdicts and rows of a run in one HTML file that needs nothing else.

It has no script, and a Content-Security-Policy that allows none, nor any address: whatever an
agent called itself or wrote, it is text. The template escapes everything but our own drawings.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup, escape

from relay.audit.jobs import JOBS, AuditJob
from relay.audit.lake_columns import comment_of
from relay.audit.report.advice import advice, by_whom, command, sentence, told_clock
from relay.audit.report.charts import charts
from relay.audit.report.tables import (
    NOTHING,
    Row,
    Table,
    anchor_id,
    cell,
    findings_of,
    is_number,
    tables_in,
    unit_of,
)
from relay.audit.summary import JobReport, Report, format_count, unread_text, with_noun
from relay.base.text import visible

MOST_FINDINGS = 20  # shown of a check
MOST_ROWS = 40  # shown of a table
MOST_OF_CLASS = 8  # shown of each class, where rows have one
MOST_COLUMNS = 24
MOST_PREVIOUS = 10_000  # findings of a check compared with
SHORT = 34  # characters: an id, a time, a name
# By which column the rows shown are chosen, the largest first; else they are the first.
LARGEST_BY = {
    "acks": "overdue",
    "dead_letters_reasons": "letters",
    "latency": "p99_ms",
    "latency_routes": "p99_ms",
    "ordering": "inversions",
    "security": "events",
    "threads": "messages",
    "traffic": "messages",
    "traffic_agents": "sent",
    "traffic_bursts": "times_median",
    "traffic_hours": "messages",
}
SEVERITIES = ("error", "warning")
SHOWN_LOST = 20  # lines of what could not be read


@dataclass(frozen=True)
class PageColumn:
    """A column of a table shown."""

    name: str
    unit: str
    means: str  # its comment in the schema
    number: bool = False


@dataclass(frozen=True)
class Cell:
    """A value shown."""

    text: str
    number: bool
    command: bool = False  # to be typed
    is_new: bool = False

    @property
    def kind(self) -> str:
        """CSS class: at the right, on one line, or with room for a sentence."""
        if self.number:
            return "number"
        return "short" if len(self.text) <= SHORT else "long"


@dataclass(frozen=True)
class RowGroup:
    """Rows that belong together, with an anchor; rows have their own."""

    anchor: str
    rows: list[tuple[str, list[Cell]]]


@dataclass(frozen=True)
class PageTable:
    """A table of the page."""

    name: str
    anchor: str
    description: str
    columns: list[PageColumn]
    groups: list[RowGroup]
    shown: int
    count: int
    path: str  # where all rows are, below the folder of the report

    @property
    def left_out(self) -> int:
        """Rows that are not in the page."""
        return self.count - self.shown


@dataclass(frozen=True)
class Check:
    """The findings of one check."""

    name: str
    severity: str
    count: int
    anchor: str
    advice_text: str
    table: PageTable
    sentence: str
    command: str  # looks into its first finding
    is_new: bool  # has a finding among those shown that the previous run had not


@dataclass(frozen=True)
class Count:
    """A number, and the anchor of its rows."""

    text: str  # as summary.counted
    anchor: str  # empty without a table


@dataclass(frozen=True)
class JobVerdict:
    """A job's line."""

    name: str
    description: str
    state: str  # ok, error, warning, failed
    outcome: str
    hint: str
    anchor: str
    counts: list[Count]
    seconds: str


class Previous(NamedTuple):
    """The run that was in the folder before this one."""

    report: Report
    folder: str

    def findings(self, job: str) -> dict[str, set[Key] | None] | None:
        """Return the keys by check: None without the job, and for a check with too many."""
        ran = self.report.jobs.get(job)
        if ran is None or ran.error is not None:
            return None
        rows = findings_of(self.folder, job, MOST_PREVIOUS + 1)
        return {
            check: {_key(row) for row in of} if len(of) <= MOST_PREVIOUS else None
            for check, of in rows.items()
        }


Key = tuple[str, ...]
SHOWN = ("message_id", "agent", "route", "path")
# Details that tell a finding from another of its check; the others change with time.
TELLING = ("day", "hour", "kind", "store_file", "recipient", "reason")


def _key(row: Row) -> Key:
    detail = dict(row["detail"] or ())
    parts = [*[row.get(of) for of in SHOWN], *[detail.get(of) for of in TELLING]]
    return tuple(str(part) for part in parts)


def checks(report: Report, folder: str, previous: Previous | None = None) -> list[Check]:
    """List checks with findings: errors, then warnings, the most frequent first."""
    made = []
    for job in (job for job in report.jobs.values() if job.findings):
        examples = findings_of(folder, job.name, MOST_FINDINGS)
        known = previous.findings(job.name) if previous is not None else None
        for name, count in job.findings.items():
            earlier = None if known is None else known.get(name, set())
            made.append(_check(job, name, count, examples.get(name, []), earlier))
    return sorted(made, key=lambda check: (SEVERITIES.index(check.severity), -check.count))


def _check(
    job: JobReport, name: str, count: int, rows: list[Row], earlier: set[Key] | None
) -> Check:
    """Make the check of a job; an own check speaks in the words of its file."""
    severities = {row["severity"] for row in rows}
    severity = next((severe for severe in SEVERITIES if severe in severities), SEVERITIES[0])
    anchor = anchor_id("check", name)
    are_new = [earlier is not None and _key(row) not in earlier for row in rows]
    names = [part for part in SHOWN[1:] if any(row.get(part) for row in rows)]
    columns = [PageColumn(part, "", "") for part in (*names, "details", "command")]
    lines = [
        (f"{anchor}-{number}", _finding(name, row, names, is_new=is_new))
        for number, (row, is_new) in enumerate(zip(rows, are_new, strict=True))
    ]
    table = PageTable(
        name,
        f"table-{anchor}",
        "",
        columns,
        [RowGroup("", lines)],
        len(rows),
        count,
        f"findings/job={job.name}/",
    )
    if job.description:
        said, text = f"{with_noun(count, 'row')}: {job.description}", job.advice
    else:
        said = told_clock(name, rows) or sentence(name, count) + by_whom(name, rows)
        text = advice(name, has_message=any(row["message_id"] for row in rows))
    look = command(name, rows[0]["message_id"] if rows else None)
    return Check(name, severity, count, anchor, text, table, said, look, any(are_new))


def _finding(check: str, row: Row, names: Sequence[str], *, is_new: bool) -> list[Cell]:
    shown = [_cell(row[name]) for name in names]
    details = Cell(cell(list(row["detail"] or ())), False, is_new=is_new)
    return [*shown, details, Cell(command(check, row["message_id"]), False, command=True)]


def _trace(message_id: object) -> Cell:
    """Make the command for a message; an id that is not one of ours is not put into a command."""
    text = command("", message_id)
    return Cell(text, False, command=True) if " trace " in text else Cell(NOTHING, False)


def verdicts(report: Report, folder_has: Iterable[str], classes: Iterable[str]) -> list[JobVerdict]:
    """Make a line a job; ``classes``: anchors of rows of one class."""
    there, groups = set(folder_has), set(classes)
    return [_verdict(job, there, groups) for job in report.jobs.values()]


def _verdict(job: JobReport, there: set[str], groups: set[str]) -> JobVerdict:
    state = "failed" if job.error is not None else "ok"
    if state == "ok" and job.errors + job.warnings:
        state = "error" if job.errors else "warning"
    elif state == "ok" and job.is_partial:
        state = "warning"
    tables = [name for name in job.tables if name in there]
    counts = []
    for name, count in job.counts.items():
        anchors = [anchor_id("rows", table, name) for table in tables]
        fallback = anchor_id("table", tables[0]) if tables else ""
        anchor = next((anchor for anchor in anchors if anchor in groups), fallback)
        counts.append(Count(format_count(name, count), anchor))
    known = JOBS.get(job.name)
    return JobVerdict(
        job.name,
        known.header.title if known else job.description,
        state,
        job.outcome if state != "ok" else "OK",
        job.hint,
        anchor_id("job", job.name),
        counts,
        f"{job.seconds:,.1f}",
    )


def _shown(table: Table, owner: AuditJob | None) -> PageTable:
    """Make a table of the page; ``owner``: its job, None of an own check."""
    traced = "message_id" in table.columns and table.name.endswith("slowest")
    names = table.columns[:MOST_COLUMNS]
    groups: list[RowGroup] = []
    every: list[list[Cell]] = []
    for value, rows in _rows(table):
        lines = []
        for row in rows:
            values = [_cell(row[name], name) for name in names]
            if traced:
                values.append(_trace(row["message_id"]))
            lines.append((anchor_id("row", table.name, str(len(every))), values))
            every.append(values)
        groups.append(RowGroup(anchor_id("rows", table.name, value) if value else "", lines))
    schema = owner.tables.get(table.name, ()) if owner is not None else ()
    means = {field.name: comment_of(field) for field in schema}
    columns = [
        PageColumn(
            name, unit_of(name), means.get(name, ""), any(values[at].number for values in every)
        )
        for at, name in enumerate(names)
    ]
    if traced:
        columns.append(PageColumn("command", "", "a command"))
    return PageTable(
        table.name,
        anchor_id("table", table.name),
        owner.header.title if owner is not None and owner.name == table.name else "",
        columns,
        groups,
        len(every),
        table.count,
        f"{table.name}/",
    )


def _rows(table: Table) -> Sequence[tuple[str, list[Row]]]:
    """Choose the rows to show, by the class that they share."""
    if not table.count:
        return []
    if table.has("class"):
        return sorted(table.first_of_each("class", MOST_OF_CLASS).items())
    by = LARGEST_BY.get(table.name, "")
    if by and table.has(by):
        return [("", table.largest(by, MOST_ROWS))]
    return [("", table.head(MOST_ROWS))]


def _cell(value: Any, name: str = "") -> Cell:
    return Cell(cell(value, name), is_number(value))


TEMPLATE, STYLE = "report.html.j2", "report.css"


def make_page(report: Report, folder: str, previous: Previous | None = None) -> bytes:
    """Make the report on ``folder``: its tables and findings, as a run writes them.

    Bounded: at most ``MOST_ROWS`` rows of a table and ``MOST_FINDINGS`` of a check are
    in it, and the path of the others. Findings that ``previous`` has not are marked as new.
    """
    found = checks(report, folder, previous)
    owners = {name: JOBS.get(job.name) for job in report.jobs.values() for name in job.tables}
    tables = tables_in(folder, owners)
    shown = [_shown(table, owners[name]) for name, table in tables.items()]
    classes = [group.anchor for table in shown for group in table.groups if group.anchor]
    page = _environment().get_template(TEMPLATE)
    text = page.render(
        report=report,
        style=Markup(_packaged(STYLE)),
        headline=headline(report),
        state=_state(report),
        snapshot=report.snapshot_at.replace("T", " "),
        checks=found,
        first=first_thing(report, found),
        shown_lost=SHOWN_LOST,
        unread=unread_text(report),
        verdicts=verdicts(report, tables, classes),
        charts=charts(tables),
        tables=shown,
    )
    return text.encode("utf-8", "replace")


def first_thing(report: Report, found: Sequence[Check]) -> tuple[str, str]:
    """Return what to look at before all else, and its command; ("", "") when nothing is wrong."""
    failed = [job for job in report.jobs.values() if job.error is not None]
    urgent = sorted(found, key=lambda check: (SEVERITIES.index(check.severity), _rank(check.name)))
    if urgent and (urgent[0].severity == SEVERITIES[0] or not failed):
        return urgent[0].sentence, urgent[0].command
    if failed:
        return f"{failed[0].name} could not run", "relay doctor"
    if report.lost:
        return _lost(report), "relay check"
    return "", ""


# Damage and a full disk first: they grow while one looks at the rest. Then what somebody waits
# for in vain; last what may come.
URGENT = (
    "capacity.below_floor",
    "integrity",
    "acks.given_up",
    "dead_letters",
    "security",
    "reconcile",
    "threads.unanswered",
    "acks",
    "",  # all others
    "capacity",
)


def _rank(check: str) -> int:
    known = [at for at, begin in enumerate(URGENT) if begin and check.startswith(begin)]
    return min(known, default=URGENT.index(""))


def headline(report: Report) -> str:
    """Summarise the run in one sentence."""
    failed = [job.name for job in report.jobs.values() if job.error is not None]
    parts = [_lost(report)] if report.lost else []
    if report.findings:
        errors = sum(job.errors for job in report.jobs.values())
        found = with_noun(report.findings, "finding")
        warnings = with_noun(report.findings - errors, "warning")
        parts.append(f"{found}: {with_noun(errors, 'error')}, {warnings}")
    elif not failed:
        parts.append("nothing is wrong in the rest" if report.lost else "nothing is wrong")
    if failed:
        parts.append(f"could not run: {', '.join(failed)}")
    text = "; ".join(parts) + "."
    return text[0].upper() + text[1:]


def _lost(report: Report) -> str:
    parts = with_noun(len(report.lost), "part")
    return f"{parts} of store and journal could not be read"


def _state(report: Report) -> str:
    jobs = report.jobs.values()
    if report.lost or any(job.error is not None for job in jobs):
        return "failed"
    if any(job.errors for job in jobs):
        return "error"
    return "warning" if report.findings else "ok"


def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(_packaged),
        autoescape=True,
        finalize=_seen,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["number"] = cell
    made.filters["coded"] = _coded
    return made


def _seen(value: object) -> object:
    """Escape what cannot be seen in any text of the page, as on a terminal."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _coded(text: str) -> Markup:
    """Turn parts between backquotes into code elements."""
    parts = visible(text).split("`")
    coded = [
        Markup("<code>{}</code>").format(part) if number % 2 else escape(part)
        for number, part in enumerate(parts)
    ]
    return Markup("").join(coded)


def _packaged(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text("utf-8")
