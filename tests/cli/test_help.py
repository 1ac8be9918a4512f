"""The help of every command: an example in it, and words that are those of the engine."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest

from relay.cli import COMMANDS, SECTIONS, cli, run
from relay.cli.channel import TYPES, config
from relay.delivery.actions import ACTIONS
from relay.delivery.actions import TYPES as CHANNEL_TYPES
from relay.delivery.channel_fields import SETTINGS
from tests.documents import read_page, tables


def commands(group: click.Group, path: str = "relay") -> Iterator[tuple[str, click.Command]]:
    """Every command in the lists by its command line, groups among them."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield f"{path} {name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")


ALL = dict(commands(cli))


def test_every_command_has_an_example() -> None:
    for path, command in ALL.items():
        assert command.epilog and "Example" in command.epilog, path
        assert path == "relay sh" or f"\n  {path}" in command.epilog, path


def test_durations_and_times_have_one_type() -> None:
    """Whatever an option is called: 10m is read by all of them."""
    ends = ("_s", "_ms", "_days", "_age", "_than", "since", "after", "before")
    for path, command in ALL.items():
        for option in command.params:
            if isinstance(option, click.Option) and (option.name or "").endswith(ends):
                is_day = path == "relay archive pack"
                assert option.type.name in ("duration", "time") or is_day, path


def test_every_setting_and_type_is_in_the_help() -> None:
    assert config.epilog is not None
    assert set(re.findall(r"\w+", config.epilog)) >= set(SETTINGS)
    assert list(TYPES) == list(CHANNEL_TYPES)


def test_every_action_is_in_the_page_on_messages() -> None:
    (rows,) = tables(read_page("formats/msg.md"), "Commands to the relay")
    assert [row[0] for row in rows] == list(ACTIONS)
    for name, needs, takes in rows:
        action = ACTIONS[name]
        assert needs == ", ".join(action.needs)
        settings = ("settings",) if action.has_settings else ()
        assert takes == ", ".join((*action.takes, *settings))


@pytest.mark.parametrize("path", ["relay", "relay send", "relay channel create"])
def test_help_is_the_same_in_every_way(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = path.split()[1:]
    shown = set()
    for line in ([*words, "--help"], [*words, "-h"], ["help", *words]):
        assert run(line) == 0
        shown.add(capsys.readouterr().out)
    assert len(shown) == 1 and f"Usage: {path} " in shown.pop()


def test_the_first_page_has_every_command_and_fits_a_screen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = [name for rows in SECTIONS.values() for names in rows for name in names.split()]
    assert sorted(named) == sorted(COMMANDS)
    assert run(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 80


def test_the_whole_reference_has_every_command_in_plain_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["help", "--all"]) == 0
    text = capsys.readouterr().out
    assert re.findall(r"^Usage: (relay(?: [a-z]\S*)*)", text, re.M) == ["relay", *ALL]
    assert all(c.isprintable() or c == "\n" for c in text)
