"""The home: what is made, with which modes, and that nothing leads out of it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relay.base import fsio
from relay.base.config import decode
from relay.base.errors import EXIT_STATE, HomeMissing, InvalidName, UnsafePath
from relay.base.home import MAX_OPEN_DIRS, Home, use_openat2
from tests.box import descriptors_below

TREE = [
    "agents",
    "agents/operator",
    "agents/operator/inbox",
    "agents/operator/inbox/.pending",
    "agents/operator/inbox/.read",
    "agents/operator/outbox",
    "agents/operator/outbox/.pending",
    "archive",
    "attachments",
    "config.json",
    "continuity",
    "journal",
    "logs",
    "run",
    "sessions",
    "store",
    "tmp",
]


@pytest.fixture(params=["by one call", "component by component"], autouse=True)
def way_to_open(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test holds where the kernel has openat2, and where it does not."""
    monkeypatch.setattr("relay.base.home._openat2", None)
    if request.param == "by one call":
        use_openat2()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def home(root: Path, tmp_path: Path) -> Iterator[Home]:
    """A home with alice in it; no descriptor of it is left open."""
    with Home.create(str(root)) as made:
        made.make_agent("alice")
        yield made
    assert descriptors_below(tmp_path) == []


def tree(root: Path) -> dict[str, int]:
    """Every path below the home and its mode."""
    return {
        str(path.relative_to(root)): stat.S_IMODE(path.lstat().st_mode) for path in root.rglob("*")
    }


# -- making it -----------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077], indirect=True)
def test_a_new_home_is_its_owners_alone(root: Path, umask: int) -> None:
    Home.create(str(root)).close()
    modes = tree(root)
    assert sorted(modes) == TREE
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert modes.pop("config.json") == 0o600
    assert set(modes.values()) == {0o700}


def test_made_again_it_is_completed_and_its_configuration_stays(root: Path) -> None:
    Home.create(str(root), b'{"lead": "ann"}').close()
    (root / "agents/operator/inbox/.read").rmdir()
    (root / "store").rmdir()
    (root / "logs").chmod(0o755)
    (root / "config.json").chmod(0o644)
    root.chmod(0o755)
    with Home.create(str(root)) as home:
        assert home.secure() == []
        assert decode(home.read_config()).lead == "ann"
    assert sorted(tree(root)) == TREE
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_a_directory_with_other_things_in_it_is_left_alone(root: Path) -> None:
    root.mkdir()
    (root / "thesis.txt").write_text("mine")
    root.chmod(0o755)
    with pytest.raises(UnsafePath, match="has other files in it") as caught:
        Home.create(str(root), b"{}")
    assert caught.value.hint
    with pytest.raises(HomeMissing) as none:
        Home(str(root))
    assert "relay init" not in none.value.hint  # which would refuse it
    assert os.listdir(root) == ["thesis.txt"]
    assert stat.S_IMODE(root.stat().st_mode) == 0o755
    with pytest.raises(UnsafePath):
        Home.create(str(root / "thesis.txt"), b"{}")
    assert (root / "thesis.txt").read_text() == "mine"


def test_an_empty_directory_or_what_a_shell_has_begun_becomes_a_home(tmp_path: Path) -> None:
    root = tmp_path / "a/b/home"
    Home.create(str(root), b"{}").close()  # with its parents
    (root / "config.json").unlink()
    with Home.create(str(root), b"{}") as home:  # agents/ may be there before the relay is
        assert home.read_config() == b"{}"
    (tmp_path / "empty").mkdir()
    Home.create(str(tmp_path / "empty"), b"{}").close()


@pytest.mark.damages  # an empty file in the place of the ledger
def test_modes_that_others_can_use_are_narrowed_and_named(home: Home, root: Path) -> None:
    assert home.secure() == []
    root.chmod(0o755)
    (root / "config.json").chmod(0o640)
    (root / "logs").chmod(0o701)
    (root / "ledger.db").write_bytes(b"")
    (root / "ledger.db").chmod(0o644)
    home.read_config()
    assert home.secure() == [".", "config.json", "ledger.db", "logs"]
    assert home.secure() == []
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    modes = tree(root)
    assert (modes["config.json"], modes["ledger.db"], modes["logs"]) == (0o600, 0o600, 0o700)


