"""relay.sh under every shell that is here: what it writes, takes, refuses and leaves behind.

Faults enter through its own small functions, which a test defines again: ``_relay_write`` writes
to a disk that is full, ``_relay_pause`` does what happens meanwhile instead of sleeping.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from agent_sdk import Agent
from relay.base.message import Kind, parse
from relay.base.names import sha256_hex
from tests import shells
from tests.agent_sdk.support import HandRelay
from tests.shells import RELAY_SH, SHELLS

pytestmark = pytest.mark.shows("ready 1.1")

AWKWARD = "a $b `c` \"d\" 'e' \\n %s %% * ✓\n\n  -f\n\n"
QUICK = '_relay_pause() { printf "%s\\n" "$1" >>pauses; }\n'


class Shell(shells.Shell):
    """One shell, as the agent ``sh-1``, with a home that has a space in its name."""

    def __init__(self, command: list[str], folder: Path) -> None:
        super().__init__(command, folder, folder / "the home")
        self.relay = HandRelay(self.home)
        Agent("sh-1", self.relay.root).close()

    def sent(self, message_id: str) -> bytes:
        """The bytes of a file in the outbox."""
        return (self.relay.box("sh-1", "outbox") / f"{message_id.strip()}.msg").read_bytes()

    def nothing_is_left(self) -> bool:
        """True when neither outbox nor ``.pending`` holds a file."""
        return not [path for path in self.relay.box("sh-1", "outbox").rglob("*") if path.is_file()]

    def pauses(self) -> list[float]:
        """How long it would have slept."""
        return [float(line) for line in (self.folder / "pauses").read_text().split()]


@pytest.fixture(params=list(SHELLS))
def sh(request: pytest.FixtureRequest, tmp_path: Path) -> Shell:
    """Each shell: every function of relay.sh runs in all of them."""
    return Shell(SHELLS[request.param], tmp_path)


# For what is decided by programs beside the shell, or by a line that another test runs in each.
IN_ONE = pytest.mark.parametrize("sh", list(SHELLS)[:1], indirect=True)


def test_a_message_is_a_file_in_the_outbox(sh: Shell) -> None:
    sent = sh.ok('relay_send bob "hello"')
    assert sh.relay.waiting("sh-1", "outbox") == [f"{sent.strip()}.msg"]
    assert sh.relay.waiting("sh-1", "outbox/.pending") == []
    checksum = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    assert sh.sent(sent) == f"TO: bob\nCHECKSUM: sha256:{checksum}\n\nhello".encode()
    (path,) = sh.relay.box("sh-1", "outbox").glob("*.msg")
    assert path.stat().st_mode & 0o777 == 0o600


def test_every_option_is_a_header(sh: Shell) -> None:
    sent = sh.ok(
        "relay_send -k query -t t-1 -r 1706123456-ab -p 0 -T build.ok -H 'AWAIT: 30s' "
        "-H 'x-tool:make  it' -H 'ATTACHMENT: '$1 -H 'ATTACHMENT: '$1 '#ci/front' 'which branch?'",
        "sha256:" + "0" * 64,
    )
    message = parse(sh.sent(sent))
    assert (message.to, message.kind, message.body) == ("#ci/front", Kind.QUERY, b"which branch?")
    assert len(message.attachments) == 2
    del message.headers["CHECKSUM"]
    assert message.headers == {
        "THREAD": "t-1",
        "RE": "1706123456-ab",
        "PRIORITY": "0",
        "TOPIC": "build.ok",
        "AWAIT": "30s",
        "X-TOOL": "make  it",
    }


@IN_ONE
def test_every_form_of_address(sh: Shell) -> None:
    forms = ["*", "Lead", "__orchestrator__", "#ci", "a-b_C9"]
    sent = sh.ok('for to in "$@"; do relay_send "$to" x; done', *forms).split()
    assert [parse(sh.sent(one)).to for one in sent] == forms
    for to, kinds in {  # whose address says all there is to say
        "__orchestrator__": ["status"],
        "#build": ["join", "leave", "subscribe", "unsubscribe"],
    }.items():
        sent = sh.ok(f"for kind in \"$@\"; do relay_send -k $kind '{to}'; done", *kinds).split()
        found = [parse(sh.sent(one)) for one in sent]
        assert [(one.kind, one.to, one.body) for one in found] == [(k, to, b"") for k in kinds]


def test_a_body_is_sent_as_it_is(sh: Shell) -> None:
    words = [AWKWARD, "-k", "\\0101\\c", "\n", "x" * 1999, "x" * 2000, "x" * 2001, "é" * 3000]
    sent = sh.ok('for body in "$@"; do relay_send bob "$body"; done', *words).split()
    assert [parse(sh.sent(one)).body.decode() for one in sent] == words
    for body in (AWKWARD.encode(), b"-", b"x" * 2001, bytes(range(256)) * 30):
        assert sh.sent(sh.ok("relay_send bob -", stdin=body)).partition(b"\n\n")[2] == body


MISUSE = [
    ("relay_send", "usage: relay_send"),
    ("relay_send bob x y", "usage: relay_send"),
    ("relay_send bob", "BODY is missing"),
    ("relay_send bob ''", "the body is empty"),
    ("relay_send bob - </dev/null", "the body is empty"),
    ("relay_send bob - <&-", "the body is empty"),
    ("relay_send 'b ob' x", "TO is a name"),
    ("relay_send '' x", "TO is a name"),
    ("relay_send -z bob x", "there is no option -z; usage: relay_send"),
    ("relay_send --help", "usage: relay_send [-k kind]"),
    ("relay_send -h", "usage: relay_send [-k kind]"),
    ("relay_send -a", "-a needs a value"),
    ("relay_send -a /dev/zero bob x", "-a /dev/zero is not a regular file"),
    ("mkfifo p; relay_send -a p bob x", "-a p is not a regular file"),
    ("relay_reply 1-a", "usage: relay_reply"),
    ("relay_attachment", "usage: relay_attachment"),
    ("relay_send -k", "-k needs a value"),
    ("relay_send -k shout bob x", "-k shout is not a kind of message"),
    ("relay_send -p 5 bob x", "-p takes 0"),
    ("relay_send -t 'a b' bob x", "-t takes letters"),
    ("relay_send -T 'a b' bob x", "-T takes a topic"),
    ("relay_send -r yesterday bob x", "yesterday is neither a message id"),
    ("relay_send -r 12-34-56 bob x", "12-34-56 is neither a message id"),
    ("relay_send -t t -t u bob x", "THREAD is given twice"),
    ("relay_send -t t -H 'Thread: u' bob x", "THREAD is given twice"),
    ("relay_send -H 'A: 1\n2' bob x", "the value of A has a line break"),
    ("relay_send -H \"A: 1$(printf '\\r')2\" bob x", "the value of A has a line break"),
    ("relay_send -H 'A\nB: 1' bob x", "-H takes"),
    ("relay_send -H nothing bob x", "-H takes"),
    ("relay_send -H 'FROM: carol' bob x", "only the relay writes FROM"),
    ("relay_send -H 'to: carol' bob x", "TO is not for -H"),
    ("relay_recv -t soon", "-t soon is not a whole number"),
    ("relay_recv -t 09", "-t 09 is not a whole number"),
    ("relay_recv now", "usage: relay_recv"),
    ("relay_ack", "usage: relay_ack"),
    ("relay_ack 1706123456-ab done", "done is not one of"),
    ("relay_ack that-one", "that-one is neither a message id"),
    ("relay_ack ./gone.msg", "there is no file ./gone.msg"),
    ("echo >./a.msg; relay_ack ./a.msg", "./a.msg has no ID"),
    ("relay_nack 1706123456-ab", "usage: relay_nack"),
    ("relay_header", "usage: relay_header"),
    ("AGENT_RELAY_NAME= relay_send bob x", "AGENT_RELAY_NAME is not set"),
    ("AGENT_RELAY_NAME=../bob; relay_send bob x", "AGENT_RELAY_NAME ../bob"),
    ("AGENT_RELAY_NAME=Admin; relay_recv", "AGENT_RELAY_NAME Admin is reserved"),
    ("AGENT_RELAY_NAME=Operator; relay_send bob x", "AGENT_RELAY_NAME Operator is reserved"),
    ("AGENT_RELAY_NAME=operator_; relay_recv", "AGENT_RELAY_NAME operator_ is reserved"),
    (f"AGENT_RELAY_NAME={'a' * 64}; relay_recv", "AGENT_RELAY_NAME has 64 characters"),
]


def test_misuse_is_one_line_on_stderr(sh: Shell) -> None:
    """Each in a subshell of one shell."""
    for number, (script, _) in enumerate(MISUSE):
        (sh.folder / f"{number}.sh").write_text(script)
    sh.ok(
        'for n in "$@"; do (. "./$n.sh") >"$n.out" 2>"$n.err"; echo $? >>"$n.out"; done',
        *map(str, range(len(MISUSE))),
    )
    for number, (script, says) in enumerate(MISUSE):
        assert (sh.folder / f"{number}.out").read_text() == "2\n", script
        (line,) = (sh.folder / f"{number}.err").read_text().splitlines()
        assert line.startswith(f"relay: {says}"), script
    assert sh.nothing_is_left()


def test_the_oldest_message_is_taken_and_printed_whole(sh: Shell) -> None:
    sh.relay.deliver("sh-1", "second", message_id="1706123456000000002-ab")
    sh.relay.deliver("sh-1", AWKWARD, message_id="1706123456000000001-ab")
    printed = sh.ok("relay_recv")
    (name,) = sh.relay.waiting("sh-1", "inbox/.read")
    assert name == "1706123456000000001-ab.msg"
    assert printed.encode() == (sh.relay.box("sh-1", "inbox/.read") / name).read_bytes()
    assert sh.ok("relay_recv | relay_body") == "second"
    done = sh.run("relay_recv")
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")


def test_waiting_takes_what_comes_meanwhile_and_ends_when_the_time_is_up(sh: Shell) -> None:
    sh.relay.deliver("sh-1", "at last")
    (path,) = sh.relay.box("sh-1", "inbox").glob("*.msg")
    path.rename(sh.folder / "on its way")
    printed = sh.ok(
        '_relay_pause() { printf "%s\\n" "$1" >>pauses; mv "on its way" "$ARRIVED"; }\n'
        "relay_recv -t 5 | relay_body",
        ARRIVED=str(path),
    )
    assert printed == "at last"
    assert sh.pauses() == [0.1]
    done = sh.run(QUICK + "relay_recv -t 2")
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")
    assert sum(sh.pauses()) == pytest.approx(0.1 + 2)


@IN_ONE
def test_two_shells_of_one_agent_never_get_the_same_message(sh: Shell) -> None:
    sent = [sh.relay.deliver("sh-1", "x") for _ in range(10)]
    got: list[list[str]] = [[], []]

    def take(mine: list[str]) -> None:
        mine.extend(sh.ok("while relay_recv; do echo; done | grep '^ID: '").splitlines())

    threads = [threading.Thread(target=take, args=(mine,)) for mine in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got[0] + got[1]) == [f"ID: {one}" for one in sent]


@IN_ONE
def test_an_inbox_that_cannot_be_taken_from_is_said_so(sh: Shell) -> None:
    sh.relay.deliver("sh-1", "stuck", message_id="1706123456-ab")
    (sh.relay.box("sh-1", "inbox/.read") / "1706123456-ab.msg").mkdir()
    done = sh.run("relay_recv -t 5")
    assert (done.returncode, done.stdout) == (1, b"")
    assert len(done.stderr.decode().splitlines()) == 1


def test_acks_by_file_go_to_the_sender_and_by_id_to_the_relay(sh: Shell) -> None:
    original = sh.relay.deliver("sh-1", "deploy", sender="bob", kind=Kind.COMMAND)
    path = str(sh.relay.box("sh-1", "inbox/.read") / f"{original}.msg")
    sh.ok("relay_recv")
    answers = [
        sh.ok('relay_ack "$1"', path),
        sh.ok('relay_ack "$1" completed "all green"', path),
        sh.ok('relay_nack "$1" "no: frozen"', path),
        sh.ok('relay_ack "$1" in_progress', original),
        sh.ok('relay_nack "$1" "- no -"', original),
    ]
    messages = [parse(sh.sent(answer)) for answer in answers]
    assert [(m.to, m.kind, m.body) for m in messages] == [
        ("bob", Kind.ACK, b"received"),
        ("bob", Kind.ACK, b"completed\nall green"),
        ("bob", Kind.NACK, b"no: frozen"),
        ("__orchestrator__", Kind.ACK, b"in_progress"),
        ("__orchestrator__", Kind.NACK, b"- no -"),
    ]
    assert {m.headers["RE"] for m in messages} == {original}


def test_header_and_body_of_a_message(sh: Shell) -> None:
    text = b"ID: 1-a\nRE: 2-b\nX: a  b: c\n\nID: 3-c\n\nRE: none\n"
    assert sh.ok("relay_header id", stdin=text) == "1-a\n"
    assert sh.ok("relay_header X", stdin=text) == "a  b: c\n"
    assert sh.ok("relay_body", stdin=text) == "ID: 3-c\n\nRE: none\n"
    assert sh.run("relay_header FROM", stdin=text).returncode == 1
    (sh.folder / "a file.msg").write_bytes(text)
    both = 'relay_header RE "a file.msg"; relay_body "a file.msg" | wc -l'
    assert sh.ok(both).split() == ["2-b", "3"]


def test_a_full_disk_is_waited_for(sh: Shell) -> None:
    done = sh.run(
        QUICK + "_relay_write() { echo x >>tries; [ $(wc -l <tries) -gt 3 ] || set -- /dev/full\n"
        'cat >"$1"; }\nrelay_send bob -',
        stdin=AWKWARD.encode(),
    )
    assert (done.returncode, done.stderr) == (0, b"relay: disk full, trying for 30 s\n")
    sent = done.stdout.decode()
    assert sh.pauses() == [0.1, 0.2, 0.4]
    assert sh.relay.waiting("sh-1", "outbox/.pending") == []
    assert parse(sh.sent(sent)).body == AWKWARD.encode()


@IN_ONE
def test_a_disk_that_stays_full_is_an_error_and_leaves_nothing(sh: Shell) -> None:
    (sh.folder / "file").write_bytes(b"data")
    for words in ("bob hello", "-a file bob hello"):
        done = sh.run(QUICK + f"_relay_write() {{ cat >/dev/full; }}\nrelay_send {words}")
        assert (done.returncode, done.stdout) == (1, b"")
        first, line = done.stderr.decode().splitlines()
        assert first == "relay: disk full, trying for 30 s"
        assert line.startswith("relay: not sent: ")
        assert "No space left on device" in line
        assert sum(sh.pauses()) == pytest.approx(30)
        (sh.folder / "pauses").unlink()
        assert sh.nothing_is_left()
        assert [path for path in (sh.home / "attachments").rglob("*") if path.is_file()] == []


FAULTS = (
    "ulimit -f 8",  # a real limit: the writer is killed in the middle
    '_relay_write() { head -c 9000 >"$1"; }',
    "_relay_sync() { echo no such device >&2; return 1; }",
    "_relay_unescape() { printf %s x; }",
)


def test_any_other_fault_is_an_error_at_once_and_leaves_nothing(sh: Shell) -> None:
    for fault in FAULTS:
        done = sh.run(QUICK + fault + "\nrelay_send bob -", stdin=b"x" * 10_000)
        assert (done.returncode, done.stdout) == (1, b""), fault
        assert b"relay: not sent: " in done.stderr, fault
        assert not (sh.folder / "pauses").exists(), fault
        assert sh.nothing_is_left(), fault


def test_killed_while_it_writes_it_leaves_nothing(sh: Shell) -> None:
    done = sh.run("_relay_sync() { kill -s TERM 0; sleep 5; }\nrelay_send bob hello")
    assert done.returncode == -signal.SIGTERM
    assert sh.nothing_is_left()


def test_the_callers_settings_stay_and_do_no_harm(sh: Shell) -> None:
    sh.relay.deliver("sh-1", "hi")
    said = sh.ok(
        "set -eufC; IFS=:; name=mine body=mine header=mine; trap 'echo bye' EXIT; umask 022\n"
        'relay_send bob "a b" >/dev/null; relay_recv | relay_body; echo\n'
        'echo "$name $body $header $-"; umask; [ "$IFS" = : ]'
    )
    lines = said.splitlines()
    assert lines[0] == "hi"
    assert lines[1].startswith("mine mine mine ")
    assert set("eufC") <= set(lines[1].split()[3])
    assert (int(lines[2], 8), lines[3]) == (0o022, "bye")


@pytest.mark.parametrize("sh", ["bash", "zsh"], indirect=True)
def test_aliases_and_a_cd_that_prints_stay_and_do_no_harm(sh: Shell) -> None:
    sh.relay.deliver("sh-1", "hi")
    said = sh.ok(
        '[ -n "${ZSH_VERSION-}" ] || shopt -s expand_aliases failglob\n'
        "for word in cat date grep ls mkdir mv rm sed tr; do alias $word='echo the alias'; done\n"
        'cd() { builtin cd "$@" && pwd; }; chpwd() { pwd; }\n'
        '. "$RELAY_SH"\nrelay_send bob hello >sent; relay_recv | relay_body\n'
        "relay_recv || eval 'mv it'"
    )
    assert said == "hithe alias it\n"
    assert parse(sh.sent((sh.folder / "sent").read_text())).body == b"hello"


@IN_ONE
def test_where_there_is_no_home_yet_the_message_waits(sh: Shell) -> None:
    done = sh.run("cd /; relay_send bob hi", AGENT_RELAY_DIR="", HOME=str(sh.folder / "me"))
    assert done.returncode == 0
    assert b"no relay has used" in done.stderr
    home = sh.folder / "me" / ".agent-relay"
    assert (home / "agents/sh-1/outbox" / f"{done.stdout.decode().strip()}.msg").is_file()
    assert {path.stat().st_mode & 0o077 for path in home.rglob("*")} == {0}


def test_a_directory_that_was_named_and_is_no_home_is_refused_and_left_as_it_is(sh: Shell) -> None:
    """As the commands and the SDK refuse it: the name may be mistyped, and nobody looks there."""
    (sh.folder / "other").mkdir()
    calls = {"mistyped": "relay_send bob hi", "other": "relay_recv", ".": "relay_ack 1706123456-ab"}
    for name, call in calls.items():
        done = sh.run(call, AGENT_RELAY_DIR=f"{sh.folder}/{name}")
        assert (done.returncode, done.stdout) == (5, b"")
        where = f"{sh.folder}/{name}"
        assert done.stderr.decode() == (
            f"relay: {where} is not a relay home: config.json or agents/ is missing; "
            f"run `relay --home {where} init`, or set AGENT_RELAY_DIR to another\n"
        )
    assert sorted(path.name for path in sh.folder.iterdir()) == ["other", "the home"]
    assert list((sh.folder / "other").iterdir()) == []


def test_a_relative_home_that_looks_like_an_option(sh: Shell) -> None:
    (sh.folder / "-home").symlink_to(sh.relay.root)
    sent = sh.ok("relay_send bob hi", AGENT_RELAY_DIR="-home")
    assert parse(sh.sent(sent)).body == b"hi"


def test_ids_where_date_has_no_nanoseconds(sh: Shell) -> None:
    sent = sh.ok(
        "date() { case $1 in +%s%N) echo 1706123456N ;; *) echo 1706123456 ;; esac; }\n"
        "relay_send bob hi"
    )
    assert sent.startswith("1706123456000000000-")
    assert parse(sh.sent(sent)).body == b"hi"


@IN_ONE
def test_without_sha256sum_there_is_no_checksum(sh: Shell) -> None:
    sent = sh.ok("command() { return 1; }\nrelay_send bob hi")
    assert sh.sent(sent) == b"TO: bob\n\nhi"


@IN_ONE
def test_it_may_be_run_instead_of_sourced(sh: Shell) -> None:
    assert parse(sh.sent(sh.ok('"$RELAY_SH" send bob "a b"'))).body == b"a b"
    done = sh.run('"$RELAY_SH" shout')
    assert (done.returncode, done.stderr) == (
        2,
        b"relay: usage: relay.sh send|recv|reply|ack|nack|attachment|header|body ...\n",
    )


def test_a_file_that_cannot_be_read_is_one_line(sh: Shell) -> None:
    calls = ("relay_body nowhere", "relay_body .", "relay_header FROM nowhere", "relay_header A .")
    done = sh.run("; ".join(f"({call}); echo $?" for call in calls))
    assert done.stdout.split() == [b"1"] * 4
    said = [f"relay: {name} is not a readable file" for name in ("nowhere", ".")] * 2
    assert done.stderr.decode().splitlines() == said


@IN_ONE
def test_a_home_that_is_a_file_is_said_once(sh: Shell) -> None:
    (sh.folder / ".agent-relay").write_text("no home")
    done = sh.run("cd /; relay_send bob hello", AGENT_RELAY_DIR="", HOME=str(sh.folder))
    assert done.returncode == 1 and done.stderr.count(b"mkdir") == 1
    assert done.stderr.startswith(b"relay: not sent: ") and done.stderr.count(b"\n") == 1


def test_what_waits_is_taken_by_priority_then_age(sh: Shell) -> None:
    for body, priority in (("low", "3"), ("a", ""), ("urgent", "0"), ("b", "2"), ("also", "0")):
        sh.relay.deliver("sh-1", body, **({"PRIORITY": priority} if priority else {}))
    sh.relay.deliver("sh-1", "text\n\nPRIORITY: 0\n")
    sh.relay.put_bytes("sh-1", "no message.msg", b"nothing")
    each = "for _ in 1 2 3 4 5 6; do relay_recv | relay_body; echo; echo --; done; relay_recv"
    *taken, left = sh.ok(each).split("\n--\n")
    assert [one.rstrip() for one in taken] == [
        *("urgent", "also", "a", "b", "text\n\nPRIORITY: 0", "low")
    ]
    assert left == "nothing"
    assert sh.run("relay_recv").returncode == 1


def test_an_attachment_goes_into_the_store_and_comes_out_of_it(sh: Shell) -> None:
    data = bytes(range(256)) * 30
    (sh.folder / "a file").write_bytes(data)
    sent = sh.ok('relay_send -a "a file" -a "a file" -a /dev/fd/3 bob "see there" 3<"$RELAY_SH"')
    message = parse(sh.sent(sent))
    first, again, script = message.attachments
    assert message.headers["ATTACHMENT-NAMES"] == "a file/a file/3"
    assert first == again == f"sha256:{sha256_hex(data)}"
    with Agent("bob", sh.relay.root) as bob:
        assert bob.open_attachment(first) == data
        assert bob.open_attachment(script) == RELAY_SH.read_bytes()
        assert bob.attach(b"of bob") == f"sha256:{sha256_hex(b'of bob')}"
    stored = [path for path in (sh.home / "attachments").rglob("*") if path.is_file()]
    assert len(stored) == 3
    assert {path.stat().st_mode & 0o777 for path in stored} == {0o600}
    assert sh.run('relay_attachment "$1"', first).stdout == data
    sh.relay.deliver("sh-1", "see there", ATTACHMENT=first, message_id="1706123456-ab")
    assert sh.run("relay_recv >m.msg; relay_attachment m.msg").stdout == data
    sh.relay.deliver("sh-1", "hi", message_id="1706123457-ab")
    for script, says in (
        ("relay_recv >m.msg; relay_attachment m.msg", "m.msg has no attachment"),
        ("relay_attachment ./nope", "./nope is not a readable file"),
        ("relay_attachment sha256:12", "there is no attachment sha256:12"),
        (f"echo >> {str(stored[0])!r}; relay_attachment sha256:{stored[0].name}", "is damaged"),
    ):
        done = sh.run(script)
        assert (done.returncode, done.stdout) == (1, b"")
        assert says in done.stderr.decode() and done.stderr.count(b"\n") == 1


@IN_ONE
def test_files_have_names_and_references_have_none(sh: Shell) -> None:
    (sh.folder / "a\nTO: b").write_text("text")
    reference = f"sha256:{sha256_hex(b'text')}"
    line = f"-H 'ATTACHMENT: {reference}'"
    sent = sh.ok(f'relay_send {line} -a "$1" bob hi', "a\nTO: b")
    assert parse(sh.sent(sent)).headers["ATTACHMENT-NAMES"] == "/a_TO: b"
    sent = sh.ok(f"relay_send {line} bob hi")
    assert "ATTACHMENT-NAMES" not in parse(sh.sent(sent)).headers
    sent = sh.ok(f"relay_send {line} -H 'ATTACHMENT-NAMES: plan.txt' bob hi")
    assert parse(sh.sent(sent)).headers["ATTACHMENT-NAMES"] == "plan.txt"


@IN_ONE
def test_two_sends_of_one_shell_may_store_the_same_file_at_once(sh: Shell) -> None:
    (sh.folder / "f").write_bytes(b"data")
    other = """_relay_sync() { case $1 in *.tmp)
    [ -e other ] || { : >other; relay_send -a f bob second; } ;; esac; }
    """
    assert len(sh.ok(other + "relay_send -a f bob first").split()) == 1
    assert len(sh.relay.waiting("sh-1", "outbox")) == 2


def test_a_reply_goes_to_the_sender_in_the_thread(sh: Shell) -> None:
    asked = sh.relay.deliver("sh-1", "which?", sender="bob", kind=Kind.QUERY, THREAD="t-1")
    told = sh.relay.deliver("sh-1", "hi", sender="carol")
    path = str(sh.relay.box("sh-1", "inbox") / f"{told}.msg")
    sh.ok("relay_recv")
    answers = [
        sh.ok('relay_reply "$1" "main -f"', asked),
        sh.ok('relay_reply "$1" -', path, stdin=b"hello"),
    ]
    assert sh.run('relay_reply "$1" x', "1-a").stderr.startswith(b"relay: there is no file ")
    messages = [parse(sh.sent(answer)) for answer in answers]
    assert [(m.to, m.kind, m.body) for m in messages] == [
        ("bob", Kind.RESPONSE, b"main -f"),
        ("carol", Kind.MESSAGE, b"hello"),
    ]
    assert [m.headers.get("THREAD") for m in messages] == ["t-1", None]
    assert [m.headers["RE"] for m in messages] == [asked, told]
