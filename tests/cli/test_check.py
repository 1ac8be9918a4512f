"""`relay check`: golden files are OK, a broken one is a line with its place and a remedy."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sqlite3
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_sdk import Agent
from relay.acomm import model, store_file
from relay.base import archive_pack, crypto
from relay.base.config import Config, SearchSettings
from relay.base.home import LEDGER, STORE
from relay.cli import run
from relay.journal.format import FOOTER
from relay.journal.segment import segment_path
from relay.search.index import Index
from tests.acomm.support import BAD, FIXTURES, GOOD, message, patch, small_store
from tests.box import Box
from tests.journal.manifest_support import FIXTURES as AOF
from tests.journal.manifest_support import STREAM_1, STREAM_2

Check = Callable[..., tuple[int, list[str], str]]
ADVICE = "restore it from a backup; `relay doctor` says what the next start makes of it"


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Check:
    """`relay check …`: its exit code, the lines of its output, and stderr."""

    def invoke(*words: object) -> tuple[int, list[str], str]:
        code = run(["check", *map(str, words)])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return invoke


# -- golden files and broken ones --------------------------------------------------------------


def test_every_golden_file_is_ok(check: Check) -> None:
    files = {
        **{FIXTURES / f"{name}.acomm": "store" for name in GOOD},
        FIXTURES.parent / "sealed" / "encrypted.acomm": "store",
        STREAM_1: "journal stream",
        STREAM_1 / "manifest": "journal manifest",
        STREAM_2: "journal stream",
        **{path: "journal segment" for path in (STREAM_1 / "segments").iterdir()},
        **{path: "manifest chunk" for path in (STREAM_2 / "manifest").iterdir()},
        **{path: "catalog snapshot" for path in (STREAM_2 / "snapshot").iterdir()},
    }
    code, lines, warnings = check(*files)
    assert lines == [f"{path}: OK, {kind}" for path, kind in files.items()]
    assert code == 0 and warnings.count("is not known: skipped") == 2


def test_every_broken_store_is_a_line_with_its_place(check: Check) -> None:
    paths = [FIXTURES / "bad" / f"{name}.acomm" for name in BAD]
    before = [path.read_bytes() for path in paths]
    code, lines, _ = check(*paths, FIXTURES / "plain.acomm")
    assert code == 3 and lines.pop() == f"{FIXTURES}/plain.acomm: OK, store"
    for path, line in zip(paths, lines, strict=True):
        assert re.fullmatch(rf"{path} at [0-9]+: expected .+, found .+; {re.escape(ADVICE)}", line)
    assert [path.read_bytes() for path in paths] == before


BROKEN_JOURNAL_FILES = """\
torn-tail.seg at 118: expected crc32 0234843c, found 1669b614: a torn tail of 36 bytes;
flipped-record-header.seg at 52: expected crc32 3c52abbf, found 25fe24a4; offsets [3042,
footer-crc.seg at 2492: expected segment_crc64 0000000000000000, found dcb7977a0bb36c91; `relay
manifest-chunk-crc.mlog at 48: expected chunk crc64 6b9ad8cf7d9c2f9f, found 62fb8735897301f3; `relay
manifest-version-9.mlog at 8: expected version 1, found 9; `relay journal
"""


@pytest.mark.shows("journal 1.11")
def test_every_broken_file_of_a_journal_is_a_line_with_its_place(check: Check) -> None:
    expected = BROKEN_JOURNAL_FILES.splitlines()
    files = [AOF / "bad" / line.split()[0] for line in expected]
    assert {AOF / "bad" / "expected.json", *files} == set((AOF / "bad").iterdir())
    code, lines, _ = check(*files)
    assert code == 3
    for line, begin in zip(lines, expected, strict=True):
        assert line.startswith(f"{AOF}/bad/{begin}")


def test_the_magic_decides_not_the_name(check: Check, tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "plain.acomm", tmp_path / "x.seg")
    shutil.copy(STREAM_1 / "segments" / f"{0:020d}.seg", tmp_path / f"{0:020d}.seg.bad")
    assert check(tmp_path / "x.seg", tmp_path / f"{0:020d}.seg.bad")[:2] == (
        0,
        [f"{tmp_path}/x.seg: OK, store", f"{tmp_path}/{0:020d}.seg.bad: OK, journal segment"],
    )


STRANGE = """\
gone.acomm: No such file or directory; check the name
empty: empty; name a home, a journal stream, or one of their files
empty.acomm at 0: expected at least 136 bytes, found 0 bytes; restore it from a backup;
text: its first bytes, 68656c6c6f, are of no file of a relay; name a home,
x.seg at 0: expected the magic of a segment, a manifest chunk or a snapshot, found 68656c6c6f;
x.db is damaged (file is not a database); name a ledger's backup
folder: neither a home nor a journal stream; name a home,
pipe: not a regular file; name a home,
"""


def test_anything_else_is_one_line(
    check: Check, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("text", "x.seg", "x.db"):
        (tmp_path / name).write_text("hello")
    for name in ("empty", "empty.acomm"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    names = [line.split()[0].rstrip(":") for line in STRANGE.splitlines()]
    code, lines, errors = check(*(tmp_path / name for name in names))
    assert (code, errors) == (3, "")
    for line, expected in zip(lines, STRANGE.splitlines(), strict=True):
        assert line.startswith(f"{tmp_path}/{expected}")
    for name in names:
        assert run(["dump", str(tmp_path / name)]) in (1, 3)
        out, error = capsys.readouterr()
        assert not out.splitlines()[1:]  # the heads of columns
        assert error.count("\n") == 1 and str(tmp_path / name) in error


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_of_another_user(check: Check, tmp_path: Path) -> None:
    (tmp_path / "x.seg").touch(0)
    line = f"{tmp_path}/x.seg: Permission denied; `ls -ld` shows who may read it"
    assert check(tmp_path / "x.seg")[:2] == (3, [line])


def test_programs_read_a_row_for_each_file(check: Check) -> None:
    bad = str(FIXTURES / "bad" / "magic.acomm")
    code, lines, _ = check("--json", FIXTURES / "version-2.acomm", bad)
    assert code == 3
    assert [json.loads(line) for line in lines] == [
        {
            "file": f"{FIXTURES}/version-2.acomm",
            "kind": "store",
            "ok": True,
            "problems": [],
            "warnings": [f"{FIXTURES}/version-2.acomm: version 2 is read as version 1"],
        },
        {
            "file": bad,
            "kind": "store",
            "ok": False,
            "problems": [f"{bad} at 0: expected magic ACOMM001, found ACOMM002; {ADVICE}"],
            "warnings": [],
        },
    ]


# -- a home, and the files in it ---------------------------------------------------------------


@pytest.mark.damages
@pytest.mark.box("alice", "bob", config=Config(search=SearchSettings(index=True)))
def test_a_home_and_every_file_in_it(box: Box, check: Check) -> None:
    box.send_many(3, flush_every=3)
    (box.root.parent / "report").write_bytes(b"report")
    with Agent("alice", box.root) as alice:
        digest = alice.attach(box.root.parent / "report").removeprefix("sha256:")
    folder = box.path("attachments", digest[:2])
    box.close()
    files = [box.path(name) for name in (STORE, LEDGER)] + [folder / digest]
    code, lines, _ = check(box.root, *files)
    assert code == 0, lines
    home, store, ledger, attachment = lines
    assert (home, store) == (f"{box.root}: OK, home", f"{files[0]}: OK, store")
    assert ledger.startswith(f"{files[1]}: OK, ledger, schema ") and "3 messages" in ledger
    assert attachment == f"{folder / digest}: OK, attachment"

    (folder / digest).write_bytes(b"spoiled")
    wrong = f"attachments: {folder / digest}: expected SHA-256 {digest}, found "
    code, (line,), _ = check(box.root)
    assert code == 3 and line.startswith(wrong)
    code, (line, last), _ = check("--home", box.root)
    assert code == 3 and line.startswith(wrong) and last == "1 problem found"
    code, (line,), _ = check(folder / digest)
    assert code == 3 and f"attachments: {line}".startswith(wrong)


@pytest.mark.damages
def test_a_backup_is_compared_with_its_list(box: Box, check: Check, tmp_path: Path) -> None:
    box.send_many(3, flush_every=3)
    box.close()
    copy = tmp_path / "monday"
    assert run(["--home", str(box.root), "backup", str(copy)]) == 0
    check()  # takes what backup printed
    assert check(copy)[:2] == (0, [f"{copy}: OK, home"])
    one, other, _ = sorted(copy.glob("agents/bob/inbox/*.msg"))
    one.write_bytes(one.read_bytes() + b"!")
    other.unlink()
    code, lines, _ = check(copy)
    advice = "the backup is damaged: restore another one"
    assert code == 3 and lines[0].startswith(f"backup: {one}: expected SHA-256 ")
    assert lines[1] == f"backup: {other}: No such file or directory; {advice}"


@pytest.mark.damages
def test_a_damaged_ledger(box: Box, check: Check) -> None:
    box.send_many(3, flush_every=3)
    box.close()
    with contextlib.closing(sqlite3.connect(box.path(LEDGER))) as db, db:
        db.execute("UPDATE messages SET status = 'failed', last_error = NULL WHERE rowid = 1")
        ((message_id,),) = db.execute("SELECT message_id FROM messages WHERE rowid = 1")
    db.close()
    code, (line,), _ = check(box.path(LEDGER))
    assert code == 3
    assert line.startswith(f"{box.path(LEDGER)}: {message_id} is failed without a reason; restore")
    assert f"with `relay --home {box.root} ledger restore FILE`" in line  # the home that it is in
    copy = box.root.parent / "copy.db"
    shutil.copy(box.path(LEDGER), copy)
    assert "with `relay ledger restore FILE`" in check(copy)[1][0]
    assert "with `relay --home /other ledger restore" in check(copy, "--home", "/other")[1][0]


def test_a_search_index_and_a_packed_day(box: Box, check: Check) -> None:
    folder, index = box.path("archive", "2026-01-01", "alice"), box.path("search.db")
    folder.mkdir(parents=True)
    (folder / "1767225600000000000-01.msg").write_text("TO: bob\n\nhi")
    *_, _ = archive_pack.pack(box.home, "2026-01-01")
    pack = box.path("archive", "2026-01-01.tar.zst")
    Index(str(index), writable=True).close()
    assert check(index, pack)[:2] == (0, [f"{index}: OK, search index", f"{pack}: OK, packed day"])
    pack.write_bytes(pack.read_bytes()[:-9])
    index.write_bytes(index.read_bytes()[:5000])
    code, (one, other), _ = check(index, pack)
    assert code == 3 and one.startswith(f"{index}") and "fills it again" in one
    assert other.startswith(f"{pack} at 0: expected a tar packed with zstd, found ")


# -- what only a store, or only a stream, can have ---------------------------------------------


def test_a_wrong_index(check: Check, tmp_path: Path) -> None:
    data = store_file.encode(small_store())
    at = data.index(b"\x05\0\0\0" + b"\x01\0\0\0", 96)
    (tmp_path / "lie.acomm").write_bytes(patch(data, at + 4 + 12 + 8, b"\x63"))
    code, (line,), _ = check(tmp_path / "lie.acomm")
    assert code == 3 and "lie.acomm: index 1 (channel) entry 0: expected " in line


def test_an_encrypted_store_needs_its_key_for_signatures_alone(
    check: Check, tmp_path: Path
) -> None:
    path, key = FIXTURES.parent / "sealed" / "encrypted.acomm", tmp_path / "key"
    key.touch(0o600)
    shutil.copyfile(FIXTURES.parent / "sealed" / "key", key)
    assert check(path)[:2] == check(path, "--key-file", key)[:2] == (0, [f"{path}: OK, store"])
    key.write_bytes(bytes(32))
    code, (line,), _ = check(path, "--key-file", key)
    assert code == 3 and "cannot be decrypted with this key" in line
    key.chmod(0o644)
    code, lines, error = check(path, "--key-file", key)
    assert (code, lines) == (5, []) and str(key) in error


@pytest.mark.shows("engine 6.15")
def test_signatures_are_checked_with_a_folder_of_keys(check: Check, tmp_path: Path) -> None:
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
    assert check(path, "--keys", keys)[:2] == (0, [f"{path}: OK, store"])  # nobody's key is known
    (keys / "alpha.pub").write_text(crypto.public_key(private).hex() + "\n")
    code, (line,), _ = check(path, "--keys", keys)
    assert code == 3
    assert "messages: the signature of message 2 is not alpha's, or it was changed; " in line
    (keys / "beta.pub").write_text("no key")
    code, _, error = check(path, "--keys", keys)
    assert code == 1 and "beta.pub: expected 64 hex digits; a public key is 32 bytes" in error


@pytest.mark.shows("journal 1.10")
@pytest.mark.parametrize(
    ("at", "value", "expected"),
    [
        (24, 8, "ext_id 7 by the manifest, found 8"),
        (32, 9, "flags 1 by the manifest, found 9"),
    ],
)
def test_a_sealed_footer_is_compared_with_the_manifest(
    check: Check, stream: Path, at: int, value: int, expected: str
) -> None:
    path = Path(segment_path(str(stream), 0))
    data = bytearray(path.read_bytes())
    begin = len(data) - FOOTER.size + at
    data[begin : begin + 8] = struct.pack("<Q", value)
    path.write_bytes(data)
    code, lines, _ = check(stream)
    assert code == 3 and lines[0].startswith(f"{path} at {begin}: expected {expected}")
