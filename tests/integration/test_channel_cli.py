"""``relay channel`` as a person types it, against a relay in a process of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_sdk import Agent
from relay.acomm import store_file
from relay.acomm.model import Channel, ChannelType, StoreFile
from relay.base.home import STORE
from tests.procs import PATIENCE_S, home_of, relay, rows_of

pytestmark = [
    pytest.mark.shows("engine 7.6"),
    pytest.mark.xdist_group("channels"),  # one relay for all
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One relay for all of them, with alice, bob and carol."""
    root = home_of(tmp_path_factory.mktemp("channels") / "home", "alice", "bob", "carol")
    assert relay("up", home=root).returncode == 0
    yield root
    relay("down", home=root)


def done(home: Path, *arguments: str) -> str:
    """The one line that it prints."""
    ran = relay("channel", *arguments, home=home)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout.removesuffix("\n")


def refused(home: Path, *arguments: str, code: int = 6) -> str:
    """The one line on stderr."""
    ran = relay("channel", *arguments, home=home)
    assert (ran.returncode, ran.stdout) == (code, ""), ran.stderr
    assert ran.stderr.count("\n") == 1 and ran.stderr.startswith("relay: ")
    return ran.stderr.removeprefix("relay: ")


def shown(home: Path, name: str) -> dict[str, Any]:
    """``channel show`` at once: it waits for what was changed."""
    facts = rows_of("channel", "show", name, home=home)[0]
    assert isinstance(facts, dict)
    return facts


def test_create_is_seen_by_the_next_command(home: Path) -> None:
    said = done(home, "create", "ci", "--type", "pubsub", "--owner", "alice", "ack_timeout=30s")
    assert said == "created the PubSub channel ci, its owner is alice"
    facts = shown(home, "#ci")
    assert (facts["type"], facts["owner"], facts["participants"]) == (
        "PubSub", "alice", {"alice": "Owner"},
    )  # fmt: skip
    assert facts["settings"]["ack_timeout"] == 30
    assert "ci " in relay("channel", "list", home=home).stdout

    assert "channel ci already exists: PubSub" in refused(home, "create", "ci")
    assert "there is no agent 'dave'" in refused(home, "create", "x", "--owner", "dave", code=1)
    assert "there is no agent 'alic' in" in refused(home, "join", "ci", "--agent", "alic", code=1)
    for words in (["channel", "show", "cii"], ["list", "channel:cii"]):
        missing = relay(*words, home=home)
        expected = "relay: channel 'cii' does not exist; did you mean ci?\n"
        assert (missing.returncode, missing.stderr) == (1, expected)


def test_show_waits_for_the_store_to_be_written(tmp_path: Path) -> None:
    home = home_of(tmp_path / "home", checkpoint_ms=1500)
    assert relay("up", home=home).returncode == 0
    try:
        done(home, "create", "slow")
        assert shown(home, "slow")["owner"] == "operator"
        done(home, "create", "slower")
        assert "slower" in relay("channel", "list", home=home).stdout
    finally:
        relay("down", home=home)


def test_join_subscribe_publish_unsubscribe_leave(home: Path) -> None:
    done(home, "create", "news", "--type", "pubsub")
    done(home, "join", "news", "--as", "alice")
    assert done(home, "subscribe", "news", "build.#", "--agent", "bob") == (
        "bob receives build.# from news"
    )
    assert shown(home, "news")["subscriptions"] == [
        {"subscriber": "bob", "pattern": "build.#", "filter": None}
    ]
    relay("send", "--as", "alice", "#news", "--topic", "build.ok", "847 passed", home=home)
    with Agent("bob", home) as bob:
        message = bob.receive(PATIENCE_S)
    assert message is not None and (message.body, message.channel) == ("847 passed", "news")

    assert done(home, "unsubscribe", "news", "--agent", "bob") == (
        "1 subscription of bob to news ended"
    )
    assert done(home, "leave", "news", "--agent", "bob") == "bob is not a member of news"
    assert shown(home, "news")["participants"] == {"operator": "Owner", "alice": "Member"}


