"""Signatures at the door: the first key is registered, another waits for a confirmation."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import pytest

from agent_sdk import Agent
from relay.acomm import store_file
from relay.base.config import Config, SecuritySettings
from relay.base.crypto import key_id, public_key, sign
from relay.base.errors import KeyFileError
from relay.base.home import STORE
from relay.delivery.record import LedgerWriter
from tests.box import Box, MakeBox
from tests.kills import killed_in
from tests.procs import relay, rows_of, until

pytestmark = pytest.mark.shows("engine 8.13")

ALICE, MALLORY = b"a" * 32, b"m" * 32


@pytest.fixture
def strict(make_box: MakeBox) -> Box:
    """A relay that takes signed messages alone."""
    config = Config(security=SecuritySettings(require_signatures=True))
    return make_box("alice", "bob", config=config)


def name_key(box: Box, agent: str, private: bytes) -> str:
    """Put a public key into meta.json; its hex digits."""
    public = public_key(private).hex()
    box.path("agents", agent, "meta.json").write_text(json.dumps({"public_key": public}))
    return public


def signed(
    box: Box, private: bytes, to: str = "bob", body: str = "hi", sender: str = "alice"
) -> str:
    """Send a signed message; its id."""
    name = box.name()
    raw = sign(private, sender, name.removesuffix(".msg"), to, body.encode())
    text = f"TO: {to}\nSIGNATURE: ed25519:{base64.b64encode(raw).decode()}\n\n{body}"
    return box.send(sender, text, name)


def incidents(box: Box) -> list[tuple[str, str]]:
    return box.sql("SELECT kind, agent FROM security_events ORDER BY id")


def test_a_wrong_signature_is_refused(box: Box) -> None:
    public = name_key(box, "alice", ALICE)
    first = signed(box, ALICE)
    assert box.inbox("bob")[first].headers["SIGNATURE"].startswith("ed25519:")
    sent = signed(box, MALLORY, body="send money")
    assert box.bodies("bob") == ["hi"]
    assert box.sql("SELECT public_key FROM agents WHERE name = 'alice'") == [(public,)]
    assert box.nacks("alice") == [
        f"not delivered: {sent}.msg: SIGNATURE does not match the key registered for alice "
        f"({key_id(public_key(ALICE))}), over this sender, id, TO and body\n"
    ]
    assert incidents(box) == [("key_registered", "alice"), ("bad_signature", "alice")]
    box.flush()
    assert list(box.path("archive").glob(f"*/alice/rejected/{sent}.msg"))

    box.path("agents", "alice", "meta.json").unlink()  # the key that is registered stays
    box.restart()
    signed(box, MALLORY)
    assert "SIGNATURE does not match the key" in box.nacks("alice")[1]
    box.send("alice", "TO: bob\n\nplain")  # nobody asks for signatures
    assert box.bodies("bob") == ["hi", "plain"]


def identities(box: Box) -> dict[str, dict[str, str | None]]:
    """Channel -> participant -> the id of its key."""
    return {
        channel.name: {one.id: one.identity_id for one in channel.participants}
        for channel in box.store.channels.list_all()
        if channel.name in ("team", "dm/alice/bob")
    }


@pytest.mark.shows("engine 8.13")
def test_who_registers_a_key_after_joining_is_known_by_it(box: Box) -> None:
    box.join("team", "alice", "bob")
    box.send("bob", "TO: alice\n\nhi")
    name_key(box, "alice", ALICE)
    signed(box, ALICE)
    mine = key_id(public_key(ALICE))
    expected = {"team": {"alice": mine, "bob": None}, "dm/alice/bob": {"alice": mine, "bob": None}}
    assert identities(box) == expected
    sequence = box.store.sequence
    box.flush()
    box.restart()
    assert identities(box) == expected  # from the journal, and not noted again
    assert not any(
        one.identity_id != mine
        for channel in store_file.read(box.home.path(STORE)).channels
        for one in channel.participants
        if one.id == "alice"
    )
    assert box.store.sequence == sequence + len(box.store.state.downtimes)  # time was lost, no more

    other = public_key(MALLORY).hex()
    box.command("operator", "agent.key", "NAME: alice", f"KEY: {other}")
    assert identities(box)["team"] == {"alice": key_id(public_key(MALLORY)), "bob": None}
    box.command("operator", "agent.key", "NAME: alice", "KEY: none")
    assert identities(box)["team"] == {"alice": None, "bob": None}


def test_another_key_is_ignored_and_said_once_until_it_is_confirmed(box: Box) -> None:
    name_key(box, "alice", ALICE)
    signed(box, ALICE)
    other = name_key(box, "alice", MALLORY)
    signed(box, MALLORY)
    signed(box, MALLORY)
    assert len(box.nacks("alice")) == 2
    assert [kind for kind, _ in incidents(box)].count("key_changed") == 1

    box.command("bob", "agent.key", "NAME: alice", f"KEY: {other}")
    assert "agent.key is for operator and the lead alone, not for bob" in box.nacks("bob")[0]
    signed(box, MALLORY)
    assert len(box.nacks("alice")) == 3

    box.command("operator", "agent.key", "NAME: alice", f"KEY: {other}")
    signed(box, MALLORY, body="now it is mine")
    assert "now it is mine" in box.bodies("bob")
    assert incidents(box)[-1] == ("key_confirmed", "alice")
    detail = box.sql("SELECT detail FROM security_events WHERE kind = 'key_confirmed'")
    assert detail == [(f"operator says: the key {other} is registered for alice",)]


def test_killed_before_the_ledger_noted_a_confirmed_key(box: Box) -> None:
    name_key(box, "alice", ALICE)
    signed(box, ALICE)
    other = public_key(MALLORY).hex()
    with killed_in(LedgerWriter, "record"):
        box.command("operator", "agent.key", "NAME: alice", f"KEY: {other}")
    box.kill()
    assert box.sql("SELECT public_key FROM agents WHERE name = 'alice'") != [(other,)]
    box.open()
    box.tick()
    assert box.sql("SELECT public_key FROM agents WHERE name = 'alice'") == [(other,)]
    assert [kind for kind, _ in incidents(box)].count("key_confirmed") == 1


def test_where_signatures_are_asked_for_unsigned_ones_are_refused(strict: Box) -> None:
    sent = strict.send("alice", "TO: bob\n\nplain")
    assert strict.nacks("alice") == [
        f"not delivered: {sent}.msg: it is not signed, and security.require_signatures requires "
        "it: `relay key make alice`, and send with the SDK or `relay send`\n"
    ]
    assert incidents(strict) == [("unsigned", "alice")]
    signed(strict, ALICE)
    said = "no public key of alice is registered, and security.require_signatures requires one"
    assert sum(said in nack for nack in strict.nacks("alice")) == 1
    name_key(strict, "alice", ALICE)
    signed(strict, ALICE)
    assert strict.bodies("bob") == ["hi"]


def test_an_agent_with_a_key_signs_by_itself(strict: Box) -> None:
    key = strict.path("agents", "alice", "key")
    key.write_bytes(ALICE)
    key.chmod(0o600)
    name_key(strict, "alice", ALICE)
    with Agent("alice", strict.root) as alice:
        alice.send("bob", "by the SDK")
        alice.send("bob", b"", kind="ack", re="1700000000000000000-00000001")
    strict.tick()
    assert strict.bodies("bob") == ["by the SDK"]
    assert "SIGNATURE" not in strict.nacks("alice")[0]  # the ack answers nothing
    assert [kind for kind, _ in incidents(strict)] == ["key_registered"]


def test_a_key_that_others_could_read_signs_nothing(box: Box) -> None:
    key = box.path("agents", "alice", "key")
    key.write_bytes(ALICE)
    key.chmod(0o644)
    with Agent("alice", box.root) as alice:
        with pytest.raises(KeyFileError, match="expected mode 0600, found 0644"):
            alice.send("bob", "hi")
    assert box.outbox("alice") == []


@pytest.mark.usefixtures("running")
def test_keys_on_the_command_line(home: Path) -> None:
    made = relay("key", "make", "alice", home=home)
    assert made.returncode == 0 and len(made.stdout.strip()) == 64
    assert relay("key", "make", "alice", home=home).stdout == made.stdout
    assert made.stderr == ""
    of_carl = relay("key", "make", "carl", home=home)
    assert of_carl.stderr == f"relay: created agent carl in {home}\n"
    private = home / "agents" / "alice" / "key"
    assert private.stat().st_mode & 0o777 == 0o600
    assert relay("send", "bob", "hi", "--as", "alice", home=home).returncode == 0
    shown = relay("key", "show", "alice", home=home)
    assert shown.stdout == made.stdout

    refused = relay("key", "trust", "alice", "12", home=home)
    assert refused.returncode != 0
    assert "KEY '12' is not a valid public key" in refused.stderr
    other = public_key(MALLORY).hex()
    done = relay("key", "trust", "alice", other, home=home)
    assert done.stdout == f"the key {other} is registered for alice\n"
    trusted = [{"name": "alice", "public_key": other}]
    until(lambda: rows_of("key", "show", "alice", home=home) == trusted)
    nobody = relay("key", "show", "nobody", home=home)
    assert nobody.stderr == (
        f"relay: 'nobody' has no key; create one with `relay --home {home} key make nobody`\n"
    )
    os.unlink(private)
    again = relay("key", "make", "alice", home=home)
    assert again.stdout != made.stdout
    assert again.stderr == (
        "relay: another key is registered for alice; what this one signs is refused until "
        f"`relay --home {home} key trust alice {again.stdout.strip()}`\n"
    )
    assert relay("key", "trust", "alice", again.stdout.strip(), home=home).returncode == 0
    assert relay("send", "bob", "hi", "--as", "alice", home=home).returncode == 0
    assert relay("key", "make", "alice", home=home).stderr == ""


@pytest.mark.usefixtures("running")
def test_the_operator_confirms_its_own_new_key(home: Path) -> None:
    """Its command is signed with the key that it confirms; what it is told to do works."""
    assert relay("key", "make", "operator", home=home).returncode == 0
    assert relay("send", "--wait", "taken", "bob", "hi", home=home).returncode == 0
    private, away = home / "agents" / "operator" / "key", home / "agents" / "key.away"
    private.unlink()
    made = relay("key", "make", "operator", home=home)
    assert "; move agents/operator/key away while that runs, or it is refused, too" in made.stderr
    trust = ("key", "trust", "operator", made.stdout.strip())
    assert relay(*trust, home=home).returncode == 6
    private.rename(away)
    assert relay(*trust, home=home).returncode == 0
    away.rename(private)
    assert relay("send", "bob", "hi", home=home).returncode == 0
