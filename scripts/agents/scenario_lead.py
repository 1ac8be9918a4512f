"""The lead of the scenario: asks, commands, publishes, and waits for the answers."""

from __future__ import annotations

import sys

from agent_sdk import Agent, Refused

with Agent("lead") as lead:
    for channel in ("build", "orders"):
        lead.subscribe(channel, "replies.#", timeout_s=60)
    report = lead.attach(b"error: 3 tests failed\n" * 100)
    print("branch:", lead.query("worker", "which branch is deployed?", 60).body)
    lead.send("#build", "build of main is green", topic="build.main")
    lead.send("*", "release 42 is out")
    done = lead.request(
        "worker", "deploy release 42", 60, attachments=[report], thread="release-42"
    )
    print("deployed:", done.body.splitlines()[1])
    try:
        lead.request("worker", "delete the branch release-41", 60)
    except Refused as refused:
        print("refused:", refused)
    lead.send("filer", "please hand in your report", kind="command")
    lead.send("#orders", "sign here", topic="contract")
    lead.send("worker", "rebuild everything", kind="command")
    for message in lead.messages(timeout_s=60):
        if message.sender == "worker" and "in_progress" in message.body:
            sys.exit("the worker began, and crashed")
