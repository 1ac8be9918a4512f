"""What each page shows, as JSON and as text."""

from __future__ import annotations

import functools
import html
import json
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from relay.audit.summary import JobReport, Report, to_json
from relay.base.text import visible
from relay.reach.session import Session, save_session, session_lock
from relay.views import attention
from relay.web import health, pages
from relay.web.app import Web
from tests.box import Box
from tests.procs import PROJECT
from tests.web.conftest import HOST, ORIGIN, SECRET

EVIL = (
    """<script>alert(1)</script> "' onerror=alert(1) &lt; {{ 7*7 }} {% raw %} </pre>\u202e\x1b[2J"""
)


def text_of(page: str) -> str:
    """What a reader sees of a page."""
    return html.unescape(re.sub(r"<[^>]*>", " ", page))


def test_messages_are_found_as_by_relay_list(box: Box, client: TestClient) -> None:
    box.send("alice", "TO: bob\nKIND: command\n\ndeploy to staging")
    box.send("bob", "TO: alice\n\nthe build is green")
    box.send("alice", "TO: nobody\n\ntypo")
    found = client.get("/search.json", params={"q": "from:alice is:open"}).json()
    assert [row["content"] for row in found["rows"]] == ["deploy to staging"]
    everything = client.get("/search.json").json()["rows"]
    assert {"deploy to staging", "the build is green", "typo"} <= {r["content"] for r in everything}
    page = client.get("/search", params={"q": "from:bob"}).text
    assert "the build is green" in page and "deploy to staging" not in page