def test_a_subscription_with_a_filter(home: Path) -> None:
    done(home, "create", "alerts", "--type", "pubsub")
    words = ("--agent", "bob", "--filter", "sender=alice")
    assert done(home, "subscribe", "alerts", "#", *words) == (
        "bob receives # from alerts, where sender=alice"
    )
    (one,) = shown(home, "alerts")["subscriptions"]
    assert one["filter"] == "sender=alice"
    shown_to_people = relay("channel", "show", "alerts", home=home).stdout.split()
    assert "subscription bob # where sender=alice" in " ".join(shown_to_people)
    said = refused(home, "subscribe", "ci", "build.#", "--filter", "match=(")
    assert said.startswith("--filter: '(' is not a valid RE2 pattern: ")
    words = ("--filter", "loud")
    assert "got 'loud'" in refused(home, "subscribe", "alerts", "#", *words)


def test_config_and_what_show_says_of_it(home: Path) -> None:
    done(home, "create", "jobs")
    said = done(home, "config", "jobs", "delivery=at-least-once", "retention=duration 1h")
    assert said == "channel jobs has delivery at-least-once, retention duration 3600"
    settings = shown(home, "jobs")["settings"]
    assert (settings["delivery"], settings["retention"]) == ("at-least-once", "duration 3600")
    # What show prints is what config takes.
    given = [f"{name}={value}".lower() for name, value in settings.items()]
    assert done(home, "config", "jobs", *given)
    assert shown(home, "jobs")["settings"] == settings
    assert (
        "setting      retention=duration 3600" in relay("channel", "show", "jobs", home=home).stdout
    )

    assert "is not one line" in refused(home, "config", "jobs", "echo=true\nx: 1", code=2)
    for bad in (
        ["jobs"],
        ["jobs", "loud"],
        ["jobs", "echo=true", "echo=false"],
        ["jobs", "ACTION=x"],
    ):
        ran = relay("channel", "config", *bad, home=home)
        assert ran.returncode == 2 and "SETTING=VALUE" in ran.stderr


def test_pause_resume_drain_close(home: Path) -> None:
    done(home, "create", "team", "--owner", "alice")
    done(home, "join", "team", "--agent", "carol")
    assert done(home, "pause", "team") == "channel team is Paused"
    told = _sent(home, "team", "answer")
    assert "channel team is Paused: its owner alice ends that with `relay " in told.stderr
    said = "channel resume team`\n"
    assert (told.returncode, told.stderr.endswith(said)) == (6, True)
    assert done(home, "drain", "team", "--as", "alice") == "channel team is Draining"
    assert done(home, "resume", "team") == "channel team is Active"
    assert _sent(home, "team", "answer=300ms").returncode == 4  # carol has it, and says nothing
    assert shown(home, "team")["state"] == "Active"

    assert done(home, "close", "team") == "channel team is Closed"
    assert refused(home, "resume", "team") == "channel team was closed, which is permanent\n"


def _sent(home: Path, channel: str, wait: str) -> subprocess.CompletedProcess[str]:
    """Alice sends to the channel, and waits."""
    words = ("send", "--as", "alice", "--wait", wait, f"#{channel}", "hello")
    return relay(*words, home=home)


def test_the_answer_alone_is_taken_from_the_inbox(home: Path) -> None:
    with Agent("alice", home) as alice, Agent("operator", home) as operator:
        alice.send("operator", "lunch?")
        assert operator.receive(PATIENCE_S) is not None
        alice.send("operator", "lunch!")
        facts = rows_of("channel", "create", "own", home=home)[0]
        assert set(facts) == {"id", "answer"} and facts["answer"].startswith("created the Group")
        assert [message.body for message in operator.messages(0)] == ["lunch!"]


def test_without_a_relay_it_is_said_at_once_and_nothing_is_sent(tmp_path: Path) -> None:
    home = home_of(tmp_path / "home")
    for arguments in (["create", "ci"], ["leave", "ci"], ["config", "ci", "echo=true"]):
        assert "no relay is running" in refused(home, *arguments, code=5)
    assert not list((home / "agents" / "operator" / "outbox").glob("*.msg"))


def test_words_about_a_channel_are_shown(tmp_path: Path) -> None:
    about = {"description": "what CI\x1b says", "tags": ("ci", "build")}
    channel = Channel(1, "ci", ChannelType.GROUP, "alice", **about)  # type: ignore[arg-type]
    home = home_of(tmp_path / "home")
    store_file.write(str(home / STORE), StoreFile(1, 1, (channel,)))
    facts = shown(home, "ci")
    assert (facts["description"], facts["tags"]) == ("what CI\x1b says", ["ci", "build"])
    text = relay("channel", "show", "ci", home=home).stdout
    assert "description  what CI\\x1b says\ntags         ci, build\n" in text
