"""The tools of ``relay mcp``: what they say, what they show, and what proves that it was seen."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

from relay.base.clock import NS_PER_S
from relay.base.errors import RelayError
from relay.base.text import visible
from relay.cli.hooks import run_command
from relay.reach import tool_session
from relay.reach.session import TOOLS, load_sessions
from relay.reach.tools import TOOLS as TABLE
from tests.procs import agents_of, relay
from tests.reach.calls import call, deliver, read, refusal, reported, server_of, unread
from tests.reach.hooks import Cli

MOST_TOKENS = 1500


# -- what an agent pays for it ------------------------------------------------------------------


async def test_the_tools_cost_few_tokens(bobs_home: Path) -> None:
    async with Client(server_of(bobs_home).server) as client:
        tools = (await client.list_tools()).tools
        assert [one.name for one in tools] == [*TABLE]
        shown = [one.model_dump(by_alias=True, exclude_none=True) for one in tools]
        # An estimate: no tokenizer is at hand. Four characters a token is usual for English.
        # JSON has more tokens for its length, so three are counted here.
        assert len(json.dumps(shown)) / 3 <= MOST_TOKENS


# -- the tools ----------------------------------------------------------------------------------


async def test_send_waits_for_the_answer(served: Path) -> None:
    async with Client(server_of(served).server) as client:
        asked = asyncio.ensure_future(
            call(client, "send", to="alice", body="which?", kind="query", wait="answer=100s")
        )
        while not unread(served, "alice"):
            await asyncio.sleep(0.01)
        (number,) = unread(served, "alice")
        relay("send", "bob", "mine", "--as", "eve", "--re", number, home=served)  # was not asked
        relay("reply", "--as", "alice", number, "main", home=served)
        text = await asked
        assert text.startswith(number)
        assert text.endswith("| main")


WAITS: list[tuple[dict[str, Any], str]] = [
    ({"wait": "delivered"}, ": delivered to alice, not read yet"),
    ({"wait": "read=3s"}, ": delivered to alice, not read yet; not read within 3 s"),
    ({"wait": "taken"}, ": delivered to alice, not read yet"),
    ({"wait": "none"}, ": sent"),
    ({"wait": "answer=100ms"}, "; no answer within 0.1 s, a later one comes by inbox"),
]


async def test_send_waits_in_the_words_of_the_command(served: Path) -> None:
    async with Client(server_of(served).server) as client:
        for waits, said in WAITS:
            text = await call(client, "send", to="alice", body="hi", **waits)
            assert text.endswith(said), waits
        said = await refusal(client, "send", to="alice", body="hi", wait="seen")
        assert said.startswith("wait: 'seen' is not one of none, taken, delivered, read, done")
        said = await refusal(client, "send", to="alice", body="hi", wait="read=5m")
        assert said == "wait: expected 100s or less, got 'read=5m'"


async def test_who_sends_where_an_answer_is_owed_hears_it(
    served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By MCP and at the command line: the message goes, and the command is still open."""
    sent = relay("send", "--as", "alice", "bob", "count", "--kind", "command", home=served)
    number = sent.stdout.strip()
    async with Client(server_of(served).server) as client:
        await call(client, "inbox", wait_s=100)
        said = await call(client, "send", to="alice", body="17 rows", re=number)
        assert f"alice still waits for an answer to command {number}: `relay ack" in said
    monkeypatch.delenv("RELAY_NO_WAIT")
    words = ("send", "--as", "bob", "alice", "17 rows, really", "--re", number)
    again = relay(*words, home=served)
    assert f"relay: alice still waits for an answer to command {number}" in again.stderr


async def test_tools_take_the_short_ids_that_are_printed(served: Path) -> None:
    words = ("send", "--as", "alice", "bob", "deploy", "--kind", "command")
    first = relay(*words, home=served).stdout.strip()
    second = relay(*words, home=served).stdout.strip()
    async with Client(server_of(served).server) as client:
        short = first.partition("-")[2][:8]
        assert (await call(client, "trace", id=short)).startswith(first)
        await call(client, "answer", id=short, status="completed")
        await call(client, "send", to="alice", body="about it", re=second.partition("-")[2][:8])
        text = await refusal(client, "answer", id="abcdef01" * 4, status="received")
        assert text.startswith("no message abcdef01")
        text = await refusal(client, "send", to="alice", body="x", re="x" * 100_000)
        assert len(text) < 300
        assert len(await refusal(client, "trace", id="f" * 1_000_000)) < 300
    about = [line for one in sorted((served / "agents" / "alice" / "inbox").glob("*.msg"))
             for line in one.read_text().split("\n") if line.startswith("RE: ")]  # fmt: skip
    assert about == [f"RE: {first}", f"RE: {second}"]


