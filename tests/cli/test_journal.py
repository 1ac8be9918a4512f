"""`relay journal` while no relay runs; what one is asked: tests/integration/test_journal_orders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from relay.base import fsio
from relay.base.clock import Clock
from relay.base.config import Config, JournalSettings
from relay.base.errors import EXIT_STATE, AlreadyRunning, NotFound, RelayError
from relay.base.home import BASE, STORE
from relay.cli import cli
from relay.cli.daemon import init
from relay.daemon.home_journal import covered_offset
from relay.journal.journal import Append, Journal
from relay.journal.manifest_reader import checkpoint_offsets
from relay.journal.segment import SegmentPolicy, segment_path
from tests.box import MakeBox
from tests.journal.payloads import payload

pytestmark = pytest.mark.damages  # its homes have a journal, and no store beside it


def run(home: Path, *args: object) -> Result:
    """`relay --home HOME journal …`."""
    return CliRunner().invoke(cli, ["--home", str(home), "journal", *map(str, args)])


def lines(result: Result) -> list[dict[str, Any]]:
    """Of `--json`."""
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return [json.loads(line) for line in result.stdout.splitlines()]


def refused(result: Result) -> RelayError:
    """The error that ends a command; the top level prints it as one line."""
    assert isinstance(result.exception, RelayError), result.output
    return result.exception


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home whose journal has three sealed segments; two checkpoints cover two of them."""
    root = tmp_path / "home"
    assert CliRunner().invoke(init, ["--home", str(root)]).exit_code == 0
    stream_dir = root / "journal" / f"{1:020d}"
    stream_dir.parent.mkdir(mode=0o700, exist_ok=True)
    warnings: list[str] = []
    journal = Journal.open(str(stream_dir), 1, Clock(), SegmentPolicy(), warnings.append)
    for number in range(3):
        journal.append([Append(payload(100 * number + n)) for n in range(100)])
        journal.seal()
        journal.note_checkpoint(journal.durable)
    journal.append([Append(b"the last")])
    journal.commit()
    journal.close()
    assert warnings == []
    return root


def records(home: Path) -> list[bytes]:
    """Everything in the journal, with no object store named."""
    journal = Journal.open(str(home / "journal" / f"{1:020d}"), 1, Clock(), SegmentPolicy(), print)
    try:
        return [record.payload for record in journal.read()]
    finally:
        journal.close()


def configure(home: Path, **settings: Any) -> None:
    config = Config(journal=JournalSettings(**settings))
    (home / "config.json").write_bytes(msgspec.json.encode(config))


def test_status_shows_where_each_segment_is(home: Path) -> None:
    rows = lines(run(home, "status", "--json"))
    assert [(row["segment"], row["sealed"], row["tiers"]) for row in rows] == [
        (0, True, [0]),
        (1, True, [0]),
        (2, True, [0]),
        (3, False, [0]),
    ]
    assert rows[0]["end_offset"] == rows[1]["base_offset"]
    table = run(home, "status").stdout.splitlines()
    assert table[0].split() == ["SEGMENT", "BASE", "END", "BYTES", "COMPRESSED", "TIERS", "FAILED"]
    assert table[4].split()[:3] == ["3", str(rows[3]["base_offset"]), "active"]


def test_down_to_tier_2_and_back(home: Path, tmp_path: Path) -> None:
    before = records(home)
    store = tmp_path / "tier2"
    store.mkdir()
    assert run(home, "move", "--to", 1, "--copy", 1).stdout == "compressed segment 1\n"
    copied = lines(run(home, "move", "--to", 1, "--copy", "--json"))
    assert [(row["segment"], row["done"]) for row in copied] == [
        (0, "compressed"),
        (2, "compressed"),
    ]
    # The third is covered by one checkpoint alone: it stays where it is as well.
    assert run(home, "move", "--to", 2, "--objects", store).stdout.splitlines() == [
        *(f"uploaded segment {n}" for n in (0, 1, 2)),
        *(f"evicted segment {n}" for n in (0, 1, 0, 1)),  # from segments/, then from warm/
    ]
    rows = lines(run(home, "status", "--json"))
    assert [row["tiers"] for row in rows] == [[2], [2], [0, 1, 2], [0]]
    assert rows[0]["key"] == f"{1:020d}/{0:020d}.seg.zst"
    back = run(home, "move", "--to", 0, "--objects", store)
    assert back.stdout == "hydrated segment 0\nhydrated segment 1\n"
    assert records(home) == before
    # To Tier 1 means a copy there, also of what Tier 2 has: they had gone, to Tier 2 alone.
    warm = run(home, "move", "--to", 1, "--objects", store).stdout.splitlines()
    assert warm == [f"{done} segment {n}" for done in ("compressed", "evicted") for n in (0, 1)]
    rows = lines(run(home, "status", "--json"))
    assert [row["tiers"] for row in rows] == [[1, 2], [1, 2], [0, 1, 2], [0]]


def test_named_segments_move_as_far_as_they_may(home: Path) -> None:
    named = run(home, "move", "--to", 1, 1, 2)
    assert named.stdout == "compressed segment 1\ncompressed segment 2\nevicted segment 1\n"
    assert "segment 2 cannot be evicted: two checkpoints have to cover it first" in named.stderr
    again = run(home, "move", "--to", 1, 1)
    assert (again.stdout, again.stderr) == ("", "nothing to do\n")
    assert [row["tiers"] for row in lines(run(home, "status", "--json"))] == [[0], [1], [0, 1], [0]]


