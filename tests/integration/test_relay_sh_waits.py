"""relay.sh waits for the relay that runs: its exit status, and what it says."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from agent_sdk import Agent, Refused
from relay.base.errors import EXIT_OK, EXIT_REFUSED, EXIT_STATE
from tests.procs import PATIENCE_S, Relay, inbox_of, relay, until
from tests.shells import SHELLS, Shell

pytestmark = pytest.mark.home("sh-1", "bob", "carol")


@pytest.fixture(params=list(SHELLS))
def sh(request: pytest.FixtureRequest, tmp_path: Path, home: Path) -> Shell:
    return Shell(SHELLS[request.param], tmp_path, home)


# Ten times its two seconds, for a relay that has not had its turn.
PATIENT = '_relay_pause() { for _ in 1 2 3 4 5 6 7 8 9 10; do sleep "$1"; done; }\n'


def send(sh: Shell, script: str, **env: str) -> tuple[int, str, str]:
    """The exit status, the id and the line on stderr; it waits unless ``env`` says otherwise."""
    done = sh.run(PATIENT + script, **{"RELAY_NO_WAIT": "", **env})
    assert done.stderr.count(b"\n") == bool(done.stderr)
    return done.returncode, done.stdout.decode().strip(), done.stderr.decode().strip()


def waiting(home: Path) -> list[str]:
    return [path.stem for path in (home / "agents" / "sh-1" / "outbox").glob("*.msg")]


def test_what_the_relay_has_is_no_word_and_of_a_refusal_the_nack_is_taken(
    running: Relay, sh: Shell
) -> None:
    status, sent, line = send(sh, "relay_send bob hi")
    assert (status, line) == (EXIT_OK, "")
    assert [path.stem for path in inbox_of(sh.home, "bob")] == [sent]
    assert waiting(sh.home) == []
    for script, says in (
        ("relay_send bobb hi", "there is no agent bobb"),
        ("relay_ack 1706123456-ab", "relay: "),
    ):
        status, sent, line = send(sh, script)
        assert (status, sent != "", says in line) == (EXIT_REFUSED, True, True)
    assert inbox_of(sh.home, "sh-1") == []
    assert len(list((sh.home / "agents/sh-1/inbox/.read").glob("*.msg"))) == 2


def test_a_refusal_is_told_though_another_process_has_taken_its_nack(
    running: Relay, sh: Shell
) -> None:
    another = 'find() { mv "$inbox"/*.msg "$inbox/.read/"; command find "$@"; }\n'
    status, sent, line = send(sh, another + "relay_send bobb hi")
    assert (status, sent != "", line) == (
        EXIT_REFUSED,
        True,
        "relay: refused; another process of sh-1 took the reason",
    )


def test_a_nack_that_some_did_not_get_it_stays_in_the_inbox(running: Relay, sh: Shell) -> None:
    with Agent("bob", sh.home) as bob, Agent("carol", sh.home) as carol:
        for agent in (bob, carol):
            agent.join("team", timeout_s=PATIENCE_S)
    assert send(sh, "relay_send -k join '#team'")[0] == EXIT_OK
    with Agent("operator", sh.home) as operator:
        body = "ACTION: agent.retire\nNAME: carol"
        operator.request("__orchestrator__", body, PATIENCE_S)
    until(lambda: send(sh, "relay_recv")[0] != EXIT_OK)  # the ack of the join, notifications
    status, sent, line = send(sh, "relay_send '#team' hi")
    assert (status, line) == (EXIT_OK, "")
    (nack,) = inbox_of(sh.home, "sh-1")
    assert f"RE: {sent}\n" in nack.read_text()
    assert "carol did not get" in nack.read_text()


def test_a_channel_none_of_whose_members_gets_it_refuses_it(running: Relay, sh: Shell) -> None:
    """As one without members: the sender is told at once, by each way to send."""
    with Agent("carol", sh.home) as carol:
        carol.join("team", timeout_s=PATIENCE_S)
    with Agent("operator", sh.home) as operator:
        operator.join("team", timeout_s=PATIENCE_S)
        body = "ACTION: agent.retire\nNAME: carol\nREASON: done"
        operator.request("__orchestrator__", body, PATIENCE_S)
        with pytest.raises(Refused, match=r"^no recipients: carol is retired since .*: done"):
            operator.send("#team", "hi", wait=PATIENCE_S)
    told = relay("send", "--wait", "delivered", "#team", "hi", home=sh.home)
    assert told.returncode == EXIT_REFUSED
    assert send(sh, "relay_send -k join '#team'")[0] == EXIT_OK
    status, _, line = send(sh, "relay_send '#team' hi")
    assert status == EXIT_OK  # the operator is there
    with Agent("operator", sh.home) as operator:
        operator.leave("team", timeout_s=PATIENCE_S)
    status, _, line = send(sh, "relay_send '#team' hi")
    assert status == EXIT_REFUSED and line.startswith("relay: no recipients: carol is retired")


def test_without_a_relay_it_waits_in_the_outbox(sh: Shell) -> None:
    status, sent, line = send(sh, "_relay_pause() { exit 9; }\nrelay_send bob hi")
    assert status == EXIT_STATE
    assert line == f"relay: no relay is running for {sh.home}: the message waits in the outbox"
    assert waiting(sh.home) == [sent]
    assert send(sh, "relay_send bob hi", RELAY_NO_WAIT="1")[::2] == (EXIT_OK, "")


def test_a_relay_that_hangs_or_was_killed_is_waited_for_two_seconds(
    running: Relay, sh: Shell
) -> None:
    pauses = '_relay_pause() { printf "%s\\n" "$1" >>pauses; }\n'
    says = "relay: the relay has not taken it over within 2 s: the message waits in the outbox"
    os.kill(running.pid, signal.SIGSTOP)
    try:
        status, sent, line = send(sh, pauses + "relay_send bob hi")
    finally:
        os.kill(running.pid, signal.SIGCONT)
    assert (status, line) == (EXIT_STATE, says)
    slept = (sh.folder / "pauses").read_text().split()
    assert sum(map(float, slept)) == pytest.approx(2)
    until(lambda: [path.stem for path in inbox_of(sh.home, "bob")] == [sent])
    until(lambda: waiting(sh.home) == [])  # a killed relay may have delivered and not archived
    running.kill()
    status, sent, line = send(sh, pauses + "relay_send bob hi")
    assert (status, line) == (EXIT_STATE, says)
    assert waiting(sh.home) == [sent]


WAITS = """\
relay_send -w none bob hi                0
relay_send -w taken bob hi               0
relay_send -w delivered bob hi           0  delivered to bob, not read yet
relay_send -w read=3s bob hi             4  delivered to bob, not read yet
relay_send -w seen bob hi                2  -w takes none, taken, delivered, read, done or answer
"""


@pytest.mark.parametrize("sh", list(SHELLS)[:1], indirect=True)  # the command decides
def test_it_waits_in_the_words_of_the_command(running: Relay, sh: Shell) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for line in WAITS.splitlines():
        words, status, said = line[:40], int(line[41]), line[42:].strip()
        found, sent, told = send(sh, words, PATH=path)
        assert (found, bool(sent), said in told) == (status, status != 2, True), (line, told)
    alone = send(sh, "relay_send -w read bob hi", PATH="/usr/bin:/bin")
    assert alone == (2, "", "relay: -w read needs the command relay on the path")


def test_an_id_that_cannot_be_printed_is_on_stderr(sh: Shell) -> None:
    done = sh.run("relay_send bob hello >/dev/full")
    (sent,) = waiting(sh.home)
    said = f"relay: stdout cannot be written; sent as {sent}\n"
    assert (done.returncode, done.stderr.decode()) == (1, said)


def test_a_command_that_was_stopped_and_went_on_has_done_its_work(sh: Shell) -> None:
    stopped = "until grep -q ^State:.T /proc/$PPID/status; do sleep 0.01; done"
    stop = f"""sh -c '{{ {stopped}; kill -CONT $PPID; }} & kill -STOP $PPID; wait'"""
    sent = sh.ok(f"_relay_sync() {{ {stop}; }}\nrelay_send bob hello").strip()
    assert waiting(sh.home) == [sent]
    name = "1706123456789012345-a1b2c3d4.msg"
    (sh.home / "agents" / "sh-1" / "inbox" / name).write_text("FROM: bob\nTO: sh-1\n\nnumber 1")
    taken = sh.ok(f'mv() {{ {stop}; command mv "$@"; }}\nrelay_recv')
    assert "number 1" in taken
