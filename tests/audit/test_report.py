"""The report of a run: looked at in a browser, and taken apart without one."""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from relay.audit.report import Previous, make_page
from relay.audit.report.advice import by_whom, sentence, told_clock
from relay.audit.summary import JobReport, Report
from tests.audit.browser import NARROWEST, Page, browser
from tests.audit.report_data import (
    AT,
    FINDING,
    HOSTILE,
    QUOTES,
    finding,
    full_run,
    latency_rows,
    write_table,
)

WIDE = 1600


@pytest.fixture(scope="module")
def page_of_a_full_run() -> Iterator[Path]:
    """report.html of a run with every table that a chart is made of."""
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        report = full_run(folder)
        path = folder / "report.html"
        path.write_bytes(make_page(report, temp))
        yield path


@pytest.fixture(scope="module")
def chromium() -> Iterator[Page]:
    """One browser for all tests here."""
    with tempfile.TemporaryDirectory() as temp, browser(Path(temp)) as page:
        yield page


def parsed(path: Path) -> ElementTree.Element:
    """The page as a tree: it is well-formed as XML is, which is stricter than HTML."""
    return parsed_page(path.read_bytes())


def parsed_page(page: bytes) -> ElementTree.Element:
    """The same of a page that is in no file."""
    text = page.decode()
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def report_of(*jobs: JobReport) -> Report:
    """A summary of these jobs."""
    by_name = {job.name: job for job in jobs}
    return Report("/home/you", "2026-01-31T09:30:00Z", 30.0, 7.0, [], by_name)


@pytest.mark.shows("audit 3.2")
@pytest.mark.parametrize("width", [WIDE, NARROWEST])
def test_a_browser_asks_for_nothing_but_the_file_and_complains_of_nothing(
    chromium: Page, page_of_a_full_run: Path, width: int
) -> None:
    chromium.requested()
    chromium.complaints()
    chromium.open(page_of_a_full_run, width)
    asked = [
        url for url in chromium.requested() if not url.startswith("data:")
    ]  # the browser's own
    assert asked == [page_of_a_full_run.as_uri()]
    assert chromium.complaints() == []
    assert chromium.tells("window.innerWidth") == width
    assert chromium.tells("document.scrollingElement.scrollWidth") <= width
    assert chromium.tells("document.querySelectorAll('script, iframe, img, object').length") == 0
    assert chromium.tells("document.querySelectorAll('figure').length") == 5
    assert chromium.tells("document.querySelectorAll('figure svg').length") == 7
    assert chromium.tells("document.querySelectorAll('.bar').length") == 16


