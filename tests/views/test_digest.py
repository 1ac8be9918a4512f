"""`relay audit digest`: what is counted since a time, what is compared, and how it is shown."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.base.clock import NS_PER_S
from relay.base.home import Home
from relay.base.names import ORCHESTRATOR
from relay.cli import run
from relay.cli.digest_lines import digest_lines
from relay.views.digest import Counts, Digest, Owed, Reason, Slow, make_digest
from tests.audit.home_builder import START_NS, HomeBuilder
from tests.audit.ledger_rows import DAY, HOUR, MINUTE, MS, agent, delivery, insert, message

pytestmark = pytest.mark.damages  # a ledger alone, put together by hand
NOW = START_NS + 2 * DAY
SINCE = START_NS + DAY  # the day before begins with the first message
TODAY = SINCE + HOUR + 123 * MS
NOTHING = Digest(SINCE, NOW, Counts(), None, 0, {}, [], {}, 0, [], 0, 0, [], [], [], [])


@pytest.fixture
def home(tmp_path: Path) -> Iterator[HomeBuilder]:
    """A home with a configuration, and an empty ledger."""
    Home.create(str(tmp_path / "home"), b"{}").close()
    builder = HomeBuilder(tmp_path / "home")
    yield builder
    builder.close()


def moved(message_id: str, to: str, at_ns: int) -> dict[str, object]:
    """A row of audit_log, of the delivery to bob."""
    row = {"message_id": message_id, "recipient": "bob", "old_status": "written"}
    return {"at": at_ns, "new_status": to, **row}


def fill(home: HomeBuilder) -> None:
    """Two days: on the first one a message and two commands, on the second the rest."""
    log = [
        moved("1-early", "dead", START_NS + HOUR),
        moved("1-late", "dead", TODAY),
        moved("1-replayed", "dead", TODAY),
    ]
    insert(home, "audit_log", log)  # first: the rows of triggers have today's time
    command = {"message_type": "command"}
    mail = [
        message("1-early", START_NS, **command),
        message("1-late", START_NS + 1, **command),
        message("1-replayed", START_NS + 2),
        message("2-open", TODAY, **command),
        message("2-query", TODAY + 1, message_type="query"),
        message("2-nacked", TODAY + 2, **command),
        message("2-told", TODAY + 3, agent_name="bob", target="alice"),
        message("2-again", TODAY + 4),
        message("2-rebuilt", TODAY + 5),
        message("2-bounced", TODAY + 6, target="gone"),
        message("2-refused", TODAY + 7, status="failed", last_error="too large", **command),
        message("2-retire", TODAY + 8, target=ORCHESTRATOR, **command),
        message("2-notice", TODAY + 9, agent_name=ORCHESTRATOR, target="alice"),
    ]
    insert(home, "messages", mail)
    ended = {"state": "dead", "last_error": "no acknowledgment", "obligation": "given_up"}
    whole_s = (TODAY // NS_PER_S + 50) * NS_PER_S
    sent = [
        delivery("1-early", START_NS, 5, **ended),
        delivery("1-late", START_NS, 5, **ended),
        delivery("1-replayed", START_NS, 5, state="read", attempt=2),
        delivery("2-open", TODAY, 5, obligation="open", due_at=NOW - HOUR, reminders=2),
        delivery("2-query", TODAY, 7, state="acked", obligation="answered"),
        delivery("2-nacked", TODAY, 6, state="acked", obligation="answered", ack_status="failed"),
        delivery("2-told", TODAY, 9, recipient="alice"),
        delivery("2-again", TODAY, 9_000, state="held", attempt=2),
        delivery("2-rebuilt", TODAY, 0, written_at=whole_s),
        delivery("2-bounced", TODAY, 0, recipient="gone", state="bounced", written_at=None),
        delivery("2-notice", TODAY, 9_000, recipient="alice", state="read"),
    ]
    insert(home, "deliveries", sent)
    refusal = {"agent": "eve", "file_name": "x.msg", "inode": 1, "mtime_ns": 1, "nack_id": "n"}
    insert(home, "rejections", [{**refusal, "reason": "its id is taken", "at": TODAY}])
    agents = [
        agent("alice", TODAY, registered_at=START_NS),
        agent("bob", TODAY, registered_at=START_NS),
        agent("carol", TODAY, registered_at=TODAY),
        agent("dan", START_NS, registered_at=START_NS, status="retired", changed_at=TODAY),
        agent("erin", START_NS, registered_at=START_NS),
    ]
    insert(home, "agents", agents)


def test_who_was_never_seen_has_not_read_since_the_beginning_of_time(home: HomeBuilder) -> None:
    insert(home, "agents", [agent("alice", None, registered_at=START_NS)])
    assert make_digest(str(home.root / "ledger.db"), 0, NOW).worked == {}


def test_each_event_counts_in_its_own_time(home: HomeBuilder) -> None:
    fill(home)
    made = make_digest(str(home.root / "ledger.db"), SINCE, NOW)
    assert made.counts == Counts(
        messages=9, asked=3, answered=1, failed=1, unanswered=1, ended=2, refused=2
    )
    assert made.before == Counts(messages=3, asked=2, given_up=2, ended=1)
    assert made.worked == {"alice": 8, "bob": 1, "carol": 0}
    assert (made.agents, made.joined, made.left) == (5, ["carol"], {"dan": "retired"})
    assert (made.open_answers, made.held) == (1, 1)
    assert made.unread == 5  # open, told and rebuilt; early and late, dead in the inbox
    assert made.open == [Owed("2-open", "alice", "bob", "command", TODAY, NOW - HOUR, 2)]
    # Without the second attempt, the time rebuilt in whole seconds, and the relay's own notice.
    assert [one.message_id for one in made.slowest] == ["2-told", "2-query", "2-nacked"]
    assert made.given_up == []  # 1-early and 1-late are of the day before
    day_before = make_digest(str(home.root / "ledger.db"), START_NS, NOW)
    assert [one.message_id for one in day_before.given_up] == ["1-late", "1-early"]
    assert made.ended == [
        Reason("bob", "dead", "no acknowledgment", 1),
        Reason("gone", "bounced", "", 1),
    ]
    assert made.refused == [
        Reason("alice", "refused", "too large", 1),
        Reason("eve", "refused", "its id is taken", 1),
    ]


def test_a_ledger_that_begins_later_is_not_compared(home: HomeBuilder) -> None:
    insert(home, "messages", [message("1-a", START_NS)])
    ledger = str(home.root / "ledger.db")
    assert make_digest(ledger, START_NS + DAY, START_NS + 2 * DAY + 1).before is None
    assert make_digest(ledger, START_NS + DAY, START_NS + 2 * DAY).before == Counts(messages=1)


def test_rows_are_found_where_ids_have_gaps(home: HomeBuilder) -> None:
    times = {1: 0, 2: 1, 50: 2, 51: 2, 900: 3}
    mail = [message(f"{n}-a", START_NS + at * HOUR, id=n) for n, at in times.items()]
    insert(home, "messages", mail)
    ledger = str(home.root / "ledger.db")
    sent = [
        make_digest(ledger, START_NS + at * HOUR, START_NS + 9 * HOUR).counts.messages
        for at in range(5)
    ]
    assert sent == [5, 4, 3, 1, 0]


def test_the_longest_waiting_answer_comes_first_and_few_are_named(home: HomeBuilder) -> None:
    waits = {"1-a": 3, "1-b": 1, "1-c": 4, "1-d": 2}
    mail = [message(i, START_NS + at * HOUR, message_type="query") for i, at in waits.items()]
    insert(home, "messages", mail)
    insert(home, "deliveries", [delivery(i, START_NS, 5, obligation="open") for i in waits])
    made = make_digest(str(home.root / "ledger.db"), SINCE, NOW)
    assert [one.message_id for one in made.open] == ["1-b", "1-d", "1-a"]
    assert made.open_answers == 4


def test_what_a_person_reads() -> None:
    made = Digest(
        since_at=SINCE,
        until_at=NOW,
        counts=Counts(1234, 45, 36, 2, 3, 4, 5, 2),
        before=Counts(messages=900, asked=50, ended=1),
        agents=7,
        worked={"alice": 1000, "bob": 200, "carol": 30, "dan": 4, "operator": 0},
        joined=["carol"],
        left={"erin": "retired"},
        open_answers=3,
        open=[
            Owed("1-0a0a0a0a11", "alice", "bob", "command", NOW - 3 * DAY, NOW - 2 * HOUR, 1),
            Owed("1-0a0a0a0a22", "alice", "dan", "query", NOW - 5 * MINUTE, None, 0),
        ],
        held=1,
        unread=12,
        slowest=[Slow("1-0b0b0b0b11", "alice", "bob", 1234.5), Slow("1-a", "dan", "bob", 12.4)],
        ended=[Reason("bob", "dead", "no\nword  " * 20, 3), Reason("dan", "expired", "TTL", 2)],
        refused=[Reason(name, "refused", "too large", 1) for name in "abcd"],
        given_up=[
            Owed("1-0c0c0c0c11", "alice", "bob", "command", NOW - 2 * DAY, NOW - DAY, 3),
            Owed("1-0d0d0d0d11", "alice", "dan", "query", NOW - 3 * DAY, NOW - DAY, 3),
        ],
    )
    made.counts.refused = 4
    reason = "no word " * 20
    worked = "5 of 7 agents; sent: alice 1,000, bob 200, carol 30, 1 more; read only: operator"
    assert digest_lines(made) == [
        ("worked", worked),
        ("asked", "45 commands and queries: 36 answered, 2 failed, 3 open, 4 given up"),
        ("given up", "alice > bob 0c0c0c0c, alice > dan 0d0d0d0d, 2 more"),
        ("open", "3 answers owed, 12 unread, 1 not delivered yet"),
        ("", "0a0a0a0a11 bob owes alice an answer for 3 d, overdue 2 h"),
        ("", "0a0a0a0a22 dan owes alice an answer for 5 min"),
        ("slowest", "1.2 s alice > bob 0b0b0b0b, 12 ms dan > bob 1-a"),
        ("dead", f"5: bob 3 dead ({reason[:59]}…), dan 2 expired (TTL)"),
        ("refused", "4: a 1 (too large), b 1 (too large), c 1 (too large), 1 more"),
        ("changed", "sent 1,234 (was 900), asked 45 (50), dead 5 (1), refused 4 (0)"),
        ("agents", "carol joined, erin is retired"),
    ]


def test_nothing_happened() -> None:
    assert digest_lines(NOTHING) == [
        ("worked", "0 of 0 agents"),
        ("asked", "0 commands and queries"),
        ("open", "0 answers owed, 0 unread"),
        ("slowest", "no deliveries"),
        ("dead", "none"),
        ("refused", "none"),
        ("changed", "nothing to compare with: the ledger does not have the 24 h before"),
    ]


def test_the_page_has_what_agents_wrote_as_text(
    home: HomeBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "<script>alert(1)</script>\x1b[2J"
    now = time.time_ns()
    insert(home, "messages", [message("1-a", now, status="failed", last_error=evil)])
    out, link = tmp_path / "digest.html", tmp_path / "latest.html"
    link.symlink_to(out)
    assert run(["audit", "digest", "--home", home.path, "--out", str(link)]) == 0
    page = out.read_text()
    assert "alice 1 (&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[2J)" in page
    assert "<script" not in page and "\x1b" not in page
    assert "default-src 'none'" in page
    assert "alice 1 (<script>alert(1)</script>\\x1b[2J)" in capsys.readouterr().out
    assert os.stat(out).st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        (["--since", "soon"], 2, "'soon' is not a time such as 10m, 14:05, "),
        (["--since", "9999-01-01"], 2, "it is in the future"),
        (["--home", "/nowhere"], 5, "there is no relay home at /nowhere"),
        ([], 5, "there is no ledger at "),
    ],
)
def test_an_error_is_one_line(
    given: list[str], code: int, said: str, home: HomeBuilder, capsys: pytest.CaptureFixture[str]
) -> None:
    home.close()
    if not given:
        for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
            (home.root / name).unlink(missing_ok=True)
    assert run(["audit", "digest", "--home", home.path, *given]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err and captured.err.count("\n") == 1


def test_it_runs_where_the_packages_of_the_audits_are_not_installed(home: HomeBuilder) -> None:
    fill(home)
    missing = "import sys; sys.modules |= dict.fromkeys(('pyspark', 'pyarrow', 'jinja2', 'py4j'))"
    code = f"{missing}; from relay.cli import main; main()"
    words = ["audit", "digest", "--home", home.path, "--since", "2026-01-01"]
    ended = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "\nopen      1 answer owed, 5 unread, 1 not delivered yet\n" in ended.stdout
