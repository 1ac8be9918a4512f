"""`relay acomm`: check, dump, build, and the files that they must leave alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from relay.acomm import jsonl, model, store_file
from relay.base import crypto
from relay.base.errors import (
    FormatError,
    KeyFileError,
    MessageError,
    NotFound,
    RelayError,
    SealedStore,
)
from relay.cli import acomm as cli
from tests.acomm.support import BAD, FIXTURES, GOOD, golden, message, patch, small_store

PLAIN = str(FIXTURES / "plain.acomm")


def run(*args: object, stdin: str | bytes = "") -> Result:
    return CliRunner().invoke(cli.acomm, [str(arg) for arg in args], input=stdin)


def refused(*args: object, stdin: str | bytes = "") -> Exception:
    """The error that the command ends with, which the top-level prints as one line."""
    result = run(*args, stdin=stdin)
    assert isinstance(result.exception, RelayError), result.output
    assert "\n" not in str(result.exception)
    return result.exception


def test_good_files_are_ok() -> None:
    result = run("check", *(FIXTURES / f"{name}.acomm" for name in GOOD))
    assert (result.exit_code, result.stdout) == (0, "OK\n")
    assert result.stderr.count("warning: ") == 3


def test_each_problem_is_a_line_and_the_exit_code_says_so() -> None:
    paths = [FIXTURES / "bad" / f"{name}.acomm" for name in BAD]
    before = [path.read_bytes() for path in paths]
    result = run("check", *paths, FIXTURES / "plain.acomm")
    assert result.exit_code == 3
    *lines, last = result.stdout.splitlines()
    assert last == f"{len(BAD)} errors found"
    assert [line.split(" at ")[0] for line in lines] == [str(path) for path in paths]
    assert [path.read_bytes() for path in paths] == before


def test_a_wrong_index_and_a_missing_file_are_problems(tmp_path: Path) -> None:
    data = store_file.encode(small_store())
    at = data.index(b"\x05\0\0\0" + b"\x01\0\0\0", 96)
    (tmp_path / "lie.acomm").write_bytes(patch(data, at + 4 + 12 + 8, b"\x63"))
    result = run("check", tmp_path / "lie.acomm", tmp_path / "gone.acomm", tmp_path)
    assert result.exit_code == 3
    index, gone, folder, last = result.stdout.splitlines()
    assert "lie.acomm: index 1 (channel) entry 0: expected " in index
    assert gone == f"{tmp_path}/gone.acomm: No such file or directory"
    assert folder == f"{tmp_path} is not a regular file"
    assert last == "3 errors found"


def test_check_speaks_json() -> None:
    bad = str(FIXTURES / "bad" / "magic.acomm")
    result = run("check", "--json", FIXTURES / "version-2.acomm", bad)
    assert result.exit_code == 3
    found = json.loads(result.stdout)
    assert found["errors"] == 1
    assert found["files"][0]["ok"] is True
    assert found["files"][0]["warnings"] == [
        f"{FIXTURES}/version-2.acomm: version 2 is read as version 1"
    ]
    assert found["files"][1] == {
        "file": bad,
        "ok": False,
        "problems": [f"{bad} at 0: expected magic ACOMM001, found ACOMM002"],
        "warnings": [],
    }


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
    assert run("check", tmp_path / "new.acomm").stdout == "OK\n"


def test_dump_of_one_section() -> None:
    result = run("dump", PLAIN, "--section", "subscriptions")
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == [1, 2, 3]
    assert run("dump", PLAIN, "--section", "other").exit_code == 2
    assert tuple(jsonl.SECTIONS) == cli.SECTIONS


def test_dump_of_a_damaged_file_prints_nothing(tmp_path: Path) -> None:
    path = FIXTURES / "bad" / "message-type-9.acomm"
    assert isinstance(refused("dump", path), FormatError)
    assert run("dump", path).stdout == ""
    assert isinstance(refused("dump", tmp_path / "gone"), NotFound)


def test_build_from_a_file(tmp_path: Path) -> None:
    result = run("build", tmp_path / "new.acomm", "--from", FIXTURES / "expected.jsonl")
    assert result.exit_code == 0
    assert store_file.read(str(tmp_path / "new.acomm")) == golden()
    assert isinstance(refused("build", tmp_path / "x", "--from", tmp_path / "gone"), NotFound)


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


@pytest.mark.parametrize("name", BAD)
def test_build_never_replaces_what_is_no_store(tmp_path: Path, name: str) -> None:
    path = tmp_path / "store.acomm"
    before = (FIXTURES / "bad" / f"{name}.acomm").read_bytes()
    path.write_bytes(before)
    for option in ([], ["--force"]):
        refused("build", path, *option, stdin="\n".join(jsonl.to_lines(golden())))
        assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["store.acomm"]


def test_a_disk_that_refuses_is_one_line(tmp_path: Path) -> None:
    lines = "\n".join(jsonl.to_lines(small_store()))
    error = refused("build", tmp_path / "gone" / "new.acomm", stdin=lines)
    assert str(error) == f"{tmp_path}/gone/new.acomm: No such file or directory"


def test_help_needs_no_codec() -> None:
    code = (
        "import sys, relay.cli.acomm; "
        "sys.exit(any(name.startswith('relay.engine') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_encrypted_file_with_and_without_its_key(tmp_path: Path) -> None:
    sealed = FIXTURES.parent / "sealed"
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_bytes((sealed / "key").read_bytes())
    path = str(sealed / "encrypted.acomm")
    assert run("check", path).stdout == run("check", path, "--key-file", key).stdout == "OK\n"
    assert run("dump", path, "--key-file", key).stdout == run("dump", PLAIN).stdout
    lines = run("dump", path).stdout.splitlines()
    assert json.loads(lines[0])["encrypted"] is True
    assert lines[7:] != run("dump", PLAIN).stdout.splitlines()[7:]

    key.write_bytes(bytes(32))
    wrong = run("check", path, "--key-file", key)
    assert wrong.exit_code == 3
    assert "cannot be decrypted with this key\n1 error found" in wrong.stdout
    assert isinstance(refused("dump", path, "--key-file", key), SealedStore)
    key.chmod(0o644)
    assert isinstance(refused("dump", path, "--key-file", key), KeyFileError)
    assert isinstance(refused("check", path, "--key-file", key), KeyFileError)


@pytest.mark.shows("engine 6.15")
def test_signatures_are_checked_with_a_folder_of_keys(tmp_path: Path) -> None:
    private = bytes(range(32))
    good = crypto.sign(private, "alpha", "17-ab", "bob", b"hello")
    metadata = {"relay_id": "17-ab", "to": "bob"}
    forged = message(2, content=b"other", metadata=metadata, signature=good)
    channel = model.Channel(1, "team", model.ChannelType.GROUP, "alpha")
    store = model.StoreFile(0, 0, (channel,), (message(metadata=metadata, signature=good), forged))
    path = tmp_path / "signed.acomm"
    store_file.write(str(path), store)
    keys = tmp_path / "keys"
    keys.mkdir()
    assert run("check", path, "--keys", keys).stdout == "OK\n"  # nobody's key is known
    (keys / "alpha.pub").write_text(crypto.public_key(private).hex() + "\n")
    result = run("check", path, "--keys", keys)
    assert result.exit_code == 3
    assert result.stdout.splitlines() == [
        f"{path}: messages: the signature of message 2 is not alpha's, or it was changed",
        "1 error found",
    ]
    (keys / "beta.pub").write_text("no key")
    assert "beta.pub: expected 64 hex digits" in str(refused("check", path, "--keys", keys))