async def test_an_agent_joins_a_channel_and_leaves_it(served: Path) -> None:
    relay("channel", "create", "builds", "--as", "alice", home=served)
    async with Client(server_of(served).server) as client:
        text = await refusal(client, "send", to="#builds", body="red")
        assert text.endswith("`relay channel join builds --as bob`, or the tool channel")
        assert "bob is a member of builds" in await call(client, "channel", name="#builds")
        assert "delivered to alice" in await call(client, "send", to="#builds", body="red")
        await call(client, "channel", name="builds", leave=True)
        assert "bob is not a participant" in await refusal(
            client, "send", to="#builds", body="green"
        )


async def test_a_message_whose_ttl_is_over_says_so(bobs_home: Path) -> None:
    """The relay delivers no message after its TTL; one that was delivered before stays."""
    deliver(bobs_home, SENT="2026-01-31T09:30:00.000000Z", TTL="60")
    deliver(bobs_home, SENT="2026-01-31T09:30:00.000000Z", TTL="900000000")
    async with Client(server_of(bobs_home).server) as client:
        text = await call(client, "inbox")
        assert text.count("its TTL ended ") == 1
    number = deliver(bobs_home, SENT="2026-01-31T09:30:00.000000Z", TTL="60")
    taken = relay("inbox", "--as", "bob", "--take", "--all", home=bobs_home).stdout
    assert f"-- {number}  message from alice  its TTL ended " in taken


async def test_agents_tells_whose_process_has_ended(served: Path) -> None:
    dead = subprocess.Popen(["true"])
    meta = {"pid": dead.pid, "pid_start_ticks": 1, "role": "builder"}
    dead.wait()
    (served / "agents" / "alice" / "meta.json").write_text(json.dumps(meta))
    async with Client(server_of(served).server) as client:
        await call(client, "inbox")
        said = await call(client, "agents")
        assert f"alice: process {dead.pid} has exited, role builder, unread 0, owes 0" in said
        line = next(one for one in said.split("\n") if one.startswith("bob: "))
        assert line.startswith("bob: active, ")
        before = agents_of(served)["bob"]["last_seen_at"]
        await call(client, "agents")
        assert agents_of(served)["bob"]["last_seen_at"] > before  # a call is a sign of life


async def test_a_query_is_owed_until_it_is_answered_and_a_message_is_not(served: Path) -> None:
    sent = relay("send", "--as", "alice", "bob", "which?", "--kind", "query", home=served)
    number = sent.stdout.strip()
    async with Client(server_of(served).server) as client:
        await call(client, "inbox", wait_s=100)
        await call(client, "answer", id=number, status="in_progress")
        assert "owes 1" in await call(client, "agents", owing=True)
        await call(client, "answer", id=number, status="completed", body="main")
        assert await call(client, "agents", owing=True) == "no agents"

        words = ("send", "--as", "alice", "bob", "the *build* is green", "--wait", "delivered")
        plain = relay(*words, home=served).stdout.strip()
        found = await call(client, "search", query="build from:alice")
        assert found.startswith(f"{plain} from alice to bob, ")
        assert found.endswith(": the *build* is green")
        assert "green" in await call(client, "inbox", wait_s=100)
        text = await refusal(client, "answer", id=plain, status="completed", body="hi")
        assert text.endswith(f"; to answer it, send to alice with re {plain}")
    inbox = (served / "agents" / "alice" / "inbox").glob("*.msg")
    kinds = [
        line for one in sorted(inbox) for line in one.read_text().split("\n") if "KIND" in line
    ]
    assert kinds == ["KIND: ack", "KIND: response"]


async def test_a_mailbox_that_is_gone_is_not_an_empty_one(bobs_home: Path) -> None:
    inbox = bobs_home / "agents/bob/inbox"
    async with Client(server_of(bobs_home).server) as client:
        assert (await call(client, "inbox")).startswith("no messages")
        inbox.rename(inbox.with_name("moved"))
        assert await refusal(client, "inbox") == f"No such file or directory: {inbox}"


async def test_without_a_relay_messages_wait_in_the_outbox(bobs_home: Path) -> None:
    async with Client(server_of(bobs_home).server) as client:
        text = await call(client, "send", to="alice", body="later")
        number, _, said = text.partition(": ")
        assert said == "waits in the outbox, the relay is not running; do not send it again"
        assert (bobs_home / "agents" / "bob" / "outbox" / f"{number}.msg").exists()
        assert await call(client, "inbox") == "no messages; no relay is running, so none can come"


