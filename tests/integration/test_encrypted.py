"""A relay that encrypts: its key, its store, what reads it, and what a lost key stops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relay.acomm import store_file
from relay.base import crypto
from relay.base.config import Config, StoreSettings
from tests.box import Box
from tests.procs import relay

pytestmark = pytest.mark.shows("engine 6.14")
SECRET = "the password is swordfish"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home whose store is encrypted; its relay has not been started yet."""
    root = tmp_path / "home"
    assert relay("init", home=root).returncode == 0
    configure(root, encrypt=True)
    return root


def configure(home: Path, **store: object) -> None:
    (home / "config.json").write_text(json.dumps({"store": {"checkpoint_messages": 1, **store}}))


def run_and_send(home: Path, body: str = SECRET) -> None:
    """Start, send one message to bob, stop: the store is written."""
    box = Box(home, "alice", "bob", config=Config(store=StoreSettings(encrypt=True)))
    box.send("alice", f"TO: bob\n\n{body}")
    box.close()


def found(home: Path) -> str:
    """What a search finds, or the error."""
    done = relay("search", "swordfish", "--json", home=home)
    return done.stdout if done.returncode == 0 else done.stderr


def test_the_first_start_makes_a_key_and_the_store_is_sealed(home: Path) -> None:
    assert relay("list", home=home).stderr == "nothing found\n"  # no start yet, no key
    assert not (home / "store.key").exists()
    run_and_send(home)
    key = crypto.load_key(str(home / "store.key"))
    path = home / "store" / "relay.acomm"
    file = store_file.read(str(path))
    assert file.encrypted
    assert SECRET.encode() not in [message.content for message in file.messages]
    assert json.loads(found(home).splitlines()[0])["content"] == SECRET

    run_and_send(home, "another")
    assert crypto.load_key(str(home / "store.key")) == key
    assert relay("check", str(path), home=home).stdout == f"{path}: OK, store\n"
    sealed = relay("dump", str(path), "--section", "messages", "--json", home=home).stdout
    plain = relay("dump", str(path), "--key-file", str(home / "store.key"), home=home).stdout
    assert SECRET not in sealed and "content_hex" in sealed
    assert SECRET in plain


def test_it_is_not_turned_off_by_a_setting(home: Path) -> None:
    run_and_send(home)
    before = (home / "config.json").read_bytes()
    done = relay("config", "set", "store.encrypt", "false", home=home)
    assert done.returncode == 2
    assert "store.encrypt: the store of this home is encrypted, for good" in done.stderr
    assert (home / "config.json").read_bytes() == before


def test_a_key_that_opens_nothing_is_no_setting(home: Path, tmp_path: Path) -> None:
    def refused(value: str, setting: str = "store.key_file") -> str:
        before = (home / "config.json").read_bytes()
        done = relay("config", "set", setting, value, home=home)
        assert done.returncode == 2, done
        assert (home / "config.json").read_bytes() == before
        assert "no relay would start with it: " in done.stderr
        assert "; nothing was changed; " in done.stderr
        return done.stderr

    configure(home, encrypt=False, key_file="nowhere/key")
    assert f"key file nowhere/key: {home}/nowhere is not a directory" in refused(
        "true", "store.encrypt"
    )
    configure(home, encrypt=True)
    run_and_send(home)
    assert "elsewhere: No such file" in refused("elsewhere")
    assert "not a regular file" in refused("")
    other, copy = tmp_path / "other", tmp_path / "copy"
    crypto.create_key(str(other))
    assert "cannot be decrypted with this key" in refused(str(other))
    copy.write_bytes((home / "store.key").read_bytes())
    assert "expected mode 0600" in refused(str(copy))
    copy.chmod(0o600)
    assert relay("config", "set", "store.key_file", str(copy), home=home).returncode == 0
    assert SECRET in found(home)


def test_a_lost_or_changed_key_stops_the_relay_and_writes_nothing(home: Path) -> None:
    run_and_send(home)
    path, key = home / "store" / "relay.acomm", home / "store.key"
    before = path.read_bytes()
    kept = key.read_bytes()
    key.unlink()
    for problem in ("No such file or directory", "cannot be decrypted with this key", "found 0644"):
        up = relay("up", home=home)
        assert up.returncode == 5
        assert problem in up.stderr and "Traceback" not in up.stderr
        assert problem in found(home)
        assert path.read_bytes() == before
        if problem.startswith("No such"):
            assert not key.exists()  # a new key would open nothing
            crypto.create_key(str(key))
        else:
            key.chmod(0o644)
    key.write_bytes(kept)
    key.chmod(0o600)
    assert SECRET in found(home)


@pytest.mark.damages
def test_the_doctor_says_what_a_start_would(home: Path) -> None:
    run_and_send(home)
    key = home / "store.key"
    kept = key.read_bytes()
    assert relay("doctor", home=home).stdout == "OK\n"
    configure(home, encrypt=False)
    assert "relay.acomm is encrypted, and no key was given" in doctors_word(home)
    assert relay("up", home=home).returncode == 5
    configure(home, encrypt=True)
    key.unlink()
    assert f"key file {key}: No such file" in doctors_word(home)
    crypto.create_key(str(key))
    assert "cannot be decrypted with this key" in doctors_word(home)
    for path in (home / "store").glob("relay.acomm*"):
        path.unlink()  # the journal alone is left
    assert f"{home / 'journal'}" in doctors_word(home)
    key.write_bytes(kept)
    assert "does not start" not in relay("doctor", home=home).stdout


def doctors_word(home: Path) -> str:
    done = relay("doctor", home=home)
    (line,) = [line for line in done.stdout.splitlines() if "the relay does not start" in line]
    assert done.returncode == 3
    return line


@pytest.mark.damages
@pytest.mark.parametrize("left", ["the file before", "the journal"])
def test_no_key_is_made_where_something_sealed_waits_for_its_own(home: Path, left: str) -> None:
    run_and_send(home)
    if left == "the file before":
        (home / "store" / "relay.acomm").rename(home / "store" / "relay.acomm.prev")
    else:
        for path in (home / "store").glob("relay.acomm*"):
            path.unlink()
    (home / "store.key").unlink()
    up = relay("up", home=home)
    assert up.returncode == 5 and "store.key: No such file" in up.stderr
    assert not (home / "store.key").exists()
