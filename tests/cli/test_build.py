"""`relay build`: a store from the lines of `relay dump`, and what it must not replace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from relay.acomm import jsonl, store_file
from relay.base.errors import (
    KeyFileError,
    MessageError,
    RelayError,
    SealedStore,
)
from relay.cli import cli
from tests.acomm.support import FIXTURES, golden, small_store

PLAIN = str(FIXTURES / "plain.acomm")


def run(*args: object, stdin: str | bytes = "") -> Result:
    """`relay build …`, or `relay dump --json …`."""
    words = ["dump", "--json", *args[1:]] if args[0] == "dump" else args
    return CliRunner().invoke(cli, [str(word) for word in words], input=stdin)


def refused(*args: object, stdin: str | bytes = "") -> Exception:
    """The error that the command ends with, which the top-level prints as one line."""
    result = run(*args, stdin=stdin)
    assert isinstance(result.exception, RelayError), result.output
    assert "\n" not in str(result.exception)
    return result.exception


def test_dump_prints_what_build_takes(tmp_path: Path) -> None:
    lines = run("dump", PLAIN)
    assert lines.exit_code == 0
    assert lines.stdout.splitlines() == list(jsonl.to_lines(golden()))

    built = run("build", tmp_path / "new.acomm", "--no-compress", stdin=lines.stdout)
    assert (built.exit_code, built.stderr) == (0, "")
    assert built.stdout == (
        f"{tmp_path}/new.acomm: 6 channels, 120 messages, 3 subscriptions, "
        "6 dead letters, 6 archived\n"
    )
    assert (tmp_path / "new.acomm").read_bytes() == Path(PLAIN).read_bytes()


def test_dump_of_one_section() -> None:
    result = run("dump", PLAIN, "--section", "subscriptions")
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == [1, 2, 3]
    assert run("dump", PLAIN, "--section", "other").exit_code == 2


def test_build_from_a_file(tmp_path: Path) -> None:
    result = run("build", tmp_path / "new.acomm", "--from", FIXTURES / "expected.jsonl")
    assert result.exit_code == 0
    assert store_file.read(str(tmp_path / "new.acomm")) == golden()
    assert run("build", tmp_path / "x", "--from", tmp_path / "gone").exit_code == 2


@pytest.mark.parametrize("stdin", ["", "{}\n", b'{"section": "header", "created_at": "\xff"}\n'])
def test_a_wrong_line_builds_nothing(tmp_path: Path, stdin: str | bytes) -> None:
    assert isinstance(refused("build", tmp_path / "new.acomm", stdin=stdin), MessageError)
    assert list(tmp_path.iterdir()) == []


def test_build_does_not_replace_a_file_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "store.acomm"
    store_file.write(str(path), golden())
    before = path.read_bytes()
    lines = "\n".join(jsonl.to_lines(small_store()))

    assert str(refused("build", path, stdin=lines)) == f"{path} already exists"
    assert path.read_bytes() == before

    assert run("build", path, "--force", stdin=lines).exit_code == 0
    assert store_file.read(str(path)) == small_store()


def test_build_through_links(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    lines = "\n".join(jsonl.to_lines(small_store()))
    assert run("build", tmp_path / "link/store.acomm", stdin=lines).exit_code == 0
    (tmp_path / "latest").symlink_to("disk/store.acomm")
    assert run("build", tmp_path / "latest", "--force", stdin=lines).exit_code == 0
    assert (tmp_path / "latest").is_symlink()
    assert store_file.read(str(tmp_path / "disk/store.acomm")) == small_store()


@pytest.mark.parametrize("name", ["magic", "agentic-comm-v3"])
def test_build_never_replaces_what_is_no_store(tmp_path: Path, name: str) -> None:
    path = tmp_path / "store.acomm"
    before = (FIXTURES / "bad" / f"{name}.acomm").read_bytes()
    path.write_bytes(before)
    for option in ([], ["--force"]):
        refused("build", path, *option, stdin="\n".join(jsonl.to_lines(golden())))
        assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["store.acomm"]


def test_an_encrypted_file_with_and_without_its_key(tmp_path: Path) -> None:
    sealed = FIXTURES.parent / "sealed"
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_bytes((sealed / "key").read_bytes())
    path = str(sealed / "encrypted.acomm")
    assert run("dump", path, "--key-file", key).stdout == run("dump", PLAIN).stdout
    lines = run("dump", path).stdout.splitlines()
    assert json.loads(lines[0])["encrypted"] is True
    assert lines[7:] != run("dump", PLAIN).stdout.splitlines()[7:]
    key.write_bytes(bytes(32))
    assert isinstance(refused("dump", path, "--key-file", key), SealedStore)
    key.chmod(0o644)
    assert isinstance(refused("dump", path, "--key-file", key), KeyFileError)
