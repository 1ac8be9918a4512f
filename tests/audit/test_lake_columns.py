"""The tables of the lake, as data."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay.audit import lake_columns


@pytest.mark.parametrize("table", lake_columns.TABLES)
def test_every_column_says_what_it_is(table: str) -> None:
    columns = lake_columns.TABLES[table]
    assert all(lake_columns.comment_of(one).strip() for one in columns)
    names = columns.names
    assert len(set(names)) == len(names)
    assert "home" not in names  # of the folder


def test_what_is_about_a_message_has_its_bucket() -> None:
    about = {table for table, columns in lake_columns.TABLES.items() if "bucket" in columns.names}
    assert about == {
        *("store_messages", "store_deliveries", "journal_sent", "originals", "ledger_messages"),
        *("ledger_deliveries", "ledger_offers", "ledger_attachment_refs", "ledger_audit_log"),
    }


def test_the_page_shows_every_table_with_its_columns() -> None:
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    for table, columns in lake_columns.TABLES.items():
        if not table.startswith(lake_columns.LEDGER_PREFIX):
            assert f"| `{table}` | {', '.join(columns.names)} |" in page
