"""`relay doctor` on what waits in .pending, and on what one large file left in the journal."""

from __future__ import annotations

import os
import time

from tests.box import Box
from tests.integration.test_doctor_checks import box, found, mend, one, pytestmark

__all__ = ["box", "pytestmark"]  # a home of the same kind


def test_a_message_left_in_pending_is_named_and_not_removed(box: Box) -> None:
    pending = box.path("agents/alice/outbox/.pending/1700000000000000099-99.msg")
    pending.write_text("TO: bob\n\nhal")
    os.utime(pending, (time.time() - 40, time.time() - 40))
    assert f"not sent, in .pending for more than 30 s: {pending.relative_to(box.root)}; " in str(
        one(box)
    )
    os.utime(pending, (time.time() - 4000, time.time() - 4000))
    assert "rename it into the outbox" in str(one(box)) and not one(box).repairs
    assert mend(box) == [] and pending.exists()


def test_a_segment_with_surplus_zeros_is_named(box: Box) -> None:
    segment = sorted(box.path("journal").glob("*/segments/*.seg"))[-1]
    os.truncate(segment, 150 << 20)
    finding = one(box)
    assert f"{segment} has 149 MiB of zeros after its last record" in str(finding)
    assert not finding.repairs
    box.open()
    box.stop()
    assert found(box) == []
