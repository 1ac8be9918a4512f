"""What agents save, get back, and are told first when they begin again."""

from __future__ import annotations

import pytest

from agent_sdk import Agent
from relay.agents.roster import META
from relay.base.config import AgentSettings, Config, ContinuitySettings
from relay.base.message import MessageFile
from tests.box import Box
from tests.disk import failing

SAVE = "KIND: continuity\nACTION: save\n\n"
LOAD = "KIND: continuity\nACTION: load\n\n"
LIST = "KIND: continuity\nACTION: list\n\n"
SETTINGS = Config(
    continuity=ContinuitySettings(most_kib=1, keep_versions=3),
    agents=AgentSettings(dead_after_s=60),
)

pytestmark = pytest.mark.box("alice", "bob", "carol", config=SETTINGS)


def ask(box: Box, agent: str, text: str | bytes) -> MessageFile:
    """Send it; the one answer to it."""
    sent = box.send(agent, text)
    (answer,) = [m for m in box.inbox(agent).values() if m.headers.get("RE") == sent]
    return answer


def said(box: Box, agent: str, text: str | bytes) -> str:
    """The body of the ack."""
    answer = ask(box, agent, text)
    assert answer.kind == "ack", answer.body
    return answer.body.decode()


def refused(box: Box, agent: str, text: str) -> str:
    answer = ask(box, agent, text)
    assert answer.kind == "nack", answer.body
    return answer.body.decode()


def files(box: Box, agent: str) -> list[str]:
    return sorted(path.name for path in box.path("continuity", agent).glob("*"))


# -- save, load, list --------------------------------------------------------------------------


def test_what_is_saved_comes_back_byte_for_byte(box: Box) -> None:
    state = "first\n\n  ACTION: none of yours\nlast, without an end of line\t"
    assert said(box, "bob", SAVE + state) == (
        f"completed saved as version 1 ({len(state)} bytes)\n"
    )
    assert said(box, "bob", LOAD) == f"completed version 1\n{state}"
    said(box, "bob", SAVE + "\n")
    assert said(box, "bob", LOAD) == "completed version 2\n\n"
    assert said(box, "bob", "KIND: continuity\nACTION: load\nVERSION: 1\n\n").endswith(state)
    (path, _) = sorted(box.path("continuity", "bob").iterdir())
    assert path.read_bytes() == state.encode()
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


IN_THE_BODY = {
    "ACTION: save\nSTATE: one\ntwo\n": "one\ntwo\n",
    "action: SAVE\nstate:  one": " one",
    "ACTION: save\n\nNAME: of my own\n": "NAME: of my own\n",
    "ACTION: save\nwhat I did\n": "what I did\n",
    "ACTION: save\r\n\r\none\r\n": "one\r\n",
}


def test_the_action_in_the_body(box: Box) -> None:
    for version, (body, state) in enumerate(IN_THE_BODY.items(), 1):
        said(box, "bob", f"KIND: continuity\n\n{body}")
        loaded = said(box, "bob", "KIND: continuity\n\nACTION: load\n")
        assert loaded == f"completed version {version}\n{state}"


def test_versions_are_listed_and_the_oldest_go(box: Box) -> None:
    ids = [box.send("bob", f"{SAVE}{'x' * number}") for number in range(1, 6)]
    head, *lines = said(box, "bob", LIST).splitlines()
    assert head == "completed 3 versions"
    assert [line.split()[:2] + line.split()[3:] for line in lines] == [
        [str(number), str(number), ids[number - 1]] for number in (3, 4, 5)
    ]
    assert files(box, "bob") == [f"{n:08d}-{ids[n - 1]}.state" for n in (3, 4, 5)]
    answer = refused(box, "bob", "KIND: continuity\nACTION: load\nVERSION: 2\n\n")
    assert answer == "bob has no version 2: there are 3, 4, 5\n"


def test_who_saved_nothing_begins_again(box: Box) -> None:
    assert said(box, "bob", LOAD) == "completed version 0\n"
    assert said(box, "bob", LIST) == "completed 0 versions\n"
    assert "there are none" in refused(box, "bob", "KIND: continuity\n\nACTION: load\nVERSION: 1")


REFUSED = {
    "KIND: continuity\n\nhello": "ACTION is missing: KIND continuity has ACTION save, load",
    "KIND: continuity\nACTION: keep\n\nx": "there is no ACTION 'keep'",
    SAVE: "there is no state to save",
    "KIND: continuity\n\nACTION: save\n\n": "there is no state to save",
    SAVE + "x" * 1025: "the state has 1025 bytes, continuity.most_kib allows 1024",
    "KIND: continuity\nACTION: save\nVERSION: 1\n\nx": "save does not accept VERSION",
    "KIND: continuity\nACTION: load\nVERSION: 0\n\n": "VERSION: expected an integer above 0",
    LOAD + "what did I do?": "load does not accept 'what did I do?'",
    "KIND: continuity\n\nACTION: load\nACTION: load": "ACTION is given twice",
    "KIND: continuity\nACTION: load\nNAME: alice\n\n": "load of NAME 'alice' is not for bob",
    "KIND: continuity\nACTION: save\nNAME: alice\n\nx": "save of NAME 'alice' is not for bob",
}


def test_what_is_refused_says_why_and_changes_nothing(box: Box) -> None:
    for text, says in REFUSED.items():
        assert refused(box, "bob", text).startswith(says), text
    assert files(box, "bob") == files(box, "alice") == []


