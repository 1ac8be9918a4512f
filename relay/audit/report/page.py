"""The page: what a run found, in one HTML file that asks for nothing.

It has no script, and a Content-Security-Policy that allows none, nor any address: whatever an
agent called itself or wrote, it is text. The template escapes everything but our own drawings.
"""

from __future__ import annotations

import importlib.resources
import logging

import jinja2
from markupsafe import Markup, escape

from relay.audit.report import cells, sections
from relay.audit.report.reading import tables_in
from relay.audit.summary import Report, numbered

REPORT = "report.html"
TEMPLATE, STYLE = "report.html.j2", "report.css"
# It says on stderr that it makes a cache of fonts; the text of the page is in the reader's fonts.
logging.getLogger("matplotlib").setLevel(logging.ERROR)


def make_page(report: Report, folder: str) -> bytes:
    """The report on what lies in ``folder``: tables and findings, as a run writes them.

    Bounded: at most ``sections.MOST_ROWS`` rows of a table and ``MOST_FINDINGS`` of a check are
    in it, and the path of the others.
    """
    from relay.audit.report.charts import charts  # matplotlib: half a second

    tables = tables_in(folder, [name for job in report.jobs.values() for name in job.tables])
    shown = sections.rows_of(report, tables)
    classes = sections.class_anchors(shown)
    page = _environment().get_template(TEMPLATE)
    text = page.render(
        report=report,
        style=Markup(_packaged(STYLE)),
        headline=headline(report),
        state=_state(report),
        snapshot=report.snapshot_at.replace("T", " "),
        checks=sections.checks(report, folder),
        verdicts=sections.verdicts(report, tables, classes),
        charts=charts(tables),
        tables=shown,
    )
    return text.encode("utf-8", "replace")


def headline(report: Report) -> str:
    """What the run found, in one sentence."""
    failed = [job.name for job in report.jobs.values() if job.error is not None]
    parts = []
    if report.findings:
        errors = sum(job.errors for job in report.jobs.values())
        found = numbered(report.findings, "finding")
        parts.append(f"{found}: {numbered(errors, 'error')}, {_warnings(report, errors)}")
    elif not failed:
        parts.append("Nothing is wrong")
    if failed:
        parts.append(f"could not run: {', '.join(failed)}")
    text = "; ".join(parts) + "."
    return text[0].upper() + text[1:]


def _warnings(report: Report, errors: int) -> str:
    return numbered(report.findings - errors, "warning")


def _state(report: Report) -> str:
    jobs = report.jobs.values()
    if any(job.error is not None for job in jobs):
        return "failed"
    if any(job.errors for job in jobs):
        return "error"
    return "warning" if report.findings else "ok"


def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(_packaged),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["number"] = cells.cell
    made.filters["coded"] = _coded
    made.filters["drawing"] = Markup  # of svg.py, which escapes as XML does
    return made


def _coded(text: str) -> Markup:
    """Text in which backquotes hold commands."""
    parts = text.split("`")
    coded = [
        Markup("<code>{}</code>").format(part) if number % 2 else escape(part)
        for number, part in enumerate(parts)
    ]
    return Markup("").join(coded)


def _packaged(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text("utf-8")
