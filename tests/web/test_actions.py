"""What the operator does from the page: files in the operator's outbox, and what comes of them."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlencode

import pytest
from starlette.testclient import TestClient

from relay.web import actions
from tests.box import Box
from tests.web.test_pages import text_of


def post(client: TestClient, path: str, **form: str) -> str:
    """Send a form; the page that is shown next."""
    answer = send_form(client, path, form)
    assert answer.status_code == 303, answer.text
    return str(answer.headers["location"])


def send_form(client: TestClient, path: str, form: dict[str, str]) -> Any:
    """Send a form as a browser does, also one without fields."""
    headers = {"content-type": "application/x-www-form-urlencoded"}
    return client.post(path, content=urlencode(form).encode(), headers=headers)


def outbox(box: Box) -> list[str]:
    """What the operator has sent, and no relay has taken."""
    folder = box.path("agents", "operator", "outbox")
    return [(folder / name).read_text() for name in sorted(os.listdir(folder)) if name[0] != "."]


def dead_letter(box: Box) -> str:
    """A message to bob that was given up."""
    sent = box.send("alice", "TO: bob\nDELIVERY: at-least-once\n\nplease")
    box.until_dead()
    assert box.states(sent) == {"bob": "dead"}
    return sent


def test_a_text_to_an_agent_is_a_message_of_the_operator(box: Box, client: TestClient) -> None:
    page = post(client, "/agents/bob/send", body="deploy\r\nto staging", kind="command")
    (sent,) = outbox(box)
    assert "TO: bob\n" in sent and sent.endswith("\n\ndeploy\nto staging")
    box.tick()
    (received,) = box.inbox("bob").values()
    assert (received.kind, received.headers["FROM"]) == ("command", "operator")
    assert "written to the inbox of bob" in text_of(client.get(page).text)


@pytest.mark.parametrize(
    ("kind", "answer"), [("query", "response"), ("command", "message"), ("message", "message")]
)
def test_a_reply_goes_to_the_sender_in_its_thread(
    box: Box, client: TestClient, kind: str, answer: str
) -> None:
    asked = box.send("alice", f"TO: operator\nKIND: {kind}\nTHREAD: release-42\n\nwhich branch?")
    assert "Answer to alice" in client.get(f"/m/{asked}").text
    post(client, f"/m/{asked}/answer", how="reply", body="main")
    box.tick()
    (received,) = box.inbox("alice").values()
    assert (received.kind, received.body) == (answer, b"main")
    assert (received.headers["RE"], received.headers["THREAD"]) == (asked, "release-42")
    assert asked not in box.inbox("operator")


def test_a_question_with_options_has_a_button_for_each(box: Box, client: TestClient) -> None:
    asked = box.send("alice", "TO: operator\nKIND: query\nOPTIONS: yes, not yet\n\nship it?")
    page = client.get(f"/m/{asked}").text
    assert '<button name="body" value="not yet">not yet</button>' in page
    post(client, f"/m/{asked}/answer", body="not yet")
    box.tick()
    (received,) = box.inbox("alice").values()
    assert (received.kind, received.body) == ("response", b"not yet")


def test_a_question_is_answered_where_it_is_listed(box: Box, client: TestClient) -> None:
    asked = box.send("alice", "TO: operator\nKIND: query\nOPTIONS: yes, no\n\nship it?")
    assert f'action="/m/{asked}/answer"' in client.get("/").text
    page = post(client, f"/m/{asked}/answer", body="yes", back="home")
    assert page.startswith("/?said=") and "answered by" in client.get(page).text
    box.tick()
    assert [one.body for one in box.inbox("alice").values()] == [b"yes"]
    assert "Nothing waits for you" in client.get("/").text


@pytest.mark.parametrize("back", ["home", ""])
def test_a_second_answer_is_told_of_the_first(box: Box, client: TestClient, back: str) -> None:
    """Of another tab, or of a command: its sender may have acted on that one."""
    asked = box.send("alice", "TO: operator\nKIND: query\n\nship it?")
    first = post(client, f"/m/{asked}/answer", body="yes", back=back)
    assert "before" not in text_of(client.get(first).text)
    box.tick()
    second = post(client, f"/m/{asked}/answer", body="no", back=back)
    said = "operator has answered it before, completed: yes: the last answer decides"
    assert said in text_of(client.get(second).text)


@pytest.mark.parametrize(
    ("how", "outcome"), [("completed", "completed"), ("failed", "failed"), ("in_progress", "in")]
)
def test_a_command_is_done_or_not(box: Box, client: TestClient, how: str, outcome: str) -> None:
    asked = box.send("alice", "TO: operator\nKIND: command\n\nclick that button")
    assert "It is done" in client.get(f"/m/{asked}").text
    post(client, f"/m/{asked}/answer", how=how, body="as you said")
    box.tick()
    facts = client.get(f"/m/{asked}.json").json()
    assert facts["outcome"].startswith(outcome)
    assert ("complete" in facts["actions"]) == (how == "in_progress")


def test_a_message_is_marked_as_read_only_when_told(box: Box, client: TestClient) -> None:
    sent = box.send("alice", "TO: operator\n\nhi")
    assert "Mark as read" in client.get(f"/m/{sent}").text and sent in box.inbox("operator")
    post(client, f"/m/{sent}/read")
    box.tick()
    assert box.states(sent) == {"operator": "read"}
    assert send_form(client, f"/m/{sent}/read", {}).status_code == 404


def test_an_answer_is_sent_also_if_its_message_could_not_be_moved(
    box: Box, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the process was killed in between."""
    asked = box.send("alice", "TO: operator\nKIND: query\n\nwhich branch?")
    monkeypatch.setattr(actions, "_mark_read", lambda *_: (_ for _ in ()).throw(OSError("killed")))
    assert send_form(client, f"/m/{asked}/answer", {"body": "main"}).status_code == 503
    box.tick()
    assert [one.body for one in box.inbox("alice").values()] == [b"main"]
    facts = client.get(f"/m/{asked}.json").json()
    assert facts["deliveries"][0]["obligation"] == "answered" and "read" in facts["actions"]
    assert client.get("/index.json").json()["items"] == []
    monkeypatch.undo()
    post(client, f"/m/{asked}/read")
    assert asked not in box.inbox("operator")


