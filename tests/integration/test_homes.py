"""A home for one project: made, found, refused; all by real commands in real directories."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.base.errors import EXIT_FAILED, EXIT_OK, EXIT_REFUSED, EXIT_STATE, EXIT_USAGE
from tests import forks
from tests.procs import PATIENCE_S, environment

TAKES = (
    ("inbox", "--take"),
    ("inbox", "--follow", "--timeout", "10ms"),
    ("ack", "1706123456789012345-a1b2c3d4"),
    ("reply", "1706123456789012345-a1b2c3d4", "yes"),
)


class Person:
    """Somebody who types commands in a directory. Relays that still run at the end are stopped."""

    def __init__(self, folder: Path) -> None:
        self.me = folder / "me"
        self.project = self.me / "project"
        self.cwd = self.project / "src"
        self.cwd.mkdir(parents=True)
        self.more: dict[str, str] = {}
        self.roots: set[str] = set()

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        with contextlib.chdir(self.cwd):
            return forks.run([*words], environment(HOME=str(self.me), **self.more), "", PATIENCE_S)

    def run_script(self) -> subprocess.CompletedProcess[str]:
        """Run script.py of that directory to its end."""
        return subprocess.run(
            [sys.executable, "-m", "script"],
            cwd=self.cwd,
            env=environment(HOME=str(self.me), **self.more),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def says(self, *words: str) -> str:
        """What a command prints; it must succeed."""
        done = self.run(*words)
        assert done.returncode == EXIT_OK, done.stderr
        return done.stdout

    def up(self) -> str:
        """Start the relay; its home."""
        root: str = json.loads(self.says("up", "--json"))["home"]
        self.roots.add(root)
        return root


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    person = Person(tmp_path)
    yield person
    for root in person.roots:
        person.run("--home", root, "down")


def in_project(person: Person, *words: str) -> str:
    """Run a command in the project's own directory."""
    person.cwd = person.project
    said = person.says(*words)
    person.cwd = person.project / "src"
    return said


# -- made, and found -----------------------------------------------------------------------


def test_a_project_has_its_own_home(person: Person) -> None:
    person.says("init")
    assert in_project(person, "init", "--here") == (
        f"created {person.project}/.agent-relay\nstart the relay with `relay up`\n"
    )
    assert (person.project / ".agent-relay/.gitignore").read_text() == "*\n"
    assert (person.project / ".agent-relay").stat().st_mode & 0o777 == 0o700
    assert person.says("where") == (
        f"{person.project}/.agent-relay  (above {person.cwd})\n"
        "no relay is running\n"
        f"not used: {person.me}/.agent-relay  (default)\n"
    )


def test_a_relay_that_runs_is_found_from_every_directory_below(person: Person) -> None:
    in_project(person, "init", "--here")
    root = person.up()
    assert root == f"{person.project}/.agent-relay"
    person.cwd = person.project / "a/b/c"
    person.cwd.mkdir(parents=True)
    assert f"home {root}" in person.says("status")
    second = person.run("up")
    assert second.returncode == EXIT_STATE and "already" in second.stderr
    person.says("register", "bob")
    person.says("send", "bob", "hello")
    person.cwd = person.project
    assert "hello" in person.says("inbox", "--as", "bob", "--take", "--timeout", "60")
    person.cwd = person.me
    assert person.run("status").returncode == EXIT_STATE  # outside of it: another home


def test_a_refusal_names_the_home_that_has_the_agent(person: Person) -> None:
    person.says("init")
    person.says("register", "bob")
    in_project(person, "init", "--here")
    root = person.up()
    person.more["RELAY_NO_WAIT"] = ""
    done = person.run("send", "bob", "hi")
    assert done.returncode == EXIT_REFUSED
    usual = f"{person.me}/.agent-relay"
    assert f"creates it in {root}" in done.stderr
    assert done.stderr.endswith(f"; bob is in {usual}\n")
    assert f"there is no agent 'bob' in {root}; bob is in {usual}\n" in (
        person.run("inbox", "--as", "bob").stderr
    )
    person.says("register", "bob")
    refused = person.run("send", "bob", "hi", "--header", "NOT-BEFORE: 1h", "--header", "TTL: 1")
    assert refused.returncode == EXIT_REFUSED and usual not in refused.stderr


