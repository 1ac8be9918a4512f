"""What a wrong command line, an empty name or the system itself is answered with: one line."""

from __future__ import annotations

import contextlib
import errno
import getpass
import hashlib
import os
import shlex
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from relay.acomm import store_file
from relay.base.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_PIPE_CLOSED,
    EXIT_STATE,
    EXIT_TIMEOUT,
    EXIT_USAGE,
)
from relay.base.home import Home
from relay.cli import run
from relay.reach import bell
from tests.acomm.support import small_store
from tests.procs import PROJECT, environment, home_of

EMPTY = hashlib.sha256().hexdigest()
MESSAGE_ID = "1700000000000000001-01"
OTHER_SPELLING = "another spelling of Lead means the agent with the role lead"
SCHEMA_5 = PROJECT / "tests" / "fixtures" / "ledger" / "schema-v5.sql"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return home_of(tmp_path / "home", "bob")


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr; nothing is on stdout."""
    out, err = capsys.readouterr()
    assert out == "" and err.endswith("\n") and err.count("\n") == 1
    return err.rstrip("\n")


WRONG = """\
$ relay frob
relay: no such command 'frob'; see `relay --help`
$ relay sned
relay: no such command 'sned'; did you mean send?
$ relay channel shwo
relay: no such command 'shwo'; did you mean show?
$ relay help sned
relay: no such command 'sned'; did you mean send?
$ relay help send x
relay: `relay send` has no subcommands; see `relay send --help`
$ relay send --to bob
relay: no such option '--to'; see `relay send --help`
$ relay send --kin x
relay: no such option '--kin'; did you mean --kind?
$ relay send --frob
relay: no such option '--frob'; see `relay send --help`
$ relay send
relay: Missing argument 'TO'; see `relay send --help`
$ relay send bob hello world
relay: Got unexpected extra argument (world); put a text of several words in quotes
$ relay agents bob
relay: no such command 'bob'; `relay agents show bob` shows an agent
$ relay inbox bob
relay: Got unexpected extra argument (bob); `relay inbox --as bob` shows the messages of one agent
$ relay unread bob
relay: Got unexpected extra argument (bob); `relay inbox --as bob` shows the messages of one agent
$ relay send --priority 9 bob hi
relay: Invalid value for '--priority': 9 is not in the range 0<=x<=4; see `relay send --help`
$ relay web --uds= --port 8377
relay: Invalid value for '--uds': it is empty: expected a path; see `relay web --help`
$ relay spawn w --cli sh --cwd=
relay: Invalid value for '--cwd': it is empty: expected a path; see `relay spawn --help`
$ relay audit run --out=
relay: Invalid value for '--out': it is empty: expected a path; see `relay audit run --help`
$ relay audit digest --out=
relay: Invalid value for '--out': it is empty: expected a path; see `relay audit digest --help`
"""


def test_a_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = WRONG.splitlines()
    for words, line in zip(lines[::2], lines[1::2], strict=True):
        assert run(words.removeprefix("$ relay ").split()) == EXIT_USAGE, words
        assert said(capsys) == line, words


@pytest.mark.parametrize(
    ("words", "where", "what"),
    [
        ("top --every nan", "--every", "'nan' is not a duration such as 500ms, 10s, 10m, 2h or 7d"),
        ("top --every 0", "--every", "'0' is not a duration from 0.1 to 1,000,000,000 s"),
        ("tail --since 5", "--since", "'5' is not a time such as 10m, 14:05, 2026-11-26, "),
        ("search before:soon", "before:", "'soon' is not a time such as 10m, 14:05, "),
    ],
)
def test_what_is_no_duration_or_time_is_told(
    words: str, where: str, what: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--home", str(home), *words.split()]) == EXIT_USAGE
    told = said(capsys)
    assert where in told.partition(what)[0] and what in told and "\n" not in told


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("audit digest --out", "ledger.db"),
        ("ledger backup --force", "config.json"),
        (f"attachment get sha256:{EMPTY} -o", "agents/bob/meta.json"),
        (f"build --from {os.devnull} --force", "store/relay.acomm"),
    ],
)
def test_no_command_writes_over_a_file_of_a_home(
    words: str, name: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`audit digest --out HOME/ledger.db` had put its page in the place of the ledger."""
    store_file.write(str(home / "store/relay.acomm"), small_store())
    (home / "agents/bob/meta.json").write_text("{}")
    (home / "attachments" / EMPTY[:2]).mkdir(0o700)
    (home / "attachments" / EMPTY[:2] / EMPTY).touch(0o600)
    before = (home / name).read_bytes()
    link = home.parent / "link"
    link.symlink_to(home / name)
    for path in (home / name, link):
        assert run(["--home", str(home), *words.split(), str(path)]) == EXIT_FAILED
        assert said(capsys) == (
            f"relay: {path} is a file of the relay home {home}, and is not replaced;"
            " name another file"
        )
        assert (home / name).read_bytes() == before