def test_of_very_many_recipients_the_first_are_shown(
    box: Box, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message to 2,000 agents that nobody has read made a page of a megabyte."""
    box.send("alice", "TO: *\n\nthe build is green")
    monkeypatch.setattr(pages, "MOST_ROWS", 1)
    found = client.get("/search.json", params={"q": "is:unread"}).json()
    assert [row["to"] for row in found["rows"]] == ["bob"]
    assert found["note"] == "2 more recipients of these messages"


@pytest.mark.damages
def test_a_value_of_another_type_in_the_ledger_is_named(box: Box, client: TestClient) -> None:
    box.send("alice", "TO: operator\nKIND: query\n\nwhich branch?")
    box.sql("UPDATE deliveries SET due_at = 'soon'")
    answer = client.get("/search", params={"q": "is:open"})
    assert "due_at is 'soon', expected INTEGER" in text_of(answer.text)
    assert answer.status_code == 503


def test_commands_name_a_home_that_they_would_not_find(box: Box, client: TestClient) -> None:
    asked = box.send("alice", "TO: operator\nKIND: query\n\nwhich branch?").partition("-")[2]
    page = html.unescape(client.get("/").text)
    assert f'<code>relay --home {box.root} reply {asked} "…"</code>' in page
    assert f"relay --home {box.root} audit run --out" in client.get("/audits").text


def test_each_filter_is_an_address_and_is_taken_off_by_it(client: TestClient) -> None:
    page = client.get("/search", params={"q": "deploy is:open"}).text
    assert 'href="/search?q=deploy+is%3Aopen+is%3Aunread"' in page
    assert 'href="/search?q=deploy" aria-current="true"' in page


def test_what_does_not_fit_is_on_further_pages(box: Box, client: TestClient) -> None:
    box.send_many(60, flush_every=60)
    first = client.get("/search.json").json()
    assert (len(first["rows"]), first["has_more"]) == (50, True)
    rest = client.get("/search.json", params={"offset": 50}).json()
    assert (len(rest["rows"]), rest["has_more"]) == (10, False)
    assert "offset=50" in client.get("/search").text
    assert 'rel="prev"' in client.get("/search", params={"offset": 50}).text


@pytest.mark.parametrize(
    ("path", "status", "why"),
    [
        ("/search?q=is:opn", 400, "is:opn is unknown"),
        ("/search?q=from:nobody", 404, "there is no agent"),
        ("/search?q=%22", 400, 'closing " is missing'),
        ("/m/1700000000000000001-99", 404, "no message"),
        ("/m/%2e%2e%2fconfig", 404, "no such page"),
        ("/m/x%00y", 400, "not a message id"),
        ("/nothing", 404, "no such page"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(
    client: TestClient, path: str, status: int, why: str
) -> None:
    answer = client.get(path)
    assert answer.status_code == status and why in text_of(answer.text)
    name, mark, query = path.partition("?")
    said = client.get(f"{name}.json{mark}{query}")
    assert said.status_code == status and why in said.json()["error"]


def test_a_message_has_its_steps_and_who_is_still_to_act(box: Box, client: TestClient) -> None:
    sent = box.send("alice", "TO: bob\nKIND: command\nTHREAD: release-42\n\ndeploy")
    facts = client.get(f"/m/{sent}.json").json()
    assert [step["what"] for step in facts["steps"]][:3] == ["discovered", "accepted", "written"]
    assert facts["not_yet"] == ["read by bob", "acknowledged by bob"]
    page = text_of(client.get(f"/m/{sent}").text)
    assert "written to the inbox of bob" in page and "acknowledged by bob" in page
    box.take("bob", sent)
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {sent}\n\ncompleted\nit is live")
    page = text_of(client.get(f"/m/{sent.partition('-')[2]}").text)
    assert "completed by bob: it is live" in page and "Still to come" not in page


def test_what_was_attached_is_saved_as_a_file_and_shown_nowhere(
    box: Box, client: TestClient
) -> None:
    kept = box.attach(b"<script>alert(1)</script>")
    heads = f'ATTACHMENT: sha256:{kept.name}\nATTACHMENT-NAMES: pl\u00e4n; "a.html'
    sent = box.send("alice", f"TO: operator\n{heads}\n\nsee there")
    assert f'href="/m/{sent}/attached/1" download="pl\u00e4n; &#34;a.html"' in (
        client.get(f"/m/{sent}").text
    )
    answer = client.get(f"/m/{sent}/attached/1")
    assert answer.content == b"<script>alert(1)</script>"
    assert answer.headers["content-length"] == "25"
    assert answer.headers["content-type"] == "application/octet-stream"
    name = "filename*=UTF-8''pl%C3%A4n%3B%20%22a.html"
    assert answer.headers["content-disposition"] == f"attachment; {name}"
    for number in (0, 2):
        answer = client.get(f"/m/{sent}/attached/{number}")
        assert answer.status_code == 404 and f"has no attachment {number}" in answer.text
    kept.write_bytes(b"<script>alert(2)</script>")
    assert "expected SHA-256" in client.get(f"/m/{sent}/attached/1").text
    kept.unlink()
    assert client.get(f"/m/{sent}/attached/1").status_code == 404
    assert "missing" in text_of(client.get(f"/m/{sent}").text)


def test_a_message_that_no_relay_has_seen_is_found(box: Box, client: TestClient) -> None:
    sent = box.drop("alice", "TO: bob\n\nhi")
    assert "in the outbox of alice" in text_of(client.get(f"/m/{sent}").text)


def test_what_waits_for_the_operator_is_first(
    box: Box, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Nothing waits for you" in client.get("/").text
    asked = box.send("alice", f"TO: operator\nKIND: query\n\nwhich branch? {EVIL}")
    (item,) = client.get("/index.json").json()["items"]
    assert (item["kind"], item["who"], item["id"]) == ("question", "alice", asked)
    page = client.get("/").text
    assert f'href="/m/{asked}"' in page and "which branch?" in page
    box.send("alice", "TO: operator\n\nreleased")
    monkeypatch.setattr(attention, "MOST", 3)
    for _ in range(4):
        box.send("bob", "TO: operator\nKIND: query\n\nand now?")
    page = client.get("/").text
    assert '<a href="/agents/operator">1 unread message for the operator</a>' in page
    assert '<a href="/search?q=is%3Aopen+from%3Abob+to%3Aoperator">2 more, older ones</a>' in page


@functools.cache
def any_web() -> Web:
    """Its templates are read once."""
    return Web("/nowhere")


@settings(max_examples=60)
@given(st.text(min_size=1, max_size=80))
@example(EVIL)
@example("\ud800")
@example('"><a href="javascript:alert(1)">')
def test_whatever_others_wrote_or_asked_for_is_text(text: str) -> None:
    """Names, ids, states, threads, bodies and queries."""
    names = ("id", "from", "to", "kind", "status", "content", "thread")
    wrote = text.encode("utf-8", "replace").decode()  # only a query may have half of a pair
    row = dict.fromkeys(names, wrote) | {"recipients": [wrote], "at": "2026-01-31T09:30:00Z"}
    found = {"rows": [row], "has_more": False, "note": text}
    query = {"q": text, "filters": [], "offset": 0, "limit": 1}
    one = {"thread": wrote, "count": 1, "names": [wrote], "last": row}
    for name, facts in (
        ("search", query | found),
        ("thread", {"thread": wrote} | found),
        ("threads", {"threads": [one], "most": 1}),
    ):
        page = any_web()._page(name, facts).body.decode()
        assert page.count("<script") == 1
        addresses = re.findall(r'href="([^"]*)"', page)
        assert all(re.match(r"/|#main$", one) for one in addresses), addresses
        assert set(re.findall(r"<([a-z][a-z0-9]*)", page)) <= {
            *("html", "head", "meta", "title", "link", "script", "body", "a", "header", "nav"),
            *("form", "input", "p", "main", "h1", "ul", "li", "span", "article", "pre", "time"),
        }
        if name == "search" and text.strip() and "\0" not in text:
            shown = html.unescape(re.search(r'<p class="note again">(.*?)</p>', page, re.S)[1])  # type: ignore[index]
            assert shown == visible(text, keep="\n\t").encode("utf-8", "replace").decode()


def test_who_owes_whom_and_since_when(box: Box, client: TestClient) -> None:
    box.send("alice", "TO: bob\nKIND: command\n\ndeploy")
    for _ in range(2):
        box.send("carol", "TO: bob\nKIND: query\n\nwhere?")
    agents = {one["name"]: one for one in client.get("/agents.json").json()["agents"]}
    assert agents["bob"]["owes"] == {"alice": 1, "carol": 2}
    assert agents["alice"]["is_owed_by"] == {"bob": 1}
    assert agents["carol"]["is_owed_by"] == {"bob": 2}
    page = client.get("/agents").text
    assert 'href="/search?q=is%3Aopen+to%3Abob+from%3Aalice"' in page
    bob = client.get("/agents/bob.json").json()
    assert [row["content"] for row in bob["inbox"][:2]] == ["deploy", "where?"]
    assert client.get("/agents/nobody").status_code == 404


def test_the_output_of_a_process_is_on_the_page_of_its_agent(box: Box, client: TestClient) -> None:
    box.path("logs", "bob.log").write_bytes(b"first\n" * 9000 + EVIL.encode() + b"\xff last")
    page = client.get("/agents/bob").text
    assert visible(EVIL) in html.unescape(page) and "last" in page and len(page) < 60_000


def test_the_steps_of_a_session_are_on_the_page_of_its_agent(
    box: Box, client: TestClient, tmp_path: Path
) -> None:
    """Its transcript, as `relay watch` reads it."""
    use = {"type": "tool_use", "name": "Bash", "input": {"command": "make <all>"}}
    line = {"type": "assistant", "timestamp": "2026-11-26T12:00:00Z", "message": {"content": [use]}}
    (tmp_path / "s.jsonl").write_text(json.dumps(line) + "\n")
    session = Session("claude", "s-1")
    session.agent, session.transcript = "bob", str(tmp_path / "s.jsonl")
    with session_lock(str(box.root)):
        save_session(str(box.root), session)
    page = client.get("/agents/bob").text
    assert "What its session does" in page and "Bash: make &lt;all&gt;" in page
    assert client.get("/agents/bob.json").json()["steps"][0]["what"] == "tool"


def test_a_thread_is_read_from_its_beginning(box: Box, client: TestClient) -> None:
    box.send("alice", "TO: bob\nTHREAD: release-42\n\nfirst")
    box.send("bob", "TO: alice\nTHREAD: release-42\n\nsecond")
    (one,) = client.get("/threads.json").json()["threads"]
    assert (one["thread"], one["count"], one["last"]["content"]) == ("release-42", 2, "second")
    page = client.get("/t/release-42").text
    assert page.index("first") < page.index("second")
    assert client.get("/t/nothing").status_code == 404


def test_what_failed_is_told_by_its_reason(
    box: Box, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nobody", "nobody", "noone"):
        box.send("alice", f"TO: {name}\n\ntypo")
    groups = client.get("/failed.json").json()["groups"]
    assert [(one["outcome"], len(one["rows"])) for one in groups] == [
        ("refused", 2),
        ("refused", 1),
    ]
    page = client.get("/failed").text
    assert "there is no agent nobody" in page and "Of the newest" not in page
    monkeypatch.setattr(pages, "MOST_FAILED", 3)
    assert "Of the newest 3 that failed" in client.get("/failed").text


def test_health_says_what_doctor_finds(box: Box, client: TestClient) -> None:
    assert "No relay is running" in client.get("/health").text
    box.path("agents", "bob", "inbox", ".read").chmod(0o777)
    for query in ("", "?full=1"):
        found = client.get(f"/health.json{query}").json()["findings"]
        assert any(".read" in one["text"] for one in found) == bool(query), query
    ledger, away = box.path("ledger.db"), box.path("ledger.away")
    ledger.rename(away)
    assert "there is no ledger" in client.get("/health").text
    away.rename(ledger)


def test_what_doctor_finds_waits_for_a_person(box: Box, client: TestClient) -> None:
    assert "Nothing waits for you" in client.get("/").text
    box.path("config.json").write_text("{")
    page = client.get("/").text
    assert "the relay does not start" in page and "<time" not in page  # nobody knows since when
    (item,) = client.get("/index.json").json()["items"]
    assert item["at"] is None


def test_a_relay_that_says_nothing_of_itself_is_not_said_to_be_well(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "lock_holder", lambda _: 1)  # it runs, and its socket was removed
    assert "does not say how it is" in client.get("/health").text


def test_the_last_audit_is_shown(box: Box, client: TestClient) -> None:
    box.send("alice", "TO: bob\nKIND: command\n\ndeploy")
    assert "No audit yet" in client.get("/audits").text
    job = JobReport("reconcile", 1.5, findings={"missing": 2}, errors=2)
    report = Report(str(box.root), "2026-01-31T09:30:00Z", 30.0, 7.0, [], {"reconcile": job})
    folder = box.path("audits")
    folder.mkdir(mode=0o700)
    (folder / "summary.json").write_bytes(to_json(report))
    facts = client.get("/audits.json").json()
    assert (facts["report"]["findings"], facts["report"]["jobs"][0]["name"]) == (2, "reconcile")
    assert "2 findings" in client.get("/audits").text
    (folder / "summary.json").write_bytes(b"{")
    assert client.get("/audits").status_code == 503


def test_the_json_of_a_page_is_ascii(box: Box, client: TestClient) -> None:
    sent = box.send("alice", f"TO: bob\n\n{EVIL} ü")
    answer = client.get(f"/m/{sent}.json")
    assert answer.content.isascii() and json.loads(answer.content)["message"]["body"].endswith("ü")


def test_a_page_answers_only_under_the_address_that_was_printed() -> None:
    client = TestClient(Web("/nowhere").app(HOST, SECRET), base_url=ORIGIN)
    client.headers["authorization"] = f"Bearer {SECRET}"
    answer = client.get("/")
    assert answer.status_code == 503 and "there is no relay home at /nowhere" in answer.text


def test_there_is_one_script_of_at_most_210_lines_and_nothing_is_from_elsewhere() -> None:
    folder = PROJECT / "relay" / "web"
    (script,) = folder.rglob("*.js")
    assert len(script.read_text().splitlines()) <= 210
    assert "innerHTML" not in script.read_text() and "eval" not in script.read_text()
    for path in (*folder.rglob("*.j2"), *folder.rglob("*.css"), script):
        text = path.read_text()
        assert "http:" not in text and "https:" not in text and "//" not in re.sub(
            r"^ *//.*$|; // .*$|\) //.*$", "", text, flags=re.M
        ), path  # fmt: skip
        assert "| safe" not in text and "autoescape" not in text, path
    sources = [*folder.rglob("*.py"), *folder.rglob("*.j2"), *folder.rglob("*.css"), script]
    assert sum(len(path.read_text().splitlines()) for path in sources) <= 3000


def test_a_whole_look_of_doctor_is_shared_for_a_minute(
    box: Box, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open page asks for it with whatever happens."""
    looks: list[bool] = []
    monkeypatch.setattr(health, "examine", lambda _, quick: looks.append(quick) or [])
    for query in ("?full=1", "?full=1", "", ""):
        assert client.get(f"/health{query}").status_code == 200
    assert looks == [False, True, True]