def test_init_here_again_completes_it(person: Person) -> None:
    in_project(person, "init", "--here")
    (person.project / ".agent-relay/.gitignore").write_text("mine\n")
    assert in_project(person, "init", "--here").startswith("completed ")
    assert (person.project / ".agent-relay/.gitignore").read_text() == "mine\n"
    assert person.says("init").startswith(f"completed {person.project}/.agent-relay\n")
    both = person.run("init", "--here", "--home", "elsewhere")
    assert both.returncode == EXIT_USAGE and "--here cannot be used with --home" in both.stderr


# -- refused -------------------------------------------------------------------------------


def test_a_home_that_came_with_a_checkout_is_refused(person: Person) -> None:
    in_project(person, "init", "--here")
    (person.project / ".agent-relay").chmod(0o755)
    for verb, code in (("inbox", EXIT_FAILED), ("where", EXIT_STATE)):
        done = person.run(verb)
        (line,) = [one for one in (done.stderr + done.stdout).splitlines() if "mode 755" in one]
        assert f"{person.project}/.agent-relay, above {person.cwd}, is open to other users" in line
        assert done.returncode == code
    assert person.run("--home", str(person.project / ".agent-relay"), "inbox").returncode == 0


def test_nothing_is_taken_while_two_homes_are_meant(person: Person) -> None:
    person.says("init")
    in_project(person, "init", "--here")
    pin = str(person.me / ".agent-relay")
    for words in TAKES:
        person.more["AGENT_RELAY_DIR"] = pin
        done = person.run(*words)
        assert (done.returncode, done.stdout) == (EXIT_STATE, "")
        assert done.stderr == (
            f"relay: $AGENT_RELAY_DIR names {pin}, but {person.project}/.agent-relay is above"
            f" {person.cwd}: messages may wait in either;"
            " name one with --home (in Python: home=…), or unset AGENT_RELAY_DIR\n"
        )
        named = person.run("--home", pin, *words)
        assert "messages may wait in either" not in named.stderr
        del person.more["AGENT_RELAY_DIR"]
        assert "messages may wait in either" not in person.run(*words).stderr


def test_what_only_looks_or_sends_is_done(person: Person) -> None:
    person.says("init")
    in_project(person, "init", "--here")
    pin = person.more["AGENT_RELAY_DIR"] = str(person.me / ".agent-relay")
    person.says("register", "bob")
    assert person.run("inbox", "--as", "bob").returncode == EXIT_OK
    person.run("send", "bob", "hello")
    assert list((Path(pin) / "agents/operator/outbox").glob("*.msg"))
    done = person.run("where")
    assert f"not used: {person.project}/.agent-relay  (above {person.cwd})\n" in done.stdout
    assert done.stderr.startswith("no messages are taken: $AGENT_RELAY_DIR names ")


LIBRARY = """
import asyncio
from agent_sdk import Agent, RelayError, aio
with Agent("bob") as bob:
    try:
        print(bob.receive(0))
    except RelayError as exc:
        print(type(exc).__name__, exc.hint)
with Agent("bob", home=bob.home) as bob:
    print(bob.receive(0))
async def take():
    async with aio.Agent("bob") as bob:
        await bob.receive(0)
try:
    asyncio.run(take())
except RelayError as exc:
    print(type(exc).__name__)
"""


def test_the_library_takes_nothing_either(person: Person) -> None:
    person.says("init")
    in_project(person, "init", "--here")
    person.more["AGENT_RELAY_DIR"] = str(person.me / ".agent-relay")
    (person.cwd / "script.py").write_text(LIBRARY)
    assert person.run_script().stdout.splitlines() == [
        "TwoHomes name one with --home (in Python: home=…), or unset AGENT_RELAY_DIR",
        "None",
        "TwoHomes",
    ]
