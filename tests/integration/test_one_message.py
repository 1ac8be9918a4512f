"""One plain message through one turn of the loop: the modules it enters, the values it becomes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

from relay.base.message import MessageFile
from relay.delivery.intake_queue import Hint
from relay.delivery.values import Inbound, OutboxFile, Plan
from tests.box import Box

PROJECT = Path(__file__).parents[2]
# They may only become fewer: the functions that a turn without a message does not call.
MOST_MODULES, MOST_IN_DELIVERY = 41, 14
MOST_VALUES, MOST_FIELDS = 7, 10


def functions_of_a_turn(box: Box) -> set[tuple[str, str]]:
    """(module, function) of the relay entered by one turn of the loop."""
    entered: set[tuple[str, str]] = set()
    root = f"{PROJECT / 'relay'}/"

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(root):
            entered.add((name.removeprefix(root), frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        box.tick()
    finally:
        sys.setprofile(None)
    return entered


def modules(functions: set[tuple[str, str]]) -> set[str]:
    return {module for module, _ in functions}


def test_a_plain_message_enters_few_modules(box: Box) -> None:
    box.send("alice", "TO: bob\n\nwarm")
    box.tick(2)
    idle = functions_of_a_turn(box)
    box.drop("alice", "TO: bob\n\nhi")
    turn = functions_of_a_turn(box)
    assert box.bodies("bob") == ["warm", "hi"]
    entered = modules(turn - idle)
    assert len(entered) <= MOST_MODULES, sorted(entered)
    in_delivery = {name for name in entered if name.startswith("delivery/")}
    assert len(in_delivery) <= MOST_IN_DELIVERY, sorted(in_delivery)


def test_it_becomes_few_values_of_few_fields() -> None:
    page = (PROJECT / "docs" / "architecture.md").read_text()
    table = page.split("## One message\n", 1)[1].split("\n## ", 1)[0]
    values = re.findall(r"^\| `(\w+)` \| ", table, re.M)
    known = [Hint, OutboxFile, MessageFile, Inbound, Plan]
    assert [one for one in values if one != "Message"] == [one.__name__ for one in known]
    assert len(values) <= MOST_VALUES
    for one in (Inbound, Plan):
        assert len(one.__struct_fields__) <= MOST_FIELDS