def test_a_dead_letter_is_delivered_again(box: Box, client: TestClient) -> None:
    sent = dead_letter(box)
    box.take("bob", sent)
    page = post(client, f"/m/{sent}/replay")
    assert "it was put into the outbox" in text_of(client.get(page).text)
    box.tick()
    assert sent in box.inbox("bob")


def test_all_of_a_reason_are_delivered_again_if_they_are_as_many_as_counted(
    box: Box, client: TestClient
) -> None:
    first = dead_letter(box)
    (group,) = client.get("/failed.json").json()["groups"]
    assert (group["outcome"], len(group["rows"])) == ("dead", 1)
    second = dead_letter(box)
    for one in (first, second):
        box.take("bob", one)
    stale = client.post("/failed/replay", data={"reason": group["reason"], "count": "1"})
    assert stale.status_code == 409 and "there are 2 dead letters" in text_of(stale.text)
    assert outbox(box) == []
    page = post(client, "/failed/replay", reason=group["reason"], count="2")
    assert "2 replays sent" in text_of(client.get(page).text)
    box.tick()
    assert {first, second} <= box.inbox("bob").keys()


def test_what_the_relay_has_not_answered_is_not_told_as_done(
    box: Box, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead_letter(box)
    (group,) = client.get("/failed.json").json()["groups"]
    monkeypatch.setattr(actions, "WAIT_S", 0.05)
    monkeypatch.setattr(actions, "lock_holder", lambda _: os.getpid())  # of a relay that hangs
    page = post(client, "/failed/replay", reason=group["reason"], count="1")
    assert "0 messages replayed, 1 without an answer yet" in client.get(page).text


def test_a_dead_letter_is_given_up_for_good(box: Box, client: TestClient) -> None:
    sent = dead_letter(box)
    post(client, f"/m/{sent}/discard")
    box.tick()
    assert not [*box.store.retries.dead_letters()]


def test_what_is_unread_is_taken_back(box: Box, client: TestClient) -> None:
    page = post(client, "/agents/bob/send", body="not yet")
    box.tick()
    sent = page.removeprefix("/m/")
    assert "Take back" in client.get(page).text
    post(client, f"/m/{sent}/cancel")
    box.tick()
    assert box.inbox("bob") == {}
    assert "cancelled" in text_of(client.get(page).text)


@pytest.mark.parametrize(
    ("path", "form", "status", "why"),
    [
        ("/agents/bbo/send", {"body": "typo"}, 404, "there is no agent"),
        ("/agents/bob/send", {"body": " \r\n "}, 400, "the text is empty"),
        ("/agents/bob/send", {}, 400, "the text is empty"),
        ("/agents/bob/send", {"body": "x", "kind": "spawn"}, 400, "not a kind"),
        ("/agents/bob/send", {"body": "x", "thread": "a b"}, 400, "THREAD"),
        ("/agents/bob/send", {"body": "x" * (1 << 20) + "y"}, 400, "1048576"),
        ("/m/1700000000000000001-99/answer", {"body": "x"}, 404, "no message"),
        ("/m/1700000000000000001-99/replay", {}, 404, "no message"),
        ("/failed/replay", {"reason": "x", "count": "0"}, 409, "look again"),
        ("/agents/bob/send", {str(n): "x" for n in range(50)}, 400, ""),
    ],
)
def test_what_cannot_be_done_sends_nothing(
    box: Box, client: TestClient, path: str, form: dict[str, str], status: int, why: str
) -> None:
    answer = send_form(client, path, form)
    assert answer.status_code == status and why in text_of(answer.text)
    assert outbox(box) == []
    assert "bbo" not in box.home.agent_names()


def test_what_was_said_of_an_action_is_shown_once_asked_for_by_its_token(
    box: Box, client: TestClient
) -> None:
    """A link cannot put words into the page."""
    sent = box.send("alice", "TO: operator\n\nhi")
    page = client.get(f"/m/{sent}?said=your%20account%20is%20locked").text
    assert "locked" not in page