def test_operator_and_lead_read_those_of_others_and_change_none(box: Box) -> None:
    said(box, "bob", SAVE + "bob's")
    of_bob = "KIND: continuity\nACTION: {}\nNAME: {}\n\n{}"
    box.path("agents", "carol", META).write_text('{"role": "lead"}')
    for reader in ("operator", "carol"):
        assert said(box, reader, of_bob.format("load", "bob", "")).endswith("bob's")
        assert "completed 1 versions" in said(box, reader, of_bob.format("list", "bob", ""))
        assert "is not for" in refused(box, reader, of_bob.format("save", "bob", "mine"))
        assert "is not for" in refused(box, reader, of_bob.format("load", "../bob", ""))
    assert len(files(box, "bob")) == 1


def test_a_full_disk_is_waited_for(box: Box) -> None:
    with failing("write", ".state"):
        sent = box.send("bob", SAVE + "mine")
    assert (box.inbox("bob"), files(box, "bob")) == ({}, [])
    assert box.row(sent)["last_error"] == "continuity of bob: No space left on device"
    box.after(2, turns=1)
    assert "saved as version 1" in box.bodies("bob")[0]


def test_a_place_that_cannot_be_reached_is_a_nack(box: Box) -> None:
    box.path("continuity", "bob").symlink_to(box.path("tmp"))
    assert "the states of bob are not accessible" in refused(box, "bob", SAVE + "mine")
    assert list(box.path("tmp").iterdir()) == []


def test_what_a_crash_left_of_a_write_goes_with_the_next_save(box: Box) -> None:
    said(box, "bob", SAVE + "one")
    box.path("continuity", "bob", "00000002-1.state.tmp").write_text("ha")
    said(box, "bob", SAVE + "two")
    assert [name[:8] for name in files(box, "bob")] == ["00000001", "00000002"]
    assert all(name.endswith(".state") for name in files(box, "bob"))


# -- the first message of a new life -------------------------------------------------------------


def test_who_begins_again_finds_its_save_and_what_is_unread_first(box: Box) -> None:
    box.send("bob", SAVE + "half way\nthrough")
    box.take("bob", next(iter(box.inbox("bob"))))
    query = box.send("alice", "TO: bob\nKIND: query\n\nhow many   tests\nare red?")
    text = box.send("carol", f"TO: bob\n\n{'long ' * 40}")
    assert box.dispatcher.notifier.send_resume_message("bob", "start 1")
    first, *rest = box.inbox("bob").items()
    assert [message_id for message_id, _ in rest] == [query, text]
    message_id, message = first
    head, _, state = message.body.decode().partition("\n-----\n")
    assert (str(message.kind), message.headers["VERSION"]) == ("notification", "1")
    assert (message.headers["FROM"], state) == ("__orchestrator__", "half way\nthrough")
    lines = head.splitlines()
    assert lines[0] == "You are starting again."
    assert lines[1].startswith("Your last saved state is version 1 (16 bytes, ")
    assert lines[2] == "Unread in your inbox: 2."
    assert lines[3] == f"- {query} from alice, query: how many tests are red?"
    assert lines[4].startswith(f"- {text} from carol, message: long long ")
    assert lines[4].endswith("…") and len(lines[4]) < 200
    assert box.states(message_id) == {"bob": "written"}
    assert box.row(message_id)["status"] == "archived"


def test_it_is_greeted_once_for_each_beginning(box: Box) -> None:
    sent = box.send("alice", "TO: bob\n\nhi")
    for key in ("start 1", "start 1", "start 2"):
        assert box.dispatcher.notifier.send_resume_message("bob", key)
    assert len(box.inbox("bob")) == 3
    assert list(box.inbox("bob"))[-1] == sent
    welcome = next(iter(box.inbox("bob")))
    box.take("bob", welcome)
    assert box.dispatcher.notifier.send_resume_message(
        "bob", "start 2"
    ) and box.dispatcher.notifier.send_resume_message("bob", "start 1")
    assert len(box.inbox("bob")) == 2
    assert box.dispatcher.notifier.send_resume_message("carol", "start 1")
    assert box.inbox("carol") == {}  # who has nothing is told nothing


def test_many_unread_ones_are_counted(box: Box) -> None:
    ids = [box.drop("alice", f"TO: bob\n\n{number}") for number in range(25)]
    box.tick()
    box.dispatcher.notifier.send_resume_message("bob", "start 1")
    body = next(iter(box.inbox("bob").values())).body.decode()
    assert "Unread in your inbox: 25.\n" in body and body.endswith("… and 5 more\n")
    assert ids[19] in body and ids[20] not in body


def test_it_is_taken_before_what_is_urgent(box: Box) -> None:
    urgent = box.send("alice", "TO: bob\nPRIORITY: 0\n\nnow")
    box.dispatcher.notifier.send_resume_message("bob", "start 1")
    with Agent("bob", box.root, registers=False) as bob:
        taken = [message.body.split("\n")[0] for message in bob.messages(timeout_s=0)]
    assert taken == ["You are starting again.", "now"]
    box.tick()
    assert box.states(urgent) == {"bob": "read"}


def test_a_damaged_file_in_the_inbox_is_named_as_it_is(box: Box) -> None:
    box.path("agents", "bob", "inbox", "1000000001-aa.msg").write_bytes(b"\xff\xff")
    assert box.dispatcher.notifier.send_resume_message("bob", "start 1")
    welcome = min(box.path("agents", "bob", "inbox").glob("*.msg"))
    assert welcome.read_text().endswith("inbox: 1.\n- 1000000001-aa ?\n")


def test_a_disk_that_takes_nothing_greets_later(box: Box) -> None:
    box.send("alice", "TO: bob\n\nhi")
    with failing("write"):
        assert not box.dispatcher.notifier.send_resume_message("bob", "start 1")
    assert len(box.inbox("bob")) == 1
    assert box.dispatcher.notifier.send_resume_message("bob", "start 1")
    assert len(box.inbox("bob")) == 2
