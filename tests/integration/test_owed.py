"""What an agent owes for a plain command or query, and until when: reminded twice, then given up.

A message in the default channel is put into an inbox once. Its answer is owed until the recipient
says `completed` or `failed`, or sends the response; the sender hears each time that it is overdue.
"""

from __future__ import annotations

import re

import pytest

from relay.base.clock import NS_PER_S
from relay.base.message import MessageFile
from relay.base.names import answer_id
from relay.base.watcher import WatchEvents
from relay.reach.session import IDLE
from tests.box import Box
from tests.process_support import ProcessBox, end, registered
from tests.procs import relay, rows_of

pytestmark = pytest.mark.shows("engine 7.1")

COMMAND = "TO: bob\nKIND: command\n\ndeploy\nto staging"
QUERY = "TO: bob\nKIND: query\n\nwhich branch?"
HALF_AN_HOUR = 1800


def of_kind(box: Box, agent: str, kind: str) -> list[MessageFile]:
    return [message for message in box.inbox(agent).values() if message.kind == kind]


def told(box: Box, agent: str) -> list[str]:
    """What the relay notified an agent of."""
    return [message.body.decode().rstrip("\n") for message in of_kind(box, agent, "notification")]


def answer(box: Box, sent: str, text: str, kind: str = "ack") -> None:
    box.send("bob", f"TO: alice\nKIND: {kind}\nRE: {sent}\n\n{text}")


def duty(box: Box, sent: str) -> tuple[object, ...]:
    """The ledger's word of what bob owes: obligation, reminders, the last ack's status."""
    (found,) = box.sql(
        "SELECT obligation, reminders, ack_status FROM deliveries "
        "WHERE message_id = ? AND recipient = 'bob'",
        sent,
    )
    return found


def test_a_reminder_quotes_the_command_and_says_how_to_answer(box: Box) -> None:
    sent = box.send("alice", COMMAND)
    box.take("bob", sent)
    box.after(HALF_AN_HOUR - 1)
    assert box.inbox("bob") == {}
    box.after(1)
    (reminder,) = of_kind(box, "bob", "reminder")
    assert reminder.headers["RE"] == sent
    assert reminder.headers["FROM"] == "__orchestrator__"
    assert reminder.body.decode() == (
        "reminder 1 of 2: you have not answered the command from alice, sent 30 min ago; "
        f"answer with `relay ack {sent} completed` or `relay nack {sent} WHY`\n"
        "\n"
        "> deploy\n"
        "> to staging\n"
    )
    assert told(box, "alice") == [
        'bob has not answered the command sent 30 min ago ("deploy to staging"): '
        "it has read it; it is reminded, 1 of 2"
    ]
    assert duty(box, sent) == ("open", 1, None)


@pytest.mark.box("alice", "bob", "carol", "dave", "eve", "frank")
def test_what_is_said_alike_of_many_is_one_line(box: Box) -> None:
    """Of a question to all, the sender had a line for each agent: thousands in a large home."""
    sent = box.send("alice", "TO: *\nKIND: query\n\nwho is there?")
    box.take("carol", sent)
    box.after(61)
    asked = 'has not answered the query sent 61 s ago ("who is there?"): it has'
    assert told(box, "alice")[0].split("\n") == [
        f"each of 5 agents {asked} not read it; it is reminded, 1 of 2: "
        "bob, dave, eve, frank, operator",
        f"carol {asked} read it; it is reminded, 1 of 2",
    ]


def test_who_answers_the_reminder_is_given_what_to_answer(box: Box) -> None:
    box.send("alice", COMMAND)
    box.after(HALF_AN_HOUR + 1)
    (reminder,) = of_kind(box, "bob", "reminder")
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {reminder.headers['ID']}\n\ncompleted")
    assert box.nacks("bob")[0].endswith(
        f"{reminder.headers['ID']} does not expect an acknowledgment: it is a reminder; "
        "answer the message that its RE names\n"
    )


def test_after_two_reminders_it_is_given_up(box: Box) -> None:
    sent = box.send("alice", COMMAND)
    for _ in range(3):
        box.after(HALF_AN_HOUR)
    assert len(of_kind(box, "bob", "reminder")) == 2
    assert told(box, "alice")[1:] == [
        'bob has not answered the command sent 60 min ago ("deploy to staging"): '
        "it has not read it; "
        "it is reminded, 2 of 2, the last one",
        'bob has not answered the command sent 90 min ago ("deploy to staging"): '
        "it has not read it; "
        "its answer is no longer awaited: it was reminded twice",
    ]
    assert duty(box, sent) == ("given_up", 2, None)
    box.after(100_000)
    assert len(told(box, "alice")) == 3
    assert box.store.state.owed == {}
    answer(box, sent, "completed after all")  # late, and heard all the same
    assert duty(box, sent) == ("answered", 2, "completed")