@pytest.mark.shows("audit 3.2")
def test_the_browser_would_tell(chromium: Page, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<!DOCTYPE html><img src='gone.png'><div style='width:9999px'>x</div>")
    chromium.open(page, NARROWEST)
    assert (tmp_path / "gone.png").as_uri() in chromium.requested()
    assert any("gone.png" in line for line in chromium.complaints())
    assert chromium.tells("document.scrollingElement.scrollWidth") > NARROWEST


def test_dark_and_light_differ_and_can_be_read(chromium: Page, page_of_a_full_run: Path) -> None:
    ratios = """(() => {
      const light = colour => {
        const parts = colour.match(/[\\d.]+/g).slice(0, 3).map(part => part / 255)
          .map(part => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
      };
      const back = element => {
        const colour = getComputedStyle(element).backgroundColor;
        return colour === 'rgba(0, 0, 0, 0)' ? back(element.parentElement) : colour;
      };
      return [...document.querySelectorAll('h1, p, a, td, th, caption, .severity, .unit, .note')]
        .filter(element => element.textContent.trim() && !element.closest('svg'))
        .map(element => {
          const of = [light(getComputedStyle(element).color), light(back(element))].sort();
          const ratio = (Math.max(...of) + 0.05) / (Math.min(...of) + 0.05);
          return [ratio, element.outerHTML.slice(0, 80)];
        }).sort((one, other) => one[0] - other[0])[0];
    })()"""
    papers = set()
    for dark in (False, True):
        chromium.open(page_of_a_full_run, WIDE, dark=dark)
        papers.add(chromium.tells("getComputedStyle(document.body).backgroundColor"))
        ratio, element = chromium.tells(ratios)
        assert ratio >= 4.5, (dark, element)  # WCAG AA
    assert len(papers) == 2


@pytest.mark.shows("audit 3.4")
def test_every_link_leads_to_a_place_in_the_page(page_of_a_full_run: Path) -> None:
    root = parsed(page_of_a_full_run)
    ids = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
    assert len(ids) == len(set(ids))
    links = {element.attrib["href"] for element in root.iter("a")}
    links |= {e.attrib["href"] for e in root.iter("{http://www.w3.org/2000/svg}a")}
    assert {link for link in links if link.removeprefix("#") not in ids} == set()
    assert "#rows-reconcile-missing" in links  # a count leads to the rows of its class
    assert "#row-traffic-0" in links  # a bar to its pair
    labels = [
        name
        for element in root.iter()
        for attribute in ("aria-labelledby", "aria-describedby")
        for name in element.attrib.get(attribute, "").split()
    ]
    assert labels and set(labels) <= set(ids)


def test_headings_tables_and_charts_are_named(page_of_a_full_run: Path) -> None:
    root = parsed(page_of_a_full_run)
    levels = [int(e.tag[1]) for e in root.iter() if re.fullmatch(r"h[1-6]", str(e.tag))]
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    for table in root.iter("table"):
        caption = table.find("caption")
        assert caption is not None and caption.text
        assert all(head.attrib["scope"] for head in table.iter("th"))
    for figure in root.iter("figure"):
        caption = figure.find("figcaption")
        assert caption is not None and caption.text and "aria-describedby" in figure.attrib


def test_findings_come_first_errors_before_warnings(page_of_a_full_run: Path) -> None:
    root = parsed(page_of_a_full_run)
    heads = ["".join(h.itertext()) for h in root.iter("h2")]
    assert heads == ["Findings", "Jobs", "Charts", "Rows"]
    checks = [" ".join("".join(h.itertext()).split()) for h in root.iter("h3")][:3]
    assert checks == [
        "error reconcile.missing 100",
        "error reconcile.orphan 2",
        "warning latency.slow_hour 3",
    ]
    text = page_of_a_full_run.read_text()
    assert "105 findings: 102 errors, 3 warnings; could not run: acks." in text
    assert "<code>relay trace 1769851800000000000-a1b2c3d4</code>" in text
    assert "80 more in <code>findings/job=reconcile/*.parquet</code>" in text


@pytest.mark.shows("audit 3.3")
def test_what_agents_wrote_is_text_wherever_it_stands(page_of_a_full_run: Path) -> None:
    text = page_of_a_full_run.read_text("utf-8")
    assert HOSTILE not in text and QUOTES not in text and "<img" not in text
    assert text.count("<script") == 0
    words = "".join(parsed(page_of_a_full_run).itertext())
    assert HOSTILE in words and QUOTES in words  # it is there, as it was written


def test_tables_without_rows_are_a_sentence_and_no_drawing(tmp_path: Path) -> None:
    from pyarrow import float64, int64, schema, string, timestamp

    columns = [("stage", string()), ("hour", timestamp("us", tz="UTC"))]
    columns += [(name, float64()) for name in ("p50_ms", "p90_ms", "p99_ms")]
    write_table(tmp_path, "latency", [], schema(columns))
    pairs = [("sender", string()), ("recipient", string()), ("messages", int64())]
    write_table(tmp_path, "traffic", [], schema([*pairs, ("bytes", int64())]))
    report = report_of(
        JobReport("latency", tables=["latency"]), JobReport("traffic", tables=["traffic"])
    )
    text = make_page(report, str(tmp_path)).decode()
    assert "<svg" not in text
    for words in (
        "Nothing is wrong.",
        "No check found anything.",
        "No message went through a stage.",
        "No agent wrote to another.",
        "There are no rows.",
    ):
        assert words in text


def test_a_job_that_could_not_run_is_not_called_fine(tmp_path: Path) -> None:
    text = make_page(report_of(JobReport("acks", error="x at 4")), str(tmp_path)).decode()
    assert "Could not run: acks." in text and "could not run: x at 4" in text
    assert "Nothing is wrong" not in text


def test_a_page_is_bounded_whatever_the_tables_hold(tmp_path: Path) -> None:
    rows = [
        {"message_id": f"{n}-a", "class": "delivered", "agent": "x" * 10_000} for n in range(2_000)
    ]
    write_table(tmp_path, "reconcile", rows)
    job = JobReport("reconcile", counts={"delivered": 2_000}, tables=["reconcile"])
    page = make_page(report_of(job), str(tmp_path))
    assert len(page) < 40_000
    assert b"8 of 2,000 rows" in page and b"All 2,000 rows are in" in page


def test_the_busiest_pairs_have_a_bar_and_the_others_a_count(tmp_path: Path) -> None:
    rows = [
        {"sender": f"s{n:03}", "recipient": f"r{n % 40:03}", "messages": n + 1, "bytes": 10}
        for n in range(300)
    ]
    write_table(tmp_path, "traffic", rows)
    text = make_page(report_of(JobReport("traffic", tables=["traffic"])), str(tmp_path)).decode()
    assert "s299 to r019" in text and "300 messages, 10 bytes" in text
    assert "The busiest 12 of 300." in text


def test_commands_are_whole_and_a_table_that_goes_on_has_a_shadow(
    chromium: Page, tmp_path: Path
) -> None:
    own = f"1769851800000000000-{'a1' * 16}"
    rows = [{**finding("reconcile.orphan", "error", 0, store_file="x" * 200), "message_id": own}]
    write_table(tmp_path / "findings", "job=reconcile", rows, FINDING)
    job = JobReport("reconcile", findings={"reconcile.orphan": 1}, errors=1)
    path = tmp_path / "report.html"
    path.write_bytes(make_page(report_of(job), str(tmp_path)))
    for width in (1400, 420):
        chromium.open(path, width)
        cells = "[...document.querySelectorAll('td:has(> code)')]"
        assert chromium.tells(f"{cells}.map(cell => cell.textContent)") == [f"relay trace {own}"]
        assert chromium.tells(f"{cells}.every(cell => cell.scrollWidth <= cell.clientWidth)")
    shadow = "getComputedStyle(document.querySelector('.scroll')).backgroundAttachment"
    assert chromium.tells(shadow) == "local, local, scroll, scroll"


def test_years_of_hours_become_days(tmp_path: Path) -> None:
    write_table(tmp_path, "latency", latency_rows(hours=24 * 400))
    text = make_page(report_of(JobReport("latency", tables=["latency"])), str(tmp_path)).decode()
    assert "Each point is the worst of several hours." in text
    assert len(text) < 60_000


def test_a_full_page_is_small_and_begins_with_what_to_do(page_of_a_full_run: Path) -> None:
    assert page_of_a_full_run.stat().st_size < 180_000
    root = parsed(page_of_a_full_run)
    (head,) = root.iter("h1")
    assert "".join(head.itertext()) == (
        "First: 100 messages accepted, but in no store file. "
        "relay trace 1769851800000000000-a1b2c3d4"
    )


def test_what_the_previous_run_had_not_is_marked_as_new(tmp_path: Path) -> None:
    job = JobReport("reconcile", findings={"reconcile.missing": 2}, errors=2)
    for name, numbers in (("before", (0, 1)), ("after", (1, 2))):
        rows = [finding("reconcile.missing", "error", number) for number in numbers]
        write_table(tmp_path / name / "findings", "job=reconcile", rows, FINDING)
    after = str(tmp_path / "after")
    previous = Previous(report_of(job), str(tmp_path / "before"))
    text = make_page(report_of(job), after, previous).decode()
    rows_of_page = re.findall(r'<tr id="check-.*?</tr>', text)
    marked = ['<span class="new">' in row for row in rows_of_page]
    assert marked == ["00000001-" not in row for row in rows_of_page] and len(marked) == 2
    assert '<span class="new">' not in make_page(report_of(job), after).decode()


def test_durations_and_bytes_are_as_people_read_them_and_the_offset_stays(tmp_path: Path) -> None:
    path = f"{'deep/' * 60}relay.acomm at 4096"
    rows = [
        finding(
            "integrity.damaged", "error", 0, file=path, age_s="7200", bytes_per_day="1.791954944E9"
        )
    ]
    write_table(tmp_path / "findings", "job=integrity", rows, FINDING)
    job = JobReport("integrity", findings={"integrity.damaged": 1}, errors=1)
    text = make_page(report_of(job), str(tmp_path)).decode()
    assert "age s: 2 h" in text and "bytes per day: 1.7 GiB" in text
    assert "relay.acomm at 4096;" in text


def test_what_somebody_waits_for_in_vain_comes_before_what_may_come(tmp_path: Path) -> None:
    found = {"capacity.full_soon": "capacity", "security.unsigned": "security"}
    found["acks.given_up"] = "acks"
    for check, job in found.items():
        rows = [finding(check, "warning", number, recipient=f"w{number}") for number in range(2)]
        write_table(tmp_path / "findings", f"job={job}", rows, FINDING)
    jobs = [JobReport(job, findings={check: 2}, warnings=2) for check, job in found.items()]
    (head,) = parsed_page(make_page(report_of(*jobs), str(tmp_path))).iter("h1")
    said = "".join(head.itertext())
    assert said.startswith("First: 2 commands and queries given up unanswered: w0, w1. relay trace")


def test_what_cannot_be_seen_is_an_escape_as_on_a_terminal(tmp_path: Path) -> None:
    tag, reversed_, joined = "\U000e0041", "\u202e", "\u2060"
    rows = [{"sender": f"a{tag}", "recipient": f"b{reversed_}", "messages": 1, "bytes": 1}]
    write_table(tmp_path, "traffic", rows)
    failed = JobReport("own.x", error=f"\x1b[2J{joined}", hint=f"see {joined}")
    jobs = (JobReport("traffic", tables=["traffic"]), failed)
    text = make_page(report_of(*jobs), str(tmp_path)).decode()
    assert r"a\U000e0041 to b\u202e" in text and r"could not run: \x1b[2J\u2060" in text
    assert r"see \u2060" in text and not {tag, reversed_, joined, "\x1b"} & set(text)


def test_one_hour_is_a_sentence_and_no_line(tmp_path: Path) -> None:
    hour = {"hour": AT, "messages": 3, "bytes": 900, "deliveries": 3, "dead": 0}
    write_table(tmp_path, "traffic_hours", [hour])
    write_table(tmp_path, "latency", latency_rows(hours=1))
    tables = ["traffic_hours", "latency"]
    page = make_page(report_of(JobReport("traffic", tables=tables)), str(tmp_path))
    text = page.decode()
    assert "<svg" not in text and "3 messages, 900 bytes." in text
    assert "The slowest hour, " in text


def test_underscores_of_a_link_are_seen(chromium: Page, page_of_a_full_run: Path) -> None:
    chromium.open(page_of_a_full_run, WIDE)
    style = "getComputedStyle(document.querySelector('.bars a'))"
    offset = f"parseFloat({style}.textUnderlineOffset) / parseFloat({style}.fontSize)"
    assert chromium.tells(offset) > 0.3  # below the underscore, which is a line itself


def test_a_check_is_a_sentence() -> None:
    assert sentence("acks.given_up", 1) == "1 command or query given up unanswered"
    assert sentence("capacity.full_soon", 1) == "the disk will be full within 30 days"
    many = [{"detail": [("recipient", name)]} for name in "dcba"]
    assert by_whom("acks.given_up", many) == ": a, b, c, …"
    assert sentence("reconcile.undelivered", 2) == "2 deliveries held or staged, not yet written"
    assert sentence("integrity.day_changed", 2).startswith("2 days of files")
    row = {"agent": "fixer-2", "detail": [("by_ms", "7200000")]}
    assert told_clock("ordering.future_id", [row]) == "fixer-2's clock is 2 h ahead"
