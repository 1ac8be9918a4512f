"""Any steps in any order: a journal is a plain list that outlives its process and its power."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.journal.machine import JournalMachine

JournalMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, derandomize=True
)


class TestJournal(JournalMachine.TestCase):  # type: ignore[misc] # made by hypothesis
    """The rules of tests/journal/machine.py."""


pytestmark = pytest.mark.shows("journal 1.9")