def test_what_is_not_ours_at_the_top_keeps_its_mode(home: Home, root: Path) -> None:
    (root / "notes.txt").write_text("mine")
    (root / "notes.txt").chmod(0o644)
    (root / "mine").mkdir()
    (root / "mine").chmod(0o755)
    assert home.secure() == []
    modes = tree(root)
    assert (modes["notes.txt"], modes["mine"]) == (0o644, 0o755)


@pytest.mark.parametrize("name", ["config.json", "agents"])
def test_a_directory_that_is_no_home_is_not_taken_for_one(root: Path, name: str) -> None:
    Home.create(str(root), b"{}").close()
    (root / name).rename(root / "elsewhere")
    with pytest.raises(HomeMissing, match="is not a relay home") as caught:
        Home(str(root))
    assert caught.value.exit_code == EXIT_STATE
    assert descriptors_below(root) == []


def test_where_there_is_nothing_there_is_no_home(root: Path) -> None:
    with pytest.raises(HomeMissing, match=f"there is no relay home at {root}"):
        Home(str(root))


def test_a_home_that_is_a_link_is_refused(home: Home, root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    with pytest.raises(UnsafePath):
        Home(str(tmp_path / "link"))


# -- agents --------------------------------------------------------------------------------


def test_every_directory_with_a_valid_name_is_an_agent(home: Home, root: Path) -> None:
    for name in ("bob", "Zoe-9", "__orchestrator__", "system", "9lives", ".hidden", "a.b"):
        (root / "agents" / name).mkdir()
    (root / "agents/file").write_bytes(b"")
    (root / "agents/linked").symlink_to("bob")
    assert sorted(home.agent_names()) == ["Zoe-9", "alice", "bob", "operator"]
    inodes = home.agent_inodes()
    assert inodes == {name: (root / "agents" / name).stat().st_ino for name in inodes}


def test_an_agent_is_made_and_completed(home: Home, root: Path) -> None:
    home.make_agent("bob")
    (root / "agents/bob/outbox").chmod(0o755)
    (root / "agents/bob/inbox/.pending").rmdir()
    home.make_agent("bob")
    assert tree(root / "agents/bob") == dict.fromkeys(
        ["inbox", "inbox/.pending", "inbox/.read", "outbox", "outbox/.pending"], 0o700
    )


@pytest.mark.parametrize("name", ["../evil", "a/b", "", ".", "..", "__orchestrator__", "a\0b"])
def test_a_name_that_no_agent_may_have_makes_nothing(home: Home, root: Path, name: str) -> None:
    before = tree(root.parent)
    with pytest.raises(InvalidName):
        home.make_agent(name)
    assert tree(root.parent) == before


def test_what_is_broken_below_an_agent_is_told_and_the_rest_is_made(home: Home, root: Path) -> None:
    (root / "agents/bob").mkdir()
    (root / "agents/bob/inbox").write_bytes(b"mine")
    problems = home.complete_agent("bob")
    assert len(problems) == 3 and all(isinstance(one, UnsafePath) for one in problems)
    assert (root / "agents/bob/outbox/.pending").is_dir()
    assert home.complete_agent("alice") == []


def test_an_agent_that_is_a_link_is_none(home: Home, root: Path, tmp_path: Path) -> None:
    (root / "agents/bob").symlink_to(tmp_path)
    with pytest.raises(UnsafePath):
        home.complete_agent("bob")


@pytest.mark.parametrize("part", ["", "outbox", "inbox", "inbox/.pending"])
def test_a_file_in_the_place_of_a_directory_is_refused(home: Home, root: Path, part: str) -> None:
    (root / "agents/bob" / part).parent.mkdir(parents=True, exist_ok=True)
    (root / "agents/bob" / part).write_bytes(b"mine")
    with pytest.raises(UnsafePath):
        home.make_agent("bob")
    assert (root / "agents/bob" / part).read_bytes() == b"mine"


def test_meta_json_as_far_as_it_can_be_read(home: Home, root: Path, tmp_path: Path) -> None:
    meta = root / "agents/alice/meta.json"
    assert home.read_meta("alice") is None
    meta.write_bytes(b'{"pid": 1}')
    assert home.read_meta("alice") == b'{"pid": 1}'
    meta.rename(tmp_path / "meta.json")
    meta.symlink_to(tmp_path / "meta.json")
    assert home.read_meta("alice") is None
    assert home.read_meta("nobody") is None
    assert home.read_meta("../alice") is None


# -- Dirs ----------------------------------------------------------------------------------


@pytest.mark.shows("ready 4.3")
@pytest.mark.parametrize("name", ["..", ".", "", "/", "/etc", "a/b", "alice/..", "../..", "a\0b"])
def test_no_name_leads_out_of_the_home(home: Home, name: str) -> None:
    with home.dirs() as dirs:
        with pytest.raises(UnsafePath):
            dirs.get(name)
        with pytest.raises(UnsafePath):
            dirs.get("agents", name)
        with pytest.raises(UnsafePath):
            dirs.ensure("archive", name)
        with pytest.raises(UnsafePath):
            dirs.ensure("archive", "x", name, "y")


PARTS = ("agents", "alice", "outbox", ".pending")
CALLS: list[tuple[str, Callable[[Home], object]]] = [
    ("logs", lambda home: home.secure()),
    ("config.json", lambda home: home.read_config()),
    ("agents", lambda home: list(home.agent_names())),
    ("agents", lambda home: home.make_agent("bob")),
    *(
        (f"agents/alice/{part}", lambda home: home.make_agent("alice"))
        for part in ("", "outbox", "outbox/.pending", "inbox", "inbox/.pending", "inbox/.read")
    ),
    *(("/".join(PARTS[:at]), lambda home: walk(home, "get")) for at in range(1, 5)),
    *(("/".join(PARTS[:at]), lambda home: walk(home, "ensure")) for at in range(1, 5)),
]


def walk(home: Home, verb: str) -> None:
    with home.dirs() as dirs:
        getattr(dirs, verb)(*PARTS)


@pytest.mark.shows("ready 4.4")
@pytest.mark.parametrize(("place", "call"), CALLS)
def test_a_link_anywhere_is_refused_and_not_followed(
    home: Home, root: Path, tmp_path: Path, place: str, call: Callable[[Home], object]
) -> None:
    outside = tmp_path / "outside"
    (root / place).rename(outside)
    (root / place).symlink_to(outside)
    before = tree(outside)
    with pytest.raises(UnsafePath):
        call(home)
    assert tree(outside) == before


def test_a_directory_is_opened_once_and_given_back(home: Home, root: Path) -> None:
    before = descriptors_below(root)
    with home.dirs() as dirs:
        fd = dirs.get("agents", "alice", "outbox")
        assert dirs.get("agents", "alice", "outbox") == fd
        assert os.path.samestat(os.fstat(fd), os.stat(home.path("agents/alice/outbox")))
    assert len(dirs) == 0
    assert descriptors_below(root) == before


def test_however_many_are_used_only_so_many_stay_open(home: Home, root: Path) -> None:
    before = len(descriptors_below(root))
    names = [f"{number:03}" for number in range(MAX_OPEN_DIRS + 50)]
    with home.dirs() as dirs:
        first = dirs.ensure("tmp", "first")
        for name in names:
            fsio.create("x", b"", dirs.ensure("tmp", name))
            assert dirs.get("tmp", "first") == first  # used all the time, it stays
        assert len(dirs) == MAX_OPEN_DIRS
        assert len(descriptors_below(root)) == before + MAX_OPEN_DIRS
        fsio.create("y", b"", dirs.get("tmp", names[0]))  # closed meanwhile: opened again
    assert len(descriptors_below(root)) == before
    assert sorted(os.listdir(root / "tmp" / names[0])) == ["x", "y"]


def test_without_a_name_it_is_the_home_itself(home: Home, root: Path) -> None:
    with home.dirs() as dirs:
        assert os.path.samestat(os.fstat(dirs.get()), root.stat())
        assert len(dirs) == 0


def test_a_home_is_its_descriptor_not_its_name(home: Home, root: Path, tmp_path: Path) -> None:
    root.rename(tmp_path / "moved")
    root.symlink_to("/etc")
    assert sorted(home.agent_names()) == ["alice", "operator"]


def test_a_home_that_cannot_be_completed_is_given_back(root: Path, tmp_path: Path) -> None:
    Home.create(str(root), b"{}").close()
    (root / "agents/operator").rename(tmp_path / "operator")
    (root / "agents/operator").symlink_to(tmp_path / "operator")
    with pytest.raises(UnsafePath):
        Home.create(str(root), b"{}")
    assert descriptors_below(tmp_path) == []
