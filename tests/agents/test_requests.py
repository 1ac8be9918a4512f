"""What may be started, where, with what and by whom; each refusal says what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from relay.agents.guide import guide
from relay.agents.requests import (
    MOST_ENV,
    ProcessRequest,
    Requester,
    Spec,
    mask,
    parse_env,
    read_request,
    redact,
)
from relay.base.config import SpawnSettings, decode
from relay.base.errors import ConfigError
from relay.base.message import MAX_HEADER_BYTES, control_fields, parse
from tests.costs import cpu_s

OPERATOR = Requester("operator", "1769851800000000000-01", 7, "ann")


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    return tmp_path / "project"


def ask(
    text: str, settings: SpawnSettings | None = None, asker: Requester = OPERATOR
) -> ProcessRequest | str:
    found = read_request(parse(text.encode()), asker, settings or SpawnSettings())
    assert not isinstance(found, str) or "\n" not in found
    return found


def spec_of(text: str, settings: SpawnSettings | None = None) -> Spec:
    found = ask(text, settings)
    assert isinstance(found, ProcessRequest) and found.spec is not None, found
    return found.spec


def told(cli: str, prompt: str) -> str:
    """The last word of the argv of a preset: a CLI of a model gets the guide before its prompt."""
    if cli in ("sh", "python"):
        return prompt
    return f"{guide('w', '$AGENT_RELAY_DIR', cli)}\n# Your task\n\n{prompt}"


def test_both_forms_ask_for_the_same(cwd: Path) -> None:
    lines = f"NAME: w\nCLI: claude\nWORKING_DIR: {cwd}\nENV: A=1,B=2\nRESTART: always\n"
    in_body = spec_of(f"KIND: spawn\n\n{lines}PROMPT: do it\nall")
    in_header = spec_of(f"KIND: spawn\n{lines}\ndo it\nall".replace("WORKING_DIR", "CWD"))
    assert in_body == in_header
    assert in_body.argv == ("claude", "-p", told("claude", "do it\nall"))
    assert (in_body.env, in_body.restart) == ({"A": "1", "B": "2"}, "always")
    assert in_body.cwd == os.path.realpath(cwd)
    assert (in_body.requested_by, in_body.request_id) == OPERATOR[:2]


@pytest.mark.parametrize("cli", ["claude", "codex", "gemini", "sh", "python"])
def test_the_presets_are_given_the_prompt_as_one_word(cwd: Path, cli: str) -> None:
    prompt = "say 'hi'; rm -rf $HOME {name} {cwd}"
    argv = spec_of(f"KIND: spawn\nNAME: w\nCLI: {cli}\nCWD: {cwd}\n\n{prompt}").argv
    assert argv[-1] == told(cli, prompt)  # nothing in it is read a second time
    assert argv[:-1] == SpawnSettings().clis[cli][:-1]


def test_a_prompt_that_would_reach_nobody_is_refused(cwd: Path) -> None:
    settings = SpawnSettings(clis={"x": ("run", "{name}")})
    assert spec_of(f"KIND: spawn\nNAME: w\nCLI: x\nCWD: {cwd}\n", settings).argv == ("run", "w")
    said = ask(f"KIND: spawn\nNAME: w\nCLI: x\nCWD: {cwd}\n\ngo", settings)
    assert said == "PROMPT would be lost: spawn.clis.x in config.json has no {prompt}"


def test_tokens_are_replaced_inside_words_and_nothing_else_is(cwd: Path) -> None:
    settings = SpawnSettings(
        clis={"x": ("run", "--as={name}", "{cwd}/bin:{prompt}", "{other}", "$HOME")}
    )
    found = spec_of(f"KIND: spawn\nNAME: w\nCLI: x\nCWD: {cwd}\n\ngo", settings)
    real = os.path.realpath(cwd)
    assert found.argv == ("run", "--as=w", f"{real}/bin:go", "{other}", "$HOME")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("CLI: sh", "NAME is missing: name the agent to spawn"),
        ("NAME: 1x\nCLI: sh", "NAME '1x' is not a valid name to spawn"),
        ("NAME: operator\nCLI: sh", "NAME 'operator' is not a valid name to spawn"),
        ("NAME: relay\nCLI: sh", "NAME 'relay' is not a valid name to spawn"),
        ("NAME: root\nCLI: sh", "NAME 'root' is not a valid name to spawn"),
        ("NAME: ../x\nCLI: sh", "NAME '../x' is not a valid name to spawn"),
        ("NAME: w", "CLI is missing: spawn.clis in config.json has claude, codex"),
        ("NAME: w\nCLI: bash", "there is no CLI 'bash': spawn.clis in config.json has claude"),
        ("NAME: w\nCLI: sh\nRESTART: often", "RESTART 'often' is not one of never, on-failure"),
        ("NAME: w\nCLI: sh\nCWD: work", "WORKING_DIR work is not an absolute path"),
        (
            "NAME: w\nCLI: sh\nCWD: /nowhere/at/all",
            "WORKING_DIR /nowhere/at/all: there is no such directory",
        ),
        ("NAME: w\nCLI: sh\nCWD: /dev/null", "WORKING_DIR /dev/null: there is no such directory"),
        ("NAME: w\nCLI: sh\nENV: A=1,A=2", "ENV: A is given twice"),
        ("NAME: w\nCLI: sh\nENV: hunter2", "ENV: entry 1 is not KEY=value"),
        ("NAME: w\nCLI: sh\nENV: A=1\nPATH=x", "ENV: PATH may not be set: spawn.env_deny has PATH"),
        ("NAME: w\nCLI: sh\nENV: LD_PRELOAD=x", "ENV: LD_PRELOAD may not be set"),
        ("NAME: w\nCLI: sh\nENV: AGENT_RELAY_NAME=x", "ENV: AGENT_RELAY_NAME may not be set"),
        ("NAME: w\nCLI: sh\nENV: PYTHONPATH=x", "ENV: PYTHONPATH may not be set"),
        ("NAME: w\nCLI: sh\nPROMPT:", "PROMPT is missing: CLI sh requires it"),
        ("NAME: w\nCLI: sh\nPROMPT: a\0b", "PROMPT and ENV must not contain NUL"),
    ],
)
def test_what_is_refused_says_why(tmp_path: Path, lines: str, said: str) -> None:
    if "CWD" not in lines:
        lines += f"\nCWD: {tmp_path}"
    if "PROMPT" not in lines:
        lines += "\nPROMPT: go"
    found = ask(f"KIND: spawn\n\n{lines}")
    assert isinstance(found, str) and found.startswith(said), found
    assert "hunter2" not in found


def test_a_directory_lies_under_a_root_for_real(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "rootless"
    for path in (root / "a", other):
        path.mkdir(parents=True)
    (root / "out").symlink_to(other)
    (tmp_path / "in").symlink_to(root / "a")
    settings = SpawnSettings(roots=(str(root),))

    def start_in(path: Path) -> ProcessRequest | str:
        return ask(f"KIND: spawn\nNAME: w\nCLI: sh\nCWD: {path}\n\ngo", settings)

    for good in (root, root / "a", tmp_path / "in", root / "a" / ".."):
        assert isinstance(start_in(good), ProcessRequest), good
    for bad in (other, root / "out", root / "..", root / "a" / ".." / ".."):
        assert f"is not under any of spawn.roots: {root}" in str(start_in(bad)), bad
    found = ask("KIND: spawn\nNAME: w\nCLI: sh\n\ngo", settings)
    assert isinstance(found, ProcessRequest) and found.spec and found.spec.cwd == str(root)


@pytest.mark.parametrize(
    ("allow", "name", "lead", "may"),
    [
        (("lead", "operator"), "operator", None, True),
        (("lead", "operator"), "ann", "ann", True),
        (("lead", "operator"), "bob", "ann", False),
        (("lead", "operator"), "lead", "ann", False),  # a name is not the role
        (("lead", "operator"), "lead", "lead", True),
        (("bob",), "bob", None, True),
        (("bob",), "operator", None, False),
        ((), "operator", "operator", False),
        (("*",), "anybody", None, True),
    ],
)
@pytest.mark.parametrize("kind", ["spawn", "release"])
def test_who_may(
    tmp_path: Path, kind: str, allow: tuple[str, ...], name: str, lead: str | None, may: bool
) -> None:
    asker = Requester(name, "1769851800000000000-01", 7, lead)
    text = f"KIND: {kind}\nNAME: w\nCLI: sh\nCWD: {tmp_path}\n\ngo"
    found = ask(text, SpawnSettings(allow_from=allow), asker)
    assert isinstance(found, ProcessRequest) is may
    assert may or f"(spawn.allow_from in config.json), not for {name}" in str(found)


def test_a_release_needs_a_name_alone() -> None:
    found = ask("KIND: release\nNAME: w\nREASON: done \x07 now\n\n".replace("\x07", "-"))
    assert isinstance(found, ProcessRequest) and found.spec is None
    assert (found.intent.name, found.intent.reason) == ("w", "done - now")
    assert str(ask("KIND: release\n\nREASON: x")).startswith(
        "NAME is missing: name the agent to release"
    )


@pytest.mark.parametrize("argv", ["[]", '[""]'])
def test_a_template_without_a_program_is_a_fault_of_the_configuration(argv: str) -> None:
    with pytest.raises(ConfigError, match=r"spawn\.clis\.x is .* expected a program first"):
        decode(b'{"spawn": {"clis": {"x": %s}}}' % argv.encode())


# -- secrets: the values of ENV leave no trace, however they are written ------------------

HEAD = "KIND: spawn\nNAME: w\nCLI: sh\n"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (f"{HEAD}ENV: A=hunter2\n\ngo", "ENV: A=***"),
        (f"{HEAD}env : A=hunter2, B=hunter2\n\ngo", "env : A=***,B=***"),
        (f"{HEAD}ENV: A=hunter2,hunter2,B=x=hunter2\r\n\r\ngo", "ENV: A=***,B=***"),
        ("KIND: spawn\n\nNAME: w\nENV: A=hunter2,B=1234\nCLI: sh", "ENV: A=***,B=***\nCLI: sh"),
        ("KIND: spawn\n\nNAME: w\nENV: A=hunter2\nB=hunter2\n\nhunter2\nCLI: sh", "ENV: A=***,"),
        ("kind:SPAWN\n\nNAME: w\nENV:hunter2", "ENV:***"),
        (f"{HEAD}ENV: EMPTY=,A=hunter2\n\ngo", "ENV: EMPTY=,A=***"),
    ],
)
def test_the_values_of_env_are_masked(text: str, kept: str) -> None:
    found = redact(text.encode())
    assert found is not None
    assert b"hunter2" not in found.data
    assert kept in found.data.decode()
    assert redact(found.data) is None  # nothing is left to be done


def test_everything_else_stays_byte_for_byte() -> None:
    text = f"{HEAD}ENV: A=hunter2\r\nTHREAD: t\n\nDo this:\nENVIRONMENT: x\n ENVoy\n\xe9".encode()
    found = redact(text)
    assert found is not None
    assert found.data == text.replace(b"hunter2", b"***").replace(b"***\r", b"***")


def test_what_is_said_of_the_text_as_it_was_goes() -> None:
    text = f"{HEAD}CHECKSUM: sha256:{'0' * 64}\nsignature: x\nENV: A=hunter2\n\ngo"
    found = redact(text.encode())
    assert found is not None and found.data.decode() == f"{HEAD}ENV: A=***\n\ngo"


@pytest.mark.parametrize(
    "text",
    [
        f"{HEAD}\ngo",
        f"{HEAD}ENV:\n\ngo",
        "KIND: message\nTO: bob\nENV: A=hunter2\n\ngo",
        "TO: bob\n\nENV: A=hunter2",
    ],
)
def test_what_has_no_secret_is_left_as_it_is(text: str) -> None:
    assert redact(text.encode()) is None


def test_the_message_without_them_is_a_message_like_before() -> None:
    many = ",".join(f"K{n}={n % 10}" for n in range(600))[: MAX_HEADER_BYTES // 2]
    text = f"{HEAD}ENV: {many}\nWORKING_DIR: /tmp\n\ngo"
    found = redact(text.encode())
    assert found is not None and len(found.data) <= len(text)
    fields = control_fields(parse(found.data))
    assert fields == control_fields(parse(text.encode())) | {"ENV": fields["ENV"]}


@pytest.mark.parametrize(
    "line", ["ENV A=hunter2", "ENV=A=hunter2", "  env:A=hunter2", "ENV hunter2"]
)
def test_a_file_that_is_no_message_is_masked_more_freely(line: str) -> None:
    found = redact(f"{HEAD}{line}\n\ngo".encode(), loose=True)
    assert found is not None and b"hunter2" not in found.data
    assert found.secrets
    assert "hunter2" not in found.clean(f"{line!r} is not a header line")


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", []),
        ("A=1", [("A", "1")]),
        ("A=1,B=2", [("A", "1"), ("B", "2")]),
        ("A=1, B=2\nC=3", [("A", "1"), ("B", "2"), ("C", "3")]),
        ("A=x,y,B_2=a=b", [("A", "x,y"), ("B_2", "a=b")]),
        ("A", [("", "A")]),
        ("1A=x", [("", "1A=x")]),
        ("A=", [("A", "")]),
    ],
)
def test_a_comma_parts_two_settings_where_a_name_follows(
    text: str, settings: list[tuple[str, str]]
) -> None:
    assert parse_env(text) == settings


@pytest.mark.parametrize("between", ["\n", ","])
def test_an_env_that_is_too_long_is_refused_and_taken_out_unread(cwd: Path, between: str) -> None:
    env = between.join(f"A{number}=secret{number}" for number in range(50_000))
    text = f"NAME: w\nCLI: sh\nCWD: {cwd}\nENV: {env}\nPROMPT: hi"
    message = f"TO: __orchestrator__\nKIND: spawn\n\n{text}".encode()
    floor = cpu_s(lambda: [line.partition("=") for line in env.split(between)])
    assert cpu_s(lambda: redact(message)) < 20 * floor  # it is done for every file, also a refused
    found = redact(message)
    assert found is not None and b"secret49999" not in found.data and len(found.data) < MOST_ENV
    assert redact(found.data) is None
    assert "secret" not in found.clean("line 3: 'A40000=secret4…' is not a header line")
    assert ask(message.decode()) == f"ENV has {len(env)} characters, at most {MOST_ENV}"


def test_a_secret_within_another_is_masked_with_it() -> None:
    assert mask("key abcdef and abcd, abc", ("abcd", "abcdef", "abc")) == "key *** and ***, abc"