async def test_large_bodies_come_as_a_path(bobs_home: Path) -> None:
    small, large = deliver(bobs_home, "x" * 8000), deliver(bobs_home, "y" * 9000)
    async with Client(server_of(bobs_home).server) as client:
        first, second = (await call(client, "inbox")).split("\n\n")
        assert first.startswith(f"Message {small} from alice") and first.endswith("xxx")
        path = bobs_home / "agents" / "bob" / "inbox" / f"{large}.msg"
        assert f"read it in {path}, after your next call in" in second
        assert "yyy" not in second


async def test_a_thread_and_a_limit_choose(bobs_home: Path) -> None:
    first, second = deliver(bobs_home, THREAD="t-1"), deliver(bobs_home, THREAD="t-2")
    urgent = deliver(bobs_home, PRIORITY="0")
    async with Client(server_of(bobs_home).server) as client:
        listed = await call(client, "inbox", take=False)
        assert [line.split()[0] for line in listed.split("\n\n")] == [urgent, first, second]
        assert (await call(client, "inbox", thread="t-2")).startswith(f"Message {second} ")
        text = await call(client, "inbox", limit=1)
        assert text.startswith(f"Message {urgent} ")
        assert text.endswith("1 more message left.")


# -- evidence -----------------------------------------------------------------------------------


async def test_a_message_is_read_when_the_next_call_has_come(bobs_home: Path) -> None:
    number = deliver(bobs_home)
    async with Client(server_of(bobs_home).server) as client:
        assert (await call(client, "inbox")).startswith(f"Message {number} from alice")
        assert (unread(bobs_home), read(bobs_home)) == ([number], [])
        assert reported(bobs_home) == [("offered", [number])]
        assert (await call(client, "inbox")).startswith("no messages")
        assert (unread(bobs_home), read(bobs_home)) == ([], [number])
        assert reported(bobs_home) == [("offered", [number]), ("in_context", [number])]


@pytest.mark.usefixtures("tools_of_claude")
async def test_hooks_decide_about_what_a_tool_has_shown(root: Path, claude: Cli) -> None:
    (bound,) = load_sessions(str(root))
    number = deliver(root, agent=bound.agent)
    async with Client(server_of(root).server) as client:
        assert (await call(client, "inbox")).startswith(f"Message {number} from alice")
        assert (await call(client, "inbox")).startswith("no messages")
    assert unread(root, bound.agent) == [number]  # a later call alone moves nothing
    assert claude.session.offered[number]["printed"] is True
    claude.says(f"Message {number} from alice (message): hello")
    assert claude.tool() == ""  # the hook does not print it again
    assert read(root, bound.agent) == [number]
    assert load_sessions(str(root), TOOLS) == []


@pytest.mark.usefixtures("tools_of_claude")
async def test_a_tool_does_not_show_what_the_hooks_have_shown(root: Path, claude: Cli) -> None:
    number = deliver(root)
    assert f"Message {number} from alice" in claude.tool()
    async with Client(server_of(root).server) as client:
        assert (await call(client, "inbox")).startswith("no messages")
    assert unread(root) == [number]
    claude.tool()
    assert read(root) == [number]