def test_who_takes_the_id_of_a_notice_in_advance_hides_nothing(box: Box) -> None:
    sent = box.send("alice", COMMAND)
    stored = box.store.messages.find_by_relay_id(sent)
    assert stored is not None
    since = box.store.state.owed[stored.id]["bob"].since
    keys = [
        ("idle bob", 0),
        (f"overdue {[('bob', since, 0)]}", 1),
        (f"overdue {[('bob', since, 1)]}", 2),
    ]
    ids = [answer_id(stored.created_ns + order, "alice", sent, key) for key, order in keys]
    for message_id in ids:
        box.send("bob", "TO: carol\n\nmine", f"{message_id}.msg")
    box.take("bob", sent)
    box.tick()
    box.dispatcher.idle.on_state("bob", IDLE, [sent], "claude:s-1", box.clock.now_ns())
    for _ in range(3):
        box.after(HALF_AN_HOUR)
    assert sorted(text.partition(" the command")[0] for text in told(box, "alice")) == [
        *["bob has not answered"] * 3,
        "bob is idle and has not answered",
    ]
    assert not {*ids} & {*box.inbox("alice")} and {*ids} <= {*box.inbox("carol")}


def test_who_begins_late_owes_it_again(box: Box) -> None:
    sent = box.send("alice", COMMAND)
    for _ in range(3):
        box.after(HALF_AN_HOUR)
    assert duty(box, sent)[0] == "given_up"
    answer(box, sent, "in_progress")
    assert duty(box, sent)[0] == "open"
    box.after(HALF_AN_HOUR)
    assert len(of_kind(box, "bob", "reminder")) == 3
    answer(box, sent, "completed")
    answer(box, sent, "received")  # a word that comes after the end begins nothing
    assert duty(box, sent)[0] == "answered"


def test_open_lists_what_is_begun_and_since_when(box: Box) -> None:
    sent = box.send("alice", COMMAND)
    other = box.send("alice", COMMAND)
    box.take("bob", other)
    done = box.send("alice", COMMAND)
    answer(box, sent, "in_progress")
    answer(box, done, "completed")
    box.flush()
    rows = rows_of("open", home=box.root)
    assert [(row["id"], row["outcome"], row["reminders"]) for row in rows] == [
        (sent, "in progress", 0),
        (other, "read", 0),
    ]
    table = relay("open", home=box.root).stdout
    assert re.search(r"in progress \d+ s, due in \d+ min  deploy …$", table.splitlines()[1])
    assert relay("open", "--overdue", home=box.root).stderr == "nothing is overdue\n"
    box.after(HALF_AN_HOUR + 1)
    box.flush()
    begun, read = relay("open", home=box.root).stdout.splitlines()[1:]
    assert re.search(r"in progress \d+ s, due in \d+ min, reminded once +deploy …$", begun)
    assert re.search(r"read, due in \d+ min, reminded once +deploy …$", read)


def test_a_query_is_overdue_after_a_minute_and_ended_by_its_response(box: Box) -> None:
    sent = box.send("alice", QUERY)
    box.after(60)
    (reminder,) = of_kind(box, "bob", "reminder")
    assert f"`relay reply {sent} ANSWER`" in reminder.body.decode()
    answer(box, sent, "main", "response")
    assert duty(box, sent) == ("answered", 1, "completed")
    box.after(1000)
    assert len(of_kind(box, "bob", "reminder")) == 1


@pytest.mark.parametrize("word", ["received", "in_progress since now"])
def test_a_word_that_is_no_end_ends_nothing(box: Box, word: str) -> None:
    sent = box.send("alice", COMMAND)
    box.take("bob", sent)
    box.after(1200)
    answer(box, sent, word)
    status = word.split()[0]
    assert duty(box, sent) == ("open", 0, status)
    box.after(1200)
    assert of_kind(box, "bob", "reminder") == []  # its time began anew
    box.after(600)
    (reminder,) = of_kind(box, "bob", "reminder")
    assert f"you said {status} 30 min ago, and have not answered the command" in (
        reminder.body.decode()
    )
    said = {"received": "acknowledged it as received", "in_progress": "began it"}[status]
    assert f"it {said} 30 min ago; it is reminded, 1 of 2" in told(box, "alice")[0]
    answer(box, sent, "completed")
    assert duty(box, sent) == ("answered", 1, "completed")
    box.after(100_000)
    assert len(of_kind(box, "bob", "reminder")) == 1


def test_a_query_is_not_answered_by_an_ack(box: Box) -> None:
    sent = box.send("alice", QUERY)
    answer(box, sent, "completed")
    assert duty(box, sent) == ("open", 0, "completed")
    answer(box, sent, "no idea", "nack")
    assert duty(box, sent) == ("answered", 0, "failed")


