"""What somebody wrote into a home by hand, and took care of: each is found, and nothing else.

tampered.toml says what is done to which message, and what is found; one run sees them all.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.audit.home_builder import HomeBuilder
from tests.audit.second_engine import Said
from tests.audit.tampering import known, tamper

pytestmark = [pytest.mark.shows("audit 2.1"), pytest.mark.shows("audit 2.3")]

KNOWN = known()


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Said]:
    """What one run finds in a home with all of them."""
    root = tmp_path_factory.mktemp("tampered")
    home = HomeBuilder(root / "home")
    tamper(home, KNOWN)
    yield home.says("reconcile")
    home.close()


def said_of(outcome: Said, table: str, column: str, message_id: str) -> str:
    """What a table says of a message."""
    said = [row[column] for row in outcome.tables[table] if row["message_id"] == message_id]
    return "; ".join(one for one in said if one)


@pytest.mark.parametrize("name", KNOWN)
def test_each_is_found_and_said(outcome: Said, name: str) -> None:
    one, message_id = KNOWN[name], f"1-{name}"
    found = sorted(check for check, of in outcome.checks.items() if message_id in of)
    assert found == one.finds
    for table, column, wanted in (
        ("reconcile", "class", one.class_),
        ("reconcile", "differs", one.differs),
        ("reconcile", "headers", one.headers),
        ("reconcile_deliveries", "differs", one.delivery),
    ):
        assert wanted in (None, said_of(outcome, table, column, message_id)), column


def test_nothing_else_is_found(outcome: Said) -> None:
    tampered = {f"1-{name}" for name, one in KNOWN.items() if one.finds}
    assert set().union(*outcome.checks.values()) == tampered


def test_the_finding_names_the_header_and_the_values(outcome: Said) -> None:
    (found,) = (row for row in outcome.findings if row["message_id"] == "1-forged_row")
    assert found["check"] == "reconcile.headers_differ"
    assert found["detail"]["headers"] == KNOWN["forged_row"].headers
    assert not any(name.endswith("_checksum") for name in found["detail"])
