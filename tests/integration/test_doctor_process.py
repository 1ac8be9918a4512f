"""What the doctor says of the relay's own process: it hangs, it was killed, it left its socket."""

from __future__ import annotations

from pathlib import Path

from relay.base.home import Home
from relay.doctor import examine
from tests.procs import Relay


def test_the_doctor_names_a_relay_that_does_not_answer(stopped: int, home: Path) -> None:
    with Home(str(home)) as opened:
        (finding,) = examine(opened)
    assert (finding.what, finding.severity.value, finding.where) == ("process", "error", ".lock")
    assert finding.found == f"the relay, pid {stopped}, does not answer within 3 s: it is stopped"
    assert finding.advice == f"`kill -CONT {stopped}` lets it continue"


def test_a_relay_that_did_not_stop_by_itself_is_a_note(running: Relay, home: Path) -> None:
    pid = running.pid
    running.kill()
    with Home(str(home)) as opened:
        (found,) = [one for one in examine(opened) if one.where == ".lock"]
    assert found.severity.value == "note"
    assert found.found.startswith(f"the last relay, pid {pid}, did not stop by itself; its last")
    assert "the next start recovers its unfinished work" in found.advice