def test_what_fails_is_a_line_and_the_next_is_tried(home: Path) -> None:
    path = Path(segment_path(str(home / "journal" / f"{1:020d}"), 1))
    path.write_bytes(path.read_bytes()[:-1] + b"\7")
    path.write_bytes(path.read_bytes()[:900] + b"\7" + path.read_bytes()[901:])
    result = run(home, "move", "--to", 1, "--copy")
    assert result.stdout == "compressed segment 0\ncompressed segment 2\n"
    assert result.stderr.startswith(f"segment 1: {path} at ") and result.stderr.count("\n") == 1
    assert result.return_value == 1 if result.return_value is not None else True
    (failed,) = [row["failed"] for row in lines(run(home, "status", "--json")) if row["failed"]]
    assert failed == "CompressionFailed (codec, once)"


@pytest.fixture
def with_store(make_box: MakeBox) -> Path:
    """The home of a relay that is down: a journal, a checkpoint and the one before."""
    journal = JournalSettings(segment_bytes=4096, compress_segments=False)
    box = make_box("alice", "bob", name="box", config=Config(journal=journal))
    box.send_many(40, flush_every=10)
    box.close()
    return box.root


def test_prune_plans_first(with_store: Path) -> None:
    home = with_store
    assert len(checkpoint_offsets(str(home / "journal" / f"{1:020d}"))) == 2
    before = lines(run(home, "status", "--json"))
    with fsio.locked(str(home / ".lock")):  # a relay may run
        rows = lines(run(home, "prune", "--keep-bytes", "0B", "--dry-run", "--json"))
    assert [(row["segment"], row["would"]) for row in rows[:2]] == [(0, "prune"), (1, "prune")]
    said = run(home, "prune", "--keep-bytes", "0B", "--dry-run").stdout.splitlines()
    assert said[0].startswith("would prune segment 0: ") and "0 are kept" in said[0]
    assert lines(run(home, "status", "--json")) == before
    assert not (home / BASE).exists()
    assert run(home, "prune", "--keep-age", "1d").stdout == ""
    pruned = run(home, "prune", "--keep-bytes", "0B").stdout.splitlines()
    assert pruned == [f"pruned segment {row['segment']}" for row in rows]
    left = lines(run(home, "status", "--json"))
    assert left == before[len(rows) :]
    assert (
        left[0]["base_offset"] <= covered_offset(str(home / BASE)) < left[-1]["base_offset"] + 4096
    )
    assert covered_offset(str(home / BASE)) == covered_offset(str(home / (STORE + ".prev")))


def test_what_is_kept_stands_in_the_configuration(with_store: Path) -> None:
    configure(with_store, keep_mib=1)
    nothing = run(with_store, "prune", "--dry-run")  # it has no MiB yet
    assert (nothing.stdout, nothing.stderr) == ("", "nothing to delete\n")
    would = run(with_store, "prune", "--dry-run", "--keep-bytes", "1B").stdout
    assert "would prune segment 0: " in would
    configure(with_store, keep_age_s=86_400)
    assert run(with_store, "prune", "--dry-run").stdout == ""
    assert "would prune" in run(with_store, "prune", "--dry-run", "--keep-bytes", "0B").stdout


def test_nothing_to_do_and_no_object_store_are_said(home: Path) -> None:
    assert run(home, "move", "--to", 1, "--copy").exit_code == 0
    again = run(home, "move", "--to", 1, "--copy")
    assert (again.exit_code, again.stdout, again.stderr) == (0, "", "nothing to do\n")
    assert run(home, "move", "--to", 1, "--copy", "--json").output == ""
    nowhere = run(home, "move", "--to", 2, "--copy")
    assert nowhere.exit_code == 2 and "no object store is configured" in nowhere.output
    assert all(row["failed"] is None for row in lines(run(home, "status", "--json")))


def test_a_running_relay_is_not_asked_for_what_no_store_is_named_for(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said that it had begun, and no command showed that nothing had come of it."""
    (tmp_path / "tier2").mkdir()
    run(home, "move", "--to", 2, "--objects", tmp_path / "tier2")
    monkeypatch.setattr("relay.cli.journal.is_served", lambda home: True)
    for words in ([], [1]):
        asked = run(home, "move", "--to", 0, *words)
        assert asked.exit_code == 2 and "no object store is configured" in asked.output


def test_prune_asks_what_to_keep(home: Path) -> None:
    result = run(home, "prune")
    assert result.exit_code == 2 and "--keep-age or --keep-bytes" in result.stderr


def test_seal_ends_the_active_segment(home: Path) -> None:
    assert run(home, "seal").stdout == "sealed segment 3\n"
    result = run(home, "seal")
    assert (result.stdout, result.stderr) == ("", "segment 4 is empty: nothing to seal\n")


def test_while_another_process_has_the_journal_only_status_works(home: Path) -> None:
    with fsio.locked(str(home / ".lock")):
        assert len(lines(run(home, "status", "--json"))) == 4
        for verb in (
            ["seal"],
            ["move", "--to", 0],
            ["move", "--to", 2, "--objects", home],
            ["prune", "--keep-age=1d"],
        ):
            error = refused(run(home, *verb))
            assert isinstance(error, AlreadyRunning) and error.exit_code == EXIT_STATE
            assert "another process has locked the home" in str(error)


def test_a_segment_that_is_not_there_is_named(home: Path) -> None:
    assert "segment 9 is not in the stream" in str(
        refused(run(home, "move", "--to", 1, "--copy", 9))
    )
    assert "segment 3 is not sealed" in str(refused(run(home, "move", "--to", 1, 3)))


def test_without_a_journal_it_says_so(tmp_path: Path) -> None:
    assert CliRunner().invoke(init, ["--home", str(tmp_path / "h")]).exit_code == 0
    for words in (["status"], ["move", "--to", 1]):
        error = refused(run(tmp_path / "h", *words))
        assert isinstance(error, NotFound) and "no journal" in str(error)