def test_a_time_before_all_times_is_the_beginning(home: Path) -> None:
    assert run(["--home", str(home), *"tail --no-follow --since 99999999d".split()]) == EXIT_OK


@pytest.mark.parametrize("words", ["tail --no-follow", "tail --all --no-follow --agent operator"])
def test_nothing_is_said_to_be_nothing(
    words: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--home", str(home), *words.split()]) == EXIT_OK
    assert said(capsys) == "nothing found"
    assert run(["--home", str(home), *words.split(), "--json"]) == EXIT_OK
    assert capsys.readouterr() == ("", "")


def test_a_folder_that_is_not_there(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "nowhere" / "monday.db"
    assert run(["--home", str(home), "ledger", "backup", str(target)]) == EXIT_FAILED
    expected = f"relay: directory {target.parent} does not exist; create it, or name another file"
    assert said(capsys) == expected


def in_shell(home: Path, words: str) -> subprocess.CompletedProcess[str]:
    """A command with redirections, as a shell carries it out."""
    program = shlex.join([sys.executable, "-m", "relay", "--home", str(home)])
    return subprocess.run(
        ["sh", "-c", f"exec {program} {words}"], env=environment(), capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("send bob - <&-", EXIT_USAGE),  # nothing to read: an empty body
        ("inbox --as bob --take >&-", EXIT_TIMEOUT),
        ("status <&- >&- 2>&-", EXIT_STATE),
    ],
)
def test_a_closed_stream_is_no_crash_and_no_files_number(words: str, code: int, home: Path) -> None:
    done = in_shell(home, words)
    assert (done.returncode, done.stdout) == (code, "")
    assert "Traceback" not in done.stderr


def test_hints_name_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hint(*words: str) -> str:
        assert run(["down", *words]) == EXIT_STATE
        return said(capsys).partition("run `")[2].partition("`")[0]

    other = tmp_path / "the other"
    assert hint() == "relay init"
    assert hint("--home", str(other)) == f"relay --home '{other}' init"
    monkeypatch.setenv("AGENT_RELAY_DIR", str(tmp_path / "third"))
    assert hint() == f"relay --home {tmp_path / 'third'} init"
    usual = Path(os.environ["HOME"]) / ".agent-relay"
    assert hint("--home", str(usual)) == f"relay --home {usual} init"


def test_a_reader_that_closes_the_pipe_ends_a_command_with_141() -> None:
    words = [sys.executable, "-m", "relay", "--version"]
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    with os.fdopen(write_fd, "wb") as closed:
        done = subprocess.run(words, env=environment(), stdout=closed, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (EXIT_PIPE_CLOSED, b"")


def test_a_full_disk_behind_the_output_asks_for_no_second_try(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    done = in_shell(home, "--version > /dev/full")
    assert done.returncode == EXIT_FAILED
    line = f"relay: the output could not be written: {os.strerror(errno.ENOSPC)}\n"
    assert done.stderr == line


@pytest.mark.parametrize(
    ("output", "error"),
    [(">&-", "stdout is closed; "), ("> /dev/full", "No space left on device; ")],
)
def test_a_message_that_is_taken_and_not_printed_is_named(
    output: str, error: str, home: Path
) -> None:
    name = f"{MESSAGE_ID}.msg"
    text = b"ID: %b\nFROM: alice\nSENT: 2026-11-20T23:37:25.431916Z\nATTEMPT: 1\nTO: bob\n\nhello"
    (home / "agents" / "bob" / "inbox" / name).write_bytes(text % MESSAGE_ID.encode())
    done = in_shell(home, f"inbox --as bob --take {output}")
    path = home / "agents" / "bob" / "inbox" / ".read" / name
    assert path.exists()
    assert f"{error}message {MESSAGE_ID} is read, and is in {path}" in done.stderr
    assert done.returncode == EXIT_FAILED


@pytest.mark.parametrize("words", ["agents", "tail --no-follow"])
def test_a_ledger_of_an_earlier_version_waits_for_the_next_start(
    words: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "ledger.db").unlink()
    with contextlib.closing(sqlite3.connect(home / "ledger.db")) as db:
        db.executescript(SCHEMA_5.read_text())
    assert run(["--home", str(home), *words.split()]) == EXIT_FAILED
    line = said(capsys)
    assert line.startswith(f"relay: {home}/ledger.db is of an earlier agent-relay: its schema is 5")
    assert f"the next `relay --home {home} up` upgrades it" in line


@pytest.mark.parametrize("name", ["", "a b"])
def test_a_wrong_name_in_the_environment_is_told_with_its_variable(
    name: str, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_RELAY_NAME", name)
    assert run(["--home", str(home), "inbox"]) == EXIT_USAGE
    assert said(capsys).startswith(f"relay: $AGENT_RELAY_NAME: {name!r} is not a valid name; ")


def test_a_working_directory_that_was_removed_is_named(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert run(["--home", str(home), "backup", "x"]) == EXIT_FAILED
    assert said(capsys) == "relay: the working directory does not exist any more"


def test_a_bell_for_nobody_is_told_like_everywhere(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGENT_RELAY_NAME", raising=False)
    assert bell.main(["--home", str(home)]) == EXIT_USAGE
    assert said(capsys) == "relay: expected --as NAME, or $AGENT_RELAY_NAME"
    assert bell.main(["--home", str(home), "--as", "bbo"]) == EXIT_FAILED
    line = f"relay: there is no agent 'bbo' in '{home}'; `relay agents` lists all agents"
    assert said(capsys) == line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["ack", "x", "--as", "bob"], "relay: 'x' is not a message id"),
        (["send", "a b", "hi"], "relay: TO: 'a b' is not an address: expected a name, *, #channel"),
        (["send", "bob", "hi", "--kind", "comand"], "relay: --kind: 'comand' is not one of "),
        (["send", "bob", "hi", "--re", "x"], "relay: --re: 'x' is not a message id"),
        (["send", "bob", "hi", "--thread="], "relay: --thread: '' is not 1-128 of "),
        (
            ["send", "bob", "hi", "-HPRIORITY: 9"],
            "relay: header PRIORITY: '9' is not 0 (critical) ",
        ),
    ],
)
def test_values_of_a_command_line_have_no_line_number(
    words: list[str], line: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--home", str(home), *words]) == EXIT_USAGE
    assert said(capsys).startswith(line)


@pytest.mark.parametrize("words", [["--home", "", "status"], ["init", "--home", ""]])
def test_an_empty_home_is_no_other_home(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("AGENT_RELAY_DIR", str(tmp_path / "another"))
    assert run(words) == EXIT_USAGE
    assert said(capsys).startswith("relay: Invalid value for --home: it is empty; name a directory")
    assert not (tmp_path / "another").exists()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EACCES, f"; user {getpass.getuser()} lacks permission; check with `ls -ld`"),
        (errno.ENOSPC, "; free some space on that disk"),
        (errno.EROFS, "; remount it, let the sandbox write there, or choose another path"),
        (errno.ENOTDIR, ""),
    ],
)
def test_what_the_system_refuses_is_said_with_a_remedy(
    number: int, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(root: str) -> Home:
        raise OSError(number, os.strerror(number), "/srv/relay")

    monkeypatch.setattr("relay.cli.common.Home", refuse)
    assert run(["status"]) == EXIT_FAILED
    assert said(capsys) == f"relay: /srv/relay: {os.strerror(number)}{remedy}"


@pytest.mark.parametrize(
    "words", [["inbox", "--take"], ["inbox"], ["ack", MESSAGE_ID], ["nack", MESSAGE_ID, "no"]]
)
def test_a_slip_in_a_name_makes_no_agent(
    words: list[str], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--home", str(home), *words, "--as", "bbo"]) == EXIT_FAILED
    assert f"there is no agent 'bbo' in {home}; did you mean bob?" in said(capsys)
    assert not (home / "agents" / "bbo").exists()


def test_who_sends_for_the_first_time_is_told_that_this_made_an_agent(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for told in (f"relay: created agent carl in {home}\n", ""):
        assert run(["--home", str(home), "send", "bob", "hi", "--as", "carl"]) == EXIT_OK
        assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["Lead"], f"`TO: Lead` means this agent; {OTHER_SPELLING}"),
        (["lead", "--role", "lead"], ""),
        (["Bob"], "there is also an agent bob; names are case-sensitive"),
        (["bob"], ""),
    ],
)
def test_a_name_that_is_like_another_is_registered_with_a_warning(
    words: list[str], line: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--home", str(home), "register", *words]) == EXIT_OK
    out, err = capsys.readouterr()
    assert out.startswith(f"registered {words[0]}; ")
    assert err == (f"relay: {line}\n" if line else "")


def test_through_a_pipe_a_body_is_what_was_sent(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = b"FROM: ann\nID: 1700000000000000001-01\nTO: bob\n\n\x1b[31mred\x1b[0m\n"
    (home / "agents/bob/inbox/1700000000000000001-01.msg").write_bytes(message)
    assert run(["--home", str(home), "inbox", "--as", "bob", "--take"]) == EXIT_OK
    assert capsys.readouterr().out.endswith("\n| \x1b[31mred\x1b[0m\n")
