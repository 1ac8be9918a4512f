"""The report of a run: one HTML file that needs nothing else, neither network nor script.

tables.py     rows of the run's tables, bounded, and values as a person reads them
charts.py     which charts there are, as bars and lines
advice.py     a finding in a sentence, what to do about it, and its command
page.py       all of it, through report.html.j2 and report.css
"""

from relay.audit.report.page import Previous, make_page

__all__ = ["Previous", "make_page"]
