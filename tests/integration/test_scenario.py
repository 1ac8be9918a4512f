"""``scripts/scenario``: what an operator asks after a day with crashes, one command a question."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from relay.web.app import Web
from tests.procs import PROJECT

ANSWERS = {
    "Did the worker get this message?": "completed by worker: deployed, health check passed",
    "Did it get the one about the branch, whose id I do not have?": (
        r"failed: no such branch +delete the branch release-41"
    ),
    "Who has not read something?": r"filer +active .* 6 +1 ",
    "Which messages, and since when?": r"\d\d:\d\d:\d\d +operator +filer .*are you still there\?",
    "Who has not read the broadcast?": "delivered to filer, not read yet",
    "Who owes an answer?": r"filer .*please hand in|filer +command",
    "What was begun and never finished?": r"worker .*in.progress",
    "What was refused, and why?": r"filer .*there is no agent bbo",
    "What failed at the worker, and why?": r"worker .*no such branch",
    "What was given up?": r"filer .*no acknowledgment within 1 s, 2 attempts",
    "Who crashed?": r"worker .*process \d+ has exited",
    "What did the crash of the relay cost?": r"^OK$",
}

# In the page: an address, and what is there.
IN_THE_PAGE = {
    "/search?q=is:unread": "are you still there\\?",
    "/search?q=is:open": "in progress",
    "/failed": "no acknowledgment within 1 s, 2 attempts",
    "/agents": r"process \d+ has exited",
    "/health": "OK|nothing|no relay is running",
}


@pytest.mark.slow
def test_every_question_has_one_command_and_a_clear_answer(tmp_path: Path) -> None:
    """Three agents, one killed in the middle of a command, and a relay killed with SIGKILL."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "CI": "true"}
    environment.pop("RELAY_NO_WAIT")
    done = subprocess.run(
        [PROJECT / "scripts" / "scenario"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    asked = dict(re.findall(r"^== (.*\?)\n((?:.+\n)+)", done.stdout, re.MULTILINE))
    assert set(asked) == set(ANSWERS)
    for question, answer in ANSWERS.items():
        command, _, shown = asked[question].partition("\n")
        assert re.search(answer, shown, re.MULTILINE), f"{command}\n{shown}"
        assert "(exit code" not in shown, command
    (folder,) = tmp_path.glob("relay-scenario-*")
    try:
        check_page(folder / "home")
    finally:
        shutil.rmtree(folder)


def check_page(home: Path) -> None:
    """The page answers questions of each of its parts."""
    host, key = "127.0.0.1:8377", "a key"
    headers = {"authorization": f"Bearer {key}"}
    app = Web(str(home)).app(host, key)
    client = TestClient(app, base_url=f"http://{host}", headers=headers)
    for address, answer in IN_THE_PAGE.items():
        page = client.get(address)
        assert page.status_code == 200, (address, page.text)
        text = html.unescape(re.sub(r"<[^>]*>", " ", page.text))
        assert re.search(answer, " ".join(text.split())), f"{address}\n{text}"