async def test_an_answer_that_was_never_written_is_offered_again(
    bobs_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, number = server_of(bobs_home), deliver(bobs_home)
    monkeypatch.setattr(server.session, "written", lambda call: None)
    monkeypatch.setattr(tool_session, "UNWRITTEN_NS", 3600 * NS_PER_S)
    async with Client(server.server) as client:
        await call(client, "inbox")
        assert (await call(client, "inbox")).startswith("no messages")  # it may be on its way
        monkeypatch.setattr(tool_session, "UNWRITTEN_NS", 0)
        assert "perhaps not seen: offer 2" in await call(client, "inbox")
    assert unread(bobs_home) == [number]


async def test_what_is_listed_by_two_at_once_is_shown_by_one(bobs_home: Path) -> None:
    number = deliver(bobs_home)
    one, two = (tool_session.ToolSession(str(bobs_home), "bob") for _ in range(2))
    assert one.offer(one.find(), "1", [number]) == [number]
    assert two.offer(two.find(), "1", [number]) == []
    one.act("mcp inbox")  # not written yet
    assert two.offer(two.find(), "2", [number]) == []


# -- bad input ----------------------------------------------------------------------------------


TO_A = {"to": "a", "body": "x"}
BAD_ARGUMENTS: list[tuple[str, dict[str, Any], str]] = [
    ("send", {"to": "alice"}, "body is missing: expected a string"),
    ("send", {"to": 1, "body": ""}, "to: expected a string, got 1"),
    ("send", {**TO_A, "from": "x"}, "'from' is not a parameter; there are to, body, kind, re, thr"),
    ("send", {**TO_A, "kind": "ack"}, "kind: expected message, command, query, response, got 'a"),
    ("send", {**TO_A, "files": "/x"}, "files: expected a list of strings, got '/x'"),
    ("send", {**TO_A, "files": [1]}, "files: expected a list of strings"),
    ("inbox", {"wait_s": 101}, "wait_s: expected 100 or less, got 101"),
    ("inbox", {"limit": True}, "limit: expected an integer, got True"),
    ("inbox", {"take": "yes"}, "take: expected true or false, got 'yes'"),
    ("answer", {"id": "x", "status": "completed"}, "'x' is not a message id"),
    ("lease", {}, "'lease' is not a tool; there are send, inbox, answer, channel, trace, agents, "),
]


async def test_bad_arguments_are_one_clear_line(bobs_home: Path) -> None:
    async with Client(server_of(bobs_home).server) as client:
        for tool, arguments, said in BAD_ARGUMENTS:
            text = await refusal(client, tool, **arguments)
            assert text.startswith(said), text


async def test_without_a_name_a_call_says_what_to_set(root: Path) -> None:
    async with Client(server_of(root).server) as client:
        assert "set AGENT_RELAY_NAME in its environment" in await refusal(client, "inbox")
    deliver(root)
    async with Client(server_of(root, "bob").server) as client:
        assert (await call(client, "inbox")).endswith("| hello")


def test_without_the_extra_one_line_says_how_to_install_it(
    bobs_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RelayError) as error:
        run_command(str(bobs_home), "mcp")
    assert "pip install '.[mcp]'" in error.value.hint


# -- files, sent by their paths and shown with names and paths -----------------------------


async def test_files_are_sent_by_path_and_come_as_paths(served: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.txt").write_text("a plan, in 21 bytes..")
    (tmp_path / "spec.bin").write_bytes(b"\0" * 2048)
    paths = [str(tmp_path / "plan.txt"), str(tmp_path / "spec.bin")]
    async with Client(server_of(served).server) as client:
        await call(client, "send", to="alice", body="see files", files=paths)
        words = ("--as", "alice", "bob", "and these")
        files = [word for path in paths for word in ("--attach", path)]
        sent = relay("send", *words, *files, home=served).stdout.strip()
        message, *shown = (await call(client, "inbox", wait_s=100)).rsplit("\n", 2)
        assert message.startswith(f"Message {sent} from alice (message, ")
        assert message.endswith("\n| and these")
        known = [re.fullmatch(r"attachment in (.*) \((.*)\): (.*)", one) for one in shown]
        found = [one.groups() for one in known if one]
        assert [one[1:] for one in found] == [("21 bytes", "plan.txt"), ("2 KiB", "spec.bin")]
        assert Path(found[0][0]).read_text() == "a plan, in 21 bytes.."
    (raw,) = (served / "agents/alice/inbox").glob("*.msg")
    assert "ATTACHMENT-NAMES: plan.txt/spec.bin\n" in raw.read_text()


async def test_what_is_no_file_is_not_sent(served: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.txt").write_text("a plan")
    with (tmp_path / "large").open("wb") as large:
        large.truncate(1025 << 20)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="embedded null") as embedded:
        os.stat("a\0b")  # in the words of the Python that runs
    said = {
        "nosuch": "cannot be sent: No such file or directory; expected the path of a file",
        "": "cannot be sent: Is a directory; expected the path of a file",
        "a\0b": f"cannot be sent: {embedded.value}; expected the path of a file",
    }
    async with Client(server_of(served).server) as client:
        for name, why in said.items():
            files = [f"{tmp_path}/plan.txt", f"{tmp_path}/{name}".rstrip("/")]
            text = await refusal(client, "send", to="bob", body="see", files=files)
            assert text == f"files: {visible(files[1])} {why}"
        files = [f"{tmp_path}/pipe"]
        text = await refusal(client, "send", to="bob", body="see", files=files)
        assert text == f"'{tmp_path}/pipe' is not a regular file"
        text = await refusal(client, "send", to="bob", body="see", files=[f"{tmp_path}/large"])
        most = "at most 1024 (limits.max_attachment_mib)"
        assert text.startswith(f"'{tmp_path}/large' is 1025 MiB, {most}: send its path")
        assert await call(client, "inbox") == "no messages"


async def test_attachments_of_a_file_that_no_relay_has_checked(bobs_home: Path) -> None:
    names = {"ATTACHMENT": "../../../etc/passwd", "ATTACHMENT-NAMES": "x\u202e"}
    deliver(bobs_home, "y" * 9000, **names)
    async with Client(server_of(bobs_home).server) as client:
        text = await call(client, "inbox")
        assert text.endswith(".msg\nattachment is not there any more: file")
