"""docs/shown.toml: every statement has a test or a command, and every mark a statement."""

from __future__ import annotations

from scripts.shown_docs import marked, page, statements


def test_every_mark_names_a_statement() -> None:
    known = {one for texts in statements().values() for one in texts}
    assert set(marked()) - known == set()


def test_every_statement_has_a_test_or_a_command() -> None:
    tests, printed = marked(), page()
    for texts in statements().values():
        for one, text in texts.items():
            assert one in tests or "`./scripts/" in text or "`tests/" in text, one
            assert f"| {one} | {text} |" in printed


def test_the_readiness_checklist_is_complete() -> None:
    sections = [len(texts) for name, texts in statements().items() if "readiness" in name]
    assert sections == [6, 5, 5, 6, 5, 5]
