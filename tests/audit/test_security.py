"""The security job: what a relay noted and refused, by kind; and which of it is a finding."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from pathlib import Path

import pytest

from relay.audit.jobs import JOBS
from relay.audit.snapshot import snapshot_home
from relay.base.incidents import Incident, IncidentKind
from relay.base.names import ORCHESTRATOR
from tests.audit.home_builder import START_NS, HomeBuilder
from tests.audit.ledger_rows import DAY, END_NS, insert, message
from tests.audit.second_engine import says
from tests.box import Box

REFUSED = {"fault", "file_disappeared", "id_taken"}  # findings beside the incidents

pytestmark = pytest.mark.shows("audit 2.1")


def test_every_kind_of_incident_is_judged(home: HomeBuilder) -> None:
    for kind in IncidentKind:
        incident = Incident(kind, "alice", f"agents/alice/{kind}", "why")
        with home.ledger.transaction():
            home.ledger.agents.add_incidents([incident], START_NS)
            home.ledger.agents.add_incidents([incident], START_NS - 8 * DAY)
    event = {"at": START_NS, "kind": "of_a_newer_relay", "agent": "bob", "detail": "?"}
    insert(home, "security_events", [event])
    said = home.says("security")
    judged = {
        name: check.severity
        for name, check in JOBS["security"].header.checks.items()
        if name not in REFUSED
    }
    assert {str(kind) for kind in IncidentKind} - judged.keys() == {
        "audit_pruned",
        "key_confirmed",
        "key_registered",
    }
    expected = [(f"security.{name}", severity, None, "alice") for name, severity in judged.items()]
    expected.append(("security.of_a_newer_relay", "warning", None, "bob"))
    assert said.found == sorted(expected, key=str)
    assert {name for name, severity in judged.items() if severity == "error"} >= {
        "bad_signature",
        "foreign_owner",
    }
    assert judged["mode_repaired"] == judged["rate_limited"] == "warning"
    counts = said.counts
    assert counts["event.key_registered"] == counts["event.bad_signature"] == 2  # with the old ones


def test_incidents_are_one_finding_an_agent_and_kind(home: HomeBuilder) -> None:
    rows = [
        {"at": START_NS + n, "kind": "bad_signature", "agent": agent, "path": f"p{n}", "detail": ""}
        for agent in ("alice", "bob")
        for n in range(0, 30_000_000_000_000, 10_000_000_000_000)
    ]
    insert(home, "security_events", rows)
    said = home.says("security")
    assert len(said.found) == 2
    found = {(row["path"], row["detail"]["events"]) for row in said.findings}
    assert found == {("p20000000000000", 3)}
    assert len(said.tables["security"]) == 6  # an hour each


def refuse(box: Box) -> dict[str, str]:
    """Everything that a relay refuses, each by alice: message id, or name -> kind."""
    digest = hashlib.sha256(b"a large file").hexdigest()
    texts = {
        "TO: nobody\n\nhi": "no_recipient",
        "TO: root\n\nhi": "no_recipient",
        "TO: Lead\n\nhi": "no_recipient",
        "TO: alice\n\nhi": "to_itself",
        "TO: #nowhere\n\nhi": "channel",
        "TO: #dm/alice/bob\n\nhi": "channel",
        "TO: #all\n\nhi": "channel",
        "no header at all": "malformed",
        "KIND: message\n\nhi": "malformed",
        "TO: bob\nKIND: shout\n\nhi": "malformed",
        "TO: bob\nTO: carol\n\nhi": "malformed",
        "TO: bob\n": "malformed",
        "": "malformed",
        "TO: bob\nKIND: ack\nRE: 1234567890-ab\n\nreceived": "answers_nothing",
        "TO: bob\n\n" + "x" * 2_000_000: "too_large",
        f"TO: bob\nCHECKSUM: sha256:{digest}\n\nhi": "checksum",
        f"TO: bob\nATTACHMENT: sha256:{digest}\n\nsee there": "attachment",
        # what is quoted does not decide
        "TO: bob\nKIND: the relay has a fault\n\nhi": "malformed",
    }
    kinds = {box.send("alice", text): kind for text, kind in texts.items()}
    box.clock.advance(10)
    box.send("alice", "TO: bob\n\nhi", "hello.msg")
    taken = box.name()
    box.send("alice", "TO: bob\n\nfirst", taken)
    box.send("bob", "TO: alice\n\nsecond", taken)
    link = box.path("agents", "alice", "outbox", ".pending", box.name())
    link.symlink_to("/nowhere")
    os.rename(link, link.parent.parent / link.name)
    box.tick()
    return kinds


def test_what_a_relay_refuses_is_told_by_kind(box: Box, tmp_path: Path) -> None:
    kinds = refuse(box)
    box.send("alice", f"TO: {ORCHESTRATOR}\nKIND: join\n\nnothing named")
    box.flush()
    (tmp_path / "run").mkdir()
    said = says("security", snapshot_home(str(box.root), str(tmp_path / "run"), box.clock))
    counts = said.counts
    expected = {f"failed.{kind}": times for kind, times in Counter(kinds.values()).items()}
    assert {name: counts[name] for name in expected} == expected
    assert counts["rejection.bad_name"] == counts["rejection.id_taken"] == 1
    assert counts["event.not_a_regular_file"] == counts["failed.unsafe_file"] == 1
    assert counts["request.refused_request"] == 1
    assert [name for name in counts if name.endswith(".other")] == []
    assert [one[:2] for one in said.found] == [
        ("security.id_taken", "warning"),
        ("security.not_a_regular_file", "error"),
    ]


CODES = {  # of a row's last_error_code -> its kind, and severity
    "fault": ("fault", "error"),
    "file_disappeared": ("file_disappeared", "warning"),
    "id_taken": ("id_taken", "warning"),
    "expired": ("expired", None),
    None: ("other", None),  # refused by an earlier relay
}


def test_a_refusal_is_judged_by_its_code(home: HomeBuilder) -> None:
    failed = {"status": "failed", "last_error": "why"}
    rows = [message(str(code), START_NS, last_error_code=code, **failed) for code in CODES]
    insert(home, "messages", rows)
    table = home.says("security").tables["security"]
    judged = {row["message_id"]: (row["kind"], row["severity"]) for row in table}
    assert judged == {str(code): kind for code, kind in CODES.items()}


def test_a_home_where_nothing_was_refused_is_clean(home: HomeBuilder) -> None:
    insert(home, "messages", [message("1-a", END_NS)])
    said = home.says("security")
    assert said.found == []
    assert said.counts == {}
