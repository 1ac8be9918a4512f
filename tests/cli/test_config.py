"""`relay config` and `relay where`: settings are shown, checked, changed; the relay follows."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from relay.base.config import Config, decode, flatten
from relay.base.errors import EXIT_FAILED, EXIT_OK, EXIT_STATE, EXIT_USAGE
from relay.cli.config import known_settings
from tests.procs import Relay, home_of, relay, rows_of, status_of

AGAIN = ("limits.batch_files", "77")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return home_of(tmp_path / "home", "alice")


def said(home: Path, *words: str, code: int = EXIT_OK) -> str:
    done = relay("config", *words, home=home)
    assert done.returncode == code, done
    return done.stdout + done.stderr


def changed(home: Path, *words: str, code: int = EXIT_OK) -> dict[str, Any]:
    (row,) = rows_of("config", "set", *words, home=home, exit_code=code)
    return row


def test_every_setting_has_a_description() -> None:
    settings = known_settings()
    assert list(settings) == list(flatten(Config()))
    for setting in settings.values():
        assert setting.meaning.endswith(".") and setting.allowed, setting.name


def test_settings_are_shown_with_their_meaning(home: Path) -> None:
    rows = {row["name"]: row for row in rows_of("config", "show", home=home)}
    assert list(rows) == list(flatten(Config()))
    assert rows["store.checkpoint_ms"] | {"meaning": ""} == {
        "name": "store.checkpoint_ms",
        "value": 50,
        "default": 60000,
        "unit": "milliseconds",
        "allowed": "1 or more",
        "meaning": "",
    }
    table = said(home, "show", "store").splitlines()
    assert table[0].split() == ["SETTING", "VALUE", "DEFAULT", "UNIT", "MEANING"]
    assert len(table) == 10 and all(line.startswith("store.") for line in table[1:])
    one = said(home, "show", "detection.watcher")
    assert 'value    "auto"' in one and "allowed  auto, inotify, scan" in one


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("limits.batch_file", "did you mean limits.batch_files?"),
        ("ack_timeout_s", "did you mean delivery.ack_timeout_s?"),
        ("xyz", "`relay --home HOME config show` lists all settings"),
    ],
)
def test_an_unknown_setting_is_answered_with_the_one_that_was_meant(
    home: Path, name: str, hint: str
) -> None:
    before = (home / "config.json").read_bytes()
    line = f"relay: setting '{name}' does not exist; {hint.replace('HOME', str(home))}\n"
    assert said(home, "show", name, code=EXIT_FAILED) == line
    assert said(home, "set", name, "1", code=EXIT_FAILED) == line
    assert (home / "config.json").read_bytes() == before


def test_a_section_is_set_by_its_settings(home: Path) -> None:
    told = said(home, "set", "retention", "5", code=EXIT_FAILED)
    assert told.startswith("relay: retention is a section, and no setting; `relay ")
    assert told.endswith("config show retention` lists its settings\n")


def test_a_change_keeps_the_rest_of_the_file(home: Path) -> None:
    path = home / "config.json"
    path.write_text(json.dumps({"lead": "ann", "limits": {"batch_files": 1, "reply_depth": 9}}))
    assert "limits.batch_files: 1 -> 77\n" in said(home, "set", *AGAIN)
    kept = {"lead": "ann", "limits": {"batch_files": 77, "reply_depth": 9}}
    assert path.read_text() == json.dumps(kept, indent=2) + "\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert "limits.batch_files: unchanged\n" in said(home, "set", *AGAIN)
    assert "limits.batch_files: 77 -> 256\n" in said(home, "set", "--unset", AGAIN[0])
    assert json.loads(path.read_text()) == {"lead": "ann", "limits": {"reply_depth": 9}}
    said(home, "set", "--unset", "limits.reply_depth")
    assert json.loads(path.read_text()) == {"lead": "ann"}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("lead", "alice", "alice"),
        ("lead", "007", None),  # the text stays one, and is not a valid name
        ("store.compress", "false", False),
        ("spawn.roots", '["/srv"]', ("/srv",)),
        ("journal.objects", "/mnt/x", "/mnt/x"),
        ("delivery.ack_timeout_s", "2m", 120),
        ("store.checkpoint_ms", "30s", 30_000),
        ("retention.archive_days", "48h", 2),
        ("retention.archive_days", "7", 7),
        ("delivery.ack_timeout_s", "soon", None),
        ("limits.batch_files", "many", None),
        ("security.rate_per_s", "10m", None),
        ("limits.batch_files", "0", None),
        ("spawn.roots", "/srv", None),
        ("spawn.roots", '["~/projects"]', None),
        ("spawn.roots", '[""]', None),
        ("attention.command", '[""]', None),
        ("attention.command", '["notify-send"]', ("notify-send",)),
    ],
)
def test_a_value_is_what_its_setting_needs(home: Path, name: str, text: str, value: object) -> None:
    path = home / "config.json"
    before = path.read_bytes()
    if value is None:
        line = said(home, "set", name, text, code=EXIT_USAGE)
        assert line.startswith(f"relay: {path}: {name}") and line.endswith(
            "; nothing was changed\n"
        )
        assert path.read_bytes() == before
    else:
        row = changed(home, name, text)
        assert row["setting"] == name and row["taken"] is None
        assert flatten(decode(path.read_bytes()))[name] == value


def test_why_a_value_does_not_fit_is_said(home: Path) -> None:
    line = said(home, "set", "delivery.ack_timeout_s", "1500ms", code=EXIT_USAGE)
    assert "ack_timeout_s: '1500ms' is not a whole number of seconds; nothing was" in line


def test_one_program_is_added_to_those_there_are(home: Path) -> None:
    words = ["aider", "--message", "{prompt}"]
    assert changed(home, "spawn.clis.aider", json.dumps(words))["new"] == words
    clis = decode((home / "config.json").read_bytes()).spawn.clis
    assert clis == Config().spawn.clis | {"aider": tuple(words)}
    assert changed(home, "--unset", "spawn.clis.aider")["new"] is None
    assert decode((home / "config.json").read_bytes()).spawn.clis == Config().spawn.clis


@pytest.mark.parametrize("words", [["lead"], ["lead", "alice", "--unset"]])
def test_a_value_or_unset_is_expected(home: Path, words: list[str]) -> None:
    assert "expected either VALUE or --unset" in said(home, "set", *words, code=EXIT_USAGE)


def test_the_running_relay_takes_a_change_over(home: Path) -> None:
    with Relay(home) as running:
        row = changed(home, *AGAIN)
        assert row["taken"] is True
        assert row["note"] == f"the running relay, pid {running.pid}, uses it"
        assert status_of(home)["starts"] == 2  # a session with the new settings
        assert changed(home, *AGAIN)["taken"] is True
        with socket.create_server(("127.0.0.1", 0)) as other:
            address = f"127.0.0.1:{other.getsockname()[1]}"
            for _ in range(2):  # said again, it is as true
                row = changed(home, "admin.listen", address, code=EXIT_STATE)
                trouble = f"has no server on admin.listen {address}: "
                assert row["taken"] is False and trouble in row["note"]
            assert changed(home, *AGAIN)["taken"] is True  # of another setting it is no trouble
        row = changed(home, "store.key_file", "nowhere/key")
        assert row["taken"] is True  # nothing is encrypted
        # by hand, one that no session can start with
        store = {"key_file": "nowhere/key", "encrypt": True}
        (home / "config.json").write_text(json.dumps({"store": store}))
        row = changed(home, *AGAIN, code=EXIT_STATE)
        assert row["taken"] is False and "no session starts with it: " in row["note"]
        line = said(home, "check")
        assert f"relay: the running relay, pid {running.pid}, uses other settings: " in line
        assert changed(home, "store.encrypt", "false")["taken"] is True
        assert said(home, "check") == f"{home}/config.json: OK\n"


def test_changes_at_once_are_all_made_and_taken_over(home: Path) -> None:
    names = ("limits.batch_files", "limits.reply_depth", "log.keep_files", "disk.alert_percent")
    with Relay(home), ThreadPoolExecutor(len(names)) as pool:
        rows = list(pool.map(lambda name: changed(home, name, "51"), names))
    assert [row["taken"] for row in rows] == [True] * len(names)
    values = flatten(decode((home / "config.json").read_bytes()))
    assert [values[name] for name in names] == [51] * len(names)


def test_a_file_is_checked_by_setting_or_line_and_column(home: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    for text, fault in (
        ('{"a":', "line 1, column 6: "),
        ('{"a": "b\n"}', "line 1, column 9: invalid control character; fix"),
        ('{\n  "lead": "alice"\n  "x"}', "line 3, column 3: "),
        ('{"limits": {"batch_file": 1}}', "setting limits.batch_file does not exist; did you mean"),
        ('{"limits": {"batch_files": "x"}}', "limits.batch_files: expected a whole number, got"),
    ):
        other.write_text(text)
        line = said(home, "check", str(other), code=EXIT_USAGE)
        assert line.startswith(f"relay: {other}: {fault}") and line.count("\n") == 1
    other.write_text("{}")
    assert said(home, "check", str(other)) == f"{other}: OK\n"


def test_a_lead_that_is_no_agent_is_a_warning(home: Path) -> None:
    assert changed(home, "lead", "alic")["new"] == "alic"
    line = "relay: lead: there is no agent alic; did you mean alice?\n"
    assert line in said(home, "check")


def test_where_names_the_rule_that_chose_the_home(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = relay("where", home=home)
    assert done.stdout == f"{home}  (--home)\nno relay is running\n"
    facts = {"home": str(home), "chosen_by": "--home", "exists": True, "pid": None}
    more = {"how": "--home", "problem": "", "others": []}
    assert rows_of("where", home=home) == [facts | more]
    with Relay(home) as running:
        assert rows_of("where", home=home)[0]["pid"] == running.pid
    missing = relay("where", home=tmp_path / "nowhere")
    assert missing.returncode == EXIT_STATE
    assert missing.stdout.startswith(f"{tmp_path}/nowhere  (--home)\nthere is no relay home at ")


def test_where_without_a_home_option(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from relay.cli import run

    monkeypatch.setenv("AGENT_RELAY_DIR", str(home))
    assert run(["where"]) == EXIT_OK
    assert capsys.readouterr().out.startswith(f"{home}  ($AGENT_RELAY_DIR)\n")
    monkeypatch.delenv("AGENT_RELAY_DIR")
    assert run(["where"]) == EXIT_STATE
    assert "/.agent-relay  (default)\n" in capsys.readouterr().out
