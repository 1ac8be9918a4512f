"""The security job: what a relay noted and refused, by kind; and which of it is a finding."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from relay.audit.inputs import Inputs
from relay.audit.jobs import security
from relay.audit.snapshot import snapshot_home
from relay.base.incidents import Incident, IncidentKind
from relay.base.names import ORCHESTRATOR
from tests.audit.home_builder import START_NS, HomeBuilder
from tests.audit.ledger_rows import DAY, END_NS, NOW, checks, counted, insert, made, message
from tests.box import Box

pytestmark = pytest.mark.shows("audit 2.1")


def test_every_kind_of_incident_is_judged(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    assert set(security.EVENTS) == {str(kind) for kind in IncidentKind}
    for kind in IncidentKind:
        incident = Incident(kind, "alice", f"agents/alice/{kind}", "why")
        with home.ledger.transaction():
            home.ledger.agents.add_incidents([incident], START_NS)
            home.ledger.agents.add_incidents([incident], START_NS - 8 * DAY)
    event = {"at": START_NS, "kind": "of_a_newer_relay", "agent": "bob", "detail": "?"}
    insert(home, "security_events", [event])
    tables = made(security.JOB, security.make(home.inputs(spark, tmp_path / "run")))
    judged = {name: severity for name, severity in security.EVENTS.items() if severity}
    expected = [(f"security.{name}", severity, None, "alice") for name, severity in judged.items()]
    expected.append(("security.of_a_newer_relay", "warning", None, "bob"))
    assert checks(security.JOB, tables) == sorted(expected, key=str)
    assert {name for name, severity in judged.items() if severity == "error"} >= {
        "bad_signature",
        "foreign_owner",
    }
    assert judged["mode_repaired"] == judged["rate_limited"] == "warning"
    counts = counted(security.JOB, tables)
    assert counts["event.key_registered"] == counts["event.bad_signature"] == 2  # with the old ones


def test_incidents_are_one_finding_an_agent_and_kind(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    rows = [
        {"at": START_NS + n, "kind": "bad_signature", "agent": agent, "path": f"p{n}", "detail": ""}
        for agent in ("alice", "bob")
        for n in range(0, 30_000_000_000_000, 10_000_000_000_000)
    ]
    insert(home, "security_events", rows)
    tables = made(security.JOB, security.make(home.inputs(spark, tmp_path / "run")))
    assert len(checks(security.JOB, tables)) == 2
    found = security.findings(tables, NOW).collect()
    assert {(row["path"], row["detail"]["events"]) for row in found} == {("p20000000000000", "3")}
    assert tables["security"].count() == 6  # an hour each


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


def test_what_a_relay_refuses_is_told_by_kind(
    spark: SparkSession, box: Box, tmp_path: Path
) -> None:
    kinds = refuse(box)
    box.send("alice", f"TO: {ORCHESTRATOR}\nKIND: join\n\nnothing named")
    box.flush()
    (tmp_path / "run").mkdir()
    inputs = Inputs(spark, snapshot_home(str(box.root), str(tmp_path / "run"), box.clock))
    tables = made(security.JOB, security.make(inputs))
    failed = security.failures(inputs.ledger("messages", *MESSAGE_COLUMNS)).collect()
    by_id = {row["message_id"]: row["kind"] for row in failed}
    assert {name: by_id.get(name) for name in kinds} == kinds
    counts = counted(security.JOB, tables)
    assert counts["rejection.bad_name"] == counts["rejection.id_taken"] == 1
    assert counts["event.not_a_regular_file"] == counts["failed.unsafe_file"] == 1
    assert counts["request.refused_request"] == 1
    assert [name for name in counts if name.endswith(".other")] == []
    assert [one[:2] for one in checks(security.JOB, tables)] == [
        ("security.id_taken", "warning"),
        ("security.not_a_regular_file", "error"),
    ]


MESSAGE_COLUMNS = (
    "message_id",
    "agent_name",
    "status",
    "file_path",
    "discovered_at",
    "processed_at",
    "last_error",
)


REASONS = {
    "internal error of the relay: KeyError": ("fault", "error"),
    "file_disappeared": ("file_disappeared", "warning"),
    "its TTL of 5 s passed before it could be delivered": ("expired", None),
    "bob is retired since 2026-01-30T09:30:00Z: done; …": ("recipient_away", None),
    "it is not signed, and security.require_signatures requires it": ("unsigned", None),
    "SIGNATURE does not match the key registered for bob": ("bad_signature", None),
    "channel build is Paused": ("channel", None),
    "something new": ("other", None),
}


def test_reasons_that_take_more_to_bring_about(spark: SparkSession) -> None:
    types = ["string", "string", "string", "string", "timestamp", "timestamp", "string"]
    schema = ", ".join(f"{n} {t}" for n, t in zip(MESSAGE_COLUMNS, types, strict=True))
    rows = [(error, "alice", "failed", "p", None, None, error) for error in REASONS]
    found = security.failures(spark.createDataFrame(rows, schema)).collect()
    assert {row["message_id"]: (row["kind"], row["severity"]) for row in found} == REASONS


def test_a_home_where_nothing_was_refused_is_clean(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    insert(home, "messages", [message("1-a", END_NS)])
    tables = made(security.JOB, security.make(home.inputs(spark, tmp_path / "run")))
    assert checks(security.JOB, tables) == []
    assert counted(security.JOB, tables) == {}
