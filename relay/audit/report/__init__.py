"""The report of a run: one HTML file that needs nothing else, neither network nor script.

reading.py    rows of the run's tables, bounded
cells.py      values as a person reads them
svg.py        a drawing of matplotlib made fit for the page
drawing.py    what all charts share: colours, sizes, axes
charts.py     which charts there are, and from which columns
advice.py     what to do about a finding
sections.py   findings, verdicts and rows, as the template takes them
page.py       all of it, through report.html.j2 and report.css
"""

from relay.audit.report.page import REPORT, make_page

__all__ = ["REPORT", "make_page"]