def test_at_least_once_an_ack_stops_the_attempts_and_the_obligation_continues(box: Box) -> None:
    sent = box.send("alice", COMMAND.replace("\n\n", "\nDELIVERY: at-least-once\n\n"))
    box.after(60)
    box.after(1)
    assert box.inbox("bob")[sent].headers["ATTEMPT"] == "2"
    assert of_kind(box, "bob", "reminder") == []
    answer(box, sent, "in_progress")
    box.after(HALF_AN_HOUR - 1)
    assert box.inbox("bob")[sent].headers["ATTEMPT"] == "2"
    box.after(1)
    assert len(of_kind(box, "bob", "reminder")) == 1


def test_where_the_attempts_end_so_does_what_is_owed(box: Box) -> None:
    sent = box.send("alice", COMMAND.replace("\n\n", "\nAWAIT: 5s\n\n"))
    for _ in range(9):
        box.after(10)
    assert box.states(sent) == {"bob": "dead"}
    assert duty(box, sent) == ("given_up", 0, None)
    assert box.store.state.owed == {}
    assert of_kind(box, "bob", "reminder") == []


def test_one_word_to_the_sender_about_all_who_owe(box: Box) -> None:
    sent = box.send("alice", "TO: *\nKIND: command\n\nreport")
    answer(box, sent, "completed")
    box.after(HALF_AN_HOUR)
    (notice,) = told(box, "alice")
    assert [line.split()[0] for line in notice.split("\n")] == ["carol", "operator"]
    assert of_kind(box, "bob", "reminder") == []


def test_a_long_message_is_quoted_in_part(box: Box) -> None:
    box.send("alice", "TO: bob\nKIND: command\n\n" + "é" * 4000)
    box.after(HALF_AN_HOUR)
    (reminder,) = of_kind(box, "bob", "reminder")
    assert reminder.body.decode().endswith("> " + "é" * 2048 + "\n> … (8000 bytes in all)\n")


def test_the_channel_says_when_an_answer_is_overdue(box: Box) -> None:
    box.join("team", "alice", "bob")
    box.send(
        "alice",
        "TO: __orchestrator__\nKIND: command\n\nACTION: channel.config\nCHANNEL: team\n"
        "ACK_TIMEOUT: 7",
    )
    sent = box.send("alice", "TO: #team\nKIND: command\n\ndeploy")
    box.after(7)
    assert duty(box, sent) == ("open", 1, None)


def test_a_process_that_ends_with_work_begun_is_told_once(box: Box) -> None:
    process = registered(box, "bob")
    box.after(31)
    sent = box.send("alice", COMMAND)
    answer(box, sent, "in_progress")
    other = box.send("alice", COMMAND)  # not begun: it waits for the next process
    box.after(31)
    assert told(box, "alice") == []
    end(process)
    box.after(31)
    box.after(6)
    (notice,) = told(box, "alice")
    assert notice.startswith(
        f"process {process.pid} of bob ended; bob has not answered the command"
    )
    assert "it began it 62 s ago" in notice
    box.after(31)
    box.restart()
    box.after(31)
    box.after(6)
    assert told(box, "alice") == [notice]
    assert (duty(box, sent)[0], duty(box, other)[0]) == ("open", "open")


def test_however_much_is_begun_the_processes_are_looked_at_once(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(20):
        answer(box, box.send("alice", COMMAND), "in_progress")
    box.after(1)
    looks: list[object] = []
    processes, rows = box.ledger.processes, box.ledger.processes.rows

    def counted() -> object:
        looks.append(None)
        return rows()

    monkeypatch.setattr(processes, "rows", counted)
    box.clock.advance(6)
    box.dispatcher.tick(WatchEvents())
    assert len(looks) == 1


def test_so_is_one_that_began_in_the_second_in_which_it_registered(box: Box) -> None:
    """A shell registers with its first call and says at once that it has begun."""
    box.clock.advance(1 - box.clock.now_ns() % NS_PER_S / NS_PER_S + 0.2)
    sent = box.send("alice", COMMAND)
    process = registered(box, "bob")
    box.clock.advance(0.1)
    answer(box, sent, "in_progress")
    box.after(31)
    end(process)
    box.after(31)
    box.after(6)
    assert told(box, "alice")[0].startswith(f"process {process.pid} of bob ended; ")


@pytest.mark.box("alice", kind=ProcessBox)
def test_so_is_one_that_the_relay_started(box: ProcessBox) -> None:
    box.spawn("w", "RESTART: on-failure")
    box.after(3)
    sent = box.send("alice", "TO: w\nKIND: command\n\ndeploy")
    box.send("w", f"TO: alice\nKIND: ack\nRE: {sent}\n\nin_progress")
    box.after(6)
    assert told(box, "alice") == []
    box.spawner.end(1)
    for _ in range(3):
        box.after(6)  # it runs again by now
    (notice,) = told(box, "alice")
    assert notice.startswith("the process of w ended")
    assert "w has not answered the command" in notice
