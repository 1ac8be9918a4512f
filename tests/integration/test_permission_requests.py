"""A request for permission is a question with a time, and no other time applies to it."""

from __future__ import annotations

from tests.box import Box

ASKED = "TO: operator\nKIND: query\nOPTIONS: yes, no\nPERMISSION: {} Bash\n\nBash make?"


def test_nobody_is_reminded_its_end_is_silent_and_a_late_answer_refused(box: Box) -> None:
    sent = box.send("alice", ASKED.format("120s"))
    box.take("operator", sent)
    for _ in range(12):
        box.after(30)
    assert box.bodies("alice") == [] and box.bodies("operator") == []
    assert box.sql("SELECT obligation, reminders FROM deliveries") == [("given_up", 0)]
    assert box.sql("SELECT count(*) FROM audit_log WHERE new_status = 'reminded'") == [(0,)]
    box.send("operator", f"TO: alice\nKIND: response\nRE: {sent}\n\nyes")
    assert "no longer waits: the agent's own dialog asks now" in box.nacks("operator")[0]
    assert box.bodies("alice") == []


def test_an_answer_to_a_withdrawn_one_is_refused(box: Box) -> None:
    sent = box.send("alice", ASKED.format("600s"))
    box.command("alice", "message.cancel", f"ID: {sent}")
    before = box.bodies("alice")
    box.send("operator", f"TO: alice\nKIND: response\nRE: {sent}\n\nyes")
    assert "was withdrawn, or is over: nobody waits" in box.nacks("operator")[0]
    assert box.bodies("alice") == before
